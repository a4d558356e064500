"""Language models with a value head on the shared trunk: one scalar per position beside the logits.

On disk a wrapped model is its base model (or adapter), loadable alone, and `value_head.safetensors` beside it. Heads
inside the weight files of 2024's checkpoints, under the same `v_head.*` keys, are found as well.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from peft import PeftConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from trimtab_common.hub import push_folder
from trimtab_lm.models.adapters import adapter_on
from trimtab_lm.models.reward_adapter import load_reward_adapter
from trimtab_lm.models.value_head_files import VALUE_HEAD_FILE, StoredHead, find_value_head, write_beside
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.heads import last_hidden_state, linear_in_own_dtype, lm_head_of, state_width, without_logits
from trimtab_lm.tokens.logprobs import positioned

HEAD_OPTIONS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
UPLOAD_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")

InitStrategy = Literal["random", "normal", "zero"]


class ValueHead(nn.Module):
    """A linear map from the decoder's last hidden state to a scalar value.

    It computes in its own dtype, float32 unless told otherwise, over a model in bfloat16 and under autocast too: values
    are regression targets, and three digits are not enough for them. factory: device and dtype, as for nn.Linear.
    """

    def __init__(self, hidden_size: int, *, summary_dropout_prob: float = 0.1, **factory: Any):
        super().__init__()
        self.dropout = nn.Dropout(summary_dropout_prob)
        self.summary = nn.Linear(hidden_size, 1, **{"dtype": torch.float32, **factory})

    def init_weights(self, strategy: InitStrategy | None, initializer_range: float) -> None:
        """None or "random": torch's Linear default. "normal": N(0, initializer_range), bias 0. "zero": all 0.

        Zero is how Ziegler et al. 2019 (arXiv:1909.08593) start, so that the first advantages are the rewards alone.
        """
        if strategy in (None, "random"):
            self.summary.reset_parameters()
        elif strategy == "normal":
            nn.init.normal_(self.summary.weight, std=initializer_range)
            nn.init.zeros_(self.summary.bias)
        elif strategy == "zero":
            nn.init.zeros_(self.summary.weight)
            nn.init.zeros_(self.summary.bias)
        else:
            raise ValueError(f"v_head_init_strategy={strategy!r}: give None, 'random', 'normal' or 'zero'.")

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden_size], any dtype and device. Returns values [...], in the head's dtype."""
        return linear_in_own_dtype(self.summary, self.dropout(hidden.to(self.summary.weight))).squeeze(-1)


