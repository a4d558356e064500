"""vLLM's engine in the process samples from the current policy; run by `make test-vllm`."""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.sampling import wide

from trimtab_lm.sampling.rollout import SamplingSettings, StaleWeightsError
from trimtab_lm.sampling.vllm import VLLMRollout

pytest.importorskip("vllm", reason="vLLM's engine is not installed here: make test-vllm")
pytestmark = pytest.mark.vllm

LIMIT = 8
LORA = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("policies")
    return {
        "plain": wide.saved(root / "plain", seed=1),
        "tied": wide.saved(root / "tied", seed=1, tie_word_embeddings=True),
    }


@pytest.fixture(autouse=True)
def engine_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the engines: those of one process share its process groups, so the last must go before the next is built."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    yield
    gc.collect()


def sampler(model: str, temperature: float = 0.8, settings: Any = None, **options: Any) -> VLLMRollout:
    sampling = SamplingSettings(LIMIT, temperature, **(settings or {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The sampler is not the policy")
        return VLLMRollout(sampling, tiny.tokenizer(), model=model, enforce_eager=True, **options)


POLICIES = {
    "plain": lambda: wide.llama(seed=3),
    "tied": lambda: wide.llama(seed=3, tie_word_embeddings=True),
    "lora": lambda: get_peft_model(wide.llama(seed=3), LoraConfig(**LORA)).eval(),
    "dora": lambda: get_peft_model(wide.llama(seed=3), LoraConfig(**LORA, use_dora=True)).eval(),
}


@pytest.mark.parametrize("kind", POLICIES)
@torch.no_grad()
def test_the_engine_samples_from_the_policy_after_every_change_of_its_weights(kind: str, folders: dict[str, str]):
    rollouts = sampler(folders.get(kind, folders["plain"]))
    wide.assert_samples_are_the_policys(rollouts, POLICIES[kind](), temperature=0.8)


@torch.no_grad()
def test_greedy_completions_are_the_policys_after_a_change_of_its_weights(folders: dict[str, str]):
    rollouts = sampler(folders["plain"], settings={"top_k": 1})
    wide.assert_greedy_completions_follow_the_policy(rollouts, limit=LIMIT)


def test_one_seed_gives_one_rollout_and_leaves_the_random_numbers_of_training(folders: dict[str, str]):
    rollouts, policy = sampler(folders["plain"], temperature=1.5), wide.llama()
    torch.manual_seed(4)
    state = torch.get_rng_state()
    rollouts.sync(policy, 0)
    same = [wide.PROMPTS[0], wide.PROMPTS[0]]
    first, again, other = (rollouts.generate(same, num_generations=4, version=0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    rows = [row.tolist() for row in first.completions]
    assert rows == [row.tolist() for row in again.completions]
    assert rows != [row.tolist() for row in other.completions]
    assert rows[:4] != rows[4:]
    assert len({tuple(row) for row in rows[:4]}) > 1


def test_old_weights_and_prompts_without_room_are_refused(folders: dict[str, str]):
    rollouts = sampler(folders["plain"])
    with pytest.raises(StaleWeightsError):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)
    rollouts.sync(wide.llama(), 0)
    with pytest.raises(StaleWeightsError):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=1, seed=0)
    longest = tiny.rows(1, 57, 57)
    with pytest.raises(ValueError, match=r"prompt of 57 tokens with 8 new ones is too long: 65 .* 64 positions. Lower"):
        rollouts.generate(longest, num_generations=1, version=0, seed=0)


def test_an_engine_of_another_model_is_refused(folders: dict[str, str]):
    with pytest.raises(ValueError, match=r"plain is another model than the policy .*: layers 2, not 3\. Build"):
        sampler(folders["plain"]).sync(wide.llama(num_hidden_layers=3), 0)
    gc.collect()
    with pytest.raises(ValueError, match=r"vocabulary 32, not 40; hidden size .*128.*, not 256"):
        sampler(folders["plain"]).sync(wide.llama(hidden_size=256, num_attention_heads=4, vocab_size=40), 0)


def test_an_engine_without_memory_says_which_options_to_change(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
    with pytest.raises(RuntimeError, match=r"too little memory for .*\. Change gpu_memory_utilization \(it is 0.3\)"):
        sampler(folders["plain"]).sync(wide.llama(), 0)


def test_what_cannot_be_sampled_by_vllm_says_so(folders: dict[str, str]):
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        sampler(folders["plain"]).sync(tiny.t5(), 0)
    unnamed = VLLMRollout(SamplingSettings(), tiny.tokenizer())
    with pytest.raises(ValueError, match="save it with its tokenizer"):
        unnamed.sync(wide.llama(), 0)
