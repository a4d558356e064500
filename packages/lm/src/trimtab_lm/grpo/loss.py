"""The formulas of GRPO and its relatives, over the flat tokens of a micro-batch.

A micro-batch is N completion tokens that count, of S completions: `logprobs` and its like are [N]; `sequence`, [N], is
the number of the completion that a token belongs to, 0 to S - 1; `tokens_per_sequence` is [S]. No completion is split
between micro-batches. One that is masked for being truncated has no tokens among the N.

The loss of an optimizer step is the sum of `weights * losses` over all its tokens, with the weights of `token_weights`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab_common.formulas.advantages import (
    batch_scaled,
    group_centred,
    group_whitened,
    leave_one_out,
)
from trimtab_common.formulas.kl import clamped, k3
from trimtab_lm.tokens.layout import sum_per_sequence

SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": group_whitened,
    "batch": batch_scaled,
    "none": group_centred,
    "rloo": leave_one_out,
    "reinforce++": lambda scores, groups: group_whitened(scores, torch.zeros_like(groups)),
    "raw": lambda scores, groups: scores,
}
"""What each score is compared with, and what the difference is divided by: see `advantages`."""

OF_THE_BATCH = ("batch", "reinforce++")
"""Scales that depend on the scores of all prompts."""


def advantages(scores: Tensor, *, scale: str, mask: Tensor | None = None) -> Tensor:
    """The advantage of each completion over others.

    - "group", "batch", "none": the score less the mean of its group, over the deviation of the group (Shao et al. 2024,
      arXiv:2402.03300), over that of all scores (Liu et al. 2025, arXiv:2508.08221), or undivided (Dr. GRPO, Liu et al.
      2025, arXiv:2503.20783).
    - "rloo": the score less the mean of the others of its group (Ahmadian et al. 2024, arXiv:2402.14740).
    - "reinforce++": the score less the mean of all scores, over their deviation (Hu 2025, arXiv:2501.03262).
    - "raw": the score (REINFORCE without a baseline, Williams 1992).

    Args:
        scores: [P, G], of G completions to each of P prompts. For the scales `OF_THE_BATCH` gather the scores of all
            processes first.
        scale: one of the above.
        mask: [P, G], 1 where a completion counts, all by default.

    Returns:
        [P, G]: 0 where the mask is 0, whose score enters neither mean nor deviation, and, but for "raw", where all that
        it is measured against are equal.
    """
    counted = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.bool()
    groups = torch.arange(len(scores), device=scores.device)[:, None].expand_as(scores)
    result = torch.zeros_like(scores, dtype=torch.promote_types(scores.dtype, torch.float32))
    if counted.any():
        result[counted] = SCALES[scale](scores[counted].to(result.dtype), groups[counted])
    return result


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, sequence: Tensor, tokens_per_sequence: Tensor) -> Tensor:
    """Returns log pi - log pi_old of each token, [N], clamped to +-20: the logarithm of PPO's and GRPO's ratio."""
    return clamped(logprobs - old_logprobs)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, sequence: Tensor, tokens_per_sequence: Tensor) -> Tensor:
    """The mean of log pi - log pi_old over the completion of each token: GSPO (Zheng et al. 2025, arXiv:2507.18071,
    Eq. 7).

    Returns [N], clamped to +-20: all tokens of a completion have its ratio, so that it is clipped as a whole.
    """
    sums = sum_per_sequence(logprobs - old_logprobs, sequence, len(tokens_per_sequence))
    return clamped(sums[sequence] / tokens_per_sequence[sequence])


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
}
"""The importance ratio's log at each `importance_sampling_level`."""


def cispo_losses(log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, clip_high: float) -> Tensor:
    """-sg(min(r, 1 + clip_high)) A log pi: CISPO (MiniMax 2025, arXiv:2506.13585, Eq. 4-5, without a lower bound).

    sg stops the gradient: a token beyond the bound still learns, with a bounded weight.

    Args:
        log_ratio: [N], log r, by one of `LOG_RATIOS`.
        advantages: [N], of each token's completion.
        logprobs: [N], nats, with gradient.
        clip_high: how far above 1 the ratio may be.

    Returns:
        [N], to be minimised.
    """
    weights = log_ratio.detach().exp().clamp(max=1 + clip_high)
    return -weights * advantages * logprobs


def corrected_k3(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi / pi_old * k3: unbiased for KL(pi, ref) on tokens of pi_old, and its gradient for that KL's (DeepSeek-AI 2025,
    arXiv:2512.02556, Eq. 7).

    Without the ratio, through which gradient flows, `k3` on the policy's own tokens has the gradient of KL(ref, pi).
    All [N]; returns [N], in nats. Both logs of ratios are clamped to +-20.
    """
    return clamped(logprobs - old_logprobs).exp() * k3(logprobs, ref_logprobs)


class Totals(NamedTuple):
    """The counts of one optimizer step, without masked completions.

    sequences, tokens: completions and their tokens, over all micro-batches and processes. rank_tokens: tokens of all
    micro-batches of this process. ranks: number of processes.
    """

    sequences: int
    tokens: int
    rank_tokens: int
    ranks: int = 1


NORMALIZATIONS: dict[str, Callable[[Tensor, Totals, int], Tensor]] = {
    "grpo": lambda lengths, totals, _: 1 / (lengths * totals.sequences),
    "bnpo": lambda lengths, totals, _: torch.ones_like(lengths) / (totals.rank_tokens * totals.ranks),
    "dr_grpo": lambda lengths, totals, limit: torch.ones_like(lengths) / (totals.sequences * limit),
    "dapo": lambda lengths, totals, _: torch.ones_like(lengths) / totals.tokens,
}
"""The weight of a token of each completion, [S], by `loss_type`; infinite only where there is no token to weigh.

Of the completions' lengths [S], the totals, and max_completion_length.
"""
NORMALIZATIONS["cispo"] = NORMALIZATIONS["dapo"]
BY_TOKENS = ("bnpo", "dapo", "cispo")
"""The `loss_type`s whose loss is a mean over tokens; that of the others is one over completions."""


def token_weights(
    loss_type: str, sequence: Tensor, tokens_per_sequence: Tensor, *, totals: Totals, max_completion_length: int
) -> Tensor:
    """Weights [N], float32; the weighted sum of the tokens' losses is the loss of the step.

    - "grpo": mean over the tokens of each completion, then over completions (Shao et al. 2024, arXiv:2402.03300,
      Eq. 3).
    - "dapo": mean over all tokens of the step, of all processes (Yu et al. 2025, arXiv:2503.14476, Eq. 8).
    - "cispo": as "dapo", for the losses of `cispo_losses`.
    - "bnpo": mean over the tokens of each process, then over processes: the mean over the local batch, whose tokens
      weigh more where they are fewer. The local batch is all that a process learns from in the step, not one
      micro-batch, so that accumulation changes nothing; with one process it is "dapo".
    - "dr_grpo": sum over completions x max_completion_length, a constant (Liu et al. 2025, arXiv:2503.20783).

    Whatever the split into micro-batches, the sum is the same. Where gradients are averaged over processes, as DDP and
    FSDP do, multiply it by `totals.ranks`.
    """
    lengths = tokens_per_sequence.float()
    return NORMALIZATIONS[loss_type](lengths, totals, max_completion_length)[sequence]
