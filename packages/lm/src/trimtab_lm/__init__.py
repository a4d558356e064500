"""Trainers that fine-tune language models from texts, preferences and rewards."""

from trimtab_common.seeding import set_seed
from trimtab_lm.completion_collator import DataCollatorForCompletionOnlyLM
from trimtab_lm.dpo import DPOConfig, DPOTrainer
from trimtab_lm.dpo_collator import DPODataCollatorWithPadding
from trimtab_lm.generation import LengthSampler
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.iterative_sft import BestOfNSampler, IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.ppo import PPOConfig, PPOTrainer
from trimtab_lm.reference import create_reference_model
from trimtab_lm.reward import RewardConfig, RewardTrainer
from trimtab_lm.reward_collator import RewardDataCollatorWithPadding
from trimtab_lm.sft import ConstantLengthDataset, SFTConfig, SFTTrainer
from trimtab_lm.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "BestOfNSampler",
    "ConstantLengthDataset",
    "DPOConfig",
    "DPODataCollatorWithPadding",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "GRPOConfig",
    "GRPOTrainer",
    "IterativeSFTConfig",
    "IterativeSFTTrainer",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "RewardConfig",
    "RewardDataCollatorWithPadding",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "create_reference_model",
    "set_seed",
]
