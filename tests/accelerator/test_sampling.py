"""Samplers, environments and reward models on an accelerator."""

import gc
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.accelerator.runs import ACCELERATOR, Case, grpo, ppo
from tests.lm import tiny
from tests.lm.environments.conversations import Echo, rollout, sampler
from tests.lm.sampling.fast.test_loop import tokens_read
from tests.test_every_trainer import length
from torch import Tensor

from trimtab_common.accelerators import memory_of
from trimtab_lm.rewards.model import RewardModel
from trimtab_lm.sampling import generate
from trimtab_lm.sampling.fast.loop import LOOK_EVERY
from trimtab_lm.sampling.generate import Completer
from trimtab_lm.sampling.rollout import sampling_config

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]
GRPO = Case("grpo", "causal", "full", "float32")
PPO = Case("ppo", "causal", "full", "float32")


def trains(trainer: Any) -> None:
    before = tiny.weights(trainer.model)
    trainer.train()
    assert trainer.args.device.type == ACCELERATOR
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


def completions(ends: list[int], **options: Any) -> tuple[list[list[int]], list[Tensor]]:
    model = tiny.llama().to(ACCELERATOR).eval()
    config = sampling_config(model, tiny.tokenizer(), max_new_tokens=40, do_sample=True, eos_token_id=ends)[0]
    torch.manual_seed(0)
    rollout = Completer(model, config, eos_ids=ends, **options)(tiny.rows(4, 3, 9), 3)
    assert rollout.logprobs is not None
    return [row.tolist() for row in rollout.completions], rollout.logprobs


def test_a_look_every_16_tokens_samples_what_a_look_at_each_token_does(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    device.clear()
    tokens, logprobs = completions([1, 2])
    rare = sum(device.waits().values())
    lengths = sorted(map(len, tokens))
    assert lengths[0] < 16 < lengths[-1]
    monkeypatch.setitem(LOOK_EVERY, ACCELERATOR, 1)
    device.clear()
    tokens_of_each, logprobs_of_each = completions([1, 2])
    assert tokens == tokens_of_each
    torch.testing.assert_close(logprobs, logprobs_of_each)
    assert sum(device.waits().values()) - rare >= lengths[-1] - 3


def test_as_many_rows_are_sampled_at_a_time_as_the_memory_has_room_for(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """Half of what training leaves is enough for them, and all rows at a time are too many for the small memory."""
    gc.collect()
    others = device.memory_allocated()  # what earlier tests have left, which is not part of the memory here
    prompts, model = tiny.rows(64, 10, 10), tiny.llama().to(ACCELERATOR).eval()
    own = device.memory_allocated() - others
    config = sampling_config(model, tiny.tokenizer(), max_new_tokens=40, do_sample=True)[0]
    batches = {}
    try:
        for name, room in (("small", 1 << 18), ("large", 64 << 20)):
            device.set_total_memory(others + 5 * own + room)
            memory_of.cache_clear()
            assert memory_of(torch.device(ACCELERATOR)) == others + 5 * own + room
            monkeypatch.setattr(generate, "memory_of", lambda _, memory=5 * own + room: memory)
            sample = partial(Completer(model, config, eos_ids=[]), prompts)
            batches[name] = [rows for rows, tokens in tokens_read(model, sample) if tokens > 1]
        device.set_total_memory(others + 5 * own + (1 << 18))
        with pytest.raises(torch.OutOfMemoryError):
            Completer(model, config, eos_ids=[], batch_size=64)(prompts)
    finally:
        memory_of.cache_clear()
        device.set_total_memory(1 << 30)
    assert batches["large"] == [64]
    assert len(batches["small"]) > 3
    assert sum(batches["small"]) == 64


def test_an_environment_with_grpo(tmp_path: Path):
    trains(grpo(GRPO, tmp_path, None, rollout=rollout(sampler(), Echo), save_strategy="no"))


def test_an_environment_with_ppo(tmp_path: Path):
    trainer = ppo(PPO, tmp_path, rollout=rollout(sampler(), Echo))
    before = tiny.weights(trainer.actor_critic)
    trainer.train(steps=1)
    assert tiny.moved(before, trainer.actor_critic)


@pytest.mark.parametrize("where", ["cpu", ACCELERATOR])
def test_a_reward_model(where: str, tmp_path: Path):
    scorer = tiny.scorer().to(where)
    trains(grpo(GRPO, tmp_path, RewardModel(scorer, tiny.tokenizer(), batch_size=4), save_strategy="no"))


def test_a_reward_model_scores_as_on_the_cpu():
    texts = ["a query", "so", "what is it"]
    scores = [RewardModel(tiny.scorer().to(where), tiny.tokenizer())(texts, texts) for where in ("cpu", ACCELERATOR)]
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]))
