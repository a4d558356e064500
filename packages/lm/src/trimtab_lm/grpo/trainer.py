"""GRPO on transformers.Trainer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from trimtab_common.health import TrainingDivergedError, rounding_of
from trimtab_common.seeding import private_rngs, sampling_seed
from trimtab_common.sharding import divides_weights
from trimtab_common.stats import Mean, gather_over_ranks
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import PROMPT_IDS
from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.adapter import BatchLoss, DataOptions, TrainerAdapter, TrainerOptions, num_averaged, real_rows, total
from trimtab_lm.hf.models import load_language_model, with_adapters
from trimtab_lm.hf.types import Batch, DataSource, EvalSource, Optimizers, Prediction, Trial, Use
from trimtab_lm.interface import Model, Processor, decoder_start_of
from trimtab_lm.legacy.arguments import takes_constructor_of_2024
from trimtab_lm.models.reference import Reference
from trimtab_lm.rewards.functions import Rewards, Tokenizers
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending, Request
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.mismatch import Surprise
from trimtab_lm.sampling.rollout import RolloutBackend, padding_id
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.layout import lay_out, token_columns
from trimtab_lm.tokens.scores import Scores

from .algorithm import Completions, policy_loss, with_old_logprobs
from .batches import PromptLoader, RolloutBuffer, as_list
from .config import GRPOConfig
from .loss import NORMALIZATIONS, Totals
from .rollout import GroupSampler, ScoredRollout, rewards_of
from .saving import Progress
from .selfcheck import check_completions, check_start
from .statistics import SURPRISE, SampleTable, numbers_of, rollout_stats, update_stats, vitals

EVALUATION = 2**31  # evaluation's draws begin here: steps of training, which number its draws, never get so far


class GRPOTrainer(TrainerAdapter[GRPOConfig, Totals]):
    """Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

    An epoch leaves out the rows after the last whole call of generation.

    Args:
        model: a causal or encoder-decoder model, with adapters or without, or the name of one. With beta > 0 the
            reference is the model as it is now: with its adapters off where it has some, else a frozen copy.
        reward_funcs: callables, plain or async, and reward models, one or several: see `RewardSet`. They are given
            `prompts`, `completions`, `completion_ids` and the dataset's other columns. Random numbers that they draw
            from the global generators are fixed by (seed, rank, step), and those of training are not moved. They may be
            left out where `rollout` has environments, whose reward is one more, called `environment`.
        args: the config; None for the defaults.
        train_dataset: a `prompt` column, of texts or conversations, and any others.
        eval_dataset: such rows too, or a dict of several datasets.
        processing_class: the tokenizer; None loads the one beside the model.
        reward_processing_classes: tokenizers of the reward models.
        peft_config: adapters to add.
        rollout: samples the completions, instead of the backend that the config names; an `EnvironmentRollout` samples
            conversations.
    """

    search_objective = "eval_reward"

    @takes_constructor_of_2024(GRPOConfig)
    def __init__(
        self,
        model: Model | str | None = None,
        reward_funcs: Rewards | None = None,
        args: GRPOConfig | None = None,
        train_dataset: DataSource | None = None,
        eval_dataset: EvalSource | None = None,
        processing_class: Processor | None = None,
        reward_processing_classes: Tokenizers = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: PeftConfig | None = None,
        rollout: RolloutBackend | None = None,
        model_init: Callable[..., Model] | None = None,
    ):
        assert args is not None  # takes_constructor_of_2024 fills it in
        self.reference: Reference | None = None
        self.trains_without_dropout = args.disable_dropout
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=as_list)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers)
        policy = load_language_model(model, args.model_init_kwargs)
        super().__init__(policy, args, processing_class, model_init, peft_config, data=data, **hooks)
        args = self.config
        self.pending = Pending()
        backend = partial(make_backend, args.rollout_backend, args.sampling(), self.tokenizer)
        self.backend = backend(args.rollout_backend_kwargs) if rollout is None else rollout
        if args.asynchronous_rollouts:
            self.backend = AsynchronousRollout(self.backend, self.pending)
        rewards = rewards_of(reward_funcs, args, reward_processing_classes, self.backend)
        has_own_limit, is_noisy = rollout is not None, self.is_noisy
        self.sampler = GroupSampler(
            self.model, args, self.tokenizer, rewards, has_own_limit=has_own_limit, is_noisy=is_noisy
        )
        require_eos(self.tokenizer)
        self.lay_out = partial(
            lay_out,
            layout=best_layout(self.model, share_prefix=True, is_noisy=is_noisy),
            pad_token_id=padding_id(self.tokenizer),  # padding is masked by its place, so it may be EOS
            decoder_start_token_id=decoder_start_of(self.model),
        )
        self.weights_version = 0  # of the policy's weights, as backends count them
        self.eval_batches = 0  # of this evaluation so far
        self._begin()
        self.prepare_datasets()

    def _begin(self) -> None:
        args = self.config
        self.pending.drop()
        micro_batches = args.gradient_accumulation_steps * args.steps_per_generation
        buffer = RolloutBuffer(micro_batches=micro_batches, passes=args.num_iterations)
        self.progress = Progress(buffer, pending=self.pending)
        printed = args.num_completions_to_print if args.log_completions else 0
        self.samples = SampleTable(self.sampler.rewards.names, printed=printed)

    def prepare_model(self, model: Model) -> Model:
        """The model with its adapters, and with a forward that scores tokens; its reference is the model as it is."""
        model = with_adapters(model, self.peft_config, self.config)
        if self.config.beta:
            self.reference = Reference.of(model)
            score_tokens_in_forward(self.reference.model)
        score_tokens_in_forward(model)  # not before: a reference copied from this would run the policy
        return model

    # Data -------------------------------------------------------------------------------------------------------------

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """The dataset with the token ids of its prompts."""
        return self.sampler.tokenize(dataset)

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Each batch holds the prompts of one call of generation, and comes as often as that serves a micro-batch."""
        if self.train_dataset is None:
            raise ValueError("GRPOTrainer: training requires a train_dataset.")
        rows, args = cast(Dataset, self.train_dataset), self.config
        prompts_per_step = self.get_total_train_batch_size(args) // args.world_size
        return PromptLoader.of_process(rows, args, prompts_per_step=prompts_per_step)

    # Algorithm 1 of the paper -----------------------------------------------------------------------------------------

    def micro_batches(self, batches: list[list[Row]]) -> list[Batch]:
        """The micro-batches of an optimizer step, out of a new rollout if one is due.

        Generation is here and not in training_step, because the number of tokens that the whole step learns from must
        be known before its first micro-batch.
        """
        buffer, parts = self.progress.buffer, list[Completions]()
        for batch in batches:
            count = len(batch) // 2 if self.config.asynchronous_rollouts else len(batch)
            if not buffer.serves(count):
                self._roll_out_for_training(batch[:count], batch[count:])
            parts.append(buffer.next())
        buffer.after_update()  # which comes next
        return [self._batch(part) for part in parts]

    def _batch(self, rollout: Completions) -> Batch:
        # Trainer leaves the rollout as it is. It would give numbers of float32 the dtype of a DeepSpeed model.
        return {**self.lay_out(rollout.groups), "rollout": rollout}

    def _roll_out_for_training(self, rows: Sequence[Row], next_rows: Sequence[Row]) -> None:
        """Lines 5 to 9: sample a group for each prompt, score it, compute advantages; what the policy thought of it."""
        args, step, buffer = self.config, self.state.global_step, self.progress.buffer
        steps = args.steps_per_generation * args.num_iterations
        if isinstance(self.backend, AsynchronousRollout):
            prompts, seed = [torch.tensor(row[PROMPT_IDS]) for row in next_rows], self._seed(step + steps)
            upcoming = Request.of(prompts, num_generations=args.num_generations, seed=seed)
            self.backend.begin_step(step, upcoming if step + steps < self.state.max_steps else None)
        self.weights_version += 1
        sampled = self.roll_out(rows, draw=step, training=True)
        if sampled.policy_step is not None:
            behind = Mean(float(step - sampled.policy_step), 1.0)
            self.recorder.add({"sampling/steps_behind": behind}, training=True)
        rollout = with_old_logprobs(sampled.rollout, self._old_logprobs, args, steps=steps)
        rollout = self.with_reference(rollout, buffer.prompts_of(rollout))
        buffer.fill(rollout, seed=self._seed(step))
        self.progress.num_tokens += sum(gather_over_ranks(sampled.num_tokens))

    def roll_out(
        self, rows: Sequence[Row], *, draw: int, training: bool, real_rows: int | None = None
    ) -> ScoredRollout:
        """A group of completions for each row, with its advantages; its statistics are recorded.

        draw: which random numbers to take. With scale_rewards="batch" collective: the same number of calls everywhere.
        """
        model, version, seed = self.accelerator.unwrap_model(self.model), self.weights_version, self._seed(draw)
        sampled = self.sampler.sample(self.backend, model, rows, version=version, seed=seed, real_rows=real_rows)
        stats = rollout_stats(sampled, names=self.sampler.rewards.names, bos=self.tokenizer.bos_token_id)
        self.recorder.add(stats, training=training)
        self.samples.add(sampled, training=training)
        return sampled

    def _old_logprobs(self, rollout: Completions) -> Tensor:
        scores = self._score(rollout, self.progress.buffer.prompts_of(rollout), self.model_wrapped)
        for one in scores if self.config.samples_tell_surprise else []:
            self.recorder.add({SURPRISE: Surprise.of_tokens(one.logprobs, one.entropy)}, training=True)
        return torch.cat([one.logprobs.cpu() for one in scores])

    def with_reference(self, rollout: Completions, parts: Sequence[Sequence[int]]) -> Completions:
        """The rollout with the log-probabilities of the reference, if there is one; parts: prompts at a time."""
        if self.reference is None:
            return rollout
        self.reference.prepare(self.accelerator)
        with self.reference.active() as reference:
            scores = self._score(rollout, parts, reference)
        return replace(rollout, ref_logprobs=torch.cat([one.logprobs.cpu() for one in scores]))

    @torch.no_grad()
    def _score(self, rollout: Completions, parts: Sequence[Sequence[int]], model: nn.Module) -> list[Scores]:
        """What a model gives the tokens, prompts by prompts."""
        batches = (self.lay_out(rollout[prompts].groups) for prompts in parts)
        with without_dropout(model), self.accelerator.autocast():
            return [
                model(tokens=send_to_device(tokens, self.config.device), temperature=self.config.temperature)
                for tokens in batches
            ]

    def items_of(self, batches: Sequence[Batch], *, of_all_processes: bool = True) -> Totals:
        """What the loss of these micro-batches divides by."""
        local = [batch["rollout"].totals for batch in batches]
        sequences, tokens = sum(part.sequences for part in local), sum(part.tokens for part in local)
        if not of_all_processes:
            return Totals(sequences, tokens, rank_tokens=tokens)
        everyones = [int(total(self, [count])) for count in (sequences, tokens)]
        return Totals(everyones[0], everyones[1], rank_tokens=tokens, ranks=num_averaged(self))

    def part_of_step(self, batch: Batch, items: Totals) -> tuple[float, float]:
        """What of the loss of the optimizer step a micro-batch's own loss is: a part of a whole."""
        one, normalize, limit = torch.ones(1), NORMALIZATIONS[self.config.loss_type], self.config.max_completion_length
        whole, part = (float(normalize(one, totals, limit)) for totals in (items, batch["rollout"].totals))
        return whole * num_averaged(self), part

    def batch_loss(self, model: nn.Module, batch: Batch, items: Totals) -> BatchLoss:
        """The clipped surrogate and the KL, as this micro-batch's part of the loss of the step."""
        args, scores = self.config, model(tokens=token_columns(batch), temperature=self.config.temperature)
        rollout = batch["rollout"].to(scores.logprobs.device)
        if self.is_in_train and model.training and not self.state.global_step:
            most = rounding_of(self.model.dtype, is_mixed=args.bf16 or args.fp16)
            check_start(scores.logprobs, rollout, most=most)
        losses = policy_loss(scores.logprobs, rollout, items, args)
        share = batch["rollout"].totals.sequences / max(items.sequences, 1)
        losses = losses._replace(loss=losses.loss + scores.router_loss * share)
        stats = update_stats(losses, scores, rollout, args, totals=None if model.training else items)
        return BatchLoss(losses.loss, stats, {"logprobs": scores.logprobs, "entropy": scores.entropy})

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch; an error names the completions whose numbers are not finite."""
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        except TrainingDivergedError:
            if not divides_weights(self.accelerator):  # a forward pass would wait for the other processes
                policy, temperature = self.accelerator.unwrap_model(self.model), self.config.temperature
                check_completions(inputs["rollout"].groups, policy, self.lay_out, temperature=temperature)
            raise

    # Evaluation and logs ----------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """Completions of a batch of prompts, their rewards, and the loss on them."""
        sampled = self.roll_out(inputs, draw=EVALUATION + self.eval_batches, training=False, real_rows=real_rows(self))
        self.eval_batches += 1
        rollout = with_old_logprobs(sampled.rollout, self._old_logprobs, self.config, steps=1)
        rollout = self.with_reference(rollout, [range(len(rollout.groups))])
        batch = send_to_device(self._batch(rollout), self.config.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, batch).detach(), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with the statistics of the completions; every evaluation samples by the same seeds."""
        self.eval_batches = 0
        self.weights_version += 1
        with private_rngs(self._seed(EVALUATION)):  # a data loader draws some too
            return super().evaluation_loop(*args, **kwargs)

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """A table of completions."""
        self.samples.show(self, self.tables, f"{prefix}_completions", training=False)

    def statistics(self, *, training: bool) -> dict[str, float]:
        """The statistics since the last call; in training also the tokens so far, and what looks unhealthy."""
        numbers = numbers_of(self.recorder.flush(training=training))
        if not training:
            return numbers
        pads_with_eos = self.tokenizer.pad_token_id == self.tokenizer.eos_token_id
        health = self.progress.health.report(
            vitals(numbers, self.config, pads_with_eos=pads_with_eos),
            when=f"step {self.state.global_step}",
            warns=self.is_world_process_zero(),
        )
        return numbers | {"num_tokens": self.progress.num_tokens} | health

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last log of training, and a table of completions."""
        super().log(logs, start_time)
        if "loss" in logs:
            self.samples.show(self, self.tables, "completions", training=True)

    # Saving and resuming ----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; from a checkpoint in the middle of a rollout, with what is left of that."""
        self._begin()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def open_run(self, resume_from_checkpoint: str | Path | bool | None, trial: Trial = None) -> str | None:
        """Begin a run, or take one up, with the rollout that its checkpoint was in. Collective."""
        checkpoint = super().open_run(resume_from_checkpoint, trial)
        if checkpoint is not None:
            self.progress.load(checkpoint, self.args.process_index, self.args.world_size)
        return checkpoint

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; into a checkpoint the rollout that is in use too, of each process its own."""
        super().save_model(output_dir, _internal_call)
        if output_dir is not None and _internal_call and not self.args.save_only_model:
            self.progress.save(output_dir, self.args.process_index, self.args.world_size)

    def _seed(self, draw: int) -> int:
        return sampling_seed(self.args.seed, rank=self.args.process_index, draw=draw)
