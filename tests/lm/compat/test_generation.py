"""Models receive the cache under whatever name they know, and the slower generation loop says why it runs."""

import warnings
from typing import Any

import pytest
import torch
from tests.lm import tiny
from tests.lm.sampling.fast.test_loop import NeverEnds, config_of, reader_of_images, sampled, tokens_read
from tests.lm.sampling.test_backends import hybrid, lora, prompt_tuned
from transformers import Cache, LlamaForCausalLM, XLMWithLMHeadModel

from trimtab_lm.compat.generation import CACHE, cache_argument
from trimtab_lm.interface import base_of
from trimtab_lm.sampling.generate import Completer

NAMES = ("cache", "past_key_values", "kv_states")


class KnowsCache(LlamaForCausalLM):
    """Like remote code, ignores arguments that it does not know."""

    def forward(self, input_ids=None, attention_mask=None, cache=None, logits_to_keep=0, **kwargs):
        return self.run(input_ids, cache, logits_to_keep, {"attention_mask": attention_mask, **kwargs})

    def run(self, input_ids, cache, logits_to_keep, kwargs):
        known = {name: value for name, value in kwargs.items() if name not in NAMES}
        return super().forward(input_ids, logits_to_keep=logits_to_keep, **{CACHE: cache}, **known)


class KnowsPastKeyValues(KnowsCache):
    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, logits_to_keep=0, **kwargs):
        return self.run(input_ids, past_key_values, logits_to_keep, {"attention_mask": attention_mask, **kwargs})

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        known = {name: value for name, value in kwargs.items() if name not in NAMES}
        inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: past_key_values}, **known)
        return {"past_key_values": inputs.pop(CACHE, None), **inputs}


class KnowsAnotherName(KnowsCache):
    def forward(self, input_ids=None, attention_mask=None, kv_states: Cache | None = None, logits_to_keep=0, **kwargs):
        return self.run(input_ids, kv_states, logits_to_keep, {"attention_mask": attention_mask, **kwargs})


@pytest.mark.parametrize("kind", [KnowsCache, KnowsPastKeyValues, KnowsAnotherName])
@pytest.mark.parametrize("wrap", [lambda model: model, lora])
@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_k": 1, "repetition_penalty": 1.3}])
def test_a_model_finds_its_cache_under_the_name_that_it_knows(kind: Any, wrap: Any, settings: dict[str, Any]):
    usual = tiny.exact(tiny.llama()).eval()
    other = kind(usual.config).to(torch.float64).eval()
    other.load_state_dict(usual.state_dict())
    torch.manual_seed(1)
    usual = wrap(usual)
    torch.manual_seed(1)
    other = wrap(other)
    prompts, asked, answers = tiny.rows(4, 2, 9), {"do_sample": True, **settings}, list[Any]()
    prepare = base_of(other).prepare_inputs_for_generation
    read = tokens_read(usual, lambda: answers.append(sampled(usual, prompts, 2, asked)))
    assert tokens_read(other, lambda: answers.append(sampled(other, prompts, 2, asked))) == read
    assert answers[1] == answers[0]
    assert base_of(other).prepare_inputs_for_generation == prepare
    assert "prepare_inputs_for_generation" not in vars(base_of(other))


def test_the_name_of_the_cache_is_read_from_the_signature():
    kinds = [KnowsCache, KnowsPastKeyValues, KnowsAnotherName]
    assert [cache_argument(kind.forward) for kind in kinds] == ["cache", "past_key_values", "kv_states"]
    assert cache_argument(torch.nn.Linear(1, 1).forward) is None
    assert cache_argument(XLMWithLMHeadModel.forward) is None


def without_cache() -> Any:
    """Returns a model whose forward hides its arguments."""
    model = tiny.llama()
    run = model.forward
    model.forward = lambda *args, **kwargs: run(*args, **kwargs)
    return model


@pytest.mark.parametrize(
    ("build", "settings", "kwargs", "reason"),
    [
        (tiny.llama, {"repetition_penalty": 1.5}, {}, "repetition_penalty=1.5"),
        (tiny.gpt2, {"forced_eos_token_id": 0}, {}, "forced_eos_token_id=0"),
        (lora, {"use_cache": False}, {}, "use_cache=False"),
        (tiny.t5, {"max_time": 100.0}, {}, "max_time=100.0"),
        (tiny.llama, {}, {"logits_processor": [NeverEnds()]}, "generate was given logits_processor"),
        (hybrid, {}, {}, "FalconH1ForCausalLM takes no cache whose rows can be selected"),
        (without_cache, {}, {}, "LlamaForCausalLM takes no cache whose rows can be selected"),
        (reader_of_images, {}, {}, "Qwen2VLForConditionalGeneration has more parts than its text model"),
    ],
)
def test_a_slower_loop_gives_its_reason_once(build: Any, settings: Any, kwargs: Any, reason: str):
    model, asked = build().eval(), {"do_sample": True, **settings}
    with warnings.catch_warnings(record=True) as told:
        for _ in range(2):
            sampled(model, tiny.rows(2, 4, 4), 2, asked, **kwargs)
    lines = [str(warning.message) for warning in told if "transformers' own loop" in str(warning.message)]
    assert len(lines) == 1
    assert lines[0].endswith(f"The reason: {reason}.")


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, tiny.t5, lora, prompt_tuned])
@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [
        ({}, {}),
        ({"a_setting_of_tomorrow": None, "another": False, "no_repeat_ngram_size": 0}, {"streamer": None}),
        ({"length_penalty": 1.0, "num_beam_groups": 1, "early_stopping": False, "assistant_lookbehind": 10}, {}),
    ],
)
def test_a_neutral_setting_is_no_reason_for_a_slower_loop(build: Any, settings: Any, kwargs: Any):
    model = build().eval()
    config = config_of(model, do_sample=True)
    vars(config).update(settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*own loop.*")
        Completer(model, config, eos_ids=[tiny.EOS], **kwargs)(tiny.rows(2, 4, 4), 2)
