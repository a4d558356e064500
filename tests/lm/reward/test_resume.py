"""A training that stops and resumes equals an uninterrupted one to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.lm import tiny
from tests.lm.reward.run_distributed import pairs, scorer, trainer
from tests.marks import slow_but

DROPOUT = {"gpt2": {"resid_pdrop": 0.3}, "bert": {"hidden_dropout_prob": 0.3}, "llama": {"attention_dropout": 0.3}}


def run(kind: str, folder: Path, *, resume: str | None = None, **settings: Any) -> Any:
    """Runs six steps over ten pairs: three steps per epoch, the last of them short."""
    adapters = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2)} if kind == "llama" else {}
    reward_trainer = trainer(
        scorer(kind, **DROPOUT[kind]),
        folder,
        {"train_dataset": pairs(10, with_margin=True), **adapters},
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=1,
        logging_strategy="steps",
        logging_steps=1,
        init_reward_head=True,
        **settings,
    )
    reward_trainer.train(resume_from_checkpoint=resume)
    return reward_trainer


@pytest.mark.parametrize("kind", slow_but(DROPOUT, "gpt2"))
def test_resuming_in_mid_epoch_changes_no_bit(kind: str, tmp_path):
    whole = run(kind, tmp_path / "whole")
    for step in (2, 4):
        resumed = run(kind, tmp_path / "again", resume=str(tmp_path / "whole" / f"checkpoint-{step}"))
        for name, weight in tiny.weights(whole.model).items():
            assert torch.equal(weight, tiny.weights(resumed.model)[name]), name
        logs = [
            [log for log in reward_trainer.state.log_history if "loss" in log] for reward_trainer in (whole, resumed)
        ]
        assert len(logs[0]) == 6
        assert logs[0] == logs[1]


def test_dropout_and_the_order_of_the_pairs_matter(tmp_path):
    """The test above relies on both being active."""
    base = tiny.weights(run("gpt2", tmp_path / "base").model)
    still = run("gpt2", tmp_path / "still", disable_dropout=True)
    other = run("gpt2", tmp_path / "other", data_seed=7)
    assert tiny.moved(base, still.model)
    assert tiny.moved(base, other.model)
