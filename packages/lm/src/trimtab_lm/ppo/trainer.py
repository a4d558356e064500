"""PPO for language models (Ziegler et al. 2019, arXiv:1909.08593, on Schulman et al. 2017, arXiv:1707.06347)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trimtab_common.formulas.kl import SAMPLED_KL, full
from trimtab_common.formulas.masking import rescale, whiten
from trimtab_common.formulas.surrogate import surrogate_stats
from trimtab_common.health import rounding_of
from trimtab_common.overrides import is_replaced
from trimtab_common.sealing import save_or_warn
from trimtab_common.stats import Mean, total_over_ranks
from trimtab_common.tracking import progress
from trimtab_lm.data.prompts import endless
from trimtab_lm.legacy.arguments import refuses_arguments_of_2024
from trimtab_lm.legacy.ppo_names import RunningMoments
from trimtab_lm.models.interface import decoder_start_of
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.sampling.asynchronous import Pending
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.dropout import without_dropout

from .checks import check_step
from .config import PPOConfig
from .loss import policy_log_ratio, ppo_loss
from .policy import ActorCritic, Scorer
from .returns import gae, per_token_rewards
from .sampler import Sampler, completions_of, told_by
from .samples import Padding, Samples, carry, in_minibatches, token_entropy
from .selfcheck import check_ratio, check_reference
from .services import PolicyServices
from .setup import accelerator_of, filled, optimizers_of, policy_of, reference_of, rewards_of_run, run_of, tokenizer_of
from .statistics import Clock, Rollout, as_sampled, sampling_stats, token_means, training_stats, vitals
from .update import Update, rows_of_updates


class PPOTrainer(PolicyServices):
    """PPO over a batch of queries, responses and scores: `generate`, score, `step`, as often as you like.

    What may be overridden: `batched_forward_pass`, `compute_rewards`, `compute_advantages`, `loss`, `train_minibatch`,
    `record_step_stats`, `gather_stats`, `prepare_dataloader`, `log_stats`. Logits of the whole vocabulary are computed
    only for a subclass that replaces `loss`, `train_minibatch` or `batched_forward_pass`.

    Args:
        config: a PPOConfig. `trainer.config` is a copy with the fields that are filled at run time.
        model: a model with a value head; None: `config.model_name` is loaded.
        ref_model: the reference of the KL penalty; None: the model as it is at this moment, a PEFT model with its
            adapters off, any other as a frozen copy.
        tokenizer: with a pad token.
        dataset: prompts as token ids (`input_ids`), texts or conversations (`query`, `prompt`); None: the config's.
        optimizer: over the model's parameters; None: Adam.
        data_collator: see `prepare_dataloader`.
        num_shared_layers: layers that the copied reference shares with the model, frozen in both.
        lr_scheduler: stepped once per PPO step.
        value_model: a model for the values in place of the value head, such as a reward model; see `Critic`.
        rollout: what samples, such as a VLLMRollout; None: transformers' generate, in `train` the config's backend.
    """

    @refuses_arguments_of_2024(training_data_collator="leave it out; a step packs its tokens without padding")
    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | None = None,
        ref_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Dataset | torch.utils.data.Dataset[Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[Sequence[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        *,
        value_model: nn.Module | None = None,
        rollout: RolloutBackend | None = None,
    ):
        config = replace(config or PPOConfig())  # checked again: fields may have been assigned
        if rollout is not None and config.rollout_backend != "transformers":
            raise ValueError(f"rollout_backend={config.rollout_backend!r} and a rollout: leave one of them out.")
        self.model = model = policy_of(config, model)
        self.tokenizer = tokenizer_of(config, tokenizer)
        self.is_encoder_decoder, self.decoder_start = model.is_encoder_decoder, decoder_start_of(model.pretrained_model)
        self.reference, self.ref_model = reference_of(model, ref_model, num_shared_layers)
        actor_critic = ActorCritic(model, value_model)
        optimizer, lr_scheduler = optimizers_of(config, optimizer, lr_scheduler, actor_critic)

        self.accelerator = accelerator_of(config)
        self.config = filled(config, model, self.accelerator.num_processes)
        self.current_device, self.lr_scheduler = self.accelerator.device, lr_scheduler
        self.actor_critic, self.optimizer = self.accelerator.prepare(actor_critic, optimizer)
        self.update = Update(self.actor_critic, self.optimizer, self.config, self.accelerator)
        padding = Padding(self.tokenizer.pad_token_id, self.decoder_start)
        self.scorer = Scorer(self.actor_critic, self.reference, self.ref_model, self.accelerator, padding)
        self.rounding = rounding_of(model.pretrained_model.dtype, is_mixed=self.accelerator.mixed_precision != "no")
        self.kl_ctl, self.running = config.kl_controller(), RunningMoments()
        self.sampler = Sampler.of(config, self.tokenizer, self.accelerator.process_index)
        self.pending = Pending()
        self.rollout = None if rollout is None else self._ahead_if_asked(rollout)
        self.steps_done, self.best_score, self.data_collator = 0, float("-inf"), data_collator
        self.dataset, self.dataloader, self.batches = self._open_data(dataset, data_collator)
        self.run = run_of(self.config, self.accelerator, self.actor_critic, self.dataset)
        self.run.keep(self, "optimizer", "lr_scheduler", "kl_ctl", "sampler", "running", "batches")
        self.run.keep(self, "steps_done", "best_score")
        self.run.keep(self.accelerator, "scaler")
        self.run.keep_per_rank("pending", self.pending)

    # ---------------------------------------------------------------- the algorithm

    def train(
        self,
        reward: Any = None,
        *,
        generation_kwargs: Mapping[str, Any] | None = None,
        steps: int | None = None,
        resume_from: str | Path | None = None,
        on_step: Callable[[int, dict[str, Any], dict[str, Any]], None] | None = None,
        reward_weights: Sequence[float] | None = None,
    ) -> list[dict[str, Any]]:
        """Generate, score and step over the dataset until `steps` are done; logs and saves.

        Args:
            reward: what scores the responses, one or a list: functions, plain or async, as of `RewardSet` or
                `reward(queries, responses, **columns) -> scores`, with texts and the batch's other columns; sequence
                classifiers, a module with the policy's tokenizer. None: `config.reward_model`, or nothing beside the
                rewards of an `EnvironmentRollout`, which come turn by turn.
            generation_kwargs: arguments of `generate`.
            steps: PPO steps in all; default: the config's.
            resume_from: a checkpoint's folder, or "latest" for the newest in `output_dir`, if there is one.
            on_step: called with the step's number, the logged statistics and the batch.
            reward_weights: one per reward; None: 1.

        Returns:
            The numbers among the logged statistics of every step.
        """
        if self.dataloader is None:
            raise ValueError("train() needs prompts: give PPOTrainer a dataset, or PPOConfig a query_dataset.")
        rewards = rewards_of_run(reward, reward_weights, self.config, self.rollout, self.tokenizer, self.current_device)
        self._resume(resume_from)
        options = self._sampling_options(generation_kwargs or {})
        read = partial(completions_of, tokenizer=self.tokenizer, is_encoder_decoder=self.is_encoder_decoder)
        total, history, batches = steps or self.config.steps, [], endless(self.dataloader)
        with self.run.training(self.config.output_dir):
            for _ in progress(range(self.steps_done, total), "PPO steps"):
                batch = next(batches)
                self._begin_step(is_last=self.steps_done + 1 == total)
                sampled = self._sample(batch, options)
                scored = rewards(*read(batch, sampled.completions))
                scores = scored.rewards.tolist()
                stats = self.step(batch["input_ids"], sampled.completions, scores, **told_by(sampled))
                if more := sampling_stats(sampled, rewards.names, scored, step=self.steps_done - 1):
                    stats |= self.gather_stats(more)
                if (episodes := sampled.episodes) is not None:
                    scores = [score + float(row.sum()) for score, row in zip(scores, episodes.rewards, strict=True)]
                logs = self.log_stats(stats, batch, scores)
                history.append({name: value for name, value in logs.items() if isinstance(value, float)})
                if on_step is not None:
                    on_step(self.steps_done, logs, batch)
                if self.config.save_steps and self.steps_done % self.config.save_steps == 0:
                    save_or_warn(self.save_checkpoint, self.config.on_save_error)
                self.run.interruption.end_if_asked(self.save_checkpoint)
        return history

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Any],
        response_masks: list[Tensor] | None = None,
        *,
        sampler_logprobs: list[Tensor] | None = None,
        response_rewards: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One PPO iteration over this process's batch.

        Args:
            queries: `batch_size` rows of token ids, 1-D.
            responses: `batch_size` rows of token ids, 1-D.
            scores: a number for each response.
            response_masks: for each response token 1, or 0 where the policy did not write it (the output of a tool).
            sampler_logprobs: the log-probability of each response token as it was sampled, in nats, where the sampler
                tells it: for statistics, and for `config.importance_sampling_cap`.
            response_rewards: for each response token the reward that an environment gave at it, beside the score at the
                last token; None: none. The settings that scale and clip scores leave them as they are.

        Returns:
            The statistics, equal on all processes.
        """
        self.run.begin_step(self.config.output_dir)
        clock, config = Clock(), self.config
        columns = (queries, responses, scores, response_masks, response_rewards)
        samples, raw_scores = check_step(
            *columns,
            batch_size=config.batch_size,
            model=self.model,
            decoder_start=self.decoder_start,
            is_first=self.steps_done == 0,
            device=self.current_device,
        )
        recorded: list[dict[str, Any]] = []
        with without_dropout(self.actor_critic):
            rollout = self._evaluate(samples, raw_scores, sampler_logprobs, clock)
            for rows in rows_of_updates(config, rank=self.accelerator.num_processes, step=self.steps_done):
                if self._update(rollout, rows, recorded):
                    break
            train_stats = training_stats(rollout, recorded)
            clock.lap("optimize_step")
        stats = self._step_stats(rollout, train_stats, clock)

        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.steps_done += 1
        self._push_if_best(stats["ppo/mean_scores"])
        if config.optimize_device_cache:
            clear_device_cache()
        numbers = {name: value for name, value in stats.items() if isinstance(value, float)}
        stats |= self.run.check_health(vitals(numbers, config), numbers, when=f"step {self.steps_done}")
        self.kl_ctl.update(stats["objective/kl"], config.batch_size * self.accelerator.num_processes)
        self.run.interruption.end_step(self.save_checkpoint, is_last=self.steps_done >= config.steps)
        return stats

    def _evaluate(
        self, samples: Samples, raw_scores: Tensor, sampler_logprobs: list[Tensor] | None, clock: Clock
    ) -> Rollout:
        """Log-probabilities, values, rewards and advantages of a batch under the policy before its updates."""
        config = self.config
        if self._replaces("batched_forward_pass", "prepare_model_inputs"):
            inputs = self.prepare_model_inputs(samples.queries, samples.responses)
            samples = replace(samples, model_inputs=inputs)
        with torch.no_grad():
            old = in_minibatches(self._compare, samples, config.mini_batch_size)
            sampled = as_sampled(sampler_logprobs, samples, old)
            clock.lap("forward_pass")
            scores = self._shaped(raw_scores, samples.responses)
            known = {} if old.kl is None else {"kl": old.kl}
            compared = old.compared(sampled if config.asynchronous_rollouts else None)
            rewards, non_score_rewards, *rest = self.compute_rewards(scores, *compared, old.mask, **known)
            rewards = rewards + carry(samples.rewards, samples.mask, old.mask)
            kl = rest[0] if rest else self._kl_penalty(*compared)
            clock.lap("compute_rewards")
            values, advantages, returns = self.compute_advantages(old.values, rewards, old.mask)
            clock.lap("compute_advantages")
        columns = {"values": values, "kl": kl, "non_score_rewards": non_score_rewards}
        raw_scores = raw_scores + samples.rewards.sum(1)
        rollout = Rollout.of(samples, raw_scores, old, **columns, advantages=advantages, returns=returns)
        if self.steps_done == 0:
            check_reference(rollout, most=self.rounding)
        return rollout.corrected(sampled, cap=config.importance_sampling_cap, clips_to_sampler=config.clips_to_sampler)

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor, kl: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Rewards per token, their part that is not the score, and the KL, each [B, R].

        A subclass's method takes `kl_penalty="full"` from log-probabilities of the whole vocabulary, [B, R, V], and
        may return the first two alone: the KL is then that of `kl_penalty`.

        Args:
            scores: [B], one per response.
            logprobs: [B, R], in nats, of the policy.
            ref_logprobs: [B, R], of the reference.
            masks: [B, R], 1 where a token counts.
            kl: the KL [B, R] where it is known; None: that of `kl_penalty`.
        """
        if kl is None:
            kl = self._kl_penalty(logprobs, ref_logprobs)
        kl = torch.where(masks.bool(), kl, 0.0)
        rewards, non_score_rewards = per_token_rewards(scores, kl, masks, kl_coef=self.kl_ctl.value)
        return rewards, non_score_rewards, kl

    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        """The KL per token, [...], that `config.kl_penalty` names; for "full" out of log-probabilities [..., V]."""
        penalty = full if self.config.kl_penalty == "full" else SAMPLED_KL[self.config.kl_penalty]
        return penalty(logprob, ref_logprob)

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, advantages whitened over the tokens of all processes, and returns, each [B, R]."""
        values = values * mask
        if self.config.whiten_rewards:
            rewards = rescale(rewards, mask)
        advantages = gae(rewards, values, mask=mask, gamma=self.config.gamma, lam=self.config.lam)
        return values, whiten(advantages, mask), advantages + values

    def _update(self, rollout: Rollout, rows: Tensor, recorded: list[dict[str, Any]]) -> bool:
        """One optimizer step over `rows`, whose statistics go to `recorded`; whether the policy has moved too far."""
        divergence, needs_logits = Mean(0.0, 0.0), self._replaces("loss", "train_minibatch")
        is_replaced = self._replaces("train_minibatch")  # it may call model.train(), and take the step by itself
        tokens = total_over_ranks(float(rollout.counts[rows].sum()), self.accelerator.device)
        parts = rows[rollout.samples.lengths[rows].argsort(stable=True)].split(self.config.mini_batch_size)
        for number, part in enumerate(parts, start=1):
            # The gradient is that of all tokens of the step at once, averaged over processes.
            share = float(rollout.counts[part].sum()) * self.accelerator.num_processes / tokens
            with self.update.minibatch(share=share, is_last=number == len(parts)):
                new = self._forward(rollout.samples.rows(part), return_logits=needs_logits)
                old = rollout.rows(part, new.mask, is_same_layout=not self._replaces("batched_forward_pass"))
                if self.steps_done == 0 and not recorded and not self.config.clips_to_sampler:
                    check_ratio(new.logprobs.detach(), old["old_logprobs"], new.mask, most=self.rounding)
                if is_replaced:
                    moves = self._moves(new.logprobs, old["old_logprobs"], old["advantages"], new.mask)
                    divergence += moves["approxkl"]
                with without_dropout(self.actor_critic) if is_replaced else nullcontext():
                    stats = token_means(self.train_minibatch(**old, **new.of_minibatch()), new.mask)
                recorded.append(new.entropy_stats() | stats)
        if "policy/early_stopped" in recorded[-1]:
            return recorded[-1]["policy/early_stopped"].value > 0
        return self.update.has_moved_too_far(divergence)

    def _replaces(self, *names: str) -> bool:
        """Whether a method is replaced; what only a replaced one reads, such as logits, is computed for it alone."""
        return is_replaced(self, PPOTrainer, *names)

    def _moves(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Mean]:
        """How far the policy has moved since the rollout, on the tokens of a minibatch; all [b, R]."""
        log_ratio, clip = policy_log_ratio(logprobs, old_logprobs, mask), self.config.cliprange
        return surrogate_stats(log_ratio, advantages, mask, clip_low=clip, clip_high=clip)

    def train_minibatch(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logprobs: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> dict[str, Any]:
        """Backward for one minibatch, and the optimizer step if it is due; arguments as of `loss`.

        Called by itself, outside of `step`, the minibatch is an optimizer step. Inside, accelerate weighs the loss by
        the minibatch's share of the step's tokens, and its `sync_gradients` says which minibatch is the last.

        Returns:
            The minibatch's statistics.

        Raises:
            TrainingDivergedError: the loss or the gradient is not finite; the weights are untouched.
        """
        policy_loss, value_loss, stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        moves = self._moves(logprobs, old_logprobs, advantages, mask)
        added = self.update.add(policy_loss + value_loss, moves, outputs=(logprobs, vpreds), step=self.steps_done)
        return token_means(stats, mask) | added

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Policy loss, weighted value loss, both means over the tokens of the minibatch, and its statistics.

        Args:
            old_logprobs: [b, R], in nats, of the rollout.
            values: [b, R], of the rollout.
            logits: [b, R, V], or None: then there is no entropy among the statistics. `step` computes logits only if a
                subclass replaces this method or `train_minibatch`.
            vpreds: [b, R], values of the model as it is.
            logprobs: [b, R], of the model as it is.
            mask: [b, R], 1 where a token counts.
            advantages: [b, R].
            returns: [b, R].

        Returns:
            The two losses, and statistics: numbers, tensors with a number per token, or `Mean` objects, in a dict that
            may be nested. Minibatches are averaged by their tokens.
        """
        policy_loss, value_loss, stats = ppo_loss(
            log_ratio=policy_log_ratio(logprobs, old_logprobs, mask),
            advantages=advantages,
            values=values,
            vpreds=vpreds,
            returns=returns,
            mask=mask,
            clip=self.config.cliprange,
            value_clip=self.config.cliprange_value,
            value_weight=self.config.vf_coef,
        )
        if logits is not None:
            stats["policy/entropy"] = Mean.of(token_entropy(logits, mask), mask)
        return policy_loss, value_loss, stats
