"""Batches of labelled answers, and of the same prompts with the answers of other rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab_lm.data.formats import Row
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out


@dataclass
class UnpairedCollator:
    """Prompts with their completions, laid out by `lay_out`, and `label` [B], True where a completion is desirable.

    `mismatched` has the same prompts with the completion of the next row, and of the last row with that of the first:
    the x_i and y_j with j = (i + 1) mod m of Ethayarajh et al. 2024 (arXiv:2402.01306).

    Args:
        pad_token_id: fills rows.
        layout: "padded" works for every decoder; the trainer sets the leanest one.
        decoder_start_token_id: for "encoder-decoder".
        is_mismatched: whether there is `mismatched`.
        max_length: tokens of a prompt with a completion that is not its own, which loses its end. None: no limit.
    """

    pad_token_id: int
    layout: Layout = "padded"
    decoder_start_token_id: int | None = None
    is_mismatched: bool = True
    max_length: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Returns the batch of rows of `prompt_input_ids`, `completion_input_ids` and `label`."""
        prompts = [list(row["prompt_input_ids"]) for row in rows]
        completions = [list(row["completion_input_ids"]) for row in rows]
        batch: dict[str, Any] = self._laid_out(prompts, completions)
        batch["label"] = torch.tensor([row["label"] for row in rows])
        if self.is_mismatched:
            others = [self._cut(prompt, completions[(i + 1) % len(rows)]) for i, prompt in enumerate(prompts)]
            batch["mismatched"] = self._laid_out(prompts, others)
        return batch

    def _cut(self, prompt: list[int], completion: list[int]) -> list[int]:
        return completion if self.max_length is None else completion[: self.max_length - len(prompt)]

    def _laid_out(self, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> dict[str, Tensor]:
        start = self.decoder_start_token_id
        rows = zip(prompts, completions, strict=True)
        groups = [TokenGroup(prompt, [completion], [[1] * len(completion)]) for prompt, completion in rows]
        return lay_out(groups, self.layout, pad_token_id=self.pad_token_id, decoder_start_token_id=start)
