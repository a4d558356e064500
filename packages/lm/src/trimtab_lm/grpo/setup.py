"""What a GRPOTrainer is made of: its sampler and its reference."""

import torch
from transformers import PreTrainedTokenizerBase

from trimtab_lm.models.interface import Model
from trimtab_lm.models.reference import Reference
from trimtab_lm.sampling.backends import make_backend as backend_of
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.forward import score_tokens_in_forward

from .config import GRPOConfig


def make_backend(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutBackend:
    """The sampler that the config names, which samples the completions of a micro-batch at a time."""
    return backend_of(
        config.rollout_backend,
        config.sampling(),
        tokenizer,
        config.rollout_backend_kwargs,
        batch_size=config.per_device_train_batch_size * config.num_generations,
    )


def reference_of(model: Model, device: torch.device) -> Reference:
    """The reference of the KL: the model as it is now, without its adapters or as a frozen copy on the device."""
    reference = Reference.of(model)
    if not reference.is_policy:
        module: torch.nn.Module = reference.model
        module.to(device)
        score_tokens_in_forward(reference.model)
    return reference
