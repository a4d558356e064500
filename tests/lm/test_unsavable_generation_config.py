"""A generation config that transformers refuses to save raises an error when a trainer is constructed."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny
from tests.lm.test_late_failures import COLUMNS, SETTINGS, make
from transformers import AutoModelForCausalLM

ROWS = {kind: {name: ["a b", f"{name} d"] for name in names} for kind, names in COLUMNS.items()}
BROKEN = [
    ("do_sample", False, {"temperature": 0.6}),
    ("top_p", 0.9, {"do_sample": None}),
    ("num_beams", 1, {"length_penalty": 2.0}),
    ("max_new_tokens", 0, {}),
]


def broken(name: str = "do_sample", value: object = False, more: dict[str, Any] | None = None) -> Any:
    model = tiny.llama()
    for field, setting in {name: value, **({"temperature": 0.6} if more is None else more)}.items():
        setattr(model.generation_config, field, setting)
    return model


@pytest.mark.parametrize("kind", [kind for kind in COLUMNS if kind != "reward"])
def test_it_is_named_at_construction(kind, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)LlamaForCausalLM cannot be saved.*temperature.*do_sample=True"):
        make(kind, tmp_path, Dataset.from_dict(ROWS[kind]), broken(), **SETTINGS.get(kind, {}))


def test_ppo_names_it_before_it_trains():
    with pytest.raises(ValueError, match=r"(?s)LlamaForCausalLM cannot be saved.*temperature.*do_sample=True"):
        tiny.ppo(tiny.with_value_head(broken()))


@pytest.mark.parametrize(("name", "value", "more"), BROKEN)
def test_every_setting_that_saving_refuses_is_named(name, value, more, tmp_path):
    named = name if not more or name == "top_p" else next(iter(more))
    with pytest.raises(ValueError, match=rf"(?s)cannot be saved.*{named}"):
        make("sft", tmp_path, Dataset.from_dict(ROWS["sft"]), broken(name, value, more))


def test_adapters_are_saved_without_it(tmp_path):
    peft_config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make("sft", tmp_path, Dataset.from_dict(ROWS["sft"]), broken(), peft_config=peft_config)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_config.json").exists()


@pytest.mark.parametrize("eos", ["</s>", "."])
def test_what_is_refused_is_what_saving_refuses(eos: str, tmp_path: Path):
    """An unchanged published config can be saved; one in which training sets other special tokens cannot."""
    tiny.llama().save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "generation_config.json"
    file.write_text(file.read_text().replace("{", '{"do_sample": false, "temperature": 0.6,', 1))

    def trained() -> None:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
        tokenizer = tiny.tokenizer(eos_token=eos)
        trainer = make("sft", tmp_path / "run", Dataset.from_dict(ROWS["sft"]), model, processing_class=tokenizer)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))

    if eos == "</s>":
        trained()
    else:
        with pytest.raises(ValueError, match=r"cannot be saved"):
            trained()
