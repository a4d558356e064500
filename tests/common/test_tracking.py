import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image

from trimtab_common import tracking
from trimtab_common.accelerate_trackers import trackers_of
from trimtab_common.tracking import (
    MAX_CELL_CHARACTERS,
    MAX_TABLE_ROWS,
    check_tracker_name,
    progress,
    start_tracking,
)
from trimtab_common.weights_and_biases import STEP_AXIS, histogram

pytestmark = pytest.mark.usefixtures("offline_wandb")


def read_wandb(folder: Path):
    """Returns the records of the offline run under `folder`."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return read_wandb_file(file)


def read_wandb_file(file: Path):
    """Returns the records of a W&B file: chunks in blocks of 32 KiB, as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # the service writes everything before it ends
    data, position, parts, records = file.read_bytes(), 7, [], defaultdict(list)
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(b"".join(parts))
            records[record.WhichOneof("record_type")].append(getattr(record, record.WhichOneof("record_type")))
            parts = []
    return records


def history(records) -> dict[str, dict[int, Any]]:
    """Returns what was logged: {name: {train/global_step: value}}."""
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for row in records["history"]:
        values: dict[str, Any] = {}
        for item in row.item:
            name, *inner = item.nested_key
            value = json.loads(item.value_json)
            values[name] = {**values.get(name, {}), inner[0]: value} if inner else value
        assert values["_step"] >= values[STEP_AXIS]
        for name, value in values.items():
            by_name[name][values[STEP_AXIS]] = value
    return by_name


def test_offline_run_holds_what_was_logged(tmp_path, capfd):
    with start_tracking(
        "wandb",
        project="p",
        config={"lr": 0.1},
        name="n",
        group="g",
        job_type="eval",
        tags=["t"],
        folder=tmp_path,
    ) as tracker:
        for step in range(2):
            stats = {"loss": torch.tensor(step + 0.5, dtype=torch.bfloat16), "nan": float("nan")}
            tracker.log(stats | {"dist": [1.0, 2.0, float("nan")], "eval/loss": np.float32(2)}, step)
            rows = [["x" * 9999, 1, True], [7, 2.5, None]] + [["a", 0, False]] * 99
            tracker.table("samples", ["text", "score", "good"], rows, step)
        tracker.images("pictures", [torch.ones(3, 4, 6), Image.new("L", (6, 4))], ["white", "black"], 1)
        tracker.describe({"program": "train.py"})
        tracker.finish({"best": 3})
    printed = capfd.readouterr()
    (run_folder,) = tmp_path.glob("wandb/offline-run-*")
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert f"wandb sync {run_folder}" in printed.err

    records = read_wandb(tmp_path)
    (run,) = records["run"][:1]
    assert (run.run_id, run.project, run.display_name, run.run_group) == (tracker.run_id, "p", "n", "g")
    assert (run.job_type, list(run.tags)) == ("eval", ["t"])
    assert {item.key: item.value_json for item in run.config.update}["lr"] == "0.1"
    described = {item.key: item.value_json for config in records["config"] for item in config.update}
    assert described["program"] == '"train.py"'
    logged = history(records)
    assert logged["loss"] == {0: 0.5, 1: 1.5}
    assert np.isnan(logged["nan"][1])
    assert logged["eval/loss"] == {0: 2, 1: 2}
    assert sum(logged["dist"][0]["values"]) == 2
    assert logged["pictures"][1]["captions"] == ["white", "black"]
    assert (logged["pictures"][1]["width"], logged["pictures"][1]["height"]) == (6, 4)
    assert {metric.name or metric.glob_name: metric.step_metric for metric in records["metric"]} == {
        "train/global_step": "",
        "*": "train/global_step",
    }
    summary = {item.key: item.value_json for row in records["summary"] for item in row.update}
    assert summary["best"] == "3.0"

    tables = [json.loads((run_folder / "files" / logged["samples"][step]["path"]).read_text()) for step in range(2)]
    assert [table["columns"] for table in tables] == [["step", "text", "score", "good"]] * 2
    assert [len(table["data"]) for table in tables] == [MAX_TABLE_ROWS] * 2  # only the step's own rows
    step, text, score, good = tables[1]["data"][0]
    assert (step, len(text), score, good) == (1, MAX_CELL_CHARACTERS, 1.0, True)
    assert tables[1]["data"][1] == [1, "7", 2.5, None]


