"""Fine-tuning in steps that the caller takes, on transformers.Trainer."""

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.integrations.neftune import activate_neftune
from transformers.trainer_utils import SchedulerType, TrainOutput

from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import gather_over_ranks
from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.hf.adapter import Batch, BatchLoss, TrainerAdapter, Use
from trimtab_lm.hf.config import CHECKPOINTING, checkpointing_of
from trimtab_lm.hf.labels import (
    count_labels,
    label_stats,
    labels_of_real_rows,
    numbered_rows,
    score_labels,
    stats_of_logits,
)
from trimtab_lm.hf.models import load_language_model, with_adapters
from trimtab_lm.hf.tracking import Recorder
from trimtab_lm.legacy.arguments import ITERATIVE_SFT, takes_constructor_of_2024
from trimtab_lm.models.interface import base_of, decoder_start_of
from trimtab_lm.sft.loss import token_nll
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.positions import Positions

from .config import IterativeSFTConfig
from .data import rows_of_tensors, rows_of_texts, tokenize_dataset

PROGRESS = "iterative_sft.json"
"""The file of a checkpoint that says how far the caller has come."""
ENDLESS_SCHEDULES = (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.REDUCE_ON_PLATEAU)


class IterativeSFTTrainer(TrainerAdapter[IterativeSFTConfig, Tensor]):
    """Fine-tuning by `step(...)` on rows that the caller chooses, for instance the best of what the model generated.

    model: a causal or encoder-decoder model, or the name of one. processing_class: its tokenizer, by default the one
    beside the model. data_collator: from rows of `input_ids`, `attention_mask` and `labels` to a batch, instead of the
    padding-free one. eval_dataset: rows of `input_ids` (and `labels`), of `text`, or of `prompt` and `completion`.

    One call of `step` goes through its rows once, in batches of per_device_train_batch_size, with an optimizer step
    after every gradient_accumulation_steps batches and after the last one: no gradient is left over. Callbacks,
    logging, evaluation and checkpoints go by optimizer steps, as in `Trainer.train`. To resume, call
    `train(resume_from_checkpoint=...)` before the first step.
    """

    @takes_constructor_of_2024(IterativeSFTConfig, ITERATIVE_SFT)
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        *,
        train_dataset: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
    ):
        super().__init__(
            load_language_model(model, args.model_init_kwargs),
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.is_encoder_decoder = bool(base_of(self.model).config.is_encoder_decoder)
        self._of_model: dict[str, Any] = {
            "is_encoder_decoder": self.is_encoder_decoder, "positions": Positions.of(self.model)
        }  # fmt: skip
        if data_collator is None:
            pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
            self.data_collator = DocumentCollator(
                next((token for token in (pad, eos) if token is not None), 0),  # masked by its place, whatever it is
                layout=best_layout(self.model, share_prefix=False),
                decoder_start_token_id=decoder_start_of(self.model),
            )
        self.prepare_datasets()
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # which make it over the sharded parameters
            self.create_optimizer()
        self._is_begun = False
        self._calls = self._updates = 0  # calls of `step` that are done, and optimizer steps of the one that is not
        self._call = Recorder()
        self._learner: Any = self.model

    def step(
        self,
        input_ids: Sequence[Tensor] | None = None,
        attention_mask: Sequence[Tensor] | None = None,
        labels: Sequence[Tensor] | None = None,
        texts: Sequence[str] | None = None,
        texts_labels: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Train on these rows, once through.

        input_ids: 1-D tensors of token ids. attention_mask: of the same lengths, 0 where padding is to be left out.
        labels: of the same lengths for a causal model, -100 where a token does not count, by default all of input_ids;
            for an encoder-decoder model the targets, of any length, which it needs.
        texts: instead of input_ids. texts_labels: what of each text is learnt (a part of it), by default all; for an
            encoder-decoder model the target texts. EOS is put behind texts and targets that do not end in it.

        Rows longer than max_length are cut to the tokens that truncation_mode keeps, with one warning. Every process
        gives its own rows, the same number of them. Returns `loss` (per token, in nats, before the updates),
        `grad_norm`, `learning_rate`, `epoch` (calls of step), `global_step` and `num_tokens`, over all processes.

        Raises ValueError for rows that do not fit together, that hold nothing to learn or are longer than the model's
        positions, or when max_steps is reached.
        """
        if texts is not None:
            rows = rows_of_texts(texts, texts_labels, self.tokenizer, self.config, **self._of_model)
        else:
            rows = rows_of_tensors(input_ids, attention_mask, labels, self.config, **self._of_model)
        if not self._is_begun:
            self._begin(self.open_run(None))
        self._check_step(len(rows))
        batches = self._shuffled_batches(rows)
        size = self.args.gradient_accumulation_steps
        windows = [batches[start : start + size] for start in range(0, len(batches), size)]
        done, summary = self._updates, {}  # done: of this call, before the checkpoint that was resumed
        tokens = 0
        for number, window in enumerate(windows[done:], start=done + 1):
            summary = self._update(window)
            tokens += summary["num_tokens"]
            is_last = number == len(windows)
            self._calls, self._updates = (self._calls + 1, 0) if is_last else (self._calls, number)
            self.state.epoch = self._calls + self._updates / len(windows)
            self._maybe_log_save_evaluate(
                self._tr_loss, summary["grad_norm"], self._learner, None, self.state.epoch, None, 0.0,
                learning_rate=summary["learning_rate"],
            )  # fmt: skip
        if self.config.optimize_device_cache:
            clear_device_cache(garbage_collection=True)
        loss = self._call.flush(training=True)
        return {**summary, **loss, "epoch": self._calls, "global_step": self.state.global_step, "num_tokens": tokens}

    def prepare_model(self, model: Any) -> Any:
        """The model with its adapters, and with a forward that scores tokens."""
        model = with_adapters(model, self.peft_config, self.config)
        score_tokens_in_forward(model)
        return model

    def tokenize_dataset(self, dataset: Any, use: Use) -> Any:
        """The dataset as `input_ids` and `labels`."""
        return tokenize_dataset(dataset, self.tokenizer, self.config, **self._of_model)

    def count_items(self, batch: Batch) -> Tensor:
        """The tokens that count."""
        return count_labels(batch["labels"], is_encoder_decoder=self.is_encoder_decoder)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """-sum of log p over the tokens that count, divided by their number in the whole step."""
        scores = score_labels(model, batch, policy=self.model)
        stats = label_stats(scores)
        if model.training:
            self._call.add({"loss": stats["loss"]}, training=True)
        return BatchLoss(token_nll(scores.logprobs, count=items), stats)

    def without_repetitions(self, batch: Batch, real_rows: int | None) -> Batch:
        """A batch in which only labels of the first `real_rows` rows count."""
        return labels_of_real_rows(batch, real_rows)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`batch_loss`; but transformers' own loss for label smoothing and with return_outputs."""
        if return_outputs or self.label_smoother is not None:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss, and logits and labels where they are asked for."""
        if prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only)
        inputs = self.without_repetitions(inputs, self.real_rows())
        loss, logits, labels = Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        if self.label_smoother is None:
            stats = stats_of_logits(logits, labels, is_encoder_decoder=self.is_encoder_decoder)  # type: ignore[arg-type]
            self.recorder.add(stats, training=False)
        return loss, logits, labels

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches for evaluation; in several processes they say which of their rows each position comes from."""
        own = self.data_collator
        if isinstance(own, DocumentCollator) and self.accelerator.num_processes > 1:
            self.data_collator = numbered_rows(own)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = own

    def _shuffled_batches(self, rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
        """The rows in batches, in an order that depends on the seed and the number of the call alone."""
        seed = sampling_seed(self.args.seed, rank=self.args.process_index, draw=self._calls)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        size = self.args.train_batch_size
        return [
            self.data_collator([rows[i] for i in order[start : start + size]]) for start in range(0, len(rows), size)
        ]

    def _check_step(self, count: int) -> None:
        counts = gather_over_ranks(count)
        if len(set(counts)) > 1:
            raise ValueError(
                f"The processes gave {counts} rows to step, and would wait for one another. Give each the same number."
            )
        if 0 < self.args.max_steps <= self.state.global_step:
            raise ValueError(
                f"max_steps={self.args.max_steps} optimizer steps are done, and the learning rate's schedule has "
                "ended. Raise max_steps, or leave it out for a constant learning rate."
            )

    def _update(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """One optimizer step over micro-batches, with what Trainer does around one; its statistics."""
        model, args = self._learner, self.args
        batches, count = self.get_batch_samples(iter(batches), len(batches), args.device)
        self.current_gradient_accumulation_steps = len(batches)
        self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
        for i, inputs in enumerate(batches):
            is_last = i == len(batches) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            with nullcontext() if is_last or is_deepspeed else self.accelerator.no_sync(model=model):
                self._tr_loss = self._tr_loss + self.training_step(model, inputs, count)
            self.current_flos += int(self.floating_point_ops(inputs))
            if not is_last:
                self.control = self.callback_handler.on_substep_end(args, self.state, self.control)
        clipped = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        grad_norm = self._get_grad_norm(model, grad_norm=clipped)
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()  # type: ignore[union-attr]
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
        learning_rate = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()  # type: ignore[union-attr]
        model.zero_grad()
        self.state.global_step += 1
        self.control = self.callback_handler.on_step_end(args, self.state, self.control)
        norm = None if grad_norm is None else float(grad_norm)
        return {"grad_norm": norm, "learning_rate": learning_rate, "num_tokens": int(count)}

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train on `train_dataset` as `Trainer.train` does; without one, only take up a checkpoint to `step` on from.

        resume_from_checkpoint: a checkpoint's folder, or True for the last one in output_dir. A checkpoint that was
        saved in the middle of a call of `step` needs that call again, with the same rows: what of it was done is left
        out.
        """
        if kwargs:
            raise TypeError(f"train() got unexpected arguments: {', '.join(kwargs)}.")
        if self.train_dataset is not None:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        if not resume_from_checkpoint:
            raise ValueError(
                "There is no train_dataset to go through. Call step(...) with rows, or pass resume_from_checkpoint to "
                "go on from a checkpoint."
            )
        if self._is_begun:
            raise ValueError("Steps were taken already. Resume before the first call of step, in a new trainer.")
        self._begin(self.open_run(resume_from_checkpoint))
        return TrainOutput(self.state.global_step, float("nan"), {})

    def _begin(self, checkpoint: str | None) -> None:
        """What `Trainer.train` does before its first step: wrap the model, make the optimizer, load the checkpoint."""
        args: Any = self.args
        self.is_in_train = True
        is_checkpointing, checkpointing_kwargs = checkpointing_of(args)
        if is_checkpointing:
            getattr(base_of(self.model), f"{CHECKPOINTING}_enable")(checkpointing_kwargs)
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle = activate_neftune(self.model, self.neftune_noise_alpha, self.accelerator)
        if checkpoint is not None and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            self._load_from_checkpoint(checkpoint)
        if args.max_steps <= 0 and args.lr_scheduler_type not in ENDLESS_SCHEDULES:
            warnings.warn(
                f"max_steps is not set, so the {args.lr_scheduler_type.value} schedule of the learning rate has no "
                "end to go to: the learning rate stays constant. Set max_steps, or lr_scheduler_type='constant'.",
                stacklevel=3,
            )
            args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        horizon = args.max_steps if args.max_steps > 0 else sys.maxsize
        self._init_training_state(horizon, horizon, 1, checkpoint, None)
        self._learner, _ = self._prepare_for_training(horizon, None, checkpoint)
        self._tr_loss = torch.tensor(0.0, device=args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._learner.zero_grad()
        if checkpoint is not None:
            self._load_rng_state(checkpoint)
            progress = json.loads((Path(checkpoint) / PROGRESS).read_text())
            self._calls, self._updates = progress["calls"], progress["updates"]
        state: Any = self.state
        state.max_steps = args.max_steps if args.max_steps > 0 else None  # a progress bar of no known length
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        state.max_steps = horizon
        self._is_begun = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that `from_pretrained` loads it; a checkpoint also says how far the caller has come."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.args.should_save:
            (Path(output_dir) / PROGRESS).write_text(json.dumps({"calls": self._calls, "updates": self._updates}))
