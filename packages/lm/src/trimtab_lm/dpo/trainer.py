"""DPO and its relatives on transformers.Trainer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import IterableDataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, set_seed

from trimtab_common.stats import Mean
from trimtab_lm.hf.checkpoints import CheckpointedTrainer
from trimtab_lm.hf.support import (
    Recorder,
    Tables,
    device_share,
    load_language_model,
    load_processing_class,
    own_arguments,
    prepare_trackers,
    require_finite,
    window_total,
)
from trimtab_lm.legacy.arguments import DPO, takes_constructor_of_2024
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.positions import Positions

from .collator import REFERENCE_COLUMNS, PreferencePairCollator
from .config import DPOConfig
from .data import PairTokenizer, tokenize_pairs
from .evaluation import log_samples, real_pairs, sample_answers, unpadded
from .loss import PairLogprobs, implicit_rewards, mixed
from .pairs import PairScores, concatenated_inputs, count_pairs, get_batch_logps, pair_statistics, tokens_to_score
from .precompute import ReferenceCache
from .setup import check_kind, decoder_start, load_reference, make_reference, make_trainable, padding_of, placed


class DPOTrainer(CheckpointedTrainer):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the losses of its family.

    model: a causal or encoder-decoder model, with adapters or without, or the name of one; or model_init, which makes
        one.
    ref_model: the fixed policy that rewards are measured against, or its name. None: the model as it is now, which is
        the model without adapters (or with `ref_adapter_name`) where it has any, and else a frozen copy; with
        `precompute_ref_log_probs` no copy is made, and with `reference_free` there is none.
    train_dataset, eval_dataset (or a dict of several): rows of `prompt`, `chosen`, `rejected`, of texts or of messages,
        the prompt also implicit; or tokenized under the columns of `tokenize_row`. Streams too, if nothing is
        precomputed. Columns `reference_chosen_logps` and `reference_rejected_logps` are taken instead of a reference.
    data_collator: instead of the one that lays a pair out with its prompt once, one that gives padded columns, such as
        DPODataCollatorWithPadding. peft_config: adapters to add.
    compute_metrics: gets predictions [pairs, 4], the rewards of the chosen and rejected answers and their
        log-probabilities, and label_ids [pairs] of zeros: the column that should be the larger. They also go through
        preprocess_logits_for_metrics.

    The loss is the mean over the pairs of the optimizer step, of all processes. Losses of `loss.COUPLED` compare the
    pairs of a micro-batch with each other, so that for them per_device_train_batch_size matters.

    Logs rewards/{chosen,rejected,accuracies,margins} and logps/{chosen,rejected} (summed) as in 2024, a tie being no
    success; and entropy/{chosen,rejected}, per token, instead of the mean logits of then, which meant nothing and would
    take all logits. What was an argument of 2024's constructor is taken with a FutureWarning.
    """

    model: Any  # what Trainer may leave at None
    model_init: Any
    data_collator: Any
    processing_class: Any
    loss_is_scaled_for_ga = True  # compute_loss divides by the pairs of the whole optimizer step

    @takes_constructor_of_2024(DPOConfig, DPO)
    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: PeftConfig | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    ):
        sets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        streams = [one for one in (train_dataset, *sets.values()) if isinstance(one, IterableDataset)]
        self.keeps_columns = not args.remove_unused_columns
        self.config: DPOConfig = own_arguments(args, streams[0] if streams else None)
        self.peft_config = peft_config
        self.loss_function = mixed(args.loss_type, args.loss_weights)
        self.recorder, self.tables = Recorder(), Tables()
        self._until_backward: ExitStack | None = None
        if (model is None) == (model_init is None):
            raise ValueError("DPOTrainer needs either a model or model_init, and not both.")
        if model_init is not None:
            set_seed(args.seed)  # as Trainer does before it calls model_init
            self.model_init = model_init
            model = super().call_model_init()
        processing_class = load_processing_class(processing_class, model)
        ref_model = load_reference(ref_model, args)
        model = load_language_model(model, args.model_init_kwargs)
        super().__init__(
            model=make_trainable(model, peft_config, args), args=self.config, data_collator=data_collator,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, callbacks=callbacks, optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip
        self.model_init = model_init
        prepare_trackers(self.config)
        self.reference = make_reference(self.model, ref_model, self.config)
        score_tokens_in_forward(self.model)
        self.tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        self.is_encoder_decoder = check_kind(self.model, self.config)
        self.pair_tokenizer = PairTokenizer.of(
            self.config, self.tokenizer, is_encoder_decoder=self.is_encoder_decoder, positions=Positions.of(self.model)
        )
        self.padding_value = padding_of(self.tokenizer, self.config)
        self.decoder_start_token_id = decoder_start(self.model)
        if data_collator is None:
            layout = best_layout(self.model, share_prefix=True)
            self.data_collator = PreferencePairCollator(
                self.padding_value, args.label_pad_token_id, layout, self.decoder_start_token_id
            )
        self.cache = None
        if args.precompute_ref_log_probs and self.reference is not None:
            self.cache = ReferenceCache(self.reference, args.cache_folder, precision=self.accelerator.mixed_precision)
        self.train_dataset = self.prepare_dataset(train_dataset)
        prepared = {name: self.prepare_dataset(one) for name, one in sets.items()}
        self.eval_dataset = prepared if isinstance(eval_dataset, dict) else prepared[""]

    def prepare_dataset(self, dataset: Any) -> Any:
        """The dataset as token columns, with the reference's log-probabilities where they are precomputed.

        None, and a dataset that was prepared, are returned as they are.
        """
        if dataset is None:
            return None
        with self.config.main_process_first(desc="tokenizing"):
            dataset = tokenize_pairs(
                dataset, self.pair_tokenizer, keep_columns=self.keeps_columns, num_proc=self.config.dataset_num_proc
            )
        if self.cache is None or set(REFERENCE_COLUMNS) <= set(dataset.column_names or ()):
            return dataset
        dataset = self.cache.with_columns(
            dataset, self.compute_reference_log_probs, self.data_collator,
            batch_size=self.config.per_device_eval_batch_size, rank=self.config.process_index,
        )  # fmt: skip
        if self.has_reference_model and not self.cache.reference.is_policy:
            placed(self.cache.reference.model, "cpu")  # it leaves its memory to training
        return dataset

    def data_of_run(self) -> Any:
        """The pairs without what the reference says of them, which is computed anew where its cache is gone."""
        rows: Any = self.train_dataset
        return rows.remove_columns([*REFERENCE_COLUMNS]) if self.cache is not None and rows is not None else rows

    # Rows and batches -------------------------------------------------------------------------------------------------

    def tokenize_row(self, feature: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
        """A row's columns of token ids, attention masks and labels: see `data.PairTokenizer.row`."""
        return self.pair_tokenizer.row(feature, model)

    def build_tokenized_answer(self, prompt: Any, answer: Any) -> dict[str, list[int]]:
        """Token ids and masks of a prompt and of the answer to it: see `data.PairTokenizer.split`."""
        return self.pair_tokenizer.split(prompt, answer)

    concatenated_inputs = staticmethod(concatenated_inputs)
    get_batch_logps = staticmethod(get_batch_logps)

    def get_train_dataloader(self) -> DataLoader:
        """Batches for training; the training set is prepared where it was replaced since."""
        self.train_dataset = self.prepare_dataset(self.train_dataset)
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches for evaluation; a dataset that was not given to the constructor is prepared here."""
        return super().get_eval_dataloader(
            eval_dataset if isinstance(eval_dataset, str) else self.prepare_dataset(eval_dataset)
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches for `predict`; the dataset is prepared here."""
        return super().get_test_dataloader(self.prepare_dataset(test_dataset))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of an optimizer step, and how many pairs they hold, over all processes.

        The name was that of `generate_from_model_and_ref` in 2024.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, window_total(self, map(count_pairs, batches))

    # The loss ---------------------------------------------------------------------------------------------------------

    def concatenated_forward(self, model: nn.Module, batch: Mapping[str, Any]) -> PairScores:
        """Both answers of each pair under a model, in one forward pass.

        The first two are 2024's; in place of its logits, which are never held whole, stand entropies and lengths.
        """
        tokens = tokens_to_score(
            batch, is_encoder_decoder=self.is_encoder_decoder, label_pad_token_id=self.config.label_pad_token_id,
            padding_value=self.padding_value, decoder_start_token_id=self.decoder_start_token_id,
        )  # fmt: skip
        tokens = send_to_device(tokens, self.config.device)
        with self._without_dropout(model):
            return PairScores.of(model(tokens=tokens), tokens)

    @torch.no_grad()
    def compute_reference_log_probs(self, padded_batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B] of the chosen and of the rejected answers under the reference; zeros without one.

        Those that the batch brings along, as columns of its data set, are taken as they are.
        """
        if set(REFERENCE_COLUMNS) <= set(padded_batch):
            chosen, rejected = (padded_batch[name].to(self.config.device) for name in REFERENCE_COLUMNS)
            return chosen, rejected
        if self.reference is None:
            nothing = torch.zeros(count_pairs(padded_batch), device=self.config.device)
            return nothing, nothing
        with self.reference.active() as reference, self.accelerator.autocast():
            # A policy that is its own reference is run as it is wrapped, so that its shards are gathered.
            model = self.model_wrapped if self.reference.is_policy else placed(reference, self.config.device)
            scores = self.concatenated_forward(model, padded_batch)
        return scores.chosen_logps, scores.rejected_logps

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """The policy as its own reference inside the block, by its adapters; nothing where there is a ref_model."""
        is_policy = self.reference is not None and self.reference.is_policy
        with self.reference.active() if self.reference is not None and is_policy else nullcontext():
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

        chosen_length, rejected_length: [B], tokens of each answer, which ipo alone divides by; without them its
        log-probabilities are taken for averages, as in 2024.
        """
        one = torch.ones_like(policy_chosen_logps)
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
        losses = self.loss_function(pairs, beta=self.config.beta, label_smoothing=self.config.label_smoothing)
        chosen, rejected = implicit_rewards(pairs, beta=self.config.beta)
        return losses, chosen.detach(), rejected.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean loss over the pairs of the optimizer step, or of this batch; statistics go to the recorder."""
        is_training = model.training
        losses, stats, predictions = self._losses(model, inputs)
        self.recorder.add(stats, training=is_training)
        if num_items_in_batch is None:
            loss = losses.mean()
        else:
            loss = losses.sum() / num_items_in_batch * device_share(self)
        return (loss, {"predictions": predictions}) if return_outputs else loss

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Mapping[str, Any], train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The mean loss of a batch and its statistics, whose names begin with eval_ if train_eval is "eval"."""
        losses, stats, _ = self._losses(model, batch)
        prefix = "eval_" if train_eval == "eval" else ""
        return losses.mean(), {f"{prefix}{name}": stat.value for name, stat in stats.items() if name != "loss"}

    def _losses(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Mean], Tensor]:
        """Losses [B], statistics, and predictions [B, 4] for compute_metrics."""
        is_training = model.training
        reference = self.compute_reference_log_probs(batch)
        policy = self.concatenated_forward(model, batch)
        losses, chosen, rejected = self.dpo_loss(
            policy.chosen_logps, policy.rejected_logps, *reference,
            chosen_length=policy.chosen_length, rejected_length=policy.rejected_length,
        )  # fmt: skip
        predictions = torch.stack([chosen, rejected, policy.chosen_logps, policy.rejected_logps], dim=1).detach()
        real = len(losses) if is_training else real_pairs(self.accelerator, len(losses))
        stats = pair_statistics(PairScores(*(x[:real] for x in policy)), losses[:real], chosen[:real], rejected[:real])
        return losses, stats, predictions

    @contextmanager
    def _without_dropout(self, model: nn.Module) -> Iterator[None]:
        """Without dropout if it is disabled, in a training step until its end; the noise of NEFTune is no dropout."""
        with ExitStack() as block:
            if self.config.disable_dropout and model.training:
                # Backward computes checkpointed layers again, and must find them as they were.
                (self._until_backward or block).enter_context(without_dropout(model))
                if self.config.neftune_noise_alpha is not None:
                    self.model.get_input_embeddings().train()
            yield

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a micro-batch; TrainingDivergedError before a loss that is not finite can train."""
        try:
            with ExitStack() as self._until_backward:
                return require_finite(super().training_step(model, inputs, num_items_in_batch), self)
        finally:
            self._until_backward = None

    # Evaluation -------------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss, and [B, 4] predictions with [B] labels as the class says."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        predictions = outputs["predictions"]
        return loss, predictions, torch.zeros(len(predictions), dtype=torch.long, device=predictions.device)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As in transformers, with the statistics of training over all pairs, and a table of samples if asked for."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        output.metrics.update(self.recorder.flush(training=False, prefix=f"{metric_key_prefix}_"))
        if self.config.generate_during_eval:
            log_samples(self, dataloader.dataset, f"{metric_key_prefix}_samples")
        return output

    def hyperparameter_search(
        self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, whose objective would be a sum of all statistics; here it is the evaluation's loss."""
        objective = compute_objective or itemgetter("eval_loss")
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last time."""
        if "loss" in logs:
            logs = self.recorder.flush(training=True) | logs
        super().log(logs, start_time)

    def generate_from_model_and_ref(self, model: Any, batch: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Sampled answers of the model and of the reference to a batch's `prompt_input_ids`, as texts.

        The reference's are none where it is not a model that is at hand. It was `get_batch_samples` in 2024.
        """
        return sample_answers(self, model, unpadded(batch))

    # Models -----------------------------------------------------------------------------------------------------------

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference is a model that can be run at any time, now and after training."""
        is_untrained_policy = self.reference is not None and self.reference.model is self.model
        return self.reference is not None and (self.reference.is_policy or not is_untrained_policy)

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`, prepared as the first was; a reference by adapters goes over to it."""
        model = make_trainable(super().call_model_init(trial), self.peft_config, self.config)
        score_tokens_in_forward(model)
        if self.reference is not None and self.reference.model is self.model:
            self.reference.model = model
        return model
