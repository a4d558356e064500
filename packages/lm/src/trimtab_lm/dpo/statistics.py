"""The logged statistics of a batch of pairs."""

from collections.abc import Sequence

from torch import Tensor

from trimtab_common.stats import Mean

from .algorithm import PairScores
from .collator import SIDES


def pair_statistics(
    scores: Sequence[Tensor],
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    count: int | None = None,
) -> dict[str, Mean]:
    """The documented statistics of the first `count` of B pairs, by default of all, and their loss.

    Losses and rewards are [B]. A tie of rewards is no success. scores: `PairScores`, whose `entropy/*` are per token;
    or log-probabilities and logits, which give `logits/*`, the means of all logits, as in 2024.
    """
    per_pair = {
        "loss": losses,
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).to(losses.dtype),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": scores[0],
        "logps/rejected": scores[1],
    }
    means = {name: Mean.of(values[:count]) for name, values in per_pair.items()}
    if not isinstance(scores, PairScores):
        named = zip(SIDES, scores[2:4], strict=False)  # a replaced method may return nothing else
        return means | {f"logits/{side}": Mean.of(x[:count]) for side, x in named if isinstance(x, Tensor)}
    per_token = {
        "entropy/chosen": (scores.chosen_entropy, scores.chosen_length),
        "entropy/rejected": (scores.rejected_entropy, scores.rejected_length),
    }
    return means | {
        name: Mean(sums[:count].detach().sum(), counts[:count].sum()) for name, (sums, counts) in per_token.items()
    }
