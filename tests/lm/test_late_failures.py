"""Datasets and rows that no trainer can use: one clear line from each trainer, before any work."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from tests.lm import tiny

from trimtab_lm import (
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

COLUMNS = {
    "sft": ["text"], "reward": ["prompt", "chosen", "rejected"], "dpo": ["prompt", "chosen", "rejected"],
    "grpo": ["prompt"], "iterative_sft": ["prompt", "completion"],
}  # fmt: skip
KINDS = {
    "sft": (SFTTrainer, SFTConfig, tiny.gpt2),
    "reward": (RewardTrainer, RewardConfig, tiny.scorer),
    "dpo": (DPOTrainer, DPOConfig, tiny.gpt2),
    "grpo": (GRPOTrainer, GRPOConfig, tiny.gpt2),
    "iterative_sft": (IterativeSFTTrainer, IterativeSFTConfig, tiny.gpt2),
}


def trainer(kind: str, folder: Path, dataset: Any, model: Any = None, **settings: Any) -> Any:
    make, config, build = KINDS[kind]
    args = config(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", max_steps=1, disable_tqdm=True,
        per_device_train_batch_size=2, **settings,
    )  # fmt: skip
    rewards = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if kind == "grpo" else {}
    model = build() if model is None else model
    return make(model, args=args, train_dataset=dataset, processing_class=tiny.tokenizer(), **rewards)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_dataset_is_refused_in_one_line(kind, tmp_path):
    no_rows = {name: [] for name in COLUMNS[kind]}
    for dataset in (Dataset.from_list([]), Dataset.from_dict(no_rows)):
        with pytest.raises(ValueError, match="The dataset is empty"):
            trainer(kind, tmp_path, dataset)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grpo"])
def test_an_empty_stream_is_refused_in_one_line(kind, tmp_path):
    with pytest.raises(ValueError, match="The dataset is empty"):
        trainer(kind, tmp_path, IterableDataset.from_generator(lambda: iter([])))
