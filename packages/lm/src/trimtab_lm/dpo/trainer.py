"""DPO and its relatives on transformers.Trainer."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from trimtab_common.overrides import is_replaced, source_of
from trimtab_common.sharding import placed, reshard
from trimtab_lm.hf.adapter import REAL_ROWS, BatchLoss, DataOptions, TrainerOptions
from trimtab_lm.hf.models import load_language_model
from trimtab_lm.hf.types import Batch, ComputeMetrics, DataSource, EvalSource, OptimizerChoice, Optimizers, Trial, Use
from trimtab_lm.interface import Data, Model, Processor, decoder_start_of
from trimtab_lm.legacy.arguments import DPO, takes_constructor_of_2024
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.positions import Positions

from .chain2024 import CHAIN, SCORING, DocumentedMethods
from .collator import REFERENCE_COLUMNS, DPODataCollatorWithPadding, PreferencePairCollator
from .config import DPOConfig
from .data import tokenize_pairs
from .loss import PairLogprobs, implicit_rewards
from .pairs import PairScores, count_pairs, pair_statistics, tokens_to_score
from .precompute import ReferenceCache
from .setup import check_kind, load_reference, make_reference, make_trainable
from .variants import mixed


class DPOTrainer(DocumentedMethods):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the losses of its family.

    The loss is the mean over the pairs of the optimizer step, of all processes. Losses of `variants.COUPLED` compare
    the pairs of a micro-batch with each other, so that for them per_device_train_batch_size matters.

    Logs rewards/{chosen,rejected,accuracies,margins} (a tie is no success), logps/{chosen,rejected} (summed over
    tokens) and entropy/{chosen,rejected} (nats per token). Arguments of TRL 0.7 to 0.11 are taken with a FutureWarning.

    Where a subclass or an assignment replaces a documented method, 2024's chain of methods trains: see `chain2024`.

    Args:
        model: a causal or encoder-decoder model, with adapters or without, or the name of one.
        ref_model: the fixed policy that rewards are measured against, or its name. None: the model as it is now, which
            is the model without adapters (or with `ref_adapter_name`) where it has any, and else a frozen copy. With
            `precompute_ref_log_probs` no copy is needed, and with `reference_free` there is no reference.
        args: the config; None for the defaults.
        data_collator: one that returns padded columns, such as DPODataCollatorWithPadding, instead of the one that lays
            a pair out with its prompt once.
        train_dataset: rows of `prompt`, `chosen`, `rejected`, of texts or of messages, the prompt also implicit; or
            tokenized, with the columns of `tokenize_row`. Columns `reference_chosen_logps` and
            `reference_rejected_logps` replace a reference. Streams too, if nothing is precomputed.
        eval_dataset: such rows too, or a dict of several datasets.
        processing_class: the tokenizer; None loads the one beside the model.
        model_init: makes the model, instead of `model`.
        peft_config: adapters to add.
        compute_metrics: gets predictions [pairs, 4], the rewards of the chosen and rejected answers and their
            log-probabilities, and label_ids [pairs] of zeros: the column that should be the larger. They also go
            through preprocess_logits_for_metrics.
    """

    @takes_constructor_of_2024(DPOConfig, DPO)
    def __init__(
        self,
        model: Model | str | None = None,
        ref_model: Model | str | None = None,
        args: DPOConfig | None = None,
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
        optimizer_cls_and_kwargs: OptimizerChoice | None = None,
    ):
        assert args is not None  # takes_constructor_of_2024 fills it in
        self.check_loss(args)
        self.reference = None
        reference = load_reference(ref_model, args)
        self.trains_without_dropout = args.disable_dropout
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers, compute_metrics=compute_metrics)
        hooks["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        hooks["optimizer_cls_and_kwargs"] = optimizer_cls_and_kwargs
        policy = load_language_model(model, args.model_init_kwargs)
        super().__init__(policy, args, processing_class, model_init, peft_config, data=data, **hooks)
        self.reference = make_reference(self.model, reference, self.config, self.accelerator)
        self.is_encoder_decoder = check_kind(self.model, self.config)
        self.positions = Positions.of(self.model)
        self.decoder_start_token_id = decoder_start_of(self.model)
        if data_collator is None:
            layout = best_layout(self.model, share_prefix=True, is_noisy=self.is_noisy)
            self.data_collator = PreferencePairCollator(
                self.padding_value, args.label_pad_token_id, layout, self.decoder_start_token_id
            )
        self.given: list[Any] = [None, None]  # the training and evaluation sets of the caller, and what became of them
        self.prepared: list[Any] = [None, None]
        self.open_cache()
        self.prepare_datasets()

    def open_cache(self) -> None:
        """Open the cache of the reference's log-probabilities, if they are to be precomputed."""
        self.cache: ReferenceCache | None = None
        if self.config.precompute_ref_log_probs and self.reference is not None:
            if self.reference.model is self.model:
                self.shard_model()
            precision = self.accelerator.mixed_precision
            self.cache = ReferenceCache(self.reference, self.config.cache_folder, precision=precision)

    def prepare_model(self, model: Model) -> Model:
        """The model with the adapter that trains, and with a forward that scores tokens."""
        model = make_trainable(model, self.peft_config, self.config)
        score_tokens_in_forward(model)
        return model

    def call_model_init(self, trial: Trial = None) -> Model:
        """A new model from `model_init`, which is its own reference by its adapters if the last one was."""
        model = super().call_model_init(trial)
        if self.reference is not None and self.reference.model is self.model:
            self.reference.model = model
        return model

    # Which path runs --------------------------------------------------------------------------------------------------

    @property
    def runs_chain(self) -> bool:
        """Whether 2024's chain trains, because a subclass or an assignment replaces one of its methods."""
        return is_replaced(self, DPOTrainer, *CHAIN)

    @property
    def data_collator(self) -> Any:
        """The caller's collator, or else the one of the path that runs, with the present settings."""
        own = self._collator
        if isinstance(own, PreferencePairCollator):
            if self.runs_chain:
                kind, pad = self.is_encoder_decoder, self.padding_value
                return DPODataCollatorWithPadding(pad, self.label_pad_token_id, is_encoder_decoder=kind)
            own.pad_token_id, own.label_pad_token_id = self.padding_value, self.label_pad_token_id
        return own

    @data_collator.setter
    def data_collator(self, collator: Callable[..., Batch]) -> None:
        self._collator = collator

    def check_loss(self, config: DPOConfig) -> None:
        """Check that somebody knows the config's loss.

        Raises:
            ValueError: its name is not in `LOSSES`, and no method that computes a loss is replaced.
        """
        if not is_replaced(self, DPOTrainer, "dpo_loss", "get_batch_loss_metrics", "compute_loss"):
            mixed(config.loss_type, config.loss_weights)

    # Data -------------------------------------------------------------------------------------------------------------

    @property
    def tokenization(self) -> tuple[object, ...]:
        """Everything that the columns of a prepared dataset depend on."""
        scores = () if self.cache is None else tuple(getattr(self, name) for name in SCORING)
        return self.pair_tokenizer, self.runs_chain, self.tokenize_row, self.cache, scores

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """The dataset as token columns; one that has them is returned as it is."""
        return tokenize_pairs(
            dataset,
            self.pair_tokenizer,
            keep_columns=self.keeps_columns or self.runs_chain,  # replaced methods read them in batches
            num_proc=self.config.dataset_num_proc,
            tokenize_row=self.tokenize_row if is_replaced(self, DPOTrainer, "tokenize_row") else None,
        )

    def prepare_datasets(self) -> None:
        """Prepare the datasets that the caller gave, which are kept to be prepared again by other settings."""
        current = [self.train_dataset, self.eval_dataset]
        pairs = zip(self.given, self.prepared, current, strict=True)
        self.given = [given if prepared is now else now for given, prepared, now in pairs]
        self.train_dataset, self.eval_dataset = self.given
        super().prepare_datasets()
        self.prepared, self.tokenized_by = [self.train_dataset, self.eval_dataset], self.tokenization

    def update_datasets(self) -> None:
        """Prepare the datasets again if the caller has replaced one, or a setting or method that tokenizes."""
        is_current = self.train_dataset is self.prepared[0] and self.eval_dataset is self.prepared[1]
        if not is_current or self.tokenization != self.tokenized_by:
            self.prepare_datasets()

    def prepare_dataset(self, dataset: Data | None, use: Use = "train") -> Any:
        """The dataset as token columns, with the reference's log-probabilities where they are precomputed."""
        dataset = super().prepare_dataset(dataset, use)
        if dataset is None or self.cache is None or set(REFERENCE_COLUMNS) <= set(dataset.column_names or ()):
            return dataset
        dataset = self.cache.with_columns(
            dataset,
            self.compute_reference_log_probs,
            self.data_collator,
            batch_size=self.config.per_device_eval_batch_size,
            rank=self.config.process_index,
            code=source_of(self, DPOTrainer, *SCORING),
        )
        reshard(self.cache.reference.model)
        if self.has_reference_model and not self.cache.reference.is_policy:
            placed(self.cache.reference.model, "cpu")  # it leaves its memory to training
        return dataset

    def data_of_run(self) -> DataSource | None:
        """The pairs without the reference's log-probabilities, which are computed again where their cache is gone."""
        self.update_datasets()
        rows = self.train_dataset
        return rows if self.cache is None or rows is None else rows.remove_columns([*REFERENCE_COLUMNS])  # type: ignore[union-attr]

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Batches for training."""
        self.update_datasets()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: DataSource | str | None = None) -> DataLoader[Batch]:
        """Batches for evaluation; a dataset that was not given to the constructor is prepared here."""
        self.update_datasets()
        return super().get_eval_dataloader(eval_dataset)

    # The loss ---------------------------------------------------------------------------------------------------------

    def count_items(self, batch: Batch) -> int:
        """The pairs."""
        return count_pairs(batch)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """The sum of the losses of pairs, divided by the pairs of the whole step."""
        if self.runs_chain:
            return self.documented_loss(model, batch, items)
        reference, policy = self.compute_reference_log_probs(batch), self.score_pairs(model, batch)
        losses, chosen, rejected = self.dpo_loss(
            policy.chosen_logps,
            policy.rejected_logps,
            *reference,
            chosen_length=policy.chosen_length,
            rejected_length=policy.rejected_length,
        )
        losses = losses + policy.router_loss
        stats = pair_statistics(policy, losses, chosen, rejected, count=batch.get(REAL_ROWS))
        predictions = torch.stack([chosen, rejected, policy.chosen_logps, policy.rejected_logps], dim=1).detach()
        labels = torch.zeros(len(losses), dtype=torch.long, device=losses.device)
        return BatchLoss(losses.sum() / items, stats, {"predictions": predictions, "labels": labels})

    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """Log-probabilities, entropies and lengths of both answers of each pair, in one forward pass without logits."""
        tokens = tokens_to_score(
            batch,
            is_encoder_decoder=self.is_encoder_decoder,
            label_pad_token_id=self.config.label_pad_token_id,
            padding_value=self.padding_value,
            decoder_start_token_id=self.decoder_start_token_id,
        )
        tokens = send_to_device(tokens, self.config.device)
        with self.dropout_off(model):
            return PairScores.of(model(tokens=tokens), tokens)

    def dpo_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_free: bool = False,
        *,
        chosen_length: Tensor | None = None,
        rejected_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and implicit rewards of the chosen and rejected answers, each [B], from log-probabilities [B].

        chosen_length, rejected_length: [B], tokens of each answer, which ipo and sft divide by; without them, and
        outside of `get_batch_loss_metrics`, which knows them, log-probabilities are taken for averages.
        """
        one = torch.ones_like(policy_chosen_logps)
        if chosen_length is None and rejected_length is None and self._lengths is not None:
            chosen_length, rejected_length = self._lengths
        pairs = PairLogprobs(
            policy_chosen_logps,
            policy_rejected_logps,
            reference_chosen_logps.to(policy_chosen_logps.dtype),
            reference_rejected_logps.to(policy_rejected_logps.dtype),
            one if chosen_length is None else chosen_length,
            one if rejected_length is None else rejected_length,
        )
        if reference_free or self.config.reference_free:
            pairs = pairs.reference_free()
        loss = mixed(self.config.loss_type, self.config.loss_weights)
        losses = loss(pairs, beta=self.config.beta, label_smoothing=self.config.label_smoothing)
        chosen, rejected = implicit_rewards(pairs, beta=self.config.beta)
        return losses, chosen.detach(), rejected.detach()
