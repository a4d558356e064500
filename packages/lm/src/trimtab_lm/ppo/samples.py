"""The queries and responses of a step, cut into minibatches, and what belongs to their tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab_lm.tokens.logprobs import score_logits


@dataclass(frozen=True)
class Samples:
    """B queries with their responses, as `PPOTrainer.batched_forward_pass` takes them.

    model_inputs: what the model reads of them, each [B, T]. response_masks: of each response, 1 where a token counts.
    """

    queries: list[Tensor]
    responses: list[Tensor]
    model_inputs: dict[str, Tensor]
    response_masks: list[Tensor] | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """[B], tokens of query and response."""
        pairs = zip(self.queries, self.responses, strict=True)
        return torch.tensor([len(query) + len(response) for query, response in pairs])

    def rows(self, index: Tensor) -> "Samples":
        """The chosen rows. Their inputs keep all columns."""
        chosen = index.tolist()
        return Samples(
            [self.queries[i] for i in chosen],
            [self.responses[i] for i in chosen],
            {name: value[index.to(value.device)] for name, value in self.model_inputs.items()},
            None if self.response_masks is None else [self.response_masks[i] for i in chosen],
        )


def in_minibatches(
    forward: Callable[[Samples], Sequence[Tensor | None]], samples: Samples, size: int
) -> list[Tensor | None]:
    """What `forward` gives for `size` rows of like length at a time, [b, r, ...], joined to [B, R, ...] with 0 around.

    A column that is None in a minibatch is None.
    """
    order = samples.lengths.argsort(stable=True).split(size)
    parts = [forward(samples.rows(rows)) for rows in order]
    return [_joined(order, column) for column in zip(*parts, strict=True)]


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
