"""The settings that vLLM gets, which need no vLLM to be seen."""

from trimtab_lm.sampling.rollout import SamplingSettings
from trimtab_lm.sampling.vllm.engine import sampling_params


def test_stop_tokens_of_the_caller_join_those_of_the_policy():
    settings = SamplingSettings(generation_kwargs={"stop_token_ids": [7, 8]})
    params = sampling_params(settings, [2, 3], n=4, seed=0, number=0)
    assert params["stop_token_ids"] == [2, 3, 7, 8]
    assert params["ignore_eos"]
    assert sampling_params(SamplingSettings(), [2, 3], n=4, seed=0, number=0)["stop_token_ids"] == [2, 3]
