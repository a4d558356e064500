"""Attention of a decoding step on a CPU, without the padding of short rows."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from trimtab_lm.interface import base_of
from trimtab_lm.tokens.attention import OwnMask
from trimtab_lm.tokens.forward import leaves_masks_to_sdpa

from .cache import RoomyLayer

RUN = 256
"""What a call of SDPA costs, as a number of keys that a row reads."""
ALIGNED = 16
"""Numbers of float32 that a CPU adds at a time."""
MOST_ALIKE = 64
"""The most groups of rows among which runs are looked for; the time grows with the square."""


class RaggedMask(OwnMask):
    """The mask [b, 1, 1, T] of the latest tokens of rows with padding on the left, of which SDPA reads little.

    Neighbouring rows of like length are read together, from a column before their first token on. The columns are
    multiples of 16: within 512 columns a CPU then adds the same numbers in the same order as with all columns.

    Attributes:
        reads: [b, 1, 1, T], True where a row has a token.
        runs: the first row, the end and the first column of each run of rows.
    """

    reads: Tensor
    runs: Sequence[tuple[int, int, int]]

    @classmethod
    def of(cls, reads: Tensor, runs: Sequence[tuple[int, int, int]]) -> "RaggedMask":
        """Returns the mask of rows [b, T], 1 at tokens, with their `ragged_runs`."""
        reads = reads[:, None, None].bool()
        mask = reads.as_subclass(cls)
        mask.reads, mask.runs, mask.was_read = reads, runs, False
        return mask

    def numbers(self) -> Tensor:
        """[b, 1, 1, T]."""
        return self.reads

    @staticmethod
    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: "RaggedMask", *args: Any, **options: Any
    ) -> Tensor:
        """Returns the attention [b, heads, 1, E], run by run.

        Args:
            query: [b, heads, 1, E].
            key, value: [b, heads, T, E].
            attn_mask: of the rows.
            args, options: of SDPA.
        """
        outputs = [
            scaled_dot_product_attention(
                query[start:end],
                key[start:end, :, column:],
                value[start:end, :, column:],
                attn_mask.reads[start:end, :, :, column:],
                *args,
                **options,
            )
            for start, end, column in attn_mask.runs
        ]
        return torch.cat(outputs)


def ragged_runs(reads: Tensor) -> list[tuple[int, int, int]]:
    """Returns the runs of a `RaggedMask` for rows [b, T], 1 at tokens, in their order: those that cost least together.

    Columns become multiples of a larger number where there are many neighbours of unlike length.
    """
    width, step = reads.shape[1], ALIGNED
    alike = _alike(reads, step)
    while len(alike) > MOST_ALIKE:
        step *= 2
        alike = _alike(reads, step)
    best = [(0, 0, 0)]  # of the first rows: the least cost, where the last run begins, and its first column
    for end in range(1, len(alike) + 1):
        column, choices = width, []
        for start in reversed(range(end)):
            column = min(column, alike[start][2])
            cost = RUN + (width - column) * (alike[end - 1][1] - alike[start][0])
            choices.append((best[start][0] + cost, start, column))
        best.append(min(choices))
    runs: list[tuple[int, int, int]] = []
    end = len(alike)
    while end:
        _, start, column = best[end]
        runs.insert(0, (alike[start][0], alike[end - 1][1], column))
        end = start
    return runs


def _alike(reads: Tensor, step: int) -> list[tuple[int, int, int]]:
    """Neighbouring rows whose first tokens are in the same `step` columns: first row, end and first column."""
    columns = (reads.argmax(1) // step * step).tolist()
    starts = [row for row, column in enumerate(columns) if row == 0 or column != columns[row - 1]]
    return [(start, end, columns[start]) for start, end in pairwise([*starts, len(columns)])]


class Ragged:
    """The masks of a batch that is decoded.

    Args:
        model: the model that decodes.
        cache: of its keys and values; None: one whose rows cannot be selected.
    """

    def __init__(self, model: Any, cache: DynamicCache | None):
        holds_all = cache is not None and all(type(layer) is RoomyLayer for layer in cache.layers)
        self._model = base_of(model) if holds_all and model.device.type == "cpu" else None
        self._runs: list[tuple[int, int, int]] | None = None

    def rows_changed(self) -> None:
        """Other rows are decoded from now on."""
        self._runs = None

    def masked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a forward pass, with a `RaggedMask` where each row reads one token and rows have padding."""
        reads = inputs.get("attention_mask")
        if self._model is None or not isinstance(reads, Tensor) or reads.dim() != 2 or inputs["input_ids"].shape[1] > 1:
            return inputs
        if self._runs is None:
            self._runs = ragged_runs(reads)
        has_padding = any(column for _, _, column in self._runs)
        if not has_padding or not leaves_masks_to_sdpa(self._model):
            return inputs
        return {**inputs, "attention_mask": RaggedMask.of(reads, self._runs)}
