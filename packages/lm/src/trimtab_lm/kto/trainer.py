"""KTO on transformers.Trainer."""

from collections.abc import Callable

from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from trimtab_lm.hf.adapter import (
    REAL_ROWS,
    BatchLoss,
    DataOptions,
    TrainerAdapter,
    TrainerOptions,
    is_noisy,
    prepare_datasets,
)
from trimtab_lm.hf.models import fixed_reference, load_language_model, load_reference_model, with_adapters
from trimtab_lm.hf.types import Batch, ComputeMetrics, DataSource, EvalSource, Optimizers, Use
from trimtab_lm.interface import Model, Processor, base_of, decoder_start_of
from trimtab_lm.legacy.arguments import takes_constructor_of_2024
from trimtab_lm.models.reference import Reference
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.positions import Positions
from trimtab_lm.tokens.sequences import SequenceScores, score_sequences

from .algorithm import Tokens, compare
from .collator import UnpairedCollator
from .config import KTOConfig
from .data import AnswerTokenizer, tokenize_answers, warn_of_balance
from .statistics import unpaired_statistics, with_margins


class KTOTrainer(TrainerAdapter[KTOConfig, Tensor]):
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306): learns from answers that are labelled desirable or undesirable.

    The loss is the weighted mean over the rows of the optimizer step, of all processes. The estimate of the KL, with
    which each answer is compared, is one of a micro-batch of all processes: prompts with the completion of the next
    row. It depends on the batch size of a process, and gradient accumulation has an estimate for each micro-batch.

    Logs kl (the estimate, in nats), rewards/{chosen,rejected,margins}, logps/{chosen,rejected} (summed over tokens) and
    entropy/{chosen,rejected} (nats per token), where chosen is desirable and rejected is undesirable.

    Args:
        model: a causal or encoder-decoder model, with adapters or without, or the name of one.
        ref_model: the fixed policy that rewards are measured against, or its name. None: the model as it is now, which
            is the model without adapters where it has any, and else a frozen copy.
        args: the config; None for the defaults.
        data_collator: one that returns what `UnpairedCollator` does.
        train_dataset: rows of `prompt`, `completion` and `label` (True: desirable), of texts or of messages; or pairs,
            `prompt`, `chosen` and `rejected`, which become two rows each. Streams too, of the former.
        eval_dataset: such rows too, or a dict of several datasets.
        processing_class: the tokenizer; by default the one saved with the model.
        model_init: makes the model, instead of `model`.
        peft_config: adapters to add.
        compute_metrics: gets the rewards [rows] as predictions, and as label_ids [rows] 1 where a row is desirable.
    """

    method, paper = "KTO", "Ethayarajh et al. 2024, arXiv:2402.01306"
    watched = ("loss", "rewards/margins", "rewards/chosen", "kl", "grad_norm")
    reference: Reference | None = None

    @takes_constructor_of_2024(KTOConfig)
    def __init__(
        self,
        model: Model | str | None = None,
        ref_model: Model | str | None = None,
        args: KTOConfig | None = None,
        data_collator: Callable[..., Batch] | None = None,
        train_dataset: DataSource | None = None,
        eval_dataset: EvalSource | None = None,
        processing_class: Processor | None = None,
        model_init: Callable[..., Model] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: PeftConfig | None = None,
        compute_metrics: ComputeMetrics | None = None,
    ):
        assert args is not None  # takes_constructor_of_2024 fills it in
        init_kwargs, fixed_kwargs = args.model_init_kwargs, args.ref_model_init_kwargs
        is_for_reference = False
        if isinstance(ref_model, str) and fixed_kwargs is None:
            fixed_kwargs, is_for_reference = init_kwargs, not isinstance(model, str)
        fixed = load_reference_model(ref_model, fixed_kwargs, peft_config)
        self.trains_without_dropout = args.disable_dropout
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers, compute_metrics=compute_metrics)
        hooks["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        policy = load_language_model(model, None if is_for_reference else init_kwargs, peft_config)
        super().__init__(policy, args, processing_class, model_init, peft_config, data=data, **hooks)
        self.reference = fixed_reference(self.model, fixed, self.accelerator)
        if data_collator is None:
            self.data_collator = self._collator()
        prepare_datasets(self)
        warn_of_balance(self.train_dataset, self.config)

    def prepare_model(self, model: Model) -> Model:
        """The model with its adapters, and with a forward that scores tokens."""
        model = with_adapters(model, self.peft_config, self.config)
        score_tokens_in_forward(model)
        if self.reference is not None and self.reference.model is self.model:  # model_init made another
            self.reference.model = model
        return model

    def _collator(self) -> UnpairedCollator:
        tokenizer, positions = self.tokenizer, Positions.of(self.model).decoder
        limits = [limit for limit in (self.config.max_length, positions) if limit is not None]
        start = decoder_start_of(self.model)
        return UnpairedCollator(
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            best_layout(self.model, share_prefix=False, is_noisy=is_noisy(self)),
            decoder_start_token_id=start,
            is_mismatched=self.config.has_kl,
            max_length=min(limits, default=None) if start is None else None,
        )

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """The dataset as token ids and labels."""
        is_encoder_decoder = bool(base_of(self.model).config.is_encoder_decoder)
        positions = Positions.of(self.model)
        tokenize = AnswerTokenizer(self.tokenizer, self.config, is_encoder_decoder, positions)
        return tokenize_answers(dataset, tokenize)

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Batches for training; ValueError if auto_find_batch_size has come to batches of one row, as of the config."""
        config = self.config
        size = self.get_total_train_batch_size(config) // config.gradient_accumulation_steps // config.world_size
        config.check_batch_size(size, "auto_find_batch_size has come to per_device_train_batch_size")
        return super().get_train_dataloader()

    def count_items(self, batch: Batch) -> int:
        """The answers."""
        return len(batch["label"])

    def score_reference(self, tokens: Tokens) -> SequenceScores:
        """The scores of the sequences of a laid-out batch under the reference, without gradient."""
        assert self.reference is not None
        fixed = self.reference
        # A policy that is its own reference is run as it is wrapped, so that its shards are gathered.
        model = self.model_wrapped if fixed.is_policy else fixed.model
        with fixed.active(), without_dropout(model), self.accelerator.autocast():
            return score_sequences(model, tokens)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """The sum of the losses of answers, divided by the answers of the whole step."""
        labels, count = batch["label"], batch.get(REAL_ROWS)
        judged = compare(model, self.score_reference, batch, self.config, count=count)
        stats = unpaired_statistics(judged, labels, count=count)
        outputs = {"predictions": judged.rewards, "labels": labels.long()}
        return BatchLoss(judged.losses.sum() / items, stats, outputs)

    def statistics(self, *, training: bool) -> dict[str, float]:
        """Of all answers since the last call, over all processes."""
        return with_margins(super().statistics(training=training))