def test_a_missing_number_in_the_first_row_of_a_later_table_is_empty(tmp_path):
    with start_tracking("wandb", project="p", config={}, folder=tmp_path) as tracker:
        for step, rows in enumerate([[[1.0, True]], [[None, None], [2.0, False]], [[None, None]]]):
            tracker.table("samples", ["score", "good"], rows, step)
    (files,) = tmp_path.glob("wandb/offline-run-*/files")
    logged = history(read_wandb(tmp_path))["samples"]
    data = [json.loads((files / logged[step]["path"]).read_text())["data"] for step in range(3)]
    assert data == [[[0, 1.0, True]], [[1, None, None], [1, 2.0, False]], [[2, None, None]]]


@pytest.mark.parametrize(
    "values", [[0.1 + 0.2, 0.3], [1e17, 1e17], [0.0, 5e-324], [-1.7e308, 1.7e308], [0.0, 1e-9, 1.0], [2.0]]
)
def test_a_histogram_takes_any_finite_values(values):
    counts, edges = histogram(np.array(values))
    assert counts.sum() == len(values)
    assert len(edges) == 65
    assert np.all(np.diff(edges) > 0)


def test_a_late_step_takes_no_more_bytes_than_an_early_one(tmp_path):
    """Each history names only the tables of its own step."""
    with start_tracking("wandb", project="p", config={}, folder=tmp_path) as tracker:
        for step in range(60):
            tracker.log({"loss": 0.5}, step)
            tracker.table("samples", ["text", "score"], [["x" * 200, 1.0]] * 8, step)
    history_of = [sum(len(item.value_json) for item in record.item) for record in read_wandb(tmp_path)["history"]]
    assert len(history_of) == 60
    assert max(history_of) < 1.05 * history_of[1]


OFFLINE = """
import socket, sys
def lookup(host, *rest, **more):
    print("asked", host, flush=True)
    raise OSError("no network")
socket.getaddrinfo = lookup
from trimtab_common.tracking import start_tracking
with start_tracking("wandb", project="p", config={}, folder=sys.argv[1]) as tracker:
    tracker.log({"loss": 1.0}, 0)
"""


