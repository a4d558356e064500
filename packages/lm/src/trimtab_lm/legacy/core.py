"""The functions of `trl.core`, with their names, arguments and results of 2024.

Two results differ. Positions outside a mask never matter, not even NaN, and are 0 in what `masked_whiten` returns.
Logits are scored in float32 at least.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, TopKLogitsWarper, TopPLogitsWarper

from trimtab_common.config import flattened
from trimtab_common.formulas import masking
from trimtab_common.seeding import set_seed as set_seed  # one of trl.core's names
from trimtab_lm.tokens.layout import pad
from trimtab_lm.tokens.scores import TokenScores, score_logits, upcast

WANDB_PADDING = -1
"""What `stack_dicts` pads with."""

Stats = Mapping[str, Any]


def _scores(logits: Tensor, labels: Tensor) -> TokenScores:
    return score_logits(logits.flatten(0, -2), labels.flatten())


def logprobs_from_logits(logits: Tensor, labels: Tensor, gather: bool = True) -> Tensor:
    """Log-probabilities of `labels` [B, T] under logits [B, T, V]; [B, T, V] of all tokens with gather=False."""
    return _scores(logits, labels).logprobs.view_as(labels) if gather else upcast(logits).log_softmax(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats, [...], of the distributions of logits [..., V]."""
    shape = logits.shape[:-1]
    return _scores(logits, torch.zeros(shape, dtype=torch.long, device=logits.device)).entropy.view(shape)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is 1, over everything or over an axis; 0 for an empty mask."""
    if axis is None:
        return masking.masked_mean(values, mask)
    return torch.where(mask.bool(), values, 0.0).sum(axis) / mask.sum(axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of `values` where `mask` is 1: the sample's, or the population's with unbiased=False.

    Raises:
        ValueError: there is no sample variance, because less than two positions count.
    """
    variance, count = masking.masked_var(values, mask), mask.sum()
    if not unbiased:
        return variance
    if count < 2:
        raise ValueError(
            f"{int(count)} positions have no sample variance. Use a larger mini_batch_size, or unbiased=False."
        )
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`values` with mean 0 and sample variance 1 where `mask` is 1, and 0 elsewhere; of this process alone.

    Args:
        values: any shape.
        mask: a mask of the same shape.
        shift_mean: False keeps the mean.
    """
    mean = masked_mean(values, mask)
    scaled = (values - mean) * torch.rsqrt(masked_var(values, mask) + masking.VARIANCE_FLOOR)
    return torch.where(mask.bool(), scaled if shift_mean else scaled + mean, 0.0)


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """`masked_whiten` where every position counts."""
    return masked_whiten(values, torch.ones_like(values), shift_mean)


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """`x` within two bounds, each a number or a tensor."""
    return x.clamp(min=torch.as_tensor(tensor_min), max=torch.as_tensor(tensor_max))


def flatten_dict(nested: Stats, sep: str = "/") -> dict[str, Any]:
    """Flattens nested dicts; joins keys by `sep`.

    Raises:
        ValueError: a key has `sep` in it.
    """
    for key, value in nested.items():
        if sep in key:
            raise ValueError(f"The key {key!r} has the separator {sep!r} in it. Choose another sep.")
        if isinstance(value, Mapping):
            flatten_dict(value, sep)
    return flattened(nested, sep)


def stack_dicts(stats_dicts: Sequence[Stats]) -> dict[str, Tensor]:
    """The flattened tensors of each key, one per row, padded with -1."""
    return {
        key: pad_sequence(
            [stats[key].flatten() for stats in stats_dicts], batch_first=True, padding_value=WANDB_PADDING
        )
        for key in stats_dicts[0]
    }


def average_torch_dicts(list_of_dicts: Sequence[Stats]) -> dict[str, Tensor]:
    """The mean of the tensors of each key."""
    return {key: torch.stack([stats[key] for stats in list_of_dicts]).mean(0) for key in list_of_dicts[0]}


def add_suffix(input_dict: Stats, suffix: str) -> dict[str, Any]:
    """The dict with `suffix` at the end of each key."""
    return {key + suffix: value for key, value in input_dict.items()}


def convert_to_scalar(stats: Stats) -> dict[str, Any]:
    """Tensors and arrays of one element, with at most one axis, as numbers; other values as they are."""
    return {
        key: value.item() if isinstance(value, Tensor | np.ndarray) and value.shape in ((), (1,)) else value
        for key, value in stats.items()
    }


def stats_to_np(stats_dict: Stats) -> dict[str, Any]:
    """Tensors as NumPy's arrays (bfloat16 as float32), numbers as floats; other values as they are."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        return float(value) if isinstance(value, int | float | np.number) else value

    return {key: convert(value) for key, value in stats_dict.items()}


def pad_to_size(tensor: Tensor, size: int, dim: int = 1, padding: float = 50256) -> Tensor:
    """A tensor with `padding` at the end of an axis, up to `size`."""
    places = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim) + [0, size - tensor.shape[dim]]
    return nn.functional.pad(tensor, places, value=padding)


def listify_batch(tensor: Tensor) -> list[Tensor]:
    """The rows of a tensor."""
    return list(tensor)


def build_bert_batch_from_txt(
    text_list: Sequence[str], tokenizer: PreTrainedTokenizerBase, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, T] of texts, padded on the right with 0."""
    rows = [torch.tensor(tokenizer.encode(text)) for text in text_list]
    ids, mask = pad(rows, 0)
    return ids.to(device), mask.to(device)


def top_k_top_p_filtering(
    logits: Tensor, top_k: int = 0, top_p: float = 1.0, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
) -> Tensor:
    """Sets logits [B, V] to `filter_value`, except for the `top_k` likeliest tokens, or for total probability `top_p`.

    Args:
        logits: any floating dtype.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        filter_value: the value that the other tokens get.
        min_tokens_to_keep: at least so many stay.
    """
    options: dict[str, Any] = {"filter_value": filter_value, "min_tokens_to_keep": min_tokens_to_keep}
    warpers: list[Callable[..., Any]] = []
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k, **options))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p, **options))
    for warper in warpers:
        logits = warper(None, logits)
    return logits


@torch.no_grad()
def respond_to_batch(
    model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Samples exactly `txt_len` tokens after each query; an end token does not end a response.

    Args:
        model: returns logits [B, T, V] first.
        queries: token ids [B, Q], without padding.
        txt_len: R, the tokens of a response.
        top_k: sample from so many of the likeliest tokens. 0: from all.
        top_p: sample from the likeliest tokens of this total probability. 1: from all.

    Returns:
        The responses [B, R].
    """
    tokens = queries
    for _ in range(txt_len):
        logits = top_k_top_p_filtering(model(tokens)[0][:, -1].float(), top_k, top_p)
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return tokens[:, queries.shape[1] :]


class PPODecorators:
    """`@PPODecorators.empty_device_cache()`: frees unused accelerator memory after the call, if asked to."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        """A context manager and decorator that frees unused memory afterwards if `optimize_device_cache` is set."""
        yield
        if cls.optimize_device_cache:
            clear_device_cache(garbage_collection=True)

    empty_cuda_cache = empty_device_cache
