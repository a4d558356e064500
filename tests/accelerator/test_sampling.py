"""Samplers, environments and reward models on an accelerator."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.accelerator.runs import Case, grpo, ppo
from tests.lm import tiny
from tests.lm.environments.conversations import Echo, rollout, sampler
from tests.test_every_trainer import length

from trimtab_lm.rewards.model import RewardModel

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]
GRPO = Case("grpo", "causal", "full", "float32")
PPO = Case("ppo", "causal", "full", "float32")


def trains(trainer: Any) -> None:
    before = tiny.weights(trainer.model)
    trainer.train()
    assert trainer.args.device.type == "musa"
    assert tiny.moved(before, trainer.model)


def test_continuous_batching_with_little_memory(device: ModuleType, tmp_path: Path):
    """Left alone it would fill the free memory with its cache, and fail for want of room to compute in."""
    sizes = {"num_blocks": 16, "max_batch_tokens": 64}
    device.set_total_memory(device.memory_allocated() + (8 << 20))
    try:
        trains(
            grpo(
                GRPO,
                tmp_path,
                length,
                rollout_backend="continuous_batching",
                rollout_backend_kwargs=sizes,
                save_strategy="no",
            )
        )
    finally:
        device.set_total_memory(1 << 30)


def test_an_environment_with_grpo(tmp_path: Path):
    trains(grpo(GRPO, tmp_path, None, rollout=rollout(sampler(), Echo), save_strategy="no"))


def test_an_environment_with_ppo(tmp_path: Path):
    trainer = ppo(PPO, tmp_path, rollout=rollout(sampler(), Echo))
    before = tiny.weights(trainer.actor_critic)
    trainer.train(steps=1)
    assert tiny.moved(before, trainer.actor_critic)


@pytest.mark.parametrize("where", ["cpu", "musa"])
def test_a_reward_model(where: str, tmp_path: Path):
    scorer = tiny.scorer().to(where)
    trains(grpo(GRPO, tmp_path, RewardModel(scorer, tiny.tokenizer(), batch_size=4), save_strategy="no"))


def test_a_reward_model_scores_as_on_the_cpu():
    texts = ["a query", "so", "what is it"]
    scores = [RewardModel(tiny.scorer().to(where), tiny.tokenizer())(texts, texts) for where in ("cpu", "musa")]
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]))
