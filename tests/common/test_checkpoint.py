import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from trimtab_common import checkpoint as saving
from trimtab_common.checkpoint import load_checkpoint, save_checkpoint
from trimtab_common.sealing import MANIFEST, CheckpointError, latest_checkpoint, seal


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).square().mean() * (1 + random.random() + np.random.rand())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def new_run():
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


def test_four_steps_equal_two_saved_and_two_resumed(tmp_path, accelerator):
    torch.manual_seed(0)
    model, optimizer, scheduler = new_run()
    train(model, optimizer, scheduler, 2)
    state = {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "tracker": "abc",
        "epoch": 1.5,
    }
    path = save_checkpoint(
        tmp_path,
        2,
        accelerator=accelerator,
        weights=model.state_dict(),
        state=state,
        rank_state={"buffer": [1, 2]},
    )
    train(model, optimizer, scheduler, 2)

    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    resumed, optimizer, scheduler = new_run()
    checkpoint = load_checkpoint(path, accelerator=accelerator)
    assert (checkpoint.step, checkpoint.rank_state) == (2, {"buffer": [1, 2]})
    assert (checkpoint.state["tracker"], checkpoint.state["epoch"]) == ("abc", 1.5)
    resumed.load_state_dict(checkpoint.weights)
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    scheduler.load_state_dict(checkpoint.state["scheduler"])
    checkpoint.restore_rng()
    train(resumed, optimizer, scheduler, 2)
    for before, after in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(before, after)


def test_tied_and_odd_layouts_come_back(tmp_path, accelerator):
    shared, base = torch.randn(64, 64), torch.arange(12.0)
    weights = {
        "embed": shared,
        "head": shared,
        "transposed": shared.T,
        "strided": torch.randn(3, 2).T,
        "first_half": base[:6],
        "second_half": base[6:],
        "all": base,
        "square": base.view(3, 4),
        "none": torch.empty(0),
        "nothing": torch.empty(0),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
    }
    path = save_checkpoint(tmp_path, 0, accelerator=accelerator, weights=weights, state={})
    loaded = load_checkpoint(path, accelerator=accelerator).weights
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight), name
        assert loaded[name].dtype == weight.dtype
    assert loaded["head"] is loaded["embed"]
    assert (path / "weights.safetensors").stat().st_size < 2.5 * shared.nbytes


def save(root, step, accelerator, **options) -> Path:
    weights = {"w": torch.full((300,), float(step))}
    return save_checkpoint(root, step, accelerator=accelerator, weights=weights, state={"n": step}, **options)


def test_a_checkpoint_of_a_trainer_on_transformers_is_named_as_one(tmp_path, accelerator):
    (folder := tmp_path / "checkpoint-1").mkdir()
    seal(folder, {"step": 1, "resumable": True})
    with pytest.raises(CheckpointError, match=r"is a checkpoint of a trainer on transformers\.Trainer"):
        load_checkpoint(folder, accelerator=accelerator)


def test_rotation_keeps_the_newest_and_never_the_last_good_one_goes(tmp_path, accelerator):
    for step in (1, 2, 10):
        save(tmp_path, step, accelerator, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-10"}
    os.truncate(tmp_path / "checkpoint-10" / "weights.safetensors", 10)
    save(tmp_path, 11, accelerator, keep=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "checkpoint-2",
        "checkpoint-10",
        "checkpoint-11",
    }  # the broken one does not count towards `keep`
    save(tmp_path, 3, accelerator, keep=1)
    assert load_checkpoint(tmp_path / "checkpoint-3", accelerator=accelerator).state == {"n": 3}
    with pytest.raises(ValueError, match="keep=0"):
        save(tmp_path, 4, accelerator, keep=0)


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EDQUOT])
def test_a_failed_save_leaves_the_old_one_and_the_next_save_cleans_up(cause, tmp_path, accelerator, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(cause, os.strerror(cause))

    old = save(tmp_path, 1, accelerator)
    for step in (1, 2):
        text = rf"checkpoint-{step} is not saved: .*{os.strerror(cause)}.*complete checkpoint is"
        with monkeypatch.context() as patch:
            patch.setattr(saving, "save_file", full_disk)
            with pytest.raises(CheckpointError, match=text):
                save(tmp_path, step, accelerator)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert latest_checkpoint(tmp_path) == old
    assert load_checkpoint(old, accelerator=accelerator).state == {"n": 1}
    save(tmp_path, 1, accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path, accelerator, monkeypatch):
    def rename_until_killed(source, target, rename=os.rename):
        if source.name.endswith(".partial"):
            raise KeyboardInterrupt
        rename(source, target)

    save(tmp_path, 4, accelerator)
    save(tmp_path, 5, accelerator)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_until_killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 5, accelerator)
    assert not (tmp_path / "checkpoint-5").exists()
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert load_checkpoint(latest, accelerator=accelerator).state == {"n": 5}
    save(tmp_path, 6, accelerator)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-5", "checkpoint-6"}


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_byte(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "state.pt", "rank-00000.pt", "sub/extra.txt"])
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
def test_damage_names_the_file_and_the_cure(tmp_path, accelerator, monkeypatch, name, damage):
    def save_with_a_folder(weights, file, **options):
        save_file(weights, file, **options)
        (file.parent / "sub").mkdir()
        (file.parent / "sub" / "extra.txt").write_text("hello")

    save(tmp_path, 1, accelerator)
    monkeypatch.setattr(saving, "save_file", save_with_a_folder)
    path = save(tmp_path, 2, accelerator)
    damage(path / name)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, accelerator=accelerator)
    assert str(path / name) in str(caught.value)
    assert f"resume from {tmp_path / 'checkpoint-1'}" in str(caught.value)


