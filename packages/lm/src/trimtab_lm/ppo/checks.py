"""Checks the arguments of a step once, and what must hold before the first update."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from trimtab_common.accelerators import moved
from trimtab_common.conditions import OTHER_REFERENCE, OTHER_SAMPLER
from trimtab_common.health import check_rows, warn_at_start
from trimtab_common.reward_checks import checked_scores
from trimtab_common.stats import total_over_ranks
from trimtab_lm.compat.generation import cache_found, cache_names
from trimtab_lm.sampling.rollout import SAMPLING_ALONE, RolloutBackend, takes_rows
from trimtab_lm.tokens.ids import check_ids, check_mask, check_tensor, vocabulary_size
from trimtab_lm.tokens.layout import pad
from trimtab_lm.tokens.positions import Positions

from .experience import Experience
from .passes import Trainer, padded_inputs, score

TOKENS = 4  # of two queries: enough to see a wrong mask, position or temperature


def check_step(
    trainer: Trainer,
    queries: list[Tensor],
    responses: list[Tensor],
    scores: Sequence[Tensor | float],
    response_masks: list[Tensor] | None,
    response_rewards: list[Tensor] | None,
    sampler_logprobs: list[Tensor] | None,
    *,
    is_first: bool,
    reads_ids: bool,
) -> tuple[Experience, Tensor]:
    """The arguments of a step, checked; see `PPOTrainer.step`. Collective.

    Only the first step searches responses for their queries, because a policy may learn to repeat them. A forward pass
    of 2024 reads token ids and masks on the device (`reads_ids`). Else the host lays them out.

    Returns:
        The rollout without columns, and the scores [B].

    Raises:
        TypeError, ValueError: with the name and the number of the row that is wrong.
    """
    config, policy, device = trainer.config, trainer.bare, trainer.accelerator.device
    decoder_start, batch_size = trainer.padding.decoder_start, config.batch_size
    columns = {"queries": queries, "responses": responses, "scores": scores}
    _check_entries({**columns, "response_masks": response_masks, "response_rewards": response_rewards}, batch_size)
    vocab_size = vocabulary_size(trainer.model.pretrained_model)
    queries, responses = check_ids("queries", queries, vocab_size), check_ids("responses", responses, vocab_size)
    for i, (query, row) in enumerate(zip(queries, responses, strict=True)):
        encoder, decoder = (len(query), len(row)) if decoder_start is not None else (0, len(query) + len(row))
        remedy = "Shorten the query, or sample fewer tokens (max_new_tokens)."
        policy.positions.check(f"queries[{i}] with responses[{i}]", encoder=encoder, decoder=decoder, remedy=remedy)
    if is_first and decoder_start is None and response_masks is None:
        _check_no_prompt(queries, responses)
    if response_masks is not None:
        for i, mask in enumerate(response_masks):
            check_mask(f"response_masks[{i}]", mask, responses[i], of="response")
    if response_rewards is not None:
        _check_rewards(response_rewards, response_masks or [torch.ones_like(row) for row in responses])
    tokens = sum(map(len, responses)) if response_masks is None else sum(map(torch.sum, response_masks))
    if total_over_ranks(float(tokens), device) < 2:
        raise ValueError(
            "The whole batch has one response token: advantages cannot be whitened over it. "
            "Use more or longer responses."
        )
    if sampler_logprobs is not None:
        check_fits(sampler_logprobs, responses)
    elif config.asynchronous_rollouts:
        raise ValueError(
            "asynchronous_rollouts=True needs the log-probabilities of the policy that sampled: give step "
            "sampler_logprobs, or set asynchronous_rollouts=False."
        )
    numbers = checked_scores(scores, [f"response {i}" for i in range(batch_size)], source="scores")
    given = torch.tensor(numbers, device=device)
    rollout = _rollout(
        trainer, queries, responses, given, response_masks, response_rewards, sampler_logprobs, reads_ids=reads_ids
    )
    return rollout, given


def _check_entries(columns: Mapping[str, Any], batch_size: int) -> None:
    """Raises unless each column is a list with an entry for each response of the batch, or None."""
    for name, column in columns.items():
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


def _rollout(
    trainer: Trainer,
    queries: list[Tensor],
    responses: list[Tensor],
    scores: Tensor,
    response_masks: list[Tensor] | None,
    response_rewards: list[Tensor] | None,
    sampler_logprobs: list[Tensor] | None,
    *,
    reads_ids: bool,
) -> Experience:
    """The checked arguments of a step, where the passes want them, and with the rewards of its turns in each score.

    If every response begins with the decoder start token, `model.generate` put it there, and it is left out. If only
    some do, the policy sampled it.
    """
    device, decoder_start = trainer.accelerator.device, trainer.padding.decoder_start
    place = device if reads_ids else torch.device("cpu")
    is_given = decoder_start is not None and all(len(row) and int(row[0]) == decoder_start for row in responses)
    leads = [int(is_given and len(row) > 1) for row in responses]

    def cut(rows: list[Tensor] | None, to: torch.device) -> Any:
        return rows and moved([row[lead:] for row, lead in zip(rows, leads, strict=True)], to)

    queries, responses = moved(queries, place), cut(responses, place)
    if (rewards := cut(response_rewards, device)) is not None:
        scores = scores + torch.stack([row.float().sum() for row in rewards])
    return Experience(
        queries=queries,
        responses=responses,
        response_masks=cut(response_masks, place),
        response_rewards=rewards,
        sampler_logprobs=cut(sampler_logprobs, device),
        model_inputs=trainer.prepare_model_inputs(queries, responses),
        lengths=torch.tensor(list(map(len, queries))) + torch.tensor(list(map(len, responses))),
        scores=scores,
    )


def check_fits(sampler_logprobs: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    """Raises ValueError unless there is a finite log-probability for each token of each response."""
    shapes, needed = [tuple(row.shape) for row in sampler_logprobs], [tuple(row.shape) for row in responses]
    if shapes != needed:
        raise ValueError(
            f"sampler_logprobs has the shapes {shapes}, the responses have {needed}: give a log-probability for each "
            "response token."
        )
    if not all(bool(row.isfinite().all()) for row in sampler_logprobs):
        raise ValueError("sampler_logprobs holds a number that is not finite. Nothing was trained; check the sampler.")


def check_rollout(rollout: Experience, *, other_reference_from: float | None) -> Experience:
    """The rollout with its columns on the host, where they are checked; waits for the device once.

    Args:
        other_reference_from: nats from which policy and reference differ: before the first update they are the same
            model, unless the caller gave another reference. None: there were updates.

    Raises:
        TrainingDivergedError: rows are not finite; it names them.
    """
    columns = {name: value for name, value in vars(rollout).items() if isinstance(value, Tensor)}
    host: dict[str, Any] = dict(zip(columns, moved([*columns.values()], torch.device("cpu")), strict=True))
    seen = replace(rollout, **host)
    check_rows(
        {
            "logprobs": seen.logprobs,
            "ref_logprobs": seen.ref_logprobs,
            "values": seen.values,
            "kl": seen.kls,
            "non_score_rewards": seen.non_score_reward,
            "advantages": seen.advantages,
            "returns": seen.returns,
        },
        what="response",
    )
    if other_reference_from is not None:
        gap = float((seen.logprobs - seen.ref_logprobs).abs().max())
        warn_at_start(OTHER_REFERENCE, gap, rounding=other_reference_from)
    return seen


@torch.no_grad()
def check_sampler(trainer: Trainer, queries: Sequence[Tensor], config: GenerationConfig) -> None:
    """`model.generate`, with left padding and a cache, and the trainer find the same tokens equally likely."""
    policy, padding, config = trainer.bare, trainer.padding, copy.deepcopy(config)
    model = policy.pretrained_model
    room = Positions.of(model).room(max(map(len, queries)), is_encoder_decoder=model.config.is_encoder_decoder)
    new_tokens = TOKENS if room is None else min(TOKENS, room)
    config.do_sample, config.max_length, config.max_new_tokens = False, None, new_tokens
    config.output_logits = config.return_dict_in_generate = True
    for name in SAMPLING_ALONE:
        setattr(config, name, None)
    # The longest and the shortest: padding is what goes wrong.
    order = sorted(queries, key=len)
    chosen = [order[0], order[-1]] if len(order) > 1 else order
    input_ids, mask = pad(chosen, config.pad_token_id, side="left")
    inputs = {"input_ids": input_ids.to(model.device), "attention_mask": mask.to(model.device)}
    with cache_found(model, *cache_names(model)):
        output = model.generate(**inputs, generation_config=config, tokenizer=trainer.tokenizer)
    prompt = 1 if model.config.is_encoder_decoder else input_ids.shape[1]
    responses = list(output.sequences[:, prompt:])
    sampled = (
        torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, torch.stack(responses)[..., None])[..., 0]
    )

    chosen = [query.to(model.device) for query in chosen]
    inputs = padded_inputs(chosen, responses, padding)
    scored = score(policy, policy, chosen, responses, inputs, padding=padding, temperature=1.0).logprobs
    # After an end token generate only pads.
    ends = torch.tensor(config.eos_token_id if config.eos_token_id is not None else [], device=model.device).view(-1)
    ended = torch.isin(torch.stack(responses), ends).cumsum(1)
    counts = (ended == 0) | ((ended == 1) & torch.isin(torch.stack(responses), ends))
    gap = float(((sampled - scored) * counts).abs().max())
    warn_at_start(OTHER_SAMPLER, gap, rounding=trainer.rounding)


def check_batch(batch: object) -> None:
    """Raises ValueError unless a batch of the dataset has token ids."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return
    came = f"the columns {sorted(batch)}" if isinstance(batch, Mapping) else f"no columns ({type(batch).__name__})"
    raise ValueError(
        f"A batch of the dataset has {came}, and train() reads the token ids of its prompts in 'input_ids'. Give rows "
        "with texts in 'query' or 'prompt', which PPOTrainer tokenizes, or with 'input_ids'; a data_collator has to "
        "keep them."
    )


def check_generate(
    rollout: RolloutBackend, generation_kwargs: Mapping[str, object], *, generate_ref_response: bool
) -> None:
    """Raises ValueError unless the rollout supports the arguments of `generate`."""
    if generation_kwargs or generate_ref_response:
        raise ValueError(
            f"The rollout samples by its own settings, from the policy alone: leave {sorted(generation_kwargs)}, "
            "length_sampler and generate_ref_response out."
        )
    if takes_rows(rollout):
        raise ValueError(
            "generate returns responses without their masks: the environment's tokens would be trained on. Call train, "
            "or EnvironmentRollout.generate and step(..., response_masks, response_rewards=...)."
        )


def check_logged(batch: Mapping[str, Sequence[Any]], rewards: Sequence[Any], columns: Sequence[str]) -> None:
    """Raises ValueError unless the batch has the columns to log, with a row for each reward."""
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
