"""Sampling responses: a list of 1-D queries in, a list of 1-D responses out."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from trimtab_common.sharding import whole_weights
from trimtab_common.tracking import progress
from trimtab_lm.compat.generation import CACHE, cache_argument, cache_found, empty_cache
from trimtab_lm.interface import Model, base_of, learns_prompt
from trimtab_lm.tokens.positions import Positions, positioned
from trimtab_lm.tokens.router import has_router_loss

from .batches import AS_MANY_AS_FIT, Automatic, batches_of, completions_at_a_time, new_tokens
from .fast import loop_for

PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
}
"""Settings under which a sampled token follows the model's own distribution, whatever its generation config says."""
SAMPLING_ALONE = ("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


class Completion(NamedTuple):
    """What a model has written.

    Attributes:
        ids: [R], the new tokens.
        logprobs: [R], in nats, of each token under the distribution from which it was drawn, after temperature and
            processors; None where the loop of transformers drew it.
    """

    ids: Tensor
    logprobs: Tensor | None = None

    def cut(self, length: int, device: torch.device) -> "Completion":
        """The first tokens, on a device."""
        logprobs = None if self.logprobs is None else self.logprobs[:length].to(device)
        return Completion(self.ids[:length].to(device), logprobs)


class LengthSampler:
    """Draws a number of new tokens, uniform in [min_value, max_value), with numpy's global generator."""

    def __init__(self, min_value: int, max_value: int):
        if not 0 < min_value < max_value:
            raise ValueError(
                f"LengthSampler({min_value}, {max_value}) has nothing to draw: lengths come from [min_value, "
                "max_value) and start at 1. Give 0 < min_value < max_value."
            )
        self.values = range(min_value, max_value)

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


def sampling_config(model: Any, *, pad_token_id: int, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
    """The complete generation config for `kwargs`, and those kwargs that are no generation settings.

    Sampling is plain unless `kwargs` say otherwise: a `top_k` or `top_p` of the model's own generation config, or
    transformers' default top_k of 50, would make the sampler another policy than the one that is trained. Token ids
    and lengths come from the model's generation config. `top_k=0.0` and `min_length=-1` mean off.
    """
    config = GenerationConfig(pad_token_id=pad_token_id)
    if "top_k" in kwargs:
        kwargs["top_k"] = int(kwargs["top_k"] or 0)
    if "min_length" in kwargs:
        kwargs["min_length"] = max(int(kwargs["min_length"]), 0)
    defaults = {name: value for name, value in model.generation_config.to_dict().items() if name not in PLAIN_SAMPLING}
    if "max_new_tokens" in kwargs:
        defaults["max_length"] = None
    config.update(**defaults, defaults_only=True)
    rest = config.update(**kwargs)
    for name, neutral in PLAIN_SAMPLING.items():
        # transformers complains of settings of sampling where there is none.
        if name not in kwargs and (config.do_sample or name not in SAMPLING_ALONE):
            setattr(config, name, neutral)
    # `generate` follows min_new_tokens where there is one, and would warn of the other.
    if config.min_new_tokens:
        config.min_length = None
    else:
        config.min_new_tokens = None
    if config.num_beams != 1 or config.num_return_sequences not in (None, 1):
        raise ValueError(
            f"num_beams={config.num_beams} and num_return_sequences={config.num_return_sequences}: one sampled "
            "response per query is needed. Leave both at 1, and repeat a query in the list to sample it again."
        )
    return config, rest


TRUNCATED = "unlikely tokens are never drawn, so the KL is estimated on another distribution and drifts below 0"
REWEIGHTED = "tokens are drawn from reweighted probabilities that neither policy nor reference has: the KL is biased"
FORBIDDEN = "tokens (the end token above all) are forbidden by force, which the log-probs do not know: negative KL"
DISTORTIONS = {
    "top_k": TRUNCATED,
    "top_p": TRUNCATED,
    "min_p": TRUNCATED,
    "typical_p": TRUNCATED,
    "epsilon_cutoff": TRUNCATED,
    "eta_cutoff": TRUNCATED,
    "repetition_penalty": REWEIGHTED,
    "encoder_repetition_penalty": REWEIGHTED,
    "sequence_bias": REWEIGHTED,
    "guidance_scale": REWEIGHTED,
    "exponential_decay_length_penalty": REWEIGHTED,
    "no_repeat_ngram_size": FORBIDDEN,
    "encoder_no_repeat_ngram_size": FORBIDDEN,
    "min_length": FORBIDDEN,
    "min_new_tokens": FORBIDDEN,
    "bad_words_ids": FORBIDDEN,
    "suppress_tokens": FORBIDDEN,
    "begin_suppress_tokens": FORBIDDEN,
    "forced_bos_token_id": FORBIDDEN,
    "forced_eos_token_id": FORBIDDEN,
}
"""Settings that make the sampler another policy than the one whose log-probabilities are taken, and what they do."""


def distortions(config: GenerationConfig) -> list[str]:
    """What in a generation config makes tokens follow another distribution than the policy's, one line each.

    The temperature is not among them: it enters the log-probabilities.
    """
    if not config.do_sample:
        return ["do_sample=False: each response is the mode, not a sample, so KL and advantages mean nothing"]
    return [
        f"{name}={value}: {effect}"
        for name, effect in DISTORTIONS.items()
        if (value := getattr(config, name, None)) is not None and value not in (PLAIN_SAMPLING.get(name), 0)
    ]


def eos_token_ids(model: Any, tokenizer_eos: int | None, config: GenerationConfig | None = None) -> list[int]:
    """Every token that ends a response: the generation config may name several (Llama 3, Gemma)."""
    ids = (config or model.generation_config).eos_token_id
    ids = tokenizer_eos if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def cut_at_eos(response: Tensor, eos_ids: Sequence[int], padding: int | None) -> Tensor:
    """`response` [R] up to its first end token, which stays; without one, less the `padding` tokens at its end."""
    ends = torch.isin(response, torch.tensor(eos_ids, dtype=response.dtype, device=response.device)).nonzero()
    if len(ends):
        return response[: int(ends[0]) + 1]
    if padding is None:
        return response
    real = (response != padding).nonzero()
    return response[: int(real[-1]) + 1] if len(real) else response[:1]


def response_texts(
    tokenizer: Any, queries: Sequence[Tensor], responses: Sequence[Tensor], *, is_encoder_decoder: bool = False
) -> list[str]:
    """What each response [R] adds to the text of its query [Q], special tokens left out; a decoder's stands alone.

    Decoded by itself, a response would lose the space before its first word with tokenizers of SentencePiece's kind
    (Llama), and query + response would run two words into one.
    """
    if is_encoder_decoder:
        return list(tokenizer.batch_decode(list(responses), skip_special_tokens=True))
    starts = tokenizer.batch_decode(list(queries), skip_special_tokens=True)
    rows = [torch.cat([query, response.to(query.device)]) for query, response in zip(queries, responses, strict=True)]
    texts = []
    for start, whole, response in zip(
        starts, tokenizer.batch_decode(rows, skip_special_tokens=True), responses, strict=True
    ):
        # A character of several tokens may begin in the query and end in the response.
        is_continued = whole.startswith(start)
        texts.append(whole[len(start) :] if is_continued else tokenizer.decode(response, skip_special_tokens=True))
    return texts


def pad(rows: Sequence[Tensor], value: int, *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Rows [T_i] as one tensor [B, max T] and its mask, padded on a side. The mask tells padding, not the value."""
    width = max(len(row) for row in rows)
    padded = rows[0].new_full((len(rows), width), value)
    mask = torch.zeros_like(padded, dtype=torch.long)
    for i, row in enumerate(rows):
        span = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        padded[i, span] = row
        mask[i, span] = 1
    return padded, mask


@torch.no_grad()
def generate(
    model: Any,
    queries: Sequence[Tensor],
    config: GenerationConfig,
    *,
    eos_ids: Sequence[int],
    batch_size: int = AS_MANY_AS_FIT,
    return_prompt: bool,
    **kwargs: Any,
) -> list[Tensor]:
    """One response of `model` to each 1-D query, in the order of the queries, on their device; see `sample_groups`.

    Args:
        model: a transformers model, in eval mode.
        queries: rows of token ids, [T] each.
        config: complete, from `sampling_config`.
        eos_ids: tokens that end a response.
        batch_size: queries at a time; by default as many as fit.
        return_prompt: whether a response begins with its query; means nothing to an encoder-decoder model.
        kwargs: further arguments of the model's `generate`.
    """
    groups = sample_groups(model, queries, config, eos_ids=eos_ids, batch_size=batch_size, **kwargs)
    responses = [group[0].ids for group in groups]
    if model.config.is_encoder_decoder or not return_prompt:
        return responses
    return [torch.cat(pair) for pair in zip(queries, responses, strict=True)]


@torch.no_grad()
def sample_groups(
    model: Any,
    prompts: Sequence[Tensor],
    config: GenerationConfig,
    *,
    eos_ids: Sequence[int],
    batch_size: int = AS_MANY_AS_FIT,
    num_generations: int = 1,
    share_prompts: bool = True,
    **kwargs: object,
) -> list[list[Completion]]:
    """Completions of each prompt, unpadded, in the order of the prompts, on their device.

    Collective if the model is sharded: every process calls it as often, with any number of prompts, also none.

    Prompts are taken in batches of like length and padded on the left; transformers derives the position ids from the
    mask. A completion ends with its end token, where it has one; an end token inside a prompt is harmless. The decoder
    start token of an encoder-decoder model is not part of a completion.

    transformers' `generate` prepares everything. The loop is that of `fast.loop_for`, except where a setting or an
    argument is asked for that it does not know, such as `stop_strings` or any `cache_implementation`: then it is that
    of transformers, and a warning says why.

    Args:
        model: a transformers model, in eval mode.
        prompts: rows of token ids, [T] each.
        config: complete, from `sampling_config`.
        eos_ids: tokens that end a completion.
        batch_size: completions at a time; by default as many as fit, see `completions_at_a_time`.
        num_generations: completions of each prompt.
        share_prompts: run a prompt once for its whole group, where the cache can be repeated.
        kwargs: further arguments of the model's `generate`.

    Raises:
        ValueError: the longest prompt and its completion have no room in the model's positions.
    """
    longest = max(map(len, prompts), default=0)
    new, is_encoder_decoder = new_tokens(model, longest, config), model.config.is_encoder_decoder
    remedy = "Lower max_new_tokens, or shorten the queries."
    Positions.of(model).check_sample(longest, new, is_encoder_decoder=is_encoder_decoder, remedy=remedy)
    # Only a criterion of its own ends a completion without an end token; else a pad token at the end was sampled.
    padding = config.pad_token_id if ends_without_eos(config, kwargs) else None
    completions: list[list[Completion]] = [[] for _ in prompts]
    if isinstance(batch_size, Automatic):
        batch_size = completions_at_a_time(model, longest + new)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    loop = loop_for(model, config, kwargs, neutral=PLAIN_SAMPLING)
    if loop is not None:
        kwargs["custom_generate"] = loop
    batches = batches_of(prompts, batch_size, num_generations, is_split=learns_prompt(model))
    with whole_weights(model):  # once, and not for each token
        for chosen, repeats in progress(batches, "generating"):
            shared = repeats if share_prompts and config.do_sample else 1
            read = [i for i in chosen for _ in range(repeats // shared)]
            rows = _sample(model, [prompts[i] for i in read], config, repeats=shared, **kwargs)
            for number, row in enumerate(rows):
                prompt = read[number // shared]
                completions[prompt].append(row.cut(len(cut_at_eos(row.ids, eos_ids, padding)), prompts[prompt].device))
    return completions


def ends_without_eos(config: GenerationConfig, kwargs: Mapping[str, object]) -> bool:
    """Whether something other than an end token or the length limit can end a completion."""
    return bool(config.stop_strings) or "stopping_criteria" in kwargs


def _sample(
    model: Any, prompts: Sequence[Tensor], config: GenerationConfig, *, repeats: int, **kwargs: object
) -> list[Completion]:
    """P * repeats rows of new tokens; the longest prompt comes first."""
    config = copy.deepcopy(config)
    config.num_return_sequences = repeats
    device = model.get_input_embeddings().weight.device
    input_ids, mask = (column.to(device) for column in pad(prompts, config.pad_token_id, side="left"))
    takes_cache = config.use_cache is not False and config.cache_implementation is None and not learns_prompt(model)
    if repeats > 1 and takes_cache and (cache := prompt_cache(model, input_ids, mask, repeats=repeats)) is not None:
        kwargs[CACHE] = cache
    if has_router_loss(model):  # which has no place for the cached tokens of the mask
        kwargs["output_router_logits"] = False
    # The weights are whole, so that no process needs to go on until the others have ended.
    with cache_found(model):
        output = model.generate(
            input_ids=input_ids, attention_mask=mask, generation_config=config, synced_gpus=False, **kwargs
        )
    if isinstance(output, tuple):  # of `fast.loop_for`
        return [Completion(*row) for row in zip(*output, strict=True)]
    return [Completion(row) for row in output[:, 1 if model.config.is_encoder_decoder else input_ids.shape[1] :]]


def prompt_cache(model: Model, input_ids: Tensor, attention_mask: Tensor, *, repeats: int) -> DynamicCache | None:
    """Keys and values of all but the last token of left-padded prompts, each prompt's repeated for its completions.

    The last token is left to the first step of generation, which wants its logits.

    Args:
        model: a transformers model, in eval mode.
        input_ids: [P, T].
        attention_mask: [P, T], 0 at padding.
        repeats: completions of each prompt.

    Returns:
        The cache, of P * repeats rows; None where the model has none whose rows can be repeated.
    """
    cache, forward = empty_cache(model), base_of(model).forward
    if cache is None or input_ids.shape[1] == 1:
        return cache
    inputs = {"input_ids": input_ids[:, :-1], "attention_mask": attention_mask[:, :-1]}
    options = {cache_argument(forward) or CACHE: cache, "use_cache": True, "logits_to_keep": 1}
    model(**positioned(forward, inputs), **options)
    cache.batch_repeat_interleave(repeats)
    return cache
