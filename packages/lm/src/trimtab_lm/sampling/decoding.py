"""A loop for transformers' `generate`: tokens are drawn at little cost, and rows that have ended leave the batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, GenerationConfig

from trimtab_lm.compat.generation import CACHE, decoding, next_inputs

from .cache import can_select
from .head import head_by_columns
from .ragged import Ragged
from .waiting import Rows, Waiting

LARGE_VOCABULARY = 2048
"""The size from which a CPU draws a token faster from the cumulative distribution than by `torch.multinomial`."""
BLOCK = 128
"""Tokens whose probabilities are summed up before one of them is looked for."""
COPIED = 2**16
"""Probabilities that are summed up at a time, as 512 KiB of float64."""
LEAVE = 0.75
"""Rows that have ended leave the batch when this share or less of it goes on; each time copies the cache."""
ROWS = ("attention_mask", "position_ids")
"""What a forward pass takes for each row, besides tokens and cache."""


class Completion(NamedTuple):
    """What a model has written.

    Attributes:
        ids: [R], the new tokens.
        logprobs: [R], in nats, of each token under the distribution from which it was drawn, after temperature and
            processors; None where the loop of transformers drew it.
    """

    ids: Tensor
    logprobs: Tensor | None = None

    def cut(self, length: int) -> "Completion":
        """The first tokens."""
        return Completion(self.ids[:length], None if self.logprobs is None else self.logprobs[:length])

    def to(self, device: torch.device) -> "Completion":
        """The same on a device."""
        return Completion(self.ids.to(device), None if self.logprobs is None else self.logprobs.to(device))


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: object,
    generation_config: GenerationConfig,
    waiting: Waiting | None = None,
    **inputs: Any,
) -> list[Completion]:
    """The loop of transformers' `generate`, for its argument `custom_generate`; see `draw` for what differs.

    Args:
        model: the transformers model.
        input_ids: [B, T].
        logits_processor: from ids [b, t] and scores [b, V] to scores; works on each row by itself.
        stopping_criteria: those that `generate` makes of `generation_config`, which says it all: a completion ends with
            an end token or at the length limit.
        generation_config: asks for greedy search or for sampling.
        waiting: prompts that take the places of completions that have ended; see `can_wait`.
        inputs: further arguments of `prepare_inputs_for_generation`.

    Returns:
        The completions of the rows and then of the waiting prompts. What follows an end token means nothing.
    """
    (size, width), cache = input_ids.shape, inputs.get(CACHE)
    selectable = cache if isinstance(cache, DynamicCache) and can_select(cache) else None
    held = 0 if cache is None else cache.get_seq_length()
    unread = width - held if held else None  # None: all
    ends, limit = _end_tokens(generation_config).to(input_ids.device), generation_config.max_length - width
    rows, steps = Rows.of(input_ids), list[tuple[Tensor, Tensor, Tensor]]()
    goes_on, ragged = torch.ones_like(rows.numbers, dtype=torch.bool), Ragged(model, selectable)
    with decoding(model), head_by_columns(model, limit):
        while True:
            step = {"next_sequence_length": unread, "is_first_iteration": not steps}
            prepared = model.prepare_inputs_for_generation(rows.ids, **step, **inputs)
            outputs = model(**ragged.masked(prepared), return_dict=True)
            inputs = next_inputs(model, outputs, inputs)
            unread = 1
            scores = logits_processor(rows.ids, outputs.logits[:, -1].to(input_ids.device, torch.float32))
            probs = scores.softmax(-1)
            tokens = draw(probs, rows.places, size) if generation_config.do_sample else scores.argmax(-1)
            rows = rows._replace(ids=torch.cat([rows.ids, tokens[:, None]], dim=1))
            steps.append((rows.numbers, tokens, probs.gather(1, tokens[:, None])[:, 0].log()))
            goes_on &= ~(torch.isin(tokens, ends) | (len(steps) - rows.begun >= limit))
            left = int(goes_on.sum())
            if left == 0 and not waiting:
                return _completions(steps, limit)
            if selectable is None or left > LEAVE * len(goes_on):
                continue
            kept = goes_on.nonzero()[:, 0]
            if waiting and left + waiting.repeats <= size:
                options = {"kept": kept, "size": size, "step": len(steps), "padding": generation_config.pad_token_id}
                rows, inputs = rows.seat(model, inputs, waiting, **options)
            else:
                rows = rows.select(kept)
                selectable.batch_select_indices(kept)
                inputs |= {name: inputs[name][kept] for name in ROWS if inputs.get(name) is not None}
            goes_on = torch.ones_like(rows.numbers, dtype=torch.bool)
            ragged.rows_changed()


def _end_tokens(config: GenerationConfig) -> Tensor:
    ids = config.eos_token_id
    return torch.tensor([] if ids is None else ids, dtype=torch.long).flatten()


def _completions(steps: Sequence[tuple[Tensor, Tensor, Tensor]], limit: int) -> list[Completion]:
    """The completions, out of the numbers of completions [b], tokens [b] and log-probabilities [b] of each step."""
    numbers, *columns = (torch.cat(column) for column in zip(*steps, strict=True))
    order, counts = numbers.argsort(stable=True), numbers.bincount().tolist()
    rows = zip(*(column[order].split(counts) for column in columns), strict=True)
    return [Completion(*row).cut(max(limit, 1)) for row in rows]


def draw(probs: Tensor, places: Tensor, size: int) -> Tensor:
    """One token of each row that is left in a batch.

    Every place of the batch takes its random numbers, also a free one: what a row draws does not depend on the ends of
    the others, and is what transformers' `generate` draws, except for large vocabularies on a CPU. There
    `torch.multinomial` draws an exponential number for each entry of the vocabulary, which takes longer than the model;
    a uniform number for each row is enough (inverse transform sampling).

    Args:
        probs: [b, V], the distributions.
        places: [b], those of the rows in the batch.
        size: places of the batch.

    Returns:
        Token ids, [b].

    Raises:
        RuntimeError: probabilities are not finite.
    """
    if probs.device.type != "cpu" or probs.shape[1] < LARGE_VOCABULARY:
        everywhere = probs.new_ones(size, probs.shape[1]).index_copy(0, places, probs)
        return torch.multinomial(everywhere, 1)[places, 0]
    return draw_by_inversion(probs, 1 - torch.rand(size, 1, dtype=torch.float64)[places])


def draw_by_inversion(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token of each row at which the cumulative distribution reaches a number (inverse transform sampling).

    Sums over blocks of the vocabulary tell the block, and a cumulative sum within it the token: one pass over the
    probabilities, and no second matrix of their size.

    Args:
        probs: [b, V], the distributions, up to a factor for each row.
        uniform: [b, 1], float64, in (0, 1], so that no token of probability 0 is drawn.

    Returns:
        Token ids, [b].

    Raises:
        RuntimeError: probabilities are not finite.
    """
    count, device = probs.shape[1], probs.device
    # A sum in float64 copies what it adds up: few rows at a time stay in the cache.
    ends = torch.cat([_block_sums(rows) for rows in probs.split(max(COPIED // count, 1))]).cumsum(-1)
    if not bool(ends[:, -1].isfinite().all()):
        raise RuntimeError(
            "No token can be drawn, because the model gives probabilities that are nan or inf. Look for weights that "
            "are not finite: the learning rate may be too high, or float16 may lack loss scaling."
        )
    wanted = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, wanted)
    before = functional.pad(ends, (1, 0)).gather(1, block)
    share = (wanted - before) / (ends.gather(1, block) - before)  # in (0, 1], whatever the rounding of the sums
    columns = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = probs.gather(1, columns.clamp(max=count - 1)).double().masked_fill(columns >= count, 0.0).cumsum(-1)
    return (block * BLOCK + torch.searchsorted(inside, share * inside[:, -1:]))[:, 0]


def _block_sums(probs: Tensor) -> Tensor:
    """[b, V] as sums of `BLOCK` columns each, in float64; the last one may have fewer columns, or none."""
    whole = probs.shape[1] - probs.shape[1] % BLOCK
    parts = probs[:, :whole].unflatten(1, (-1, BLOCK)), probs[:, None, whole:]
    return torch.cat([part.sum(-1, dtype=torch.float64) for part in parts], dim=1)
