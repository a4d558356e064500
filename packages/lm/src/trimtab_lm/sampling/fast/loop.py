"""A loop for transformers' `generate`: draws tokens cheaply, and drops finished rows from the batch."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from trimtab_lm.compat.generation import CACHE, can_select, decoding, next_inputs
from trimtab_lm.interface import Model, base_of, learns_prompt

Loop = Callable[..., tuple[Tensor, Tensor]]
LARGE_VOCABULARY = 2048
"""The size from which a CPU draws a token faster from the cumulative distribution than by `torch.multinomial`."""
LEAVE = 0.75
"""Rows that have ended leave the batch when this share or less of it goes on; each time copies the cache."""
LOOK_EVERY = defaultdict(lambda: 16, cpu=1)
"""Tokens between two looks at which rows have ended, by the kind of device: each look waits for an accelerator."""
ROWS = ("attention_mask", "position_ids")
"""What a forward pass takes for each row, besides tokens and cache."""
KNOWN = {
    *("do_sample", "use_cache", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_return_sequences"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "suppress_tokens", "bad_words_ids"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
    *("transformers_version", "_from_model_config"),
    # Without beams and without an assistant these have no effect.
    *("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
}
"""Settings that `decode` follows: each works on a row by itself."""

_said = WeakKeyDictionary[nn.Module, set[str]]()


def loop_for(
    model: Model,
    config: GenerationConfig,
    kwargs: Mapping[str, object],
    *,
    neutral: Mapping[str, object],
    has_cache: bool,
) -> Loop | None:
    """Returns `decode`, for the argument `custom_generate` of `generate`; None if transformers' loop must run.

    Warns where completions that have ended stay in the batch, once for each model and its reasons.

    Args:
        config: complete, from `sampling_config`.
        kwargs: further arguments of the model's `generate`.
        neutral: values with which settings change nothing.
        has_cache: whether the model takes a cache whose rows can be selected.
    """
    base, reasons = base_of(model), ["use_cache=False"] if config.use_cache is False else []
    for name, value in config.to_diff_dict().items():
        if name not in KNOWN and value is not None and value is not False and value != neutral.get(name):
            reasons.append(f"{name}={value!r}")
    reasons += [f"generate was given {name}" for name in kwargs]
    if base.config.sub_configs:  # a model of images has positions and types of tokens of its own
        reasons.append(f"{type(base).__name__} has more parts than its text model")
    loop = None if reasons else decode
    if not (reasons or has_cache or learns_prompt(model) or base.config.is_encoder_decoder):
        reasons = [f"{type(base).__name__} takes no cache whose rows can be selected"]
    line, said = ", ".join(reasons), _said.setdefault(model, set())
    if line and line not in said:
        said.add(line)
        warnings.warn(
            f"Sampling takes longer, because completions that have ended stay in the batch, as in transformers' own "
            f"loop. The reason: {line}.",
            stacklevel=4,
        )
    return loop


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: object,
    generation_config: GenerationConfig,
    **inputs: Any,
) -> tuple[Tensor, Tensor]:
    """The loop of transformers' `generate`, for its argument `custom_generate`; see `draw` for what differs.

    Args:
        input_ids: [B, T].
        logits_processor: from ids [b, t] and scores [b, V] to scores; works on each row by itself.
        stopping_criteria: those that `generate` makes of `generation_config`, which says it all: a completion ends with
            an end token or at the length limit.
        generation_config: asks for greedy search or for sampling.

    Returns:
        The new tokens [B, R], and the log-probability of each in nats under the distribution from which it was drawn,
        after temperature and processors. What follows an end token means nothing.
    """
    (size, width), cache = input_ids.shape, inputs.get(CACHE)
    held = 0 if cache is None else cache.get_seq_length()
    unread = width - held if held else None  # None: all
    limit, ends = generation_config.max_length - width, generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long, device=input_ids.device).flatten()
    ids, places = input_ids, torch.arange(size, device=input_ids.device)
    goes_on, drawn, told = torch.ones_like(places, dtype=torch.bool), list[Tensor](), list[Tensor]()
    with decoding(model):
        while True:
            step = {"next_sequence_length": unread, "is_first_iteration": not drawn}
            outputs = model(**model.prepare_inputs_for_generation(ids, **step, **inputs), return_dict=True)
            inputs, unread = next_inputs(model, outputs, inputs), 1
            cache = inputs.get(CACHE)  # prefix tuning replaces the empty one in the first step
            scores = logits_processor(ids, outputs.logits[:, -1].to(ids.device, torch.float32))
            probs = scores.softmax(-1)
            tokens = draw(probs, places, size) if generation_config.do_sample else scores.argmax(-1)
            logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            drawn.append(tokens.new_zeros(size).index_copy(0, places, tokens))
            told.append(logprobs.new_zeros(size).index_copy(0, places, logprobs))
            goes_on &= ~torch.isin(tokens, ends)
            if len(drawn) >= limit:
                break
            if len(drawn) % LOOK_EVERY[ids.device.type]:
                continue
            left = int(goes_on.sum())
            if left == 0:
                break
            if left <= LEAVE * len(goes_on) and isinstance(cache, DynamicCache) and can_select(cache):
                kept = goes_on.nonzero()[:, 0]
                ids, places, goes_on = ids[kept], places[kept], goes_on[kept]
                cache.batch_select_indices(kept)
                inputs |= {name: inputs[name][kept] for name in ROWS if inputs.get(name) is not None}
    return torch.stack(drawn, dim=1), torch.stack(told, dim=1)


def draw(probs: Tensor, places: Tensor, size: int) -> Tensor:
    """Draws one token for each remaining row of a batch.

    Every place of the batch takes its random numbers, also a free one: what a row draws does not depend on the ends of
    the others, and is what transformers' `generate` draws, except for large vocabularies on a CPU. There
    `torch.multinomial` draws an exponential number for each entry of the vocabulary, which takes longer than the model;
    a uniform number for each row is enough (inverse transform sampling).

    Args:
        probs: [b, V], the distributions.
        places: [b], those of the rows in the batch.
        size: places of the batch.

    Returns:
        Token ids, [b].

    Raises:
        RuntimeError: probabilities are not finite.
    """
    if probs.device.type != "cpu" or probs.shape[1] < LARGE_VOCABULARY:
        everywhere = probs.new_ones(size, probs.shape[1]).index_copy(0, places, probs)
        return torch.multinomial(everywhere, 1)[places, 0]
    return draw_by_inversion(probs, 1 - torch.rand(size, 1, dtype=torch.float64)[places])


def draw_by_inversion(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token of each row at which the cumulative distribution reaches a number (inverse transform sampling).

    Args:
        probs: [b, V], the distributions, up to a factor for each row.
        uniform: [b, 1], float64, in (0, 1], so that no token of probability 0 is drawn.

    Returns:
        Token ids, [b].

    Raises:
        RuntimeError: probabilities are not finite.
    """
    tokens = []
    for row, number in zip(probs, uniform, strict=True):  # one row in float64 stays in the processor's cache
        reached = row.cumsum(-1, dtype=torch.float64)
        if not reached[-1].isfinite():
            raise RuntimeError(
                "No token can be drawn, because the model gives probabilities that are nan or inf. Look for weights "
                "that are not finite: the learning rate may be too high, or float16 may lack loss scaling."
            )
        tokens.append(torch.searchsorted(reached, number * reached[-1]))
    return torch.cat(tokens)
