"""PPO for language models: the program around `algorithm`, and the documented methods that it calls."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.conditions import OTHER_START
from trimtab_common.formulas.kl import SAMPLED_KL, full
from trimtab_common.formulas.masking import masked_mean, rescale, whiten
from trimtab_common.formulas.surrogate import clipped_surrogate, surrogate_stats
from trimtab_common.health import rounding_of, warn_at_start
from trimtab_common.lines import Lines
from trimtab_common.overrides import replaced
from trimtab_common.sealing import save_or_warn
from trimtab_common.stats import Mean, Stats, gather_stats
from trimtab_common.tracking import progress
from trimtab_lm.interface import decoder_start_of
from trimtab_lm.legacy.arguments import refuses_arguments_of_2024
from trimtab_lm.legacy.ppo_names import NamesOf2024, RunningMoments
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.sampling.generate import AS_MANY_AS_FIT
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.dropout import without_dropout

from . import files, setup
from .algorithm import evaluate, rows_of_updates, update
from .checks import check_batch, check_rollout, check_step
from .config import PPOConfig
from .experience import Evaluated, Experience, Unfinished, placed
from .generation import Sampler, completions_of, step_arguments
from .loss import clipped_value_loss, gae, per_token_rewards, policy_log_ratio, shaped
from .optimizer_step import OptimizerStep
from .passes import Padding, padded_inputs, score, token_entropy
from .policy import ActorCritic, ReferencePolicy, keep_value_dtype
from .statistics import Clock, ended, rollout_stats, sampling_stats, step_stats, vitals

PASSES = ("batched_forward_pass", "compute_rewards", "loss", "train_minibatch")
"""The documented methods that see logits, and other layouts of the columns, where they are replaced."""


class PPOTrainer(NamesOf2024):
    """PPO over a batch of queries, responses and scores: `generate`, score, `step`, as often as you like.

    What may be overridden: `batched_forward_pass`, `compute_rewards`, `compute_advantages`, `loss`, `train_minibatch`,
    `record_step_stats`, `gather_stats`, `prepare_dataloader`, `log_stats`. Logits of the whole vocabulary are computed
    only for a subclass that replaces `loss`, `train_minibatch` or `batched_forward_pass`.

    Args:
        config: `trainer.config` is a copy with the fields that are filled at run time.
        model: a model with a value head; None: `config.model_name` is loaded.
        ref_model: the reference; None: the model as it is now, with adapters off, or as a frozen copy.
        tokenizer: with a pad token.
        dataset: prompts as token ids (`input_ids`), texts or conversations (`query`, `prompt`): a dataset, a torch
            dataset or a list of rows; None: the config's. Rewards and environments get other columns only with
            PPOConfig(remove_unused_columns=False).
        optimizer: over the model's parameters; None: Adam.
        data_collator: from rows to a batch.
        num_shared_layers: layers that the copied reference shares with the model, frozen in both.
        lr_scheduler: stepped once per PPO step.
        value_model: a model for the values in place of the value head, such as a reward model; see `Critic`.
        rollout: what samples, such as a VLLMRollout; None: transformers' generate, in `train` the config's backend.
    """

    watched = ("env/reward_mean", "objective/kl", "objective/kl_coef", "ppo/val/var_explained", "ppo/policy/clipfrac")

    @refuses_arguments_of_2024(training_data_collator="leave it out; a step packs its tokens without padding")
    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | None = None,
        ref_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Dataset | torch.utils.data.Dataset[Any] | list[dict[str, Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[Sequence[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        *,
        value_model: nn.Module | None = None,
        rollout: RolloutBackend | None = None,
    ):
        config = setup.checked(config, rollout)
        self.model = model = setup.policy_of(config, model)
        self.tokenizer = setup.tokenizer_of(config, tokenizer)
        self.is_encoder_decoder = model.is_encoder_decoder
        self.padding = Padding(self.tokenizer.pad_token_id, decoder_start_of(model.pretrained_model))
        self.reference, self.ref_model = setup.reference_of(model, ref_model, num_shared_layers)
        actor_critic = setup.actor_critic_of(config, model, value_model)
        optimizer, self.lr_scheduler = setup.optimizers_of(config, optimizer, lr_scheduler, actor_critic)
        self.accelerator = setup.accelerator_of(config, actor_critic)
        self.config = setup.filled(config, model, self.accelerator.num_processes)
        self.current_device = self.accelerator.device
        self.actor_critic, self.optimizer = self.accelerator.prepare(actor_critic, optimizer)
        self.optimizer_step = OptimizerStep(self.actor_critic, self.optimizer, self.config, self.accelerator)
        self.bare: ActorCritic = self.accelerator.unwrap_model(self.actor_critic)
        keep_value_dtype(self.bare)
        self.reference_policy = ReferencePolicy(self.bare, self.reference, self.ref_model, self.accelerator)
        self.rounding = rounding_of(model.pretrained_model.dtype, is_mixed=self.accelerator.mixed_precision != "no")
        self.kl_ctl, self.running = config.kl_controller(), RunningMoments()
        self.sampler, self.unfinished = Sampler(self), Unfinished()
        self.rollout = self.sampler.ahead_if_asked(rollout)
        self.steps_done, self.best_score, self.data_collator = 0, float("-inf"), data_collator
        self.dataset, self.dataloader, self.batches = setup.open_data(self, dataset, data_collator)
        self.run = setup.run_of(self, self.sampler.pending)

    def train(
        self,
        reward: Any = None,
        *,
        generation_kwargs: Mapping[str, Any] | None = None,
        steps: int | None = None,
        resume_from: str | Path | None = None,
        on_step: Callable[[int, Stats, Stats], None] | None = None,
        reward_weights: Sequence[float] | None = None,
    ) -> list[Stats]:
        """Generates, scores and steps over the dataset until `steps` are done; logs, saves, and returns the numbers.

        Args:
            reward: one or a list of functions, plain or async, as of `RewardSet` or `reward(queries, responses,
                **columns)`, and sequence classifiers. None: `config.reward_model`, or an `EnvironmentRollout` rewards.
            generation_kwargs: arguments of `generate`.
            steps: PPO steps in all; default: the config's.
            resume_from: a checkpoint's folder, its parent's, or "latest" for the newest in `output_dir`, if any.
            on_step: called with the step's number, the logged statistics and the batch.
            reward_weights: one per reward; None: 1.
        """
        if (loader := self.dataloader) is None:
            raise ValueError("train() needs prompts: give PPOTrainer a dataset, or PPOConfig a query_dataset.")
        if (total := self.config.steps if steps is None else steps) < 0:
            raise ValueError(f"train(steps={steps}): the number of steps in all is 0 or more; None: the config's.")
        rewards = setup.rewards_of_run(self, reward, reward_weights)
        self.run.about = {"reward": ", ".join(rewards.names), **self.run.about}
        files.resume(self.run, self.config, resume_from)
        config, sampler = self.config, self.sampler
        options, history = sampler.options(generation_kwargs or {}), list[Stats]()
        batches = chain.from_iterable(repeat(loader))  # one epoch after another
        lines = Lines("step", self.watched, total=total, done=self.steps_done)

        def note(logs: Stats, batch: Stats) -> None:
            history.append({name: value for name, value in logs.items() if isinstance(value, float)})
            if self.accelerator.is_main_process:
                lines.show(self.steps_done, logs)
            if on_step is not None:
                on_step(self.steps_done, logs, batch)

        with self.run.training(config.output_dir):
            if finished := self._finish_loaded():
                note(*finished)
            for number in progress(range(self.steps_done + 1, total + 1), "PPO steps"):
                check_batch(batch := next(batches))
                self.run.begin_step(config.output_dir)
                sampler.begin_step(self.steps_done, loader if number < total else None)
                sampled = sampler.sample(batch, options, self.generate)
                scored = rewards(*completions_of(batch, sampled, self.tokenizer, self.is_encoder_decoder))
                scores = scored.rewards.tolist()
                self.unfinished.sampling = sampling_stats(sampled, rewards.names, scored, step=self.steps_done)
                stats = self.step(batch["input_ids"], sampled.completions, scores, **step_arguments(sampled))
                if more := self.unfinished.take_sampling():
                    stats |= self.gather_stats(more)
                if (episodes := sampled.episodes) is not None:
                    scores = [score + float(row.sum()) for score, row in zip(scores, episodes.rewards, strict=True)]
                note(self.log_stats(stats, batch, scores), batch)
                if config.save_steps and self.steps_done % config.save_steps == 0:
                    save_or_warn(self.save_checkpoint, config.on_save_error)
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
    ) -> Stats:
        """One PPO iteration over this process's batch; returns its statistics, equal on all processes.

        Args:
            queries: `batch_size` rows of token ids, 1-D.
            responses: `batch_size` rows of token ids, 1-D.
            scores: a number for each response.
            response_masks: for each response token 1, or 0 where the policy did not write it (the output of a tool).
            sampler_logprobs: log-probabilities of the response tokens as they were sampled, in nats; None: unknown.
            response_rewards: for each response token an environment's reward, which no setting scales or clips.
        """
        self.run.begin_step(self.config.output_dir)
        clock, config, is_first = Clock(), self.config, self.steps_done == 0
        overridden = replaced(self, PPOTrainer, *PASSES)
        columns = (queries, responses, scores, response_masks, response_rewards, sampler_logprobs)
        rollout, given = check_step(self, *columns, is_first=is_first, reads_ids="batched_forward_pass" in overridden)
        scores_shaped = shaped(given, ended(rollout.responses, self.sampler.eos_ids), config, self.running)
        with without_dropout(self.actor_critic):
            rollout, mismatch = evaluate(self, rollout, scores_shaped, overridden, clock.lap)
        seen = check_rollout(rollout, other_reference_from=self.rounding if is_first else None)
        return self._finish_step(rollout, Evaluated(seen, mismatch, []), overridden, clock)

    def _finish_step(self, rollout: Experience, batch: Evaluated, overridden: Collection[str], clock: Clock) -> Stats:
        """The updates of a step that are left, and its statistics; `rollout` is on the device."""
        config, (seen, mismatch, recorded) = self.config, batch
        updates = rows_of_updates(config, rank=self.accelerator.num_processes, step=self.steps_done)
        left = islice(updates, len(recorded) // config.gradient_accumulation_steps, None)
        self.unfinished.batch = batch
        try:
            with without_dropout(self.actor_critic):
                update(self, rollout, left, overridden, counts=seen.masks.sum(1), recorded=recorded)
        finally:
            self.unfinished.batch = None
        if self.steps_done == 0 and rollout.old_logprobs is rollout.logprobs:
            warn_at_start(OTHER_START, float(recorded[0].largest_log_ratio), rounding=self.rounding)
        stats = step_stats(self, seen, recorded, mismatch, clock, ends=self.sampler.eos_ids)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.steps_done += 1
        best, is_due = config.push_to_hub_if_best_kwargs, self.steps_done % config.compare_steps == 0
        if best and is_due and stats["ppo/mean_scores"] > self.best_score:
            self.best_score = stats["ppo/mean_scores"]
            self.push_to_hub(**best)
        if config.optimize_device_cache:
            clear_device_cache()
        when, warns = f"step {self.steps_done}", self.accelerator.is_main_process
        stats |= self.run.health.report(vitals(stats, config), stats, when=when, warns=warns)
        self.kl_ctl.update(stats["objective/kl"], config.batch_size * self.accelerator.num_processes)
        self.run.interruption.end_step(self.save_checkpoint, is_last=self.steps_done >= config.steps)
        return stats

    def _finish_loaded(self) -> tuple[Stats, Stats] | None:
        """Finishes the step within which a checkpoint was saved, if any; returns what was logged, and the batch."""
        if (batch := self.unfinished.batch) is None:
            return None
        self.run.begin_step(self.config.output_dir)
        overridden = replaced(self, PPOTrainer, *PASSES)
        tokens = self.current_device if "batched_forward_pass" in overridden else torch.device("cpu")
        rollout = placed(batch.rollout, self.current_device, tokens=tokens)
        stats = self._finish_step(rollout, batch, overridden, Clock())
        if more := self.unfinished.take_sampling():
            stats |= self.gather_stats(more)
        rows = {"query": batch.rollout.queries, "response": batch.rollout.responses}
        texts: Stats = {name: [self.tokenizer.decode(row) for row in ids] for name, ids in rows.items()}
        return self.log_stats(stats, texts, batch.rollout.scores.tolist()), texts

    def prepare_model_inputs(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        """The padded inputs of a model, for `batched_forward_pass`."""
        return padded_inputs(queries, responses, self.padding)

    def batched_forward_pass(
        self,
        model: nn.Module | None,
        queries: list[Tensor],
        responses: list[Tensor],
        model_inputs: dict[str, Tensor],
        return_logits: bool = False,
        response_masks: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Log-probabilities in nats, logits or None, values or None, and mask of B responses, [B, R] and [B, R, V].

        `step` calls it for one minibatch at a time, with gradients in the updates. A subclass's method may return
        columns of its own layout, such as [B, T - 1] over query and response: they are read where the mask is 1, and
        must lie in the same columns each time. `model` then gives (logits, loss, values) of the model inputs.

        Args:
            model: `trainer.model`, or `trainer.ref_model`, which is None where the adapters are switched off.
            queries: B rows of token ids.
            responses: B rows of token ids.
            model_inputs: as from `prepare_model_inputs`, [B, T] each, padded on either side.
            return_logits: whether to return logits as well.
            response_masks: for each response, 1 where a token counts.
        """
        reader: ActorCritic | ReferencePolicy = self.bare
        run: nn.Module = self.actor_critic
        if model is self.reference_policy or model is self.ref_model:
            reader = run = self.reference_policy
        elif model is not run and model is not reader and model is not self.model:
            raise ValueError("batched_forward_pass runs trainer.model or ref_model; it was given another model.")
        is_exact = self.config.kl_penalty == "full" and not (return_logits or torch.is_grad_enabled())
        options = {"temperature": self.temperature, "return_logits": return_logits, "return_head_inputs": is_exact}
        with without_dropout(self.actor_critic):
            return score(reader, run, queries, responses, model_inputs, response_masks, padding=self.padding, **options)

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor, kl: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Rewards per token, their part that is not the score, and the KL, each [B, R].

        `kl` is the exact KL, where it is known. A subclass's method takes `kl_penalty="full"` from log-probabilities of
        the whole vocabulary, [B, R, V], and may return the first two alone: the KL is then that of `kl_penalty`.
        """
        kl = torch.where(masks.bool(), self._kl_penalty(logprobs, ref_logprobs) if kl is None else kl, 0.0)
        rewards, non_score_rewards = per_token_rewards(scores, kl, masks, kl_coef=self.kl_ctl.value)
        return rewards, non_score_rewards, kl

    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        """The KL per token, [...], that `config.kl_penalty` names; for "full" out of log-probabilities [..., V]."""
        return (SAMPLED_KL | {"full": full})[self.config.kl_penalty](logprob, ref_logprob)

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, advantages whitened over the tokens of all processes, and returns, each [B, R]."""
        values = values * mask
        rewards = rescale(rewards, mask) if self.config.whiten_rewards else rewards
        advantages = gae(rewards, values, mask=mask, gamma=self.config.gamma, lam=self.config.lam)
        return values, whiten(advantages, mask), advantages + values

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
    ) -> Stats:
        """Runs backward for one minibatch, and the optimizer step if it is due; returns statistics.

        Arguments as of `loss`. Called by itself, outside of `step`, the minibatch is an optimizer step. Inside,
        accelerate weighs the loss by the minibatch's share of the step's tokens, and its `sync_gradients` says which
        minibatch is the last. There a loss or a gradient that is not finite raises TrainingDivergedError.
        """
        columns = (old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)
        policy_loss, value_loss, stats = self.loss(*columns)
        ratio = masked_mean(policy_log_ratio(logprobs.detach(), old_logprobs, mask).exp(), mask)
        return {**stats, **self.optimizer_step.descend(policy_loss + value_loss, ratio, step=self.steps_done)}

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
    ) -> tuple[Tensor, Tensor, Stats]:
        """Policy loss, weighted value loss, both means over the tokens of the minibatch, and its statistics.

        Columns are [b, R], of the rollout (`old_logprobs`, `values`) and of the model as it is (`logprobs`, `vpreds`).
        `step` computes logits [b, R, V] only for a subclass that replaces this method or `train_minibatch`. Statistics
        are numbers, tensors with a number per token, or `Mean`s, in a dict that may be nested, weighed by tokens.
        """
        config, clip = self.config, {"clip_low": self.config.cliprange, "clip_high": self.config.cliprange}
        log_ratio = policy_log_ratio(logprobs, old_logprobs, mask)
        policy_losses = clipped_surrogate(log_ratio, advantages, **clip)
        value_losses = clipped_value_loss(vpreds, values, returns, clip=config.cliprange_value)
        stats: Stats = {
            "loss/policy": Mean.of(policy_losses, mask),
            "loss/value": Mean.of(value_losses, mask),
            "loss/total": Mean.of(policy_losses + config.vf_coef * value_losses, mask),
            **{f"policy/{name}": mean for name, mean in surrogate_stats(log_ratio, advantages, mask, **clip).items()},
            "val/vpred": Mean.of(vpreds, mask),
            "val/error": Mean.of((vpreds - returns) ** 2, mask),
            "val/clipfrac": Mean.of(((vpreds - values).abs() > config.cliprange_value).to(vpreds.dtype), mask),
        }
        if logits is not None:
            stats["policy/entropy"] = Mean.of(token_entropy(logits, mask, temperature=self.temperature), mask)
        return masked_mean(policy_losses, mask), config.vf_coef * masked_mean(value_losses, mask), stats

    def record_step_stats(self, kl_coef: float, **data: Any) -> Stats:
        """This process's statistics of a step, from `Experience`'s columns on the host and from `train_stats`."""
        return rollout_stats(kl_coef=kl_coef, **data)

    def gather_stats(self, stats: Mapping[str, Any]) -> Stats:
        """The statistics of all processes: floats and 1-D tensors, equal on each of them."""
        return gather_stats(stats)

    def log_stats(
        self,
        stats: Stats,
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Any],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> Stats:
        """Sends statistics and rewards to the tracker, a table every `log_table_every` steps; returns what was sent."""
        return files.log_step(self, stats, batch, rewards, columns_to_log)

    def prepare_dataloader(
        self, dataset: Any, data_collator: Callable[[Sequence[Any]], Any] | None = None
    ) -> DataLoader[Any]:
        """Shuffled batches for this process, on its device; by default dicts of lists, with `input_ids` of tensors."""
        return setup.dataloader_of(self, dataset, data_collator)

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = AS_MANY_AS_FIT,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Responses to queries, a list of 1-D tensors, or [1, T] to a single query; sets `temperature`.

        Args:
            query_tensor: a query [T], or a list of queries.
            length_sampler: draws `max_new_tokens`, once per call.
            batch_size: queries at a time, as many as fit by default; a rollout has a size of its own.
            return_prompt: whether a response begins with its query (causal models).
            generate_ref_response: whether the reference responds as well, which makes a pair of what is returned.
            generation_kwargs: fields of transformers' GenerationConfig; see `Sampler`. A rollout takes none.
        """
        self.run.interruption.end_if_saved()
        arguments = (query_tensor, length_sampler, batch_size, return_prompt, generate_ref_response)
        return self.sampler(*arguments, **generation_kwargs)

    @property
    def temperature(self) -> float:
        """The temperature of sampling and scoring: the config's, or the last `generate`'s."""
        return self.sampler.temperature

    def save_checkpoint(self, output_dir: str | Path | None = None) -> Path:
        """Writes everything that the next step depends on, atomically, to `checkpoint-<steps>` in the folder."""
        root = output_dir or self.config.output_dir
        if root is None:
            raise ValueError("save_checkpoint needs a folder: give it one, or PPOConfig(output_dir=...).")
        is_within = self.unfinished.batch is not None  # it is the step's that loading it finishes
        return self.run.save(root, self.steps_done + is_within, keep=self.config.save_total_limit)

    def load_checkpoint(self, path: str | Path) -> None:
        """Resumes from a checkpoint, in a trainer with the same models, config and data as the one that saved it.

        A step that a signal has cut short is finished and logged.
        """
        self.run.load(path)
        self._finish_loaded()

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes policy, tokenizer and a model card into a folder. Collective; `kwargs`: of the model's method."""
        self._save_pretrained(str(save_directory), **kwargs)

    def _save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """The part of `save_pretrained` that subclasses of 2024 replace."""
        files.write_policy(self, save_directory, files.full_weights(self.accelerator, self.actor_critic), **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo | None:
        """Uploads what `save_pretrained` writes; arguments as of the model's `push_to_hub`. Collective likewise."""
        weights = files.full_weights(self.accelerator, self.actor_critic)
        return self.run.push(lambda folder: files.write_policy(self, folder, weights, repo_id), repo_id, **kwargs)

    def create_model_card(self, path: str, model_name: str | None = "TRL Model", *, repo_id: str | None = None) -> None:
        """Writes a model card, README.md, into a folder. `repo_id` loads the model: the folder, unless given.

        The card's title is `model_name`, or for its default the name of the folder or of `repo_id`.
        """
        files.write_card(self, path, name=model_name, repo_id=repo_id)
