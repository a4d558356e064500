from .dpo import DPOConfig as DPOConfig, DPOTrainer as DPOTrainer
from .dpo.collator import DPODataCollatorWithPadding as DPODataCollatorWithPadding
from .grpo import GRPOConfig as GRPOConfig, GRPOTrainer as GRPOTrainer
from .iterative_sft import (
    BestOfNSampler as BestOfNSampler,
    IterativeSFTConfig as IterativeSFTConfig,
    IterativeSFTTrainer as IterativeSFTTrainer,
)
from .kto import KTOConfig as KTOConfig, KTOTrainer as KTOTrainer
from .legacy.completion_collator import DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM
from .legacy.core import set_seed as set_seed
from .models.reference import create_reference_model as create_reference_model
from .models.value_head import (
    AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper as PreTrainedModelWrapper,
)
from .ppo import PPOConfig as PPOConfig, PPOTrainer as PPOTrainer
from .reward import RewardConfig as RewardConfig, RewardTrainer as RewardTrainer
from .reward.collator import RewardDataCollatorWithPadding as RewardDataCollatorWithPadding
from .sampling.generate import LengthSampler as LengthSampler
from .sft import ConstantLengthDataset as ConstantLengthDataset, SFTConfig as SFTConfig, SFTTrainer as SFTTrainer
