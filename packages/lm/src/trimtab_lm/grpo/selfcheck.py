"""What must hold before the first update, and which completions are to blame where an update cannot be made."""

from collections.abc import Callable, Sequence

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from trimtab_common.conditions import OTHER_REFERENCE, OTHER_START
from trimtab_common.health import check_rows, warn_at_start
from trimtab_lm.hf.types import Batch
from trimtab_lm.interface import Model
from trimtab_lm.tokens.layout import TokenGroup

from .algorithm import Completions


def check_start(logprobs: Tensor, rollout: Completions, *, most: float) -> None:
    """Before any update the policy gives the log-probabilities [N] of the rollout, and those of its reference.

    A check that fails warns with its cause and cure.
    """
    if not len(logprobs):
        return
    # Those of a sampler that is another policy differ for its own reasons.
    start = rollout.sampler_logprobs if rollout.sampler_is_policy else rollout.old_logprobs
    for condition, others in ((OTHER_START, start), (OTHER_REFERENCE, rollout.ref_logprobs)):
        if others is not None:
            warn_at_start(condition, float((logprobs - others).detach().abs().max()), rounding=most)


@torch.no_grad()
def check_completions(
    groups: Sequence[TokenGroup], model: Model, lay_out: Callable[[list[TokenGroup]], Batch], *, temperature: float
) -> None:
    """Scores each completion alone, because one that is not finite may spoil those that it is laid out with.

    Args:
        groups: the groups of a micro-batch whose loss is not finite.
        model: the policy, unwrapped, on one device.
        lay_out: lays groups out for the model.
        temperature: the temperature of the samples.

    Raises:
        TrainingDivergedError: names the completions of the micro-batch whose log-probabilities are not finite.
    """
    sums = []
    for group in groups:
        for ids, counts in zip(group.branches, group.counts, strict=True):
            tokens = send_to_device(lay_out([TokenGroup(group.prefix, [ids], [counts])]), model.device)
            sums.append(model(tokens=tokens, temperature=temperature).logprobs.sum())
    check_rows({"logprobs": torch.stack(sums)}, what="completion")
