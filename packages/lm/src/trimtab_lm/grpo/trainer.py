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
from transformers.trainer_utils import EvalLoopOutput

from trimtab_common.health import TrainingDivergedError, rounding_of
from trimtab_lm.data.formats import Row
from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.adapter import (
    BatchLoss,
    DataOptions,
    TrainerAdapter,
    TrainerOptions,
    layout_of,
    num_averaged,
    prepare_datasets,
    real_rows,
    total,
)
from trimtab_lm.hf.models import load_language_model, with_adapters
from trimtab_lm.hf.types import Batch, DataSource, EvalSource, Optimizers, Prediction, Trial, Use
from trimtab_lm.interface import Model, Processor, decoder_start_of
from trimtab_lm.legacy.arguments import takes_constructor_of_2024
from trimtab_lm.models.reference import Reference
from trimtab_lm.rewards.functions import Rewards, Tokenizers
from trimtab_lm.sampling.rollout import RolloutBackend, padding_id
from trimtab_lm.tokens.forward import score_tokens_in_forward
from trimtab_lm.tokens.layout import lay_out

from .algorithm import policy_loss
from .batches import RolloutBuffer, prompt_loader
from .config import GRPOConfig
from .loss import NORMALIZATIONS, Totals
from .rollout import GroupSampler, backend_and_pending, reward_set_of
from .saving import Progress
from .selfcheck import check_completions, check_start
from .statistics import SampleTable, numbers_of, update_stats, vitals


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
        processing_class: the tokenizer; by default the one saved with the model.
        reward_processing_classes: tokenizers of the reward models.
        peft_config: adapters to add.
        rollout: samples the completions, instead of the backend that the config names; an `EnvironmentRollout` samples
            conversations.
    """

    method, paper = "GRPO", "Shao et al. 2024, arXiv:2402.03300"
    watched = ("reward", "reward_std", "entropy", "completions/mean_length", "clip_ratio/region_mean")
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
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=cast(Any, list))
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers)
        policy = load_language_model(model, args.model_init_kwargs, peft_config)
        super().__init__(policy, args, processing_class, model_init, peft_config, data=data, **hooks)
        args = self.config
        self.backend, self.pending = backend_and_pending(args, self.tokenizer, rollout)
        rewards = reward_set_of(reward_funcs, args, reward_processing_classes, self.backend)
        self.about = {"reward": ", ".join(rewards.names)}
        self.sampler = GroupSampler(self, rewards, has_own_limit=rollout is not None)
        require_eos(self.tokenizer)
        self.lay_out: Callable[..., Batch] = partial(
            lay_out,
            **layout_of(self),
            pad_token_id=padding_id(self.tokenizer),  # padding is masked by its place, so it may be EOS
            decoder_start_token_id=decoder_start_of(self.model),
        )
        self._begin()
        prepare_datasets(self)

    def _begin(self) -> None:
        args = self.config
        if self.pending is not None:
            self.pending.drop()
        micro_batches = args.gradient_accumulation_steps * args.steps_per_generation
        buffer = RolloutBuffer(micro_batches=micro_batches, passes=args.num_iterations, parts=args.group_parts)
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
        """Yields the prompts of one generation call, once for each micro-batch that the call serves."""
        rows, args = cast(Dataset | None, self.train_dataset), self.config
        prompts_per_step = self.get_total_train_batch_size(args) // args.world_size // args.group_parts
        return prompt_loader(rows, args, prompts_per_step=prompts_per_step)

    # Algorithm 1 of the paper -----------------------------------------------------------------------------------------

    def micro_batches(self, batches: list[list[Row]]) -> list[Batch]:
        """The micro-batches of an optimizer step, from a new rollout if one is due.

        Generation is here and not in training_step, because the number of tokens that the whole step learns from must
        be known before its first micro-batch.
        """
        if not batches:
            return []
        rows, buffer = batches[0], self.progress.buffer
        count = len(rows) // 2 if self.config.asynchronous_rollouts else len(rows)
        if not buffer.serves(count):
            seed = self.sampler.seed_of(draw=self.state.global_step)
            buffer.fill(self.sampler.for_training(rows[:count], rows[count:]), seed=seed)
        # Trainer leaves the rollout as it is. It would give numbers of float32 the dtype of a DeepSpeed model.
        return [{**self.lay_out(part.groups), "rollout": part} for part in buffer.take(len(batches))]

    def items_of(self, batches: Sequence[Batch], *, of_all_processes: bool = True) -> Totals:
        """The divisor of the loss of these micro-batches."""
        local = torch.tensor([batch["rollout"].totals[:2] for batch in batches]).view(-1, 2).sum(0)
        sequences, tokens = total(self, [local], of_all_processes=of_all_processes).tolist()
        ranks = num_averaged(self) if of_all_processes else 1
        return Totals(int(sequences), int(tokens), rank_tokens=int(local[1]), ranks=ranks)

    def part_of_step(self, batch: Batch, items: Totals) -> tuple[float, float]:
        """A micro-batch's share of the loss of its optimizer step."""
        one, normalize, limit = torch.ones(1), NORMALIZATIONS[self.config.loss_type], self.config.max_completion_length
        whole, part = (float(normalize(one, totals, limit)) for totals in (items, batch["rollout"].totals))
        return whole * num_averaged(self), part

    def batch_loss(self, model: nn.Module, batch: Batch, items: Totals) -> BatchLoss:
        """The clipped surrogate and the KL: this micro-batch's part of the step's loss."""
        args, scores = self.config, model(tokens=batch, temperature=self.config.temperature)
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
            check_completions(self, inputs["rollout"].groups)
            raise

    # Evaluation and logs ----------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """Completions of a batch of prompts, their rewards, and the loss on them."""
        draw, size = next(self.sampler.evaluation_draws), len(inputs)
        rollout = self.sampler.roll_out(inputs, draw=draw, updates=0, size=size, real_rows=real_rows(self))
        batch = send_to_device({**self.lay_out(rollout.groups), "rollout": rollout}, self.config.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, batch).detach(), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with the statistics of the completions; every evaluation samples by the same seeds."""
        with self.sampler.evaluation():
            return super().evaluation_loop(*args, **kwargs)

    def begin_evaluation(self) -> None:
        """Forget what an evaluation that failed has recorded, its completions included."""
        super().begin_evaluation()
        self.samples.drop(training=False)

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """A table of completions."""
        self.samples.show(self, self.tables, f"{prefix}_completions", training=False)

    def statistics(self, *, training: bool) -> dict[str, float]:
        """The statistics since the last call; in training also the tokens so far, and what looks unhealthy."""
        numbers = numbers_of(self.recorder.flush(training=training))
        if not training:
            return numbers
        signs = vitals(numbers, self.config, pads_with_an_end=self.sampler.pads_with_an_end)
        when, warns = f"step {self.state.global_step}", self.is_world_process_zero()
        health = self.progress.health.report(signs, when=when, warns=warns)
        return numbers | {"num_tokens": self.progress.num_tokens} | health

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last log of training, and a table of completions."""
        super().log(logs, start_time)
        if "loss" in logs:
            self.samples.show(self, self.tables, "completions", training=True)

    # Saving and resuming ----------------------------------------------------------------------------------------------

    def open_run(self, resume_from_checkpoint: str | Path | bool | None, trial: Trial = None) -> str | None:
        """Begin a run, or resume one with the rollout in its checkpoint. Collective."""
        self._begin()
        checkpoint = super().open_run(resume_from_checkpoint, trial)
        if checkpoint is not None:
            self.progress.load(checkpoint, self.args.process_index, self.args.world_size)
        return checkpoint

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; in a checkpoint also each process's rollout in use."""
        super().save_model(output_dir, _internal_call)
        if output_dir is not None and _internal_call and not self.args.save_only_model:
            self.progress.save(output_dir, self.args.process_index, self.args.world_size)
