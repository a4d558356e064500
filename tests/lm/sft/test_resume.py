"""A fine-tuning that stops and resumes equals an uninterrupted one to the bit: dropout, shuffling, mid-epoch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tests.lm import tiny
from tests.marks import slow_but

from trimtab_common.sealing import CheckpointError
from trimtab_lm.sft import SFTConfig, SFTTrainer

TEXTS = [
    "hello world.",
    "abc.",
    "a longer text than the others.",
    "x y z.",
    "no.",
    "some more words.",
    "tiny.",
    "end.",
    "one more.",
    "and the last of ten.",
]
PAIRS = {"prompt": [text[:2] for text in TEXTS], "completion": [text[2:] for text in TEXTS]}


def stream() -> IterableDataset:
    """Returns the texts as a stream, in a different order in every pass."""
    rows = IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))
    return rows.shuffle(seed=3, buffer_size=4)


def model(kind: str) -> Any:
    if kind == "llama":
        return tiny.llama(attention_dropout=0.3)
    return tiny.t5(initializer_factor=1.0, dropout_rate=0.3) if kind == "t5" else tiny.gpt2(resid_pdrop=0.3)


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.3)


# By name: the model, arguments of the trainer, settings of its config. Five micro-batches per epoch make three steps,
# the last with one micro-batch; best-fit packing makes four of them, and two steps.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "padding-free": ("gpt2", {}, {}),
    "padding-free llama": ("llama", {}, {}),
    "packed": ("gpt2", {}, {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}),
    "constant length": (
        "gpt2",
        {},
        {"packing": True, "packing_strategy": "constant_length", "max_length": 12, "num_of_sequences": 2},
    ),
    "encoder-decoder": ("t5", {"train_dataset": Dataset.from_dict(PAIRS)}, {}),
    "adapters": ("gpt2", {"peft_config": lora()}, {"neftune_noise_alpha": 5.0}),
    "checkpointed": ("gpt2", {"peft_config": lora()}, {"gradient_checkpointing": True}),
}


def trainer(name: str, folder: Path, kind: type[SFTTrainer] = SFTTrainer, **more: Any) -> SFTTrainer:
    """Creates only the model anew: what one run leaves in the data would show in the other."""
    architecture, arguments, settings = CASES.get(name, ("gpt2", {}, {}))
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    sizes = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    args = SFTConfig(str(folder), **quiet | sizes | settings | more)
    data = {"train_dataset": stream() if name == "stream" else Dataset.from_dict({"text": TEXTS})}
    torch.manual_seed(0)  # for the adapters
    return kind(model(architecture), args, processing_class=tiny.tokenizer(), **data | arguments)


def losses(sft: SFTTrainer) -> list[dict[str, Any]]:
    return [log for log in sft.state.log_history if "loss" in log]


def rng_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), [*map(str, np.random.get_state())]


def assert_resumes(name: str, folder: Path, steps: tuple[int, ...], **more: Any) -> None:
    whole = trainer(name, folder / "whole", **more)
    whole.train()
    for step in steps:
        resumed = trainer(name, folder / "again", **more)
        torch.rand(5), random.random(), np.random.rand()  # other code draws random numbers
        resumed.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
        assert losses(resumed) == losses(whole)
        assert len(losses(whole)) == resumed.state.global_step == whole.args.max_steps
        for key, weight in tiny.weights(whole.model).items():
            assert torch.equal(weight, resumed.model.state_dict()[key]), (step, key)


@pytest.mark.parametrize("name", slow_but(CASES, "packed"))
def test_resuming_changes_no_bit(name: str, tmp_path):
    """In mid-epoch after two steps and at an epoch's end after three; if packed, the reverse."""
    assert_resumes(name, tmp_path, (2, 3))


def test_a_stream_resumes_where_it_stopped(tmp_path):
    assert_resumes("stream", tmp_path, (1, 2), max_steps=3)


def test_an_endless_stream_resumes_where_it_stopped(tmp_path):
    settings = {"packing": True, "max_length": 12, "num_of_sequences": 2, "chars_per_token": 1.0, "infinite": True}
    assert_resumes("", tmp_path, (2, 5), **settings)


@pytest.mark.parametrize("strategy", ["best_fit", "constant_length"])
def test_packed_rows_of_other_texts_are_refused(strategy: str, tmp_path, monkeypatch):
    settings = {"packing": True, "packing_strategy": strategy, "max_length": 40, "max_steps": 1}
    settings |= {"infinite": True} if strategy == "constant_length" else {}
    trainer("", tmp_path, **settings).train()
    monkeypatch.setitem(CASES, "other", ("gpt2", {"train_dataset": Dataset.from_dict({"text": TEXTS[::-1]})}, {}))
    with pytest.raises(CheckpointError, match="training data was"):
        trainer("other", tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["padding-free", "packed", "encoder-decoder", "stream"])
def test_fetching_batches_draws_no_random_number(name: str, tmp_path):
    """transformers restores random states after the first fetch in mid-epoch: numbers drawn in the fetch would repeat.

    A DataLoader's own draw at the start of an epoch precedes the states that a mid-epoch checkpoint holds.
    """
    moved: list[bool] = []

    class Watched(SFTTrainer):
        def get_batch_samples(self, *args: Any) -> Any:
            before = rng_states()
            samples = super().get_batch_samples(*args)
            moved.append(rng_states() != before)
            return samples

    sft = trainer(name, tmp_path, kind=Watched, max_steps=2, save_strategy="no")
    sft.train()
    assert moved[1:] == [False]
    collate = sft.data_collator
    sft.data_collator = lambda rows: (torch.rand(1), collate(rows))[1]  # a collator that draws
    sft.train()
    assert moved[-1]


@pytest.mark.slow
def test_dropout_and_the_order_of_the_rows_matter(tmp_path):
    """The tests above rely on this."""

    def final(**seeds: int) -> torch.Tensor:
        sft = trainer("padding-free", tmp_path, max_steps=3, save_strategy="no", **seeds)
        sft.train()
        return torch.cat([weight.flatten() for weight in tiny.weights(sft.model).values()])

    base = final(seed=1, data_seed=1)
    assert torch.equal(base, final(seed=1, data_seed=1))
    assert not torch.equal(base, final(seed=1, data_seed=2))
    assert not torch.equal(base, final(seed=2, data_seed=1))
