"""Queries and responses without padding: the numbers are those of padded rows, and a repeated query is read once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lm import tiny

from trimtab_lm import PPOTrainer
from trimtab_lm.ppo import passes
from trimtab_lm.ppo import samples as samples_module
from trimtab_lm.ppo.policy import PolicyOutputs
from trimtab_lm.ppo.samples import Layouts, Samples

DOUBLE = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
QUERIES = tiny.rows(5, 2, 6)
RESPONSES = tiny.rows(5, 1, 7, seed=1)
MASKS = [(torch.arange(len(row)) % 3 != 1).long() for row in RESPONSES]
REPEATED = [QUERIES[i] for i in (3, 0, 3, 1, 0)]
SAMPLES = {
    "plain": Samples(QUERIES, RESPONSES),
    "masked": Samples(QUERIES, RESPONSES, MASKS),
    "equal queries": Samples(REPEATED, RESPONSES),
    "equal queries, masked": Samples(REPEATED, RESPONSES, MASKS),
}
TRAINERS = {
    "gpt2": lambda: tiny.ppo(tiny.policy(dtype=DOUBLE)),
    "llama": lambda: tiny.ppo(tiny.with_value_head(tiny.exact(tiny.llama()))),
    "t5": lambda: tiny.ppo(tiny.with_value_head(tiny.exact(tiny.t5(initializer_factor=1.0)))),
    "critic": lambda: tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"value_model": tiny.exact(tiny.llama(1))}),
    "reference": lambda: tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"ref_model": tiny.exact(tiny.llama(1))}),
}


def padded(trainer: Any, samples: Samples) -> Samples:
    return replace(samples, model_inputs=trainer.prepare_model_inputs(samples.queries, samples.responses))


def assert_equal(one: PolicyOutputs, other: PolicyOutputs) -> None:
    for name, column, expected in zip(one._fields, one, other, strict=True):
        if expected is not None:
            torch.testing.assert_close(column, expected, **CLOSE, msg=name)


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("kind", TRAINERS)
def test_scores_and_gradients_are_those_of_padded_rows(kind, samples):
    trainer = TRAINERS[kind]()
    trainer.actor_critic.eval()

    def outputs(one: Samples) -> tuple[PolicyOutputs, list[torch.Tensor]]:
        policy = trainer.scorer.policy(one, temperature=0.7, return_logits=True)
        trainer.actor_critic.zero_grad()
        (policy.logprobs.sum() + policy.entropy.square().sum() + policy.values.square().sum()).backward()
        return policy, [p.grad.clone() for p in trainer.model_params if p.grad is not None]

    (numbers, gradients), (expected, expected_gradients) = outputs(samples), outputs(padded(trainer, samples))
    assert_equal(numbers, expected)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10 * largest)
    assert_equal(*(trainer.scorer.ref(one, temperature=0.7) for one in (samples, padded(trainer, samples))))
    kl, expected_kl = (exact_kl(trainer, one) for one in (samples, padded(trainer, samples)))
    torch.testing.assert_close(kl, expected_kl, **CLOSE)


def exact_kl(trainer: PPOTrainer, samples: Samples) -> torch.Tensor:
    policy = trainer.scorer.policy(samples, temperature=0.7, return_head_inputs=True)
    ref = trainer.scorer.ref(samples, temperature=0.7, return_head_inputs=True)
    assert policy.head_inputs is not None
    assert ref.head_inputs is not None
    return trainer.scorer.exact_kl(samples, policy.head_inputs, ref.head_inputs, temperature=0.7)


def test_rows_of_unlike_lengths_share_rows():
    """Lengths 4, 2, 2 and 2 fit into one row of ten, or three of four; a padded row for each would take sixteen."""
    queries = [torch.tensor([token]) for token in (5, 6, 7, 8)]
    responses = [torch.arange(6, 6 + length) for length in (3, 1, 1, 1)]
    trainer = TRAINERS["llama"]()
    for layouts, positions in ((trainer.scorer.bare.layouts, 10), (Layouts("packed", "tree"), 12)):
        tokens = Samples(queries, responses).tokens(layouts, trainer.scorer.padding)
        assert tokens["input_ids"].numel() == positions


def test_equal_queries_are_read_once():
    trainer = TRAINERS["gpt2"]()
    (tokens,) = trainer.scorer.bare.tokens(SAMPLES["equal queries"], trainer.scorer.padding).values()
    read = tokens["document"] >= 0
    assert int(read.sum()) == sum(map(len, [QUERIES[i] for i in (0, 1, 3)])) + sum(map(len, RESPONSES))
    trainer = TRAINERS["t5"]()
    (tokens,) = trainer.scorer.bare.tokens(SAMPLES["equal queries"], trainer.scorer.padding).values()
    assert len(tokens["input_ids"]) == 3


def test_a_step_builds_no_padded_inputs_unless_a_subclass_reads_them(monkeypatch):
    calls: list[str] = []
    padded_of = samples_module.padded_inputs
    monkeypatch.setattr(passes, "padded_inputs", lambda *args, **kw: calls.append("") or padded_of(*args, **kw))
    tiny.ppo(mini_batch_size=2).step(*tiny.batch())
    assert calls == []

    class Delegating(PPOTrainer):
        def batched_forward_pass(self, *args, **kwargs):
            return super().batched_forward_pass(*args, **kwargs)

    tiny.ppo(kind=Delegating, mini_batch_size=2).step(*tiny.batch())
    assert len(calls) == 1


def test_inputs_that_a_subclass_prepares_are_what_the_model_reads():
    class LeftPadded(PPOTrainer):
        """The same rows, padded on the left, and the first token of each query replaced."""

        def prepare_model_inputs(self, queries, responses):
            queries = [torch.cat([query.new_tensor([tiny.BOS]), query[1:]]) for query in queries]
            inputs = super().prepare_model_inputs(queries, responses)
            shifts = (inputs["attention_mask"] == 0).sum(1).tolist()
            return {
                name: torch.stack([row.roll(shift) for row, shift in zip(column, shifts, strict=True)])
                for name, column in inputs.items()
            }

    queries, responses, scores = tiny.batch()
    others = [torch.cat([query.new_tensor([tiny.BOS]), query[1:]]) for query in queries]
    prepared = tiny.ppo(tiny.policy(dtype=DOUBLE), LeftPadded).step(queries, responses, scores)
    expected = tiny.ppo(tiny.policy(dtype=DOUBLE)).step(others, responses, scores)
    torch.testing.assert_close(prepared["objective/logprobs"], expected["objective/logprobs"], **CLOSE)
    plain = tiny.ppo(tiny.policy(dtype=DOUBLE)).step(queries, responses, scores)
    assert not torch.allclose(plain["objective/logprobs"], expected["objective/logprobs"])


def test_the_exact_kl_takes_no_forward_pass_of_its_own():
    trainer = tiny.ppo(kl_penalty="full", batch_size=4, mini_batch_size=2, ppo_epochs=1)
    runs = {"policy": 0, "reference": 0}
    for name, actor in (("policy", trainer.scorer.bare), ("reference", trainer.scorer.ref_actor)):

        def count(*_: Any, name: str = name) -> None:
            runs[name] += 1

        actor.pretrained_model.base_model.register_forward_hook(count)
    trainer.step(*tiny.batch())  # once, because the first step checks the ratios by passes of its own
    runs |= dict.fromkeys(runs, 0)
    trainer.step(*tiny.batch())
    assert runs == {"policy": 2 + 2, "reference": 2}  # scored and trained, in two minibatches
