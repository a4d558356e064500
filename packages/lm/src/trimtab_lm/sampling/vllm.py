"""Rollouts by a vLLM engine inside the training process, on the same device (extra `vllm`)."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from trimtab_common.seeding import load_rng_state, private_rng, rng_state, sampling_seed
from trimtab_common.stats import world_size
from trimtab_lm.models.interface import base_of
from trimtab_lm.sampling.generate import eos_token_ids, learns_prompt
from trimtab_lm.sampling.rollout import Notes, Rollout, SamplingSettings, require_version


class VLLMRollout:
    """Samples by vLLM, one engine per process, which gets the policy's weights before each rollout that needs them.

    model: hub id or folder that the engine is built from: the architecture of the policy; default the policy's own
    `name_or_path`, at the first `sync`. gpu_memory_utilization: share of the device's memory that the engine may take.
    enable_sleep_mode: give that memory back between rollouts; the weights are then sent again before each, as sleeping
    drops them. engine_options: further arguments of `vllm.LLM`.

    The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0 is set in its environment): weights reach it as
    tensors, through `LLM.apply_model`, under the names that a checkpoint has; adapters are merged into what is sent and
    never into the policy. Raises ImportError without vllm.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str | None = None,
        gpu_memory_utilization: float = 0.3,
        enable_sleep_mode: bool = False,
        **engine_options: Any,
    ):
        try:
            import vllm
        except ImportError as error:
            raise ImportError("Rollouts by vLLM need vllm: pip install 'trimtab-lm[vllm]'.") from error
        self._vllm: Any = vllm
        self.settings, self.tokenizer, self.name = settings, tokenizer, model
        self.enable_sleep_mode = enable_sleep_mode
        self.engine_options = {"gpu_memory_utilization": gpu_memory_utilization, **engine_options}
        self.engine: Any = None
        self.eos_ids: list[int] = []
        self.version: int | None = None
        self._device = torch.device("cpu")
        self._is_asleep = False
        Notes()(sampling_of(settings))

    @torch.no_grad()
    def sync(self, model: Any, version: int) -> None:
        if self.version == version:
            return
        if self.engine is None:
            self._build(model)
        if self._is_asleep:
            self.engine.wake_up(tags=["weights"])
        weights = checkpoint_weights(model)
        self.engine.apply_model(lambda engine_model: load(engine_model, weights))
        if self._is_asleep:
            self.engine.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        self.engine.reset_prefix_cache()  # its keys and values are those of the old weights
        self.version = version

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        params = [self._params(num_generations, sampling_seed(seed, rank=0, draw=i)) for i in range(len(prompts))]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        with private_rng(seed, self._device):
            requests = self.engine.generate(inputs, params, use_tqdm=False)
        if self.enable_sleep_mode:
            self.engine.sleep(level=2)  # frees the cache, and the weights without a copy: they are sent again anyway
            self._is_asleep, self.version = True, None
        rollout = Rollout([], [], [])
        for prompt, request in zip(prompts, requests, strict=True):
            for output in sorted(request.outputs, key=lambda output: output.index):
                ids = list(output.token_ids)
                logprobs = [at[token].logprob for at, token in zip(output.logprobs, ids, strict=True)]
                rollout.completions.append(torch.tensor(ids, dtype=torch.long, device=prompt.device))
                rollout.ended.append(output.finish_reason == "stop")
                rollout.logprobs.append(torch.tensor(logprobs, device=prompt.device))  # type: ignore[union-attr]
        return rollout

    def _params(self, num_generations: int, seed: int) -> Any:
        settings = self.settings
        chosen = {
            "n": num_generations,
            "max_tokens": settings.max_completion_length,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
            "repetition_penalty": settings.repetition_penalty,
            "seed": seed % 2**31,  # the engine adds the number of the generation
            "logprobs": 0,  # of the sampled token alone
            "stop_token_ids": self.eos_ids,
            "ignore_eos": True,  # ours end a completion, which the engine's own need not be
            "detokenize": "stop" in settings.generation_kwargs,
            **settings.generation_kwargs,
        }
        return self._vllm.SamplingParams(**chosen)

    def _build(self, model: Any) -> None:
        base: Any = base_of(model)
        if learns_prompt(model) or base.config.is_encoder_decoder or getattr(base, "is_quantized", False):
            raise ValueError(
                f"vLLM cannot sample from {type(base).__name__} as it is trained here: it takes causal models, neither "
                "quantized nor with learned prompts. Sample with transformers' generate instead."
            )
        name = self.name or base.name_or_path
        if not name:
            raise ValueError(
                "vLLM builds its engine from a hub id or a folder, and this policy has neither: save it with its "
                "tokenizer (save_pretrained) and give the folder, VLLMRollout(..., model=folder)."
            )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        options = {
            "model": name,
            "dtype": base.dtype,
            "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled, at its temperature
            "enable_sleep_mode": self.enable_sleep_mode,
            # Started by torchrun or accelerate: the engine joins the process group there is, with one worker each.
            **({"distributed_executor_backend": "external_launcher"} if world_size() > 1 else {}),
            **self.engine_options,
        }
        state = rng_state()
        self.engine = self._vllm.LLM(**options)
        load_rng_state(state)  # the engine seeds the global generators
        self.eos_ids = eos_token_ids(base, self.tokenizer.eos_token_id)
        self._device = base.device


