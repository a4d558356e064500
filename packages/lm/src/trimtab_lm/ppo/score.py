"""Scores response tokens under a model, without padding: the one place where PPO calls `tokens/`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
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


class TokenOutputs(NamedTuple):
    """A model's outputs at the N tokens with mask 1.

    Attributes:
        logprobs: [N], in nats.
        entropy: [N], in nats, of the distributions that the tokens come from.
        values: [N], what the critic expects; None for a reference.
        logits: [N, V], where they were asked for.
        head_inputs: [N, ...], what the LM head read at these tokens, where it was asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    logits: Tensor | None = None
    head_inputs: Tensor | None = None


class Documented(NamedTuple):
    """The four columns that `batched_forward_pass` returns: [b, R], logits [b, R, V]; 0 where the mask is 0."""

    logprobs: Tensor
    logits: Tensor | None
    values: Tensor | None
    mask: Tensor


class Scores(Documented):
    """The same four, with two more that only the built-in pass knows.

    Attributes:
        entropy: [b, R], in nats; None if the pass did not compute it.
        head_inputs: [b, R, ...], what the LM head read, where it was asked for.
    """

    entropy: Tensor | None
    head_inputs: Tensor | None

    def __new__(
        cls,
        logprobs: Tensor,
        logits: Tensor | None,
        values: Tensor | None,
        mask: Tensor,
        *,
        entropy: Tensor | None = None,
        head_inputs: Tensor | None = None,
    ) -> "Scores":
        scores = super().__new__(cls, logprobs, logits, values, mask)
        scores.entropy, scores.head_inputs = entropy, head_inputs
        return scores

    def without_logits(self) -> "Scores":
        """The same, to keep."""
        kept = {"entropy": self.entropy, "head_inputs": self.head_inputs}
        return Scores(self.logprobs, None, self.values, self.mask, **kept)


class Reader(Protocol):
    """A model that takes laid-out tokens: `ActorCritic`, or `ReferencePolicy`."""

    @property
    def readers(self) -> Mapping[str, Layouts]:
        """The layouts of its trunks, by the keyword that each trunk's tokens come under."""


Row = tuple[list[int], list[int], list[int]]
"""The ids of a query and of its response, and for each response token 1 where it counts."""


def score(
    reader: Reader,
    run: Callable[..., TokenOutputs],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    model_inputs: Mapping[str, Tensor],
    response_masks: Sequence[Tensor] | None = None,
    *,
    padding: Padding,
    device: torch.device,
    **options: Any,
) -> Scores:
    """Scores the responses of b rows in one forward pass, which reads no padding, and an equal query once.

    Args:
        reader: says how the model reads tokens.
        run: the model, as the accelerator wrapped it.
        queries: b rows of token ids; their lengths are used.
        responses: b rows of token ids; their lengths are used.
        model_inputs: the ids, as from `padded_inputs`, padded on either side. On the host nothing waits for a device.
        response_masks: for each response, 1 where a token counts; None: all count.
        padding: what layouts add.
        device: the model's.
        options: of `ActorCritic.forward`.
    """
    rows = _rows(queries, responses, model_inputs, response_masks)
    rows_of_query: dict[tuple[int, ...], list[int]] = {}
    for i, (query, _, _) in enumerate(rows):
        rows_of_query.setdefault(tuple(query), []).append(i)
    members = list(rows_of_query.values())
    tokens = {name: _tokens(rows, members, layouts, padding, device) for name, layouts in reader.readers.items()}
    outputs = run(**tokens, **options)

    mask, _ = pad_right([counts for _, _, counts in rows], 0)
    order = [i for group in members for i in group]
    places = np.arange(mask.numel()).reshape(mask.shape)[order][mask.numpy()[order] > 0]
    index, mask = torch.from_numpy(places).to(device), mask.to(device)

    def spread(flat: Tensor | None) -> Tensor | None:
        if flat is None:
            return None
        spread = flat.new_zeros(mask.numel(), *flat.shape[1:]).index_copy(0, index, flat)
        return spread.view(*mask.shape, *flat.shape[1:])

    logprobs, entropy, values, logits, head_inputs = map(spread, outputs)
    assert logprobs is not None
    return Scores(logprobs, logits, values, mask, entropy=entropy, head_inputs=head_inputs)


def _rows(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    model_inputs: Mapping[str, Tensor],
    response_masks: Sequence[Tensor] | None,
) -> list[Row]:
    """What a model reads, without the padding, split into queries and responses."""

    def unpadded(prefix: str) -> list[list[int]]:
        ids, is_read = (model_inputs[prefix + name].cpu().numpy() for name in ("input_ids", "attention_mask"))
        return [row[keep > 0].tolist() for row, keep in zip(ids, is_read, strict=True)]

    read = unpadded("")
    pairs = [(ids[: len(query)], ids[len(query) :]) for ids, query in zip(read, queries, strict=True)]
    if "decoder_input_ids" in model_inputs:
        pairs = [(ids, decoded[1:]) for ids, decoded in zip(read, unpadded("decoder_"), strict=True)]
    counts = [[1] * len(row) for row in responses]
    if response_masks is not None:
        counts = [(mask.cpu().numpy() > 0).astype(int).tolist() for mask in response_masks]
    return [(query, response, row) for (query, response), row in zip(pairs, counts, strict=True)]


