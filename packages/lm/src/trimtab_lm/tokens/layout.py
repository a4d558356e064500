"""Lays token sequences out in the rows of a batch, with the position that predicts each token.

A `TokenGroup` is a prefix and the branches that continue it: a document (no prefix, one branch), a preference pair (a
prompt, two answers), a rollout group (a prompt, G responses). `lay_out` puts groups into rows in one of five ways:

- tree: a row holds the prefix once and then its branches, which do not attend to each other (a 4-D attention mask). The
  mask grows with the squared width, so that long branches are cheaper with copies of the prefix (`cheapest_split`);
- row: a tree in a single row without padding, for attention that runs group by group (`tokens.fast.GroupMask`);
- packed: each branch has a copy of its prefix, and rows are filled best-fit. Position ids start again at 0 with each
  copy and there is no attention mask: transformers then makes a block-diagonal one, or calls a varlen kernel. Where
  each row has one branch there are no position ids: attention that is causal over whole rows needs no mask;
- padded: each branch has a copy of its prefix and a row to itself, padded on the right;
- encoder-decoder: the encoder reads the prefix once, the decoder reads the branches, both padded on the right.
"""

import bisect
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Integers = npt.NDArray[np.int64]
NOTHING: Integers = np.empty(0, dtype=np.int64)
Layout = Literal["row", "tree", "packed", "padded", "encoder-decoder"]
TRIALS = 64
INPUT_KEYS = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask")
"""The columns of a laid-out batch that a model's forward takes: see `lay_out`."""


@dataclass(frozen=True)
class TokenGroup:
    """A prefix, the branches that continue it, and a mask of their tokens.

    Args:
        prefix: token ids; may be empty.
        branches: token ids of each branch.
        counts: for each token of each branch, 1 where its log-probability is wanted, else 0. Where the prefix is empty
            nothing predicts a branch's first token, so it never counts.
    """

    prefix: Sequence[int]
    branches: Sequence[Sequence[int]]
    counts: Sequence[Sequence[int]]

    def __len__(self) -> int:
        """Returns the tokens of the prefix and of all branches."""
        return len(self.prefix) + sum(map(len, self.branches))

    @classmethod
    def document(cls, ids: Sequence[int], counts: Sequence[int] | None = None) -> "TokenGroup":
        """Returns a group of one sequence without a prefix; by default every token except the first counts."""
        return cls([], [ids], [[1] * len(ids) if counts is None else counts])

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int]], counts: Sequence[Sequence[int]]) -> "TokenGroup":
        """Returns a group whose prefix is the sequences' common beginning, up to the first counted token.

        Args:
            sequences: token ids, prefix included.
            counts: like sequences, 1 where a token counts.
        """
        shared = min(next((i for i, one in enumerate(row) if one), len(row)) for row in counts)
        shared = min(shared, *(len(ids) - 1 for ids in sequences))
        first = sequences[0]
        while any(list(ids[:shared]) != list(first[:shared]) for ids in sequences[1:]):
            shared -= 1
        return cls(first[:shared], [ids[shared:] for ids in sequences], [row[shared:] for row in counts])


def best_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Bins items into rows by best-fit decreasing: each item goes to the fullest row with enough room.

    Args:
        lengths: the lengths of the items, each at most `width`.
        width: the most that the lengths of a row's items add up to.

    Returns:
        For each row the indices of its items, ascending. Rows are in the order of their first index.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
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
    return sorted(map(sorted, rows))


def lean_width(lengths: Sequence[int]) -> int:
    """The width of rows in which `best_fit` leaves the least padding, between the longest length and twice that.

    Attention costs grow with the width, and so bound it. Of the numbers of rows that many pieces could have, it tries
    `TRIALS`: the work is then linear in the pieces, and they fill rows of any width well.
    """
    longest, by_length = max(lengths), sorted(lengths, reverse=True)
    widths, counts = {longest}, range(max(math.ceil(sum(lengths) / max(2 * longest, 1)), 1), len(lengths))
    for count in counts[:: max(math.ceil(len(counts) / TRIALS), 1)]:
        rows = [0] * count  # filled evenly: the next longest piece goes into the emptiest row
        for length in by_length:
            heapq.heapreplace(rows, rows[0] + length)
        if max(rows) <= 2 * longest:
            widths.add(max(rows))
        if max(rows) == longest:  # more rows are no narrower
            break
    return min(widths, key=lambda width: (width * len(best_fit(lengths, width)), width))


