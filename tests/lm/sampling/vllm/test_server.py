"""vLLM's own server samples from the current policy; run by `make test-vllm`."""

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.sampling import wide
from tests.lm.sampling.vllm.conftest import Server

from trimtab_lm.sampling.rollout import SamplingSettings, StaleWeightsError
from trimtab_lm.sampling.vllm import server as vllm_server
from trimtab_lm.sampling.vllm.client import VLLMServerError
from trimtab_lm.sampling.vllm.server import VLLMServerRollout

pytest.importorskip("vllm", reason="vLLM's server is not installed here: make test-vllm")
pytestmark = pytest.mark.vllm

LIMIT = 8


def sampler(servers: list[Server], temperature: float = 0.8, settings: Any = None, **options: Any) -> VLLMServerRollout:
    sampling = SamplingSettings(LIMIT, temperature, **(settings or {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The sampler is not the policy")
        return VLLMServerRollout(
            sampling, tiny.tokenizer(), servers=[server.address for server in servers], **{"retries": 1, **options}
        )


@torch.no_grad()
@pytest.mark.parametrize("adapters", [{}, {"use_dora": True}, None])
def test_the_servers_sample_from_the_policy_after_every_change_of_its_weights(servers: list[Server], adapters: Any):
    policy = wide.llama(seed=3)
    if adapters is not None:
        config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **adapters)
        policy = get_peft_model(policy, config).eval()
    wide.assert_samples_are_the_policys(sampler(servers[:2]), policy, temperature=0.8)


@torch.no_grad()
def test_greedy_completions_are_the_policys_after_a_change_of_its_weights(servers: list[Server]):
    rollouts = sampler(servers[:2], settings={"top_k": 1})
    wide.assert_greedy_completions_follow_the_policy(rollouts, limit=LIMIT)


@torch.no_grad()
def test_a_tied_head_gets_its_weight(servers: list[Server], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_server, "LOGPROBS_MODE", "raw_logprobs")  # equal at temperature 1
    policy, rollouts = wide.llama(seed=3, tie_word_embeddings=True), sampler(servers[2:], temperature=1.0)
    for version in range(2):
        rollouts.sync(policy, version)
        ratios = wide.ratios(
            policy, rollouts.generate(wide.PROMPTS, num_generations=4, version=version, seed=0), 4, 1.0
        )
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-3)
        policy.lm_head.weight.add_(0.05 * torch.randn_like(policy.lm_head.weight))


def test_one_seed_gives_one_rollout_however_many_servers_share_it(servers: list[Server]):
    policy, rollouts = wide.llama(), []
    for chosen, seed in ((servers[:2], 1), (servers[:1], 1), (servers[:2], 2)):
        backend = sampler(chosen, temperature=1.5)
        backend.sync(policy, 0)
        rows = backend.generate([wide.PROMPTS[0]] * 4, num_generations=2, version=0, seed=seed).completions
        rollouts.append([row.tolist() for row in rows])
    assert rollouts[0] == rollouts[1] != rollouts[2]
    assert len({tuple(row) for row in rollouts[0]}) > 4


def test_old_weights_and_prompts_without_room_are_refused(servers: list[Server]):
    rollouts = sampler(servers[:2])
    with pytest.raises(StaleWeightsError):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)
    rollouts.sync(wide.llama(), 0)
    with pytest.raises(ValueError, match=r"prompt of 57 tokens with 8 new ones is too long: 65 .* 64 positions. Lower"):
        rollouts.generate(tiny.rows(1, 57, 57), num_generations=1, version=0, seed=0)
    other = sampler(servers[:1])
    other.sync(wide.llama(seed=5), 0)
    with pytest.raises(StaleWeightsError, match=rf"{servers[0].address} sampled with the weights .* another run sends"):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)


def test_a_server_of_another_model_is_refused_and_goes_on(servers: list[Server]):
    with pytest.raises(ValueError, match=rf"{servers[0].address} serves .*plain, which is another .*: layers 2, not 3"):
        sampler(servers[:2]).sync(wide.llama(num_hidden_layers=3), 0)
    sampler(servers[:2]).sync(wide.llama(), 0)


def test_a_server_that_was_not_started_for_rollouts_says_how_to_start_it(servers: list[Server]):
    with pytest.raises(VLLMServerError, match=r"tells raw_logprobs.* start it with --logprobs-mode processed_logprobs"):
        sampler(servers[2:]).sync(wide.llama(tie_word_embeddings=True), 0)


def test_a_killed_server_is_named_with_the_option_to_change(servers: list[Server]):
    """This must be the last test in the file, because it kills the second server."""
    rollouts = sampler(servers[:2])
    rollouts.sync(wide.llama(), 0)
    servers[1].kill()
    with pytest.raises(VLLMServerError, match=rf"{servers[1].address} is unreachable after 1 retries .*servers=\.\.\."):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)
    with pytest.raises(VLLMServerError, match=rf"{servers[1].address} is unreachable after 1 retries"):
        rollouts.sync(wide.llama(), 1)
