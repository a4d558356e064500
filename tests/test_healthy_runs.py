"""Healthy runs of PPO, GRPO and DDPO with other seeds, models and rewards learn, and raise no alarm."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import pytest
import torch
from tests.diffusion.test_ddpo_inputs import redness
from tests.diffusion.test_ddpo_inputs import trainer as ddpo
from tests.lm import tiny
from tests.lm.grpo.run_distributed import trainer as grpo

pytestmark = pytest.mark.slow


@contextmanager
def without_alarm() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*health/")
        yield


def share_of(letters: str) -> Any:
    ids = torch.tensor([tiny.VOCABULARY[letter] for letter in letters])
    return lambda response: float(torch.isin(response, ids).double().mean())


def likes_to_end(response: torch.Tensor) -> float:
    return float(response[-1] == tiny.EOS)


def likes_short(response: torch.Tensor) -> float:
    return -0.1 * len(response)


PPO: dict[str, tuple[Any, int, Any, dict[str, Any]]] = {
    "gpt2, vowels": (tiny.gpt2, 0, share_of("aeiou"), {}),
    "gpt2, an end": (tiny.gpt2, 1, likes_to_end, {"use_score_scaling": True, "use_score_norm": True}),
    "llama, a letter": (tiny.llama, 2, share_of("abcdefgh"), {"whiten_rewards": True}),
    "llama, brevity": (tiny.llama, 3, likes_short, {"adap_kl_ctrl": False}),
    "gpt2, four passes": (tiny.gpt2, 4, share_of("nrst"), {"ppo_epochs": 4, "learning_rate": 5e-4, "vf_coef": 0.5}),
}
# Their critics learn, but stay worse than a constant during the whole run.
PPO |= {f"llama, brevity, {seed}": (tiny.llama, seed, likes_short, {"adap_kl_ctrl": False}) for seed in (20, 21)}
PPO |= {f"gpt2, slow, {seed}": (tiny.gpt2, seed, share_of("aeiou"), {"learning_rate": 1e-4}) for seed in (26, 30)}


@pytest.mark.parametrize("name", PPO)
def test_ppo(name: str) -> None:
    build, seed, reward, config = PPO[name]
    settings = {"batch_size": 32, "mini_batch_size": 16, "ppo_epochs": 2, "learning_rate": 1e-3, "seed": seed}
    trainer = tiny.ppo(tiny.with_value_head(build(seed), seed), **settings | {"target": 4.0} | config)
    scores = []
    with without_alarm():
        for step in range(40):
            queries = tiny.rows(32, 2, 5, seed=100 * seed + step)
            responses = trainer.generate(queries, return_prompt=False, do_sample=True, max_new_tokens=12)
            scores.append(trainer.step(queries, responses, [reward(row) for row in responses])["ppo/mean_scores"])
    assert "slow" in name or fmean(scores[-5:]) > fmean(scores[:5])


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1) for text in completions]


def brevity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-float(len(ids)) for ids in completion_ids]


GRPO: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2, vowels": (tiny.gpt2(5), vowels, {"beta": 0.05}),
    "llama, brevity": (tiny.llama(6), brevity, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gpt2, two passes": (tiny.gpt2(7), vowels, {"num_iterations": 2, "temperature": 0.8}),
}


@pytest.mark.parametrize("name", GRPO)
def test_grpo(name: str, tmp_path: Any) -> None:
    model, reward, config = GRPO[name]
    sizes = {"per_device_train_batch_size": 4, "num_generations": 8, "max_completion_length": 12, "learning_rate": 1e-3}
    trainer = grpo(str(tmp_path), model, reward, rollout=None, max_steps=30, **sizes, **config)
    with without_alarm():
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert fmean(rewards[-5:]) > fmean(rewards[:5])


DDPO: dict[str, dict[str, Any]] = {
    "importance sampling": {"seed": 8},
    "a KL penalty": {"seed": 9, "init_kl_coef": 0.1},
}


@pytest.mark.parametrize("name", DDPO)
def test_ddpo(name: str) -> None:
    sizes = {"sample_batch_size": 8, "train_batch_size": 8, "train_learning_rate": 1e-3, "train_clip_range": 1e-2}
    trainer = ddpo(redness, **sizes, **DDPO[name])
    rewards = []
    with without_alarm():
        for epoch in range(20):
            trainer.step(epoch, trainer.global_step)
            rewards.append(trainer.last_stats["reward_mean"])
    assert fmean(rewards[-5:]) > fmean(rewards[:5])
