"""The losses of DPO and its relatives, by their names in configurations, and weighted sums of losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab_lm.tokens.scores import upcast

EXO_SMOOTHING = 1e-3
DISCOPOP_TAU = 0.05  # as the loss was discovered
LEAST_SURPRISE = 1e-6  # nats per token: a likelier answer would have infinite odds


@dataclass
class PairLogprobs:
    """Log-probabilities of the answers of B pairs, summed over the tokens of each, in nats; all fields are [B].

    chosen, rejected: under the policy; ref_chosen, ref_rejected: under the reference, without gradient.
    chosen_length, rejected_length: tokens of the answers that were summed, at least 1; 1 for averages.
    chosen_ratio, rejected_ratio: log pi - log ref, in float32 at least. margin: how much more than the reference the
    policy prefers the chosen answers.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    chosen_ratio: Tensor = field(init=False)
    rejected_ratio: Tensor = field(init=False)
    margin: Tensor = field(init=False)

    def __post_init__(self) -> None:
        answers = self.chosen.shape == self.rejected.shape == self.ref_chosen.shape == self.ref_rejected.shape
        lengths = self.chosen.shape == self.chosen_length.shape == self.rejected_length.shape
        if self.chosen.dim() != 1 or not (answers and lengths):
            shapes = {name: tuple(tensor.shape) for name, tensor in vars(self).items()}
            raise ValueError(f"Pairs need one number per pair, tensors of one shape [B]; got {shapes}.")
        self.chosen_ratio = upcast(self.chosen) - self.ref_chosen
        self.rejected_ratio = upcast(self.rejected) - self.ref_rejected
        self.margin = self.chosen_ratio - self.rejected_ratio


def implicit_rewards(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Tensor]:
    """beta a and beta b: the rewards that the policy is optimal for, up to a constant of the prompt.

    Rafailov et al. 2023, arXiv:2305.18290, Eq. 5. Returns two tensors [B], of the chosen and of the rejected answers.
    """
    return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio


def rewards_per_token(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Tensor]:
    """beta a / n and beta b / n': the rewards of SimPO, whose a and b have no reference.

    Meng et al. 2024, arXiv:2405.14734, Eq. 4. Returns two tensors [B], as `implicit_rewards` does.
    """
    chosen, rejected = implicit_rewards(pairs, beta=beta)
    return chosen / pairs.chosen_length, rejected / pairs.rejected_length


class Loss(Protocol):
    """A loss per pair, [B], in float32 at least; it stays finite at margins of ten thousand nats.

    In the docstrings a = log pi(chosen) - log ref(chosen) and b = log pi(rejected) - log ref(rejected) are the
    log-ratios of the two answers, m = a - b is the margin, e the label smoothing and s the logistic function. Losses
    that are not in `SMOOTHED` have no use for `label_smoothing`.
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


def hinge(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """max(0, 1 - beta m): SLiC (Zhao et al. 2023, arXiv:2305.10425), against a reference as in RSO (Liu et al. 2023,
    arXiv:2309.06657)."""
    return F.relu(1 - beta * pairs.margin)


def ipo(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(m' - 1 / (2 beta))^2 with the margin m' of the log-probs per token (Azar et al. 2023, arXiv:2310.12036, Eq. 17).

    beta is the paper's tau. The paper's margin is a sum; averages, as its authors advise, make the target free of the
    answers' lengths.
    """
    margin = pairs.chosen_ratio / pairs.chosen_length - pairs.rejected_ratio / pairs.rejected_length
    return (margin - 1 / (2 * beta)) ** 2


