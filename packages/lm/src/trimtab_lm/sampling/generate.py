"""Sampling responses: a list of 1-D queries in, a list of 1-D responses out."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_common.tracking import progress
from trimtab_lm.tokens.positions import Positions

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
    """The complete generation config for `kwargs`, and what of them is no generation setting (stopping criteria, ...).

    Sampling is plain unless `kwargs` say otherwise: a `top_k` or `top_p` of the model's own generation config, or
    transformers' default top_k of 50, would make the sampler another policy than the one that is trained. Token ids
    and lengths come from the model's generation config. 2024's spellings `top_k=0.0` and `min_length=-1` are taken.
    """
    config = GenerationConfig(pad_token_id=pad_token_id)
    if "top_k" in kwargs:
        kwargs["top_k"] = int(kwargs["top_k"] or 0)
    if "min_length" in kwargs:
        kwargs["min_length"] = max(int(kwargs["min_length"]), 0)
    given = {name: value for name, value in model.generation_config.to_dict().items() if name not in PLAIN_SAMPLING}
    if "max_new_tokens" in kwargs:
        given["max_length"] = None
    config.update(**given, defaults_only=True)
    rest = config.update(**kwargs)
    for name, neutral in PLAIN_SAMPLING.items():
        # transformers complains of settings of sampling where there is none.
        if name not in kwargs and (config.do_sample or name not in SAMPLING_ALONE):
            setattr(config, name, neutral)
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
    batch_size: int,
    return_prompt: bool,
    **kwargs: Any,
) -> list[Tensor]:
    """Responses of `model` to 1-D `queries`, 1-D and unpadded, in the order of the queries, on their device.

    Queries are taken in batches of like length and padded on the left; transformers derives the position ids from the
    mask. Responses end with their end token, where they have one; an end token inside a query is harmless. The decoder
    start token of an encoder-decoder model is not part of a response, and `return_prompt` means nothing to it.

    Raises ValueError where the longest query and its response have no room in the model's positions.
    """
    is_encoder_decoder = model.config.is_encoder_decoder
    longest = max(map(len, queries), default=0)
    length = config.max_length or longest  # of query and response together, or of an encoder-decoder's response
    new = config.max_new_tokens or (length if is_encoder_decoder else max(length - longest, 0))
    Positions.of(model).check_sample(
        longest, new, is_encoder_decoder=is_encoder_decoder, remedy="Lower max_new_tokens, or shorten the queries."
    )
    device = model.get_input_embeddings().weight.device
    # Only a criterion of its own ends a response without an end token; else a pad token at the end was sampled.
    padding = config.pad_token_id if config.stop_strings or "stopping_criteria" in kwargs else None
    order = sorted(range(len(queries)), key=lambda i: len(queries[i]), reverse=True)
    responses: dict[int, Tensor] = {}
    for start in progress(range(0, len(order), batch_size), "generating"):
        chosen = order[start : start + batch_size]
        input_ids, mask = pad([queries[i] for i in chosen], config.pad_token_id, side="left")
        output = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=copy.deepcopy(config),
            **kwargs,
        )
        prompt = 1 if is_encoder_decoder else input_ids.shape[1]
        for i, row in zip(chosen, output, strict=True):
            response = cut_at_eos(row[prompt:], eos_ids, padding).to(queries[i].device)
            with_prompt = return_prompt and not is_encoder_decoder
            responses[i] = torch.cat([queries[i], response]) if with_prompt else response
    return [responses[i] for i in range(len(queries))]


class Sampler:
    """Samples responses at a temperature that it remembers, with random numbers of its own.

    Every call has a stream made from (seed, rank, number of the call): sampling neither moves nor depends on the global
    generators, and goes on where it was after `load_state_dict`. Settings that make the sampler another policy than the
    model are reported, once each, with what they do to the KL. temperature: the one that calls must sample at; None
    lets each call choose, and keeps that of the last call that sampled in `.temperature`.
    """

    def __init__(
        self,
        pad_token_id: int,
        eos_token_id: int | None,
        *,
        seed: int,
        rank: int,
        temperature: float | None = None,
    ):
        self.pad_token_id, self.eos_token_id, self.seed, self.rank = pad_token_id, eos_token_id, seed, rank
        self.fixed_temperature = temperature
        self.temperature = temperature or 1.0
        self.eos_ids: list[int] = []  # of the last call
        self.calls = 0
        self._reported: set[str] = set()

    def __call__(
        self,
        models: Sequence[AbstractContextManager[Any]],
        queries: Sequence[Tensor],
        *,
        batch_size: int,
        return_prompt: bool,
        **generation_kwargs: Any,
    ) -> list[list[Tensor]]:
        """The responses of each model, in eval mode, to 1-D queries: see `generate`. models: contexts that give one."""
        for i, query in enumerate(queries):
            if not isinstance(query, Tensor):
                raise TypeError(
                    f"Query {i} is a {type(query).__name__}; a 1-D tensor of token ids is needed. Tokenize a text: "
                    "tokenizer(text, return_tensors='pt').input_ids[0]."
                )
            if query.dim() != 1 or len(query) == 0:
                raise ValueError(
                    f"Query {i} has shape {list(query.shape)}: give one 1-D tensor of token ids, or a list of them."
                )
        if self.fixed_temperature is not None:
            generation_kwargs.setdefault("temperature", self.fixed_temperature)
        answers = []
        for context in models:
            with context as model, private_rng(self._next_seed(), model.device):
                config, rest = sampling_config(model, **{"pad_token_id": self.pad_token_id, **generation_kwargs})
                self._note(config)
                self.eos_ids = eos_ids = eos_token_ids(model, self.eos_token_id, config)
                answers.append(
                    generate(
                        model,
                        queries,
                        config,
                        eos_ids=eos_ids,
                        batch_size=batch_size,
                        return_prompt=return_prompt,
                        **rest,
                    )
                )
        return answers

    def _next_seed(self) -> int:
        self.calls += 1
        return sampling_seed(self.seed, rank=self.rank, draw=self.calls)

    def _note(self, config: GenerationConfig) -> None:
        if config.do_sample and self.fixed_temperature not in (None, config.temperature):
            raise ValueError(
                f"Asked to sample at temperature {config.temperature}, but the config says that log-probabilities are "
                f"taken at {self.fixed_temperature}. Make them equal, or leave the config's temperature at None."
            )
        if config.do_sample:
            self.temperature = config.temperature
        for line in distortions(config):
            if line not in self._reported:
                self._reported.add(line)
                warnings.warn(f"The sampler is not the policy that is trained: {line}.", stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "temperature": self.temperature}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls, self.temperature = state["calls"], state["temperature"]
