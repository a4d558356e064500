"""The arithmetic of PPO with a value function: rewards per token, advantages, and the losses."""

import torch
from torch import Tensor

from trimtab_common.formulas.kl import clamped
from trimtab_common.stats import RunningMoments

from .config import PPOConfig


def shaped(scores: Tensor, is_ended: Tensor, config: PPOConfig, running: RunningMoments) -> Tensor:
    """Scores minus the penalty for a missing end token, then scaled, normed and clipped by the config. Collective.

    scores: [B]; is_ended: [B], whether a response ends with an end token; running: moments of all scores. Returns [B].
    """
    if config.missing_eos_penalty is not None:
        scores = scores - config.missing_eos_penalty * ~is_ended.to(scores.device)
    if config.use_score_scaling:
        running.update(scores)
        scores = (scores - (running.mean if config.use_score_norm else 0.0)) / running.std
    return scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)


def per_token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> tuple[Tensor, Tensor]:
    """-kl_coef * KL at each token, plus the score at the last one (Ziegler et al. 2019, arXiv:1909.08593, Eq. 2).

    scores: [B], one per response; kl: [B, R] in nats; mask: [B, R], 1 where a token counts, at least one per row.
    Returns rewards and their part without the score, both [B, R], 0 outside the mask.
    """
    non_score = torch.where(mask.bool(), -kl_coef * kl, 0.0)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return non_score.scatter_add(1, last[:, None], scores[:, None].to(non_score.dtype)), non_score


def gae(rewards: Tensor, values: Tensor, *, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, Eq. 16), bootstrapped across gaps.

    rewards, values, mask: [B, R]. A position outside the mask (padding, the text of a tool) is no action: the recursion
    goes from the action before it straight to the action after it. After the last action the value is 0. Returns
    [B, R], 0 outside the mask. Advantage plus value is the return.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        counts = mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(counts, advantage, 0.0)
        next_value = torch.where(counts, values[:, t], next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
    return advantages


def clipped_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2 per token (Schulman et al. 2017, public code).

    vpreds, values (of the rollout), returns: [...]. Returns [...].
    """
    clipped = values + (vpreds - values).clamp(-clip, clip)
    return 0.5 * torch.maximum((vpreds - returns) ** 2, (clipped - returns) ** 2)


def policy_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old of the tokens, 0 where the mask is 0; all [b, R].

    A log-ratio beyond +-20 is taken as that, and gives no gradient.
    """
    return clamped((logprobs - old_logprobs) * mask)
