"""The loss of DPO, and the log-probabilities of pairs that it and its relatives in `variants` are functions of."""

from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of the answers of B pairs, summed over the tokens of each, in nats; all fields are [B].

    chosen, rejected: under the policy; ref_chosen, ref_rejected: under the reference, without gradient.
    chosen_length, rejected_length: tokens of the answers that were summed, at least 1.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    def __post_init__(self) -> None:
        shapes = {field.name: tuple(getattr(self, field.name).shape) for field in fields(self)}
        if self.chosen.dim() != 1 or len(set(shapes.values())) != 1:
            raise ValueError(f"Pairs need one number per pair, tensors of one shape [B]; got {shapes}.")

    @property
    def chosen_ratio(self) -> Tensor:
        """log pi - log ref of the chosen answers, [B]."""
        return precise(self.chosen) - precise(self.ref_chosen)

    @property
    def rejected_ratio(self) -> Tensor:
        """log pi - log ref of the rejected answers, [B]."""
        return precise(self.rejected) - precise(self.ref_rejected)

    @property
    def margin(self) -> Tensor:
        """How much more than the reference the policy prefers the chosen answers, [B], in nats."""
        return self.chosen_ratio - self.rejected_ratio

    def reference_free(self) -> "PairLogprobs":
        """The same pairs against a reference that gives every answer the same probability: zeros in its place."""
        return replace(
            self, ref_chosen=torch.zeros_like(self.ref_chosen), ref_rejected=torch.zeros_like(self.ref_rejected)
        )


def precise(x: Tensor) -> Tensor:
    """The numbers in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def implicit_rewards(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Tensor]:
    """beta a and beta b: the rewards that the policy is optimal for, up to a constant of the prompt.

    Rafailov et al. 2023, arXiv:2305.18290, Eq. 5. Returns two tensors [B], of the chosen and of the rejected answers.
    """
    return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio


class Loss(Protocol):
    """A loss per pair, [B], in float32 at least; it stays finite at margins of ten thousand nats.

    In the docstrings a = log pi(chosen) - log ref(chosen) and b = log pi(rejected) - log ref(rejected) are the
    log-ratios of the two answers, m = a - b is the margin, e the label smoothing and s the logistic function. Losses
    that are not in `variants.SMOOTHED` have no use for `label_smoothing`.
    """

    def __call__(self, pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor: ...


def smoothed_logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log s(x) - e log s(-x): the logistic loss of labels of which a share e is wrong."""
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def sigmoid(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log s(beta m) - e log s(-beta m): DPO (Rafailov et al. 2023, arXiv:2305.18290, Eq. 7).

    With e > 0 conservative DPO, for labels of which a share e is wrong (Mitchell 2023, "A note on DPO with noisy
    preferences", Eq. 3): least where s(beta m) = 1 - e.
    """
    return smoothed_logistic(beta * pairs.margin, label_smoothing)
