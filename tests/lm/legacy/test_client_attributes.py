"""What scripts of 2024 read and set on a PPOTrainer, beside its documented arguments and methods."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny

from trimtab_lm import create_reference_model


def tuned():
    """A policy whose adapter was trained before: it is not its base model."""
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.with_value_head(get_peft_model(tiny.gpt2(dtype=torch.float64), config))


@pytest.mark.filterwarnings("ignore:step .* health/")
def test_a_copy_of_a_tuned_policy_is_its_reference():
    policy = tuned()
    copied = tiny.ppo(policy, arguments={"ref_model": create_reference_model(policy)})
    assert abs(copied.step(*tiny.batch())["objective/kl"]) < 1e-9
    assert abs(copied.step(*tiny.batch())["objective/kl"]) > 1e-4  # it stays while the policy moves
    assert abs(tiny.ppo(tuned()).step(*tiny.batch())["objective/kl"]) > 1e-2  # to the base model, its adapters off
