"""The settings that vLLM gets, which need no vLLM to be seen."""

import pytest
from tests.lm import tiny

from trimtab_lm.sampling.rollout import SamplingSettings
from trimtab_lm.sampling.vllm.engine import distortions_of, sampling_params


def test_stop_tokens_of_the_caller_join_those_of_the_policy():
    policy, tokenizer = tiny.llama(), tiny.tokenizer()
    policy.generation_config.eos_token_id = [2, 3]
    settings = SamplingSettings(generation_kwargs={"stop_token_ids": [7, 8]})
    params = sampling_params(settings, settings.end_tokens(policy, tokenizer), n=4, seed=0, number=0)
    assert params["stop_token_ids"] == [2, 3, 7, 8]
    assert params["ignore_eos"]
    assert SamplingSettings().end_tokens(policy, tokenizer) == [2, 3]
    policy.generation_config.eos_token_id = None
    assert SamplingSettings().end_tokens(policy, tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("value", [-1, 0, None])
def test_no_least_length_in_transformers_terms_is_left_out(value: int | None):
    settings = SamplingSettings.of({"min_length": value, "do_sample": True, "max_new_tokens": 4})
    assert "min_length" not in sampling_params(settings, [2], n=1, seed=0, number=0)


@pytest.mark.parametrize(
    "own",
    [
        {"bad_words": ["a"]},
        {"min_tokens": 2},
        {"logit_bias": {5: 1.0}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"allowed_token_ids": [5, 6]},
        {"structured_outputs": {"regex": "a+"}},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_setting_of_vllms_own_that_bends_the_distribution_is_reported(own: dict[str, object]):
    ((name, value),) = own.items()
    (line,) = distortions_of(SamplingSettings(generation_kwargs=own))
    assert line.startswith(f"{name}={value}: tokens ")
    assert distortions_of(SamplingSettings(generation_kwargs={"min_tokens": 0, "stop": ["a"]})) == []