def _tokens(
    rows: Sequence[Row], members: Sequence[Sequence[int]], layouts: Layouts, padding: Padding, device: torch.device
) -> dict[str, Tensor]:
    """The rows as one model reads them, each query once: the columns of `lay_out`."""
    layout = layouts.apart if len(members) == len(rows) else layouts.shared
    groups = [TokenGroup(rows[m[0]][0], [rows[i][1] for i in m], [rows[i][2] for i in m]) for m in members]
    lengths = [len(query) + len(response) for query, response, _ in rows]
    if layout == "tree":
        lengths = [len(group.prefix) + sum(map(len, group.branches)) for group in groups]
    width = lean_width(lengths) if layout in ("packed", "tree") else None
    start = padding.decoder_start
    tokens = lay_out(groups, layout, pad_token_id=padding.pad_token_id, width=width, decoder_start_token_id=start)
    return {name: column.to(device) for name, column in tokens.items()}


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


def joined(order: Sequence[Tensor], parts: Sequence[Scores]) -> Scores:
    """The scores of B rows, [B, R, ...], from those of minibatches, [b, r, ...], whose row numbers are `order`."""

    def column(values: Sequence[Tensor | None]) -> Tensor | None:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        width = max(value.shape[1] for value in known)
        whole = known[0].new_zeros(sum(map(len, known)), width, *known[0].shape[2:])
        for rows, value in zip(order, known, strict=True):
            whole[rows.to(value.device), : value.shape[1]] = value
        return whole

    logprobs, logits, values, mask = map(column, zip(*parts, strict=True))
    assert logprobs is not None
    assert mask is not None
    entropy, head_inputs = column([part.entropy for part in parts]), column([part.head_inputs for part in parts])
    return Scores(logprobs, logits, values, mask, entropy=entropy, head_inputs=head_inputs)


def completed(columns: Sequence[Any], mask: Tensor | None, *, temperature: float) -> Scores:
    """The scores that a forward pass of 2024 returned, 0 where its mask is 0, with the entropy if it gave logits.

    Args:
        columns: log-probabilities, logits or None, values or None, and the mask, in any width.
        mask: the one that it returned for the same rows before the updates; None: it is the first.
        temperature: of the entropy.

    Raises:
        ValueError: it counts other tokens than it did before.
    """
    logprobs, logits, values, own_mask = columns
    width = own_mask.shape[1]
    if mask is not None and (not torch.equal(own_mask.bool(), mask[:, :width].bool()) or mask[:, width:].any()):
        raise ValueError(
            f"batched_forward_pass counts {own_mask.sum(1).tolist()} tokens in the rows of a minibatch, and counted "
            f"{mask.sum(1).tolist()} in the same rows before the updates, or it counts them in other columns. Its "
            "masks must depend on queries, responses, response_masks and the width of model_inputs alone."
        )
    counts = own_mask.bool()
    values = None if values is None else torch.where(counts, values, 0.0)
    entropy = None if logits is None else token_entropy(logits, own_mask, temperature=temperature)
    return Scores(torch.where(counts, logprobs, 0.0), logits, values, own_mask, entropy=entropy)


def at_tokens(
    rows: Sequence[Tensor] | None, response_masks: Sequence[Tensor] | None, mask: Tensor, *, like: Tensor
) -> Tensor | None:
    """Numbers of response tokens at the places of those that count, [B, W]; 0 elsewhere.

    Args:
        rows: B rows, a number for each response token; None if the numbers are unknown.
        response_masks: for each response, 1 where a token counts; None: all count.
        mask: [B, W], 1 where a token counts.
        like: has the dtype and the device.
    """
    if rows is None:
        return None
    if response_masks is not None:
        rows = [row[counts.to(row.device) > 0] for row, counts in zip(rows, response_masks, strict=True)]
    flat = torch.cat([row.to(like) for row in rows])
    return flat.new_zeros(mask.shape).masked_scatter(mask.bool(), flat)


def token_entropy(logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, [b, R], of the distributions of logits [b, R, V] where mask [b, R] is 1; 0 elsewhere."""
    at_mask = logits[mask.bool()]
    targets = torch.zeros(len(at_mask), dtype=torch.long, device=logits.device)
    entropy = score_logits(at_mask, targets, temperature=temperature).entropy
    return entropy.new_zeros(mask.shape).masked_scatter(mask.bool(), entropy)


def full_logprobs(logits: Tensor | None, *, temperature: float) -> Tensor:
    """Log-probabilities of the whole vocabulary, in float32 at least; shape of `logits`."""
    if logits is None:
        raise ValueError(
            "kl_penalty='full' needs the logits of policy and reference. batched_forward_pass was called with "
            "return_logits=True, and returned None in their place."
        )
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
