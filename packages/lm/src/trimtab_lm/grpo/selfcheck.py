"""What must hold before the first update; each check that fails warns with its cause and cure."""

from torch import Tensor

from trimtab_common.conditions import OTHER_REFERENCE, OTHER_START
from trimtab_common.health import warn_at_start


def check_start(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, *, most: float) -> None:
    """Before any update the policy gives the log-probabilities of the rollout, and those of its reference. All [N]."""
    if not len(logprobs):
        return
    for condition, others in ((OTHER_START, old_logprobs), (OTHER_REFERENCE, ref_logprobs)):
        if others is not None:
            warn_at_start(condition, float((logprobs - others).detach().abs().max()), rounding=most)
