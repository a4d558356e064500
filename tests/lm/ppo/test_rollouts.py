"""PPO samples with any backend, at the temperature of its scores, from the current weights."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.sampling.elsewhere import Elsewhere

from trimtab_lm.sampling.backends import ContinuousBatchingRollout, TransformersRollout
from trimtab_lm.sampling.best_of_n import BestOfNSampler
from trimtab_lm.sampling.rollout import Rollout, SamplingSettings

QUERIES = tiny.rows(4, 2, 5)
BACKENDS = {
    "transformers": lambda settings: TransformersRollout(settings, tiny.tokenizer(), batch_size=4),
    "continuous batching": lambda settings: ContinuousBatchingRollout(settings, tiny.tokenizer()),
}


def data() -> Dataset:
    return Dataset.from_dict({"query": [letter * 3 for letter in "abcdefgh"]})


def share_of_a(completions: list[str]) -> list[float]:
    return [completion.count("a") / 8 for completion in completions]


class Recorder:
    """A backend that writes the same token, and records its requests."""

    def __init__(self, temperature: float = 1.0):
        self.settings, self.held, self.weights, self.seeds = SamplingSettings(3, temperature), None, [], []

    def sync(self, model: Any, version: int) -> None:
        self.held = version
        self.weights.append(model.transformer.h[0].mlp.c_fc.weight.detach().clone())

    def generate(self, prompts: Any, *, num_generations: int, version: int, seed: int) -> Rollout:
        assert (version, num_generations) == (self.held, 1)
        self.seeds.append(seed)
        return Rollout([torch.tensor([5, 6]) for _ in prompts], [False for _ in prompts])


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_backend_samples_what_the_policy_writes(backend):
    """Sampling with top_k=1 at any temperature gives the policy's greedy continuation."""
    trainer = tiny.ppo(
        tiny.with_value_head(tiny.llama()), arguments={"rollout": backend(SamplingSettings(4, 0.7, top_k=1))}
    )
    with pytest.warns(UserWarning, match="top_k=1"):
        responses = trainer.generate(QUERIES, return_prompt=False)
    whole = trainer.generate(QUERIES)
    model = tiny.llama().eval()
    for query, response, both in zip(QUERIES, responses, whole, strict=True):
        expected = model.generate(query[None], do_sample=False, max_new_tokens=4, pad_token_id=0)[0]
        expected = expected[: len(query) + len(response)]
        assert torch.cat([query, response]).tolist() == both.tolist() == expected.tolist()


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_train_learns_from_a_backend(backend):
    sizes = {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 2, "steps": 2, "learning_rate": 1e-2}
    arguments = {"dataset": data(), "rollout": backend(SamplingSettings(4, 0.9))}
    trainer = tiny.ppo(tiny.with_value_head(tiny.llama()), arguments=arguments, **sizes)
    before = tiny.weights(trainer.model)
    history = trainer.train(share_of_a)
    assert len(history) == 2
    assert history[0]["objective/kl"] == pytest.approx(0, abs=1e-4)  # the policy is its own reference
    assert history[0]["tokens/responses_len_mean"] <= 4
    if isinstance(trainer.rollout, ContinuousBatchingRollout):  # it returns log-probabilities
        assert history[0]["ppo/sampling/token_ratio/max"] == pytest.approx(1, abs=1e-3)
    assert tiny.moved(before, trainer.model)


def test_log_probabilities_are_taken_at_the_temperature_of_the_backend():
    model = tiny.policy(dtype=torch.float64)
    trainer = tiny.ppo(model, arguments={"rollout": Recorder(temperature=0.5)})
    responses = trainer.generate(QUERIES, return_prompt=False)
    stats = trainer.step(QUERIES, responses, [0.0, 1.0, 2.0, 3.0])
    expected = [
        tiny.taken_of(tiny.gpt2(0, torch.float64), query, response, 0.5)
        for query, response in zip(QUERIES, responses, strict=True)
    ]
    torch.testing.assert_close(stats["objective/logprobs"], torch.cat(expected))
    with pytest.raises(ValueError, match=r"temperature 0.5, but .* at 0.7"):
        tiny.ppo(temperature=0.7, arguments={"rollout": Recorder(temperature=0.5)}).generate(QUERIES)


@pytest.mark.parametrize("name", ["eos_token_id", "stop_token_ids"])
def test_an_end_token_of_the_backends_settings_ends_a_response(name):
    recorder = Recorder()
    recorder.settings = SamplingSettings(3, generation_kwargs={name: [6]})
    trainer = tiny.ppo(arguments={"rollout": recorder}, missing_eos_penalty=1.0, use_score_scaling=True)
    responses = trainer.generate(QUERIES, return_prompt=False)  # each ends in 6
    trainer.step(QUERIES, responses, [0.0, 1.0, 2.0, 3.0])
    assert trainer.running.mean == 1.5  # of the scores, of which nothing was subtracted


def test_every_rollout_has_the_weights_of_its_step_and_a_seed_of_its_own():
    backend = Recorder()
    trainer = tiny.ppo(arguments={"dataset": data(), "rollout": backend}, steps=3, learning_rate=1e-2)
    trainer.train(lambda completion_ids: [float(i) for i in range(4)])
    assert len({float(weight.sum()) for weight in backend.weights}) == 3
    assert len(set(backend.seeds)) == 3


