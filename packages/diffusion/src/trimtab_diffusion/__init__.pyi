from .alignprop import AlignPropConfig as AlignPropConfig, AlignPropTrainer as AlignPropTrainer
from .diffusion_dpo import DiffusionDPOConfig as DiffusionDPOConfig, DiffusionDPOTrainer as DiffusionDPOTrainer
from .ddpo import DDPOConfig as DDPOConfig, DDPOTrainer as DDPOTrainer
from .nft import DiffusionNFTConfig as DiffusionNFTConfig, DiffusionNFTTrainer as DiffusionNFTTrainer
from .pipelines import (
    DDPOPipelineOutput as DDPOPipelineOutput,
    DDPOSchedulerOutput as DDPOSchedulerOutput,
    DDPOStableDiffusionPipeline as DDPOStableDiffusionPipeline,
    DefaultDDPOStableDiffusionPipeline as DefaultDDPOStableDiffusionPipeline,
)
