"""DPO and its relatives on transformers.Trainer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from trimtab_common.sharding import placed
from trimtab_lm.data.formats import Row, Text
from trimtab_lm.hf.adapter import (
    REAL_ROWS,
    BatchLoss,
    DataOptions,
    TrainerAdapter,
    TrainerOptions,
    dropout_off,
    layout_of,
)
from trimtab_lm.hf.models import load_language_model
from trimtab_lm.hf.types import Batch, ComputeMetrics, DataSource, EvalSource, OptimizerChoice, Optimizers, Use
from trimtab_lm.interface import Model, Processor, decoder_start_of
from trimtab_lm.legacy.arguments import DPO, takes_constructor_of_2024
from trimtab_lm.models.reference import Reference
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import score_tokens_in_forward
from trimtab_lm.tokens.positions import Positions

from .algorithm import compare, score
from .chain2024 import Chain2024, FixedSetting, RefModel, Setting, get_batch_logps
from .collator import REFERENCE_COLUMNS, PreferencePairCollator, concatenated_inputs, count_pairs, tokens_of
from .config import DPOConfig
from .data import Datasets
from .evaluation import log_answers, sample_answers, unpadded
from .loss import PairLogprobs, implicit_rewards, mixed, needs_reference, rewards_per_token
from .setup import check_kind, load_reference, make_reference, make_trainable, padding_of
from .statistics import pair_statistics


class DPOTrainer(TrainerAdapter[DPOConfig, Tensor]):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the losses of its family.

    The loss is the mean over the pairs of the optimizer step, of all processes. The losses kto_pair, aot and aot_pair
    compare the pairs of a micro-batch with each other, so that for them per_device_train_batch_size matters.

    Logs rewards/{chosen,rejected,accuracies,margins} (a tie is no success), logps/{chosen,rejected} (summed over
    tokens) and entropy/{chosen,rejected} (nats per token). Arguments of TRL 0.7 to 0.11 are taken with a FutureWarning.

    If a subclass or an assignment replaces a documented method, 2024's chain of methods trains: see `chain2024`.

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
        processing_class: the tokenizer; by default the one saved with the model.
        model_init: makes the model, instead of `model`.
        peft_config: adapters to add.
        compute_metrics: gets predictions [pairs, 4], the rewards of the chosen and rejected answers and their
            log-probabilities, and label_ids [pairs] of zeros: the column that should be the larger. They also go
            through preprocess_logits_for_metrics.
    """

    method, paper = "DPO", "Rafailov et al. 2023, arXiv:2305.18290"
    watched = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "grad_norm")
    reference: Reference | None = None

    beta, label_smoothing, loss_type, reference_free = Setting(), Setting(), Setting(), Setting()
    max_length, max_prompt_length, max_target_length, truncation_mode = Setting(), Setting(), Setting(), Setting()
    label_pad_token_id, padding_value, generate_during_eval = Setting(), Setting(), Setting()
    dataset_num_proc, precompute_ref_log_probs = Setting(), FixedSetting()
    model_adapter_name, ref_adapter_name = FixedSetting(), FixedSetting()
    ref_model = RefModel()

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
        self.chain = Chain2024(self, DPOTrainer)
        self.chain.check_loss(args)
        reference = load_reference(ref_model, args, peft_config)
        self.trains_without_dropout = args.disable_dropout
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers, compute_metrics=compute_metrics)
        hooks["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        hooks["optimizer_cls_and_kwargs"] = optimizer_cls_and_kwargs
        policy = load_language_model(model, args.model_init_kwargs, peft_config)
        super().__init__(policy, args, processing_class, model_init, peft_config, data=data, **hooks)
        self.config.padding_value = padding_of(self.tokenizer, self.config)
        self.reference = make_reference(self.model, reference, self.config, self.accelerator)
        self.is_encoder_decoder = check_kind(self.model, self.config)
        self.positions, self.decoder_start_token_id = Positions.of(self.model), decoder_start_of(self.model)
        if data_collator is None:
            options = {**layout_of(self), "decoder_start_token_id": self.decoder_start_token_id}
            self.data_collator = PreferencePairCollator(self.padding_value, args.label_pad_token_id, **options)
        self.datasets = Datasets(self)
        self.datasets.update()

    def prepare_model(self, model: Model) -> Model:
        """The model with the adapter that trains, and with a forward that scores tokens."""
        model = make_trainable(model, self.peft_config, self.config)
        score_tokens_in_forward(model)
        if self.reference is not None and self.reference.model is self.model:  # model_init made another
            self.reference.model = model
        return model

    # Data -------------------------------------------------------------------------------------------------------------

    @property
    def data_collator(self) -> Any:
        """The caller's collator, or the collator of the path in use."""
        return self.chain.collator(self._collator)

    @data_collator.setter
    def data_collator(self, collator: Callable[..., Batch]) -> None:
        self._collator = collator

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """The dataset as token columns; a tokenized one is returned unchanged."""
        return self.datasets.tokenized(dataset)

    def prepare_dataset(self, dataset: DataSource | None, use: Use = "train") -> Any:
        """The dataset as token columns, with the reference's log-probabilities where they are precomputed."""
        return self.datasets.with_reference(super().prepare_dataset(dataset, use))

    def rows_of_run(self) -> DataSource | None:
        """The pairs, prepared by the present settings, without the reference's log-probabilities."""
        self.datasets.update()
        data: Any = self.train_dataset
        if self.datasets.cache is not None and data is not None:
            data = data.remove_columns([*REFERENCE_COLUMNS])  # they are computed again where the cache is gone
        return data

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Batches for training, from datasets prepared with the present settings and methods."""
        self.datasets.update()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: DataSource | str | None = None) -> DataLoader[Batch]:
        """Batches for evaluation; a dataset that was not given to the constructor is prepared here."""
        self.datasets.update()
        return super().get_eval_dataloader(eval_dataset)

    # The loss ---------------------------------------------------------------------------------------------------------

    def count_items(self, batch: Batch) -> int:
        """The pairs."""
        return count_pairs(batch)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """The sum of the losses of pairs, divided by the pairs of the whole step."""
        if "sequence" not in batch and self.chain.runs:
            return self.chain.loss(model, batch, items)
        count, rows = batch.get(REAL_ROWS), count_pairs(batch)
        losses, chosen, rejected, scores = compare(self, model, batch, tokens_of(self, batch), count=count)
        stats = pair_statistics(scores, losses, chosen, rejected, count=count)
        columns = [F.pad(values, (0, rows - len(values))) for values in (chosen, rejected, *scores[:2])]
        predictions = torch.stack(columns, dim=1).detach()  # evaluation drops the rows that repeat others
        labels = torch.zeros(rows, dtype=torch.long, device=losses.device)
        return BatchLoss(losses.sum() / items, stats, {"predictions": predictions, "labels": labels})

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """A table of prompts and the answers of policy and reference, if `generate_during_eval` asks for it."""
        if self.config.generate_during_eval:
            log_answers(self, dataloader.dataset, f"{prefix}_samples")

    # What TRL 0.7 to 0.11 document: see chain2024 ---------------------------------------------------------------------

    concatenated_inputs = staticmethod(concatenated_inputs)
    get_batch_logps = staticmethod(get_batch_logps)

    @property
    def is_peft_model(self) -> bool:
        """Whether the policy has adapters."""
        return isinstance(self.model, PeftModel)

    def tokenize_row(self, feature: Row, model: Model | None = None) -> dict[str, object]:
        """A row's columns of token ids, attention masks and labels: see `data.PairTokenizer.row`."""
        return self.datasets.tokenizer.row(feature, model)

    def build_tokenized_answer(self, prompt: Text, answer: Text) -> dict[str, list[int]]:
        """Token ids and masks of a prompt and of the answer to it: see `data.PairTokenizer.split`."""
        return self.datasets.tokenizer.split(prompt, answer)

    def concatenated_forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Log-probabilities [B] of both answers of each pair and their logits, in one forward pass of padded rows.

        Where the chain does not run, entropies and lengths take the place of the logits.
        """
        if "sequence" not in batch and self.chain.runs:
            return self.chain.forward(model, batch)
        with dropout_off(self, model) if model.training else nullcontext():
            return score(model, tokens_of(self, batch))

    @torch.no_grad()
    def compute_reference_log_probs(self, padded_batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B] of the chosen and of the rejected answers under the reference; zeros without one.

        Those that the batch brings along, as columns of its dataset, are taken as they are. The reference is run as
        `concatenated_forward` runs the policy.
        """
        device, fixed = self.config.device, self.reference
        if set(REFERENCE_COLUMNS) <= set(padded_batch):
            return padded_batch[REFERENCE_COLUMNS[0]].to(device), padded_batch[REFERENCE_COLUMNS[1]].to(device)
        if fixed is None:
            nothing = torch.zeros(count_pairs(padded_batch), device=device)
            return nothing, nothing
        if self.datasets.cache is not None and not fixed.is_policy:
            placed(fixed.model, device)  # it has left its memory to training
        # A policy that is its own reference is run as it is wrapped, so that its shards are gathered.
        model = self.model_wrapped if fixed.is_policy else fixed.model
        context = self.null_ref_context() if fixed.is_policy else fixed.active()
        with context, without_dropout(model), self.accelerator.autocast():
            chosen, rejected, *_ = self.concatenated_forward(model, padded_batch)
        return chosen, rejected

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """The policy as its own reference inside the block, by its adapters; nothing changes with a ref_model."""
        with self.reference.active() if self.reference is not None and self.reference.is_policy else nullcontext():
            yield

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

        chosen_length, rejected_length: [B], tokens of each answer, which some losses divide by; without them, and
        outside of `get_batch_loss_metrics`, which knows them, log-probabilities are taken for averages.
        """
        config, lengths = self.config, self.chain.lengths
        if chosen_length is not None and rejected_length is not None:
            lengths = chosen_length, rejected_length
        policy, reference = (
            (policy_chosen_logps, policy_rejected_logps),
            (reference_chosen_logps, reference_rejected_logps),
        )
        if reference_free or config.reference_free:
            reference = torch.zeros_like(policy[0]), torch.zeros_like(policy[1])
        if lengths is None:
            lengths = torch.ones_like(policy[0]), torch.ones_like(policy[1])
        pairs = PairLogprobs(*policy, reference[0].to(policy[0]), reference[1].to(policy[1]), *lengths)
        loss, beta = mixed(config.loss_type, config.loss_weights, simpo_gamma=config.simpo_gamma), config.beta
        is_simpo = "simpo" in config.loss_type and not needs_reference(config.loss_type)
        chosen, rejected = (rewards_per_token if is_simpo else implicit_rewards)(pairs, beta=beta)
        return loss(pairs, beta=beta, label_smoothing=config.label_smoothing), chosen.detach(), rejected.detach()

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Batch, train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The mean loss of a batch and its statistics, whose names begin with eval_ if train_eval is "eval"."""
        return self.chain.loss_and_metrics(model, batch, train_eval)

    def store_metrics(self, metrics: Mapping[str, Any], train_eval: str = "train") -> None:
        """Keep numbers for the next log of training, or for the metrics of the evaluation that runs, as means.

        An evaluation (train_eval="eval") puts its prefix, such as eval_, before names that lack it.
        """
        self.chain.store(metrics, train_eval)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Of a model and a batch what `generate_from_model_and_ref` returns; else transformers' hook of this name."""
        if kwargs or isinstance(args[0], nn.Module):
            return self.generate_from_model_and_ref(*args, **kwargs)
        return super().get_batch_samples(*args)

    def generate_from_model_and_ref(self, model: Model, batch: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Sampled answers of the model and of the reference to a batch's `prompt_input_ids`, as texts.

        There are none of the reference where it is not a model that can be run.
        """
        return sample_answers(self, model, unpadded(batch))
