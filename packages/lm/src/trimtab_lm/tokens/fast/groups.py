"""Attention group by group, in a row of groups."""

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trimtab_lm.compat.models import plain_tensors, tree_map
from trimtab_lm.tokens.attention import tree_mask


class GroupMask(Tensor):
    """The mask `tree_mask` [1, 1, W, W] of a single row; with it SDPA runs on one group at a time.

    It takes over SDPA's call through `__torch_function__`, as `torch.nn.attention.bias.CausalBias` does. The cost of
    attention grows with the squared lengths of the groups instead of the row's. A model that reads the mask elsewhere
    gets the numbers of the plain mask, and with them the cost.

    Attributes:
        document, branch: [1, W], see `lay_out`.
        groups: for each group the length of its prefix, and then those of its branches. A sequence that shares no
            prefix is a group of one length.
        was_read: whether a model has read the numbers.
        biases: float32 [branch, prefix + branch] by the two lengths: 0, and -inf where a branch does not attend. The
            first layer fills it.
    """

    document: Tensor
    branch: Tensor
    groups: list[list[int]]
    biases: dict[tuple[int, int], Tensor]
    was_read: bool

    @classmethod
    def of(cls, document: Tensor, branch: Tensor) -> "GroupMask":
        """Returns the mask of a row; `document` and `branch` are [1, W]."""
        width, device = document.shape[1], document.device
        mask = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, width, width).as_subclass(cls)
        mask.document, mask.branch, mask.was_read = document, branch, False
        mask.groups, mask.biases = _groups(document[0], branch[0]), {}
        return mask

    def numbers(self) -> Tensor:
        """`tree_mask` of the row."""
        return tree_mask(self.document, self.branch)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Runs SDPA by `attend`; any other function sees the plain mask. Answers shape, dtype and device directly."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if func is Tensor.detach:
            return args[0]
        with plain_tensors():
            if func.__name__ == "__get__" or func in (Tensor.size, Tensor.dim):
                fact = func(*args, **kwargs)
                if not isinstance(fact, Tensor):  # shape, dtype, device
                    return fact
            args, kwargs = tree_map(_numbers, (args, kwargs))
            return func(*args, **kwargs)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: GroupMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Returns the attention [1, heads, W, E] of a row: in each group of the prefix, and of each branch to both.

    Args:
        query, key, value: [1, heads, W, E].
        attn_mask: the row's mask.
        dropout_p, is_causal, options: arguments of SDPA; the mask is causal already.
    """
    if dropout_p > 0:  # no fused kernel drops on a CPU, and the random numbers stay those of the whole row
        mask = attn_mask.numbers()
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)
    sizes = [size for group in attn_mask.groups for size in group]
    parts = zip(query.split(sizes, dim=2), key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True)
    outputs = []
    for prefix_size, *branch_sizes in attn_mask.groups:
        queries, prefix_keys, prefix_values = next(parts)
        output = scaled_dot_product_attention(queries, prefix_keys, prefix_values, is_causal=True, **options)
        outputs.append(output.transpose(1, 2))
        for size in branch_sizes:
            queries, keys, values = next(parts)
            keys, values = torch.cat([prefix_keys, keys], dim=2), torch.cat([prefix_values, values], dim=2)
            if (size, prefix_size) not in attn_mask.biases:
                bias = torch.full((size, prefix_size + size), -torch.inf, device=query.device).triu_(prefix_size + 1)
                attn_mask.biases[size, prefix_size] = bias
            # The kernel takes float32 beside lower precisions; beside float64 it reads it wrongly (torch 2.13).
            bias = attn_mask.biases[size, prefix_size].to(torch.promote_types(query.dtype, torch.float32))
            outputs.append(scaled_dot_product_attention(queries, keys, values, bias, **options).transpose(1, 2))
    # Laid out as the kernel lays out a whole row, so that the model's own transposition copies nothing.
    return torch.cat(outputs, dim=1).transpose(1, 2)


def _numbers(value: object) -> object:
    """Returns a group mask as a plain tensor, and any other value unchanged."""
    if not isinstance(value, GroupMask):
        return value
    value.was_read = True
    return value.numbers()


def _groups(document: Tensor, branch: Tensor) -> list[list[int]]:
    """Returns the lengths of the groups in a row [W]; see `GroupMask`."""
    runs, lengths = torch.stack([document, branch]).unique_consecutive(dim=1, return_counts=True)
    segments = zip(*runs.tolist(), lengths.tolist(), strict=True)
    groups: list[list[int]] = []
    for _, members in groupby(segments, key=itemgetter(0)):
        _, branches, sizes = zip(*members, strict=True)
        if branches[0] != 0:  # no prefix
            groups += [[size] for size in sizes]
        else:  # a single branch continues its prefix
            groups.append([sum(sizes)] if len(sizes) == 2 else list(sizes))
    return groups
