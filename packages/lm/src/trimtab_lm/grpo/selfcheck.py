"""Checks before the first update, and finds the completions that make an update impossible."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from trimtab_common.conditions import OTHER_REFERENCE, OTHER_START
from trimtab_common.health import check_rows, warn_at_start
from trimtab_common.sharding import divides_weights
from trimtab_lm.tokens.layout import TokenGroup

from .algorithm import Completions


def check_start(logprobs: Tensor, rollout: Completions, *, most: float) -> None:
    """Checks that, before any update, the policy and the reference give the rollout's log-probabilities [N].

    A check that fails warns with its cause and cure.
    """
    if not len(logprobs):
        return
    # A sampler with another policy has other log-probabilities.
    start = rollout.sampler_logprobs if rollout.sampler_is_policy else rollout.old_logprobs
    for condition, others in ((OTHER_START, start), (OTHER_REFERENCE, rollout.ref_logprobs)):
        if others is not None:
            warn_at_start(condition, float((logprobs - others).detach().abs().max()), rounding=most)


@torch.no_grad()
def check_completions(trainer: Any, groups: Sequence[TokenGroup]) -> None:
    """Names the completions of a micro-batch that give no finite log-probabilities, after its loss was not finite.

    Each completion is scored alone, because one that is not finite may spoil those that it is laid out with.

    Raises:
        TrainingDivergedError: a completion gives none.
    """
    if divides_weights(trainer.accelerator):
        return  # a forward pass would wait for the other processes
    model, sums = trainer.accelerator.unwrap_model(trainer.model), []
    for group in groups:
        for ids, counts in zip(group.branches, group.counts, strict=True):
            tokens = send_to_device(trainer.lay_out([TokenGroup(group.prefix, [ids], [counts])]), model.device)
            sums.append(model(tokens=tokens, temperature=trainer.config.temperature).logprobs.sum())
    check_rows({"logprobs": torch.stack(sums)}, what="completion")
