"""How far a sampler's probabilities are from the trainer's, and the weights that correct the difference.

Other kernels, another precision or older weights make a sampler another policy than the one that is trained.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab_common.formulas.kl import LOG_RATIO_CLAMP
from trimtab_common.stats import Mean

LARGEST = "sampling/token_ratio/max"


class Mismatch(NamedTuple):
    """How far a sampler's probabilities are from the trainer's, on the sampled tokens.

    Attributes:
        difference: [N], |log pi_trainer - log pi_sampler|, nats.
        token_ratio: [N], pi_trainer / pi_sampler of each token.
        sequence_ratio: [B], pi_trainer / pi_sampler of each whole completion.
    """

    difference: Tensor
    token_ratio: Tensor
    sequence_ratio: Tensor


@torch.no_grad()
def sampler_mismatch(logprobs: Tensor, sampler_logprobs: Tensor, *, lengths: Tensor) -> Mismatch:
    """Statistics of the difference between two policies on sampled tokens; 0 and 1 without tokens.

    Args:
        logprobs: [N], nats, of the tokens of B completions one after the other, under the trainer's policy that was to
            sample them.
        sampler_logprobs: [N], nats, of the same tokens as they were sampled, at the same temperature.
        lengths: [B], tokens of each completion, N in all.

    Returns:
        Differences and ratios. Logs of ratios are clamped to +-20.
    """
    gap = logprobs - sampler_logprobs
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=gap.device), lengths)
    log_ratio = torch.zeros(len(lengths), dtype=gap.dtype, device=gap.device).index_add_(0, rows, gap)
    limits = -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP
    return Mismatch(gap.abs(), gap.clamp(*limits).exp(), log_ratio.clamp(*limits).exp())


def truncated_importance_weights(token_ratio: Tensor, *, cap: float) -> Tensor:
    """min(pi_trainer / pi_sampler, cap): the weight of each token's loss (truncated importance sampling).

    The weights make the gradient on the sampler's tokens that of the trainer's policy, as far as the cap leaves it;
    the cap bounds their variance (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"). Ratios 0.5, 1 and 4 with cap 2 weigh 0.5, 1 and 2. Surrogate losses are proportional to the advantage,
    so that weighing the advantages weighs the losses.

    Args:
        token_ratio: [...], of `sampler_mismatch`.
        cap: the largest weight, above 0; the paper's C.

    Returns:
        [...].
    """
    return token_ratio.clamp(max=cap)


def corrected(
    advantages: Tensor, logprobs: Tensor, sampler_logprobs: Tensor | None, *, lengths: Tensor, cap: float | None
) -> tuple[Tensor, dict[str, Mean | Tensor]]:
    """Advantages, weighed by `truncated_importance_weights` if there is a cap, and statistics of the mismatch.

    The statistics are for `gather_stats` and then `with_largest`: `sampling/logp_difference/mean` and
    `sampling/token_ratio/mean` and `/max` of the tokens, `sampling/importance_ratio/mean` of the completions, and with
    a cap `sampling/token_ratio/truncated`, the share of tokens whose ratio is above it.

    Args:
        advantages: [N], of the tokens of B completions one after the other.
        logprobs: [N]; see `sampler_mismatch`.
        sampler_logprobs: [N]; None if the sampler does not tell them: then there are no statistics.
        lengths: [B], tokens of each completion.
        cap: the largest weight; None: no correction.

    Raises:
        ValueError: there is a cap and nothing to correct by.
    """
    if sampler_logprobs is None:
        if cap is not None:
            raise ValueError(
                f"importance_sampling_cap={cap} needs the log-probabilities of the sampler, and there are none. Sample "
                "with rollout_backend 'continuous_batching', 'vllm' or 'vllm_server', or leave it out."
            )
        return advantages, {}
    difference, ratio, sequence_ratio = sampler_mismatch(logprobs, sampler_logprobs, lengths=lengths)
    stats: dict[str, Mean | Tensor] = {
        "sampling/logp_difference/mean": Mean.of(difference),
        "sampling/importance_ratio/mean": Mean.of(sequence_ratio, lengths > 0),
        "sampling/token_ratio/mean": Mean.of(ratio),
        LARGEST: ratio.sort().values[-1:],  # none of no tokens
    }
    if cap is None:
        return advantages, stats
    stats["sampling/token_ratio/truncated"] = Mean.of((ratio > cap).to(ratio.dtype))
    return advantages * truncated_importance_weights(ratio, cap=cap), stats


def with_largest(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Gathered statistics with the largest ratio as a number; without it where there were no tokens."""
    ratios = stats.get(LARGEST, torch.zeros(0))
    rest = {name: value for name, value in stats.items() if name != LARGEST}
    return rest | {LARGEST: float(ratios.max())} if len(ratios) else rest
