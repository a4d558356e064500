"""A loop for transformers' `generate`: tokens are drawn at little cost, and rows that have ended leave the batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from .cache import can_select

LARGE_VOCABULARY = 2048
"""The size from which a CPU draws a token faster from the cumulative distribution than by `torch.multinomial`."""
LEAVE = 0.75
"""Rows that have ended leave the batch when this share or less of it goes on; each time copies the cache."""
ROWS = ("attention_mask", "position_ids")
"""What a forward pass takes for each row, besides tokens and cache."""


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, None], Tensor],
    generation_config: GenerationConfig,
    **inputs: Any,
) -> Tensor:
    """The loop of transformers' `generate`, for its argument `custom_generate`; see `draw` for what differs.

    Args:
        model: the transformers model.
        input_ids: [B, T].
        logits_processor: from ids [b, t] and scores [b, V] to scores; works on each row by itself.
        stopping_criteria: from ids [b, t] to whether each row has ended; works on each row by itself.
        generation_config: asks for greedy search or for sampling.
        inputs: further arguments of `prepare_inputs_for_generation`.

    Returns:
        Prompts and new tokens, [B, T + R]. What follows the end of a row means nothing.
    """
    count, cache = len(input_ids), inputs.get("past_key_values")
    selectable = cache if isinstance(cache, DynamicCache) and can_select(cache) else None
    held = 0 if cache is None else cache.get_seq_length()
    unread = input_ids.shape[1] - held if held else None  # None: all
    rows, ids, padding = torch.arange(count, device=input_ids.device), input_ids, generation_config.pad_token_id
    goes_on, columns = torch.ones_like(rows, dtype=torch.bool), list[Tensor]()
    with model._optimize_model_for_decode():
        while True:
            step = {"next_sequence_length": unread, "is_first_iteration": not columns}
            outputs = model(**model.prepare_inputs_for_generation(ids, **step, **inputs), return_dict=True)
            is_encoder_decoder = model.config.is_encoder_decoder
            inputs = model._update_model_kwargs_for_generation(outputs, inputs, is_encoder_decoder=is_encoder_decoder)
            unread = 1
            scores = logits_processor(ids, outputs.logits[:, -1].to(ids.device, torch.float32))
            tokens = draw(scores.softmax(-1), rows, count) if generation_config.do_sample else scores.argmax(-1)
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            columns.append(torch.full_like(input_ids[:, 0], padding).index_copy(0, rows, tokens))
            goes_on &= ~stopping_criteria(ids, None)
            left = int(goes_on.sum())
            if left == 0:
                return torch.cat([input_ids, torch.stack(columns, dim=1)], dim=1)
            if selectable is not None and left <= LEAVE * len(rows):
                chosen = goes_on.nonzero()[:, 0]
                rows, ids, goes_on = rows[chosen], ids[chosen], goes_on[chosen]
                selectable.batch_select_indices(chosen)
                inputs |= {name: inputs[name][chosen] for name in ROWS if inputs.get(name) is not None}


def draw(probs: Tensor, rows: Tensor, count: int) -> Tensor:
    """One token of each row that is left in a batch.

    Every row of the batch takes its random numbers, also one that has left it: what a row draws does not depend on the
    ends of the others, and is what transformers' `generate` draws, except for large vocabularies on a CPU. There
    `torch.multinomial` draws an exponential number for each entry of the vocabulary, which takes longer than the model;
    a uniform number for each row is enough (inverse transform sampling).

    Args:
        probs: [b, V], the distributions.
        rows: [b], the numbers of the rows in the batch.
        count: rows of the batch.

    Returns:
        Token ids, [b].

    Raises:
        RuntimeError: probabilities are not finite.
    """
    if probs.device.type != "cpu" or probs.shape[1] < LARGE_VOCABULARY:
        if len(rows) < count:
            probs = probs.new_ones(count, probs.shape[1]).index_copy(0, rows, probs)
        return torch.multinomial(probs, 1)[rows, 0]
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    if not bool(cumulative[:, -1].isfinite().all()):
        raise RuntimeError(
            "No token can be drawn, because the model gives probabilities that are nan or inf. Look for weights that "
            "are not finite: the learning rate may be too high, or float16 may lack loss scaling."
        )
    # In (0, 1], so that no token of probability 0 is drawn.
    uniform = 1 - torch.rand(count, 1, dtype=torch.float64)[rows]
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:])[:, 0]
