"""GRPO on transformers.Trainer."""

from collections.abc import Callable, Sequence
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

from trimtab_common.formulas.kl import k3
from trimtab_common.health import TrainingDivergedError, rounding_of
from trimtab_common.seeding import private_rngs, sampling_seed
from trimtab_common.sharding import divides_weights
from trimtab_common.stats import Mean, gather_over_ranks
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import PROMPT_IDS
from trimtab_lm.hf.adapter import BatchLoss, DataOptions, TrainerAdapter, TrainerOptions
from trimtab_lm.hf.models import load_language_model, with_adapters
from trimtab_lm.hf.types import Batch, DataSource, EvalSource, Optimizers, Prediction, Trial, Use
from trimtab_lm.interface import Model, Processor
from trimtab_lm.legacy.arguments import takes_constructor_of_2024
from trimtab_lm.models.reference import Reference
from trimtab_lm.rewards.functions import Rewards, Tokenizers
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending, Request
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.mismatch import Surprise, corrected
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import score_tokens_in_forward
from trimtab_lm.tokens.layout import token_columns

from .batches import Group, PromptLoader, RolloutBuffer, add_column, as_list, column, halves, window_of
from .config import GRPOConfig
from .loss import LOG_RATIOS, corrected_k3, policy_losses
from .old_policy import old_policy
from .rollout import GroupSampler
from .saving import Progress
from .selfcheck import check_completions, check_start
from .setup import layout_of, reference_of, rewards_of
from .statistics import SURPRISE, SampleTable, numbers_of, policy_stats, rollout_stats, steps_behind, vitals
from .weights import NORMALIZATIONS, Window, token_weights

EVALUATION = 2**31  # draws of evaluation begin here: steps of training, which number its draws, never get so far
IS_START = "is_start"
"""In the first micro-batch of a run: the policy must still give the log-probabilities of the rollout."""
IS_FRESH = "is_fresh"
"""In the first optimizer step on a rollout: a policy that did not sample ahead has not moved since it sampled."""


