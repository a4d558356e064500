"""Samplers that run the trained model itself, and the choice of a backend by name."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerBase

from trimtab_common.accelerators import multiplies_in_float32
from trimtab_common.seeding import private_rng
from trimtab_common.sharding import whole_weights
from trimtab_lm.compat.models import attention_of
from trimtab_lm.interface import Model, base_of, learns_prompt
from trimtab_lm.sampling.generate import AS_MANY_AS_FIT, Completer
from trimtab_lm.sampling.rollout import (
    Notes,
    Rollout,
    RolloutBackend,
    SamplingSettings,
    check_room,
    distortions,
    require_version,
)
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.positions import Positions

FLASH = "auto_switch_to_flash"
# transformers 5.18 renamed the field of ContinuousBatchingConfig.
PAGE_SIZE = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
BACKENDS = ("transformers", "continuous_batching", "vllm", "vllm_server")


def make_backend(
    name: str,
    settings: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any] | None = None,
) -> RolloutBackend:
    """Returns the sampler with this name.

    Args:
        name: one of `BACKENDS`.
        options: further arguments of TransformersRollout, ContinuousBatchingRollout, VLLMRollout or VLLMServerRollout.

    Raises:
        ImportError, ValueError: see `check_backend`.
    """
    options = dict(options or {})
    check_backend(name, options)
    return _kind(name)(settings, tokenizer, **options)


def check_backend(name: str, options: Mapping[str, Any]) -> None:
    """Checks that the sampler with this name is installed and takes the options. vLLM's engine checks its own.

    Raises:
        ImportError: vLLM is missing, or too old.
        ValueError: the sampler does not have an option, or needs one that is missing.
    """
    if name == "vllm":
        from trimtab_lm.sampling.vllm.engine import installed_vllm

        installed_vllm()
        return
    kind = ContinuousBatchingConfig if name == "continuous_batching" else _kind(name)
    parameters = inspect.signature(kind).parameters
    known = [each for each in parameters if each not in ("settings", "tokenizer", "return_logprobs", "seed")]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"rollout_backend_kwargs sets {unknown}; rollout_backend={name!r} takes {known}.")
    needed = [each for each in known if parameters[each].default is inspect.Parameter.empty]
    if missing := sorted(set(needed) - set(options)):
        raise ValueError(
            f"rollout_backend={name!r} needs {missing} in rollout_backend_kwargs, such as "
            "{'servers': ['http://localhost:8000']}."
        )


def _kind(name: str) -> Any:
    """The class of the sampler with this name. Imports the module of vLLM's samplers only for those."""
    if name == "transformers":
        return TransformersRollout
    if name == "continuous_batching":
        return ContinuousBatchingRollout
    from trimtab_lm.sampling.vllm import VLLMRollout, VLLMServerRollout

    return VLLMRollout if name == "vllm" else VLLMServerRollout