def test_a_run_without_a_key_looks_up_no_host(tmp_path):
    unset = {"WANDB_ERROR_REPORTING", "WANDB_MODE", "WANDB_API_KEY"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "is offline (no API key)" in done.stderr


def test_second_session_goes_on_under_the_same_id(tmp_path):
    with start_tracking("wandb", project="p", config={}, folder=tmp_path / "1") as first:
        first.log({"loss": 1.0}, 4)
    with start_tracking("wandb", project="p", config={}, folder=tmp_path / "2", run_id=first.run_id) as second:
        second.log({"loss": 0.5}, 5)
    assert second.run_id == first.run_id
    records = read_wandb(tmp_path / "2")
    assert records["run"][0].run_id == first.run_id
    assert history(records)["loss"] == {5: 0.5}


def test_deleted_offline_files_are_one_warning_during_the_run_and_one_when_it_resumes(tmp_path):
    def warnings_of(steps, *, run_id=None, deletes=False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with start_tracking("wandb", project="p", config={}, folder=tmp_path, run_id=run_id) as tracker:
                for step in steps:
                    tracker.log({"loss": 1.0}, step)
                    while not (files := [*tmp_path.glob("wandb/offline-run-*/*.wandb")]) and step == steps[0]:
                        time.sleep(0.05)
                    for file in files if deletes and step == steps[1] else ():
                        file.unlink()
        return tracker.run_id, [str(one.message) for one in caught]

    run_id, (during,) = warnings_of(range(5), deletes=True)
    assert "was deleted: W&B records nothing more" in during
    wandb.teardown()
    shutil.rmtree(tmp_path / "wandb")
    _, (after,) = warnings_of(range(5, 6), run_id=run_id)
    assert f"has no files of the resumed W&B run {run_id}" in after
    time.sleep(1.1)  # W&B names folders by the second
    assert warnings_of(range(6, 7), run_id=run_id) == (run_id, [])


def test_id_from_the_environment_a_resumed_run_and_a_sweep_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "fromagent")
    with start_tracking("wandb", project="p", config={}, folder=tmp_path / "1", run_id="mine") as tracker:
        assert tracker.run_id == "mine"
    wandb.teardown()
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    for folder, run_id in (("2", None), ("3", "mine")):  # within a sweep W&B uses the agent's id
        with start_tracking("wandb", project="p", config={}, folder=tmp_path / folder, run_id=run_id) as tracker:
            assert tracker.run_id == "fromagent"
        assert read_wandb(tmp_path / folder)["run"][0].sweep_id == "sweep1"


def test_wandbs_variables_hold_unless_an_argument_says_otherwise(tmp_path, monkeypatch):
    variables = {"DIR": str(tmp_path / "variable"), "TAGS": "a,b", "PROJECT": "theirs", "RUN_GROUP": "outside"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    options = {"project": "p", "config": {"lr": 0.1, "seed": 1}, "folder": tmp_path / "folder"}
    own = {"config": {"seed": 2, "note": "n"}, "project": "ours", "tags": ["c"], "dir": str(tmp_path / "own")}

    def of(folder, **more):
        start_tracking("wandb", **options, **more).finish()
        run = read_wandb(tmp_path / folder)["run"][0]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        return run.project, list(run.tags), run.run_group, {name: config.get(name) for name in ("lr", "seed", "note")}

    assert of("variable") == ("theirs", ["a", "b"], "outside", {"lr": 0.1, "seed": 1, "note": None})
    given = {"init_kwargs": {"wandb": own}, "tags": ["d"]}
    assert of("own", **given) == ("ours", ["c"], "outside", {"lr": 0.1, "seed": 2, "note": "n"})
    assert not (tmp_path / "folder").exists()
    monkeypatch.delenv("WANDB_DIR")
    assert of("folder", tags=["d"])[1] == ["d"]


def test_without_a_key_the_run_is_offline_and_online_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE")
    start_tracking("wandb", project="p", config={}, folder=tmp_path).finish()
    assert "no API key" in capfd.readouterr().err
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(RuntimeError, match="WANDB_API_KEY"):
        start_tracking("wandb", project="p", config={}, folder=tmp_path)


def test_disabled_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with start_tracking("wandb", project="p", config={}, folder=tmp_path) as tracker:
        tracker.log({"loss": 1.0}, 0)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


def test_tensorboard_holds_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step, run_id in ((0, None), (1, "again")):
        with start_tracking("tensorboard", project="p", config={"lr": 0.1}, folder=tmp_path, run_id=run_id) as tracker:
            tracker.log({"loss": 0.5, "dist": np.arange(5)}, step)
            tracker.table("samples", ["text"], [["a|b\nc"]], step)
            tracker.images("pictures", [np.zeros((4, 6, 3), np.uint8)], ["black"], step)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "again"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5)]
    assert events.Histograms("dist")[0].histogram_value.num == 5
    assert (events.Images("pictures/0")[0].width, events.Images("pictures/0")[0].height) == (6, 4)
    texts = {
        tag: events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("samples", "pictures/captions", "config")
    }
    assert "a\\|b<br>c" in texts["samples"]
    assert "black" in texts["pictures/captions"]
    assert "lr" in texts["config"]


class Remembers(GeneralTracker):
    """An accelerate tracker for a package that is not installed here."""

    name, requires_logging_directory = "aim", True

    def __init__(self, project, folder, **options):
        super().__init__()
        self.calls = [("new", project, folder, options)]

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **options):
        self.calls.append(("log", values, step))

    def log_images(self, values, step=None):
        self.calls.append(("images", {name: caption for name, (_, caption) in values.items()}, step))

    def finish(self):
        self.calls.append("finish")


