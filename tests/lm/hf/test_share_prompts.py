"""`share_prompts`: whether the answers to a prompt share a copy of it."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tests.lm import tiny
from tests.test_every_trainer import PREFERENCES, WORDS, length

from trimtab_lm import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


def lays_out(name: str, attention: str, settings: dict[str, Any]) -> tuple[str, int | None]:
    """Returns the layout of a trainer's batches, and the hidden size by which it splits groups."""
    settings |= {"use_cpu": True, "report_to": "none", "disable_dropout": True}
    data: dict[str, Any] = {"train_dataset": PREFERENCES, "processing_class": tiny.tokenizer()}
    model: Any = tiny.scorer() if name == "reward" else tiny.llama()
    model.set_attn_implementation(attention)
    if name == "grpo":
        data["train_dataset"] = Dataset.from_dict({"prompt": WORDS})
        lay_out = GRPOTrainer(model, length, GRPOConfig(**settings), **data).lay_out.keywords
        return lay_out["layout"], lay_out["hidden_size"]
    if name == "dpo":
        collator = DPOTrainer(model, args=DPOConfig(**settings), **data).data_collator
    else:
        collator = RewardTrainer(model, RewardConfig(**settings), **data).data_collator
    return collator.layout, collator.hidden_size


@pytest.mark.parametrize("name", ["grpo", "dpo", "reward"])
def test_a_prompt_is_shared_by_lengths_always_or_never(name: str, tmp_path: Path):
    settings = {"output_dir": str(tmp_path)}
    size = tiny.llama().config.hidden_size
    assert lays_out(name, "eager", settings) == ("tree", size)
    assert lays_out(name, "eager", settings | {"share_prompts": True}) == ("tree", None)
    assert lays_out(name, "eager", settings | {"share_prompts": False})[0] == "packed"
    assert lays_out(name, "sdpa", settings)[0] == "row"
    assert lays_out(name, "sdpa", settings | {"share_prompts": False})[0] == "packed"
