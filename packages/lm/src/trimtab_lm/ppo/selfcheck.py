"""What must hold before the first update; each check that fails warns with its cause and cure."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from trimtab_lm.sampling.generate import SAMPLING_ALONE, pad

from .samples import Samples
from .statistics import Rollout

TOKENS = 4  # of two queries: enough to see a wrong mask, position or temperature


def tolerance(model: Any, mixed_precision: str) -> float:
    """Nats per token by which two ways to the same log-probability may differ."""
    return 1e-3 if model.dtype in (torch.float32, torch.float64) and mixed_precision == "no" else 0.5


def check_reference(rollout: Rollout, *, most: float) -> None:
    """Policy and reference are the same model, unless the caller gave another reference."""
    gap = float(((rollout.logprobs - rollout.ref_logprobs) * rollout.mask).abs().max())
    if gap > most:
        warnings.warn(
            f"Before the first update, policy and reference differ by up to {gap:.3g} nats per token (at most {most:g} "
            "is rounding). That is right if ref_model is another model, or an adapter was trained before. If not: were "
            "the weights changed after the trainer was made, or do the two run in different precision?",
            stacklevel=5,
        )


def check_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, most: float) -> None:
    """Before any update the policy gives the log-probabilities of the rollout; all [b, R]."""
    gap = float(((logprobs - old_logprobs) * mask).abs().max())
    if gap > most:
        warnings.warn(
            f"Before the first update, log-probabilities differ from the rollout's by up to {gap:.3g} nats (at most "
            f"{most:g} is rounding), so that ratios do not start from 1. Is there dropout that the model applies by "
            "itself, batch-dependent routing (mixture of experts), or an overridden batched_forward_pass?",
            stacklevel=6,
        )


@torch.no_grad()
def check_sampler(
    model: Any,
    logprobs_of: Callable[[Samples], Tensor],
    queries: Sequence[Tensor],
    config: GenerationConfig,
    *,
    most: float,
) -> None:
    """`model.generate`, with left padding and a cache, and the trainer find the same tokens equally likely."""
    config = copy.deepcopy(config)
    config.do_sample, config.max_length, config.max_new_tokens = False, None, TOKENS
    config.output_logits = config.return_dict_in_generate = True
    for name in SAMPLING_ALONE:
        setattr(config, name, None)
    # The longest and the shortest: padding is what goes wrong.
    order = sorted(queries, key=len)
    chosen = [order[0], order[-1]] if len(order) > 1 else order
    input_ids, mask = pad(chosen, config.pad_token_id, side="left")
    output = model.generate(
        input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
    )
    prompt = 1 if model.config.is_encoder_decoder else input_ids.shape[1]
    responses = list(output.sequences[:, prompt:])
    sampled = (
        torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, torch.stack(responses)[..., None])[..., 0]
    )

    scored = logprobs_of(Samples([query.to(model.device) for query in chosen], responses))
    # After an end token generate only pads.
    ends = torch.tensor(config.eos_token_id if config.eos_token_id is not None else [], device=model.device).view(-1)
    ended = torch.isin(torch.stack(responses), ends).cumsum(1)
    counts = (ended == 0) | ((ended == 1) & torch.isin(torch.stack(responses), ends))
    gap = float(((sampled - scored) * counts).abs().max())
    if gap > most:
        warnings.warn(
            f"generate and the trainer differ by up to {gap:.3g} nats on the same tokens (at most {most:g} is "
            "rounding): the KL will be biased. Does the model need position ids or a mask that generate alone passes, "
            "a fixed cache, or an attention implementation that ignores padding? Try attn_implementation='eager'.",
            stacklevel=5,
        )
