"""Parsers, model arguments and small helpers that the example scripts of TRL import.

`trimtab_lm.legacy.trl` gives scripts these names under those of `trl`. The fields and their defaults are TRL's.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import (
    BitsAndBytesConfig,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.training_args import TrainingArguments  # which `transformers4.restore` leaves as it is

from trimtab_common.config import read_settings, setting
from trimtab_lm.compat.arguments import actions_of
from trimtab_lm.data.formats import preference_parts
from trimtab_lm.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

TRL_VERSION = "0.11.4"
"""The latest version whose arguments the trainers understand, for scripts that compare it."""

SUPPORTED_ARCHITECTURES = (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SIMPLE_QUERY_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
)
SIMPLE_SFT_CHAT_TEMPLATE = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}{{ eos_token }}"
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class ModelConfig:
    """The model of a script: how it is loaded, quantized and adapted."""

    model_name_or_path: str | None = setting("Hub id or folder of the model.", default=None)
    model_revision: str = setting("Branch, tag or commit on the hub.", default="main")
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = setting("Dtype of weights.", default=None)
    trust_remote_code: bool = setting("Run code that the model's repository holds.", default=False)
    attn_implementation: str | None = setting("Such as flash_attention_2 or sdpa.", default=None)
    use_peft: bool = setting("Train LoRA adapters.", default=False)
    lora_r: int = setting("Rank of the adapters.", default=16)
    lora_alpha: int = setting("Scale of the adapters, which is divided by the rank.", default=32)
    lora_dropout: float = setting("Dropout before the adapters.", default=0.05)
    lora_target_modules: list[str] | None = setting("Modules with adapters. None: PEFT's choice.", default=None)
    lora_modules_to_save: list[str] | None = setting("Modules that train as a whole.", default=None)
    lora_task_type: str = setting("CAUSAL_LM, or SEQ_CLS for a reward model.", default="CAUSAL_LM")
    use_rslora: bool = setting("Divide the scale by the root of the rank.", default=False)
    load_in_8bit: bool = setting("Hold the base model in 8 bits (bitsandbytes).", default=False)
    load_in_4bit: bool = setting("Hold the base model in 4 bits (bitsandbytes).", default=False)
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = setting("Format of 4 bits.", default="nf4")
    use_bnb_nested_quant: bool = setting("Quantize the scales too.", default=False)

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both set. Choose one.")


@dataclass
class ScriptArguments:
    """The data of a script."""

    dataset_name: str | None = setting("Hub id or folder of the dataset.", default=None)
    dataset_config: str | None = setting("Configuration of the dataset.", default=None)
    dataset_train_split: str = setting("Split to train on.", default="train")
    dataset_test_split: str = setting("Split to evaluate on.", default="test")
    config: str | None = setting("YAML file of further arguments, which TrlParser reads.", default=None)
    gradient_checkpointing_use_reentrant: bool = setting("TrlParser passes it to the training.", default=False)
    ignore_bias_buffers: bool = setting("Keep boolean buffers out of DDP; the script does it.", default=False)


class ParserOfSharedFields(HfArgumentParser):
    """transformers' parser; a field that a config and a ModelConfig have in common is the ModelConfig's.

    `transformers4.restore` gives it to scripts as transformers.HfArgumentParser.
    """

    def __init__(self, dataclass_types: Iterable[type] | type | None = None, **kwargs: Any) -> None:
        types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        with _without_shared_fields(types):
            super().__init__(cast(Any, types), **kwargs)

    def parse_args_into_dataclasses(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns an instance of each dataclass; arguments as of transformers' method."""
        with _without_shared_fields(cast("list[type]", self.dataclass_types)):
            return super().parse_args_into_dataclasses(*args, **kwargs)


