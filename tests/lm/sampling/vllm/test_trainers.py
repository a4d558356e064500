"""GRPO, PPO and best of n with vLLM's engine, in the process and as a server; run by `make test-vllm`."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.grpo.run_distributed import trainer as grpo
from tests.lm.grpo.test_resume import Stop
from tests.lm.sampling import wide
from tests.lm.sampling.vllm.conftest import Server
from tests.processes import launch_by_torchrun

from trimtab_lm import BestOfNSampler
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.rollout import SamplingSettings

pytest.importorskip("vllm", reason="vLLM's engine is not installed here: make test-vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:step .* health/")]

SAMPLED, GREEDY = {"temperature": 1.0}, {"temperature": 0.05}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    yield wide.saved(tmp_path / "policy", seed=2)
    gc.collect()  # the engine of one test ends before the next one is built


@pytest.fixture(params=["vllm", "vllm_server"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the settings with which a trainer chooses the backend."""
    if request.param == "vllm":
        kwargs: dict[str, Any] = {"enforce_eager": True, "max_model_len": wide.LENGTH}
    else:
        servers: list[Server] = request.getfixturevalue("servers")
        kwargs = {"servers": [servers[0].address], "retries": 1}
    return {"rollout_backend": request.param, "rollout_backend_kwargs": kwargs}


