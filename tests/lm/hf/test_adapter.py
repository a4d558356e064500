"""A minimal trainer on the adapter: a linear model with the mean of squares over rows that count."""

import itertools
import math

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from torch import nn

from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Mean
from trimtab_lm.hf.adapter import REAL_ROWS, BatchLoss, DataOptions, TrainerAdapter, prepare_datasets
from trimtab_lm.hf.config import TrainerConfig

VALUES = [1.0, 2.0, -3.0, 4.0, 0.5, -1.0, 2.5]
COUNTS = [1, 0, 1, 1, 0, 1, 1]


class Line(nn.Module):
    def __init__(self, weight=2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.weight * x)


class LineTrainer(TrainerAdapter[TrainerConfig, torch.Tensor]):
    trains_without_dropout = True

    def prepare_model(self, model):
        return model

    def tokenize_dataset(self, dataset, use):
        return dataset.map(lambda row: {"x": row["x"] * 2})

    def count_items(self, batch):
        return batch["counts"].sum()

    def batch_loss(self, model, batch, items):
        squares = (model(batch["x"]) ** 2 * batch["counts"])[: batch.get(REAL_ROWS)]
        stats = {"loss": Mean(squares.detach().sum(), batch["counts"].sum())}
        return BatchLoss(squares.sum() / items, stats, {"predictions": squares, "labels": batch["counts"]})


def rows(values=VALUES):
    return Dataset.from_dict({"x": values, "counts": COUNTS[: len(values)]})


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("x", "counts")}


def make(folder, weight=2.0, values=VALUES, **settings):
    defaults = {
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 1,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
    }
    data = DataOptions(train_dataset=rows(values), eval_dataset=rows(values), data_collator=collate)
    trainer = LineTrainer(Line(weight), TrainerConfig(str(folder), **defaults | settings), tiny.tokenizer(), data=data)
    prepare_datasets(trainer)
    return trainer


MEAN = sum((2 * 2 * x) ** 2 * count for x, count in zip(VALUES, COUNTS, strict=True)) / sum(COUNTS)


@pytest.mark.parametrize(("size", "accumulation"), [(7, 1), (2, 4), (1, 7)])
def test_a_step_is_the_mean_over_its_items_however_it_is_cut(size, accumulation, tmp_path):
    trainer = make(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(MEAN, rel=1e-6)
    assert float(trainer.model.weight) == pytest.approx(2 - 0.01 * 2 * MEAN / 2, rel=1e-9)  # d/dw of w^2 c is 2 w c


def test_an_evaluation_weighs_items_and_a_loss_by_itself_divides_by_its_own(tmp_path):
    trainer = make(tmp_path, per_device_eval_batch_size=2)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(MEAN, rel=1e-9)
    new = trainer.evaluate(rows([1.0]), metric_key_prefix="new")
    assert new["new_loss"] == pytest.approx(16.0)  # a new dataset is prepared: x is doubled
    batch = collate(list(trainer.train_dataset))
    assert float(trainer.compute_loss(trainer.model.train(), batch)) == pytest.approx(MEAN, rel=1e-9)  # without dropout


def test_a_batch_without_counted_items_has_loss_0(tmp_path):
    trainer = make(tmp_path)
    batch = collate([{"x": 1.0, "counts": 0}])
    assert float(trainer.compute_loss(trainer.model, batch)) == 0.0


def test_an_evaluation_counts_nothing_of_one_that_failed(tmp_path):
    trainer = make(tmp_path, per_device_eval_batch_size=2)
    whole, count, expected = trainer.batch_loss, itertools.count(), trainer.evaluate()["eval_loss"]

    def batch_loss(*arguments):
        if next(count) == 1:
            raise ZeroDivisionError
        return whole(*arguments)

    trainer.batch_loss = batch_loss
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert trainer.evaluate()["eval_loss"] == expected


def test_a_loss_that_is_not_finite_moves_no_weight(tmp_path):
    trainer = make(tmp_path, values=[math.inf, 1.0])
    with pytest.raises(TrainingDivergedError, match="in step 1"):
        trainer.train()
    assert float(trainer.model.weight) == 2.0


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    """Trainer would divide batches by torch's DataParallel, which knows no layout of tokens."""
    monkeypatch.setattr(TrainerConfig, "n_gpu", 2)
    with pytest.raises(ValueError, match="sees 2 GPUs, among which LineTrainer does not divide batches"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_train_epochs": -1}, "num_train_epochs=-1 must be a finite number, 0 or above"),
        ({"learning_rate": -1e-4}, "learning_rate=-0.0001 must be"),
        ({"weight_decay": float("nan")}, "weight_decay=nan must be"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 must be"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be a whole number of at least 1"),
        ({"per_device_eval_batch_size": -1}, "per_device_eval_batch_size=-1 must be"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be"),
    ],
)
def test_a_setting_of_transformers_outside_its_range_is_refused(setting, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        make(tmp_path, **setting)
