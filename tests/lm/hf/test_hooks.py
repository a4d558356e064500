"""Hooks of transformers.Trainer overridden with the parameters of 2024 train like the trainer's own."""

from typing import Any

import pytest
import torch
from tests import test_every_trainer as every
from tests.lm import tiny
from tests.lm.dpo.run_training import DROPLESS
from tests.lm.dpo.test_trainer import assert_equal_weights

from trimtab_lm import GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = every.SETTINGS | {
    "max_steps": 2,
    "gradient_checkpointing": False,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "optim": "sgd",
    "save_strategy": "no",
}


class HandsOn:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return super().compute_loss(model, inputs, return_outputs)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any) -> Any:
        return super().training_step(model, inputs)  # type: ignore[misc]

    def log(self, logs: dict[str, float]) -> None:
        super().log(logs | {"own": 1.0})  # type: ignore[misc]


class StepOnly:
    def training_step(self, model: Any, inputs: Any) -> Any:
        return super().training_step(model, inputs)  # type: ignore[misc]


class MeanOfLabels:
    """Uses the model's own mean over the micro-batch's tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class PairsOf2024:
    """Computes RewardTrainer's documented loss on padded columns."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        chosen, rejected = (
            model(input_ids=inputs[f"input_ids_{side}"], attention_mask=inputs[f"attention_mask_{side}"])["logits"]
            for side in ("chosen", "rejected")
        )
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        return (loss, {"rewards_chosen": chosen, "rewards_rejected": rejected}) if return_outputs else loss


def sft(kind: Any, folder: Any) -> Any:
    rows = every.Dataset.from_dict({"text": every.WORDS})
    args = SFTConfig(str(folder), **SETTINGS)
    return kind(tiny.exact(tiny.gpt2(**DROPLESS)), args, None, rows, rows, processing_class=tiny.tokenizer())


def reward(kind: Any, folder: Any) -> Any:
    args, rows = RewardConfig(str(folder), disable_dropout=True, **SETTINGS), every.PREFERENCES
    return kind(tiny.scorer().double(), args, None, rows, rows.select(range(3)), processing_class=tiny.tokenizer())


@pytest.mark.parametrize(
    ("base", "build", "kinds"),
    [(SFTTrainer, sft, (HandsOn, StepOnly, MeanOfLabels)), (RewardTrainer, reward, (HandsOn, StepOnly, PairsOf2024))],
)
def test_hooks_of_2024_train_as_the_trainers_own(base: Any, build: Any, kinds: Any, tmp_path: Any) -> None:
    plain = build(base, tmp_path / "plain")
    plain.train()
    for kind in kinds:
        trainer = build(type("Own", (kind, base), {}), tmp_path / kind.__name__)
        trainer.train()
        expected = tiny.weights(plain.model)
        for name, weight in tiny.weights(trainer.model).items():  # transformers computes its own loss in float32
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-7)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=0.1)
        if kind is HandsOn:
            assert [entry["own"] for entry in trainer.state.log_history if "loss" in entry] == [1.0, 1.0]


def test_hooks_of_2024_may_be_assigned(tmp_path: Any) -> None:
    trainer = sft(SFTTrainer, tmp_path)
    seen: list[str] = []
    log, loss, step = trainer.log, trainer.compute_loss, trainer.training_step
    trainer.log = lambda logs: (seen.append("log"), log(logs))[1]
    trainer.compute_loss = lambda model, inputs, return_outputs=False: (seen.append("loss"), loss(model, inputs))[1]
    trainer.training_step = lambda model, inputs: (seen.append("step"), step(model, inputs))[1]
    trainer.train()
    assert {"log", "loss", "step"} == set(seen)


def test_grpo_takes_a_loss_of_2024(tmp_path: Any) -> None:
    class Own(HandsOn, GRPOTrainer):
        pass

    def train(kind: Any, folder: str) -> Any:
        every_settings = SETTINGS | {"per_device_train_batch_size": 4}
        args = every.GRPOConfig(str(tmp_path / folder), num_generations=2, max_completion_length=3, **every_settings)
        rows = every.Dataset.from_dict({"prompt": every.WORDS})
        trainer = kind(tiny.exact(tiny.gpt2(**DROPLESS)), every.length, args, rows, processing_class=tiny.tokenizer())
        trainer.train()
        return tiny.weights(trainer.model)

    assert_equal_weights(train(GRPOTrainer, "a"), train(Own, "b"))


def test_pairs_are_shown_where_they_are_asked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = reward(RewardTrainer, tmp_path)
    tables: list[Any] = []
    monkeypatch.setattr(trainer.tables, "add", lambda trainer, name, columns, rows: tables.append((name, len(rows))))
    trainer.visualize_samples(2)
    trainer.visualize_samples(-1)
    assert tables == [("eval_pairs", 2), ("eval_pairs", 3)]
    assert "eval_loss" in trainer.evaluate()