class PreTrainedModelWrapper(nn.Module):
    """A transformers or PEFT model with a value head; build one through its two subclasses.

    pretrained_model: PreTrainedModel or PeftModel with an LM head; kept as it is, under `.pretrained_model`.
    summary_dropout_prob: dropout on the head's input, in training mode; default: the model configuration's field of
        that name, or 0.1 where it has none.
    v_head_init_strategy, v_head_initializer_range: see `ValueHead.init_weights`.

    `state_dict` is nn.Module's own (`pretrained_model.*`, `v_head.*`). A model without an LM head is a ValueError.
    """

    transformers_parent_class: ClassVar[Any] = None
    wraps_encoder_decoder: ClassVar[bool | None] = None

    def __init__(
        self,
        pretrained_model: PreTrainedModel | PeftModel,
        *,
        summary_dropout_prob: float | None = None,
        v_head_init_strategy: InitStrategy | None = None,
        v_head_initializer_range: float = 0.2,
    ):
        super().__init__()
        if not isinstance(pretrained_model, PreTrainedModel | PeftModel):
            raise TypeError(
                f"A value head goes on a transformers PreTrainedModel or a PeftModel, not on "
                f"{type(pretrained_model).__name__}; from_pretrained also takes a hub id or folder."
            )
        self.pretrained_model: Any = pretrained_model
        lm_head = lm_head_of(self.pretrained_model)
        if lm_head is None:
            raise ValueError(
                f"{type(pretrained_model).__name__} has no LM head, so there is no policy to put a value head on; load "
                "it with AutoModelForCausalLM or AutoModelForSeq2SeqLM."
            )
        if self.wraps_encoder_decoder is not None and self.wraps_encoder_decoder != self.is_encoder_decoder:
            fitting = "Seq2SeqLM" if self.is_encoder_decoder else "CausalLM"
            raise ValueError(f"{type(pretrained_model).__name__} needs AutoModelFor{fitting}WithValueHead.")
        if summary_dropout_prob is None:
            summary_dropout_prob = getattr(self.config, "summary_dropout_prob", 0.1)
        self.v_head = ValueHead(
            state_width(self.pretrained_model),
            summary_dropout_prob=summary_dropout_prob,
            device=_execution_device(lm_head, self.pretrained_model),
            dtype=torch.promote_types(self.pretrained_model.dtype, torch.float32),
        )
        self.v_head.init_weights(v_head_init_strategy, v_head_initializer_range)
        self.score: nn.Linear | None = None
        self.rm_adapter_name: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | PreTrainedModel | PeftModel,
        *model_args: Any,
        peft_config: PeftConfig | None = None,
        is_trainable: bool = True,
        reward_adapter: str | os.PathLike[str] | None = None,
        reward_adapter_name: str = "reward_adapter",
        **kwargs: Any,
    ) -> Self:
        """Load or wrap a model, with its value head where it has one and a fresh one where it has none.

        pretrained_model_name_or_path: hub id or folder of a model, of a wrapped model or of an adapter (its base model
            is loaded with it), or a model in memory.
        peft_config: put a new adapter on the model (a quantized one is prepared for training first).
        is_trainable: whether an adapter that is loaded goes on training.
        reward_adapter: hub id or folder of a reward model's adapter with its score head, trained on the same base
            model, for `compute_reward_score`. It is frozen, and `save_pretrained` leaves it out.
        reward_adapter_name: its name among the model's adapters.
        kwargs: the constructor's options are taken out; all else (dtype, device_map, quantization_config, revision,
            token, gguf_file, ...) goes to transformers, which refuses what it does not know.
        A stored value head that does not fit the model is a ValueError.
        """
        if cls.transformers_parent_class is None:
            raise TypeError("Use AutoModelForCausalLMWithValueHead or AutoModelForSeq2SeqLMWithValueHead.")
        options = {name: kwargs.pop(name) for name in HEAD_OPTIONS if name in kwargs}
        source = pretrained_model_name_or_path
        hub: dict[str, Any] = {}
        stored: StoredHead | None = None
        if isinstance(source, str | os.PathLike):
            kwargs = _with_quantization_config(kwargs)
            hub = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
            model = cls._load_model(str(source), model_args, is_trainable, hub, kwargs)
            stored = find_value_head(str(source), isinstance(model, PeftModel), hub)
        elif model_args or kwargs:
            unused = [*map(repr, model_args), *kwargs]
            raise TypeError(f"A model in memory takes no loading arguments; drop {', '.join(unused)}.")
        else:
            model = source
        if peft_config is not None and isinstance(model, PeftModel):
            warnings.warn("peft_config is not used: the model already has an adapter.", stacklevel=2)
        elif peft_config is not None:
            model = get_peft_model(_prepared(model), peft_config)
        wrapper = cls(model, **options)
        if stored is not None:
            wrapper._load_value_head(*stored)
        if reward_adapter is not None:
            # revision and subfolder say where the policy is.
            access = {name: value for name, value in hub.items() if name not in ("revision", "subfolder")}
            wrapper.score = load_reward_adapter(model, os.fspath(reward_adapter), reward_adapter_name, **access)
            wrapper.rm_adapter_name = reward_adapter_name
        return wrapper

    @classmethod
    def _load_model(cls, source: str, args: Any, is_trainable: bool, hub: dict[str, Any], kwargs: Any) -> Any:
        """The model that `source` holds, or its adapter on the base model that the adapter names."""
        adapter_file = find_adapter_config_file(source, **hub)
        if adapter_file is None:
            return cls.transformers_parent_class.from_pretrained(source, *args, **kwargs)
        adapter = json.loads(Path(adapter_file).read_text(encoding="utf-8"))
        if not adapter.get("base_model_name_or_path"):
            raise ValueError(
                f"{adapter_file} names no base model; load that yourself, put the adapter on it with "
                "PeftModel.from_pretrained(base, folder, is_trainable=True) and pass the result."
            )
        # revision and subfolder say where the adapter is; its config says where the base model is.
        kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
        base_name, revision = adapter["base_model_name_or_path"], adapter.get("revision")
        base = cls.transformers_parent_class.from_pretrained(base_name, *args, revision=revision, **kwargs)
        base = _prepared(base) if is_trainable else base
        return PeftModel.from_pretrained(base, source, is_trainable=is_trainable, **hub)

    def _load_value_head(self, file: str, found: dict[str, Tensor]) -> None:
        needed = {f"v_head.{key}": tuple(value.shape) for key, value in self.v_head.state_dict().items()}
        shapes = {key: tuple(value.shape) for key, value in found.items()}
        if shapes != needed:
            raise ValueError(
                f"The value head in {file} does not fit this model: it holds {shapes}, the model needs {needed}. Load "
                "the checkpoint with the base model that it was trained on, or remove the head to start a fresh one."
            )
        self.v_head.to(torch.promote_types(found["v_head.summary.weight"].dtype, torch.float32))
        self.v_head.load_state_dict({key.removeprefix("v_head."): value for key, value in found.items()})

    @property
    def config(self) -> Any:
        return self.pretrained_model.config

    @property
    def generation_config(self) -> Any:
        return self.pretrained_model.generation_config

    @generation_config.setter
    def generation_config(self, generation_config: Any) -> None:
        self.pretrained_model.generation_config = generation_config

    @property
    def device(self) -> torch.device:
        return self.pretrained_model.device

    @property
    def is_peft_model(self) -> bool:
        return isinstance(self.pretrained_model, PeftModel)

    @property
    def _policy_adapters(self) -> list[str]:
        names = self.pretrained_model.peft_config if self.is_peft_model else []
        return [name for name in names if name != self.rm_adapter_name]

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def _no_split_modules(self) -> Any:  # accelerate's FSDP wrapping reads it
        return self.pretrained_model._no_split_modules

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Logits, loss and values of one forward pass of the model.

        input_ids, attention_mask: [B, T] (of the encoder, where there is one). kwargs go to the model: position_ids,
        labels, decoder_input_ids, decoder_attention_mask, ...
        Returns (logits [B, T, V] in float32 or more, loss or None without labels, values [B, T]), and the cache as
        fourth where `return_past_key_values`. T is the decoder's with an encoder-decoder model.
        """
        if past_key_values is not None:
            kwargs["past_key_values"] = past_key_values
        kwargs.setdefault("use_cache", return_past_key_values)
        kwargs["return_dict"] = True
        kwargs["output_hidden_states"] = True
        output = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if output.logits is None:
            raise RuntimeError(
                f"{type(self.pretrained_model).__name__} returned no logits. Switch fused losses (Liger) off, or pass "
                "no labels."
            )
        values = self.v_head(last_hidden_state(self.pretrained_model, output))
        logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        result = (logits, output.loss, values.to(logits.device))
        return (*result, output.past_key_values) if return_past_key_values else result

    def compute_reward_score(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ppo_adapter_name: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Scores [B, T, labels] of the reward adapter after each token, without gradients and dropout.

        The score of a text is the one after its last token: `[:, -1]` only where no row is padded on the right.

        Args:
            input_ids: [B, T], query and response.
            attention_mask: [B, T], 0 at padding on either side; default: no padding.
            ppo_adapter_name: the adapter that is active afterwards; default: the one that is active before.
            kwargs: for the model's forward pass.

        Raises:
            ValueError: the model was loaded without reward_adapter, or has no adapter ppo_adapter_name.
        """
        if self.score is None or self.rm_adapter_name is None:
            raise ValueError("The model has no reward model; pass from_pretrained(..., reward_adapter=folder).")
        model = self.pretrained_model
        if ppo_adapter_name is not None and ppo_adapter_name not in model.peft_config:
            raise ValueError(f"ppo_adapter_name={ppo_adapter_name!r}, but the adapters are {list(model.peft_config)}.")
        inputs = {"input_ids": input_ids, **kwargs}
        if attention_mask is not None:
            inputs = positioned(model.get_base_model().forward, {**inputs, "attention_mask": attention_mask})
        with torch.no_grad(), without_dropout(model), adapter_on(model, self.rm_adapter_name), without_logits(model):
            output = model(**inputs, use_cache=False, return_dict=True, output_hidden_states=True)
            scores = linear_in_own_dtype(self.score, last_hidden_state(model, output))
        if ppo_adapter_name is not None:
            model.set_adapter(ppo_adapter_name)
        return scores

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the model; see transformers.GenerationMixin."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Recompute activations in backward; takes effect in training mode only, as transformers has it."""
        # transformers 5.23 deprecates the one name that 5.17 has. Both let the embeddings' output require gradients
        # meanwhile, without which a frozen trunk under adapters would pass none through reentrant checkpoints.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self.pretrained_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
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
        """Write the base model (or the adapters) as its own library does, and `value_head.safetensors` beside it.

        state_dict: the weights, where the caller gathered them from several processes; default: the model's own.
        is_main_process: False on a process that shall write nothing.
        push_to_hub: then upload the folder as `repo_id` (default: its name), made if need be, with `private`, `token`,
            `revision`, `create_pr`, `commit_message`; returns what huggingface_hub.upload_folder returns.
        kwargs: for the base model's `save_pretrained` (max_shard_size, selected_adapters, ...).
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
        # PEFT puts an adapter with a name of its own into a folder of that name, loadable alone: head and all.
        adapters = [folder / name for name in self._policy_adapters]
        for target in [folder, *(path for path in adapters if path.is_dir())]:
            write_beside(head, target / VALUE_HEAD_FILE)
        return push_folder(folder, **{"repo_id": folder.resolve().name, **upload}) if push_to_hub else None

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """`save_pretrained` into a temporary folder, uploaded; same options, same answer."""
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


def _execution_device(lm_head: nn.Module, model: nn.Module) -> torch.device:
    """Where the LM head's weights are; where it is offloaded (device_map), the first device that holds weights."""
    tensors = chain(lm_head.parameters(), lm_head.buffers(), model.parameters())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("meta"))


def _prepared(model: Any) -> Any:
    """The model ready to take an adapter: quantized ones need float32 norms and inputs that carry gradients."""
    quantized = getattr(model.config, "quantization_config", None) is not None
    return prepare_model_for_kbit_training(model) if quantized else model


def _with_quantization_config(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Spell 2024's `load_in_8bit=True` and `load_in_4bit=True` in the one way that transformers 5 knows."""
    old = {name: kwargs[name] for name in ("load_in_8bit", "load_in_4bit") if name in kwargs}
    kwargs = {name: value for name, value in kwargs.items() if name not in old}
    if any(old.values()):
        if "quantization_config" in kwargs:
            raise ValueError(f"Both quantization_config and {', '.join(old)} were given; keep the first.")
        message = f"{', '.join(old)} is now quantization_config=BitsAndBytesConfig(...)."
        warnings.warn(message, FutureWarning, stacklevel=4)
        kwargs["quantization_config"] = BitsAndBytesConfig(**old)
    return kwargs