def assert_on_policy(logs: list[dict[str, float]], prefix: str = "") -> None:
    """Asserts that trainer and sampler give every token the same probability in every step, while weights change."""
    assert len(logs) == 3
    for entry in logs:
        assert entry[f"{prefix}sampling/token_ratio/max"] == pytest.approx(1, abs=1e-3)
        assert entry[f"{prefix}sampling/token_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert entry[f"{prefix}sampling/importance_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert entry[f"{prefix}sampling/token_ratio/truncated"] == 0


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_grpo_stays_on_policy(folder: str, backend: dict[str, Any], sampling: dict[str, float], tmp_path: Path):
    model = wide.loaded(folder)
    before = tiny.weights(model)
    settings = {"max_steps": 3, "importance_sampling_cap": 2.0, "learning_rate": 1e-3, **sampling, **backend}
    trainer = grpo(str(tmp_path / "run"), model, rollout=None, **settings)
    trainer.train()
    assert_on_policy([entry for entry in trainer.state.log_history if "loss" in entry])
    assert tiny.moved(before, model)["lm_head.weight"] > 1e-4


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_ppo_stays_on_policy(folder: str, backend: dict[str, Any], sampling: dict[str, float]):
    model = tiny.with_value_head(wide.loaded(folder))
    before = tiny.weights(model)
    rows = Dataset.from_dict({"query": [letter * 3 for letter in "abcdefgh"]})
    trainer = tiny.ppo(model, arguments={"dataset": rows}, steps=3, importance_sampling_cap=2.0, **sampling, **backend)
    history = trainer.train(
        lambda completions: [text.count("a") / 8 for text in completions], generation_kwargs={"max_new_tokens": 6}
    )
    assert_on_policy(history, "ppo/")
    assert tiny.moved(before, trainer.model)
    responses = trainer.generate(wide.PROMPTS, return_prompt=False)
    assert all(0 < len(row) <= 6 for row in responses)


@pytest.mark.parametrize(
    ("is_sharded", "is_asynchronous"),
    [(False, False), (True, False), (True, True)],
    ids=["whole", "sharded", "sharded and ahead"],
)
def test_two_processes_train_on_the_samples_of_one_server(
    folder: str, servers: list[Server], tmp_path: Path, is_sharded: bool, is_asynchronous: bool
):
    """The first process sends the weights, which FSDP2 may divide; both processes sample from them."""
    args = (str(tmp_path), folder, servers[0].address, str(is_sharded), str(is_asynchronous))
    launch_by_torchrun("tests.lm.sampling.vllm.run_trainers", *args, processes=2)
    for rank in range(2):
        logs = torch.load(tmp_path / f"{rank}.pt")
        if is_asynchronous:
            assert [entry["sampling/steps_behind"] for entry in logs] == [0, 1, 1]
            assert logs[0]["sampling/token_ratio/max"] == pytest.approx(1, abs=1e-3)
        else:
            assert_on_policy(logs)


def test_grpo_and_ppo_sample_ahead_on_a_server(folder: str, servers: list[Server], tmp_path: Path):
    """The first two rollouts use the first weights: the second is one update behind, as the ratio shows."""
    backend = {"rollout_backend": "vllm_server", "rollout_backend_kwargs": {"servers": [servers[0].address]}}
    settings = {"asynchronous_rollouts": True, "learning_rate": 1e-2, **backend}
    trainer = grpo(str(tmp_path / "run"), wide.loaded(folder), rollout=None, max_steps=4, **settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["sampling/steps_behind"] for entry in logs] == [0, 1, 1, 1]
    assert logs[0]["sampling/token_ratio/max"] == pytest.approx(1, abs=1e-3)
    assert all(entry["sampling/token_ratio/max"] > 1.01 for entry in logs[1:])
    rows = Dataset.from_dict({"query": [letter * 3 for letter in "abcdefgh"]})
    ppo = tiny.ppo(tiny.with_value_head(wide.loaded(folder)), arguments={"dataset": rows}, steps=4, **settings)
    history = ppo.train(
        lambda completions: [text.count("a") / 8 for text in completions], generation_kwargs={"max_new_tokens": 6}
    )
    assert [entry["ppo/sampling/steps_behind"] for entry in history] == [0, 1, 1, 1]
    assert history[0]["ppo/policy/ratio"] == pytest.approx(1, abs=1e-3)
    assert all(abs(entry["ppo/policy/ratio"] - 1) > 1e-3 for entry in history[1:])


def test_best_of_n_keeps_the_best_of_the_engines_samples(folder: str, backend: dict[str, Any]):
    settings = SamplingSettings(6, temperature=1.5)
    rollout = make_backend(backend["rollout_backend"], settings, tiny.tokenizer(), backend["rollout_backend_kwargs"])
    seen: list[str] = []

    def score(texts: list[str]) -> list[float]:
        seen.extend(texts)
        return [float(text.count("e")) for text in texts]

    sampler = BestOfNSampler(wide.loaded(folder), tiny.tokenizer(), score, None, sample_size=8, seed=0, rollout=rollout)
    (best,) = sampler.generate(wide.PROMPTS[0])
    assert len(set(seen)) > 1
    assert best == [max(seen, key=lambda text: text.count("e"))]


@pytest.mark.parametrize(
    ("backend", "is_asynchronous"),
    [("vllm", False), ("vllm_server", False), ("vllm_server", True)],
    ids=["vllm in turn", "vllm_server in turn", "vllm_server ahead"],
    indirect=["backend"],
)
def test_a_resumed_training_samples_what_it_would_have_sampled(
    folder: str, backend: dict[str, Any], tmp_path: Path, is_asynchronous: bool
):
    """Four steps give the same completions and weights as two steps, a checkpoint, and two more steps."""

    def run(name: str, steps: int, resume: bool = False) -> tuple[list[list[int]], Any]:
        sampled: list[list[int]] = []

        def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
            sampled.extend(completion_ids)
            return [float(text.count("a")) for text in completions]

        model = wide.loaded(folder)
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, **backend}
        settings |= {"asynchronous_rollouts": is_asynchronous}
        trainer = grpo(str(tmp_path / name), model, reward, rollout=None, **settings)
        if not resume:
            trainer.add_callback(Stop(steps))
        trainer.train(resume_from_checkpoint=resume)
        return sampled, tiny.weights(model)

    whole, weights = run("whole", 4)
    gc.collect()
    first, _ = run("parts", 2)
    gc.collect()
    second, again = run("parts", 4, resume=True)
    assert first + second == whole
    torch.testing.assert_close(again, weights, rtol=0, atol=0)
