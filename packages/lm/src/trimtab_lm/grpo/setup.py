"""What a GRPOTrainer is made of: its sampler, its reference, and random numbers apart from those of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import load_rng_state, rng_state, set_seed
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


def reference_of(model: Any, device: torch.device) -> Reference:
    """The reference of the KL: the model as it is now, without its adapters or as a frozen copy on the device."""
    reference = Reference.of(model)
    if not reference.is_policy:
        reference.model.to(device)
        score_tokens_in_forward(reference.model)
    return reference


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Seed every global generator inside the block, and give the caller's streams back on leaving it."""
    state = rng_state()
    try:
        set_seed(seed % 2**32)
        yield
    finally:
        load_rng_state(state)


def real_rows(gradient_state: Any, batch_size: int, rank: int) -> int:
    """How many rows of an evaluation batch are no repetitions, with which accelerate fills the last one up."""
    remainder = gradient_state.remainder if gradient_state.end_of_dataloader else -1
    return batch_size if remainder <= 0 else min(max(remainder - rank * batch_size, 0), batch_size)