def kto_pair(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(1 - s(beta (a - z_b)) + 1 - s(beta (z_a - b))) / 2: KTO on pairs (Ethayarajh et al. 2024, arXiv:2402.01306).

    z_a = max(0, mean of a) and z_b = max(0, mean of b) over the batch are its estimates of the KL to the reference,
    each compared with the other answers; as in the paper no gradient flows through them.
    """
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    kl_chosen, kl_rejected = (ratio.detach().mean().clamp(min=0) for ratio in (a, b))
    return 0.5 * (torch.sigmoid(-beta * (a - kl_rejected)) + torch.sigmoid(-beta * (kl_chosen - b)))


def robust(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2e) (Chowdhury et al. 2024, arXiv:2403.00409).

    Its mean over labels that are flipped with probability e < 1/2 is the loss `sigmoid` of the true labels.
    """
    x = beta * pairs.margin
    mixture = -(1 - label_smoothing) * F.logsigmoid(x) + label_smoothing * F.logsigmoid(-x)
    return mixture / (1 - 2 * label_smoothing)


def exo_pair(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """KL((s(beta m), s(-beta m)), (1 - e, e)): EXO on pairs (Ji et al. 2024, arXiv:2402.00856, Eq. 16).

    The reverse KL to labels without noise would be infinite: e = 0 means e = 0.001.
    """
    x = beta * pairs.margin
    noise = torch.tensor(label_smoothing or EXO_SMOOTHING, dtype=x.dtype, device=x.device)
    right = torch.sigmoid(x) * (F.logsigmoid(x) - torch.log1p(-noise))
    return right + torch.sigmoid(-x) * (F.logsigmoid(-x) - noise.log())


def nca_pair(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log s(beta a) - (log s(-beta a) + log s(-beta b)) / 2: NCA on pairs (Chen et al. 2024, arXiv:2402.05369)."""
    chosen, rejected = implicit_rewards(pairs, beta=beta)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def apo_zero(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """1 - s(beta a) + s(beta b): APO-zero, where the chosen answers are better than the model's own.

    D'Oosterlinck et al. 2024, arXiv:2408.06266, Eq. 7.
    """
    chosen, rejected = implicit_rewards(pairs, beta=beta)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """s(beta a) + 1 - s(beta m): APO-down, where the chosen answers are worse than the model's own.

    D'Oosterlinck et al. 2024, arXiv:2408.06266, Eq. 8.
    """
    return torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(-beta * pairs.margin)


def sppo_hard(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2: SPPO where the chosen answer wins for sure.

    Wu et al. 2024, arXiv:2405.00675, with eta = 1 / beta and probabilities 1 and 0 of winning.
    """
    return (pairs.chosen_ratio - 0.5 / beta) ** 2 + (pairs.rejected_ratio + 0.5 / beta) ** 2


def aot(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """The loss `sigmoid` between the k-th smallest margins of policy and reference: AOT, for pairs of one prompt.

    Melnyk et al. 2024, arXiv:2406.05882: the policy's log pi(chosen) - log pi(rejected) should exceed the
    reference's at every quantile of the batch. Returns [B] in the order of quantiles, not of pairs.
    """
    policy = (upcast(pairs.chosen) - upcast(pairs.rejected)).sort().values
    reference = (upcast(pairs.ref_chosen) - upcast(pairs.ref_rejected)).sort().values
    return smoothed_logistic(beta * (policy - reference), label_smoothing)


def aot_pair(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """The loss `sigmoid` between the k-th smallest a and the k-th smallest b: AOT for chosen and rejected answers that
    need not share a prompt, whatever the name, which is that of other libraries.

    Melnyk et al. 2024, arXiv:2406.05882. Returns [B] in the order of quantiles, not of pairs.
    """
    margin = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed_logistic(beta * margin, label_smoothing)


def discopop(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - g) log s(x) + g exp(-x) with x = beta m and g = s(x / 0.05): the loss that a language model discovered.

    Lu et al. 2024, arXiv:2406.08414, Eq. 5 ("LRML", DiscoPOP). Not convex: it rises between x = 0 and about 0.1.
    """
    x = beta * pairs.margin
    exponential = torch.exp(F.logsigmoid(x / DISCOPOP_TAU) - x)  # g exp(-x), where exp(-x) alone would overflow
    return -torch.sigmoid(-x / DISCOPOP_TAU) * F.logsigmoid(x) + exponential


def sft(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log pi(chosen) / n, nats per token of the chosen answer: the term that RPO adds to DPO.

    Pang et al. 2024, arXiv:2404.19733, Eq. 1-2. `loss_type=["sigmoid", "sft"]`, `loss_weights=[1, alpha]` is RPO.
    """
    return -upcast(pairs.chosen) / pairs.chosen_length


def cpo(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log s(x) - e log s(-x) - log pi(chosen) / n, x = beta (log pi(chosen) - log pi(rejected)): CPO.

    Xu et al. 2024, arXiv:2401.08417, Eq. 5. There is no reference. `sft` is the last term, for other weights of it.
    """
    margin = upcast(pairs.chosen) - upcast(pairs.rejected)
    return smoothed_logistic(beta * margin, label_smoothing) + sft(pairs, beta=beta)


def simpo(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0, gamma: float = 0.5) -> Tensor:
    """-(1 - e) log s(x) - e log s(-x), x = beta (log pi(chosen) / n - log pi(rejected) / n') - gamma: SimPO.

    Meng et al. 2024, arXiv:2405.14734, Eq. 6, with the answers' lengths n and n'. There is no reference.
    """
    margin = upcast(pairs.chosen) / pairs.chosen_length - upcast(pairs.rejected) / pairs.rejected_length
    return smoothed_logistic(beta * margin - gamma, label_smoothing)


def orpo(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log pi(chosen) / n - beta log s(log odds(chosen) - log odds(rejected)): ORPO (Hong et al. 2024,
    arXiv:2403.07691, Eq. 6-7).

    odds = p / (1 - p), where p is the geometric mean of an answer's token probabilities; beta is the paper's lambda.
    There is no reference. A p above exp(-1e-6) counts as that.
    """
    chosen, rejected = (
        (upcast(logprobs) / length).clamp(max=-LEAST_SURPRISE)
        for logprobs, length in ((pairs.chosen, pairs.chosen_length), (pairs.rejected, pairs.rejected_length))
    )
    log_odds = [mean - torch.log(-torch.expm1(mean)) for mean in (chosen, rejected)]
    return sft(pairs, beta=beta) - beta * F.logsigmoid(log_odds[0] - log_odds[1])


LOSSES: dict[str, Loss] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "kto_pair": kto_pair,
    "kto": kto_pair,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_pair": aot_pair,
    "discopop": discopop,
    "sft": sft,
    "cpo": cpo,
    "simpo": simpo,
    "orpo": orpo,
}
"""The losses under their names in configurations; `kto` is another name of `kto_pair`."""

SMOOTHED = frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_pair", "cpo", "simpo"})
"""Losses that know label smoothing."""

WITHOUT_REFERENCE = frozenset({"cpo", "simpo", "orpo"})
"""Losses that look at the policy alone."""


def check_losses(
    names: str | Sequence[str], weights: Sequence[float] | None = None, *, beta: float, label_smoothing: float
) -> None:
    """ValueError unless `mixed` knows these losses and weights, and they are defined at these numbers.

    beta must be positive. label_smoothing lies in [0, 0.5]: at 0.5 the labels say nothing, and `robust` would divide
    by zero. One that no loss of `names` uses is refused.
    """
    mixed(names, weights)
    names = [names] if isinstance(names, str) else names
    if not beta > 0:
        raise ValueError(f"beta={beta}: the losses need a positive beta, such as 0.1.")
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must lie between 0 and 0.5: it is the share of labels that are wrong."
        )
    if label_smoothing == 0.5 and "robust" in names:
        raise ValueError("label_smoothing=0.5 leaves the loss 'robust' nothing to learn from: use less than 0.5.")
    if label_smoothing and not SMOOTHED.intersection(names):
        raise ValueError(
            f"label_smoothing={label_smoothing} has no meaning for {', '.join(names)}: set it to 0, or use one "
            f"of {', '.join(sorted(SMOOTHED))}."
        )


def needs_reference(names: str | Sequence[str]) -> bool:
    """Whether one of these losses measures against a reference; `sft`, which does not, logs rewards against it."""
    chosen = {names} if isinstance(names, str) else set(names)
    return not (chosen & WITHOUT_REFERENCE and chosen <= WITHOUT_REFERENCE | {"sft"})


def mixed(
    names: str | Sequence[str], weights: Sequence[float] | None = None, *, simpo_gamma: float | None = None
) -> Loss:
    """The sum of these losses of `LOSSES`, times `weights` (1 each by default; they need not sum to 1).

    simpo_gamma: the gamma of `simpo`; None: its own. ValueError for an unknown name, for weights that are not one per
    name, and for negative weights.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names or not LOSSES.keys() >= set(names):
        unknown = [name for name in names if name not in LOSSES]
        raise ValueError(
            f"Unknown losses {unknown or names}: choose from {', '.join(LOSSES)}. A loss of your own takes a subclass "
            "of DPOTrainer that replaces dpo_loss."
        )
    losses = LOSSES if simpo_gamma is None else LOSSES | {"simpo": partial(simpo, gamma=simpo_gamma)}
    if weights is None and len(names) == 1:
        return losses[names[0]]
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names) or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"Losses {names} need one weight each, none negative; got {list(weights)}.")

    def mixture(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
        parts = []
        for name, weight in zip(names, weights, strict=True):
            parts.append(weight * losses[name](pairs, beta=beta, label_smoothing=label_smoothing))
        return torch.stack(parts).sum(0)

    return mixture
