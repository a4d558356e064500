"""PPO for language models (Ziegler et al. 2019, arXiv:1909.08593, on Schulman et al. 2017, arXiv:1707.06347)."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, send_to_device
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.config import to_flat_dict
from trimtab_common.health import HealthMonitor, TrainingDivergedError, Vitals
from trimtab_common.hub import push_folder, write_model_card
from trimtab_common.kl import SAMPLED_KL, full
from trimtab_common.masking import rescale, whiten
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import Mean, RunningMoments, gather_over_ranks, gather_stats, sum_over_ranks
from trimtab_common.surrogate import surrogate_stats
from trimtab_common.tracking import Tracker, progress
from trimtab_lm.data.prompts import (
    RewardFunction,
    ShuffledBatches,
    as_queries,
    collate_columns,
    open_dataset,
    used_columns,
)
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.rewards.model import RewardModel
from trimtab_lm.sampling.generate import Sampler, eos_token_ids, response_texts, sampling_config
from trimtab_lm.tokens.dropout import without_dropout

from .checks import check_logged, check_step
from .config import PPOConfig
from .loss import policy_log_ratio, ppo_loss
from .policy import ActorCritic, Compared, PolicyOutputs, Scorer
from .returns import gae, per_token_rewards
from .samples import Samples, carry, check_same_tokens, full_logprobs, in_minibatches, padded_inputs, token_entropy
from .saving import load, record_of, resume, save
from .selfcheck import check_ratio, check_reference, check_sampler, tolerance
from .setup import (
    decoder_start,
    filled,
    kl_controller,
    optimizer_of,
    policy_of,
    reference_of,
    start_run,
    tokenizer_of,
)
from .statistics import Clock, Rollout, as_numbers, one_dimensional, rollout_stats, token_means, training_stats
from .update import Update

USAGE = """from transformers import AutoTokenizer
from trimtab_lm import {model}

model = {model}.from_pretrained("{repo_id}")  # transformers' own Auto classes load the language model alone
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")"""


