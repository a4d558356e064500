"""Keys and values of prompts, in transformers' cache with room for the tokens that follow."""

import copy
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trimtab_lm.compat.generation import CACHE, cache_argument
from trimtab_lm.interface import Model, base_of
from trimtab_lm.tokens.positions import positioned

ROOM = 64
"""Tokens for which a layer makes room at a time."""
PASS = 256
"""What a forward pass costs besides its tokens, as a number of tokens: it reads the weights."""


class RoomyLayer(DynamicLayer):
    """A layer that writes new tokens into room that it has; `DynamicLayer` copies all its tokens for each new one."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[Tensor] | None = None  # [B, H, tokens and room, D]; `keys` and `values` are their beginnings

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values of an initialized layer, [B, H, T, D] each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, held = (key_states, value_states), self.states
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        # The methods that select or repeat rows replace `keys` and `values` by copies without room.
        if self._rooms is None or held[0].data_ptr() != self._rooms[0].data_ptr() or end > self._rooms[0].shape[-2]:
            self._rooms = [states.new_empty(*states.shape[:-2], end + ROOM, states.shape[-1]) for states in new]
            if start:
                for room, states in zip(self._rooms, held, strict=True):
                    room[..., :start, :] = states
        for room, states in zip(self._rooms, new, strict=True):
            room[..., start:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values

    def replace_rows(self, kept: Tensor, other: "RoomyLayer", *, count: int, width: int) -> None:
        """Go on with some of the rows and with those of another layer, cut or padded on the left.

        Args:
            kept: numbers of the rows that go on.
            other: a layer of `count` rows, or an empty one, whose rows then are padding.
            count: new rows.
            width: tokens of each row from now on.
        """
        old = self.states
        new = other.states if other.is_initialized else [states.new_zeros(count, *states.shape[1:]) for states in old]
        rows = len(kept) + count
        self._rooms = [states.new_empty(rows, states.shape[1], width + ROOM, states.shape[-1]) for states in old]
        for room, ours, theirs in zip(self._rooms, old, new, strict=True):
            room[: len(kept), :, :width] = _widened(ours[kept], width)
            room[len(kept) :, :, :width] = _widened(theirs, width)
        self.keys, self.values = (room[..., :width, :] for room in self._rooms)


def empty_cache(model: Model) -> DynamicCache | None:
    """A cache whose rows can be repeated and selected; None where a layer keeps a state that cannot.

    Layers of linear attention keep such a state.
    """
    base = base_of(model)
    has_arguments = cache_argument(base.forward) and "logits_to_keep" in inspect.signature(base.forward).parameters
    if base.config.is_encoder_decoder or not has_arguments:
        return None
    cache = DynamicCache(config=base.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache if cache.layers and can_select(cache) else None


def can_select(cache: DynamicCache) -> bool:
    """Whether the rows of every layer can be repeated and selected."""
    return all(type(layer) in (RoomyLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def prompt_cache(
    model: Model, input_ids: Tensor, attention_mask: Tensor, *, repeats: int, reads_all: bool = False
) -> DynamicCache | None:
    """Keys and values of all but the last token of left-padded prompts, each prompt's repeated for its completions.

    The last token is left to the first step of generation, which wants its logits. Prompts of like length run together,
    with little padding. The cache is empty where the first step may as well read the whole prompts, unless `reads_all`.

    Args:
        model: a transformers model, in eval mode.
        input_ids: [P, T], the longest prompt first.
        attention_mask: [P, T], 0 at padding.
        repeats: completions of each prompt.
        reads_all: read the prompts in any case.

    Returns:
        The cache, of P * repeats rows; None where the model has none whose rows can be repeated.
    """
    cache = empty_cache(model)
    width = input_ids.shape[1] - 1
    if cache is None or width == 0:
        return cache
    lengths = attention_mask.sum(1).tolist()
    # A prompt of one token leaves nothing to read; it is a row of padding in the last run.
    starts = [0] if any(cache.is_sliding) else _starts_of_runs([length for length in lengths if length > 1])
    if repeats == 1 and len(starts) == 1 and not reads_all:
        return cache
    runs, forward = list[list[RoomyLayer]](), base_of(model).forward
    for start, end in pairwise([*starts, len(lengths)]):
        part = slice(start, end), slice(-lengths[start], -1)
        inputs = {"input_ids": input_ids[part], "attention_mask": attention_mask[part]}
        run = cache if len(starts) == 1 else copy.deepcopy(cache)
        options = {cache_argument(forward) or CACHE: run, "use_cache": True, "logits_to_keep": 1}
        model(**positioned(forward, inputs), **options)
        runs.append(cast(list[RoomyLayer], run.layers))
    if len(runs) > 1:
        for number in range(len(cache.layers)):
            states = zip(*(run.pop(0).states for run in runs), strict=True)  # what is joined is kept once
            keys, values = (torch.cat([_widened(one, width) for one in kind]) for kind in states)
            cache.update(keys, values, number)
    if repeats > 1:
        cache.batch_repeat_interleave(repeats)
    return cache


def _starts_of_runs(lengths: Sequence[int]) -> list[int]:
    """Where runs begin that together cost least: the padded tokens of each, and `PASS` for each.

    Args:
        lengths: tokens of each prompt, descending.
    """
    best = [(0, 0)]  # of the first prompts: the least cost, and where the last run begins
    for end in range(1, len(lengths) + 1):
        best.append(min((best[start][0] + PASS + lengths[start] * (end - start), start) for start in range(end)))
    starts = [best[-1][1]]
    while starts[0]:
        starts.insert(0, best[starts[0]][1])
    return starts


def _widened(states: Tensor, width: int) -> Tensor:
    """Keys or values [P, H, T, D], cut on the left or with zeros there, [P, H, width, D]."""
    return functional.pad(states, (0, 0, width - states.shape[-2], 0))
