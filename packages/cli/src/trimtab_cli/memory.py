"""Training memory on each GPU, per engine: `trimtab memory --model ID_OR_CONFIG --trainer dpo --gpus 8`.

The model is built without memory. Weights, gradients and optimizer states are those that it has; activations are what
the operators of a forward and backward pass would hold.
"""

import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from trimtab_common.config import Count, CountFromZero, check_ranges, parse_config, setting
from trimtab_lm.compat.models import UNMASKED, undivided
from trimtab_lm.compat.tracing import peak_bytes
from trimtab_lm.interface import Forward, decoder_config, trunk_of
from trimtab_lm.tokens.attention import tree_mask
from trimtab_lm.tokens.layout import TokenGroup, lay_out
from trimtab_lm.tokens.logprobs import forward_replaced
from trimtab_lm.tokens.scores import score_linear

from .subcommands import errors_in_one_line
from .tables import print_gib

GATHERED_LAYERS = 2
"""Layers whose sharded weights are gathered at a time, in bfloat16: the one that runs and the one after it."""


@dataclass
class MemoryConfig:
    """What is trained, and on how many GPUs."""

    model: str = setting("Hub id, folder, or configuration file (json) of a language model.")
    trainer: Literal["sft", "reward", "dpo", "kto", "grpo", "ppo"] = setting(
        "In dpo, reward and grpo several answers share a prompt.", default="sft"
    )
    gpus: Count = setting("GPUs that share the training.", default=8)
    weights: Literal["float32", "bfloat16"] | None = setting(
        "Type in which the weights are loaded. With float32 the GPUs compute in bfloat16 (bf16=True). None: float32, "
        "or the checkpoint's where only adapters train.",
        default=None,
    )
    lora_rank: CountFromZero = setting("Train adapters of this rank on all linear layers. 0: all weights.", default=0)
    reference: bool | None = setting(
        "Hold a frozen copy as the reference; adapters need none. None: in dpo, kto and ppo.", default=None
    )
    critic: bool = setting("Train a second model of this size as PPO's separate critic.", default=False)
    tokens: Count = setting("Tokens of a micro-batch on one GPU.", default=8192)
    length: Count = setting("Tokens per document, or of a prompt with its answers.", default=2048)
    scored: CountFromZero = setting("Answer tokens per micro-batch. 0: all.", default=0)
    answers: Count = setting("Answers of a prompt: grpo's num_generations.", default=8)
    checkpointing: bool = setting("Compute activations again in backward (activation checkpointing).", default=True)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.scored > self.tokens:
            raise ValueError(
                f"scored={self.scored} answer tokens are more than the tokens={self.tokens} of a micro-batch. Lower "
                "scored, or raise tokens."
            )

    @property
    def holds_reference(self) -> bool:
        """Whether a GPU holds a frozen copy of the model; with adapters there is none."""
        is_held = self.trainer in ("dpo", "kto", "ppo") if self.reference is None else self.reference
        return is_held and not self.lora_rank


class ModelSize(NamedTuple):
    """The settings that training memory depends on.

    Attributes:
        parameters: numbers that the model has; a tied weight counts once.
        trainable: the trained ones.
        largest_layer: parameters of the largest part that is gathered at once: a layer, the embedding or the head.
        activations: bytes at the peak of a micro-batch beside weights, gradients and optimizer states, by the type of
            the weights that the GPU computes with: float32 ones are cast to bfloat16 (autocast), layer by layer.
    """

    parameters: int
    trainable: int
    largest_layer: int
    activations: dict[torch.dtype, int]


class Engine(NamedTuple):
    """Bytes per parameter, before they are divided among GPUs.

    Attributes:
        frozen: weight of a parameter that does not train.
        weights: weight of one that trains.
        gradients: its gradient, and the buffer in which that is summed over GPUs.
        optimizer: AdamW's two moments of it, and its float32 weight where `weights` is another.
        divided: "weights", "gradients", "optimizer": those of which each GPU holds a share.
    """

    frozen: int
    weights: int
    gradients: int
    optimizer: int
    divided: frozenset[str] = frozenset()


def engines(config: MemoryConfig) -> dict[str, Engine]:
    """The engines by name.

    DDP sums gradients in buckets beside them. DeepSpeed's ZeRO, with bf16 on, keeps bfloat16 weights for forward and
    float32 ones for the optimizer, in whatever type they are loaded. PEFT's adapters are float32.
    """
    loaded = getattr(torch, config.weights or "float32").itemsize
    width = torch.float32.itemsize if config.lora_rank else loaded
    everything = frozenset({"weights", "gradients", "optimizer"})
    return {
        "one GPU": Engine(loaded, width, width, 2 * width),
        "DDP": Engine(loaded, width, 2 * width, 2 * width),
        "ZeRO-2": Engine(2, 2, 2, 12, everything - {"weights"}),
        "ZeRO-3": Engine(2, 2, 2, 12, everything),
        "FSDP2": Engine(loaded, width, width, 2 * width, everything),
    }


class Memory(NamedTuple):
    """Bytes on each GPU. Free memory beside them is needed for generation's cache and for what the allocator wastes.

    Attributes:
        weights: the weights of the model that trains.
        gradients: the gradients of its parameters.
        optimizer: its states.
        reference: a frozen copy of the model.
        critic: a second model that trains; the activations count twice then.
        gathered: bfloat16 weights of `GATHERED_LAYERS`, where the GPUs hold shares.
        activations: what a micro-batch keeps for backward, its logits, and copies of weights in bfloat16.
    """

    weights: float
    gradients: float
    optimizer: float
    reference: float
    critic: float
    gathered: float
    activations: float


