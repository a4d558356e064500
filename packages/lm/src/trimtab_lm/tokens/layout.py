"""Sequences side by side in as few positions as a model allows, and where in them each token is predicted.

A `TokenGroup` is a prefix and the branches that continue it: a document (no prefix, one branch), a preference pair (a
prompt, two answers), a rollout group (a prompt, G responses). `lay_out` puts groups into rows in one of four ways:

- tree: the prefix once, its branches behind it, blind to each other (a 4-D attention mask);
- packed: each branch with a copy of its prefix, rows filled best-fit, told apart by position ids that start again at 0
  and no attention mask (transformers then makes a block-diagonal one, or calls a varlen kernel);
- padded: each branch with a copy of its prefix in a row of its own, padded on the right;
- encoder-decoder: the prefix once in the encoder, the branches in the decoder, both padded on the right.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Layout = Literal["tree", "packed", "padded", "encoder-decoder"]
TOKEN_KEYS = (
    "input_ids", "attention_mask", "position_ids", "document", "branch", "decoder_input_ids", "decoder_attention_mask",
    "encoder_row", "source", "targets", "sequence", "lengths", "ends",
)  # fmt: skip
"""The columns of a laid-out batch: see `lay_out`."""


@dataclass(frozen=True)
class TokenGroup:
    """A prefix of token ids, the branches that continue it, and for each branch which of its tokens count.

    counts: like branches, 1 where the token's log-probability is wanted. With an empty prefix a branch's first token
    is predicted by nothing and never counts.
    """

    prefix: Sequence[int]
    branches: Sequence[Sequence[int]]
    counts: Sequence[Sequence[int]]

    @classmethod
    def document(cls, ids: Sequence[int], counts: Sequence[int] | None = None) -> "TokenGroup":
        """One sequence without a prefix; every token counts that can."""
        return cls([], [ids], [[1] * len(ids) if counts is None else counts])

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int]], counts: Sequence[Sequence[int]]) -> "TokenGroup":
        """Whole sequences with what they begin with in common as the prefix, up to the first token that counts."""
        shared = min(next((i for i, one in enumerate(row) if one), len(row)) for row in counts)
        shared = min(shared, *(len(ids) - 1 for ids in sequences))
        first = sequences[0]
        while any(list(ids[:shared]) != list(first[:shared]) for ids in sequences[1:]):
            shared -= 1
        return cls(first[:shared], [ids[shared:] for ids in sequences], [row[shared:] for row in counts])


def best_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Indices of `lengths` in rows whose sum is at most `width`: best-fit decreasing, the fullest row that has room.

    Rows keep the order of their longest item's index; every length must be at most `width`.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(open_rows, (lengths[index], -1))
        if place == len(open_rows):
            rows.append([index])
            room, row = width - lengths[index], len(rows) - 1
        else:
            room, row = open_rows.pop(place)
            rows[row].append(index)
            room -= lengths[index]
        if room:
            bisect.insort(open_rows, (room, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


def lean_width(lengths: Sequence[int]) -> int:
    """The width of rows in which `best_fit` leaves the least padding, between the longest length and twice that.

    Attention costs grow with the width, and so bound it.
    """
    longest = max(lengths)
    widths = {longest}
    for count in range(1, len(lengths)):
        rows = [0] * count  # filled evenly: the next longest piece goes into the emptiest row
        for length in sorted(lengths, reverse=True):
            heapq.heapreplace(rows, rows[0] + length)
        if max(rows) <= 2 * longest:
            widths.add(max(rows))
    return min(widths, key=lambda width: (width * len(best_fit(lengths, width)), width))


def lay_out(
    groups: Sequence[TokenGroup],
    layout: Layout,
    *,
    pad_token_id: int,
    width: int | None = None,
    decoder_start_token_id: int | None = None,
) -> dict[str, Tensor]:
    """Groups of S branches in all, with N tokens that count, as model inputs in R rows of W positions.

    width: W at least, for the rows of tree and packed; else the longest piece's length. decoder_start_token_id: what
    the decoder reads first (encoder-decoder only).

    Returns `input_ids` and `position_ids` [R, W] (tree, packed; a tree also `document` and `branch` [R, W], -1 and 0
    where it is padding) or `attention_mask` [R, W] (padded); or `input_ids`, `attention_mask` [groups, P],
    `decoder_input_ids`, `decoder_attention_mask` [S, W] and `encoder_row` [S] (encoder-decoder). And, for tokens that
    count in the order of the groups, branches and positions: `source` [N], the position that predicts it in the
    flattened [R * W], `targets` [N], its id, `sequence` [N], its branch in 0..S-1. And per branch: `lengths` [S],
    its tokens that count, `ends` [S], the flattened position of its last token.
    """
    if layout == "encoder-decoder":
        return _encoder_decoder(groups, pad_token_id, decoder_start_token_id)
    pieces = [[group] for group in groups] if layout == "tree" else [_apart(group) for group in groups]
    flat = [piece for own in pieces for piece in own]
    lengths = [len(piece.prefix) + sum(map(len, piece.branches)) for piece in flat]
    width = max([*lengths, width or 1])
    rows = [[i] for i in range(len(flat))] if layout == "padded" else best_fit(lengths, width)
    places = {index: (row, start) for row, own in enumerate(rows) for index, start in _starts(own, lengths)}

    ids = torch.full((len(rows), width), pad_token_id)
    positions, branch = torch.zeros_like(ids), torch.zeros_like(ids)
    document = torch.full_like(ids, -1)
    tokens = _Tokens()
    for index, piece in enumerate(flat):
        row, start = places[index]
        cursor = start + len(piece.prefix)
        ids[row, start:cursor] = torch.as_tensor(piece.prefix, dtype=torch.long)
        positions[row, start:cursor] = torch.arange(cursor - start)
        for number, (own, counts) in enumerate(zip(piece.branches, piece.counts, strict=True)):
            end = cursor + len(own)
            ids[row, cursor:end] = torch.as_tensor(own, dtype=torch.long)
            positions[row, cursor:end] = torch.arange(len(own)) + len(piece.prefix)
            branch[row, cursor:end] = number + 1
            before = start + len(piece.prefix) - 1 if piece.prefix else None
            tokens.add(own, counts, row * width + cursor, None if before is None else row * width + before)
            cursor = end
        document[row, start:cursor] = index
    used = document >= 0
    if layout == "padded":
        return {"input_ids": ids, "attention_mask": used.long(), **tokens.columns()}
    batch = {"input_ids": ids, "position_ids": positions, **tokens.columns()}
    return {**batch, "document": document, "branch": branch} if layout == "tree" else batch


def tree_mask(document: Tensor, branch: Tensor) -> Tensor:
    """[R, 1, W, W], True where a position (row) reads another (column): its own branch and its prefix, up to itself."""
    same = document[:, :, None] == document[:, None, :]
    reads = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
    return (same & reads).tril()[:, None]


def from_labels(labels: Tensor, *, is_encoder_decoder: bool = False) -> dict[str, Tensor]:
    """`source`, `targets` and `sequence` of labels [R, W] as transformers has them: -100 where a token does not count.

    A causal model's labels stand on the tokens that they are, so that the position before predicts them; the decoder's
    stand where they are predicted.
    """
    counted = labels != -100
    if not is_encoder_decoder:
        counted = counted.clone()
        counted[:, 0] = False
    places = counted.flatten().nonzero()[:, 0]
    return {
        "source": places if is_encoder_decoder else places - 1,
        "targets": labels.flatten()[places],
        "sequence": places // labels.shape[1],
        "lengths": counted.sum(1),
    }


def sum_per_sequence(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Sums of x [N] over the tokens of each sequence, [count]."""
    return x.new_zeros(count).index_add(0, sequence, x)