def split(groups: Sequence[TokenGroup], most: int) -> list[TokenGroup]:
    """Splits groups into groups of at most so many branches, each with a copy of its prefix."""
    return [
        TokenGroup(group.prefix, group.branches[i : i + most], group.counts[i : i + most])
        for group in groups
        for i in range(0, len(group.branches), most)
    ]


def cheapest_split(groups: Sequence[TokenGroup], hidden_size: int) -> list[TokenGroup]:
    """Splits groups so that a model computes least on the rows of a tree, where attention reads a whole mask.

    A layer of hidden size H has about 12 H^2 weights, so W positions take 24 H^2 W operations, and attention between
    all of them takes 4 H W^2: the cost is proportional to W + W^2 / 6H, and to W + W^2 / 12H for rows of one branch,
    whose positions attend to earlier ones alone. The widest group sets the width of all rows. The mask then exceeds
    that of packed rows by at most 6H numbers for each of their positions.
    """

    def cost(pieces: Sequence[TokenGroup]) -> float:
        lengths, is_causal = [*map(len, pieces)], all(len(piece.branches) == 1 for piece in pieces)
        return sum(lengths) * (1 + max(lengths) / ((12 if is_causal else 6) * hidden_size))

    most = max(len(group.branches) for group in groups)
    return min((split(groups, most >> halvings) for halvings in range(most.bit_length())), key=cost)


def lay_out(
    groups: Sequence[TokenGroup],
    layout: Layout,
    *,
    pad_token_id: int,
    width: int | None = None,
    is_lean: bool = False,
    hidden_size: int | None = None,
    decoder_start_token_id: int | None = None,
) -> dict[str, Tensor]:
    """Lays groups out as the inputs of a model, in R rows of W positions.

    Args:
        groups: with S branches and N counted tokens in all.
        layout: see the module.
        pad_token_id: fills the rest of the rows.
        width: the least W for tree and packed. Default: the longest piece (a group, or a branch with its prefix). A row
            is as wide as all groups.
        is_lean: whether tree and packed get the `lean_width` of their pieces.
        hidden_size: the model's. A tree's groups are then split by `cheapest_split`, and packed where each gets a
            single branch. None: they stay whole.
        decoder_start_token_id: what the decoder reads first; needed for encoder-decoder alone.

    Returns:
        The inputs of the layout, all int64:
            tree and row: `input_ids`, `position_ids`, `document` and `branch` [R, W]; padding has document -1 and
            branch 0.
            packed: `input_ids` and, where a row has several branches, `position_ids` [R, W].
            padded: `input_ids` and `attention_mask` [R, W].
            encoder-decoder: `input_ids` and `attention_mask` [groups, P], `decoder_input_ids` and
            `decoder_attention_mask` [S, W], and `encoder_row` [S], the group of each branch.

        For the counted tokens, ordered by group, branch and position: `source` [N], the place in the flattened [R * W]
        that predicts the token; `targets` [N], its id; `sequence` [N], its branch in 0..S-1.

        For the branches: `lengths` [S], how many tokens count; `ends` [S], the flattened place of the last token.
    """
    if layout == "encoder-decoder":
        return _encoder_decoder(groups, pad_token_id, decoder_start_token_id)
    pieces = groups
    if layout in ("packed", "padded"):
        pieces = split(groups, 1)
    elif layout == "tree" and hidden_size is not None:
        pieces = cheapest_split(groups, hidden_size)
        layout = "tree" if any(len(piece.branches) > 1 for piece in pieces) else "packed"
    lengths = [*map(len, pieces)]
    if is_lean and layout in ("tree", "packed"):
        width = lean_width(lengths)
    width = max(sum(lengths), 1) if layout == "row" else max([*lengths, width or 1])
    rows = [[i] for i in range(len(pieces))] if layout == "padded" else best_fit(lengths, width)
    places: dict[int, tuple[int, int]] = {}
    for row, items in enumerate(rows):
        start = 0
        for index in items:
            places[index] = row, start
            start += lengths[index]

    ids = np.full((len(rows), width), pad_token_id)  # NumPy reads lists several times as fast as torch
    positions, branch = np.zeros_like(ids), np.zeros_like(ids)
    document = np.full_like(ids, -1)
    branches: list[_Branch] = []
    for index, piece in enumerate(pieces):
        row, start = places[index]
        cursor = start + len(piece.prefix)
        ids[row, start:cursor] = piece.prefix
        positions[row, start:cursor] = np.arange(cursor - start)
        before = row * width + cursor - 1 if piece.prefix else None
        for number, (branch_ids, counts) in enumerate(zip(piece.branches, piece.counts, strict=True)):
            end = cursor + len(branch_ids)
            ids[row, cursor:end] = branch_ids
            positions[row, cursor:end] = np.arange(len(branch_ids)) + len(piece.prefix)
            branch[row, cursor:end] = number + 1
            branches.append((ids[row, cursor:end], counts, row * width + cursor - 1, before))
            cursor = end
        document[row, start:cursor] = index
    inputs = {"input_ids": ids}
    if layout == "padded":
        inputs |= {"attention_mask": (document >= 0).astype(np.int64)}
    elif layout != "packed" or len(rows) < len(pieces) or width > max(lengths):
        inputs |= {"position_ids": positions}
    if layout in ("tree", "row"):
        inputs |= {"document": document, "branch": branch}
    return _with_tokens(inputs, branches)


