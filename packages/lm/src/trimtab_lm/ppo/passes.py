"""Forward passes of PPO: what the algorithm asks `batched_forward_pass` for, and the built-in one."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trimtab_lm.tokens.dropout import without_dropout

from .config import PPOConfig
from .policy import ActorCritic, ReferencePolicy, exact_kl_of
from .rollout import UNKNOWN, Rollout
from .score import Padding, Scores, completed, full_logprobs, score


class Wanted(NamedTuple):
    """What the replaced methods of a trainer read, beyond what the built-in ones do.

    Attributes:
        has_own_pass: model inputs on the device, for a `batched_forward_pass`.
        in_rewards: logits of the whole vocabulary, for a `compute_rewards` with the full KL.
        in_updates: the same, for a `loss` or a `train_minibatch`.
    """

    has_own_pass: bool
    in_rewards: bool
    in_updates: bool

    @classmethod
    def of(cls, is_replaced: Callable[..., bool], config: PPOConfig) -> "Wanted":
        """`is_replaced` tells whether one of the methods that it is given is replaced."""
        has_own_pass = is_replaced("batched_forward_pass")
        in_rewards = config.kl_penalty == "full" and (has_own_pass or is_replaced("compute_rewards"))
        return cls(has_own_pass, in_rewards=in_rewards, in_updates=is_replaced("loss", "train_minibatch"))


class Models(Protocol):
    """What a trainer has for its forward passes."""

    config: PPOConfig
    padding: Padding
    model: Any
    ref_model: Any
    actor_critic: Any
    bare: ActorCritic
    reference_policy: ReferencePolicy

    @property
    def temperature(self) -> float: ...
    def wanted(self) -> Wanted: ...
    def batched_forward_pass(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...


def forward(models: Models, model: Any, rollout: Rollout) -> Scores:
    """What `batched_forward_pass` says of a minibatch, in its own width and mask.

    Args:
        models: the trainer.
        model: its `actor_critic` or `reference_policy`.
        rollout: a minibatch; evaluated before, if this is an update.
    """
    wanted, temperature = models.wanted(), models.temperature
    wants_logits = wanted.in_updates if torch.is_grad_enabled() else wanted.in_rewards
    columns = models.batched_forward_pass(
        *(model, rollout.queries, rollout.responses, rollout.model_inputs),
        # The entropy of a pass of 2024 comes from its logits.
        return_logits=wants_logits or (wanted.has_own_pass and model is models.actor_critic),
        response_masks=rollout.response_masks,
    )
    before = None if rollout.mask is UNKNOWN else rollout.mask
    scores = columns if isinstance(columns, Scores) else completed(columns, before, temperature=temperature)
    return scores if wants_logits else scores.without_logits()


def built_in_pass(
    models: Models,
    model: nn.Module | None,
    queries: list[Tensor],
    responses: list[Tensor],
    model_inputs: dict[str, Tensor],
    response_masks: list[Tensor] | None,
    *,
    return_logits: bool,
) -> Scores:
    """See `PPOTrainer.batched_forward_pass`."""
    reader: ActorCritic | ReferencePolicy
    if any(model is one for one in (models.model, models.actor_critic, models.bare)):
        reader, run = models.bare, models.actor_critic
    elif any(model is one for one in (None, models.ref_model, models.reference_policy)):
        reader = run = models.reference_policy
    else:
        raise ValueError("batched_forward_pass runs trainer.model or trainer.ref_model; it was given another model.")
    with without_dropout(models.actor_critic):
        return score(
            *(reader, run, queries, responses, model_inputs, response_masks),
            padding=models.padding,
            device=next(models.bare.parameters()).device,
            temperature=models.temperature,
            return_logits=return_logits,
            return_head_inputs=models.config.kl_penalty == "full" and not (return_logits or torch.is_grad_enabled()),
        )


def kl_terms(models: Models, policy: Scores, reference: Scores, sampled: Tensor | None) -> tuple[Tensor, ...]:
    """What `compute_rewards` takes of policy and reference, and the exact KL where it takes that too.

    Args:
        models: the trainer.
        policy: of the whole batch.
        reference: of the whole batch.
        sampled: [B, R], log-probabilities of the policy that sampled. Where it is an older one, the estimates of the
            KL on its samples are those of its own KL.
    """
    temperature = models.temperature
    if models.config.kl_penalty != "full":
        is_older = models.config.asynchronous_rollouts
        return (sampled if sampled is not None and is_older else policy.logprobs), reference.logprobs
    if policy.head_inputs is None or reference.head_inputs is None:
        return tuple(full_logprobs(one.logits, temperature=temperature) for one in (policy, reference))
    exact = exact_kl_of(models.bare, models.reference_policy, policy, reference, temperature=temperature)
    return policy.logprobs, reference.logprobs, exact