def sampling_of(settings: SamplingSettings) -> GenerationConfig:
    """The settings that can bend the distribution, in transformers' terms, in which we know what they do."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    bad_words = settings.generation_kwargs.get("bad_words")
    min_tokens = settings.generation_kwargs.get("min_tokens")
    values = {name: getattr(settings, name) for name in names}
    return GenerationConfig(do_sample=True, **values, bad_words_ids=bad_words and [[0]], min_new_tokens=min_tokens)


def load(engine_model: Any, weights: dict[str, Tensor]) -> None:
    """Put checkpoint weights into the engine's model; RuntimeError if they leave some of its weights out."""
    loaded = engine_model.load_weights(weights.items())
    missing = {name for name, _ in engine_model.named_parameters()} - set(loaded) if loaded is not None else set()
    if missing:
        raise RuntimeError(
            f"{len(missing)} weights of the engine were not among the policy's ({sorted(missing)[:3]}, ...): it would "
            "sample from a mixture of both. Give the policy's own folder as model=, or another backend."
        )


def checkpoint_weights(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    """The policy's weights under the names that `save_pretrained` gives them, adapters merged in.

    What is merged is a copy; everything else is the policy's own tensors, and the policy is left as it was, bit by bit.
    """
    base: Any = base_of(model)
    weights = dict(merged_weights(base))
    for copied, original in base.all_tied_weights_keys.items():
        twin = weights.pop(copied, None)  # checkpoints hold tied weights once
        if twin is not None and not torch.equal(twin, weights[original]):
            raise ValueError(
                f"The model ties {copied} to {original}, but the adapter changes one of them alone: an engine ties "
                "them again and would sample from another policy. Take it out of the adapter's target_modules and "
                "modules_to_save, or untie them (tie_word_embeddings=False)."
            )
    return dict(revert_weight_conversion(base, weights))


def merged_weights(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Names, free of PEFT's own parts, and weights of all parameters below a module, adapters merged in."""
    if isinstance(module, ModulesToSaveWrapper):
        module = active_copy(module)
    elif isinstance(module, AuxiliaryTrainingWrapper):
        module = module.token_adapter  # trainable tokens: an adapter layer in turn
    if isinstance(module, BaseTunerLayer):
        yield from merged_layer(module, prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter.detach()
    for name, child in module.named_children():
        yield from merged_weights(child, f"{prefix}{name}.")


def active_copy(wrapper: ModulesToSaveWrapper) -> nn.Module:
    """The copy of a module that is trained and used in its place."""
    return wrapper.original_module if wrapper.disable_adapters else wrapper.modules_to_save[wrapper.active_adapters[0]]


def merged_layer(layer: BaseTunerLayer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The weights of an adapted layer with its adapters in them, once."""
    inner = layer.get_base_layer()
    original = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
    if layer.merged or layer.disable_adapters:
        yield from ((prefix + name, value) for name, value in original.items())
        return
    layer.merge()
    merged = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
    layer.unmerge()
    for name, parameter in inner.named_parameters():
        parameter.data.copy_(original[name])  # unmerging subtracts, which rounds
    yield from ((prefix + name, value) for name, value in merged.items())