def test_another_tracker_of_accelerates_gets_what_it_has_methods_for(tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "aim", Remembers)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["aim"])
    accelerator = Accelerator(cpu=True)
    options = {"aim": {"a": 1}, "wandb": {"b": 2}}
    with start_tracking("aim", project="p", config={"lr": 0.1}, folder=tmp_path, init_kwargs=options) as tracker:
        accelerator.trackers = trackers_of(SimpleNamespace(tracker=tracker), "aim")
        tracker.log({"loss": 0.5, "dist": np.arange(5)}, 3)
        tracker.table("samples", ["text"], [["a"]], 3)
        tracker.images("pictures", [np.zeros((4, 6, 3), np.uint8)], ["black"], 3)
        accelerator.log({"eval": "text"})
        calls = accelerator.get_tracker("aim", unwrap=True)
        accelerator.get_tracker("aim").log_images({"own": (None, "c")}, step=9)
    assert calls == [
        ("new", "p", str(tmp_path / "aim"), {"a": 1}),
        "start",
        ("config", {"lr": 0.1}),
        ("log", {"loss": 0.5}, 3),
        ("images", {"pictures/0": "black"}, 3),
        ("log", {"eval": "text"}, 3),
        ("images", {"own": "c"}, 9),
        "finish",
    ]
    accelerator.get_tracker("aim").log_images({"late": None})  # as on the other processes, which log nothing


class OneValueEach(Remembers):
    """Accelerate's tracker of MLflow, with a store that refuses a second value of a parameter, as MLflow's does."""

    name, requires_logging_directory = "mlflow", False
    stored: dict[str, str] = {}

    def __init__(self, project, **options):
        super().__init__(project, None, **options)
        self.run = SimpleNamespace(info=SimpleNamespace(run_id="r1"), data=SimpleNamespace(params=dict(self.stored)))

    @property
    def tracker(self):
        return self.run

    def store_init_configuration(self, values):
        for key, value in values.items():
            assert self.stored.setdefault(key, str(value)) == str(value)


def test_a_resumed_mlflow_run_keeps_its_parameters_and_adds_new_ones(monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", OneValueEach)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["mlflow"])
    monkeypatch.setattr(OneValueEach, "stored", {})
    for run_id, config in ((None, {"steps": 3}), ("r1", {"steps": 5, "note": "b"})):
        with start_tracking("mlflow", project="p", config=config, run_id=run_id) as tracker:
            tracker.describe({"model": f"m{config['steps']}"})
            tracker.describe({"model": "again", "late": config["steps"]})
            assert tracker.run_id == "r1"
    assert OneValueEach.stored == {"steps": "3", "model": "m3", "late": "3", "note": "b"}


WITHOUT_WANDB = """
import sys
import trimtab_common.run, trimtab_lm, trimtab_diffusion
from trimtab_common.tracking import start_tracking
with start_tracking(None, project="p", config={}) as tracker:
    tracker.log({"loss": 1.0}, 0)
print([name for name in ("wandb", "tensorboard", "torch.utils.tensorboard", "mlflow") if name in sys.modules])
"""


def test_a_run_without_a_tracker_imports_none():
    command = [sys.executable, "-c", WITHOUT_WANDB]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("[]\n")


OWN = [(0.1, 1), (0.2, 0), (0.3, 1000), (0.4, None)]
"""What a program logs through the accelerator, and at which step; the trainer is at step 0, 1, 2 and 3."""


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_what_a_program_logs_through_the_accelerator_stands_beside_the_trainers_steps(kind, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True)
    with start_tracking(kind, project="p", config={}, folder=tmp_path) as tracker:
        accelerator.trackers = trackers_of(SimpleNamespace(tracker=tracker), kind)
        assert accelerator.get_tracker(kind, unwrap=True) is tracker.accelerate.tracker
        for step, (value, own_step) in enumerate(OWN):
            if step:
                tracker.log({"loss": step / 10}, step)
            accelerator.log({"eval": value, "note": "a text"}, step=own_step)
            tracker.log({"late": step / 10}, step)  # the trainer's step is still open
    expected = {
        "loss": [(1, 0.1), (2, 0.2), (3, 0.3)],
        "eval": [(1, 0.1), (0, 0.2), (1000, 0.3), (3, 0.4)],
        "late": [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)],
    }
    if kind == "tensorboard":
        (folder,) = (tmp_path / "tensorboard").iterdir()
        events = EventAccumulator(str(folder))
        events.Reload()
        logged = {name: [(event.step, round(event.value, 6)) for event in events.Scalars(name)] for name in expected}
    else:
        rows = [
            {item.nested_key[0]: json.loads(item.value_json) for item in row.item}
            for row in read_wandb(tmp_path)["history"]
        ]
        logged = {name: [(row[STEP_AXIS], row[name]) for row in rows if name in row] for name in expected}
    assert logged == expected
    accelerator.trackers = trackers_of(SimpleNamespace(tracker=tracker), None)
    accelerator.log({"eval": 1.0})


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a\\b c\n", ".."])
def test_the_name_of_a_run_cannot_leave_its_folder(tmp_path, name):
    folder = tmp_path / "runs"
    with start_tracking("tensorboard", project="p", config={}, folder=folder, name=name, run_id="id") as tracker:
        tracker.log({"loss": 0.5}, 0)
    (run_folder,) = (folder / "tensorboard").iterdir()
    assert run_folder.name.endswith("-id")
    assert list(tmp_path.iterdir()) == [folder]