def test_other_processes_go_on_with_the_state_of_all_and_leave_random_numbers_alone(tmp_path, accelerator):
    path = save_checkpoint(tmp_path, 1, accelerator=accelerator, weights={"w": torch.ones(2)}, state={"epoch": 3})
    eight = SimpleNamespace(num_processes=8, process_index=7)
    checkpoint = load_checkpoint(path, accelerator=eight, accepts_changes=True)
    before = torch.get_rng_state()
    checkpoint.restore_rng()
    assert torch.equal(torch.get_rng_state(), before)
    assert (checkpoint.state, checkpoint.weights["w"].tolist()) == ({"epoch": 3}, [1.0, 1.0])
    state = {"buffer": [1]}
    path = save_checkpoint(tmp_path, 2, accelerator=accelerator, weights={}, state={}, rank_state=state)
    with pytest.raises(CheckpointError, match=r"buffers cannot be divided anew.*start a new run"):
        load_checkpoint(path, accelerator=eight, accepts_changes=True)


def test_other_world_size_other_format_and_no_checkpoint_at_all(tmp_path, accelerator):
    path = save(tmp_path, 1, accelerator)
    eight = SimpleNamespace(num_processes=8, process_index=0)
    with pytest.raises(CheckpointError, match=r"1 process.*this run has 8.*--num_processes 1"):
        load_checkpoint(path, accelerator=eight)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 77}))
    with pytest.raises(CheckpointError, match="format 77"):
        load_checkpoint(path, accelerator=accelerator)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere", accelerator=accelerator)
    with pytest.raises(CheckpointError, match=r"not a checkpoint of trimtab: give the folder named [^.]*\.$"):
        load_checkpoint(tmp_path, accelerator=accelerator)
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\udcff", "[]", "null"])
def test_an_invalid_manifest_is_refused_and_passed_over(tmp_path, accelerator, text):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, accelerator=accelerator, weights={"w": torch.zeros(2)}, state={})
    newest = tmp_path / "checkpoint-2"
    (newest / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=re.escape(str(newest))):
        load_checkpoint(newest, accelerator=accelerator)
    with pytest.warns(UserWarning, match="Passing over"):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


@pytest.mark.parametrize(("value", "kind"), [(np.float64(1.5), "numpy.float64"), (lambda: 0, "builtins.function")])
def test_state_that_could_not_be_read_back_is_refused_when_saved(tmp_path, accelerator, value, kind):
    with pytest.raises(CheckpointError, match=rf"\['kl'\]\[1\] is {kind}"):
        save_checkpoint(tmp_path, 1, accelerator=accelerator, weights={}, state={"kl": [0.5, value]})
    assert latest_checkpoint(tmp_path) is None


SAVE_FOREVER = """
import itertools, sys, torch
from accelerate import Accelerator
from trimtab_common.checkpoint import save_checkpoint
accelerator = Accelerator(cpu=True)
for count in itertools.count():  # steps repeat, so that kills fall into replacements and rotations too
    value = torch.full((20000,), float(count))
    save_checkpoint(sys.argv[1], count % 3, accelerator=accelerator, weights={"w": value}, state={"w": value.clone()},
                    keep=2)
    print(count, flush=True)
"""


@pytest.mark.slow
def test_sigkill_in_the_middle_of_saving_always_leaves_one_that_loads(tmp_path, accelerator):
    for delay in (0.0, 0.011, 0.023, 0.037):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        checkpoint = load_checkpoint(newest, accelerator=accelerator)
        assert torch.equal(checkpoint.weights["w"], checkpoint.state["w"])


TWO_PROCESSES = """
import sys, torch
from accelerate import Accelerator
from trimtab_common.checkpoint import load_checkpoint, save_checkpoint
from trimtab_common.sealing import MANIFEST, CheckpointError, latest_checkpoint
from trimtab_common.seeding import set_seed
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
assert accelerator.num_processes == 2
set_seed(100 + rank)
weights = {"w": torch.ones(3)} if rank == 0 else {}
for step in (1, 2):
    save_checkpoint(sys.argv[1], step, accelerator=accelerator, weights=weights, state={"a": 1},
                    rank_state={"rank": rank}, keep=1)
expected = torch.rand(3)
checkpoint = load_checkpoint(latest_checkpoint(sys.argv[1]), accelerator=accelerator)
checkpoint.restore_rng()
assert torch.equal(torch.rand(3), expected)
assert checkpoint.rank_state == {"rank": rank} and checkpoint.step == 2
assert torch.equal(checkpoint.weights["w"], torch.ones(3))
accelerator.end_training()
"""


@pytest.mark.distributed
def test_each_process_gets_its_own_part_back(tmp_path, accelerator):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    with pytest.raises(CheckpointError, match="written by 2 process"):
        load_checkpoint(tmp_path / "run" / "checkpoint-2", accelerator=accelerator)
