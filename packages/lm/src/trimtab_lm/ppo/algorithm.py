"""PPO for language models: evaluates a batch once, then takes several optimizer steps on it.

Ziegler et al. 2019, arXiv:1909.08593, on Schulman et al. 2017, arXiv:1707.06347. `boxes` is the trainer.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import Mean, gather_stats, total_over_ranks
from trimtab_lm.sampling.mismatch import importance_weights, mismatch_stats

from .config import PPOConfig
from .experience import Experience, Minibatch
from .loss import policy_log_ratio
from .passes import Trainer, at_tokens, forward, forward_in_parts, kl_terms


@torch.no_grad()
def evaluate(
    boxes: Trainer, rollout: Experience, scores: Tensor, replaced: Collection[str], lap: Callable[[str], None]
) -> tuple[Experience, dict[str, Mean | Tensor]]:
    """The rollout with all columns, under the policy before its updates, and how far the sampler differs from it.

    scores: [B], shaped; replaced: names of replaced methods; lap: called with the name of each part that is done.
    """
    config, order = boxes.config, rollout.minibatches(torch.arange(len(scores)), boxes.config.mini_batch_size)
    policy = forward_in_parts(boxes, boxes.actor_critic, rollout, order, replaced)
    ref = forward_in_parts(boxes, boxes.reference_policy, rollout, order, replaced)
    lap("forward_pass")
    mask, at = policy.mask, policy.mask.bool()
    sampled = at_tokens(rollout.sampler_logprobs, rollout, policy)
    turn_rewards = at_tokens(rollout.response_rewards, rollout, policy)
    logprobs, ref_logprobs, *exact_kl = kl_terms(boxes, policy, ref, sampled)
    rewards, non_score_reward, *kl = boxes.compute_rewards(scores, logprobs, ref_logprobs, mask, *exact_kl)
    kl = kl or [boxes._kl_penalty(logprobs, ref_logprobs)]  # early methods of 2024 return two columns
    lap("compute_rewards")
    rewards = rewards if turn_rewards is None else rewards + turn_rewards
    values, advantages, returns = boxes.compute_advantages(policy.values, rewards, mask)
    lap("compute_advantages")
    columns = (values, kl[0], non_score_reward, advantages, returns)
    values, kl[0], non_score_reward, advantages, returns = (torch.where(at, x, 0.0) for x in columns)
    cap, mismatch = config.importance_sampling_cap, dict[str, Mean | Tensor]()
    told = None if sampled is None else sampled[at]
    if told is not None:
        mismatch = mismatch_stats(policy.logprobs[at], told, lengths=mask.sum(1), cap=cap)
    if cap is not None:
        weights = importance_weights(policy.logprobs[at], told, cap=cap)
        advantages = advantages.masked_scatter(at, advantages[at] * weights)
    evaluated = replace(
        rollout,
        masks=mask,
        logprobs=policy.logprobs,
        old_logprobs=policy.logprobs if sampled is None or not config.clips_to_sampler else sampled,
        ref_logprobs=ref.logprobs,
        entropy=policy.entropy,
        values=values,
        kls=kl[0],
        non_score_reward=non_score_reward,
        advantages=advantages,
        returns=returns,
    )
    return evaluated, mismatch


def rows_of_updates(config: PPOConfig, *, rank: int, step: int) -> Iterator[Tensor]:
    """The rows of each optimizer step of PPO step `step`, in `ppo_epochs` shuffled passes over the batch.

    `rank` is above those of the processes, whose random numbers `generate` draws.
    """
    shuffle = torch.Generator().manual_seed(sampling_seed(config.seed, rank=rank, draw=step))
    for _ in range(config.ppo_epochs):
        yield from torch.randperm(config.batch_size, generator=shuffle).split(cast(int, config.backward_batch_size))


def update(
    boxes: Trainer,
    rollout: Experience,
    batches: Iterable[Tensor],
    replaced: Collection[str],
    *,
    counts: Tensor,
    recorded: list[Minibatch],
) -> None:
    """Takes an optimizer step on each batch of rows; stops, without the step, if the policy has moved too far.

    counts: [B], each row's tokens that count, on the host. Each minibatch's statistics are appended to recorded.
    """
    config, step = boxes.config, boxes.optimizer_step
    for rows in batches:
        boxes.run.interruption.end_if_asked(boxes.save_checkpoint)
        step.drop()  # what an error has left
        parts = rollout.minibatches(rows, config.mini_batch_size)
        tokens, divergence = total_over_ranks(float(counts[rows].sum()), step.accelerator.device), Mean(0.0, 0.0)
        for number, part in enumerate(parts, start=1):
            is_last = number == len(parts)
            # The gradient equals one pass over all tokens of the step, averaged over processes.
            share = float(counts[part].sum()) * step.accelerator.num_processes / tokens
            with step.accelerator.part_of_step(step.model, is_last=is_last, share=share):
                old = rollout[part]
                new = forward(boxes, boxes.actor_critic, old, replaced)
                span = (slice(None), slice(new.mask.shape[1]))
                log_ratio = policy_log_ratio(new.logprobs.detach(), old.old_logprobs[span], new.mask)
                divergence += Mean.of(0.5 * log_ratio**2, new.mask)
                may_stop = is_last and config.early_stopping
                if may_stop and gather_stats({"kl": divergence})["kl"] > 1.5 * config.target_kl:
                    step.drop()
                    del recorded[len(recorded) - number + 1 :]  # no loss of a step that is not taken counts
                    stopped = {"policy/approxkl": divergence, "policy/early_stopped": Mean(1.0, 1.0)}
                    recorded.append(Minibatch(new.mask, stopped, log_ratio.abs().max()))
                    return
                stats = boxes.train_minibatch(
                    old_logprobs=old.old_logprobs[span],
                    values=old.values[span],
                    logprobs=new.logprobs,
                    logits=new.logits,
                    vpreds=new.values,
                    mask=new.mask,
                    advantages=old.advantages[span],
                    returns=old.returns[span],
                )
            ends = {"policy/early_stopped": Mean(0.0, 1.0)} if is_last else {}
            entropy = {} if new.entropy is None else {"policy/entropy": Mean.of(new.entropy, new.mask)}
            recorded.append(Minibatch(new.mask, {**entropy, **stats, **ends}, log_ratio.abs().max()))
