"""A run that passes several times over a stream resumes in any pass; a stream without rows is an error."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from tests.lm import tiny
from transformers import TrainerCallback

from trimtab_lm import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

WORDS = ["hello.", "abc.", "a longer text.", "x y z.", "no.", "more words.", "tiny.", "end.", "one more.", "ten."]
PAIRS = [{"prompt": word[0], "chosen": word[1:], "rejected": "z" + word} for word in WORDS]
IDS = [{"input_ids_chosen": [4 + i, 5, 6], "input_ids_rejected": [4 + i, 9, 9, 7]} for i in range(10)]


class Shuffled(torch.utils.data.IterableDataset[Any]):
    """A torch stream with a different order in every epoch."""

    def __init__(self, rows: list[Any]):
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        return (self.rows[i] for i in order.tolist())


def streamed(rows: list[Any]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows)).shuffle(seed=3, buffer_size=4)


def noisy() -> Any:
    return tiny.gpt2(resid_pdrop=0.3)


SFT, DPO, REWARD = (
    (SFTTrainer, SFTConfig, noisy),
    (DPOTrainer, DPOConfig, noisy),
    (RewardTrainer, RewardConfig, tiny.scorer),
)


def make(kind: Any, folder: Path, stream: Any, **settings: Any) -> Any:
    trainer, config, model = kind
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    sizes = {"per_device_train_batch_size": 2, "max_steps": 7, "learning_rate": 1e-2}
    options = {name: settings.pop(name) for name in ("callbacks", "eval_dataset") if name in settings}
    args = config(str(folder), **quiet | sizes | settings)
    return trainer(model(), args=args, train_dataset=stream, processing_class=tiny.tokenizer(), **options)


# By name: the trainer, its stream with ten rows, settings, and the steps after which a run resumes.
CASES: dict[str, tuple[Any, Callable[[], Any], dict[str, Any], tuple[int, ...]]] = {
    "sft": (SFT, lambda: streamed([{"text": word} for word in WORDS]), {}, (5, 6)),
    "sft accumulating": (
        SFT,
        lambda: streamed([{"text": word} for word in WORDS]),
        {"gradient_accumulation_steps": 2, "max_steps": 5},
        (3,),
    ),
    "sft packed": (
        SFT,
        lambda: streamed([{"text": word} for word in WORDS]),
        {"packing": True, "max_length": 20, "dataset_batch_size": 4, "per_device_train_batch_size": 1, "max_steps": 12},
        (11,),
    ),
    "dpo": (DPO, lambda: streamed(PAIRS), {}, (6,)),
    "reward": (REWARD, lambda: Shuffled(IDS), {"per_device_train_batch_size": 4}, (6,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stream_resumes_in_any_pass(name, tmp_path):
    kind, stream, settings, steps = CASES[name]
    saves = {"save_strategy": "steps", "save_steps": 1 if len(steps) > 1 else steps[0]}
    settings = settings | saves
    whole = make(kind, tmp_path / "whole", stream(), **settings)
    whole.train()
    for step in steps:
        resumed = make(kind, tmp_path / "again", stream(), **settings)
        torch.rand(5)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        logs = [[log for log in one.state.log_history if "loss" in log] for one in (whole, resumed)]
        assert logs[0] == logs[1], step
        for key, weight in whole.model.state_dict().items():
            assert torch.equal(weight, resumed.model.state_dict()[key]), (step, key)


def test_a_resumed_stream_may_begin_again_on_request(tmp_path):
    rows = [{"text": word} for word in WORDS]
    make(SFT, tmp_path, streamed(rows), save_strategy="steps", save_steps=6).train()
    again = make(SFT, tmp_path, streamed(rows), max_steps=8, ignore_data_skip=True, resume_with_changes=True)
    seen: list[Any] = []
    collate = again.data_collator
    again.data_collator = lambda rows: (seen.append([row["input_ids"] for row in rows]), collate(rows))[1]
    again.train(resume_from_checkpoint=True)
    first = list(make(SFT, tmp_path / "other", streamed(rows)).train_dataset)
    assert seen[0] == [row["input_ids"] for row in first[:2]]


class Ends(TrainerCallback):
    """Keeps the steps and epochs at which epochs end."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append((state.global_step, state.epoch))