class GRPOTrainer(TrainerAdapter[GRPOConfig, Window]):
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
        has_own_limit = rollout is not None
        self.sampler = GroupSampler.of(self.model, args, self.tokenizer, rewards, has_own_limit=has_own_limit)
        self.lay_out = layout_of(self.model, self.tokenizer, is_noisy=self.is_noisy)
        self.version = 0  # of the weights, as backends count it
        self._evaluated = 0
        self._begin()
        self.prepare_datasets()

    def _begin(self) -> None:
        args = self.config
        micro_batches = args.gradient_accumulation_steps * args.steps_per_generation
        self.pending.drop()
        self._rollout_step = -1  # the optimizer steps before the rollout in use; a resumed one is no longer fresh
        buffer = RolloutBuffer(micro_batches=micro_batches, passes=args.num_iterations)
        self.progress = Progress(buffer, pending=self.pending)
        printed = args.num_completions_to_print if args.log_completions else 0
        self.samples = SampleTable(self.sampler.rewards.names, printed=printed)

    def prepare_model(self, model: Model) -> Model:
        """The model with its adapters, and with a forward that scores tokens; its reference is the model as it is."""
        model = with_adapters(model, self.peft_config, self.config)
        if self.config.beta:
            self.reference = reference_of(model)
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
        laid_out: list[Batch] = []
        buffer = self.progress.buffer
        for batch in batches:
            rows, next_rows = halves(batch) if self.config.asynchronous_rollouts else (batch, [])
            if buffer.is_used_up or len(buffer.groups) != len(rows):
                self._roll_out_for_training(rows, next_rows)
            step = self.state.global_step
            flags = {IS_START: step == 0 and not laid_out, IS_FRESH: step == self._rollout_step}
            laid_out.append({**self.lay_out(buffer.next()), **flags})
        return laid_out

    def _roll_out_for_training(self, rows: Sequence[Row], next_rows: Sequence[Row]) -> None:
        """Lines 5 to 9: sample a group for each prompt, score it, compute advantages; what the policy thought of it."""
        args, draw = self.config, self.state.global_step
        steps = args.steps_per_generation * args.num_iterations
        if isinstance(self.backend, AsynchronousRollout):
            prompts, seed = [torch.tensor(row[PROMPT_IDS]) for row in next_rows], self._seed(draw + steps)
            upcoming = Request.of(prompts, num_generations=args.num_generations, seed=seed)
            self.backend.begin_step(draw, upcoming if draw + steps < self.state.max_steps else None)
        groups = self.roll_out(rows, draw=draw, training=True)
        if args.asynchronous_rollouts:
            self.recorder.add(steps_behind(groups, draw), training=True)
        # As long as the policy has not moved since it sampled, its own log-probabilities are the old ones. Afterwards
        # they are the sampler's, where that is the policy itself.
        is_told = args.importance_sampling_cap is None and self._tells_policy(groups)
        needs_old = steps > 1 and not args.clips_to_sampler and not is_told
        for part in self.progress.buffer.slices(groups):
            if needs_old:
                self._attach("old", part, self.model_wrapped)
            self._attach_reference(part)
        self.progress.buffer.fill(groups, seed=self._seed(draw))
        self._rollout_step = draw
        local_count = sum(len(group.prompt) + len(ids) for group in groups for ids in group.completions)
        self.progress.num_tokens += sum(gather_over_ranks(local_count))

    def roll_out(self, rows: Sequence[Row], *, draw: int, training: bool, count: int | None = None) -> list[Group]:
        """A group of completions for each row, with its advantages; statistics are recorded of the first `count`.

        draw: which random numbers to take. With scale_rewards="batch" collective: the same number of calls everywhere.
        """
        model = self.accelerator.unwrap_model(self.model)
        sampled = self.sampler.sample(self.backend, model, rows, version=self.version, seed=self._seed(draw))
        real, bos = sampled.groups[:count], self.tokenizer.bos_token_id
        self.recorder.add(rollout_stats(real, sampled, names=self.sampler.rewards.names, bos=bos), training=training)
        self.samples.add(real, sampled, training=training)
        return sampled.groups

    @torch.no_grad()
    def _attach(self, name: str, groups: Sequence[Group], model: nn.Module) -> None:
        """Give each group the log-probabilities that `model` gives its tokens."""
        batch = send_to_device(self.lay_out(groups), self.config.device)
        with without_dropout(model), self.accelerator.autocast():
            scores = model(tokens=token_columns(batch), temperature=self.config.temperature)
        if name == "old" and self.config.samples_tell_surprise:
            self.recorder.add({SURPRISE: Surprise.of_tokens(scores.logprobs, scores.entropy)}, training=True)
        add_column(groups, name, scores.logprobs)

    def _tells_policy(self, groups: Sequence[Group]) -> bool:
        """Whether the sampler told what the forward passes of training give, up to the rounding of float32."""
        if self.is_noisy or not all(group.is_policy for group in groups):
            return False
        return self.backend.settings.temperature == self.config.temperature

    def _attach_reference(self, groups: Sequence[Group]) -> None:
        if self.reference is not None:
            self.reference.prepare(self.accelerator)
            with self.reference.active() as reference:
                self._attach("ref", groups, reference)

    def items_of(self, batches: Sequence[Batch], *, of_all_processes: bool = True) -> Window:
        """What the loss of these micro-batches divides by."""
        local = window_of([group for batch in batches for group in batch["groups"]])
        if not of_all_processes:
            return local
        sequences, tokens = (int(self.total([count])) for count in (local.sequences, local.tokens))
        return Window(sequences, tokens, rank_tokens=local.tokens, ranks=self.num_averaged)

    def part_of_step(self, batch: Batch, items: Window) -> tuple[float, float]:
        """What of the loss of the optimizer step a micro-batch's own loss is: a part of a whole."""
        one, normalize, limit = torch.ones(1), NORMALIZATIONS[self.config.loss_type], self.config.max_completion_length
        whole, part = (float(normalize(one, window, limit)) for window in (items, window_of(batch["groups"])))
        return whole * self.num_averaged, part

    def batch_loss(self, model: nn.Module, batch: Batch, items: Window) -> BatchLoss:
        """The clipped surrogate and the KL, as this micro-batch's part of the loss of the step."""
        args, groups = self.config, batch["groups"]
        scores = model(tokens=token_columns(batch), temperature=args.temperature)
        logprobs, sequence, lengths = scores.logprobs, batch["sequence"], batch["lengths"]
        advantages = torch.cat([group.advantages for group in groups]).to(logprobs)[sequence]

        is_fresh, ref = batch.get(IS_FRESH, True), column(groups, "ref", logprobs.device)
        old = old_policy(groups, logprobs, is_fresh=is_fresh, clips_to_sampler=args.clips_to_sampler)
        cap = args.importance_sampling_cap
        advantages, mismatch = corrected(advantages, old.trainer, old.sampler, lengths=lengths, cap=cap)
        if batch.get(IS_START, False):
            start = old.sampler if self._tells_policy(groups) else old.trainer
            check_start(logprobs, start, ref, most=rounding_of(self.model.dtype, is_mixed=args.bf16 or args.fp16))
        log_ratio = LOG_RATIOS[args.importance_sampling_level](logprobs, old.logprobs, sequence, lengths)
        losses, kl = policy_losses(log_ratio, advantages, **args.clip), None
        if ref is not None:
            kl = corrected_k3(logprobs, old.logprobs, ref) if args.use_bias_correction_kl else k3(logprobs, ref)
            losses = losses + args.beta * kl
        limit = args.max_completion_length
        weights = token_weights(args.loss_type, sequence, lengths, window=items, max_completion_length=limit)
        share = window_of(groups).sequences / max(items.sequences, 1)
        loss = (weights * losses).sum() + scores.router_loss * share

        stats = policy_stats(log_ratio, advantages, **args.clip, kl=kl) | mismatch
        stats["entropy"] = Mean.of(scores.entropy)
        if old.is_current and args.samples_tell_surprise:
            stats[SURPRISE] = Surprise.of_tokens(logprobs, scores.entropy)
        if not model.training:
            weight = items.tokens if args.loss_type in ("bnpo", "dapo") else items.sequences
            stats["loss"] = Mean(loss.detach() * weight, weight)
        return BatchLoss(loss, stats, {"logprobs": logprobs, "entropy": scores.entropy})

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch; after the last one of a step the sampler's weights are old."""
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except TrainingDivergedError:
            if not divides_weights(self.accelerator):  # a forward pass would wait for the other processes
                policy = self.accelerator.unwrap_model(self.model)
                check_completions(inputs["groups"], policy, self.lay_out, temperature=self.config.temperature)
            raise
        if self.accelerator.sync_gradients:
            self.version += 1  # the optimizer comes next
        return loss

    # Evaluation and logs ----------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """Completions of a batch of prompts, their rewards, and the loss on them."""
        real = self.real_rows()
        groups = self.roll_out(inputs, draw=EVALUATION + self._evaluated, training=False, count=real)
        self._evaluated += 1
        for repeated in [] if real is None else groups[real:]:
            repeated.leave_out()
        self._attach_reference(groups)
        batch = send_to_device(self.lay_out(groups), self.config.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, batch).detach(), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with the statistics of the completions; every evaluation samples by the same seeds."""
        self._evaluated = 0
        self.version += 1  # the caller may have changed the weights
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
        self.version += 1
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.version += 1  # the best model may have been loaded
        return output

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
