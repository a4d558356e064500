"""Sampling responses: a list of 1-D queries in, a list of 1-D responses out."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from trimtab_common.accelerators import memory_of
from trimtab_common.sharding import whole_weights
from trimtab_common.tracking import progress
from trimtab_lm.compat.generation import CACHE, cache_found, cache_names, has_selectable_cache, replaced
from trimtab_lm.interface import Model, base_of, decoder_config, learns_prompt
from trimtab_lm.tokens.layout import pad
from trimtab_lm.tokens.positions import Positions, positioned
from trimtab_lm.tokens.router import has_router_loss

from .fast import loop_for
from .rollout import PLAIN_SAMPLING, Rollout

MIB = 2**20
CPU_ROOM, DEVICE_ROOM = 256 * MIB, 1024 * MIB
"""Bytes for the keys, values and scores of completions sampled at a time, for a small model, where the device's memory
is not known."""
COPIES = 4
"""What training holds beside a weight: a reference's copy, the gradient and Adam's two moments."""
SCORE_BYTES = 32
"""Bytes for each entry of a row's vocabulary while a token is drawn: float32 logits and scores, float64 sums."""


class Automatic(int):
    """A documented number that means "as many as fit", unless the caller passes a number."""


AS_MANY_AS_FIT = Automatic(4)
"""The default of `batch_size`: as many completions as have room, where TRL documents 4."""


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
    """The text that each response [R] adds to its query [Q], without special tokens; all of it for an encoder-decoder.

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


def batches_of(
    prompts: Sequence[Tensor], batch_size: int, num_generations: int, *, is_split: bool
) -> list[tuple[list[int], int, int]]:
    """Prompts of like length, and how many completions of each to sample.

    Args:
        prompts: rows of token ids, [T] each.
        batch_size: completions at a time, at most.
        is_split: prompts of one batch have one length. PEFT puts a learned prompt before the padding, which would
            otherwise stand inside the text.

    Returns:
        For each batch the numbers of its prompts, the longest first, how many completions of each there are already,
        and how many to sample.
    """
    lengths = list(map(len, prompts))
    left = sorted(range(len(prompts)), key=lengths.__getitem__, reverse=True)
    repeats, size = min(num_generations, batch_size), max(batch_size // num_generations, 1)
    batches: list[tuple[list[int], int, int]] = []
    while left:
        chosen = left[:size]
        if is_split:
            chosen = [i for i in chosen if lengths[i] == lengths[chosen[0]]]
        left = left[len(chosen) :]
        batches += [(chosen, done, min(repeats, num_generations - done)) for done in range(0, num_generations, repeats)]
    return batches


def completions_at_a_time(model: Model, tokens: int, *, read: int) -> int:
    """How many completions of a length have room.

    On a CPU they take 256 MiB, or half of the weights' size if that is more. On an accelerator they take half of the
    memory that the training of these weights leaves, and at least an eighth of what the weights leave. What happens to
    be free does not count, so that a seed gives the same samples again.

    Args:
        tokens: the length of the longest prompt with its completion, in tokens.
        read: the length of the longest prompt.

    Returns:
        At least 1.
    """
    config = decoder_config(model)
    hidden = width = config.hidden_size
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int):  # grouped-query attention
        width = groups * (getattr(config, "head_dim", None) or width // heads)
    row = 2 * tokens * config.num_hidden_layers * width * model.dtype.itemsize + SCORE_BYTES * config.vocab_size
    weights = sum(weight.nbytes for weight in model.parameters())
    if memory := memory_of(model.device):
        # The prompts' forward pass: the hidden states of a layer, and those inside its MLP.
        inside = getattr(config, "intermediate_size", None) or 4 * hidden
        row += read * (8 * hidden + 3 * inside) * model.dtype.itemsize
        trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        room = max(memory - weights - COPIES * trained, (memory - weights) // 4) // 2
    else:
        room = max(CPU_ROOM if model.device.type == "cpu" else DEVICE_ROOM, weights // 2)
    return max(room // row, 1)


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
    """One response of `model` to each 1-D query, in the order of the queries, on their device; see `Completer`.

    Args:
        model: a transformers model, in eval mode.
        queries: rows of token ids, [T] each.
        config: complete, from `sampling_config`.
        batch_size: queries at a time; by default as many as fit.
        return_prompt: whether a response begins with its query; means nothing to an encoder-decoder model.
        kwargs: further arguments of the model's `generate`.
    """
    responses = Completer(model, config, eos_ids=eos_ids, batch_size=batch_size, **kwargs)(queries).completions
    if model.config.is_encoder_decoder or not return_prompt:
        return responses
    return [torch.cat(pair) for pair in zip(queries, responses, strict=True)]


class Completer:
    """Samples completions from a model by transformers' `generate`, with settings that are translated once.

    transformers' `generate` prepares everything. The loop is `fast.loop_for`'s, except where a setting or an
    argument is asked for that it does not know, such as `stop_strings` or any `cache_implementation`: then it is that
    of transformers, and a warning says why.

    Args:
        model: a transformers model, in eval mode.
        config: complete, from `sampling_config`.
        batch_size: completions at a time; by default as many as fit, see `completions_at_a_time`.
        share_prompts: run a prompt once for its whole group, where the cache can be repeated.
        kwargs: further arguments of the model's `generate`.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        *,
        eos_ids: Sequence[int],
        batch_size: int = AS_MANY_AS_FIT,
        share_prompts: bool = True,
        **kwargs: object,
    ):
        self.model, self.config, self.eos_ids, self.batch_size = model, config, eos_ids, batch_size
        self.positions, self.cache_names = Positions.of(model), cache_names(model)
        # `generate` takes each setting that is None from the model's own config, where these would change the sampling.
        self.model_settings = copy.deepcopy(model.generation_config)
        vars(self.model_settings).update(dict.fromkeys(PLAIN_SAMPLING))
        self.shares_prompts = share_prompts and config.do_sample
        has_cache = has_selectable_cache(model)
        self.can_share = has_cache and config.use_cache is not False and config.cache_implementation is None
        # Only a custom criterion ends a completion without an end token; otherwise the model sampled the last padding.
        self.has_criterion = bool(config.stop_strings) or "stopping_criteria" in kwargs
        if self.has_criterion and config.pad_token_id in eos_ids:  # padding would look like a sampled end token
            count = model.get_input_embeddings().num_embeddings
            self.config = copy.deepcopy(config)
            self.config.pad_token_id = next(token for token in reversed(range(count)) if token not in eos_ids)
        self.arguments = {name: value for name, value in kwargs.items() if value is not None}
        self.loop = loop_for(model, config, self.arguments, neutral=PLAIN_SAMPLING, has_cache=has_cache)
        if self.loop is not None:
            self.arguments["custom_generate"] = self.loop
        if has_router_loss(model):  # which has no place for the cached tokens of the mask
            self.arguments["output_router_logits"] = False

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Tensor], num_generations: int = 1) -> Rollout:
        """Completions of each prompt, unpadded, in the order of the prompts, on their device.

        Their log-probabilities, in nats, are those under the distribution from which they were drawn, after temperature
        and processors. The loop of transformers tells none.

        Collective if the model is sharded: every process calls it as often, with any number of prompts, also none.

        Prompts are taken in batches of like length and padded on the left; transformers derives the position ids from
        the mask. A completion ends with its end token, where it has one; an end token inside a prompt is harmless. The
        decoder start token of an encoder-decoder model is not part of a completion.

        Raises:
            ValueError: the longest prompt and its completion have no room in the model's positions.
        """
        model, config, longest = self.model, self.config, max(map(len, prompts), default=0)
        is_encoder_decoder = model.config.is_encoder_decoder
        length = config.max_length or longest  # of prompt and completion, or of an encoder-decoder's completion
        new = config.max_new_tokens or (length if is_encoder_decoder else max(length - longest, 0))
        remedy = "Lower max_new_tokens, or shorten the queries."
        self.positions.check_sample(longest, new, is_encoder_decoder=is_encoder_decoder, remedy=remedy)
        padding = config.pad_token_id if self.has_criterion else None
        is_automatic = isinstance(self.batch_size, Automatic)
        batch_size = completions_at_a_time(model, longest + new, read=longest) if is_automatic else self.batch_size
        batches = batches_of(prompts, batch_size, num_generations, is_split=learns_prompt(model))
        count = len(prompts) * num_generations
        completions, ended, told = [torch.empty(0)] * count, [False] * count, [torch.empty(0)] * count
        with whole_weights(model), cache_found(model, *self.cache_names):  # once, and not for each token
            for chosen, done, repeats in progress(batches, "generating"):
                shared = repeats if self.shares_prompts else 1
                read = [prompts[i] for i in chosen for _ in range(repeats // shared)]
                rows, logprobs = self._sample(read, repeats=shared)
                host, at = rows.cpu(), prompts[chosen[0]].device  # one copy: each reading of a row would wait
                rows = host if at == host.device else rows.to(at)
                logprobs = None if logprobs is None else logprobs.to(at)
                for number, row in enumerate(host):
                    prompt = chosen[number // repeats]
                    place = prompt * num_generations + done + number % repeats
                    length = len(cut_at_eos(row, self.eos_ids, padding))
                    ids = completions[place] = rows[number, :length].to(prompts[prompt].device)
                    ended[place] = int(row[length - 1]) in self.eos_ids or (self.has_criterion and length < new)
                    if logprobs is not None:
                        told[place] = logprobs[number, :length].to(ids.device)
        return Rollout(completions, ended, None if self.loop is None else told)

    def _sample(self, prompts: Sequence[Tensor], *, repeats: int) -> tuple[Tensor, Tensor | None]:
        """New tokens of P * repeats rows, the longest prompt first, and their log-probabilities if `fast` drew them."""
        model, config, arguments = self.model, copy.deepcopy(self.config), dict(self.arguments)
        config.num_return_sequences = repeats
        device = model.get_input_embeddings().weight.device
        input_ids, mask = pad(prompts, config.pad_token_id, side="left")
        input_ids, mask = input_ids.to(device), mask.to(device)
        if repeats > 1 and self.can_share and not learns_prompt(model):
            arguments[CACHE] = prompt_cache(model, input_ids, mask, repeats=repeats, name=self.cache_names[1])
        # The weights are whole, so that no process needs to go on until the others have ended.
        inputs = {"input_ids": input_ids, "attention_mask": mask}
        with replaced(base_of(model), "generation_config", self.model_settings):
            output = model.generate(**inputs, generation_config=config, synced_gpus=False, **arguments)
        if isinstance(output, tuple):  # of `fast.loop_for`
            return output
        return output[:, 1 if model.config.is_encoder_decoder else input_ids.shape[1] :], None


def prompt_cache(model: Model, input_ids: Tensor, attention_mask: Tensor, *, repeats: int, name: str) -> DynamicCache:
    """Keys and values of all but the last token of left-padded prompts, each prompt's repeated for its completions.

    The last token is left to the first step of generation, which wants its logits.

    Args:
        model: a transformers model, in eval mode.
        input_ids: [P, T].
        attention_mask: [P, T], 0 at padding.
        name: the forward's argument for the cache.

    Returns:
        The cache, of P * repeats rows.
    """
    base = base_of(model)
    cache = DynamicCache(config=base.config)
    if input_ids.shape[1] > 1:
        inputs = {"input_ids": input_ids[:, :-1], "attention_mask": attention_mask[:, :-1]}
        model(**positioned(base.forward, inputs), **{name: cache}, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(repeats)
    return cache
