"""The chain of documented methods of TRL 0.7 to 0.11; it trains if a subclass or an assignment replaces one.

    tokenize_row -> concatenated_inputs -> concatenated_forward -> get_batch_logps -> dpo_loss -> get_batch_loss_metrics

The chain runs on padded rows and computes logits of the whole vocabulary. Where nothing is replaced, DPOTrainer scores
the same tokens in fewer positions, without logits: see `algorithm.compare`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab_common.overrides import call_with_known, replaced
from trimtab_common.sharding import placed
from trimtab_common.stats import Mean
from trimtab_lm.hf.adapter import REAL_ROWS, dropout_off
from trimtab_lm.hf.types import Batch, BatchLoss
from trimtab_lm.interface import Model, base_of
from trimtab_lm.tokens.layout import from_labels, sum_per_sequence
from trimtab_lm.tokens.positions import positioned
from trimtab_lm.tokens.router import refuse_router_loss
from trimtab_lm.tokens.scores import score_logits

from .algorithm import PairScores
from .collator import (
    DPODataCollatorWithPadding,
    PreferencePairCollator,
    check_lengths,
    count_pairs,
    decoder_inputs,
)
from .config import DPOConfig
from .loss import mixed
from .setup import load_reference, make_reference
from .statistics import pair_statistics

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
        changed = trainer.config.with_setting(self.name, value)
        trainer.chain.check_loss(changed)
        if trainer.reference is None and not changed.reference_free:
            raise ValueError(
                f"{self.name}={value!r} needs a reference, and the trainer was made without one, for "
                f"loss_type={trainer.loss_type!r}, reference_free={trainer.reference_free}. Make a trainer with "
                f"{self.name}={value!r}."
            )
        vars(trainer.config).update(vars(changed))


class FixedSetting(Setting):
    """A field of the trainer's config that models were made by; assigned, it is an error."""

    def __set__(self, trainer: Any, value: Any) -> None:
        if value != getattr(trainer.config, self.name):
            raise ValueError(
                f"{self.name}={value!r} came after the trainer had made its models and datasets with "
                f"{getattr(trainer.config, self.name)!r}. Make a trainer with DPOConfig({self.name}={value!r})."
            )


class RefModel:
    """`DPOTrainer.ref_model`: the reference, a model or, assigned, its name.

    It is None where the reference is the policy, or where there is none.
    """

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        fixed = trainer.reference
        if fixed is None or fixed.is_policy or fixed.model is trainer.model:
            return None
        return placed(fixed.model, trainer.config.device)

    def __set__(self, trainer: Any, model: Model | str | None) -> None:
        loaded = load_reference(model, trainer.config, trainer.peft_config)
        trainer.reference = make_reference(trainer.model, loaded, trainer.config, trainer.accelerator)
        trainer.datasets.open_cache()


