"""Estimates on a CPU what an LM head and a training step need on a GPU. Nothing runs on a GPU; nothing is computed.

    python -m tools.roofline

prints tables in Markdown; docs/howto/speed.md holds them. Tensors of the meta device have shapes and no numbers, so
every operation of a real forward and backward pass is seen, at any size. Each is one kernel, which takes the longest of
three times: its bytes at the card's bandwidth, its matrix products at the card's rate, and a launch. Kernels run one
after the other. What a cache keeps between two kernels, and what a kernel loses against these rates, is left out.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, LlamaConfig, LlamaModel

from trimtab_lm.tokens import scores
from trimtab_lm.tokens.layout import TokenGroup, cheapest_split, split

FREE = ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "lift_fresh")
OVERWRITES = ("copy_", "fill_", "zero_")
CHOOSES = ("gather", "index", "index_select", "embedding", "scatter_", "scatter_add_", "index_put_")


class Card(NamedTuple):
    """What a GPU can do at most.

    Args:
        name: for the tables.
        bandwidth: of its memory, in bytes a second.
        rate: of bfloat16 matrix products, in floating-point operations a second.
        launch: the seconds of the shortest kernel.
        memory: in bytes.
    """

    name: str
    bandwidth: float
    rate: float
    launch: float
    memory: int


H100 = Card("H100 (3.0 TB/s, 650 TFLOP/s in bfloat16, 4 us a launch, 80 GiB)", 3.0e12, 650e12, 4e-6, 80 * 2**30)


class Roofline(TorchDispatchMode):
    """Counts the kernels, bytes, floating-point operations and seconds of what runs inside the block.

    Args:
        card: the GPU.
    """

    def __init__(self, card: Card = H100):
        super().__init__()
        self.card, self.kernels, self.bytes, self.flops, self.seconds = card, 0, 0, 0, 0.0

    def add(self, size: int, flops: int = 0) -> None:
        """Counts one kernel that moves `size` bytes."""
        self.kernels, self.bytes, self.flops = self.kernels + 1, self.bytes + size, self.flops + flops
        self.seconds += max(size / self.card.bandwidth, flops / self.card.rate, self.card.launch)

    @property
    def products(self) -> float:
        """The seconds of the matrix products alone, at the card's rate."""
        return self.flops / self.card.rate

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = function.overloadpacket
        if not function.is_view and packet.__name__ not in FREE:
            self.add(moved(packet.__name__, args, kwargs, result), flops(packet, args, kwargs, result))
        return result


def moved(name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Returns the bytes that one operation reads and writes, each of its tensors once.

    Args:
        name: of the operation; a trailing underscore says that it changes its first argument.
        args, kwargs: what it was called with; `out` is written and not read.
        result: what it returned.
    """
    written = tensors(result)
    read = tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
    if name in CHOOSES:  # the chosen numbers, and where they are
        places = [x for x in read if not x.is_floating_point()]
        chosen = max(x.numel() for x in places) if name.endswith("_") else written[0].numel()
        times = 3 if name.endswith("_") else 2
        table = max(read, key=lambda x: x.numel())
        chosen = chosen * table.shape[-1] if name == "index_put_" and len(places) == 1 else chosen
        return times * chosen * table.itemsize + sum(map(nbytes, places))
    if name in OVERWRITES:
        read = read[1:]
    return sum(map(nbytes, read)) + sum(map(nbytes, written))


def flops(packet: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Returns the floating-point operations of a product or an attention, as PyTorch counts them; 0 for others."""
    known = flop_registry.get(getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet))
    shaped = [x for x in args if not isinstance(x, torch.dtype)]  # the count of addmm takes no dtype by position
    return known(*shaped, **kwargs, out_val=result) if known else 0


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def nbytes(x: Tensor) -> int:
    """Returns the bytes of a tensor's different numbers: a broadcast axis has stride 0."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0]
    return int(torch.Size(sizes).numel()) * x.itemsize


# The LM head --------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """An LM head, for a number of tokens."""

    name: str
    width: int
    vocabulary: int
    tokens: int = 8192


HEADS = (
    Head("0.5B (Qwen 2.5)", 896, 151_936),
    Head("1B (Llama 3.2)", 2048, 128_256),
    Head("8B (Llama 3.1)", 4096, 128_256),
    Head("7B (Llama 2)", 4096, 32_000),
)


def ours(head: Head, *, is_summed: bool, compiles: bool = True, backward: bool = True) -> Roofline:
    """Runs `score_linear`, forward and backward, on a head in bfloat16.

    Args:
        head: the sizes.
        is_summed: whether the loss is a mean of the log-probabilities, as in SFT.
        compiles: whether PyTorch can compile for the device.
        backward: whether the pass has gradients.
    """
    layer = nn.Linear(head.width, head.vocabulary, bias=False, device="meta", dtype=torch.bfloat16)
    hidden = torch.empty(head.tokens, head.width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.empty(head.tokens, device="meta", dtype=torch.long)
    with Roofline() as count, on_device(count, compiles), torch.set_grad_enabled(backward):
        logprobs = scores.score_linear(hidden, layer, targets, is_summed=is_summed).logprobs
        if backward:
            (logprobs if is_summed else logprobs * torch.empty_like(logprobs)).sum().backward()
    return count


@contextmanager
def on_device(count: Roofline, compiles: bool) -> Iterator[None]:
    """Makes the meta device one with the card's memory, a compiler or none, and no autocast, inside the block."""
    fused = compiled(count) if compiles else None
    with (
        mock.patch.object(scores, "memory_of", return_value=count.card.memory),
        mock.patch.object(scores, "fused_score", return_value=fused),
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        mock.patch.object(torch, "autocast", return_value=nullcontext()),
    ):
        yield


