"""Prompts that wait for places in a batch, and how they take the places of completions that have ended."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, GenerationConfig

from trimtab_lm.compat.generation import CACHE
from trimtab_lm.interface import Model
from trimtab_lm.tokens.positions import positions_of

from .cache import RoomyLayer, empty_cache, prompt_cache


def can_wait(model: Model, config: GenerationConfig) -> bool:
    """Whether prompts can join a batch that is under way.

    The cache must hold all tokens of each row. The settings must not count from where the first prompts ended, as the
    processors of transformers do for the least number of tokens.

    Args:
        model: a transformers model.
        config: one that `decode` follows.
    """
    cache = empty_cache(model)
    counts = config.max_new_tokens is None or config.min_new_tokens or config.min_length
    return cache is not None and not counts and all(type(layer) is RoomyLayer for layer in cache.layers)


class Waiting:
    """Prompts that wait, the longest first.

    Args:
        input_ids: [P, T], padded on the left.
        attention_mask: [P, T], 0 at padding.
        repeats: completions of each prompt.

    Attributes:
        taken: prompts that wait no longer.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, *, repeats: int):
        self.input_ids, self.attention_mask, self.repeats = input_ids, attention_mask, repeats
        self.lengths = attention_mask.sum(1).tolist()
        self.taken = 0

    def __bool__(self) -> bool:
        return self.taken < len(self.lengths)

    def take(self, room: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of the next prompts, as many as have `room` with all their completions, one or more."""
        start, self.taken = self.taken, min(self.taken + room // self.repeats, len(self.lengths))
        part = slice(start, self.taken), slice(-self.lengths[start], None)
        return self.input_ids[part], self.attention_mask[part]


class Rows(NamedTuple):
    """The rows of a batch while it is sampled, [b] each.

    Attributes:
        numbers: of the completions.
        places: among those of the batch, of which there are as many as rows at the start.
        begun: the steps that drew the first tokens.
        ids: [b, t], prompts and completions so far, padded on the left.
    """

    numbers: Tensor
    places: Tensor
    begun: Tensor
    ids: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> "Rows":
        """The rows at the start, of prompts [B, T]."""
        numbers = torch.arange(len(ids), device=ids.device)
        return cls(numbers, numbers, torch.zeros_like(numbers), ids)

    def select(self, chosen: Tensor) -> "Rows":
        """The rows of these numbers in the batch."""
        return Rows(*(column[chosen] for column in self))

    def seat(
        self,
        model: Model,
        inputs: Mapping[str, Any],
        waiting: Waiting,
        *,
        kept: Tensor,
        size: int,
        step: int,
        padding: int,
    ) -> tuple["Rows", dict[str, Any]]:
        """The rows that go on, with waiting prompts in the free places.

        All but the last token of the prompts are read, into the cache: the next step reads the last.

        Args:
            model: the transformers model.
            inputs: of the next step, the cache among them.
            waiting: has a prompt whose completions have room.
            kept: the numbers in the batch of the rows that go on.
            size: places.
            step: the number of the next step.
            padding: the id at padding.

        Returns:
            The rows, and their inputs. The cache of `inputs` is changed.
        """
        cache: DynamicCache = inputs[CACHE]
        first = size + waiting.taken * waiting.repeats
        prompts, prompt_mask = waiting.take(size - len(kept))
        read = prompt_cache(model, prompts, prompt_mask, repeats=waiting.repeats, reads_all=True)
        assert read is not None  # `can_wait`
        ids, mask = (columns.repeat_interleave(waiting.repeats, 0) for columns in (prompts, prompt_mask))
        rows, old_mask = self.select(kept), inputs.get("attention_mask")
        # `generate` may leave out a mask without padding.
        old_mask = torch.ones_like(rows.ids) if old_mask is None else old_mask[kept]
        width = int(torch.cat([old_mask.sum(1), mask.sum(1)]).max())
        layers = cast(list[RoomyLayer], cache.layers), cast(list[RoomyLayer], read.layers)  # `can_wait`
        for layer, other in zip(*layers, strict=True):
            layer.replace_rows(kept, other, count=len(ids), width=width - 1)
        mask = torch.cat([_fitted(old_mask, width, 0), _fitted(mask, width, 0)])
        changed: dict[str, Any] = {"attention_mask": mask}
        if inputs.get("position_ids") is not None:
            changed["position_ids"] = positions_of(mask)
        new = torch.arange(len(ids), device=ids.device)
        is_free = torch.ones(size, dtype=torch.bool, device=ids.device).index_fill(0, rows.places, value=False)
        joined = Rows(
            torch.cat([rows.numbers, first + new]),
            torch.cat([rows.places, is_free.nonzero()[: len(ids), 0]]),
            torch.cat([rows.begun, torch.full_like(new, step)]),
            torch.cat([_fitted(rows.ids, width, padding), _fitted(ids, width, padding)]),
        )
        return joined, {**inputs, **changed}


def _fitted(columns: Tensor, width: int, value: int) -> Tensor:
    """[b, t] cut or padded on the left, [b, width]."""
    return functional.pad(columns, (width - columns.shape[1], 0), value=value)
