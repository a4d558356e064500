"""Conversations with vLLM's real engine in the process; run by `make test-vllm`."""

import pytest
import torch
from tests.lm import tiny
from tests.lm.environments.conversations import Echo, rollout
from tests.lm.grpo.run_distributed import trainer
from tests.lm.sampling import wide

from trimtab_lm.sampling.rollout import SamplingSettings
from trimtab_lm.sampling.vllm import VLLMRollout

pytest.importorskip("vllm", reason="vLLM's engine is not installed here: make test-vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_episodes_and_training_over_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    policy = wide.saved(tmp_path / "policy")
    options = {"enforce_eager": True, "max_model_len": wide.LENGTH}
    backend = VLLMRollout(SamplingSettings(4), tiny.tokenizer(), model=policy, **options)
    talk = rollout(backend, Echo)
    model = wide.loaded(policy).eval()
    talk.sync(model, 1)
    sampled = talk.generate(wide.PROMPTS, num_generations=2, version=1, seed=3)
    assert max(sampled.episodes.numbers["turns"]) == 3
    repeated = [prompt for prompt in wide.PROMPTS for _ in range(2)]
    for prompt, ids, logprobs, mask in zip(
        repeated, sampled.completions, sampled.logprobs, sampled.episodes.masks, strict=True
    ):
        policy_logprobs = tiny.taken_of(model, prompt, ids)
        torch.testing.assert_close(logprobs[mask == 1], policy_logprobs[mask == 1], rtol=0, atol=1e-3)
        assert not logprobs[mask == 0].any()
    again = talk.generate(wide.PROMPTS, num_generations=2, version=1, seed=3)
    assert all(torch.equal(one, other) for one, other in zip(sampled.completions, again.completions, strict=True))

    settings = {"max_steps": 2, "learning_rate": 1e-3, "importance_sampling_cap": 2.0, "logging_steps": 1}
    grpo = trainer(str(tmp_path / "run"), model, None, rollout=talk, **settings)
    grpo.train()
    logs = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert all(abs(entry["sampling/importance_ratio/mean"] - 1) < 1e-2 for entry in logs)
    assert all(entry["environment/turns"] > 1 for entry in logs)
