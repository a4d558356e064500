"""Provokes each fault of a GRPO run in a real trainer; the health report names it."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.grpo.run_distributed import Fixed, prompts, trainer

from trimtab_common.health import TrainingDivergedError
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:The sampler is not")


@pytest.fixture
def make(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "num_generations": 8, "max_completion_length": 8, "rollout": None}
    return lambda **settings: trainer(str(tmp_path), **sizes | settings)


def said(grpo):
    """Trains, and returns the first warning about each condition."""
    texts = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grpo.train()
    for warning in caught:
        if found := re.search(r"step \d+: health/(\w+): (.*)", str(warning.message)):
            texts.setdefault(found[1], found[2])
    return texts


def sampled_at(temperature):
    """A rollout that samples at another temperature than it says."""
    sampler = TransformersRollout(SamplingSettings(8, temperature=temperature), tiny.tokenizer(), batch_size=32)

    def generate(*args, **kwargs):
        return sampler.generate(*args, **kwargs)._replace(logprobs=None, is_policy=False)

    return SimpleNamespace(settings=SamplingSettings(8), sync=sampler.sync, generate=generate)


def share_of_a(completions, **_):
    return [text.count("a") / max(len(text), 1) for text in completions]


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_sampler_at_another_temperature_or_with_top_k(make, iterations):
    settings = {"max_steps": 1, "num_iterations": iterations, "reward": share_of_a}
    for temperature, name in ((0.4, "likelier_than_samples"), (2.0, "unlikelier_than_samples")):
        texts = said(make(rollout=sampled_at(temperature), **settings))
        assert texts.keys() == {name}
        assert "temperature" in texts[name]
    assert said(make(top_k=3, **settings)).keys() == {"likelier_than_samples"}
    assert not said(make(temperature=0.4, **settings))


def test_a_doubled_bos(make):
    twice = Dataset.from_dict({"prompt": [f"<s><s>{text}" for text in prompts(8)["prompt"]]})
    assert "is 1, above 0: the tokenizer adds a BOS" in said(make(train_dataset=twice, max_steps=1))["doubled_bos"]


def test_a_pad_token_that_is_eos_in_a_model_that_never_stops(make):
    model = tiny.gpt2()
    with torch.no_grad():
        row = model.transformer.wte.weight[tiny.EOS]
        model.transformer.ln_f.bias -= 20 * row / row.square().sum()
    same = {"processing_class": tiny.tokenizer(pad_token="</s>")}
    texts = said(make(model=model, max_steps=10, learning_rate=1e-4, reward=share_of_a, **same))
    assert "pad token is the EOS token" in texts["never_ends"]


def test_a_pad_token_that_ends_completions_by_the_generation_config_alone(make):
    model = tiny.gpt2()
    model.generation_config.eos_token_id = [tiny.EOS, tiny.PAD]
    completions = Fixed([False] * 8)
    assert "pad token is the EOS" in said(make(model=model, rollout=completions, max_steps=10))["never_ends"]


def test_rewards_of_a_million_where_nothing_scales_them(make):
    def huge(completions, **_):
        return [1e6 * score for score in share_of_a(completions)]

    assert (
        "above 100: rewards are so large" in said(make(reward=huge, max_steps=1, scale_rewards="none"))["reward_scale"]
    )
    assert not said(make(reward=huge, max_steps=1))


def test_a_constant_reward(make):
    texts = said(make(reward=lambda completions, **_: [1.0] * len(completions), max_steps=10))
    assert texts.keys() == {"constant_rewards"}


def test_a_reward_that_is_not_finite_in_one_row(make):
    def broken(completions, **_):
        return [*[0.0] * 5, float("nan"), *[1.0] * (len(completions) - 6)]

    grpo = make(reward=broken)
    before = tiny.weights(grpo.model)
    with pytest.raises(ValueError, match="'broken' returned has nan for completion 5: a score must be a finite"):
        grpo.train()
    assert not tiny.moved(before, grpo.model)


def test_a_completion_whose_numbers_are_not_finite(make):
    settings = {"num_generations": 3, "per_device_train_batch_size": 2, "reward": share_of_a}
    data = Dataset.from_dict({"prompt": ["m", "zzz", "no", "it"]})
    grpo = make(rollout=Fixed([True] * 3), train_dataset=data, **settings)
    with torch.no_grad():
        grpo.model.transformer.wte.weight[6] = torch.nan  # the second of three completions repeats this token
        grpo.model.lm_head.weight = torch.nn.Parameter(grpo.model.lm_head.weight.nan_to_num())
    before = tiny.weights(grpo.model)
    with pytest.raises(
        TrainingDivergedError, match=r"logprobs of completion 1, 4 \(2 of 6\) are not finite. No update"
    ):
        grpo.train()
    assert all(torch.equal(before[n].nan_to_num(), w.nan_to_num()) for n, w in grpo.model.state_dict().items())


def test_a_collapsing_entropy_and_a_kl_that_runs_away(make):
    texts = said(make(reward=share_of_a, max_steps=30, learning_rate=3e-2, beta=1e-6))
    assert "the policy stops exploring" in texts["entropy_collapse"]
    assert "nats per token, above 2: " in texts["far_from_reference"]


def test_completions_that_grow_for_the_reward(make):
    model = tiny.gpt2()
    with torch.no_grad():
        row = model.transformer.wte.weight[tiny.EOS]
        model.transformer.ln_f.bias += 3 * row / row.square().sum()

    def length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    texts = said(make(model=model, reward=length, max_steps=30, learning_rate=1e-2, max_completion_length=24))
    assert "the reward favours length" in texts["growing_responses"]


def test_a_reward_for_length_where_completions_begin_near_their_limit(make):
    def length(completion_ids, **_):
        return [0.1 * len(ids) for ids in completion_ids]

    texts = said(make(reward=length, max_steps=10, learning_rate=1e-3, max_completion_length=12))
    assert "the reward favours length" in texts["growing_responses"]


def test_a_reference_that_is_not_the_policy_at_the_start(make):
    grpo = make(beta=0.1, max_steps=1)
    grpo.model.transformer.wte.weight.data *= 1.2
    assert "above 0.001: the reference is not the policy" in said(grpo)["other_reference"]
