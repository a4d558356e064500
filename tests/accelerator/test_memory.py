"""What long answers need at the peak of device memory."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tests.accelerator.budgets import VOCABULARY, Meter, SecondStep, arguments, llama, measure_row, texts
from tests.test_every_trainer import length
from tools.bench.models import tokenizer

from trimtab_lm import GRPOConfig, GRPOTrainer

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore"),
]


def most_bytes(**settings: Any) -> float:
    """Returns the peak of GRPO's second step, of one prompt with eight completions of 192 tokens."""

    def row(folder: Path, meter: Meter) -> None:
        sizes = {"num_generations": 8, "max_completion_length": 192}
        args = GRPOConfig(**arguments(folder, 1) | sizes | settings)
        prompts = Dataset.from_dict({"prompt": texts(4, 16, 0)})
        options: dict[str, Any] = {"train_dataset": prompts, "processing_class": tokenizer(VOCABULARY)}
        GRPOTrainer(llama(), length, args, callbacks=[SecondStep(meter)], **options).train()

    return measure_row(row).figures["bytes"]


def test_long_answers_get_copies_of_their_prompt_and_no_large_mask():
    chosen, shared, apart = (most_bytes(share_prompts=shares) for shares in (None, True, False))
    assert chosen == apart
    assert chosen < 0.7 * shared


def test_a_group_in_parts_needs_less_memory():
    peaks = [most_bytes(group_parts=parts, gradient_accumulation_steps=parts) for parts in (1, 2, 4)]
    assert peaks[1] < 0.6 * peaks[0]
    assert peaks[2] < 0.35 * peaks[0]
