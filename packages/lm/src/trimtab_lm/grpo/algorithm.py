"""GRPO (Shao et al. 2024, arXiv:2402.03300, Algorithm 1): the record of a rollout, and its loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab_common.formulas.kl import k3
from trimtab_common.formulas.surrogate import clipped_surrogate
from trimtab_lm.sampling.mismatch import importance_weights
from trimtab_lm.tokens.layout import TokenGroup

from .config import GRPOConfig
from .loss import LOG_RATIOS, Totals, cispo_losses, corrected_k3, token_weights


@dataclass(frozen=True)
class Completions:
    """P prompts with G completions each, side by side, S in all, and the N tokens that the policy learns from.

    Attributes:
        groups: P prompts with their completions, as the model reads them.
        is_counted, advantages: [S], false and 0 where the completion is masked.
        lengths: [S], how many of the N tokens a completion has.
        sequence: [N], the completion of a token, 0 to S - 1.
        sampler_logprobs: [N], nats, as the sampler returned them; None once they say nothing about the trained policy.
        old_logprobs: [N], nats, under the policy that the ratio is to; None while that is the policy as it is.
        ref_logprobs: [N], nats, under the reference, if there is one.
        sampler_is_policy: whether the sampler's log-probabilities are the policy's, up to the rounding of float32.
    """

    groups: Sequence[TokenGroup]
    is_counted: Tensor
    lengths: Tensor
    sequence: Tensor
    advantages: Tensor
    sampler_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    sampler_is_policy: bool = False

    @property
    def totals(self) -> Totals:
        """The divisor of the loss if this is a whole optimizer step on one process."""
        return Totals(int(self.is_counted.sum()), len(self.sequence), rank_tokens=len(self.sequence))

    def __getitem__(self, prompts: Sequence[int]) -> "Completions":
        """Selects prompts, in this order."""
        by_prompt = self.lengths.view(len(self.groups), -1)
        rows = torch.arange(len(self.lengths)).view_as(by_prompt)[list(prompts)].flatten()
        places = torch.arange(len(self.sequence)).split(by_prompt.sum(1).tolist())
        tokens = torch.cat([places[prompt] for prompt in prompts])
        columns = (self.sampler_logprobs, self.old_logprobs, self.ref_logprobs)
        sampler, old, ref = (None if column is None else column[tokens] for column in columns)
        return Completions(
            [self.groups[prompt] for prompt in prompts],
            self.is_counted[rows],
            self.lengths[rows],
            torch.arange(len(rows)).repeat_interleave(self.lengths[rows]),
            self.advantages[rows],
            *(sampler, old, ref, self.sampler_is_policy),
        )

    def to(self, device: torch.device) -> "Completions":
        """The rollout with its tensors on a device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def after_update(self) -> "Completions":
        """The rollout after the policy has moved: only the sampler's log-probabilities are of the old policy."""
        moved = replace(self, old_logprobs=self.sampler_logprobs, sampler_logprobs=None)
        return moved if self.old_logprobs is None else self


class Losses(NamedTuple):
    """The loss, a scalar with gradient, and its inputs for statistics, [N] each."""

    loss: Tensor
    log_ratio: Tensor
    advantages: Tensor
    trainer_logprobs: Tensor
    kl: Tensor | None


def policy_loss(logprobs: Tensor, rollout: Completions, totals: Totals, config: GRPOConfig) -> Losses:
    """The clipped surrogate and the KL to the reference (Eq. 3): this rollout's part of a step's loss.

    logprobs: [N], nats, of the policy, with gradient. totals: what the step learns from.
    """
    sequence, lengths, ref, kl = rollout.sequence, rollout.lengths, rollout.ref_logprobs, None
    old = logprobs.detach() if rollout.old_logprobs is None else rollout.old_logprobs
    trainer = logprobs.detach() if config.clips_to_sampler else old  # of the policy that was to sample
    advantages = rollout.advantages.to(logprobs)[sequence]
    if (cap := config.importance_sampling_cap) is not None:
        advantages = advantages * importance_weights(trainer, rollout.sampler_logprobs, cap=cap)
    log_ratio = LOG_RATIOS[config.importance_sampling_level](logprobs, old, sequence, lengths)
    if config.loss_type == "cispo":
        losses = cispo_losses(log_ratio, advantages, logprobs, clip_high=config.clip["clip_high"])
    else:
        losses = clipped_surrogate(log_ratio, advantages, **config.clip)
    if ref is not None:
        kl = corrected_k3(logprobs, old, ref) if config.use_bias_correction_kl else k3(logprobs, ref)
        losses = losses + config.beta * kl
    limit = config.max_completion_length
    weights = token_weights(config.loss_type, sequence, lengths, totals=totals, max_completion_length=limit)
    return Losses((weights * losses).sum(), log_ratio, advantages, trainer, kl)
