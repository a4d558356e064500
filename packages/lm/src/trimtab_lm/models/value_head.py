"""Language models with a value head on the shared trunk: logits and one scalar value at each position.

On disk a wrapped model is a folder that transformers or PEFT can load without the value head, plus
`value_head.safetensors`. Heads inside the weight files of old TRL's checkpoints, under the same keys `v_head.*`, are
read too.
"""

import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from trimtab_common.hub import push_folder
from trimtab_lm.compat.generation import CACHE, cache_argument, cache_found, cache_names
from trimtab_lm.compat.models import undivided
from trimtab_lm.interface import Model, base_of
from trimtab_lm.models.adapters import adapter_on
from trimtab_lm.models.head import (
    VALUE_HEAD_FILE,
    InitStrategy,
    StoredHead,
    ValueHead,
    find_value_head,
    write_beside,
)
from trimtab_lm.models.loading import (
    HUB_OPTIONS,
    AutoModel,
    bar_packing,
    load_model,
    prepared_for_adapter,
    with_quantization_config,
)
from trimtab_lm.models.reward_adapter import load_reward_adapter
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.logprobs import last_hidden_state, linear_in_own_dtype, lm_head_of, state_width, without_logits
from trimtab_lm.tokens.positions import positioned
from trimtab_lm.tokens.scores import upcast

HEAD_OPTIONS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")
KBIT_OPTIONS = ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")
UPLOAD_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


