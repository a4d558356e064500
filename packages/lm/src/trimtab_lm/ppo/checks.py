"""The arguments of a step are checked here, once; the code after it trusts them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab_common.scores import checked_scores
from trimtab_common.stats import total_over_ranks
from trimtab_lm.environments.rollout import EnvironmentRollout
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.ids import check_ids, check_mask, check_tensor, vocabulary_size
from trimtab_lm.tokens.positions import Positions

from .config import PPOConfig
from .rollout import Rollout


def check_step(
    queries: list[Tensor],
    responses: list[Tensor],
    scores: Sequence[Tensor | float],
    response_masks: list[Tensor] | None,
    response_rewards: list[Tensor] | None,
    sampler_logprobs: list[Tensor] | None,
    config: PPOConfig,
    model: PreTrainedModelWrapper,
    decoder_start: int | None,
    *,
    is_first: bool,
    place: torch.device,
    device: torch.device,
) -> tuple[Rollout, Tensor]:
    """The arguments of a step, checked. Collective.

    Args:
        queries: `batch_size` rows of token ids.
        responses: `batch_size` rows of token ids.
        scores: a number for each response.
        response_masks: for each response token 1, or 0 where the policy did not write it; None: all are the policy's.
        response_rewards: for each response token, the reward that an environment gave at it; None: none.
        sampler_logprobs: for each response token its log-probability as it was sampled, in nats; None if unknown.
        config: of the trainer.
        model: the policy.
        decoder_start: what an encoder-decoder policy reads first, which is taken off the responses; else None.
        is_first: whether no step was taken before. Only then responses are searched for their queries, because a
            policy may learn to repeat them.
        place: for token ids and masks, which are laid out on the host, unless a forward pass of 2024 reads them.
        device: for numbers.

    Returns:
        The rollout without columns, and the scores [B].

    Raises:
        TypeError, ValueError: with the name and the number of the row that is wrong.
    """
    batch_size = config.batch_size
    for name, column in (
        ("queries", queries),
        ("responses", responses),
        ("scores", scores),
        ("response_masks", response_masks),
        ("response_rewards", response_rewards),
    ):
        if column is None:
            continue
        if not isinstance(column, list):
            raise TypeError(
                f"{name} must be a list of tensors, one per response, got {type(column).__name__}. Use list({name})."
            )
        if len(column) != batch_size:
            raise ValueError(
                f"{name} has {len(column)} entries, but batch_size is {batch_size}. Give one entry per response of the "
                "batch, or make the config with the batch_size that you use."
            )
    vocab_size = vocabulary_size(model.pretrained_model)
    for name, column in {"queries": queries, "responses": responses}.items():
        check_ids(name, column, vocab_size)
    _check_room(queries, responses, model)
    if is_first and decoder_start is None and response_masks is None:
        _check_no_prompt(queries, responses)
    if response_masks is not None:
        for i, mask in enumerate(response_masks):
            check_mask(f"response_masks[{i}]", mask, responses[i], of="response")
    if response_rewards is not None:
        _check_rewards(response_rewards, response_masks or [torch.ones_like(row) for row in responses])
    tokens = [mask.sum() for mask in response_masks] if response_masks else [len(row) for row in responses]
    if total_over_ranks(float(sum(tokens)), device) < 2:
        raise ValueError(
            "The whole batch has one response token: advantages cannot be whitened over it. "
            "Use more or longer responses."
        )
    if sampler_logprobs is not None:
        check_fits(sampler_logprobs, responses)
    elif config.clips_to_sampler:
        raise ValueError(
            "asynchronous_rollouts=True takes the ratio to the policy that sampled: give step sampler_logprobs, or set "
            "asynchronous_rollouts=False."
        )
    numbers = checked_scores(scores, [f"response {i}" for i in range(batch_size)], source="scores")
    given = torch.tensor(numbers, device=device)
    # `model.generate` returns the decoder start token in front of a response.
    leads = [int(decoder_start is not None and len(row) > 1 and int(row[0]) == decoder_start) for row in responses]

    def after_start(column: list[Tensor] | None, at: torch.device) -> list[Tensor] | None:
        return None if column is None else [row[lead:].to(at) for row, lead in zip(column, leads, strict=True)]

    rewards = after_start(response_rewards, device)
    rollout = Rollout(
        queries=[row.to(place) for row in queries],
        responses=after_start(responses, place) or [],
        response_masks=after_start(response_masks, place),
        response_rewards=rewards,
        sampler_logprobs=after_start(sampler_logprobs, device),
        model_inputs={},
        scores=given if rewards is None else given + torch.stack([row.float().sum() for row in rewards]),
    )
    return rollout, given


def check_fits(sampler_logprobs: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    """ValueError unless there is a finite log-probability for each token of each response."""
    shapes, needed = [tuple(row.shape) for row in sampler_logprobs], [tuple(row.shape) for row in responses]
    if shapes != needed:
        raise ValueError(
            f"sampler_logprobs has the shapes {shapes}, the responses have {needed}: give a log-probability for each "
            "response token."
        )
    if not all(bool(row.isfinite().all()) for row in sampler_logprobs):
        raise ValueError("sampler_logprobs holds a number that is not finite. Nothing was trained; check the sampler.")


def check_generate(
    rollout: RolloutBackend, generation_kwargs: Mapping[str, object], *, generate_ref_response: bool
) -> None:
    """ValueError unless a rollout can do what `generate` is asked for."""
    if generation_kwargs or generate_ref_response:
        raise ValueError(
            f"The rollout samples by its own settings, from the policy alone: leave {sorted(generation_kwargs)}, "
            "length_sampler and generate_ref_response out."
        )
    if isinstance(rollout, EnvironmentRollout):
        raise ValueError(
            "generate returns responses without their masks: the environment's tokens would be trained on. Call train, "
            "or EnvironmentRollout.generate and step(..., response_masks, response_rewards=...)."
        )


def check_logged(batch: Mapping[str, Sequence[Any]], rewards: Sequence[Any], columns: Sequence[str]) -> None:
    """ValueError unless the batch has the columns that shall be logged, with a row for each reward."""
    missing = [name for name in columns if name not in batch]
    if missing:
        raise ValueError(
            f"columns_to_log names {', '.join(missing)}, the batch has {', '.join(batch)}. Add the column to the batch "
            "(the decoded responses under 'response'), or give columns_to_log."
        )
    uneven = [name for name in columns if len(batch[name]) != len(rewards)]
    if uneven:
        raise ValueError(
            f"{len(rewards)} rewards, but {len(batch[uneven[0]])} rows in {uneven[0]!r}: give one reward per row."
        )


def _check_room(queries: Sequence[Tensor], responses: Sequence[Tensor], model: PreTrainedModelWrapper) -> None:
    positions = Positions.of(model.pretrained_model)
    remedy = "Shorten the query, or sample fewer tokens (max_new_tokens)."
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        what = f"queries[{i}] with responses[{i}]"
        if model.is_encoder_decoder:
            positions.check(what, encoder=len(query), decoder=len(response), remedy=remedy)
        else:
            positions.check(what, decoder=len(query) + len(response), remedy=remedy)


def _check_no_prompt(queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    """Raise ValueError if every response begins with its whole query, as `generate` returns it with the prompt.

    A query of one repeated token is no evidence, and fewer than 8 tokens of others are none either: a policy can
    happen to repeat those.
    """
    telling = sum(len(query) for query in queries if bool((query != query[0]).any()))
    pairs = zip(queries, responses, strict=True)
    if telling >= 8 and all(torch.equal(query, response[: len(query)].to(query.device)) for query, response in pairs):
        raise ValueError(
            "Every response begins with its whole query, so the prompts would be trained on as if the policy had "
            "written them. Call generate(..., return_prompt=False), or cut response[len(query):]. If the policy does "
            "repeat its queries, pass response_masks of ones."
        )


def _check_rewards(response_rewards: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    for i, (rewards, mask) in enumerate(zip(response_rewards, masks, strict=True)):
        check_tensor(f"response_rewards[{i}]", rewards, "numbers")
        if rewards.shape != mask.shape:
            raise ValueError(
                f"response_rewards[{i}] has shape {list(rewards.shape)}, its response has {list(mask.shape)}: give a "
                "number for each response token, 0 where there is no reward."
            )
        if not bool(rewards.isfinite().all()) or bool(rewards[mask == 0].any()):
            raise ValueError(
                f"response_rewards[{i}] must be finite, and 0 at tokens that response_masks leaves out: the reward of "
                "a turn is at its last token."
            )
