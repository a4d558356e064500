"""The loss of fine-tuning."""

from torch import Tensor


def token_nll(logprobs: Tensor, *, count: Tensor | int) -> Tensor:
    """-sum of log p [N] over `count`: the cross-entropy per token, in nats, where count is the tokens of all parts."""
    return -logprobs.sum() / count
