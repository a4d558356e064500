"""Groups of sampled completions: what GRPO asks of a sampler, and samplers that are the trained model itself."""

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from peft import PeftModel
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trimtab_common.kl import LOG_RATIO_CLAMP
from trimtab_common.seeding import private_rng
from trimtab_common.tracking import progress
from trimtab_lm.sampling.generate import cut_at_eos, distortions, eos_token_ids, pad, sampling_config
from trimtab_lm.tokens.dropout import without_dropout

# transformers 5.18 renamed the field of ContinuousBatchingConfig.
PAGE_SIZE = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"


class Rollout(NamedTuple):
    """Completions in the order of their prompts, the generations of a prompt side by side."""

    completions: list[Tensor]  # 1-D ids, with the end token where there is one
    ended: list[bool]  # by itself; otherwise it was cut at the length limit
    logprobs: list[Tensor] | None = None  # 1-D, nats, of these tokens as they were sampled, where the sampler tells


class RolloutBackend(Protocol):
    """A sampler of completions. `version` counts the changes of the weights; each rollout says which it must be of."""

    def sync(self, model: Any, version: int) -> None:
        """Sample from the weights of `model` (a PreTrainedModel or PeftModel, unwrapped) from now on.

        To be called before every rollout: nothing happens where `version` is held already.
        """
        ...

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        """`num_generations` completions of each prompt (1-D ids), fixed by the weights, the batch and `seed`.

        The global random numbers are left as they are. Raises StaleWeightsError unless `version` is held.
        """
        ...


class StaleWeightsError(RuntimeError):
    """Completions were asked of weights that the sampler does not hold."""


def require_version(held: int | None, wanted: int) -> None:
    """The check of every rollout: samples of older weights would be trained on as if they were the policy's."""
    if held != wanted:
        raise StaleWeightsError(
            f"A rollout of the weights of version {wanted} was asked for, but the sampler holds "
            f"{'none' if held is None else f'version {held}'}. Call sync(model, {wanted}) before generate."
        )


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn. With the defaults a token follows the model's own distribution.

    max_completion_length: tokens. temperature: divides the logits, above 0. top_p in (0, 1], top_k (0 is off), min_p
    and repetition_penalty as in transformers. generation_kwargs: further settings in the backend's own terms, those of
    GenerationConfig or vllm.SamplingParams.
    """

    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length={self.max_completion_length}: a completion has 1 token or more.")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature}: sampling and its log-probabilities need one above 0; 1.0 is the "
                "model's own distribution."
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= (self.min_p or 0.0) <= 1:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p}: top_p is in (0, 1], top_k 0 (off) or "
                "more, min_p in [0, 1] or None (off)."
            )
        if "do_sample" in self.generation_kwargs:
            raise ValueError("generation_kwargs sets do_sample: completions are always sampled; top_k=1 is greedy.")
        if owned := sorted(OWNED.intersection(self.generation_kwargs)):
            raise ValueError(
                f"generation_kwargs sets {owned}, which the trainer sets: use its own arguments instead "
                "(max_completion_length, num_generations, temperature, top_p, top_k, min_p, repetition_penalty)."
            )

    def config(self, model: Any, *, pad_token_id: int) -> tuple[GenerationConfig, dict[str, Any]]:
        """transformers' complete configuration, and what of generation_kwargs it has no place for."""
        chosen = {
            "do_sample": True,
            "use_cache": True,
            "max_new_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            **self.generation_kwargs,
        }
        return sampling_config(model, pad_token_id=pad_token_id, **chosen)


OWNED = {
    "max_length", "max_new_tokens", "max_tokens", "max_time", "n", "num_beams", "num_return_sequences", "seed",
    "logprobs", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
}  # fmt: skip


