"""How far a sampler's probabilities are from the trainer's, and the weights that correct the difference.

Other kernels, another precision or older weights make a sampler another policy than the one that is trained.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab_common.formulas.kl import clamped
from trimtab_common.stats import Mean
from trimtab_lm.tokens.layout import sum_per_sequence

LARGEST = "sampling/token_ratio/max"


@torch.no_grad()
def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor | None, *, cap: float) -> Tensor:
    """min(pi_trainer / pi_sampler, cap): the weight of each token's loss (truncated importance sampling).

    The weights make the gradient on the sampler's tokens that of the trainer's policy, as far as the cap leaves it;
    the cap bounds their variance (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"). Ratios 0.5, 1 and 4 with cap 2 weigh 0.5, 1 and 2. Surrogate losses are proportional to the advantage,
    so that weighing the advantages weighs the losses.

    Args:
        logprobs: [N], nats, of the sampled tokens under the trainer's policy that was to sample them.
        sampler_logprobs: [N], nats, of the same tokens as they were sampled, at the same temperature.
        cap: the largest weight, above 0; the paper's C.

    Returns:
        [N]. Logs of ratios are clamped to +-20.

    Raises:
        ValueError: the sampler returned no log-probabilities.
    """
    if sampler_logprobs is None:
        raise ValueError(
            f"importance_sampling_cap={cap} needs the log-probabilities of the sampler, and there are none. Sample "
            "with rollout_backend 'continuous_batching', 'vllm' or 'vllm_server', or leave it out."
        )
    return clamped(logprobs - sampler_logprobs).exp().clamp(max=cap)


@torch.no_grad()
def mismatch_stats(
    logprobs: Tensor, sampler_logprobs: Tensor, *, lengths: Tensor, cap: float | None
) -> dict[str, Mean | Tensor]:
    """Statistics of the difference between trainer and sampler on sampled tokens.

    Args:
        logprobs: [N], of the tokens of B completions one after the other; see `importance_weights`.
        sampler_logprobs: [N].
        lengths: [B], tokens of each completion, N in all.
        cap: see `importance_weights`; None: there is none.

    Returns:
        For `gather_stats` and then `with_largest`: of the tokens `sampling/logp_difference/mean`, |log pi_trainer - log
        pi_sampler| in nats, and `sampling/token_ratio/mean` and `/max`, pi_trainer / pi_sampler; of the completions
        `sampling/importance_ratio/mean`; with a cap `sampling/token_ratio/truncated`, the share of tokens above it.
    """
    gap = logprobs - sampler_logprobs
    numbers = torch.arange(len(lengths), device=gap.device)
    rows = numbers.repeat_interleave(lengths, output_size=len(gap))  # known, so that nothing waits for the device
    sums = sum_per_sequence(gap, rows, len(lengths))
    ratio = clamped(gap).exp()
    stats: dict[str, Mean | Tensor] = {
        "sampling/logp_difference/mean": Mean.of(gap.abs()),
        "sampling/importance_ratio/mean": Mean.of(clamped(sums).exp(), lengths > 0),
        "sampling/token_ratio/mean": Mean.of(ratio),
        LARGEST: ratio.sort().values[-1:],  # empty without tokens
    }
    if cap is not None:
        stats["sampling/token_ratio/truncated"] = Mean.of((ratio > cap).to(ratio.dtype))
    return stats


def with_largest(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Gathered statistics with the largest ratio as a number; without it where there were no tokens."""
    ratios = stats.get(LARGEST, torch.zeros(0))
    rest = {name: value for name, value in stats.items() if name != LARGEST}
    return rest | {LARGEST: float(ratios.max())} if len(ratios) else rest
