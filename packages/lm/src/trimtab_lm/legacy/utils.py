"""Functions of `trl.trainer.utils`, `trl.models` and `trl.import_utils`, with their names and arguments of 2024."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trimtab_common.sharding import whole_weights
from trimtab_common.stats import Variance, gather_over_ranks
from trimtab_lm.legacy.core import pad_to_size
from trimtab_lm.legacy.scripts import CHATML_TEMPLATE, conversations_formatting_function
from trimtab_lm.models.adapters import adapters_off
from trimtab_lm.reward.loss import accuracy

# ---------------------------------------------------------------- trl.trainer.utils


def compute_accuracy(eval_pred: tuple[Any, Any]) -> dict[str, float]:
    """The share of pairs whose labelled column has the higher score; a tie is not a win.

    Args:
        eval_pred: scores [pairs, 2], and for each pair the number of the better column.
    """
    scores, labels = (torch.from_numpy(np.asarray(part)) for part in eval_pred)
    better = scores.gather(1, labels.long()[:, None]).squeeze(1)
    return {"accuracy": float(accuracy(better, scores.sum(1) - better).mean())}


def get_global_statistics(
    accelerator: Accelerator, xs: Tensor, mask: Tensor | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count of the numbers of every process where `mask` is 1. Collective."""
    seen = sum(gather_over_ranks(Variance.of(xs, mask)), start=Variance(0, 0.0, 0.0))
    mean, variance, count = torch.tensor([seen.mean, seen.value, seen.count], device=device).unbind()
    return mean, variance, count


def pad_to_length(tensor: Tensor, length: int, pad_value: float, dim: int = -1) -> Tensor:
    """A tensor with `pad_value` at the end of an axis, up to `length`; one that is longer as it is."""
    return pad_to_size(tensor, max(length, tensor.shape[dim]), dim, pad_value)


def pad(tensors: Sequence[Tensor], padding_value: int = 0, padding_side: str = "right") -> Tensor:
    """Tensors [T_i, ...] as one [B, max T, ...]; further axes are padded at their end."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r} is none of left and right.")
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = tensors[0].new_full((len(tensors), *shape), padding_value)
    for row, tensor in zip(padded, tensors, strict=True):
        start = shape[0] - len(tensor) if padding_side == "left" else 0
        row[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
    return padded


def decode_and_strip_padding(inputs: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of token ids [B, T] without their padding."""
    texts = tokenizer.batch_decode(inputs, skip_special_tokens=False)
    return [text.replace(cast(str, tokenizer.pad_token), "") for text in texts]


def disable_dropout_in_model(model: nn.Module) -> None:
    """Sets the rates of a model's dropout layers to 0 permanently. Trimtab's trainers leave them unchanged."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def exact_div(a: int, b: int, *words: str, custom_error_message: str = "") -> int:
    """a / b.

    Args:
        a, b: whole numbers.
        words: in TRL 0.7 names of a and b, and an error message; in 0.9 an error message.
        custom_error_message: the same.

    Raises:
        ValueError: there is a remainder.
    """
    if a % b:
        raise ValueError(f"{', '.join([*words, custom_error_message])}: {a} / {b} = {a / b} is not a whole number.")
    return a // b


def neftune_post_forward_hook(module: Any, input: object, output: Tensor) -> Tensor:
    """A forward hook of embeddings, which adds noise in training (Jain et al. 2023, arXiv:2310.05914).

    Args:
        module: with `neftune_noise_alpha`, the scale of the noise.
        output: [B, T, H].

    Returns:
        [B, T, H]; the noise is uniform within +- alpha / sqrt(T H).
    """
    if not module.training:
        return output
    size = module.neftune_noise_alpha / (output.shape[1] * output.shape[2]) ** 0.5
    return output + torch.empty_like(output).uniform_(-size, size)


def peft_module_casting_to_bf16(model: nn.Module) -> None:
    """Casts adapters, and float32 weights of embeddings and heads, to bfloat16, and norms to float32; in place."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):  # whose base class is none of torch's
            cast(nn.Module, module).to(torch.bfloat16)
        elif isinstance(module, nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")) and (
            getattr(getattr(module, "weight", None), "dtype", None) == torch.float32
        ):
            module.to(torch.bfloat16)