class Chain2024:
    """The chain of one trainer, and values that its methods pass on outside 2024's signatures.

    Args:
        documented: the class that documents them.
    """

    def __init__(self, trainer: Any, documented: type) -> None:
        self.trainer, self.documented = trainer, documented
        self.lengths: tuple[Tensor, Tensor] | None = None  # tokens in each of the answers that dpo_loss gets
        self.predictions: Tensor | None = None  # outputs of the last batch, for compute_metrics
        self.pairs = 1  # pairs of the batch whose metrics are stored

    def replaces(self, *names: str) -> bool:
        """Whether a subclass or an assignment replaces one of these methods."""
        return bool(replaced(self.trainer, self.documented, *names))

    @property
    def runs(self) -> bool:
        """Whether the chain trains."""
        return bool(replaced(self.trainer, self.documented, *CHAIN))

    def check_loss(self, config: DPOConfig) -> None:
        """Raise ValueError if the config's loss is not in `LOSSES`, and no method that computes a loss is replaced."""
        if not self.replaces("dpo_loss", "get_batch_loss_metrics", "compute_loss"):
            mixed(config.loss_type, config.loss_weights)

    def collator(self, given: Any) -> Any:
        """The caller's collator, or the collator of the path in use, with the trainer's present settings."""
        if not isinstance(given, PreferencePairCollator):
            return given
        trainer = self.trainer
        if self.runs:
            kind, pad = trainer.is_encoder_decoder, trainer.padding_value
            return DPODataCollatorWithPadding(pad, trainer.config.label_pad_token_id, is_encoder_decoder=kind)
        given.pad_token_id, given.label_pad_token_id = trainer.padding_value, trainer.config.label_pad_token_id
        return given

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """The loss of `get_batch_loss_metrics`, a mean over the pairs, as this batch's part of the optimizer step."""
        real = batch.get(REAL_ROWS)
        shown = None if real is None else max(real, 1)  # every process needs a pair for its forward pass
        rows = {name: column[:shown] for name, column in batch.items() if name != REAL_ROWS}
        train_eval = "train" if model.training else "eval"
        count = self.pairs = count_pairs(rows) if real is None else real
        loss, metrics = self.trainer.get_batch_loss_metrics(model, rows, train_eval)
        self.trainer.store_metrics(metrics, train_eval)
        self.pairs = 1
        outputs: dict[str, Any] = dict(metrics)
        predictions, self.predictions = self.predictions, None
        if predictions is not None:  # else the method was replaced
            missing = count_pairs(batch) - len(predictions)  # evaluation drops the rows that repeat others
            predictions = F.pad(predictions, (0, 0, 0, missing))
            labels = torch.zeros(len(predictions), dtype=torch.long, device=predictions.device)
            outputs |= {"predictions": predictions, "labels": labels}
        return BatchLoss(loss * count / items, {"loss": Mean(loss.detach() * count, count)}, outputs)

    def loss_and_metrics(self, model: nn.Module, batch: Batch, train_eval: str) -> tuple[Tensor, dict[str, float]]:
        """`DPOTrainer.get_batch_loss_metrics`."""
        trainer, self.lengths = self.trainer, None
        policy = trainer.concatenated_forward(model, batch)
        lengths, chosen_logps, rejected_logps = self.lengths, policy[0], policy[1]
        if isinstance(policy, PairScores):
            lengths = policy.chosen_length, policy.rejected_length
        ref_chosen, ref_rejected = trainer.compute_reference_log_probs(batch)
        self.lengths = lengths
        losses, chosen, rejected = trainer.dpo_loss(
            chosen_logps, rejected_logps, ref_chosen.to(chosen_logps), ref_rejected.to(chosen_logps)
        )
        self.lengths = None
        self.predictions = torch.stack([chosen, rejected, chosen_logps, rejected_logps], dim=1).detach()
        stats = pair_statistics(policy, losses, chosen, rejected)
        prefix = "eval_" if train_eval == "eval" else ""
        return losses.mean(), {f"{prefix}{name}": stat.value for name, stat in stats.items() if name != "loss"}

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """`DPOTrainer.concatenated_forward` where the chain runs."""
        trainer, config = self.trainer, self.trainer.config
        refuse_router_loss(trainer.model, "DPOTrainer with a replaced method", "")
        kind: dict[str, Any] = {"is_encoder_decoder": trainer.is_encoder_decoder}
        kind["label_pad_token_id"] = config.label_pad_token_id
        sizes = {"padding_value": trainer.padding_value, "device": trainer.accelerator.device}
        joined = call_with_known(trainer.concatenated_inputs, batch, **kind, **sizes)
        labels = joined["concatenated_labels"]
        counted = labels != config.label_pad_token_id
        lengths = counted[:, 0 if trainer.is_encoder_decoder else 1 :].sum(1)
        check_lengths(lengths)
        inputs = {name: joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
        if trainer.is_encoder_decoder:
            start, marked = trainer.decoder_start_token_id or 0, labels.masked_fill(~counted, -100)
            inputs |= decoder_inputs(marked, start=start, padding_value=trainer.padding_value)
        with dropout_off(trainer, model):
            logits = model(**positioned(base_of(trainer.model).forward, inputs), use_cache=False).logits
        logits = logits[:, -labels.shape[1] :]  # without those of learned prompts, which PEFT puts before the tokens
        logps = call_with_known(trainer.get_batch_logps, logits, labels, **kind)
        logps = logps[0] if isinstance(logps, tuple) else logps  # TRL 0.9 returns the lengths as well
        half = len(labels) // 2
        self.lengths = lengths[:half], lengths[half:]
        return logps[:half], logps[half:], logits[:half], logits[half:]

    def store(self, metrics: Mapping[str, Any], train_eval: str) -> None:
        """`DPOTrainer.store_metrics`."""
        count, prefix = self.pairs, "eval_" if train_eval == "eval" else ""
        numbers = {
            name: float(torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().mean())
            for name, value in metrics.items()
        }
        means = {name.removeprefix(prefix): Mean(number * count, count) for name, number in numbers.items()}
        self.trainer.recorder.add(means, training=train_eval == "train")


def get_batch_logps(
    logits: Tensor,
    labels: Tensor,
    average_log_prob: bool = False,
    label_pad_token_id: int = -100,
    is_encoder_decoder: bool = False,
) -> Tensor:
    """Log-probabilities of labels [B, T] under logits [B, T, V], summed over each row, or averaged: [B].

    A decoder's label is predicted by the position before it, an encoder-decoder's by its own.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {list(logits.shape)} and labels {list(labels.shape)} differ in rows or positions.")
    labels = labels.masked_fill(labels == label_pad_token_id, -100)
    tokens = from_labels(labels, is_encoder_decoder=is_encoder_decoder)
    logprobs = score_logits(logits.flatten(0, 1)[tokens["source"]], tokens["targets"]).logprobs
    sums = sum_per_sequence(logprobs, tokens["sequence"], len(labels))
    return sums / tokens["lengths"] if average_log_prob else sums