class Notes:
    """Warns of settings that make the sampler another policy than the trained one, of each once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, config: GenerationConfig) -> None:
        for line in distortions(config):
            if line not in self._seen:
                self._seen.add(line)
                warnings.warn(f"The sampler is not the policy that is trained: {line}.", stacklevel=4)


def learns_prompt(model: Any) -> bool:
    """Whether a PEFT method puts virtual tokens before the text."""
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token, or its end token; masks and lengths tell padding, so either does."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


class TransformersRollout:
    """Samples by transformers' `generate`: any causal or encoder-decoder model, PEFT models too.

    batch_size: completions that are sampled at a time. share_prompts: run a prompt through a causal model once for its
    whole group, where the cache can be repeated (attention in every layer; with linear attention or prompt learning
    each completion runs its prompt). An encoder always runs once per prompt.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        share_prompts: bool = True,
    ):
        self.settings, self.tokenizer, self.batch_size = settings, tokenizer, batch_size
        self.share_prompts = share_prompts
        self.model: Any = None
        self.version: int | None = None
        self._note = Notes()

    def sync(self, model: Any, version: int) -> None:
        self.model, self.version = model, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        model = self.model
        config, rest = self.settings.config(model, pad_token_id=padding_id(self.tokenizer))
        self._note(config)
        eos_ids = eos_token_ids(model, self.tokenizer.eos_token_id, config)
        if config.stop_strings:
            rest["tokenizer"] = self.tokenizer
        # Only a criterion of its own ends a completion without an end token; else a pad token at the end was sampled.
        is_cut_elsewhere = bool(config.stop_strings) or "stopping_criteria" in rest
        padding = config.pad_token_id if is_cut_elsewhere else None
        completions: list[list[Tensor]] = [[] for _ in prompts]
        with without_dropout(model), private_rng(seed, model.device):
            for chosen, repeats in progress(self._batches(prompts, num_generations), "generating"):
                config.num_return_sequences = repeats
                for i, row in enumerate(self._sample([prompts[j] for j in chosen], config, rest)):
                    prompt = chosen[i // repeats]
                    completions[prompt].append(cut_at_eos(row, eos_ids, padding).to(prompts[prompt].device))
        flat = [completion for group in completions for completion in group]
        limit = self.settings.max_completion_length
        ended = [int(row[-1]) in eos_ids or (is_cut_elsewhere and len(row) < limit) for row in flat]
        return Rollout(flat, ended)

    def _batches(self, prompts: Sequence[Tensor], num_generations: int) -> list[tuple[list[int], int]]:
        """Prompts of like length, and how many completions of each to sample, `batch_size` in all at most."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
        # PEFT puts a learned prompt before the padding, which would so come to stand inside the text.
        is_split = learns_prompt(self.model)
        runs = [list(run) for _, run in groupby(order, key=lambda i: len(prompts[i]) if is_split else 0)]
        size, repeats = max(self.batch_size // num_generations, 1), min(num_generations, self.batch_size)
        return [
            (chosen, min(repeats, num_generations - done))
            for alike in runs
            for chosen in (alike[start : start + size] for start in range(0, len(alike), size))
            for done in range(0, num_generations, repeats)
        ]

    def _sample(self, prompts: Sequence[Tensor], config: GenerationConfig, rest: Mapping[str, Any]) -> Tensor:
        """[P * num_return_sequences, R], the new tokens of one batch."""
        input_ids, mask = pad(prompts, config.pad_token_id, side="left")
        input_ids, mask = input_ids.to(self.model.device), mask.to(self.model.device)
        given = dict(rest)
        if self.share_prompts and config.num_return_sequences > 1 and input_ids.shape[1] > 1:
            cache = prompt_cache(self.model, input_ids, mask)
            if cache is not None:
                cache.batch_repeat_interleave(config.num_return_sequences)
                given["past_key_values"] = cache
        output = self.model.generate(
            input_ids=input_ids, attention_mask=mask, generation_config=copy.deepcopy(config), **given
        )
        return output[:, 1 if self.model.config.is_encoder_decoder else input_ids.shape[1] :]


REPEATABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""Caches of layers whose rows can be repeated; those of linear attention keep a state that cannot."""


def prompt_cache(model: Any, input_ids: Tensor, mask: Tensor) -> DynamicCache | None:
    """Keys and values of all but the last token of left-padded prompts, [P, T]; None where a model has no such thing.

    The last token is left to the first step of generation, which wants its logits.
    """
    if learns_prompt(model):
        return None
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    arguments = inspect.signature(base.forward).parameters
    if base.config.is_encoder_decoder or not {"past_key_values", "logits_to_keep"} <= arguments.keys():
        return None
    cache = DynamicCache(config=base.config)
    if not cache.layers or any(type(layer) not in REPEATABLE for layer in cache.layers):
        return None
    positions = {}
    if "position_ids" in arguments:
        positions["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
    model(
        input_ids=input_ids[:, :-1],
        attention_mask=mask[:, :-1],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **positions,
    )
    return cache


class ContinuousBatchingRollout:
    """Samples by transformers' continuous batching: a completion that ends makes room for the next one.

    Causal models on paged attention; log-probabilities of the sampled tokens come with them. options: fields of
    transformers' ContinuousBatchingConfig, such as `page_size` (`block_size` in transformers 5.17), `num_blocks` (room
    for the cache) and `max_batch_tokens`; on an accelerator transformers sizes them by the free memory, on the CPU by
    the work at hand.
    """

    def __init__(self, settings: SamplingSettings, tokenizer: PreTrainedTokenizerBase, **options: Any):
        self.settings, self.tokenizer, self.options = settings, tokenizer, options
        self.model: Any = None
        self.version: int | None = None
        self._note = Notes()

    def sync(self, model: Any, version: int) -> None:
        if learns_prompt(model):
            raise ValueError(
                f"Continuous batching cannot prepend the learned prompt of {type(model.active_peft_config).__name__}. "
                "Sample with transformers' generate instead."
            )
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        if base.config.is_encoder_decoder:
            raise ValueError(
                f"{type(base).__name__} is an encoder-decoder, which continuous batching cannot run. Sample with "
                "transformers' generate instead."
            )
        self.model, self.version = base, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        config = self._config(num_generations)
        eos_ids = eos_token_ids(self.model, self.tokenizer.eos_token_id, config)
        config.eos_token_id = eos_ids or -1
        attention = self.model.config._attn_implementation
        with without_dropout(self.model), private_rng(seed, self.model.device):
            try:
                outputs = self._run([prompt.tolist() for prompt in prompts], config, seed)
            finally:
                if self.model.config._attn_implementation != attention:
                    self.model.set_attn_implementation(attention)
        devices = [prompt.device for prompt in prompts for _ in range(num_generations)]
        pairs = list(zip(outputs, devices, strict=True))
        return Rollout(
            [torch.tensor(output.generated_tokens, device=device) for output, device in pairs],
            [output.generated_tokens[-1] in eos_ids for output in outputs],
            [torch.tensor(output.logprobs, device=device) for output, device in pairs],
        )

    def _config(self, num_generations: int) -> GenerationConfig:
        config, rest = self.settings.config(self.model, pad_token_id=padding_id(self.tokenizer))
        ignored = [line for line in distortions(config) if not line.startswith(("top_k=", "top_p="))]
        ignored += [f"{name}: no part of a generation config" for name in rest]
        ignored += ["stop_strings: it ends a completion by token ids alone"] if config.stop_strings else []
        if ignored:
            raise ValueError(
                f"Continuous batching would ignore: {'; '.join(ignored)}. Leave them out, or sample with transformers' "
                "generate instead."
            )
        self._note(config)
        config.num_return_sequences = num_generations
        return config

    def _run(self, prompts: list[list[int]], config: GenerationConfig, seed: int) -> list[Any]:
        """transformers' outputs, group by group.

        Requests are handed in before the manager starts: `generate_batch` hands them in while its thread runs already,
        so that the first batch, and with it every draw, would depend on which thread is faster.
        """
        # Seeds are hashed to 63 bits, of which the manager takes 32.
        sizes = self._cpu_sizes(prompts, config) if self.model.device.type == "cpu" else {}
        options = {**sizes, **self.options, "return_logprobs": True, "seed": seed % 2**32}
        manager = self.model.init_continuous_batching(config, ContinuousBatchingConfig(**options))
        results: dict[str, Any] = {}
        try:
            ids = manager.add_requests(prompts, max_new_tokens=self.settings.max_completion_length)
            manager.start()
            while len(results) < len(prompts) * config.num_return_sequences:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    break
                if result is not None and result.is_finished():
                    results[result.request_id] = result
        finally:
            manager.stop(block=True)
            manager.destroy()
        names = [
            name for i in ids for name in (*(f"{i}__child#{k}" for k in range(config.num_return_sequences - 1)), i)
        ]
        errors = {result.error for result in results.values() if result.error is not None}
        if errors or len(results) < len(names):
            reason = "; ".join(errors) or "its thread ended"
            raise RuntimeError(
                f"Continuous batching gave {len(results)} of {len(names)} completions: {reason}. If it lacks memory, "
                "lower num_blocks or max_batch_tokens, or sample with transformers' generate."
            )
        return [results[name] for name in names]

    def _cpu_sizes(self, prompts: list[list[int]], config: GenerationConfig) -> dict[str, int]:
        """Room for every completion at once: by itself transformers would page all of the main memory."""
        page, limit = self.options.get(PAGE_SIZE, 32), self.settings.max_completion_length
        pages = sum(-(-(len(prompt) + limit) // page) + 1 for prompt in prompts)
        return {
            PAGE_SIZE: page,
            "num_blocks": pages * config.num_return_sequences,
            "max_batch_tokens": max(2048, len(prompts) * config.num_return_sequences),
        }


class Mismatch(NamedTuple):
    """How far a sampler's probabilities are from the trainer's, on the sampled tokens."""

    difference: Tensor  # [N], |log pi_trainer - log pi_sampler|, nats
    sequence_ratio: Tensor  # [B], pi_trainer / pi_sampler of each whole completion


def sampler_mismatch(logprobs: Tensor, sampler_logprobs: Tensor, *, lengths: Tensor) -> Mismatch:
    """The differences that sampling with other kernels, precision or weights makes; 0 and 1 where there is none.

    logprobs, sampler_logprobs: [N], nats, of the tokens of B completions one after the other, at one temperature;
    lengths: [B], tokens of each, N in all. The ratio is exp of the summed difference, clamped to +-20 before: the
    importance weight of a completion (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training").
    """
    gap = logprobs - sampler_logprobs
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=gap.device), lengths)
    log_ratio = torch.zeros(len(lengths), dtype=gap.dtype, device=gap.device).index_add_(0, rows, gap)
    return Mismatch(gap.abs(), log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp())
