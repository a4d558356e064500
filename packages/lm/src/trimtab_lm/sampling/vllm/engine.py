"""Rollouts by a vLLM engine inside the training process, on the same device (extra `vllm`)."""

import os
import re
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trimtab_common.seeding import load_rng_state, private_rng, rng_state, sampling_seed
from trimtab_common.sharding import whole_weights
from trimtab_common.stats import world_size
from trimtab_lm.interface import Model, base_of, decoder_config, learns_prompt
from trimtab_lm.sampling.rollout import (
    FORBIDDEN,
    REWEIGHTED,
    Notes,
    Rollout,
    SamplingSettings,
    check_room,
    distortions,
    require_version,
)
from trimtab_lm.tokens.positions import Positions

from .weights import checkpoint_weights

if TYPE_CHECKING:
    from vllm import LLM

OLDEST_VLLM = "0.32"
"""The first release whose workers reload weights after they have processed them, and tell which sampled a token."""
LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution that is sampled: at its temperature."""

DISTORTIONS_BY_VLLM = {
    **dict.fromkeys(("logit_bias", "presence_penalty", "frequency_penalty"), REWEIGHTED),
    **dict.fromkeys(("bad_words", "min_tokens", "allowed_token_ids", "structured_outputs"), FORBIDDEN),
}
"""Fields of vllm.SamplingParams that make the sampler another policy, and what they do; see `rollout.DISTORTIONS`."""

PACKS_HEADS = "cpu"
"""The device on which vLLM packs a tied head for itself, so that it must be sent its weight under its own name."""


class VLLMRollout:
    """Samples by vLLM, one engine per process, which gets the policy's weights before each rollout that needs them.

    The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0 is set in its environment): its workers reload
    the policy's tensors, under the names that a checkpoint has, by vLLM's own `reload_weights`. Adapters are merged
    into what is sent and never into the policy.

    Args:
        model: hub id or folder that the engine is built from, of the policy's architecture and sizes; None: the
            policy's own `name_or_path`, at the first `sync`.
        gpu_memory_utilization: share of the device's memory that the engine may take.
        enable_sleep_mode: give that memory back between rollouts. Sleeping drops the weights, so that they are sent
            again before each rollout.

    Raises:
        ImportError: vLLM is missing, or older than `OLDEST_VLLM`.
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
        self._vllm = installed_vllm()
        self.settings, self.tokenizer, self.name = settings, tokenizer, model
        self.enable_sleep_mode = enable_sleep_mode
        self.engine_options = {"gpu_memory_utilization": gpu_memory_utilization, **engine_options}
        self.engine: LLM | None = None
        self.eos_ids: list[int] = []
        self.version: int | None = None
        self._device = torch.device("cpu")
        self._is_asleep = False
        Notes()(distortions_of(settings))

    @torch.no_grad()
    def sync(self, model: Model, version: int) -> None:
        if self.version == version:
            return
        if self.engine is None:
            self.engine = self._build(model)
        if self._is_asleep:
            self.engine.wake_up(tags=["weights"])
        device = self.engine.llm_engine.vllm_config.device_config.device_type
        with whole_weights(model):
            weights = checkpoint_weights(model, repeat_ties=device == PACKS_HEADS)
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        if self._is_asleep:
            self.engine.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        self.engine.reset_prefix_cache()  # its keys and values are those of the old weights
        self.version = version

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        assert self.engine is not None  # a version is held
        positions = Positions("vLLM's engine", None, self.engine.llm_engine.model_config.max_model_len)
        check_room(positions, prompts, self.settings, remedy="raise the engine's max_model_len")
        params = [
            self._vllm.SamplingParams(
                **sampling_params(self.settings, self.eos_ids, n=num_generations, seed=seed, number=i)
            )
            for i in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        with private_rng(seed, self._device):
            requests = self.engine.generate(inputs, params, use_tqdm=False)
        if self.enable_sleep_mode:
            self.engine.sleep(level=2)  # frees the cache, and the weights without a copy: they are sent again anyway
            self._is_asleep, self.version = True, None
        rollout = Rollout([], [], logprobs := [])
        for prompt, request in zip(prompts, requests, strict=True):
            for output in sorted(request.outputs, key=lambda output: output.index):
                ids = list(output.token_ids)
                taken = [at[token].logprob for at, token in zip(output.logprobs, ids, strict=True)]
                rollout.completions.append(torch.tensor(ids, dtype=torch.long, device=prompt.device))
                rollout.ended.append(output.finish_reason == "stop")
                logprobs.append(torch.tensor(taken, device=prompt.device))
        return rollout

    def _build(self, model: Model) -> "LLM":
        """Starts an engine with the weights of the model's name, and checks that it has the policy's architecture."""
        base = engine_policy(model)
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
            "logprobs_mode": LOGPROBS_MODE,
            "enable_sleep_mode": self.enable_sleep_mode,
            # Started by torchrun or accelerate: the engine joins the process group there is, with one worker each.
            **({"distributed_executor_backend": "external_launcher"} if world_size() > 1 else {}),
            **self.engine_options,
        }
        state = rng_state()
        try:
            engine = self._vllm.LLM(**options)
        except (RuntimeError, ValueError) as error:  # vLLM raises either where the cache or the model has no room
            if "memory" not in str(error):
                raise
            raise RuntimeError(
                f"vLLM {self._vllm.__version__} has too little memory for {name}: {str(error).splitlines()[0]} Change "
                f"gpu_memory_utilization (it is {self.engine_options['gpu_memory_utilization']}), or lower "
                "max_model_len or max_num_seqs, in rollout_backend_kwargs."
            ) from error
        finally:
            load_rng_state(state)  # the engine seeds the global generators
        check_served(engine.collective_rpc("get_model_inspection")[0], base, where=f"The engine of {name}")
        self.eos_ids = self.settings.end_tokens(base, self.tokenizer)
        self._device = base.device
        return engine


