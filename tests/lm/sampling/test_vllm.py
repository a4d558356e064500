"""The vLLM backend against a stand-in that has vLLM's documented signatures; vLLM itself is not run here."""

import os
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny

from trimtab_lm.sampling.rollout import SamplingSettings, StaleWeightsError
from trimtab_lm.sampling.vllm import VLLMRollout, checkpoint_weights

PROMPTS = tiny.rows(3, 2, 6)


@dataclass
class SamplingParams:
    """The fields of vllm.SamplingParams that are used here, and its defaults."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    index: int
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    """An engine with other weights at first, that notices when it is used asleep, stale or half loaded."""

    def __init__(
        self,
        model: str,
        *,
        dtype: Any = "auto",
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        **engine_args: Any,
    ):
        self.args = {"model": model, "dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization, **engine_args}
        self.args["multiprocessing"] = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        torch.manual_seed(0)  # as vLLM does
        self.model = tiny.llama(seed=9, tie_word_embeddings=model == "a/tied").eval()
        self.model.load_weights = self.load_weights
        self.awake, self.is_cache_stale, self.loads = {"weights", "kv_cache"}, False, 0
        self.params: list[SamplingParams] = []

    def load_weights(self, weights: Any) -> set[str]:
        assert "weights" in self.awake, "weights written into memory that is not there"
        names = dict(self.model.named_parameters())
        loaded = set()
        for name, value in weights:
            names[name].data.copy_(value)  # KeyError for a name that no checkpoint has
            loaded.add(name)
        self.loads, self.is_cache_stale = self.loads + 1, True
        return loaded

    def apply_model(self, func: Any) -> list[Any]:
        return [func(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.is_cache_stale = False
        return True

    def sleep(self, level: int = 1) -> None:
        self.awake = set()
        if level == 2:
            for parameter in self.model.parameters():
                parameter.data.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or ["weights", "kv_cache"])

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        assert self.awake == {"weights", "kv_cache"}
        assert not self.is_cache_stale
        self.params = sampling_params
        torch.rand(3)
        return [self.answer(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling_params, strict=True)]

    @torch.no_grad()
    def answer(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        request = RequestOutput(prompt)
        for index in reversed(range(params.n)):
            generator = torch.Generator().manual_seed(params.seed + index)
            ids, logprobs, reason = [], [], "length"
            while len(ids) < params.max_tokens and reason == "length":
                logits = self.model(torch.tensor([prompt + ids])).logits[0, -1] / params.temperature
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
                logprobs.append({token: Logprob(float(logits.log_softmax(-1)[token]))})
                ids.append(token)
                if token in (params.stop_token_ids or []):
                    reason = "stop"
            request.outputs.append(CompletionOutput(index, tuple(ids), logprobs, reason))
        return request


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return module


def backend(limit: int = 4, temperature: float = 0.8, settings: Any = None, **options: Any) -> VLLMRollout:
    sampling = SamplingSettings(limit, temperature, **(settings or {}))
    return VLLMRollout(sampling, tiny.tokenizer(), **{"model": "a/policy", **options})


def assert_is_of(model: Any, rollout: Any, generations: int, temperature: float = 0.8) -> None:
    model.eval()
    for i, (row, logprobs) in enumerate(zip(rollout.completions, rollout.logprobs, strict=True)):
        expected = tiny.taken_of(model, PROMPTS[i // generations], row, temperature)
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)


def adapted(seed: int = 0, **settings: Any) -> Any:
    config = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings}
    torch.manual_seed(seed)
    model = get_peft_model(tiny.llama(), LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens" in name:
            torch.nn.init.normal_(parameter)
    return model


POLICIES = {
    "plain": tiny.llama,
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "saved": lambda: adapted(modules_to_save=["lm_head"]),
    "tokens": lambda: adapted(trainable_token_indices=[5, 9]),
    "tied": lambda: tiny.llama(tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_the_engine_samples_from_the_policy_and_leaves_it_as_it_was(kind: str):
    policy = POLICIES[kind]()
    before = tiny.weights(policy)
    sampler = backend(model=f"a/{kind}")
    sampler.sync(policy, 1)
    rollout = sampler.generate(PROMPTS, num_generations=3, version=1, seed=0)
    assert_is_of(policy, rollout, 3)
    assert tiny.moved(before, policy) == {}
    assert rollout.ended == [int(row[-1]) == tiny.EOS for row in rollout.completions]
    assert kind != "plain" or 0 < sum(rollout.ended) < 9


def test_an_adapter_that_is_merged_already_is_not_merged_twice():
    policy = adapted()
    policy.merge_adapter()
    merged = checkpoint_weights(policy)
    policy.unmerge_adapter()
    for name, value in checkpoint_weights(policy).items():
        torch.testing.assert_close(merged[name], value)
    with policy.disable_adapter():
        base = checkpoint_weights(policy)
    torch.testing.assert_close(base, dict(tiny.llama().named_parameters()))


def test_weights_have_the_names_of_a_checkpoint(tmp_path: Any):
    from safetensors.torch import load_file
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
    }
    mixture = tiny.seeded(MixtralForCausalLM, MixtralConfig(**sizes, **tiny.TOKENS))
    for policy in (mixture, tiny.gpt2(), tiny.llama(tie_word_embeddings=True)):
        policy.save_pretrained(tmp_path)
        torch.testing.assert_close(checkpoint_weights(policy), load_file(tmp_path / "model.safetensors"))


def test_a_tie_that_the_adapter_breaks_is_refused():
    policy = get_peft_model(
        tiny.llama(tie_word_embeddings=True), LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    )
    with pytest.raises(ValueError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the adapter changes"):
        checkpoint_weights(policy)


def test_weights_are_sent_when_they_changed_and_old_ones_are_refused():
    sampler, policy = backend(), tiny.llama()
    with pytest.raises(StaleWeightsError):
        sampler.generate(PROMPTS, num_generations=2, version=0, seed=0)
    sampler.sync(policy, 0)
    sampler.sync(policy, 0)
    assert sampler.engine.loads == 1
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    with pytest.raises(StaleWeightsError):
        sampler.generate(PROMPTS, num_generations=2, version=1, seed=0)
    sampler.sync(policy, 1)
    assert_is_of(policy, sampler.generate(PROMPTS, num_generations=2, version=1, seed=0), 2)


def test_a_sleeping_engine_gets_its_weights_again_before_it_samples():
    sampler, policy = backend(enable_sleep_mode=True), tiny.llama()
    for _ in range(2):
        sampler.sync(policy, 5)
        assert_is_of(policy, sampler.generate(PROMPTS, num_generations=2, version=5, seed=0), 2)
        assert sampler.engine.awake == set()
        with pytest.raises(StaleWeightsError):
            sampler.generate(PROMPTS, num_generations=2, version=5, seed=0)


def test_an_engine_that_has_weights_of_its_own_left_is_refused():
    sampler, policy = backend(), tiny.llama()
    sampler.sync(policy, 0)
    sampler.engine.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"2 weights of the engine .*'extra.bias', 'extra.weight'"):
        sampler.sync(policy, 1)


def test_the_engine_is_built_and_asked_as_documented():
    kwargs = {
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "generation_kwargs": {"min_tokens": 1},
    }
    with pytest.warns(UserWarning, match="top_p=0.9|top_k|min_p|repetition|min_new"):
        sampler = backend(6, 0.5, kwargs, gpu_memory_utilization=0.2, max_model_len=64)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    sampler.sync(tiny.llama(dtype=torch.bfloat16).float(), 0)
    sampler.generate(PROMPTS, num_generations=3, version=0, seed=11)
    assert torch.equal(torch.get_rng_state(), state)
    assert sampler.engine.args == {
        "model": "a/policy",
        "dtype": torch.float32,
        "gpu_memory_utilization": 0.2,
        "max_model_len": 64,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": False,
        "multiprocessing": "0",
    }
    seeds = [params.seed for params in sampler.engine.params]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampler.engine.params[0] == SamplingParams(
        n=3,
        max_tokens=6,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        repetition_penalty=1.1,
        min_tokens=1,
        seed=seeds[0],
        logprobs=0,
        stop_token_ids=[tiny.EOS],
        ignore_eos=True,
        detokenize=False,
    )


def test_one_seed_gives_one_rollout_and_groups_that_differ():
    sampler, policy = backend(), tiny.llama()
    sampler.sync(policy, 0)
    same = [PROMPTS[0], PROMPTS[0]]
    first, again, other = (sampler.generate(same, num_generations=8, version=0, seed=seed) for seed in (1, 1, 2))
    rows = [row.tolist() for row in first.completions]
    assert rows == [row.tolist() for row in again.completions]
    assert rows != [row.tolist() for row in other.completions]
    assert rows[:8] != rows[8:]


def test_what_cannot_be_sampled_by_vllm_says_so(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        backend().sync(tiny.t5(), 0)
    with pytest.raises(ValueError, match="save it with its tokenizer"):
        backend(model=None).sync(tiny.llama(), 0)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"trimtab-lm\[vllm\]"):
        backend()