# ---------------------------------------------------------------- trl.models and trl.extras


@dataclass
class ChatMlSpecialTokens:
    """The special tokens of ChatML."""

    bos_token: str = "<|im_start|>"
    eos_token: str = "<|im_end|>"
    pad_token: str = "<|im_end|>"

    @property
    def system(self) -> str:
        """Begins a message of the system."""
        return f"{self.bos_token}system"

    @property
    def user(self) -> str:
        """Begins a message of the user."""
        return f"{self.bos_token}user"

    @property
    def assistant(self) -> str:
        """Begins a message of the model."""
        return f"{self.bos_token}assistant"

    @property
    def chat_template(self) -> str:
        """The template that `setup_chat_format` sets, with these tokens."""
        return CHATML_TEMPLATE.replace("<|im_start|>", self.bos_token).replace("<|im_end|>", self.eos_token)


CHAT_FORMATS = {"chatml": ChatMlSpecialTokens}


@contextmanager
def unwrap_model_for_generation(model: Any, accelerator: Accelerator, is_peft_model: bool = False) -> Iterator[Any]:
    """Unwraps and gathers a prepared model inside the block, for sampling. Collective under FSDP and DeepSpeed.

    Args:
        model: as the accelerator prepared it.
        accelerator: that prepared it.
        is_peft_model: whether the adapters of its `pretrained_model` are off inside the block.
    """
    bare = accelerator.unwrap_model(model)
    with whole_weights(bare), adapters_off(bare.pretrained_model) if is_peft_model else nullcontext():
        yield bare


def instructions_formatting_function(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[dict[str, Any]], str | list[str]]:
    """Returns a function from a row, or a batch of rows, of prompt and completion to the conversation as a text."""
    write = conversations_formatting_function(tokenizer, "messages")

    def conversation(prompt: str, completion: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]

    def formatted(examples: dict[str, Any]) -> str | list[str]:
        columns = examples["prompt"], examples["completion"]
        if isinstance(columns[0], str):
            return write({"messages": conversation(*columns)})
        return write({"messages": [conversation(*row) for row in zip(*columns, strict=True)]})

    return formatted


def get_formatting_func_from_dataset(
    dataset: object, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, Any]], str | list[str]] | None:
    """Returns the function that writes the rows of a dataset as texts; None for rows of another format.

    Args:
        dataset: with messages of role and content in the column `messages` or `conversations`, or with texts in
            `prompt` and `completion` alone.
        tokenizer: with a chat template.
    """
    row = dataset[0] if isinstance(dataset, Dataset) and len(dataset) else {}
    for column in ("messages", "conversations"):
        messages = row.get(column)
        if messages and isinstance(messages, list) and all(set(message) == {"role", "content"} for message in messages):
            return conversations_formatting_function(tokenizer, column)
    is_instruction = row.keys() == {"prompt", "completion"} and all(isinstance(text, str) for text in row.values())
    return instructions_formatting_function(tokenizer) if is_instruction else None


def is_conversational(example: dict[str, Any]) -> bool:
    """Whether a row holds messages: under prompt, chosen, rejected, completion or messages."""
    names = ("prompt", "chosen", "rejected", "completion", "messages")
    rows = [example[name] for name in names if name in example]
    return bool(rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], dict))


# ---------------------------------------------------------------- trl.import_utils


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


is_diffusers_available = partial(_is_installed, "diffusers")
is_llmblender_available = partial(_is_installed, "llm_blender")
is_unsloth_available = partial(_is_installed, "unsloth")


def is_transformers_greater_than(version: str) -> bool:
    """Whether the installed transformers is newer."""
    return Version(importlib.metadata.version("transformers")) > Version(version)


def is_current() -> bool:
    """Whether torch is 2.0 or later, or accelerate 0.20: trimtab needs later ones."""
    return True
