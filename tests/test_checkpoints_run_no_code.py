"""A checkpoint that someone has changed and sealed again runs no code when a run resumes from it."""

import enum
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tools.chaos import works
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from trimtab_common.checkpoint_shards import refuse_code
from trimtab_common.sealing import MANIFEST, CheckpointError, main

TRAINERS = ("ppo", "ddpo", "sft", "dpo", "reward", "grpo", "iterative_sft")
SCHEDULE = {"scheduler.pt", "custom_checkpoint_0.pkl"}
OTHERS = (
    *("custom_checkpoint_0.pkl", "pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.bin"),
    *("scheduler.bin", "scaler.pt", "random_states_0.pkl", "rng_state.pth", "sampler.bin", "rollout_0.pt"),
    *("optimizer_0/.metadata", "shards/.metadata"),
)
"""Files that transformers, accelerate, PEFT and torch would load in other circumstances."""


class Code:
    """Creates a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


class OfAClass:
    """Is unpickled as an attribute of a class."""

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (BytesStorageMetadata, "__init__")


def planted(trace: Path, name: str) -> bytes:
    """Returns a torch.save file, or a pickle, that contains code."""
    stream = io.BytesIO()
    if name.endswith((".pt", ".pth", ".bin", ".pkl")):
        torch.save({"state": Code(trace)}, stream)
        return stream.getvalue()
    return pickle.dumps(Code(trace))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "files"),
    [("iterative_sft", SCHEDULE), *(pytest.param(name, None, marks=pytest.mark.slow) for name in TRAINERS)],
)
def test_no_file_of_a_checkpoint_runs_code(name: str, files: set[str] | None, tmp_path: Path):
    """files: the checkpoint's files to replace; None for all of them and OTHERS."""
    works.WORKS[name](tmp_path, "none")
    root, trace = tmp_path / "checkpoints", tmp_path / "executed"
    checkpoint = max(root.iterdir(), key=lambda folder: folder.name)
    shutil.copytree(checkpoint, tmp_path / "honest")
    present = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    for file in files or {*present, *OTHERS} - {MANIFEST, "trainer_state.json"}:
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "honest", checkpoint)
        (checkpoint / file).parent.mkdir(exist_ok=True)
        (checkpoint / file).write_bytes(planted(trace, file))
        seal_again(checkpoint)
        try:
            works.WORKS[name](tmp_path, "none")
        except Exception as error:
            print(f"{file}: {type(error).__name__}: {str(error)[:200]}")
        assert not trace.exists(), file


def seal_again(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    main([str(checkpoint)])


@pytest.mark.filterwarnings("ignore")
def test_what_torch_unpickles_of_shared_weights_is_data(tmp_path: Path):
    trace, weights = (
        tmp_path / "executed",
        {"w": torch.ones(2, dtype=torch.bfloat16), "lr": 0.1, "names": ["a", (1, 2)]},
    )
    dcp.save(weights, checkpoint_id=tmp_path / "honest" / "shards")
    refuse_code(tmp_path / "honest")
    for name, more in {"an entry": {"w": Code(trace)}, "a pickle": {}, "a class": {}}.items():
        dcp.save(weights | more, checkpoint_id=tmp_path / name / "shards")
        if not more:
            code = Code(trace) if name == "a pickle" else dcp.FileSystemReader(tmp_path)
            (tmp_path / name / "shards" / ".metadata").write_bytes(pickle.dumps(code))
        with pytest.raises(CheckpointError, match="shards: to read it would run code"):
            refuse_code(tmp_path / name)
        assert not trace.exists(), name
    dcp.load(weights, checkpoint_id=tmp_path / "an entry" / "shards")
    assert trace.exists()


@pytest.mark.filterwarnings("ignore")
def test_a_member_of_an_enum_may_be_pickled_by_getattr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python 3.11.2 does so."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "shards")
    assert b"getattr" in (tmp_path / "shards" / ".metadata").read_bytes()
    refuse_code(tmp_path)
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(OfAClass()))
    with pytest.raises(CheckpointError, match=r"to read it would run code.*it reads '__init__' of"):
        refuse_code(tmp_path)