def compiled(count: Roofline) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """Returns a stand-in for the compiled function of `scores`, which counts its passes over the logits.

    It reads the logits twice for the scores, and a third time for the gradient, which it writes:
    tests/lm/tokens/test_fused_scores.py compiles it and counts. Where a cache keeps a row of logits, it is less.
    """

    def score(logits: Tensor, targets: Tensor, *grads: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        has_grad = grads[0] is not None or grads[1] is not None
        count.add((4 if has_grad else 2) * nbytes(logits))
        rows = logits.new_empty(len(logits), dtype=torch.float32)
        return rows, torch.empty_like(rows), torch.empty_like(logits) if has_grad else None

    return score


def peer(head: Head, *, rows: int = 4096, columns: int = 32_768, backward: bool = True) -> Roofline:
    """Runs the head of TRL 1.16.0 on CUDA: for each tile a product and one Triton kernel, and float32 gradients.

    See its trl/kernels/chunked_logprob.py, whose sizes of a tile are the defaults here.
    """
    hidden = torch.empty(head.tokens, head.width, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(head.vocabulary, head.width, device="meta", dtype=torch.bfloat16)
    with Roofline() as count:
        for x in hidden.split(rows):
            for part in weight.split(columns):
                count.add(nbytes(x @ part.T))  # which the kernel reads
        if not backward:
            return count
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (hidden, weight)]
        for x, of_x in zip(hidden.split(rows), sums[0].split(rows), strict=True):
            for part, of_part in zip(weight.split(columns), sums[1].split(columns), strict=True):
                tile = x @ part.T
                count.add(2 * nbytes(tile))  # the kernel puts the gradient in the logits' place
                torch.addmm(of_x, tile, part, out_dtype=torch.float32, out=of_x)
                torch.addmm(of_part, tile.T, x, out_dtype=torch.float32, out=of_part)
        for total in sums:
            total.bfloat16()
    return count


def heads_table() -> Iterator[str]:
    """Yields the lines of the table of heads."""
    yield "| head, 8,192 tokens | loss | its products | trimtab | ratio | kernels | without a compiler | TRL 1.16.0 |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for head in HEADS:
        other = peer(head)
        for is_summed, loss in ((True, "SFT"), (False, "DPO, GRPO, PPO")):
            count, plain = (ours(head, is_summed=is_summed, compiles=compiles) for compiles in (True, False))
            cells = [f"{head.name}, {head.width} x {head.vocabulary:,}", loss, f"{1e3 * count.products:.1f} ms"]
            cells += [f"**{1e3 * count.seconds:.1f} ms**", f"{count.seconds / count.products:.2f}", str(count.kernels)]
            yield f"| {' | '.join([*cells, f'{1e3 * plain.seconds:.1f} ms', f'{1e3 * other.seconds:.1f} ms'])} |"


# Whole steps --------------------------------------------------------------------------------------------------------


class Trunk(NamedTuple):
    """A Llama without its head."""

    head: Head
    layers: int
    inner: int


TRUNKS = (Trunk(HEADS[1], 16, 8192), Trunk(HEADS[2], 32, 14_336))


def flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attends as FlashAttention does; the meta device would choose the attention that stores all its weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, 0.0, True)[0].transpose(1, 2), None