class TransformersRollout:
    """Samples by transformers' `generate`: any causal or encoder-decoder model, PEFT models too.

    Args:
        batch_size: completions to sample at a time; by default as many as fit, see `completions_at_a_time`.
        share_prompts: run a prompt through a causal model once for its whole group, where the cache can be repeated
            (attention in every layer; with linear attention or prompt learning each completion runs its prompt). An
            encoder always runs once per prompt.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = AS_MANY_AS_FIT,
        share_prompts: bool = True,
    ):
        self.settings, self.tokenizer, self.batch_size = settings, tokenizer, batch_size
        self.share_prompts = share_prompts
        self.model: Any = None
        self.version: int | None = None
        self._generation_config: GenerationConfig | None = None
        self._note = Notes()

    def sync(self, model: Model, version: int) -> None:
        if model is not self.model or cast(Any, model).generation_config != self._generation_config:
            self._prepare(model)
        self.version = version

    def _prepare(self, model: Any) -> None:
        """Translates the settings, for a model and for its generation config as it is now."""
        config, rest = self.settings.config(model, self.tokenizer)
        bent = distortions(config)
        self._note(bent)
        self.is_plain = not bent
        batch_size, shares = self.batch_size, self.share_prompts
        self.complete = Completer(model, config, batch_size=batch_size, share_prompts=shares, **rest)
        self.model, self._generation_config = model, copy.deepcopy(model.generation_config)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        with without_dropout(self.model), private_rng(seed, self.model.device):
            rollout = self.complete(prompts, num_generations)
        return rollout._replace(is_policy=rollout.logprobs is not None and self.is_plain and is_exact(self.model))


def is_exact(model: Any) -> bool:
    """Whether a model samples in plain float32, so that its forward pass gives the same numbers up to their rounding.

    In bfloat16 or TF32, a cache and another layout of the rows change log-probabilities by some 0.01.
    """
    is_autocast = "_original_forward" in vars(model)  # accelerate prepared it for mixed precision
    is_full = multiplies_in_float32(model.device)
    return model.dtype == torch.float32 and is_full and not is_autocast


@contextmanager
def without_autocast(model: Any) -> Iterator[None]:
    """Runs a model in its weights' dtype, without accelerate's mixed precision.

    transformers' paged cache has the dtype of the weights: it cannot hold the keys and values of autocast.
    """
    forward = vars(model).get("_original_forward")
    if forward is None:
        yield
        return
    wrapped, model.forward = model.forward, forward
    try:
        yield
    finally:
        model.forward = wrapped


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

    def sync(self, model: Model, version: int) -> None:
        if learns_prompt(model):
            raise ValueError(
                f"Continuous batching cannot prepend the learned prompt of {type(model.active_peft_config).__name__}. "
                "Sample with transformers' generate instead."
            )
        base = base_of(model)
        if base.config.is_encoder_decoder:
            raise ValueError(
                f"{type(base).__name__} is an encoder-decoder, which continuous batching cannot run. Sample with "
                "transformers' generate instead."
            )
        self.model, self.version = base, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        check_room(Positions.of(self.model), prompts, self.settings)
        config, eos_ids = self._config(num_generations)
        config.eos_token_id = eos_ids or -1
        attention = attention_of(self.model)
        rng = private_rng(seed, self.model.device)
        with whole_weights(self.model), without_dropout(self.model), without_autocast(self.model), rng:
            try:
                outputs = self._run([prompt.tolist() for prompt in prompts], config, seed)
            finally:
                if attention_of(self.model) != attention:
                    self.model.set_attn_implementation(attention)
        devices = [prompt.device for prompt in prompts for _ in range(num_generations)]
        pairs = list(zip(outputs, devices, strict=True))
        return Rollout(
            [torch.tensor(output.generated_tokens, device=device) for output, device in pairs],
            [output.generated_tokens[-1] in eos_ids for output in outputs],
            [torch.tensor(output.logprobs, device=device) for output, device in pairs],
        )

    def _config(self, num_generations: int) -> tuple[GenerationConfig, list[int]]:
        config, rest = self.settings.config(self.model, self.tokenizer)
        eos_ids = rest.pop("eos_ids")
        ignored = [line for line in distortions(config) if not line.startswith(("top_k=", "top_p="))]
        if rest.pop("tokenizer", None):
            ignored.append("stop_strings: it ends a completion by token ids alone")
        ignored += [f"{name}: no part of a generation config" for name in rest]
        if ignored:
            raise ValueError(
                f"Continuous batching would ignore: {'; '.join(ignored)}. Leave them out, or sample with transformers' "
                "generate instead."
            )
        self._note(distortions(config))
        config.num_return_sequences = num_generations
        return config, eos_ids

    def _run(self, prompts: list[list[int]], config: GenerationConfig, seed: int) -> list[Any]:
        """transformers' outputs, group by group.

        Requests are handed in before the manager starts: `generate_batch` hands them in while its thread runs already,
        so that the first batch, and with it every draw, would depend on which thread is faster.
        """
        # The manager accepts 32-bit seeds.
        sizes = self._cpu_sizes(prompts, config) if self.model.device.type == "cpu" else {}
        if self.model.dtype == torch.float32 and FLASH in ContinuousBatchingConfig.__dataclass_fields__:
            sizes[FLASH] = False  # FlashAttention has no float32
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