class PPOTrainer:
    """PPO over a batch of queries, responses and scores: `generate`, score, `step`, as often as you like.

    config: a PPOConfig. model: a model with a value head; if None, `config.model_name` is loaded. ref_model: the
    reference of the KL penalty; if None, the model as it is now: a PEFT model with its adapters off, any other as a
    frozen copy, which shares its first `num_shared_layers` layers with the model (and freezes them). tokenizer: with a
    pad token. dataset: prompts for `dataloader` and `train`, as token ids (`input_ids`), texts or conversations
    (`query` or `prompt`); if None, `config.query_dataset` is loaded. optimizer: over the model's parameters; if None,
    Adam. lr_scheduler: stepped once per PPO step. value_model: a model for the values in place of the value head, such
    as a reward model (see `Critic`).

    What may be overridden: `batched_forward_pass`, `compute_rewards`, `compute_advantages`, `loss`, `train_minibatch`,
    `record_step_stats`, `gather_stats`, `prepare_dataloader`, `log_stats`. Logits of the whole vocabulary are computed
    only for a subclass that replaces `loss`, `train_minibatch` or `batched_forward_pass`. `trainer.config` is a copy of
    the config with the fields that are filled at run time.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | None = None,
        ref_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Dataset | torch.utils.data.Dataset | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        *,
        value_model: nn.Module | None = None,
    ):
        config = replace(config or PPOConfig())  # checked again: fields may have been assigned
        self.model = model = policy_of(config, model)
        self.tokenizer = tokenizer_of(config, tokenizer)
        self.is_encoder_decoder = model.is_encoder_decoder
        self.reference, self.ref_model = reference_of(model, ref_model, num_shared_layers)
        actor_critic = ActorCritic(model, value_model)
        trainable = [parameter for parameter in actor_critic.parameters() if parameter.requires_grad]
        optimizer = optimizer_of(config, optimizer, trainable)

        # Without cpu=True, torchrun on a machine without a GPU gives processes that never synchronise.
        settings = {"cpu": not torch.accelerator.is_available(), **config.accelerator_kwargs}
        self.accelerator = Accelerator(project_config=ProjectConfiguration(**config.project_kwargs), **settings)
        self.config = filled(config, model, self.accelerator.num_processes)
        self.current_device = self.accelerator.device
        self.lr_scheduler = lr_scheduler
        self.actor_critic, self.optimizer = self.accelerator.prepare(actor_critic, optimizer)
        self.update = Update(self.actor_critic, self.optimizer, self.config, self.accelerator)
        self._decoder_start = decoder_start(model) if self.is_encoder_decoder else None
        self.scorer = Scorer(
            self.actor_critic,
            self.reference,
            self.accelerator,
            pad_token_id=self.tokenizer.pad_token_id,
            decoder_start=self._decoder_start,
        )

        self._rounding = tolerance(model.pretrained_model, self.accelerator.mixed_precision)
        self.kl_ctl = kl_controller(config)
        self.running = RunningMoments()
        self.sampler = Sampler(
            self.tokenizer.pad_token_id,
            self.tokenizer.eos_token_id,
            seed=config.seed,
            rank=self.accelerator.process_index,
            temperature=config.temperature,
        )
        self.health = HealthMonitor(kl_target=config.target if config.adap_kl_ctrl else None)
        self.steps_done = 0
        self.best_score = float("-inf")
        self._tracker: Tracker | None = None
        self.run_id: str | None = None  # the tracker's

        self.dataset, self.data_collator = dataset, data_collator
        self.dataloader: DataLoader | None = None
        self.batches: ShuffledBatches | None = None
        if dataset is None and config.query_dataset:
            self.dataset = open_dataset(config.query_dataset)
        if isinstance(self.dataset, Dataset) and data_collator is None and "input_ids" not in self.dataset.column_names:
            self.dataset = as_queries(self.dataset, self.tokenizer, is_encoder_decoder=self.is_encoder_decoder)
        if self.dataset is not None:
            self.dataloader = self.prepare_dataloader(self.dataset, data_collator)
            if isinstance(self.dataloader.batch_sampler, ShuffledBatches):
                self.batches = self.dataloader.batch_sampler
        self.run = record_of(self)

    @property
    def model_params(self) -> list[nn.Parameter]:
        """What trains: of the policy, and of the critic where there is one."""
        return [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]

    @property
    def current_device(self) -> torch.device:
        """Where batches and rewards are: accelerate's device, until another one is assigned."""
        return self._device

    @current_device.setter
    def current_device(self, device: torch.device | str | int) -> None:
        self._device = torch.device(device)

    # ------------------------------------------------------------------ data

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> DataLoader:
        """Shuffled batches of `config.batch_size` rows for this process, on its device, without a remainder.

        The order of the batches comes from `config.seed`; that of `trainer.dataloader` is part of a checkpoint. By
        default a batch is a dict of lists, its `input_ids` 1-D tensors.
        """
        if self.config.remove_unused_columns and isinstance(dataset, Dataset):
            inner = self.model.pretrained_model  # a PeftModel's own forward names no columns
            dataset = used_columns(dataset, inner.get_base_model() if self.model.is_peft_model else inner)
        collate = data_collator or collate_columns
        batches = ShuffledBatches(
            len(dataset),
            self.config.batch_size,
            seed=self.config.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=lambda rows: send_to_device(collate(rows), self.current_device),
            generator=torch.Generator(),  # else each epoch's start, and each resume, draws from torch's global one
        )

    # -------------------------------------------------------------- sampling

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Responses to queries, from the policy, and from the reference too if asked: then both, as a pair.

        query_tensor: 1-D, which gives a [1, T] tensor; or a list of 1-D tensors, which gives a list of 1-D ones.
        length_sampler: draws `max_new_tokens`, once per call. batch_size: queries at a time. The temperature is
        remembered: `step` takes the log-probabilities at it. See `trimtab_lm.sampling.generate.Sampler`.
        """
        is_single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else query_tensor
        if length_sampler is not None:
            generation_kwargs["max_new_tokens"] = length_sampler()
        models: list[AbstractContextManager[Any]] = [nullcontext(self.model.pretrained_model)]
        if generate_ref_response:
            models.append(self.reference.active())
        options = {"batch_size": batch_size, "return_prompt": return_prompt, **generation_kwargs}
        with torch.no_grad(), without_dropout(self.model):
            is_first = self.sampler.calls == 0
            responses = self.sampler(models, queries, **options)  # refuses bad queries by name
            if is_first:
                self._check_sampler(queries, generation_kwargs)
        answers = [rows[0][None] if is_single else rows for rows in responses]
        return tuple(answers) if generate_ref_response else answers[0]

    def _check_sampler(self, queries: list[Tensor], generation_kwargs: dict[str, Any]) -> None:
        model = self.model.pretrained_model
        config, _ = sampling_config(model, **{"pad_token_id": self.tokenizer.pad_token_id, **generation_kwargs})

        def logprobs_of(samples: Samples) -> Tensor:
            return self.scorer.policy_alone(samples, temperature=1.0).logprobs

        check_sampler(model, logprobs_of, queries, config, most=self._rounding)

    # -------------------------------------------------------------- one step

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Any],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One PPO iteration over this process's batch.

        Args:
            queries: `batch_size` rows of token ids, 1-D.
            responses: `batch_size` rows of token ids, 1-D.
            scores: a number for each response.
            response_masks: for each response token 1, or 0 where the policy did not write it (the output of a tool).

        Returns:
            The statistics, equal on all processes.
        """
        clock = Clock()
        samples, raw_scores = check_step(
            queries,
            responses,
            scores,
            response_masks,
            batch_size=self.config.batch_size,
            model=self.model,
            decoder_start=self._decoder_start,
            is_first=self.steps_done == 0,
            device=self.current_device,
        )
        with without_dropout(self.actor_critic):
            rollout = self._evaluate(samples, raw_scores, clock)
            if self.steps_done == 0:
                check_reference(rollout, most=self._rounding)
            train_stats = self._optimize(rollout)
            clock.lap("optimize_step")
        stats = self.record_step_stats(kl_coef=self.kl_ctl.value, **rollout.step_data(), train_stats=train_stats)
        clock.lap("calc_stats")
        stats = one_dimensional({**stats, "ppo/learning_rate": self._lr, **clock.stats()})
        stats = as_numbers(self.gather_stats(stats))

        self.kl_ctl.update(stats["objective/kl"], self.config.batch_size * self.accelerator.num_processes)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.steps_done += 1
        self._push_if_best(stats["ppo/mean_scores"])
        if self.config.optimize_device_cache:
            clear_device_cache()
        return {**stats, **self._check_health(stats)}

    def _evaluate(self, samples: Samples, raw_scores: Tensor, clock: Clock) -> Rollout:
        """Log-probabilities, values, rewards and advantages of a batch under the policy as it is, without gradients."""
        if self._replaces("batched_forward_pass", "prepare_model_inputs"):
            inputs = self.prepare_model_inputs(samples.queries, samples.responses)
            samples = replace(samples, model_inputs=inputs)
        with torch.no_grad():
            old = in_minibatches(self._compare, samples, self.config.mini_batch_size)
            mask = old.mask
            clock.lap("forward_pass")
            scores = self._shaped(raw_scores, samples.responses)
            known = {} if old.kl is None or old.distributions is not None else {"kl": old.kl}
            pair = old.distributions, old.ref_distributions
            pair = (old.logprobs, old.ref_logprobs) if pair[0] is None else pair
            rewards, non_score_rewards, *kl = self.compute_rewards(scores, *pair, mask, **known)
            kl = kl[0] if kl else self._kl_penalty(*pair)
            clock.lap("compute_rewards")
            values, advantages, returns = self.compute_advantages(old.values, rewards, mask)
            clock.lap("compute_advantages")

        def at_tokens(column: Tensor) -> Tensor:
            return torch.where(mask.bool(), column, 0.0)

        return Rollout(
            samples=samples,
            mask=mask,
            scores=raw_scores,
            logprobs=old.logprobs,
            ref_logprobs=old.ref_logprobs,
            entropy=old.entropy,
            values=at_tokens(values),
            kl=at_tokens(kl),
            non_score_rewards=at_tokens(non_score_rewards),
            advantages=at_tokens(advantages),
            returns=at_tokens(returns),
        )

    def _compare(self, samples: Samples) -> Compared:
        """A minibatch under policy and reference.

        A subclass's `compute_rewards` is given the log-probabilities of the whole vocabulary for `kl_penalty="full"`,
        as documented.
        """
        is_full = self.config.kl_penalty == "full"
        needs_logits = is_full and self._replaces("compute_rewards", "batched_forward_pass")
        policy = self._forward(samples, return_logits=needs_logits)
        ref = self._forward(samples, of_reference=True, return_logits=needs_logits)
        mask, temperature = policy.mask, self.sampler.temperature
        compared = Compared(policy.logprobs, ref.logprobs, policy.values, policy.entropy, mask)
        if not is_full:
            return compared
        if policy.logits is None or ref.logits is None:
            return compared._replace(kl=self.scorer.exact_kl(samples, temperature=temperature))
        pair = [full_logprobs(logits, temperature=temperature) for logits in (policy.logits, ref.logits)]
        compared = compared._replace(kl=full(*pair))
        if not self._replaces("compute_rewards"):
            return compared
        return compared._replace(distributions=pair[0], ref_distributions=pair[1])

    def prepare_model_inputs(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        """Padded inputs of the model, for a `batched_forward_pass` of a subclass: see `padded_inputs`."""
        pad_token_id = self.tokenizer.pad_token_id
        return padded_inputs(queries, responses, pad_token_id=pad_token_id, decoder_start=self._decoder_start)

    def batched_forward_pass(
        self,
        model: nn.Module | None,
        queries: list[Tensor],
        responses: list[Tensor],
        model_inputs: dict[str, Tensor],
        return_logits: bool = False,
        response_masks: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Log-probabilities, logits, values and mask of B responses, `mini_batch_size` rows of like length at a time.

        A subclass's method may return columns of its own layout, such as [B, T - 1] over query and response: `step`
        reads the positions where the mask is 1, and calls it for one minibatch at a time, with gradients in the
        updates. `model` is then a module that gives (logits, loss, values) of the model inputs.

        Args:
            model: `trainer.model`, or `trainer.ref_model`, which is None where the adapters are switched off.
            queries: B rows of token ids.
            responses: B rows of token ids.
            model_inputs: as from `prepare_model_inputs`, [B, T] each, padded on either side.
            return_logits: whether to return logits as well.
            response_masks: for each response, 1 where a token counts.

        Returns:
            Log-probabilities in nats at the sampling temperature, [B, R]; logits [B, R, V], or None; values [B, R], or
            None for the reference; the mask [B, R]. All are 0 where a token does not count.
        """
        of_reference = model is None or model is self.ref_model
        if not of_reference and model is not self.model and model is not self.actor_critic:
            raise ValueError(
                "batched_forward_pass runs trainer.model or trainer.ref_model; it was given another model."
            )
        samples = Samples(queries, responses, response_masks, model_inputs)

        def forward(part: Samples) -> PolicyOutputs:
            return self._score(part, of_reference=of_reference, return_logits=return_logits)

        with without_dropout(self.actor_critic):
            outputs = in_minibatches(forward, samples, self.config.mini_batch_size)
        return outputs.logprobs, outputs.logits, outputs.values, outputs.mask

    def _score(self, samples: Samples, *, of_reference: bool, return_logits: bool) -> PolicyOutputs:
        """A minibatch by the built-in pass, which needs no logits for log-probabilities and entropies."""
        score = self.scorer.ref if of_reference else self.scorer.policy
        return score(samples, temperature=self.sampler.temperature, return_logits=return_logits)

    def _forward(self, samples: Samples, *, of_reference: bool = False, return_logits: bool = False) -> PolicyOutputs:
        """A minibatch under the policy or the reference, by the built-in pass or by a subclass's.

        A subclass's pass is asked for the policy's logits, from which the entropy comes.
        """
        if not self._replaces("batched_forward_pass"):
            return self._score(samples, of_reference=of_reference, return_logits=return_logits)
        model: Any = (self.ref_model or self.model) if of_reference else self.actor_critic
        context = self.scorer.of_reference() if of_reference else nullcontext()
        with context, without_dropout(self.actor_critic):
            logprobs, logits, values, mask = self.batched_forward_pass(
                model,
                samples.queries,
                samples.responses,
                samples.model_inputs,
                return_logits=return_logits or not of_reference,
                response_masks=samples.response_masks,
            )
        counts = mask.bool()
        return PolicyOutputs(
            logprobs=torch.where(counts, logprobs, 0.0),
            entropy=None if logits is None else token_entropy(logits, mask, temperature=self.sampler.temperature),
            values=None if values is None else torch.where(counts, values, 0.0),
            mask=mask,
            logits=logits,
        )

    def _replaces(self, *names: str) -> bool:
        """Whether a subclass, or an assignment to this trainer, replaces one of these methods.

        What only a replaced method reads, such as logits, is computed for one alone.
        """
        return any(name in vars(self) or getattr(type(self), name) is not getattr(PPOTrainer, name) for name in names)

    def _shaped(self, scores: Tensor, responses: list[Tensor]) -> Tensor:
        """Scores less the penalty for a missing end token, then scaled, normed and clipped as the config says."""
        config = self.config
        if config.missing_eos_penalty is not None:
            ends = self.sampler.eos_ids or eos_token_ids(self.model, self.tokenizer.eos_token_id)
            unended = torch.tensor([int(row[-1]) not in ends for row in responses], device=scores.device)
            scores = scores - config.missing_eos_penalty * unended
        if config.use_score_scaling:
            self.running.update(scores)
            scores = (scores - (self.running.mean if config.use_score_norm else 0.0)) / self.running.std
        return scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor, kl: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
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

    # --------------------------------------------------------------- updates

    def _optimize(self, rollout: Rollout) -> dict[str, Any]:
        """`ppo_epochs` passes over the batch in shuffled optimizer steps; the statistics of all of them."""
        config = self.config
        recorded: list[dict[str, Any]] = []
        # A stream above those of the ranks, which `generate` draws from.
        seed = sampling_seed(config.seed, rank=self.accelerator.num_processes, draw=self.steps_done)
        shuffle = torch.Generator().manual_seed(seed)
        for _ in range(config.ppo_epochs):
            for rows in torch.randperm(config.batch_size, generator=shuffle).split(config.backward_batch_size):
                if self._update(rollout, rows, recorded):
                    return training_stats(rollout, recorded)
        return training_stats(rollout, recorded)

    def _update(self, rollout: Rollout, rows: Tensor, recorded: list[dict[str, Any]]) -> bool:
        """One optimizer step over `rows`, minibatch by minibatch; returns whether the policy has moved too far."""
        processes, divergence = self.accelerator.num_processes, Mean(0.0, 0.0)
        tokens = float(sum_over_ranks(rollout.mask[rows].sum()))
        parts = rows[rollout.samples.lengths[rows].argsort(stable=True)].split(self.config.mini_batch_size)
        try:
            for number, part in enumerate(parts, start=1):
                # The gradient of the step is that of all its tokens at once, averaged over processes.
                share = float(rollout.mask[part].sum()) * processes / tokens
                with self.update.minibatch(share=share, is_last=number == len(parts)), self._unchanged_modes():
                    is_first = self.steps_done == 0 and not recorded
                    stats, moved = self._train_on(rollout, part, is_first=is_first)
                recorded.append(stats)
                divergence += moved
        except TrainingDivergedError:
            self.update.drop()
            raise
        if "policy/early_stopped" in stats:
            return stats["policy/early_stopped"].value > 0
        return self.update.has_moved_too_far(divergence)  # a subclass's train_minibatch took the step by itself

    def _train_on(self, rollout: Rollout, rows: Tensor, *, is_first: bool) -> tuple[dict[str, Any], Mean]:
        """Score a minibatch under the policy as it is now, and train on it; its statistics, and its divergence."""
        outputs = self._forward(rollout.samples.rows(rows), return_logits=self._replaces("loss", "train_minibatch"))
        mask, old_mask = outputs.mask, rollout.mask[rows]
        check_same_tokens(mask, old_mask)
        old_logprobs, values, advantages, returns = (
            carry(column[rows], old_mask, mask)
            for column in (rollout.logprobs, rollout.values, rollout.advantages, rollout.returns)
        )
        if is_first:
            check_ratio(outputs.logprobs.detach(), old_logprobs, mask, most=self._rounding)
        divergence = self._moves(old_logprobs, outputs.logprobs, advantages, mask)["approxkl"]
        stats = self.train_minibatch(
            old_logprobs=old_logprobs,
            values=values,
            logprobs=outputs.logprobs,
            logits=outputs.logits,
            vpreds=outputs.values,
            mask=mask,
            advantages=advantages,
            returns=returns,
        )
        entropy = {} if outputs.entropy is None else {"policy/entropy": Mean.of(outputs.entropy, mask)}
        return {**entropy, **token_means(stats, mask)}, divergence

    def _unchanged_modes(self) -> AbstractContextManager[None]:
        """Undo what a subclass's `train_minibatch` does to modules by `model.train()`, which switches dropout on."""
        return without_dropout(self.actor_critic) if self._replaces("train_minibatch") else nullcontext()

    def _moves(self, old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Mean]:
        clip = self.config.cliprange
        log_ratio = policy_log_ratio(logprobs, old_logprobs, mask)
        return surrogate_stats(log_ratio, advantages, mask, clip_low=clip, clip_high=clip)

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
        """Backward for one minibatch, and the optimizer step if it is due; returns its statistics.

        Called by itself, outside of `step`, the minibatch is an optimizer step. Inside, accelerate weighs the loss by
        the minibatch's share of the step's tokens, and its `sync_gradients` says which minibatch is the last.

        Args:
            old_logprobs: as of `loss`, like the others.

        Raises:
            TrainingDivergedError: the loss or the gradient is not finite; the weights are untouched.
        """
        moves = self._moves(old_logprobs, logprobs, advantages, mask)
        policy_loss, value_loss, stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        stats = token_means(stats, mask)
        loss, ratio = policy_loss + value_loss, moves["ratio"].value
        is_skipped = ratio > self.config.ratio_threshold
        if is_skipped:
            warnings.warn(
                f"Mean ratio {ratio:.3g} of a minibatch is above ratio_threshold={self.config.ratio_threshold}: it is "
                "left out of the update. Lower learning_rate or ppo_epochs if this repeats.",
                stacklevel=2,
            )
            loss = 0.0 * (logprobs.sum() + vpreds.sum())
        elif not torch.isfinite(loss):
            self.update.drop()
            raise TrainingDivergedError(
                f"The loss of step {self.steps_done} is {loss.item()}. No update was made. Lower learning_rate "
                f"({self.config.learning_rate}), clip gradients (max_grad_norm), or train in bfloat16 or float32."
            )
        self.update.add(loss, divergence=moves["approxkl"], is_kept=not is_skipped)
        stats["policy/skipped"] = Mean(float(is_skipped), 1.0)
        return stats | self.update.take() if self.accelerator.sync_gradients else stats

    # ------------------------------------------------------------ statistics

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """This process's statistics of a step, under their documented names.

        data: `queries`, `responses` and `scores` of the batch; `masks`, `logprobs`, `ref_logprobs`, `kls`,
        `non_score_reward`, `values`, `advantages`, `returns` and `entropy` [B, R], 0 where the mask is 0; and
        `train_stats`, of the updates: tensors whose mean over the first axis is the statistic.
        """
        train_stats = data.pop("train_stats")
        return {
            **rollout_stats(kl_coef=kl_coef, **data),
            **{f"ppo/{name}": value.mean(0) for name, value in train_stats.items()},
        }

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics of all processes: floats and 1-D tensors, equal on each of them."""
        return gather_stats(stats)

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Any],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> dict[str, Any]:
        """Send a step's statistics to the tracker, with the rewards and a table of samples; returns what was sent.

        rewards: one number per response of this process. columns_to_log: columns of `batch` for the table.
        """
        check_logged(batch, rewards, columns_to_log)
        own = [float(reward) for reward in rewards]
        rows = list(zip(*(batch[name] for name in columns_to_log), own, strict=True))
        gathered = [row for part in gather_over_ranks(rows) for row in part]
        distribution = torch.tensor([row[-1] for row in gathered])
        logs = {
            **stats,
            "env/reward_mean": float(distribution.mean()),
            "env/reward_std": float(distribution.std(correction=0)),
            "env/reward_dist": distribution,
        }
        self.tracker.log(logs, self.steps_done)
        self.tracker.table("game_log", [*columns_to_log, "reward"], gathered, self.steps_done)
        return logs

    @property
    def tracker(self) -> Tracker:
        """Where statistics go; started at its first use, so that a resumed run goes on under its id."""
        if self._tracker is None:
            self._tracker = start_run(self.config, self.accelerator, self.run_id)
            self.run_id = self._tracker.run_id
        return self._tracker

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _check_health(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """Warn of what goes wrong, each with number, threshold and remedy; raises if a statistic is not finite."""
        scalars = {name: value for name, value in stats.items() if isinstance(value, float)}
        vitals = Vitals(
            kl=scalars["objective/kl"],
            entropy=scalars.get("ppo/policy/entropy"),
            clip_fraction=scalars.get("ppo/policy/clipfrac"),
            explained_variance=scalars.get("ppo/val/var_explained"),
            reward_std=scalars["ppo/std_scores"],
            response_length=scalars.get("tokens/responses_len_mean"),
        )
        alerts = self.health.check(vitals, scalars)
        if self.accelerator.is_main_process:
            for alert in alerts:
                warnings.warn(f"step {self.steps_done}: {alert}", stacklevel=3)
        return self.health.metrics(alerts)

    # -------------------------------------------------------------- the loop

    def train(
        self,
        reward: RewardFunction | nn.Module | None = None,
        *,
        generation_kwargs: Mapping[str, Any] | None = None,
        steps: int | None = None,
        resume_from: str | Path | None = None,
        on_step: Callable[[int, dict[str, Any], dict[str, Any]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Generate, score and step over the dataset until `steps` (default: the config's) are done; logs and saves.

        reward: `reward(queries, responses, **columns) -> scores`, with texts and the batch's other columns, or a
        sequence classifier with the policy's tokenizer; if None, `config.reward_model`. generation_kwargs: arguments of
        `generate`; by default the whole batch is sampled at once. resume_from: a checkpoint's folder, or "latest" for
        the newest in `output_dir`, if there is one. on_step: called with the step's number, the logged statistics and
        the batch. Returns the numbers among the logged statistics of every step.
        """
        reward_function = self._reward_function(reward)
        if self.dataloader is None:
            raise ValueError("train() needs prompts: give PPOTrainer a dataset, or PPOConfig a query_dataset.")
        resume(self, resume_from)
        options = {"batch_size": self.config.batch_size, "do_sample": True, **(generation_kwargs or {})}
        total, history = steps or self.config.steps, []
        batches = _endless(self.dataloader)
        for _ in progress(range(self.steps_done, total), "PPO steps"):
            batch = next(batches)
            queries = batch["input_ids"]
            responses = self.generate(queries, **{**options, "return_prompt": False})
            batch["response"] = response_texts(
                self.tokenizer, queries, responses, is_encoder_decoder=self.is_encoder_decoder
            )
            if "query" not in batch:
                batch["query"] = self.tokenizer.batch_decode(queries, skip_special_tokens=True)
            columns = {name: column for name, column in batch.items() if name not in ("query", "response", "input_ids")}
            scores = list(reward_function(batch["query"], batch["response"], **columns))
            stats = self.step(queries, responses, scores)
            logs = self.log_stats(stats, batch, scores)
            history.append({name: value for name, value in logs.items() if isinstance(value, float)})
            if on_step is not None:
                on_step(self.steps_done, logs, batch)
            if self.config.save_steps and self.steps_done % self.config.save_steps == 0:
                self.save_checkpoint()
        return history

    def _reward_function(self, reward: RewardFunction | nn.Module | None) -> RewardFunction:
        if isinstance(reward, nn.Module):
            return RewardModel(reward, self.tokenizer, device=self.current_device)
        if reward is None and self.config.reward_model:
            return RewardModel(self.config.reward_model, device=self.current_device)
        if reward is None:
            raise ValueError("train() needs a reward: a function or model, or PPOConfig(reward_model=...).")
        return reward

    # ---------------------------------------------------------------- saving

    def save_checkpoint(self, output_dir: str | Path | None = None) -> Path:
        """Everything that the next step depends on, atomically, as `checkpoint-<steps>` in `output_dir`."""
        root = output_dir or self.config.output_dir
        if root is None:
            raise ValueError("save_checkpoint needs a folder: give it one, or PPOConfig(output_dir=...).")
        return save(self, root)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint, in a trainer made as the one that saved it: same models, config and data."""
        load(self, path)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """The policy with its value head, the tokenizer and a model card, in one folder."""
        if self.accelerator.is_main_process:
            self.model.save_pretrained(save_directory, **kwargs)
            self.tokenizer.save_pretrained(save_directory)
            self.create_model_card(str(save_directory))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload what `save_pretrained` writes; arguments as of the model's `push_to_hub`."""
        if not self.accelerator.is_main_process:
            return None
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            self.create_model_card(folder, repo_id=repo_id)
            return push_folder(Path(folder), repo_id, **kwargs)

    def _push_if_best(self, mean_score: float) -> None:
        config = self.config
        if (
            not config.push_to_hub_if_best_kwargs
            or self.steps_done % config.compare_steps
            or mean_score <= self.best_score
        ):
            return
        self.best_score = mean_score
        self.push_to_hub(**config.push_to_hub_if_best_kwargs)

    def create_model_card(self, path: str, model_name: str | None = "TRL Model", *, repo_id: str | None = None) -> None:
        """Write a model card (README.md) into the folder `path`; repo_id: what it is loaded by, if not its name."""
        write_model_card(
            path,
            name=model_name or "Model",
            trainer=type(self).__name__,
            paper="Ziegler et al. 2019, arXiv:1909.08593",
            usage=USAGE.replace("{model}", type(self.model).__name__),
            library="transformers",
            repo_id=repo_id,
            base_model=getattr(self.model.config, "_name_or_path", None) or None,
            settings={name: value for name, value in to_flat_dict(self.config).items() if value not in (None, {})},
        )


def _endless(dataloader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from dataloader