def size_of(model: PreTrainedConfig, config: MemoryConfig) -> ModelSize:
    """The size of a model with this configuration, which is built on torch's meta device."""
    base = build(model, config, torch.float32)
    tokens = laid_out(base, config)
    blocks = set(undivided(base) or ())  # which transformers does not split, and engines gather one by one
    layers = [module for module in base.modules() if type(module).__name__ in blocks]
    heads = filter(None, (base.get_input_embeddings(), base.get_output_embeddings()))
    return ModelSize(
        parameters=base.num_parameters(),
        trainable=base.num_parameters(only_trainable=True),
        largest_layer=max(sum(weight.numel() for weight in part.parameters()) for part in [*layers, *heads]),
        activations={
            dtype: peak_bytes(base, partial(backward, base, config, tokens, autocasts=dtype == torch.float32))
            for dtype, base in ((torch.float32, base), (torch.bfloat16, build(model, config, torch.bfloat16)))
        },
    )


def build(model: PreTrainedConfig, config: MemoryConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory, with adapters if they are trained."""
    kind: Any = AutoModelForSeq2SeqLM if model.is_encoder_decoder else AutoModelForCausalLM
    model = copy.deepcopy(model)  # the next lines change it
    if config.trainer == "reward":
        kind, model.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("meta"):
        base = cast(PreTrainedModel, kind.from_config(model, dtype=dtype, attn_implementation=UNMASKED))
        if config.lora_rank:  # which puts the adapters into the model
            get_peft_model(base, LoraConfig(r=config.lora_rank, target_modules="all-linear"))
    return base


def laid_out(base: PreTrainedModel, config: MemoryConfig) -> dict[str, Tensor]:
    """A micro-batch in the rows in which the trainers lay it out."""
    count, branches = max(config.tokens // config.length, 1), {"reward": 2, "dpo": 2, "grpo": config.answers}
    answers = branches.get(config.trainer, 1)
    length = (config.scored or config.tokens) // (count * answers)
    prompt = [0] * (config.length - answers * length)
    group = TokenGroup(prompt, [[0] * length] * answers, [[1] * length] * answers)
    return lay_out([group] * count, "tree", pad_token_id=0, hidden_size=decoder_config(base).hidden_size)


def backward(base: PreTrainedModel, config: MemoryConfig, tokens: dict[str, Tensor], *, autocasts: bool) -> None:
    """Computes the gradients of a micro-batch as the trainers do, at any tokens."""
    if config.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.train()
    ids, targets = (torch.zeros(tokens[name].shape, dtype=torch.long) for name in ("input_ids", "targets"))
    inputs = {"input_ids": ids}
    if base.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    elif "branch" in tokens:
        inputs |= {"position_ids": ids, "attention_mask": tree_mask(ids, ids)}
    head = base.get_output_embeddings()

    def score(run: Forward, states: Tensor) -> tuple[Tensor, ...]:
        read = states.flatten(0, 1).index_select(0, targets)
        scores = score_linear(read, cast(nn.Linear, head), targets, is_summed=config.trainer == "sft")
        return run(states[:, :0]), scores.logprobs

    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        if head is None:
            scored = [trunk_of(base)(**inputs, use_cache=False).last_hidden_state]
        else:
            with forward_replaced(head, score) as scored:
                base(**inputs, use_cache=False)
    scored[0].sum().backward()


def memory(size: ModelSize, engine: Engine, config: MemoryConfig) -> Memory:
    """Bytes on each GPU for training with AdamW."""
    share = {name: config.gpus if name in engine.divided else 1 for name in ("weights", "gradients", "optimizer")}
    frozen = size.parameters - size.trainable
    weights = (engine.frozen * frozen + engine.weights * size.trainable) / share["weights"]
    gradients = engine.gradients * size.trainable / share["gradients"]
    optimizer = engine.optimizer * size.trainable / share["optimizer"]
    is_sharded = "weights" in engine.divided
    autocasts = engine.frozen == torch.float32.itemsize and not is_sharded
    return Memory(
        weights,
        gradients,
        optimizer,
        reference=weights if config.holds_reference else 0,
        critic=weights + gradients + optimizer if config.critic else 0,
        gathered=torch.bfloat16.itemsize * GATHERED_LAYERS * size.largest_layer if is_sharded else 0,
        activations=size.activations[torch.float32 if autocasts else torch.bfloat16] * (1 + config.critic),
    )


def main(argv: Sequence[str]) -> int:
    """Print the table of the model that the words of the command line name; the exit status."""
    if argv and not argv[0].startswith("-"):
        print(
            f"trimtab memory: error: {argv[0]!r} is no flag. For ddpo write `trimtab memory ddpo`, for a trainer of "
            "language models --trainer; nft, align-prop and diffusion-dpo are not covered.",
            file=sys.stderr,
        )
        return 2
    (config,) = parse_config(MemoryConfig, argv=argv, description=__doc__, program="trimtab memory")
    warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 renames gradient_checkpointing_enable
    with errors_in_one_line("memory"):
        model = AutoConfig.from_pretrained(config.model)
        trains_adapters = config.lora_rank and config.trainer != "reward"  # whose head trains, too
        if config.weights is None and trains_adapters and model.dtype in (torch.bfloat16, torch.float16):
            config.weights = "bfloat16"
        size = size_of(model, config)
    chosen = {name: engine for name, engine in engines(config).items() if (name == "one GPU") == (config.gpus == 1)}
    where = "1 GPU, GiB on it" if config.gpus == 1 else f"{config.gpus} GPUs, GiB on each"
    print(f"{config.model} on {where}:")
    print_gib(["engine", *Memory._fields], [(name, memory(size, engine, config)) for name, engine in chosen.items()])
    return 0
