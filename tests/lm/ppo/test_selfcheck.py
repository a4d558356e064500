"""Each self-check is silent for a correct set-up, and names the fault in a broken one."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm.tiny import batch, gpt2, llama, policy, ppo, rows, t5, with_value_head

from trimtab_lm.tokens.inputs import TokenReader

QUERIES = rows(4, 1, 6)


def sample(trainer) -> None:
    trainer.generate(QUERIES, do_sample=True, max_new_tokens=4, temperature=0.7)


@pytest.mark.parametrize(
    "build", [gpt2, llama, t5, lambda: get_peft_model(llama(), LoraConfig(init_lora_weights=False))]
)
def test_nothing_is_said_of_sound_models(build):
    model = build()
    trainer = ppo(with_value_head(model), kl_penalty="full")
    queries, responses, scores = batch()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*(first update|generate and the trainer).*")
        sample(trainer)
        if not trainer.config.is_peft_model:  # its adapter does not belong to the base model
            trainer.step(queries, responses, scores)


def test_a_context_that_one_token_fills_is_sampled():
    trainer = ppo(policy(n_positions=32))
    queries = [*rows(3, 1, 3), *rows(1, 31, 31)]
    assert len(trainer.generate(queries, return_prompt=False, do_sample=True, max_new_tokens=1)[3]) == 1


def test_a_sampler_with_other_positions_is_found(monkeypatch):
    trainer = ppo(policy())
    inputs = TokenReader.inputs

    def shifted(self, tokens):
        read = inputs(self, tokens)
        return {**read, "position_ids": read["position_ids"] + 1}

    monkeypatch.setattr(TokenReader, "inputs", shifted)
    with pytest.warns(UserWarning, match="health/other_sampler.*generate and the trainer differ"):
        sample(trainer)


def test_a_policy_that_moved_before_the_first_step_is_found():
    model = policy()
    trainer = ppo(model)
    with torch.no_grad():
        model.pretrained_model.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
    with pytest.warns(UserWarning, match="health/other_reference.*policy and reference differ"):
        trainer.step(*batch())


def test_a_forward_pass_that_is_not_repeatable_is_found():
    trainer = ppo(policy())

    def noisy(_, __, outputs):
        return outputs[0] + 0.1 * torch.randn(outputs[0].shape), *outputs[1:]

    trainer.bare.register_forward_hook(noisy)
    with pytest.warns(UserWarning, match="health/other_start.*ratios do not start from 1"):
        trainer.step(*batch())
