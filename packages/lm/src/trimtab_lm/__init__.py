"""Trainers that fine-tune language models from texts, preferences and rewards."""

from trimtab_common.seeding import set_seed
from trimtab_lm.dpo import DPOConfig, DPOTrainer
from trimtab_lm.dpo.collator import DPODataCollatorWithPadding
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.iterative_sft import BestOfNSampler, IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.legacy.completion_collator import DataCollatorForCompletionOnlyLM
from trimtab_lm.models.reference import create_reference_model
from trimtab_lm.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)
from trimtab_lm.ppo import PPOConfig, PPOTrainer
from trimtab_lm.reward import RewardConfig, RewardTrainer
from trimtab_lm.reward.collator import RewardDataCollatorWithPadding
from trimtab_lm.sampling.generate import LengthSampler
from trimtab_lm.sft import ConstantLengthDataset, SFTConfig, SFTTrainer

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
