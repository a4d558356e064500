"""FlashAttention and Liger: chosen where they can run, left out with one warning where they cannot."""

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.test_every_trainer import PREFERENCES, SETTINGS, WORDS, length
from transformers import PreTrainedModel

from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.hf.config import runs_liger
from trimtab_lm.models.loading import from_pretrained

FLASH = {"attn_implementation": "flash_attention_2"}
TRAINERS = ["sft", "iterative_sft", "reward", "dpo", "grpo"]


def build(name: str, folder: Path, **config: Any) -> Any:
    """A trainer whose model is loaded by name."""
    tiny.llama().save_pretrained(folder / "model")
    source, output, settings = str(folder / "model"), str(folder), {**SETTINGS, "max_steps": 1, **config}
    words = {"processing_class": tiny.tokenizer()}
    if name == "sft":
        rows = Dataset.from_dict({"text": WORDS})
        return SFTTrainer(source, SFTConfig(output, **settings), train_dataset=rows, **words)
    if name == "iterative_sft":
        return IterativeSFTTrainer(source, IterativeSFTConfig(output, **settings), **words)
    if name == "reward":
        return RewardTrainer(source, RewardConfig(output, **settings), train_dataset=PREFERENCES, **words)
    if name == "dpo":
        return DPOTrainer(source, args=DPOConfig(output, **settings), train_dataset=PREFERENCES, **words)
    prompts = Dataset.from_dict({"prompt": WORDS})
    args = GRPOConfig(output, num_generations=2, max_completion_length=4, **settings)
    return GRPOTrainer(source, length, args, prompts, **words)


def texts(caught: list[warnings.WarningMessage], part: str) -> list[str]:
    return [str(one.message) for one in caught if part in str(one.message)]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_without_flash_attention_and_liger_says_so_in_a_line_each(name: str, tmp_path: Path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build(name, tmp_path, use_liger_kernel=True, model_init_kwargs=FLASH)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert not trainer.args.use_liger_kernel
    (flash,) = texts(caught, "flash_attention_2")
    assert "without attn_implementation='flash_attention_2'" in flash
    assert "installed" in flash
    assert texts(caught, "liger") == ["The model trains without use_liger_kernel: its kernels need a GPU."]


def test_a_policy_with_a_value_head_loads_without_flash_attention(tmp_path: Path):
    tiny.llama().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="without attn_implementation='flash_attention_2'"):
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **FLASH)
    assert policy.config._attn_implementation == "sdpa"


class Loads(PreTrainedModel):
    """Loads nothing, and returns the arguments."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("fails", False):
            raise ImportError("no module named remote")
        return args, kwargs


def test_flash_attention_that_can_run_is_chosen():
    assert from_pretrained(Loads, "name", 1, **FLASH) == (("name", 1), FLASH | {"dtype": torch.float32})


def test_another_missing_package_stays_an_error():
    with pytest.raises(ImportError, match="remote"):
        from_pretrained(Loads, "name", attn_implementation="sdpa", fails=True)


def test_liger_is_chosen_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.warns(UserWarning, match="without use_liger_kernel: .*liger_kernel"):
        assert not runs_liger(gpu)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("liger_kernel.transformers"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs_liger(gpu)
