"""Which positions attend to which in a tree: masks of whole rows, and attention that runs group by group."""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from trimtab_lm.compat.attention import attention_of, plain_tensors, tree_map
from trimtab_lm.interface import Model, base_of, decoder_config

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_NAMES = """
apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm dbrx
deepseek_v2 deepseek_v3 diffllama dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint
gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
gpt_neox gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama llama4_text megatron-bert mellum
minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder nanochat nemotron olmo
olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe rembert roc_bert seed_oss smollm3
solar_open stablelm starcoder2 vaultgemma xglm youtu
"""
VERIFIED = frozenset(_NAMES.split())
"""Types of models in which positions meet in attention alone, by masks that transformers makes or takes.

`tests/lm/tokens/test_families.py` compares each with plain rows that are longer than its windows. No short comparison
tells the other types apart: a window, a chunk or a choice of keys (BigBird, Doge, DeepSeek-V3.2) shows in long rows.
"""


def tree_mask(document: Tensor, branch: Tensor) -> Tensor:
    """Returns the attention mask of a tree: each position attends to its branch and its prefix, up to itself.

    Args:
        document, branch: [R, W], see `lay_out`.

    Returns:
        [R, 1, W, W], True where the position of the third dimension attends to that of the fourth.
    """
    same = document[:, :, None] == document[:, None, :]
    reads = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
    return (same & reads).tril()[:, None]


class OwnMask(Tensor):
    """A mask that takes over SDPA's call through `__torch_function__`, as `torch.nn.attention.bias.CausalBias` does.

    A model that reads the mask elsewhere gets the numbers of the plain mask, and with them the cost.

    Attributes:
        was_read: whether a model has read the numbers.
    """

    was_read: bool

    @staticmethod
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        """SDPA, with its arguments; the mask is a subclass's."""
        raise NotImplementedError

    def numbers(self) -> Tensor:
        """The plain mask."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Runs SDPA by `attend`, and any other function on the numbers of the mask, if it asks for more than facts."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return cls.attend(*args, **kwargs)
        if func is Tensor.detach:
            return args[0]
        with plain_tensors():
            if func.__name__ == "__get__" or func in (Tensor.size, Tensor.dim):
                fact = func(*args, **kwargs)
                if not isinstance(fact, Tensor):  # shape, dtype, device
                    return fact
            args, kwargs = tree_map(_numbers, (args, kwargs))
            return func(*args, **kwargs)


def _numbers(value: object) -> object:
    """Returns an own mask as a plain tensor, and anything else as it is."""
    if not isinstance(value, OwnMask):
        return value
    value.was_read = True
    return value.numbers()


class GroupMask(OwnMask):
    """The mask `tree_mask` [1, 1, W, W] of a single row, with which SDPA runs on one group of the row at a time.

    The cost of attention grows with the squared lengths of the groups instead of the row's.

    Attributes:
        document, branch: [1, W], see `lay_out`.
        groups: for each group the length of its prefix, and then those of its branches. A sequence that shares no
            prefix is a group of one length.
        biases: float32 [branch, prefix + branch] by the two lengths: 0, and -inf where a branch does not attend.
    """

    document: Tensor
    branch: Tensor
    groups: list[list[int]]
    biases: dict[tuple[int, int], Tensor]

    @classmethod
    def of(cls, document: Tensor, branch: Tensor) -> "GroupMask":
        """Returns the mask of a row; `document` and `branch` are [1, W]."""
        width, device = document.shape[1], document.device
        mask = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, width, width).as_subclass(cls)
        mask.document, mask.branch, mask.was_read = document, branch, False
        mask.groups = _groups(document[0], branch[0])
        pairs = {(branch, prefix) for prefix, *branches in mask.groups for branch in branches}
        mask.biases = {
            (branch, prefix): torch.full((branch, prefix + branch), -torch.inf, device=device).triu_(prefix + 1)
            for branch, prefix in pairs
        }
        return mask

    def numbers(self) -> Tensor:
        """`tree_mask` of the row."""
        return tree_mask(self.document, self.branch)

    @staticmethod
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: "GroupMask",
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Returns the attention [1, heads, W, E] of a row: in each group of the prefix, and of each branch to both.

        Args:
            query, key, value: [1, heads, W, E].
            attn_mask: of the row.
            dropout_p, is_causal, options: of SDPA; the mask is causal already.
        """
        if dropout_p > 0:  # no fused kernel drops on a CPU, and the random numbers stay those of the whole row
            mask = attn_mask.numbers()
            return scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)
        sizes = [size for group in attn_mask.groups for size in group]
        parts = zip(query.split(sizes, dim=2), key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True)
        outputs = []
        for prefix_size, *branch_sizes in attn_mask.groups:
            queries, *prefix = next(parts)
            outputs.append(scaled_dot_product_attention(queries, prefix[0], prefix[1], is_causal=True, **options))
            for size in branch_sizes:
                queries, *branch = next(parts)
                keys, values = (torch.cat(pair, dim=2) for pair in zip(prefix, branch, strict=True))
                # The kernel takes float32 beside lower precisions; beside float64 it reads it wrongly (torch 2.13).
                bias = attn_mask.biases[size, prefix_size].to(torch.promote_types(query.dtype, torch.float32))
                outputs.append(scaled_dot_product_attention(queries, keys, values, bias, **options))
        # Laid out as the kernel lays out a whole row, so that the model's own transposition copies nothing.
        return torch.cat([output.transpose(1, 2) for output in outputs], dim=1).transpose(1, 2)