def test_a_stream_that_begins_again_goes_on_counting_epochs(tmp_path):
    """A run resumes after a pass and two of the five batches of the next: two passes from there make three."""
    rows, callback = [{"text": word} for word in WORDS], Ends()
    make(SFT, tmp_path, streamed(rows), save_strategy="steps", save_steps=7).train()
    settings = {"max_steps": 17, "ignore_data_skip": True, "resume_with_changes": True}
    again = make(SFT, tmp_path, streamed(rows), callbacks=[callback], **settings)
    again.train(resume_from_checkpoint=True)
    assert callback.ends == [(12, 2), (17, 3)]


def test_each_pass_over_a_stream_is_an_epoch(tmp_path):
    """Three passes of five batches: what is due at an epoch's end happens then, and at the end of the run."""
    rows, callback = [{"text": word} for word in WORDS], Ends()
    options = {"eval_strategy": "epoch", "eval_dataset": streamed(rows[:2]), "callbacks": [callback]}
    sft = make(SFT, tmp_path, streamed(rows), save_strategy="epoch", max_steps=15, **options)
    sft.train()
    assert callback.ends == [(5, 1), (10, 2), (15, 3)]
    assert [log["step"] for log in sft.state.log_history if "eval_loss" in log] == [5, 10, 15]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]


def test_steps_go_on_over_the_end_of_a_pass(tmp_path):
    """Five batches a pass, two per step: 2 x 2 equals batches of 4 from a stream that holds two passes."""
    rows = [{"text": word} for word in WORDS]
    plain = IterableDataset.from_generator(lambda: iter(rows))
    twice = IterableDataset.from_generator(lambda: iter(rows * 2))
    accumulated = make((SFTTrainer, SFTConfig, tiny.llama), tmp_path, plain, gradient_accumulation_steps=2, max_steps=5)
    whole = make((SFTTrainer, SFTConfig, tiny.llama), tmp_path, twice, per_device_train_batch_size=4, max_steps=5)
    for trainer in (accumulated, whole):
        trainer.train()
    weights = whole.model.state_dict()
    for key, weight in accumulated.model.state_dict().items():
        torch.testing.assert_close(weight, weights[key], atol=1e-5, rtol=1e-4)


class OneTime(torch.utils.data.IterableDataset[Any]):
    """A stream that is empty after one pass."""

    def __init__(self, rows: list[Any]):
        self.left = iter(rows)

    def __iter__(self) -> Iterator[Any]:
        return self.left


LONG = [{"prompt": "a", "chosen": "b" * 40, "rejected": "c" * 40}] * 4
EMPTY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft filtered": (SFT, lambda: streamed([{"text": word} for word in WORDS]).filter(lambda row: False), {}),
    "sft emptied": (
        SFT,
        lambda: streamed([{"prompt": "a" * 40, "completion": "b"}] * 4),
        {"max_length": 8},
    ),
    "dpo filtered": (DPO, lambda: streamed(PAIRS).filter(lambda row: False), {}),
    "reward dropped": (REWARD, lambda: streamed(LONG), {"max_length": 8}),
    "reward of torch": (REWARD, lambda: Shuffled([]), {}),
}


@pytest.mark.filterwarnings("ignore:max_length", "ignore:A pair of the stream")
@pytest.mark.parametrize("name", EMPTY)
def test_a_stream_of_which_no_row_is_left_is_an_error(name, tmp_path):
    kind, stream, settings = EMPTY[name]
    with pytest.raises(ValueError, match=r"no batch|The dataset is empty"):
        make(kind, tmp_path, stream(), **settings).train()


def test_a_stream_that_can_be_read_once_is_an_error_when_it_is_used_up(tmp_path):
    with pytest.raises(ValueError, match="Pass 2 over the training data gave no batch"):
        make(REWARD, tmp_path, OneTime(IDS)).train()


@pytest.mark.filterwarnings("ignore:max_length")
def test_an_evaluation_of_no_row_is_an_error(tmp_path):
    nothing = streamed([{"prompt": "a" * 40, "completion": "b"}])
    sft = make(SFT, tmp_path, None, eval_dataset=nothing, max_length=8)
    with pytest.raises(ValueError, match="no row to evaluate"):
        sft.evaluate()
