"""What must hold before the first update; each check that fails warns with its cause and cure."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from trimtab_common.conditions import OTHER_REFERENCE, OTHER_SAMPLER, OTHER_START
from trimtab_common.health import check_rows, warn_at_start
from trimtab_lm.compat.generation import cache_found
from trimtab_lm.sampling.generate import SAMPLING_ALONE, pad

from .rollout import Rollout

TOKENS = 4  # of two queries: enough to see a wrong mask, position or temperature


def check_rollout(rollout: Rollout, *, other_reference_from: float | None) -> None:
    """Raises TrainingDivergedError that names the rows that are not finite.

    Args:
        rollout: evaluated.
        other_reference_from: nats from which policy and reference differ: before the first update they are the same
            model, unless the caller gave another reference. None: there were updates.
    """
    names = ("logprobs", "ref_logprobs", "values", "kl", "non_score_rewards", "advantages", "returns")
    check_rows({name: getattr(rollout, name) for name in names}, what="response")
    if other_reference_from is not None:
        gap = float((rollout.logprobs - rollout.ref_logprobs).abs().max())
        warn_at_start(OTHER_REFERENCE, gap, rounding=other_reference_from)


def check_ratio(largest_log_ratio: Tensor, *, most: float) -> None:
    """Before the first update the policy gave the log-probabilities of the rollout."""
    warn_at_start(OTHER_START, float(largest_log_ratio), rounding=most)


@torch.no_grad()
def check_sampler(
    model: Any,
    logprobs_of: Callable[[list[Tensor], list[Tensor]], Tensor],
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
    with cache_found(model):
        output = model.generate(
            input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
        )
    prompt = 1 if model.config.is_encoder_decoder else input_ids.shape[1]
    responses = list(output.sequences[:, prompt:])
    sampled = (
        torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, torch.stack(responses)[..., None])[..., 0]
    )

    scored = logprobs_of([query.to(model.device) for query in chosen], responses)
    # After an end token generate only pads.
    ends = torch.tensor(config.eos_token_id if config.eos_token_id is not None else [], device=model.device).view(-1)
    ended = torch.isin(torch.stack(responses), ends).cumsum(1)
    counts = (ended == 0) | ((ended == 1) & torch.isin(torch.stack(responses), ends))
    gap = float(((sampled - scored) * counts).abs().max())
    warn_at_start(OTHER_SAMPLER, gap, rounding=most)