def token_columns(batch: dict[str, Any]) -> dict[str, Tensor]:
    """The columns of `lay_out` alone."""
    return {name: batch[name] for name in TOKEN_KEYS if name in batch}


class _Tokens:
    """Collects where counted tokens are predicted."""

    def __init__(self) -> None:
        self.source: list[int] = []
        self.targets: list[int] = []
        self.sequence: list[int] = []
        self.lengths: list[int] = []
        self.ends: list[int] = []

    def add(self, ids: Sequence[int], counts: Sequence[int], start: int, before: int | None) -> None:
        """A branch whose first token lies at `start` and is predicted at `before`."""
        number = len(self.lengths)
        counted = [i for i, one in enumerate(counts) if one and (i or before is not None)]
        self.source += [start + i - 1 if i else before for i in counted]  # type: ignore[misc]
        self.targets += [int(ids[i]) for i in counted]
        self.sequence += [number] * len(counted)
        self.lengths.append(len(counted))
        self.ends.append(start + len(ids) - 1)

    def columns(self) -> dict[str, Tensor]:
        names = ("source", "targets", "sequence", "lengths", "ends")
        return {name: torch.tensor(getattr(self, name), dtype=torch.long) for name in names}


def _apart(group: TokenGroup) -> list[TokenGroup]:
    """Each branch with its own copy of the prefix."""
    parts = zip(group.branches, group.counts, strict=True)
    return [TokenGroup(group.prefix, [ids], [counts]) for ids, counts in parts]


def _starts(row: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    start, places = 0, []
    for index in row:
        places.append((index, start))
        start += lengths[index]
    return places


def _encoder_decoder(
    groups: Sequence[TokenGroup], pad_token_id: int, decoder_start_token_id: int | None
) -> dict[str, Tensor]:
    if decoder_start_token_id is None:
        raise ValueError("An encoder-decoder batch needs decoder_start_token_id; it is in the model's config.")
    source, mask = _pad_right([group.prefix for group in groups], pad_token_id)
    branches = [ids for group in groups for ids in group.branches]
    counts = [row for group in groups for row in group.counts]
    read, read_mask = _pad_right([[decoder_start_token_id, *ids[:-1]] for ids in branches], pad_token_id)
    tokens = _Tokens()
    for number, (ids, row) in enumerate(zip(branches, counts, strict=True)):
        # The decoder reads one token behind: the place of a token in the row is where it is predicted.
        start = number * read.shape[1]
        tokens.add(ids, row, start + 1, start)
        tokens.ends[-1] -= 1
    rows = [row for row, group in enumerate(groups) for _ in group.branches]
    return {
        "input_ids": source, "attention_mask": mask, "decoder_input_ids": read, "decoder_attention_mask": read_mask,
        "encoder_row": torch.tensor(rows), **tokens.columns(),
    }  # fmt: skip


def _pad_right(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    padded = torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return padded, mask