def test_the_tracker_of_other_processes_or_of_no_package_does_nothing(tmp_path):
    for log_with, is_main in (("wandb", False), ("none", True), (None, True)):
        tracker = start_tracking(log_with, project="p", config={}, folder=tmp_path, is_main=is_main)
        tracker.log({"loss": object()}, 0)
        tracker.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [None, "none", "tensorboard"])
def test_a_sweep_gets_the_numbers_of_a_run_with_any_tracker_or_none(kind, tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("TRIMTAB_METRICS", str(file))
    for is_main in (True, False):
        tracker = start_tracking(kind, project="p", config={}, folder=tmp_path, is_main=is_main)
        with tracker:
            tracker.log({"loss": torch.tensor(0.5), "dist": [1.0, 2.0]}, 1)
            tracker.row({"eval": np.float32(2), "note": "a text"}, None)
            tracker.row({"eval": 3}, 7)
            tracker.row({"note": "another text"}, 8)
            tracker.finish({"best": 3})
        tracker.log({"loss": 0.1}, 2)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"loss": 0.5, STEP_AXIS: 1},
        {"eval": 2.0, STEP_AXIS: 1},
        {"eval": 3.0, STEP_AXIS: 7},
        {"best": 3.0},
    ]


def test_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"mlflow.*wandb.*none"):
        check_tracker_name("mlfow")
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
        with pytest.raises(ImportError, match="log_with='mlflow' needs its package: pip install mlflow"):
            check_tracker_name("mlflow")
    with start_tracking("tensorboard", project="p", config={}, folder=tmp_path) as tracker:
        with pytest.raises(ValueError, match=r"stats\['loss'\] is 'high'"):
            tracker.log({"loss": "high"}, 3)
        with pytest.raises(ValueError, match=r"step=2 after step=3"):
            tracker.log({"loss": 1}, 2)
        with pytest.raises(ValueError, match=r"from -1.0 to 1.0"):
            tracker.images("x", [torch.linspace(-1, 1, 48).view(3, 4, 4)], ["c"], 3)
        tracker.table("t", ["a"], [["x"]], 3)
        with pytest.raises(ValueError, match="Use another name"):
            tracker.table("t", ["b"], [["x"]], 3)


TERMINATE_ITSELF = """
import os, signal, sys
from trimtab_common.tracking import start_tracking
with start_tracking("wandb", project="p", config={}, folder=sys.argv[1]) as tracker:
    tracker.log({"loss": 1.0}, 0)
    os.kill(os.getpid(), signal.SIGTERM)
    tracker.log({"loss": 2.0}, 1)
"""


def test_sigterm_closes_the_run_and_marks_it_preempted(tmp_path):
    done = subprocess.run([sys.executable, "-c", TERMINATE_ITSELF, str(tmp_path)], timeout=100)
    assert done.returncode == 128 + signal.SIGTERM
    records = read_wandb(tmp_path)
    assert history(records)["loss"] == {0: 1.0}
    assert len(records["preempting"]) == 1
    assert records["exit"][0].exit_code == 128 + signal.SIGTERM


def test_progress_is_silent_in_a_pipe(capfd):
    assert list(progress(3, "counting")) == [0, 1, 2]
    assert list(progress("ab", "letters")) == ["a", "b"]
    assert capfd.readouterr().err == ""
