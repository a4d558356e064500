"""The model cards of trainers on transformers.Trainer: their Python loads the model that was saved."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig
from tests.lm import tiny
from transformers import GPT2ForSequenceClassification

from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

PAIRS = {"prompt": ["a", "b"], "chosen": ["cd", "ef"], "rejected": ["gh", "i"]}
ANSWERS = {"prompt": ["a", "b"], "completion": ["cd", "ef"], "label": [True, False]}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"text": ["abc", "de"]}),
    "dpo": (DPOTrainer, DPOConfig, PAIRS),
    "kto": (KTOTrainer, KTOConfig, ANSWERS),
    "reward": (RewardTrainer, RewardConfig, PAIRS),
    "grpo": (GRPOTrainer, GRPOConfig, {"prompt": ["a", "b"]}),
    "iterative_sft": (IterativeSFTTrainer, IterativeSFTConfig, {"text": ["abc", "de"]}),
}


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def saved(kind: str, folder: str, *, adapters: bool = False, **settings: Any) -> Any:
    """Returns a trainer of a model that was loaded from `base`, and has saved it."""
    trainer_kind, config_kind, columns = KINDS[kind]
    tiny.gpt2().save_pretrained("base")
    tiny.tokenizer().save_pretrained("base")
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    more: dict[str, Any] = {"reward_funcs": length} if kind == "grpo" else {}
    settings |= {"max_completion_length": 4} if kind == "grpo" else {}
    more["peft_config"] = LoraConfig(task_type=task, target_modules=["c_attn"]) if adapters else None
    args = config_kind(folder, use_cpu=True, report_to="none", disable_tqdm=True, **settings)
    trainer = trainer_kind("base", args=args, train_dataset=Dataset.from_dict(columns), **more)
    trainer.save_model()
    return trainer


def run_usage(page: str) -> Any:
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, names)
    assert names["tokenizer"]("ab")["input_ids"]
    return names["model"]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_python_of_a_card_loads_the_model(kind: str, adapters: bool, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = saved(kind, "runs/mine", adapters=adapters, learning_rate=0.125)
    card = ModelCard.load("runs/mine/README.md")
    assert card.data.library_name == ("peft" if adapters else "transformers")
    assert {"trimtab", f"arxiv:{trainer.paper.rpartition(':')[2]}"} <= set(card.data.tags)
    assert "# mine\n" in card.text
    assert trainer.method in card.text
    assert "| base model | base |" in card.text
    assert "| learning_rate | 0.125 |" in card.text
    assert "| data | 2 rows with the columns " in card.text
    assert ("| reward | length |" in card.text) is (kind == "grpo")
    assert "Needed" not in card.text
    loaded = run_usage(card.text)
    assert isinstance(loaded.get_base_model() if adapters else loaded, GPT2ForSequenceClassification) is (
        kind == "reward"
    )
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, trainer.model.eval()(ids).logits)


def test_a_card_has_settings_that_matter_and_none_of_the_machine(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = saved("dpo", "mine", weight_decay=0.5, logging_steps=7, model_init_kwargs={"revision": "main"})
    page = Path("mine/README.md").read_text()
    for row in ("beta | 0.1", "weight_decay | 0.5", "seed | 42", "num_train_epochs | 3.0"):
        assert f"| {row} |" in page
    for name in ("logging_steps", "output_dir", "adam_beta1", "fsdp"):
        assert f"| {name} |" not in page
    trainer.create_model_card(language="de", license="mit", tags="cats", model_name="Cats", dataset="me/cats")
    card = ModelCard.load("mine/README.md")
    assert (card.data.language, card.data.license, card.data.datasets) == ("de", "mit", ["me/cats"])
    assert card.data.tags[-1] == "cats"
    assert "# Cats\n" in card.text


def test_the_cards_of_checkpoints_have_no_placeholders_either(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = saved("sft", "runs/mine", adapters=True, max_steps=1, save_steps=1)
    trainer.train()
    page = Path("runs/mine/checkpoint-1/README.md").read_text()
    assert "Needed" not in page
    assert "supervised fine-tuning" in page