class PreTrainedModelWrapper(nn.Module):
    """A transformers or PEFT model with a value head; build one through its two subclasses.

    Its `state_dict` has the keys `pretrained_model.*` and `v_head.*`.

    Args:
        pretrained_model: a model with an LM head. The wrapper holds it as `.pretrained_model` and does not change it.
        summary_dropout_prob: dropout on the value head's input, in training mode. Default: `summary_dropout_prob` of
            the model's configuration, or 0.1 without it.
        v_head_init_strategy: see `ValueHead.init_weights`.
        v_head_initializer_range: see `ValueHead.init_weights`.

    Raises:
        TypeError: pretrained_model is no PreTrainedModel or PeftModel.
        ValueError: the model has no LM head, or the other subclass wraps models of its kind.
    """

    transformers_parent_class: ClassVar[AutoModel | None] = None
    wraps_encoder_decoder: ClassVar[bool | None] = None

    def __init__(
        self,
        pretrained_model: Model,
        *,
        summary_dropout_prob: float | None = None,
        v_head_init_strategy: InitStrategy | None = None,
        v_head_initializer_range: float = 0.2,
    ):
        super().__init__()
        if not isinstance(pretrained_model, PreTrainedModel | PeftModel):
            raise TypeError(
                f"A value head needs a transformers PreTrainedModel or a PeftModel, and got a "
                f"{type(pretrained_model).__name__}. from_pretrained also takes a hub id or folder."
            )
        bar_packing(pretrained_model)
        self.pretrained_model: Any = pretrained_model  # whose class has methods that Model does not declare
        lm_head = lm_head_of(self.pretrained_model)
        if lm_head is None:
            raise ValueError(
                f"{type(pretrained_model).__name__} has no LM head, so it is no policy that could have a value head. "
                "Load it with AutoModelForCausalLM or AutoModelForSeq2SeqLM."
            )
        if self.wraps_encoder_decoder is not None and self.wraps_encoder_decoder != self.is_encoder_decoder:
            fitting = "Seq2SeqLM" if self.is_encoder_decoder else "CausalLM"
            raise ValueError(f"{type(pretrained_model).__name__} needs AutoModelFor{fitting}WithValueHead.")
        if summary_dropout_prob is None:
            summary_dropout_prob = getattr(self.config, "summary_dropout_prob", 0.1)
        # The LM head's device; if a device_map has offloaded the head, the first device with weights.
        tensors = chain(lm_head.parameters(), lm_head.buffers(), self.pretrained_model.parameters())
        self.v_head = ValueHead(
            state_width(self.pretrained_model),
            summary_dropout_prob=summary_dropout_prob,
            device=next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("meta")),
            dtype=torch.promote_types(self.pretrained_model.dtype, torch.float32),
        )
        self.v_head.init_weights(v_head_init_strategy, v_head_initializer_range)
        self.score: nn.Linear | None = None
        self.rm_adapter_name: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | PreTrainedModel | PeftModel,
        *model_args: object,
        peft_config: PeftConfig | None = None,
        is_trainable: bool = True,
        reward_adapter: str | os.PathLike[str] | None = None,
        reward_adapter_name: str = "reward_adapter",
        **kwargs: Any,
    ) -> Self:
        """Loads or wraps a model, with its stored value head or else with a fresh one.

        Args:
            pretrained_model_name_or_path: hub id or folder of a model, of a wrapped model or of an adapter, whose base
                model is loaded with it; or a model in memory.
            model_args: positional arguments of transformers' `from_pretrained`.
            peft_config: puts a new adapter on the model, which is prepared for training first if it is quantized.
            is_trainable: whether a loaded adapter can train.
            reward_adapter: hub id or folder of a reward model's adapter with its score head, trained on the same base
                model, for `compute_reward_score`. It is frozen, and `save_pretrained` leaves it out.
            reward_adapter_name: its name among the model's adapters.
            kwargs: options of the constructor and of PEFT's `prepare_model_for_kbit_training`; all others (dtype,
                token, ...) go to transformers. Without dtype a model loads in float32, or where only adapters train in
                the checkpoint's type. With a model in memory they are ignored, with a warning.

        Raises:
            TypeError: the class is not one of the two subclasses.
            ValueError: the stored value head or the reward adapter does not fit the model.
        """
        if cls.transformers_parent_class is None:
            raise TypeError("Use AutoModelForCausalLMWithValueHead or AutoModelForSeq2SeqLMWithValueHead.")
        options = {name: kwargs.pop(name) for name in HEAD_OPTIONS if name in kwargs}
        kbit = {name: kwargs.pop(name) for name in KBIT_OPTIONS if name in kwargs}
        hub = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
        source = pretrained_model_name_or_path
        stored: StoredHead | None = None
        model: Model
        if isinstance(source, str | os.PathLike):
            model = load_model(
                cls.transformers_parent_class,
                str(source),
                model_args,
                is_trainable=is_trainable,
                hub=hub,
                kwargs=with_quantization_config(kwargs),
                peft_config=peft_config,
                **kbit,
            )
            stored = find_value_head(str(source), isinstance(model, PeftModel), hub)
        else:
            model = source
            used = hub if reward_adapter is not None else {}
            if unused := [*map(repr, model_args), *(name for name in kwargs if name not in used)]:
                what = "A model in memory stays as it is"
                warnings.warn(f"{what}: {', '.join(unused)} changed nothing. Load the model with it.", stacklevel=2)
        if peft_config is not None:
            if isinstance(model, PeftModel):
                warnings.warn("peft_config is not used: the model already has an adapter.", stacklevel=2)
            else:
                model = cast(PeftModel, get_peft_model(prepared_for_adapter(model, **kbit), peft_config))
        wrapper = cls(model, **options)
        if stored is not None:
            wrapper._load_value_head(*stored)
        if reward_adapter is not None:
            # revision and subfolder locate the policy, not the reward adapter.
            access = {name: value for name, value in hub.items() if name not in ("revision", "subfolder")}
            wrapper.score = load_reward_adapter(model, os.fspath(reward_adapter), reward_adapter_name, **access)
            wrapper.rm_adapter_name = reward_adapter_name
        return wrapper

    def _load_value_head(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Loads the tensors of `file` into the value head, in their dtype but float32 or more."""
        needed = {f"v_head.{key}": tuple(value.shape) for key, value in self.v_head.state_dict().items()}
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        if shapes != needed:
            raise ValueError(
                f"The value head in {file} does not fit this model: it holds {shapes}, the model needs {needed}. Load "
                "the checkpoint with the base model that it was trained on, or remove the head to start a fresh one."
            )
        self.v_head.to(torch.promote_types(tensors["v_head.summary.weight"].dtype, torch.float32))
        self.v_head.load_state_dict({key.removeprefix("v_head."): value for key, value in tensors.items()})

    @property
    def config(self) -> PreTrainedConfig:
        """The wrapped model's configuration."""
        return self.pretrained_model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The wrapped model's generation configuration."""
        return self.pretrained_model.generation_config

    @generation_config.setter
    def generation_config(self, generation_config: GenerationConfig) -> None:
        self.pretrained_model.generation_config = generation_config

    @property
    def device(self) -> torch.device:
        """The wrapped model's device."""
        return self.pretrained_model.device

    current_device = device

    @property
    def is_peft_model(self) -> bool:
        """Whether the wrapped model is a PeftModel."""
        return isinstance(self.pretrained_model, PeftModel)

    @property
    def _policy_adapters(self) -> list[str]:
        """The names of the adapters other than the reward model's."""
        names = self.pretrained_model.peft_config if self.is_peft_model else []
        return [name for name in names if name != self.rm_adapter_name]

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the wrapped model has an encoder."""
        return bool(self.config.is_encoder_decoder)

    @property
    def _no_split_modules(self) -> Iterable[str] | None:  # accelerate's FSDP wrapping reads it
        return undivided(self.pretrained_model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: object,
    ) -> tuple[Any, ...]:
        """Runs the model once and returns logits, loss and values.

        Args:
            input_ids: [B, T], the encoder's where there is one.
            past_key_values: the cache to go on from.
            attention_mask: [B, T], 1 where input_ids are no padding.
            return_past_key_values: whether the cache is returned too.
            kwargs: for the model: position_ids, labels, decoder_input_ids, decoder_attention_mask, ...

        Returns:
            Logits [B, T, V] in float32 or more; the loss, None without labels; values [B, T]; and the cache where it
            was asked for. With an encoder-decoder model T is the decoder's.

        Raises:
            RuntimeError: the model returned no logits or no hidden states.
        """
        if past_key_values is not None:
            kwargs[cache_argument(base_of(self.pretrained_model).forward) or CACHE] = past_key_values
        kwargs.setdefault("use_cache", return_past_key_values)
        kwargs["return_dict"] = True
        kwargs["output_hidden_states"] = True
        output = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if output.logits is None:
            raise RuntimeError(
                f"{type(self.pretrained_model).__name__} returned no logits. Switch fused losses (Liger) off, or leave "
                "the labels out."
            )
        values = self.v_head(last_hidden_state(self.pretrained_model, output))
        logits = upcast(output.logits)
        result = (logits, output.loss, values.to(logits.device))
        return (*result, output.get(CACHE)) if return_past_key_values else result

    def compute_reward_score(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ppo_adapter_name: str | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Scores texts with the reward adapter, without gradients and dropout.

        The score of a text is the one at its last token. That is `[:, -1]` only where no row is padded on the right.

        Args:
            input_ids: [B, T], query and response.
            attention_mask: [B, T], 0 at padding on either side; default: no padding.
            ppo_adapter_name: the adapter that is active afterwards; default: the one that was active before.

        Returns:
            [B, T, labels], the score of the text up to each token.

        Raises:
            ValueError: the model was loaded without reward_adapter, or has no adapter ppo_adapter_name.
        """
        if self.score is None or self.rm_adapter_name is None:
            raise ValueError("The model has no reward adapter. Pass from_pretrained(..., reward_adapter=folder).")
        model = self.pretrained_model
        if ppo_adapter_name is not None and ppo_adapter_name not in model.peft_config:
            raise ValueError(f"ppo_adapter_name={ppo_adapter_name!r}, but the adapters are {list(model.peft_config)}.")
        inputs = {"input_ids": input_ids, **kwargs}
        if attention_mask is not None:
            inputs = positioned(base_of(model).forward, {**inputs, "attention_mask": attention_mask})
        with torch.no_grad(), without_dropout(model), adapter_on(model, self.rm_adapter_name), without_logits(model):
            output = model(**inputs, use_cache=False, return_dict=True, output_hidden_states=True)
            scores = linear_in_own_dtype(self.score, last_hidden_state(model, output))
        if ppo_adapter_name is not None:
            model.set_adapter(ppo_adapter_name)
        return scores

    def generate(self, *args: object, **kwargs: object) -> Any:
        """Samples with the wrapped model: see transformers.GenerationMixin."""
        with cache_found(self.pretrained_model, *cache_names(self.pretrained_model)):
            return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, object] | None = None) -> None:
        """Makes backward recompute activations, in training mode; takes arguments of torch.utils.checkpoint."""
        # transformers 5.23 deprecates the only name that 5.17 has. Both make the embeddings' output require gradients,
        # without which reentrant checkpoints would pass none through a frozen trunk to the adapters.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self.pretrained_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Makes backward keep activations again."""
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self.pretrained_model.gradient_checkpointing_disable()
        self.pretrained_model.disable_input_require_grads()

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Writes the wrapped model with its own `save_pretrained`, and `value_head.safetensors` into the same folder.

        Args:
            state_dict: the weights, where the caller gathered them from several processes; default: this model's.
            is_main_process: False on a process that must not write.
            push_to_hub: whether to upload the folder afterwards, as the repository `repo_id` (default: the folder's
                name), which is created where it does not exist.
            kwargs: options of the upload (repo_id, private, token, revision, create_pr, commit_message); all others
                (max_shard_size, selected_adapters, ...) go to the wrapped model's `save_pretrained`.

        Returns:
            What huggingface_hub.upload_folder returns; None without an upload.
        """
        upload = {name: kwargs.pop(name) for name in UPLOAD_OPTIONS if name in kwargs}
        weights = self.state_dict() if state_dict is None else state_dict
        head = {key: value for key, value in weights.items() if key.startswith("v_head.")}
        if state_dict is not None:
            trunk = [key for key in weights if key.startswith("pretrained_model.")]
            kwargs["state_dict"] = {key.removeprefix("pretrained_model."): weights[key] for key in trunk}
        if self.rm_adapter_name is not None:
            kwargs.setdefault("selected_adapters", self._policy_adapters)
        self.pretrained_model.save_pretrained(str(save_directory), is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return None
        folder = Path(save_directory)
        # PEFT writes an adapter that is not named "default" into a subfolder, which gets the head too.
        adapters = [folder / name for name in self._policy_adapters]
        for target in [folder, *(path for path in adapters if path.is_dir())]:
            write_beside(head, target / VALUE_HEAD_FILE)
        return push_folder(folder, **{"repo_id": folder.resolve().name, **upload}) if push_to_hub else None

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads the model: `save_pretrained` with `push_to_hub=True`, into a temporary folder.

        Args:
            repo_id: the repository, which is created where it does not exist.
            kwargs: options of `save_pretrained`.

        Returns:
            What huggingface_hub.upload_folder returns.
        """
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, push_to_hub=True, repo_id=repo_id, **kwargs)


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A causal language model with a value head."""

    transformers_parent_class = AutoModelForCausalLM
    wraps_encoder_decoder = False


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """An encoder-decoder language model with a value head on its decoder."""

    transformers_parent_class = AutoModelForSeq2SeqLM
    wraps_encoder_decoder = True
