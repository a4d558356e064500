"""Batches of pairs of answers: laid out for a scorer, or padded in the documented columns.

Rows hold `input_ids_chosen` and `input_ids_rejected`, each a prompt with its answer, their `attention_mask_chosen` and
`attention_mask_rejected`, 1 where there is a token (everywhere, without this column), and optionally a `margin`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.collator import as_list
from trimtab_lm.data.formats import Row
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out

SIDES = ("chosen", "rejected")


@dataclass
class PairCollator:
    """The columns of `lay_out` [2B sequences: chosen and rejected of each pair in turn], and `margin` [B].

    A pair's common beginning is its group's prefix, which a tree holds once.
    """

    pad_token_id: int
    layout: Layout = "padded"
    hidden_size: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        pairs = [[real_tokens(row, side) for side in SIDES] for row in rows]
        groups = [TokenGroup.of_sequences(pair, [[0] * len(ids) for ids in pair]) for pair in pairs]
        batch = lay_out(groups, self.layout, pad_token_id=self.pad_token_id, hidden_size=self.hidden_size)
        return batch | _margins(rows)


@dataclass
class RewardDataCollatorWithPadding:
    """Pads the two texts of each pair: `input_ids_*` and `attention_mask_*` [B, T] of each side, and `margin` [B].

    tokenizer: pads on its padding_side with its pad token. padding: True or "longest", each side to its longest text;
        "max_length", to max_length; False for texts of one length. pad_to_multiple_of: round T up to such a multiple.
    max_length: T for padding="max_length". Nothing is cut here, see `RewardConfig.truncation_mode`.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:
            raise ValueError(
                "The tokenizer has no pad token. Set one: tokenizer.pad_token = tokenizer.eos_token will do for a "
                "causal model."
            )
        if self.padding == "max_length" and self.max_length is None:
            raise ValueError("padding='max_length' pads to max_length, which is None. Give it, or use padding=True.")

    def __call__(self, features: Sequence[Row]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for side in SIDES:
            rows = [real_tokens(row, side) for row in features]
            padded = self.tokenizer.pad(
                {"input_ids": rows, "attention_mask": [[1] * len(ids) for ids in rows]},
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
            batch |= {f"{name}_{side}": padded[name] for name in ("input_ids", "attention_mask")}
        return batch | _margins(features)


def real_tokens(row: Row, side: str) -> list[int]:
    """The ids of a side of a pair, without the positions at which its mask is 0.

    Raises ValueError for a mask of another length, and where no token is left.
    """
    ids = as_list(row[f"input_ids_{side}"])
    mask = as_list(row.get(f"attention_mask_{side}", [1] * len(ids)))
    if len(mask) != len(ids):
        raise ValueError(
            f"input_ids_{side} has {len(ids)} tokens and attention_mask_{side} {len(mask)}. They need one length."
        )
    kept = list(compress(ids, mask))
    if not kept:
        raise ValueError(f"input_ids_{side} holds no token, or padding alone: there is nothing to score. Drop the row.")
    return kept


def pair_rows(batch: Mapping[str, Tensor], *, pad_token_id: int, padding_side: str = "right") -> dict[str, Tensor]:
    """A batch with its 2B sequences in rows: chosen and rejected of each pair in turn.

    One of `PairCollator` is returned as it is. Of the padded columns of `RewardDataCollatorWithPadding` are made
    `input_ids` and `attention_mask` [2B, T], and `ends` [2B], the flattened position of each sequence's last token.
    """
    if "ends" in batch:
        return dict(batch)
    names = [f"{name}_{side}" for side in SIDES for name in ("input_ids", "attention_mask")]
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"The data collator gave {sorted(batch)}; RewardTrainer needs {', '.join(missing)} too. Leave "
            "data_collator out, or give what RewardDataCollatorWithPadding gives."
        )
    width = max(batch[f"input_ids_{side}"].shape[1] for side in SIDES)

    def rows(name: str, value: int) -> Tensor:
        sides = []
        for side in SIDES:
            column = batch[f"{name}_{side}"]
            gap = width - column.shape[1]
            sides.append(F.pad(column, (gap, 0) if padding_side == "left" else (0, gap), value=value))
        return torch.stack(sides, 1).flatten(0, 1)

    ids, mask = rows("input_ids", pad_token_id), rows("attention_mask", 0)
    last = (mask * torch.arange(1, width + 1, device=mask.device)).argmax(1)
    ends = last + torch.arange(len(ids), device=ids.device) * width
    margin = {"margin": batch["margin"]} if batch.get("margin") is not None else {}
    return {"input_ids": ids, "attention_mask": mask, "ends": ends, **margin}


def sequences(rows: Mapping[str, Tensor], count: int) -> list[list[int]]:
    """The token ids of the first `count` sequences of a batch of `pair_rows`, without padding."""
    found = []
    for end in rows["ends"][:count].tolist():
        row, place = divmod(end, rows["input_ids"].shape[1])
        ids = rows["input_ids"][row]
        if "branch" in rows:
            document, branch = rows["document"][row], rows["branch"][row]
            used = (document == document[place]) & ((branch == 0) | (branch == branch[place]))
        elif "attention_mask" in rows:
            used = rows["attention_mask"][row].bool()
        else:
            places = torch.arange(len(ids), device=ids.device)
            before = rows["position_ids"][row, place] if "position_ids" in rows else place
            used = (places <= place) & (places >= place - before)
        found.append(ids[used].tolist())
    return found


def one_margin(margin: object) -> float:
    """The margin of one pair as a number: of a number, or of one in a list, an array or a tensor."""
    values = torch.as_tensor(margin if margin is not None else [], dtype=torch.float64).flatten()
    if len(values) != 1 or not torch.isfinite(values[0]):
        raise ValueError(f"margin={margin} came in; each pair needs one finite number. Fill it, or leave margin out.")
    return float(values[0])


def _margins(rows: Sequence[Row]) -> dict[str, Tensor]:
    if "margin" not in rows[0]:
        return {}
    return {"margin": torch.tensor([one_margin(row["margin"]) for row in rows])}