def test_callers_that_share_a_backend_sample_from_the_weights_as_they_are():
    engine = Elsewhere()
    trainer = tiny.ppo(arguments={"dataset": data(), "rollout": engine}, steps=1, learning_rate=1e-2)
    best = BestOfNSampler(trainer.model, trainer.tokenizer, lambda texts: [0.0] * len(texts), None, rollout=engine)
    trainer.train(lambda completion_ids: [float(i) for i in range(4)])
    best.generate(QUERIES)
    assert tiny.moved(tiny.weights(engine.policies[0]), engine.policies[-1])


def test_the_config_names_the_backend_of_train():
    trainer = tiny.ppo(
        tiny.with_value_head(tiny.llama()),
        arguments={"dataset": data()},
        steps=1,
        rollout_backend="continuous_batching",
        rollout_backend_kwargs={"max_batch_tokens": 512},
        temperature=0.8,
    )
    trainer.train(share_of_a, generation_kwargs={"max_new_tokens": 3, "do_sample": True})
    assert isinstance(trainer.rollout, ContinuousBatchingRollout)
    assert trainer.rollout.options == {"max_batch_tokens": 512}
    assert (trainer.rollout.settings.max_completion_length, trainer.rollout.settings.temperature) == (3, 0.8)
    engine = trainer.rollout
    trainer.train(share_of_a, generation_kwargs={"max_new_tokens": 3}, steps=2)
    assert trainer.rollout is engine


def step_of(sampler_logprobs: Any = None, **config: Any) -> dict[str, Any]:
    trainer = tiny.ppo(tiny.policy(dtype=torch.float64), arguments={"rollout": Recorder()}, **config)
    responses = trainer.generate(QUERIES, return_prompt=False)
    return trainer.step(QUERIES, responses, [0.0, 1.0, 2.0, 3.0], sampler_logprobs=sampler_logprobs)


def test_the_loss_is_weighed_by_how_much_likelier_a_token_is_than_it_was_sampled():
    model = tiny.gpt2(0, torch.float64)
    logprobs = [tiny.taken_of(model, query, torch.tensor([5, 6])) for query in QUERIES]
    learnt = "ppo/policy/advantages"  # the surrogate multiplies this by the ratio
    plain = step_of()
    same = step_of(logprobs, importance_sampling_cap=2.0)
    torch.testing.assert_close(same[learnt], plain[learnt])
    assert same["ppo/sampling/token_ratio/max"] == pytest.approx(1)
    rarer = [row - 3.0 for row in logprobs]  # the sampler's probabilities are a twentieth of the policy's
    weighed, told = step_of(rarer, importance_sampling_cap=1.5), step_of(rarer)
    assert weighed["ppo/sampling/token_ratio/truncated"] == 1
    torch.testing.assert_close(weighed[learnt], 1.5 * plain[learnt])
    torch.testing.assert_close(told[learnt], plain[learnt])
    assert told["ppo/sampling/logp_difference/mean"] == pytest.approx(3)
    with pytest.raises(ValueError, match=r"importance_sampling_cap=2.0 needs the log-probabilities of the sampler"):
        step_of(importance_sampling_cap=2.0)
    with pytest.raises(ValueError, match=r"shapes \[\(2,\), .* give a log-probability for each"):
        step_of([torch.zeros(2)] * 3 + [torch.zeros(1)])
    with pytest.raises(ValueError, match="not finite"):
        step_of([torch.full((2,), -torch.inf)] * 4)


def test_settings_beside_a_rollout_are_refused():
    trainer = tiny.ppo(arguments={"dataset": data(), "rollout": Recorder()})
    for refused in ({"max_new_tokens": 3}, {"generate_ref_response": True}, {"length_sampler": lambda: 3}):
        with pytest.raises(ValueError, match="The rollout samples by its own settings"):
            trainer.generate(QUERIES, **refused)
    with pytest.raises(ValueError, match="The rollout samples by its own settings"):
        trainer.train(share_of_a, generation_kwargs={"temperature": 0.5})
    with pytest.raises(ValueError, match=r"rollout_backend='vllm' and a rollout came\. Leave one out"):
        tiny.ppo(arguments={"rollout": Recorder()}, rollout_backend="vllm")
    with pytest.raises(ValueError, match="rollout_backend='sglang' is none of transformers, continuous_batching, vllm"):
        tiny.ppo(rollout_backend="sglang")
    with pytest.raises(ValueError, match=r"sets \['pages', 'seed'\]; rollout_backend='continuous_batching' takes"):
        tiny.ppo(rollout_backend="continuous_batching", rollout_backend_kwargs={"seed": 1, "pages": 3})
    with pytest.raises(
        ValueError, match=r"rollout_backend='vllm_server' needs \['servers'\] in rollout_backend_kwargs"
    ):
        tiny.ppo(rollout_backend="vllm_server")
    with pytest.raises(ValueError, match="rollout_backend_kwargs needs a rollout_backend other than transformers"):
        tiny.ppo(rollout_backend_kwargs={"batch_size": 2})
