"""What a GRPOTrainer is made of: its sampler and its reference."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trimtab_lm.models.reference import Reference
from trimtab_lm.sampling.backends import ContinuousBatchingRollout, RolloutBackend, TransformersRollout
from trimtab_lm.sampling.vllm import VLLMRollout
from trimtab_lm.tokens.forward import score_tokens_in_forward

from .config import GRPOConfig


def make_backend(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutBackend:
    """The sampler that the config names, with its settings; TypeError for a setting that it does not have.

    transformers' generate samples the completions of a micro-batch at a time, unless `batch_size` is among them.
    """
    settings, options = config.sampling(), dict(config.rollout_backend_kwargs or {})
    if config.rollout_backend == "continuous_batching":
        return ContinuousBatchingRollout(settings, tokenizer, **options)
    if config.rollout_backend == "vllm":
        return VLLMRollout(settings, tokenizer, **options)
    known = list(inspect.signature(TransformersRollout).parameters)[2:]
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(f"rollout_backend_kwargs sets {unknown}; transformers' generate takes {known} here.")
    options.setdefault("batch_size", config.per_device_train_batch_size * config.num_generations)
    return TransformersRollout(settings, tokenizer, **options)


def reference_of(model: Any, device: torch.device) -> Reference:
    """The reference of the KL: the model as it is now, without its adapters or as a frozen copy on the device."""
    reference = Reference.of(model)
    if not reference.is_policy:
        reference.model.to(device)
        score_tokens_in_forward(reference.model)
    return reference
