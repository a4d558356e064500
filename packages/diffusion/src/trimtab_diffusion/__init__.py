"""Trainers that fine-tune diffusion pipelines from rewards."""

from trimtab_diffusion.ddpo import DDPOConfig, DDPOTrainer
from trimtab_diffusion.pipelines import (
    DDPOPipelineOutput,
    DDPOSchedulerOutput,
    DDPOStableDiffusionPipeline,
    DefaultDDPOStableDiffusionPipeline,
)

__all__ = [
    "DDPOConfig",
    "DDPOPipelineOutput",
    "DDPOSchedulerOutput",
    "DDPOStableDiffusionPipeline",
    "DDPOTrainer",
    "DefaultDDPOStableDiffusionPipeline",
]
