"""Fine-tuning step by step: a loop on Accelerate, with Trainer's evaluation and hub."""

from collections.abc import Callable, Sequence
from typing import Any

from peft import PeftConfig
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from trimtab_lm.hf.adapter import Batch, BatchLoss, DataOptions, TrainerOptions, Use, prepare_datasets
from trimtab_lm.hf.labels import LabelTrainer, document_collator, label_stats
from trimtab_lm.hf.models import load_language_model
from trimtab_lm.interface import Model, Processor
from trimtab_lm.legacy.arguments import ITERATIVE_SFT, takes_constructor_of_2024
from trimtab_lm.sft.algorithm import score_labels, token_nll

from .algorithm import update
from .config import IterativeSFTConfig
from .data import Reader, Rows, cut, refuse_unread, rows_of_tensors, rows_of_texts, tokenize_dataset
from .run import StepRun


class IterativeSFTTrainer(LabelTrainer[IterativeSFTConfig]):
    """Fine-tuning by `step(...)` on rows that the caller chooses, for instance the best of what the model generated.

    One call of `step` goes through its rows once, in batches of per_device_train_batch_size, with an optimizer step
    after every gradient_accumulation_steps batches and after the last one, so that no gradient is left over. Callbacks,
    logging, evaluation and checkpoints go by optimizer steps, as in `Trainer.train`. To resume, call
    `train(resume_from_checkpoint=...)` before the first step.

    Args:
        model: a causal or encoder-decoder model, or the name of one.
        args: the config; None for the defaults.
        data_collator: from rows of `input_ids`, `attention_mask` and `labels` to a batch, instead of the padding-free
            one.
        eval_dataset: rows of `input_ids` (and `labels`), of `text`, or of `prompt` and `completion`.
        train_dataset: such rows too.
        processing_class: the tokenizer; by default the one saved with the model.
        peft_config: adapters to add.
    """

    method, paper = "fine-tuning on samples that a reward chooses (RAFT)", "Dong et al. 2023, arXiv:2304.06767"
    watched = ("reward", "reward_of_best", "loss", "entropy", "grad_norm")

    @takes_constructor_of_2024(IterativeSFTConfig, ITERATIVE_SFT)
    def __init__(
        self,
        model: Model | str | None = None,
        args: Any = None,
        data_collator: Callable[..., Batch] | None = None,
        eval_dataset: Any = None,
        processing_class: Processor | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        *,
        train_dataset: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
    ):
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers, compute_metrics=compute_metrics)
        hooks["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        language_model = load_language_model(model, args.model_init_kwargs, peft_config)
        super().__init__(language_model, args, processing_class, None, peft_config, data=data, **hooks)
        self.reader = Reader.of(self.model)
        if data_collator is None:
            self.data_collator = document_collator(self)
        prepare_datasets(self)
        self.run = StepRun(self)
        self.progress = self.run.progress

    def step(
        self,
        input_ids: Sequence[Tensor] | None = None,
        attention_mask: Sequence[Tensor] | None = None,
        labels: Sequence[Tensor] | None = None,
        texts: Sequence[str] | None = None,
        texts_labels: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Trains once on these rows. Every process passes its own rows, the same number on each.

        Rows longer than max_length are truncated as truncation_mode says, with one warning.

        Args:
            input_ids: 1-D tensors of token ids.
            attention_mask: 1-D tensors of the same lengths, 0 at padding, which is left out.
            labels: for a causal model of the same lengths, -100 where a token does not count; all of input_ids by
                default. For an encoder-decoder model the targets, of any length, which it needs.
            texts: instead of input_ids. EOS is added to texts and targets that do not end in it.
            texts_labels: the part of each text that is learnt; all by default. For an encoder-decoder model the target
                texts.

        Returns:
            `loss` (per token, in nats, each scored before the optimizer step that learns it), `grad_norm`,
            `learning_rate`, `epoch` (calls of step), `global_step` and `num_tokens`, over all processes.

        Raises:
            TypeError: a row is no tensor of token ids.
            ValueError: texts and tensors came together; rows do not fit together, hold ids that the model does not know
                or nothing to learn, or are longer than the model's positions; or max_steps is reached.
        """
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        refuse_unread({"texts_labels": texts_labels} if texts is None else tensors)
        if texts is not None:
            rows = rows_of_texts(texts, texts_labels, self.tokenizer, self.reader)
        else:
            rows = rows_of_tensors(input_ids, attention_mask, labels, self.reader)
        return self._learn(cut(rows, self.config, self.reader))

    def _learn(self, rows: Rows) -> dict[str, Any]:
        """See `step`."""
        windows = self.run.begin_call(rows)
        summary, num_tokens = dict[str, Any](), 0
        with self.run.updates_of_call():
            for window in self.run.updates_left(windows):
                summary = update(window, self.run, count=self.items_of(window))
                num_tokens += summary["num_tokens"]
                self.run.after_update(summary, len(windows))
        stats = self.run.end_call(summary | {"num_tokens": num_tokens})
        return stats | {"num_tokens": int(stats["num_tokens"])}

    def tokenize_dataset(self, dataset: Any, use: Use) -> Any:
        """The dataset as `input_ids` and `labels`."""
        return tokenize_dataset(dataset, self.tokenizer, self.config, self.reader)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """-sum of log p over the tokens that count, divided by their number in the whole step."""
        scores = score_labels(model, batch, policy=self.model)
        stats = label_stats(scores)
        self.run.stats.add({"loss": stats["loss"]}, training=model.training)
        return BatchLoss(token_nll(scores, count=items), stats)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Trains on `train_dataset` as `Trainer.train` does; without one, only resumes, so that `step` can go on.

        Args:
            resume_from_checkpoint: a checkpoint's folder, a folder of checkpoints for the last one in it, or True for
                the last one in output_dir. A checkpoint that was saved in the middle of a call of `step` holds the
                call's rows, and this method finishes that call; `progress.calls` counts it.
            kwargs: none; the documented signature has them.

        Raises:
            TypeError: there are kwargs.
            CheckpointError: the checkpoint is damaged or of another run.
            ValueError: there is neither a train_dataset nor a checkpoint, or steps were taken already.
        """
        if kwargs:
            raise TypeError(f"train() got unexpected arguments: {', '.join(kwargs)}.")
        if self.train_dataset is not None:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.run.resume(resume_from_checkpoint)
        if self.run.unfinished is not None and not self.run.is_finished:
            self._learn(self.run.unfinished)
        return TrainOutput(self.state.global_step, float("nan"), {})