class TrlParser(ParserOfSharedFields):
    """A parser of dataclasses whose defaults a YAML file may replace: `--config FILE`.

    Args:
        ignore_extra_args: whether the file may hold arguments that no dataclass declares.
    """

    def __init__(self, dataclass_types: Iterable[type] | type, ignore_extra_args: bool = False) -> None:
        super().__init__(dataclass_types)
        self.ignore_extra_args = ignore_extra_args

    def parse_args_and_config(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        """Returns an instance of each dataclass.

        The entries of `env` in the file become environment variables.

        Args:
            args: words of the command line; by default those of the running program.
            return_remaining_strings: whether words that no dataclass knows come last, instead of being an error.

        Raises:
            ValueError: the file holds other arguments than the dataclasses do.
        """
        given = sys.argv[1:] if args is None else args
        words = list[str]()
        for word in given:
            words += word.split("=", 1) if word.startswith("--config=") else [word]
        if "--config" in words:
            place = words.index("--config")
            if not words[place + 1 :] or words[place + 1].startswith("--"):
                self.error("--config needs the name of one YAML file.")
            self._set_defaults(words[place + 1])
            del words[place : place + 2]
        parsed = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        if any(getattr(one, "gradient_checkpointing_use_reentrant", False) for one in parsed):
            for one in parsed:
                if isinstance(one, TrainingArguments):
                    one.gradient_checkpointing_kwargs = {"use_reentrant": True}
        return parsed

    def _set_defaults(self, file: str) -> None:
        settings = read_settings(file)
        env = cast("dict[str, object]", settings.pop("env", {}))
        os.environ.update({name: str(value) for name, value in env.items()})
        known = actions_of(self)
        unknown = sorted(settings.keys() - known)
        if unknown and not self.ignore_extra_args:
            raise ValueError(f"{file} sets {', '.join(unknown)}, which no dataclass of the script has.")
        for name in settings.keys() & known.keys():
            known[name].default, known[name].required = settings[name], False


@contextmanager
def _without_shared_fields(types: Sequence[type]) -> Iterator[None]:
    """Hides fields that a config shares with another dataclass of the script from parsers inside the block.

    TRL's configs of 2026 have `trust_remote_code`, which the scripts of 2024 have in their ModelConfig.
    """
    others = {one.name for kind in types if not issubclass(kind, TrainingArguments) for one in fields(cast(Any, kind))}
    configs = [kind for kind in types if issubclass(kind, TrainingArguments)]
    shared = [one for kind in configs for one in fields(kind) if one.init and one.name in others]
    for one in shared:
        one.init = False
    try:
        yield
    finally:
        for one in shared:
            one.init = True


def get_peft_config(model_config: ModelConfig) -> LoraConfig | None:
    """Returns the adapters that the arguments ask for; None without use_peft."""
    if not model_config.use_peft:
        return None
    targets = model_config.lora_target_modules
    return LoraConfig(
        task_type=model_config.lora_task_type,
        r=model_config.lora_r,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        lora_alpha=model_config.lora_alpha,
        lora_dropout=model_config.lora_dropout,
        bias="none",
        use_rslora=model_config.use_rslora,
        modules_to_save=model_config.lora_modules_to_save,
    )


def get_quantization_config(model_config: ModelConfig) -> BitsAndBytesConfig | None:
    """Returns the quantization that the arguments ask for; None for none."""
    if model_config.load_in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_config.torch_dtype,
            bnb_4bit_quant_type=model_config.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model_config.use_bnb_nested_quant,
            bnb_4bit_quant_storage=model_config.torch_dtype,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if model_config.load_in_8bit else None


def get_kbit_device_map() -> dict[str, int] | None:
    """Returns a map that places a model on this process's accelerator; None without one."""
    return {"": PartialState().local_process_index} if torch.accelerator.is_available() else None


def setup_chat_format(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    format: Literal["chatml"] = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gives a base model the ChatML format: its two tokens, as BOS and as EOS and padding, and its template.

    Args:
        model: gets embeddings for the new tokens, and their ids in its configs.
        tokenizer: gets the tokens and the template.
        resize_to_multiple_of: the number of embeddings becomes a multiple of this.

    Returns:
        The model and the tokenizer, which are changed in place.
    """
    if format != "chatml":
        raise ValueError(f"format={format!r} is unknown. Use 'chatml', or set tokenizer.chat_template.")
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML_TEMPLATE
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, model.generation_config) if model.can_generate() else (model.config,):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of preferences with its prompt apart; see `preference_parts`. Other rows stay as they are."""
    if not {"chosen", "rejected"} <= example.keys():
        return example
    return dict(zip(("prompt", "chosen", "rejected"), preference_parts(example), strict=True))


def maybe_apply_chat_template(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns a row of messages as the texts that the tokenizer's template writes. Rows of texts stay as they are.

    Args:
        example: with `messages`, or with `prompt` and answers (`chosen` and `rejected`, or `completion`). Answers
            without a prompt are whole conversations.
        tokenizer: with a chat template.

    Raises:
        ValueError: the template does not begin a conversation with its prompt.
    """

    def write(messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return cast(
            str,
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt),
        )

    if "messages" in example:
        return {"text": write(example["messages"])}
    names = [name for name in ("prompt", "chosen", "rejected", "completion") if name in example]
    if not names or isinstance(example[names[0]], str):
        return example
    prompt: list[dict[str, Any]] = example.get("prompt", [])
    texts = {"prompt": write(prompt, add_generation_prompt=True)} if "prompt" in example else {}
    beginning = texts.get("prompt", "")
    for name in names[len(texts) :]:
        whole = write([*prompt, *example[name]])
        if not whole.startswith(beginning):
            raise ValueError(
                f"The chat template writes {whole!r}, which does not begin with its prompt {beginning!r}. Leave "
                "the function out: the trainers take messages."
            )
        texts[name] = whole[len(beginning) :]
    return texts


def conversations_formatting_function(
    tokenizer: PreTrainedTokenizerBase, messages_field: str
) -> Callable[[dict[str, Any]], str | list[str]]:
    """Returns a function from a row, or a batch of rows, to its conversation as the template writes it.

    Args:
        tokenizer: with a chat template.
        messages_field: column of the messages.
    """

    def write(examples: dict[str, Any]) -> str | list[str]:
        messages = examples[messages_field]
        if isinstance(messages[0], list):
            return [cast(str, tokenizer.apply_chat_template(one, tokenize=False)) for one in messages]
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False))

    return write


def init_zero_verbose() -> None:
    """Hides warnings, and logs below errors."""
    logging.basicConfig(level=logging.ERROR)
    logging.captureWarnings(True)


def strtobool(val: str) -> bool:
    """Converts y, yes, t, true, on, 1 to True, and n, no, f, false, off, 0 to False.

    Raises:
        ValueError: another word.
    """
    if val.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if val.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ValueError(f"{val!r} is no truth value. Use true or false.")
