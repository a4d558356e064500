"""Types shared by callers, `transformers.Trainer` and trimtab's trainers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor
from transformers import EvalPrediction, TrainerCallback

from trimtab_lm.data.formats import Row
from trimtab_lm.interface import Data

if TYPE_CHECKING:
    import optuna

Batch: TypeAlias = dict[str, Any]
"""What a collator makes of rows: tensors by name."""
Collate: TypeAlias = Callable[[Sequence[Row]], Batch]
"""A data collator: from rows to a batch."""
DataSource: TypeAlias = Data | torch.utils.data.Dataset[Row]
"""A dataset or stream of `datasets`, or one of torch."""
EvalSource: TypeAlias = DataSource | dict[str, DataSource]
"""A dataset for evaluation, or several by name."""
Prediction: TypeAlias = tuple[Tensor | None, Any, Any]
"""Loss, predictions and labels of a batch: tensors or tuples of tensors; None if not asked for."""
ComputeMetrics: TypeAlias = Callable[[EvalPrediction], dict[str, float]]
"""Metrics by name, from the predictions and labels of an evaluation."""
Optimizers: TypeAlias = tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]
"""An optimizer and a learning rate schedule; Trainer makes what is None."""
OptimizerChoice: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, object]]
"""The class of an optimizer, and the arguments of its constructor."""
Trial: TypeAlias = "optuna.Trial | dict[str, Any] | None"
"""A trial of a hyperparameter search."""
Use: TypeAlias = Literal["train", "eval", "test"]
"""What a dataset is for."""


class DataOptions(TypedDict):
    """Datasets as the caller gave them (eval_dataset may be a dict of several), and a collator instead of our own."""

    train_dataset: DataSource | None
    eval_dataset: EvalSource | None
    data_collator: Callable[..., Batch] | None


class TrainerOptions(TypedDict, total=False):
    """Arguments that the adapter hands on to `transformers.Trainer` as they are."""

    compute_metrics: ComputeMetrics | None
    callbacks: list[TrainerCallback] | None
    optimizers: Optimizers
    preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None
    compute_loss_func: Callable[..., Tensor] | None
    optimizer_cls_and_kwargs: OptimizerChoice | None


class BatchLoss(NamedTuple):
    """A trainer's results for a micro-batch.

    Attributes:
        loss: scalar with gradient, the part that the micro-batch has in the loss of its optimizer step.
        stats: statistics for the recorder, of real rows only.
        outputs: returned by `compute_loss(return_outputs=True)`. For `compute_metrics`, `predictions` [B, ...] and
            `labels` [B].
    """

    loss: Tensor
    stats: Mapping[str, object]
    outputs: Mapping[str, Tensor] = {}
