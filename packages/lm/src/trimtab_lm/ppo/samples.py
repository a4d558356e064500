"""The queries and responses of a step: which of their tokens count, how a model reads them, and minibatches of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from trimtab_lm.models.interface import Model
from trimtab_lm.sampling.generate import pad
from trimtab_lm.tokens.forward import best_layout
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out, lean_width, pad_right
from trimtab_lm.tokens.scores import score_logits


class Layouts(NamedTuple):
    """How a model reads samples: `apart` where no query repeats, `shared` where one prefix serves equal queries."""

    apart: Layout
    shared: Layout

    @classmethod
    def of(cls, model: Model) -> "Layouts":
        """The leanest layouts that give the model's own outputs; see `best_layout`."""
        apart = best_layout(model, share_prefix=False)
        return cls(apart, best_layout(model, share_prefix=True) if apart == "packed" else apart)


class Padding(NamedTuple):
    """Tokens that a layout adds to samples.

    Attributes:
        pad_token_id: the id at padding.
        decoder_start: what a decoder reads first; None for a causal model.
    """

    pad_token_id: int
    decoder_start: int | None = None


@dataclass(frozen=True)
class Samples:
    """B queries with their responses, of up to R tokens.

    Attributes:
        queries: B rows of token ids.
        responses: B rows of token ids.
        response_masks: for each response, 1 where a token counts; None: all tokens count.
        model_inputs: inputs [B, T] that are padded on either side, for models to read instead of a layout of ours.
        response_rewards: for each response, what an environment gave at each token; None: nothing.
        part_of: the samples of which these are rows, and the numbers of the rows; None: they are no rows of others.
    """

    queries: list[Tensor]
    responses: list[Tensor]
    response_masks: list[Tensor] | None = None
    model_inputs: dict[str, Tensor] | None = None
    response_rewards: list[Tensor] | None = None
    part_of: tuple["Samples", list[int]] | None = None

    @cached_property
    def ids(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Queries, responses, and 1 or 0 for each response token, as lists: read from the device once for all rows."""
        if self.part_of is not None:
            whole, rows = self.part_of
            queries, responses, counts = ([column[i] for i in rows] for column in whole.ids)
            return queries, responses, counts
        responses = _ids(self.responses)
        counts = [[1] * len(row) for row in responses] if self.response_masks is None else _ids(self.response_masks)
        return _ids(self.queries), responses, counts

    @cached_property
    def lengths(self) -> Tensor:
        """[B], tokens of query and response."""
        pairs = zip(self.queries, self.responses, strict=True)
        return torch.tensor([len(query) + len(response) for query, response in pairs])

    @cached_property
    def mask(self) -> Tensor:
        """[B, R], 1 where a response token counts."""
        return pad_right(self.ids[2], 0)[0].to(self.responses[0].device)

    @cached_property
    def rewards(self) -> Tensor:
        """[B, R], float32, what an environment gave at each token; 0 without one."""
        rewards = self.response_rewards or [torch.zeros_like(response) for response in self.responses]
        return pad([row.float() for row in rewards], 0)[0]

    @cached_property
    def rows_of_query(self) -> list[list[int]]:
        """For each query that models read, the numbers of the rows that have it."""
        if self.model_inputs is not None:
            return [[i] for i in range(len(self.queries))]
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, ids in enumerate(self.ids[0]):
            rows.setdefault(tuple(ids), []).append(i)
        return list(rows.values())

    @property
    def order(self) -> list[int]:
        """Row numbers in the order in which models read the rows."""
        return [i for rows in self.rows_of_query for i in rows]

    @cached_property
    def groups(self) -> list[TokenGroup]:
        """Each query once, with the responses to it, in `order`."""
        queries, responses, counts = self.ids
        return [
            TokenGroup(queries[rows[0]], [responses[i] for i in rows], [counts[i] for i in rows])
            for rows in self.rows_of_query
        ]

    def tokens(self, layouts: Layouts, padding: Padding) -> dict[str, Tensor]:
        """The rows as one model reads them, with the columns of `lay_out`; tokens that count come in `order`."""
        if self.model_inputs is not None:
            return self.model_inputs | self._predictions(self.model_inputs)
        layout = layouts.apart if len(self.groups) == len(self.queries) else layouts.shared
        lengths = self.lengths.tolist()
        if layout == "tree":
            lengths = [len(group.prefix) + sum(map(len, group.branches)) for group in self.groups]
        width = lean_width(lengths) if layout in ("packed", "tree") else None
        pad_token_id, start = padding
        tokens = lay_out(self.groups, layout, pad_token_id=pad_token_id, width=width, decoder_start_token_id=start)
        return {name: column.to(self.queries[0].device) for name, column in tokens.items()}

    def _predictions(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`source` and `targets` of the tokens that count in padded inputs."""
        is_decoder = "decoder_input_ids" in inputs
        read = inputs["decoder_attention_mask" if is_decoder else "attention_mask"]
        first = torch.tensor([0 if is_decoder else len(query) - 1 for query in self.queries], device=read.device)
        # Position p predicts response token number (real tokens before p) - (where the response's first is predicted).
        number = read.cumsum(1) - 1 - first[:, None]
        mask = self.mask.to(read.device)
        inside = read.bool() & (number >= 0) & (number < mask.shape[1])
        counts = inside & mask.gather(1, number.clamp(0, mask.shape[1] - 1)).bool()
        targets = pad(self.responses, 0)[0][self.mask.bool()]
        return {"source": counts.flatten().nonzero()[:, 0], "targets": targets.to(read.device)}

    @cached_property
    def places(self) -> Tensor:
        """[N], the places in the flattened [B * R] of the tokens that count, in `order`."""
        counts, width = self.ids[2], self.mask.shape[1]
        places = [i * width + j for i in self.order for j, is_counted in enumerate(counts[i]) if is_counted]
        return torch.tensor(places, dtype=torch.long).to(self.mask.device)

    def spread(self, flat: Tensor) -> Tensor:
        """Numbers [N, ...] of the tokens that count, in `order`, at their places in [B, R, ...]; 0 elsewhere."""
        spread = flat.new_zeros(self.mask.numel(), *flat.shape[1:]).index_copy(0, self.places.to(flat.device), flat)
        return spread.view(*self.mask.shape, *flat.shape[1:])

    def without_start(self, start: int) -> "Samples":
        """The same without the decoder start token that `model.generate` returns in front of a response."""
        leads = [int(len(row) > 1 and int(row[0]) == start) for row in self.responses]
        masks, rewards = self.response_masks, self.response_rewards
        return replace(
            self,
            responses=[row[lead:] for row, lead in zip(self.responses, leads, strict=True)],
            response_masks=masks and [mask[lead:] for mask, lead in zip(masks, leads, strict=True)],
            response_rewards=rewards and [row[lead:] for row, lead in zip(rewards, leads, strict=True)],
            part_of=None,
        )

    def rows(self, index: Tensor) -> "Samples":
        """The chosen rows. Padded inputs keep all columns."""
        chosen = index.tolist()
        masks, rewards, inputs = self.response_masks, self.response_rewards, self.model_inputs
        return replace(
            self,
            queries=[self.queries[i] for i in chosen],
            responses=[self.responses[i] for i in chosen],
            response_masks=None if masks is None else [masks[i] for i in chosen],
            response_rewards=None if rewards is None else [rewards[i] for i in chosen],
            model_inputs=inputs and {name: value[index.to(value.device)] for name, value in inputs.items()},
            part_of=(self, chosen),
        )


def padded_inputs(queries: Sequence[Tensor], responses: Sequence[Tensor], padding: Padding) -> dict[str, Tensor]:
    """What a causal model reads (query and response in one row), or an encoder-decoder one, padded on the right.

    The last token of each response is read too: callers that shift the columns themselves find it as a label.

    Args:
        queries: B rows of token ids.
        responses: B rows of token ids.
        padding: with a decoder start for an encoder-decoder model.

    Returns:
        `input_ids` and `attention_mask` [B, T]; for an encoder-decoder model the query's, and
        `decoder_input_ids` and `decoder_attention_mask` [B, 1 + R] of the decoder start and the response.
    """
    pad_token_id, decoder_start = padding
    if decoder_start is None:
        rows = [torch.cat([query, response]) for query, response in zip(queries, responses, strict=True)]
        return dict(zip(("input_ids", "attention_mask"), pad(rows, pad_token_id), strict=True))
    read = [torch.cat([response.new_tensor([decoder_start]), response]) for response in responses]
    return {
        **dict(zip(("input_ids", "attention_mask"), pad(queries, pad_token_id), strict=True)),
        **dict(zip(("decoder_input_ids", "decoder_attention_mask"), pad(read, pad_token_id), strict=True)),
    }


def _ids(rows: Sequence[Tensor]) -> list[list[int]]:
    """Rows as lists, read from their device in one piece."""
    flat = iter(torch.cat(list(rows)).tolist())
    return [[next(flat) for _ in row] for row in rows]


Columns = TypeVar("Columns", bound=tuple[Tensor | None, ...])


def in_minibatches(forward: Callable[[Samples], Columns], samples: Samples, size: int) -> Columns:
    """What `forward` gives for `size` rows of like length at a time, [b, r, ...], joined to [B, R, ...] with 0 around.

    Args:
        forward: from some of the rows to a named tuple of their columns.
        samples: B rows.
        size: rows at a time.

    Returns:
        The columns of all rows. A column that is None in a minibatch is None.
    """
    order = samples.lengths.argsort(stable=True).split(size)
    parts = [forward(samples.rows(rows)) for rows in order]
    return type(parts[0])(*(_joined(order, column) for column in zip(*parts, strict=True)))  # type: ignore[arg-type]


def _joined(order: Iterable[Tensor], parts: Sequence[Tensor | None]) -> Tensor | None:
    columns = [part for part in parts if part is not None]
    if len(columns) < len(parts):
        return None
    width = max(part.shape[1] for part in columns)
    joined = columns[0].new_zeros(sum(map(len, columns)), width, *columns[0].shape[2:])
    for rows, part in zip(order, columns, strict=True):
        joined[rows.to(part.device), : part.shape[1]] = part
    return joined


def carry(x: Tensor, mask: Tensor, onto: Tensor) -> Tensor:
    """The numbers of the tokens that count in `mask`, in the places of those that count in `onto`; 0 elsewhere.

    Args:
        x: [b, R], a number for each position of `mask`.
        mask: [b, R], 1 where a token counts.
        onto: [b, W], the same tokens in the same order, in other columns.

    Returns:
        [b, W], in the dtype of `x`.
    """
    return x.new_zeros(onto.shape).masked_scatter(onto.bool(), x[mask.bool()])


def check_same_tokens(mask: Tensor, old_mask: Tensor) -> None:
    """Raise ValueError unless two masks, [b, W] and [b, R], count as many tokens in each row."""
    if not torch.equal(mask.sum(1), old_mask.sum(1)):
        raise ValueError(
            f"batched_forward_pass counts {mask.sum(1).tolist()} tokens in the rows of a minibatch, and counted "
            f"{old_mask.sum(1).tolist()} in the same rows before the updates. Its masks must depend on queries, "
            "responses and response_masks alone."
        )


def token_entropy(logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, [b, R], of the distributions of logits [b, R, V] where mask [b, R] is 1; 0 elsewhere."""
    at_tokens = logits[mask.bool()]
    targets = torch.zeros(len(at_tokens), dtype=torch.long, device=logits.device)
    entropy = score_logits(at_tokens, targets, temperature=temperature).entropy
    return entropy.new_zeros(mask.shape).masked_scatter(mask.bool(), entropy)


def full_logprobs(logits: Tensor, *, temperature: float) -> Tensor:
    """Log-probabilities of the whole vocabulary, in float32 at least; shape of `logits`."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
