"""The policy that a ratio is to: which of the log-probabilities that are known of sampled tokens are its own."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .batches import Group, column


class OldPolicy(NamedTuple):
    """What is known of the N tokens of a micro-batch as they were sampled, [N] each, in nats.

    Attributes:
        logprobs: the denominator of the ratio.
        trainer: what the trainer gives the tokens under the policy that sampled, or was to sample.
        sampler: what the sampler told of the same policy; None where it told nothing, or the policy has moved since.
        is_current: the policy as it is has sampled the tokens, as far as the trainer knows.
    """

    logprobs: Tensor
    trainer: Tensor
    sampler: Tensor | None
    is_current: bool


def old_policy(groups: Sequence[Group], logprobs: Tensor, *, is_fresh: bool, clips_to_sampler: bool) -> OldPolicy:
    """Chooses among the column `old` of the groups, the policy as it is, and the column `sampler`.

    `old` is what the trainer gave the tokens before it moved, where it was asked. Otherwise the policy as it is stands
    for it in the first optimizer step of a rollout, and the sampler afterwards.

    Args:
        groups: of the micro-batch.
        logprobs: [N], of the policy as it is.
        is_fresh: whether this is the first optimizer step of the rollout.
        clips_to_sampler: the ratio is to the sampler in every step, because the policy moved while it sampled.
    """
    old, sampler = (column(groups, name, logprobs.device) for name in ("old", "sampler"))
    trainer = logprobs.detach() if old is None else old
    is_current = old is None and is_fresh
    if sampler is not None and clips_to_sampler:
        return OldPolicy(sampler, trainer, sampler, is_current)
    if sampler is not None and old is None and not is_fresh:
        return OldPolicy(sampler, trainer, None, is_current)
    return OldPolicy(trainer, trainer, sampler, is_current)