def installed_vllm() -> ModuleType:
    """vLLM's package.

    Raises:
        ImportError: vLLM is missing, or older than `OLDEST_VLLM`.
    """
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"Rollouts by vLLM need vllm {OLDEST_VLLM} or newer, and none is installed: pip install "
            "'trimtab-lm[vllm]', or choose another rollout_backend."
        ) from error
    if Version(vllm.__version__) < Version(OLDEST_VLLM):
        raise ImportError(
            f"Rollouts by vLLM need vllm {OLDEST_VLLM} or newer, and {vllm.__version__} is installed: upgrade it, or "
            "choose another rollout_backend."
        )
    return vllm


def sampling_params(
    settings: SamplingSettings, eos_ids: Sequence[int], *, n: int, seed: int, number: int
) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for a prompt's number; each generation gets its own seed."""
    own = settings.generation_kwargs
    return {
        "n": n,
        "max_tokens": settings.max_completion_length,
        **settings.warpers,
        "min_p": settings.min_p or 0.0,
        "seed": sampling_seed(seed, rank=0, draw=number) % 2**31,  # vLLM adds the number of the generation
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # ours end a completion, which the engine's own need not be
        "detokenize": "stop" in own,
        **own,
        "stop_token_ids": list(eos_ids),
    }


def distortions_of(settings: SamplingSettings) -> list[str]:
    """The settings that change the distribution of tokens, one line each; see `distortions`."""
    own = {name: value for name, value in settings.generation_kwargs.items() if name in DISTORTIONS_BY_VLLM and value}
    lines = distortions(GenerationConfig(do_sample=True, **settings.warpers))
    return [*lines, *(f"{name}={value}: {DISTORTIONS_BY_VLLM[name]}" for name, value in own.items())]


def engine_policy(model: Model) -> PreTrainedModel:
    """The transformers model that vLLM is to sample from.

    Raises:
        ValueError: vLLM cannot run it as it is trained here.
    """
    base = base_of(model)
    if learns_prompt(model) or base.config.is_encoder_decoder or "quantization_config" in base.config.to_dict():
        raise ValueError(
            f"vLLM cannot sample from {type(base).__name__} as it is trained here: it takes causal models, neither "
            "quantized nor with learned prompts. Sample with transformers' generate instead."
        )
    return base


def check_served(inspection: str, policy: PreTrainedModel, *, where: str) -> None:
    """Checks that an engine runs a model of the policy's sizes: an engine that loads other weights ends.

    Args:
        inspection: the text of vLLM's `get_model_inspection`.

    Raises:
        ValueError: a size differs.
    """
    config = decoder_config(policy)
    served = {
        "vocabulary": re.findall(r"org_vocab_size=(\d+)", inspection),
        "hidden size": re.findall(r"(?:embedding_dim|hidden_size|in_features)=(\d+)", inspection),
        "layers": [str(max(map(int, re.findall(r"\((?:\d+-)?(\d+)\): ", inspection)), default=-1) + 1)],
    }
    needed = dict(zip(served, (config.vocab_size, config.hidden_size, config.num_hidden_layers), strict=True))
    differing = [name for name, size in needed.items() if str(size) not in served[name]]
    if differing:
        lines = [f"{name} {'/'.join(dict.fromkeys(served[name]))}, not {needed[name]}" for name in differing]
        raise ValueError(
            f"{where} is another model than the policy {policy.name_or_path!r}: {'; '.join(lines)}. Build the engine "
            "from the policy's own name or folder (model of VLLMRollout, --model of a server)."
        )