def attention_mask(model: PreTrainedModel, document: Tensor, branch: Tensor) -> "Tensor | BlockMask":
    """Returns the mask of a tree in the form that the model's attention takes.

    Args:
        model: the model that will read the tree.
        document, branch: [R, W], see `lay_out`.
    """
    attention = attention_of(model)
    if attention == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def reads(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = (document[b, q] == document[b, k]) & (k <= q)
            return same & ((branch[b, k] == 0) | (branch[b, k] == branch[b, q]))

        rows, width = document.shape
        return create_block_mask(reads, rows, None, width, width, device=document.device)
    if runs_by_group(model, document):
        return GroupMask.of(document, branch)
    mask = tree_mask(document, branch)
    if attention != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def runs_by_group(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether the attention of rows `ids` [R, W] can run group by group: in SDPA, over a single row on a CPU.

    An accelerator would start many small kernels, and has varlen ones.
    """
    is_one = ids.device.type == "cpu" and ids.dim() == 2 and len(ids) == 1 and not torch.compiler.is_compiling()
    return is_one and attention_of(model) == "sdpa" and attends_fully(model)


def is_verified(model: Model) -> bool:
    """Whether a model is of transformers' own code for one of the `VERIFIED` types, or of a subclass."""
    base = base_of(model)
    is_own = any(kind.__module__.startswith("transformers.models.") for kind in type(base).__mro__)
    return is_own and base.config.model_type in VERIFIED


def attends_fully(model: Model) -> bool:
    """Whether every layer of a verified model attends to all earlier tokens that its mask allows.

    A local layer would apply a tree's mask without its window. Configurations name the layers' kinds, or one window
    for all, or nothing.
    """
    config = decoder_config(model)
    kinds = set(getattr(config, "layer_types", None) or [])
    is_local = kinds - {"full_attention"} if kinds else getattr(config, "sliding_window", None) is not None
    return is_verified(model) and not is_local


def _groups(document: Tensor, branch: Tensor) -> list[list[int]]:
    """Returns the lengths of the groups in a row [W]; see `GroupMask`."""
    runs, lengths = torch.stack([document, branch]).unique_consecutive(dim=1, return_counts=True)
    segments = zip(*runs.tolist(), lengths.tolist(), strict=True)
    groups: list[list[int]] = []
    for _, members in groupby(segments, key=lambda segment: segment[0]):
        branches, sizes = zip(*((number, size) for _, number, size in members), strict=True)
        if branches[0] != 0:  # no prefix
            groups += [[size] for size in sizes]
        else:  # a single branch continues its prefix
            groups.append([sum(sizes)] if len(sizes) == 2 else list(sizes))
    return groups
