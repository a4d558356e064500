"""Trainers that fine-tune language models from rewards and preferences."""

from trimtab_common.seeding import set_seed
from trimtab_lm.generation import LengthSampler
from trimtab_lm.ppo import PPOConfig, PPOTrainer
from trimtab_lm.reference import create_reference_model
from trimtab_lm.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "create_reference_model",
    "set_seed",
]