def trunk(model: Trunk, *, tokens: int = 8192, width: int = 1024, backward: bool = True) -> Roofline:
    """Runs a trunk over rows of `width` tokens, forward and perhaps backward, in bfloat16, without checkpointing."""
    AttentionInterface.register("counted", flash)
    config = LlamaConfig(
        vocab_size=model.head.vocabulary,
        hidden_size=model.head.width,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        llama = LlamaModel(config).bfloat16()
        llama.set_attn_implementation("counted")
        ids = torch.empty(tokens // width, width, dtype=torch.long)
        places = torch.empty(1, width, dtype=torch.long)
    no_cast, grad = mock.patch.object(torch, "autocast", return_value=nullcontext()), torch.set_grad_enabled(backward)
    with Roofline() as count, no_cast, grad:
        states = llama(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
        if backward:
            states.backward(torch.empty_like(states))
    return count


def steps_table() -> Iterator[str]:
    """Yields the lines of the table of steps: the trunk is the same code on both sides."""
    yield "| SFT, 8,192 tokens | trunk of both | trimtab | TRL 1.16.0 | TRL / trimtab | share of our head |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for model in TRUNKS:
        body, head, other = trunk(model).seconds, ours(model.head, is_summed=True).seconds, peer(model.head).seconds
        cells = [model.head.name, *(f"{1e3 * time:.0f} ms" for time in (body, body + head, body + other))]
        yield f"| {' | '.join([*cells, f'{(body + other) / (body + head):.2f}', f'{head / (body + head):.0%}'])} |"


class Shape(NamedTuple):
    """The rows of a step whose answers share their prompts.

    Args:
        name: for the table.
        prompts: of a step.
        prompt: tokens of each.
        answers: of each prompt.
        answer: tokens of each.
        reads_reference: whether a reference scores the answers, too.
    """

    name: str
    prompts: int
    prompt: int
    answers: int
    answer: int
    reads_reference: bool


SHAPES = (
    Shape("DPO, 8 pairs, prompt 512, answers 256", 8, 512, 2, 256, reads_reference=True),
    Shape("GRPO's update, 8 prompts of 256, 8 answers of 96", 8, 256, 8, 96, reads_reference=False),
    Shape("GRPO's update, 1 prompt of 256, 8 answers of 1,024", 1, 256, 8, 1024, reads_reference=False),
)


def step(model: Trunk, shape: Shape, head: Callable[..., Roofline], *, shares_prompts: bool) -> tuple[int, float]:
    """Returns the positions of a step and its seconds: forward, backward, and a forward pass of the reference.

    As many answers share a copy of their prompt as trimtab chooses. Attention is counted as if nothing were masked.
    """
    answer = [0] * shape.answer
    groups = [TokenGroup([0] * shape.prompt, [answer] * shape.answers, [answer] * shape.answers)] * shape.prompts
    pieces = cheapest_split(groups, model.head.width) if shares_prompts else split(groups, 1)
    width, answers = len(pieces[0]), shape.prompts * shape.answers * shape.answer
    tokens, passes = len(pieces) * width, (True, False) if shape.reads_reference else (True,)
    parts = [trunk(model, tokens=tokens, width=width, backward=backward) for backward in passes]
    parts += [head(model.head._replace(tokens=answers), backward=backward) for backward in passes]
    return tokens, sum(part.seconds for part in parts)


def shared_table() -> Iterator[str]:
    """Yields the lines of the table of steps in which answers share a prompt."""
    yield "| step | model | positions, trimtab / TRL | trimtab | TRL 1.16.0 | TRL / trimtab |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for shape in SHAPES:
        for model in TRUNKS:
            tokens, time = step(model, shape, partial(ours, is_summed=False), shares_prompts=True)
            others, other = step(model, shape, peer, shares_prompts=False)
            cells = [shape.name, model.head.name, f"{tokens:,} / {others:,}", f"{1e3 * time:.0f} ms"]
            yield f"| {' | '.join([*cells, f'{1e3 * other:.0f} ms', f'{other / time:.2f}'])} |"


def main() -> None:
    """Prints the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"Estimates for one {H100.name}. Nothing has run on a GPU.\n")
    for table in (heads_table, steps_table, shared_table):
        print("\n".join(table()), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
