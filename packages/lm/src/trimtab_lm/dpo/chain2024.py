"""The methods of DPOTrainer that TRL 0.7 to 0.11 document, and the chain of them that trains where one is replaced.

    tokenize_row -> concatenated_inputs -> concatenated_forward -> get_batch_logps -> dpo_loss -> get_batch_loss_metrics

The chain runs on padded rows and computes logits of the whole vocabulary. Where nothing is replaced, DPOTrainer scores
the same tokens in fewer positions, without logits: see `DPOTrainer.batch_loss`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trimtab_common.overrides import call_with_known
from trimtab_common.seeding import sampling_seed
from trimtab_common.sharding import placed
from trimtab_common.stats import Mean, gather_over_ranks, world_size
from trimtab_lm.data.formats import Row, Text
from trimtab_lm.hf.adapter import REAL_ROWS, TrainerAdapter
from trimtab_lm.hf.types import Batch, BatchLoss
from trimtab_lm.interface import Model, base_of
from trimtab_lm.models.reference import Reference
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.positions import Positions, positioned
from trimtab_lm.tokens.router import refuse_router_loss

from .collator import REFERENCE_COLUMNS, DPODataCollatorWithPadding
from .config import DPOConfig
from .data import PairTokenizer
from .evaluation import prompts_to_sample, sampled_texts, unpadded
from .pairs import (
    PairLogits,
    PairScores,
    check_lengths,
    concatenated_inputs,
    count_pairs,
    decoder_inputs,
    get_batch_logps,
    is_laid_out,
    pair_statistics,
)
from .setup import load_reference, make_reference, padding_of

SCORING = (
    *("concatenated_inputs", "concatenated_forward", "get_batch_logps", "null_ref_context"),
    "compute_reference_log_probs",
)
"""The methods that compute the reference's log-probabilities."""
CHAIN = (
    *("tokenize_row", "build_tokenized_answer", *SCORING, "dpo_loss", "get_batch_loss_metrics", "store_metrics"),
    *("compute_loss", "prediction_step"),
)
"""The methods whose replacement the chain calls. The others are called on either path."""


