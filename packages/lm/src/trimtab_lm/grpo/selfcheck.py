"""What must hold before the first update, and which completions are to blame where an update cannot be made."""

from collections.abc import Callable, Sequence

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from trimtab_common.conditions import OTHER_REFERENCE, OTHER_START
from trimtab_common.health import check_rows, warn_at_start
from trimtab_lm.hf.types import Batch
from trimtab_lm.interface import Model
from trimtab_lm.tokens.layout import token_columns

from .batches import Group


def check_start(logprobs: Tensor, old_logprobs: Tensor | None, ref_logprobs: Tensor | None, *, most: float) -> None:
    """Before any update the policy gives the log-probabilities of the rollout, and those of its reference. All [N].

    A check that fails warns with its cause and cure.
    """
    if not len(logprobs):
        return
    for condition, others in ((OTHER_START, old_logprobs), (OTHER_REFERENCE, ref_logprobs)):
        if others is not None:
            warn_at_start(condition, float((logprobs - others).detach().abs().max()), rounding=most)


@torch.no_grad()
def check_completions(
    groups: Sequence[Group], model: Model, lay_out: Callable[[Sequence[Group]], Batch], *, temperature: float
) -> None:
    """Scores each completion alone, because one that is not finite may spoil those that it is laid out with.

    Args:
        groups: of a micro-batch whose loss is not finite.
        model: the policy, unwrapped, on one device.
        lay_out: makes a micro-batch of groups.
        temperature: of the samples.

    Raises:
        TrainingDivergedError: names the completions of the micro-batch whose log-probabilities are not finite.
    """
    sums = []
    for one in (group.only(i) for group in groups for i in range(len(group.completions))):
        batch = send_to_device(lay_out([one]), model.device)
        sums.append(model(tokens=token_columns(batch), temperature=temperature).logprobs.sum())
    check_rows({"logprobs": torch.stack(sums)}, what="completion")