def from_labels(labels: Tensor, *, is_encoder_decoder: bool = False) -> dict[str, Tensor]:
    """Returns `source`, `targets`, `sequence` and `lengths` (see `lay_out`) of transformers' labels.

    Args:
        labels: [R, W], -100 where a token does not count. A causal model's label is at the token's position, and the
            position before predicts it. A decoder's label is at the position that predicts it.
        is_encoder_decoder: whether the labels are a decoder's.
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
    """Sums x [N] over the tokens of each of `count` sequences; `sequence` [N] says to which a token belongs."""
    return x.new_zeros(count).index_add(0, sequence, x)


_Branch = tuple[Sequence[int] | Integers, Sequence[int], int, int | None]
"""A branch's ids and counts, the flattened place before its first token, and the place that predicts that, if any."""


def _with_tokens(inputs: Mapping[str, Integers], branches: Sequence[_Branch]) -> dict[str, Tensor]:
    """Returns model inputs and the columns of counted tokens and of branches, as tensors; see `lay_out`."""
    source, targets, ends = [NOTHING], [NOTHING], []
    for ids, counts, place, before in branches:
        places, is_counted = np.arange(place, place + len(ids)), np.array(counts, dtype=bool)
        if before is None:
            is_counted[:1] = False
        else:
            places[:1] = before
        source.append(places[is_counted])
        targets.append(np.asarray(ids, dtype=np.int64)[is_counted])
        ends.append(place + len(ids))
    lengths = [*map(len, source[1:])]
    columns = {
        **inputs,
        "source": np.concatenate(source),
        "targets": np.concatenate(targets),
        "sequence": np.repeat(np.arange(len(lengths)), lengths),
        "lengths": np.array(lengths, dtype=np.int64),
        "ends": np.array(ends, dtype=np.int64),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def _encoder_decoder(
    groups: Sequence[TokenGroup], pad_token_id: int, decoder_start_token_id: int | None
) -> dict[str, Tensor]:
    """Lays groups out for a model with an encoder: see `lay_out`."""
    assert decoder_start_token_id is not None
    source, mask = pad([torch.tensor(group.prefix, dtype=torch.long) for group in groups], pad_token_id)
    branches = [ids for group in groups for ids in group.branches]
    counts = [row for group in groups for row in group.counts]
    read, read_mask = pad([torch.tensor([decoder_start_token_id, *ids[:-1]]) for ids in branches], pad_token_id)
    # The decoder's inputs are shifted by one, so a token's place in the row is the place that predicts it.
    starts = range(0, read.numel(), read.shape[1])
    tokens = _with_tokens({}, [*zip(branches, counts, starts, starts, strict=True)])
    tokens["ends"] -= 1
    rows = [row for row, group in enumerate(groups) for _ in group.branches]
    encoder = {"input_ids": source, "attention_mask": mask, "encoder_row": torch.tensor(rows)}
    return {**encoder, "decoder_input_ids": read, "decoder_attention_mask": read_mask, **tokens}


def pad(rows: Sequence[Tensor], value: int, *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Rows [T_i] as one tensor [B, max T] and its mask, padded on a side. The mask tells padding, not the value."""
    rows = [row.to(rows[0]) for row in rows]
    counts = [torch.ones_like(row, dtype=torch.long) for row in rows]
    padded = pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
    return padded, pad_sequence(counts, batch_first=True, padding_side=side)
