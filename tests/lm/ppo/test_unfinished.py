"""A PPO step that a signal cuts short between two updates, and that a resumed run finishes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.chaos import works
from tools.chaos.trees import tree_difference

from trimtab_common.sealing import checkpoints
from trimtab_common.seeding import set_seed
from trimtab_common.stats import Correlation, Deviation, Mean, Surprise, packed, unpacked

UPDATES = 8
"""Of a step of `works.ppo_trainer`: two epochs of four minibatches."""


class Watched:
    """A run of two PPO steps in a folder, whose updates are counted; a signal comes in one of them."""

    def __init__(self, folder: Path, *, signal_at: int = 0, **more: Any) -> None:
        self.trainer = works.ppo_trainer(folder, "none", steps=2, save_steps=None, **more)
        self.updates, self.logs = 0, list[dict[str, Any]]()
        train_minibatch = self.trainer.train_minibatch

        def counted(**columns: Any) -> Any:
            self.updates += 1
            if self.updates == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_minibatch(**columns)

        object.__setattr__(self.trainer, "train_minibatch", counted)

    def train(self, **options: Any) -> None:
        self.trainer.train(
            [score_of_works, nothing],
            generation_kwargs={"max_new_tokens": 6, "do_sample": True, "eos_token_id": [3, 4]},
            on_step=lambda step, logs, batch: self.logs.append(logs),
            **options,
        )

    def state(self) -> dict[str, Any]:
        kept = ("actor_critic", "optimizer", "lr_scheduler", "kl_ctl", "running", "sampler", "batches")
        return {name: getattr(self.trainer, name).state_dict() for name in kept}


def score_of_works(queries: list[str], responses: list[str]) -> list[float]:
    return works.scored(responses)


def nothing(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def without_times(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "time" not in name} for row in logs]


@pytest.mark.parametrize(("at", "settings"), [(3, {}), (11, {}), (3, {"gradient_accumulation_steps": 2})])
def test_a_step_is_cut_between_updates_and_finished_by_the_resumed_run(
    at: int, settings: dict[str, Any], tmp_path: Path
):
    set_seed(1)
    straight = Watched(tmp_path / "straight", **settings)
    straight.train()
    set_seed(1)
    cut = Watched(tmp_path / "cut", signal_at=at, **settings)
    with pytest.raises(SystemExit) as end:
        cut.train()
    assert end.value.code == 143
    assert cut.updates == (at if not settings else 4)  # the two minibatches of an optimizer step belong together
    step = 1 + at // UPDATES
    assert list(checkpoints(tmp_path / "cut" / "checkpoints")) == [step]
    set_seed(2)
    resumed = Watched(tmp_path / "cut", **settings)
    resumed.train(resume_from="latest")
    assert cut.updates + resumed.updates == straight.updates == 2 * UPDATES
    assert tree_difference(resumed.state(), straight.state()) == ""
    assert tree_difference(without_times(cut.logs + resumed.logs), without_times(straight.logs)) == ""


def test_a_caller_who_loads_the_checkpoint_is_after_the_step(tmp_path: Path):
    cut = Watched(tmp_path, signal_at=3)
    with pytest.raises(SystemExit):
        cut.train()
    resumed = Watched(tmp_path)
    resumed.trainer.load_checkpoint(tmp_path / "checkpoints" / "checkpoint-1")
    assert (resumed.trainer.steps_done, resumed.updates) == (1, UPDATES - 3)
    assert resumed.trainer.unfinished.batch is None
    assert resumed.trainer.save_checkpoint(tmp_path / "other").name == "checkpoint-1"


def test_packed_statistics_are_trees_that_unpack_to_the_same_bits():
    x, y = torch.rand(5), torch.rand(5)
    stats = {
        "mean": Mean.of(x),
        "of": {"all": [Surprise.of_tokens(-x, y), Deviation.of(x), Correlation.of(x, y)]},
        "n": 3,
    }
    tree = packed(stats)
    assert not any(isinstance(one, Mean) for one in tree.values())
    again = unpacked(tree)
    assert again == stats
    assert type(again["of"]["all"][1]) is Deviation
    assert again["mean"].total.dtype == torch.float32