class Setting:
    """A field of the trainer's config as an attribute of the trainer; assigned, it is checked as the config's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer.config, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        trainer.check_loss(trainer.config.with_setting(self.name, value))
        setattr(trainer.config, self.name, value)


class DocumentedMethods(TrainerAdapter[DPOConfig, Tensor]):
    """What users of DPOTrainer call, assign and replace."""

    reference: Reference | None
    decoder_start_token_id: int | None
    positions: Positions
    is_encoder_decoder: bool

    beta, label_smoothing, loss_type, reference_free = Setting(), Setting(), Setting(), Setting()
    max_length, max_prompt_length, max_target_length, truncation_mode = Setting(), Setting(), Setting(), Setting()
    label_pad_token_id, generate_during_eval, dataset_num_proc = Setting(), Setting(), Setting()
    precompute_ref_log_probs, model_adapter_name, ref_adapter_name = Setting(), Setting(), Setting()

    _lengths: tuple[Tensor, Tensor] | None = None  # of the answers whose log-probabilities dpo_loss gets, as sums
    _predictions: Tensor  # of the last batch, for compute_metrics
    _pairs = 1  # of the batch whose metrics are stored

    concatenated_inputs = staticmethod(concatenated_inputs)
    get_batch_logps = staticmethod(get_batch_logps)

    @property
    def runs_chain(self) -> bool:
        """Whether 2024's chain trains; DPOTrainer knows."""
        raise NotImplementedError

    def check_loss(self, config: DPOConfig) -> None:
        """Raise ValueError for a loss that nobody knows; DPOTrainer knows."""
        raise NotImplementedError

    def open_cache(self) -> None:
        """Open the cache of precomputed log-probabilities of the reference; DPOTrainer has it."""
        raise NotImplementedError

    def score_pairs(self, model: nn.Module, batch: Batch) -> PairScores:
        """The scores of both answers of each pair, without logits; DPOTrainer computes them."""
        raise NotImplementedError

    def dpo_loss(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and rewards [B]; DPOTrainer computes them."""
        raise NotImplementedError

    # Attributes -------------------------------------------------------------------------------------------------------

    @property
    def padding_value(self) -> int:
        """The token that pads: the config's, else the tokenizer's."""
        return padding_of(self.tokenizer, self.config)

    @padding_value.setter
    def padding_value(self, value: int) -> None:
        self.config.with_setting("padding_value", value)
        self.config.padding_value = value

    @property
    def ref_model(self) -> Model | None:
        """The reference where it is a model of its own; None where it is the policy, or where there is none."""
        if self.reference is None or self.reference.is_policy or self.reference.model is self.model:
            return None
        return placed(self.reference.model, self.config.device)

    @ref_model.setter
    def ref_model(self, model: Model | str | None) -> None:
        reference = load_reference(model, self.config)
        self.reference = make_reference(self.model, reference, self.config, self.accelerator)
        self.open_cache()

    @property
    def is_peft_model(self) -> bool:
        """Whether the policy has adapters."""
        return isinstance(self.model, PeftModel)

    # From rows to tokens ----------------------------------------------------------------------------------------------

    @property
    def pair_tokenizer(self) -> PairTokenizer:
        """What tokenizes a row by the present settings."""
        is_built_in = type(self).build_tokenized_answer is DocumentedMethods.build_tokenized_answer
        return PairTokenizer.of(
            self.config,
            self.tokenizer,
            is_encoder_decoder=self.is_encoder_decoder,
            positions=self.positions,
            build=None if is_built_in and "build_tokenized_answer" not in vars(self) else self.build_tokenized_answer,
        )

    def tokenize_row(self, feature: Row, model: Model | None = None) -> dict[str, object]:
        """A row's columns of token ids, attention masks and labels: see `data.PairTokenizer.row`."""
        return self.pair_tokenizer.row(feature, model)

    def build_tokenized_answer(self, prompt: Text, answer: Text) -> dict[str, list[int]]:
        """Token ids and masks of a prompt and of the answer to it: see `data.PairTokenizer.split`."""
        return self.pair_tokenizer.split(prompt, answer)

    # From tokens to the loss ------------------------------------------------------------------------------------------

    def documented_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """The loss of `get_batch_loss_metrics`, a mean over the pairs, as this batch's part of the optimizer step."""
        real = batch.get(REAL_ROWS)
        shown = None if real is None else max(real, 1)  # every process needs a pair for its forward pass
        rows = {name: column[:shown] for name, column in batch.items() if name != REAL_ROWS}
        train_eval = "train" if model.training else "eval"
        count = self._pairs = count_pairs(rows) if real is None else real
        loss, metrics = self.get_batch_loss_metrics(model, rows, train_eval)
        self.store_metrics(metrics, train_eval)
        self._pairs = 1
        outputs: dict[str, Any] = dict(metrics)
        if (predictions := vars(self).pop("_predictions", None)) is not None:  # else the method was replaced
            labels = torch.zeros(len(predictions), dtype=torch.long, device=predictions.device)
            outputs |= {"predictions": predictions, "labels": labels}
        return BatchLoss(loss * count / items, {"loss": Mean(loss.detach() * count, count)}, outputs)

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Batch, train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The mean loss of a batch and its statistics, whose names begin with eval_ if train_eval is "eval"."""
        self._lengths = None
        policy = self.concatenated_forward(model, batch)
        lengths, chosen_logps, rejected_logps = self._lengths, policy[0], policy[1]
        reference = [logps.to(chosen_logps) for logps in self.compute_reference_log_probs(batch)]
        self._lengths = lengths
        losses, chosen, rejected = self.dpo_loss(chosen_logps, rejected_logps, *reference)
        self._lengths = None
        self._predictions = torch.stack([chosen, rejected, chosen_logps, rejected_logps], dim=1).detach()
        stats = pair_statistics(policy, losses, chosen, rejected)
        prefix = "eval_" if train_eval == "eval" else ""
        return losses.mean(), {f"{prefix}{name}": stat.value for name, stat in stats.items() if name != "loss"}

    def concatenated_forward(self, model: nn.Module, batch: Batch) -> PairLogits | PairScores:
        """Log-probabilities [B] of both answers of each pair and their logits, in one forward pass of padded rows.

        Where the chain does not run, entropies and lengths take the place of the logits.
        """
        if is_laid_out(batch) or not self.runs_chain:
            scores = self.score_pairs(model, batch)
            self._lengths = scores.chosen_length, scores.rejected_length
            return scores
        refuse_router_loss(self.model, "DPOTrainer with a replaced method", "")
        kind: dict[str, Any] = {"is_encoder_decoder": self.is_encoder_decoder}
        kind["label_pad_token_id"] = self.label_pad_token_id
        sizes = {"padding_value": self.padding_value, "device": self.accelerator.device}
        joined = call_with_known(self.concatenated_inputs, batch, **kind, **sizes)
        labels = joined["concatenated_labels"]
        counted = labels != self.label_pad_token_id
        lengths = counted[:, 0 if self.is_encoder_decoder else 1 :].sum(1)
        check_lengths(lengths)
        inputs = {name: joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
        if self.is_encoder_decoder:
            start, marked = self.decoder_start_token_id or 0, labels.masked_fill(~counted, -100)
            inputs |= decoder_inputs(marked, start=start, padding_value=self.padding_value)
        with self.dropout_off(model):
            logits = model(**positioned(base_of(self.model).forward, inputs), use_cache=False).logits
        logits = logits[:, -labels.shape[1] :]  # without those of learned prompts, which PEFT puts before the tokens
        logps = call_with_known(self.get_batch_logps, logits, labels, **kind)
        logps = logps[0] if isinstance(logps, tuple) else logps  # TRL 0.9 returns the lengths as well
        half = len(labels) // 2
        self._lengths = lengths[:half], lengths[half:]
        return PairLogits(logps[:half], logps[half:], logits[:half], logits[half:])

    @torch.no_grad()
    def compute_reference_log_probs(self, padded_batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B] of the chosen and of the rejected answers under the reference; zeros without one.

        Those that the batch brings along, as columns of its dataset, are taken as they are.
        """
        if set(REFERENCE_COLUMNS) <= set(padded_batch):
            chosen, rejected = (padded_batch[name].to(self.config.device) for name in REFERENCE_COLUMNS)
            return chosen, rejected
        if self.reference is None:
            nothing = torch.zeros(count_pairs(padded_batch), device=self.config.device)
            return nothing, nothing
        # A policy that is its own reference is run as it is wrapped, so that its shards are gathered.
        is_policy = self.reference.is_policy
        model = self.model_wrapped if is_policy else placed(self.reference.model, self.config.device)
        context = self.null_ref_context() if is_policy else self.reference.active()
        with context, without_dropout(model), self.accelerator.autocast():
            scores = self.concatenated_forward(model, padded_batch)
        return scores[0], scores[1]

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """The policy as its own reference inside the block, by its adapters; nothing changes with a ref_model."""
        with self.reference.active() if self.reference is not None and self.reference.is_policy else nullcontext():
            yield

    def store_metrics(self, metrics: Mapping[str, Any], train_eval: str = "train") -> None:
        """Keep numbers for the next log of training, or for the metrics of the evaluation that runs, as means.

        Args:
            metrics: numbers by name; an evaluation puts its prefix, such as eval_, before names that lack it.
            train_eval: "train" or "eval".
        """
        count, prefix = self._pairs, "eval_" if train_eval == "eval" else ""
        numbers = {
            name: float(torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().mean())
            for name, value in metrics.items()
        }
        means = {name.removeprefix(prefix): Mean(number * count, count) for name, number in numbers.items()}
        self.recorder.add(means, training=train_eval == "train")

    # Samples ----------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Of a model and a batch what `generate_from_model_and_ref` returns; else transformers' hook of this name."""
        if kwargs or isinstance(args[0], nn.Module):
            return self.generate_from_model_and_ref(*args, **kwargs)
        return super().get_batch_samples(*args)

    def generate_from_model_and_ref(self, model: Model, batch: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Sampled answers of the model and of the reference to a batch's `prompt_input_ids`, as texts.

        There are none of the reference where it is not a model that can be run.
        """
        return self.sample_answers(model, unpadded(batch))

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference is a model that can be run at any time, also after training."""
        return self.reference is not None and (self.reference.is_policy or self.reference.model is not self.model)

    def sample_answers(self, model: Model, prompts: Sequence[Tensor]) -> tuple[list[str], list[str]]:
        """Answers of the model, and of the reference if it can be run, to prompts (1-D token ids), as texts."""

        def sample(unwrapped: Model) -> list[str]:
            return sampled_texts(
                unwrapped,
                prompts,
                tokenizer=self.tokenizer,
                config=self.config,
                padding_value=self.padding_value,
                step=self.state.global_step,
            )

        with without_dropout(model), torch.no_grad():
            policy = sample(self.accelerator.unwrap_model(model))
        if self.reference is None or not self.has_reference_model:
            return policy, []
        with self.reference.active() as reference:
            return policy, sample(placed(reference, self.config.device))

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """A table of prompts and the answers of policy and reference, if `generate_during_eval` asks for it."""
        config = self.config
        if not config.generate_during_eval:
            return
        seed = sampling_seed(config.seed, rank=0, draw=self.state.global_step)
        prompts = prompts_to_sample(dataloader.dataset, config.num_eval_samples, seed=seed)
        prompts = prompts[config.process_index :: world_size()]
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        answers: tuple[list[str], list[str]] = ([], [])
        if prompts:
            rows = [
                {"prompt_input_ids": prompt, "prompt_attention_mask": torch.ones_like(prompt)} for prompt in prompts
            ]
            collate = DPODataCollatorWithPadding(self.padding_value, is_encoder_decoder=self.is_encoder_decoder)
            answers = self.get_batch_samples(self.model, {**collate(rows), "prompt": texts})
        names = ["prompt", "policy", "reference"] if self.has_reference_model else ["prompt", "policy"]
        table = list(zip(*[texts, *answers][: len(names)], strict=True))
        turns = itertools.zip_longest(*gather_over_ranks(table))
        self.tables.add(self, f"{prefix}_samples", names, [row for turn in turns for row in turn if row is not None])
