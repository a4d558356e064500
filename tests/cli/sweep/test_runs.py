"""Runs `trimtab sweep` on a small program that logs to W&B offline; stops, kills, resumes and reads its trials."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml
from tools.chaos.wandb_files import RunFile

from trimtab_cli.sweep.command import main
from trimtab_cli.sweep.runner import log_of
from trimtab_cli.sweep.spec import SweepError
from trimtab_cli.sweep.study import JOURNAL, read_study, status_of, storage_in, trials_of

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """\
import ast, json, os, signal, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
mode, level = flags.get("mode", "good"), ast.literal_eval(flags.get("level", "0"))
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("calls", "a") as file:
    file.write(f"{mode}{level} {os.environ['WANDB_RUN_ID']} {os.getpid()}\\n")
while mode in ("wait", "deaf") and not os.path.exists("go"):
    time.sleep(0.05)
if mode == "crash":
    print("line one\\n" * 50 + "the reason")
    sys.exit(3)
if mode == "silent":
    sys.exit(0)
if mode == "preempted" and not os.path.exists("go"):
    sys.exit(143)
if mode == "killed" and not os.path.exists("go"):
    os.kill(os.getpid(), signal.SIGTERM)
import wandb
folder = {"dir": os.path.join("runs", "own", os.environ["WANDB_RUN_ID"])} if mode == "own" else {}
for path in folder.values():
    os.makedirs(path)
run = wandb.init(config={"seen": flags, "cores": os.environ["OMP_NUM_THREADS"]}, **folder)
value = {"nan": float("nan")}.get(mode, level)
for step in range(1200 if mode == "long" and level else 4):
    row = {"other" if mode == "other" else "loss": value, "step": step}
    run.log(row)
    with open(os.environ["TRIMTAB_METRICS"], "a") as file:
        file.write(json.dumps(row) + "\\n")
    time.sleep(0.05)
run.finish()
"""

STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Sets up a folder with the program, and an environment without W&B settings."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.2")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_AGENT_KILL_DELAY", "300")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    for process in STARTED:
        process.kill()
        process.communicate()
    STARTED.clear()
    for _, _, pid in calls():  # left by a failed test
        if is_alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def write(config):
    config = {"program": "program.py", "name": "my sweep", "project": "p", "metric": {"name": "loss"}, **config}
    Path("sweep.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def start(config, *flags):
    """Starts `trimtab sweep` on a sweep file, in a separate process that a test can kill."""
    write(config)
    words = [sys.executable, "-m", "trimtab_cli", "sweep", "sweep.yaml", *flags]
    STARTED.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return STARTED[-1]


def finished(process, status=0):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == status, output
    return output


@pytest.fixture
def sweep(capfd):
    """Returns a function that runs the command in this process, and returns what it printed."""

    def run(config, *flags, status=0):
        write(config)
        got = main(["sweep.yaml", *flags])
        output = "".join(capfd.readouterr())
        assert got == status, output
        return output

    return run


FOLDER = Path("runs/sweeps/my-sweep")


def trials():
    """Returns what the record says about each trial, apart from interrupted ones that ran again."""
    if not (FOLDER / JOURNAL).exists():
        return []
    found = trials_of(read_study(FOLDER))
    return [
        {**trial.user_attrs, "number": trial.number, "status": status_of(trial), "metric": trial.value}
        for trial in found
    ]


def calls():
    return [line.split() for line in Path("calls").read_text().splitlines()] if Path("calls").exists() else []


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_runs_are_w_and_b_runs_of_the_sweep(place, sweep):
    config = {
        "method": "random",
        "run_cap": 2,
        "parameters": {
            "level": {"min": 0.0, "max": 1.0},
            "mode": {"value": "own"},
            "ppo": {"parameters": {"lr": {"value": 0.5}}},
        },
    }
    output = sweep(config, "--jobs", "2", "--count", "9", "--report")
    sweep_id = read_study(FOLDER).user_attrs["id"]
    assert [trial["status"] for trial in trials()] == ["finished", "finished"]
    for trial in trials():
        level = trial["parameters"]["level"]
        assert trial["parameters"] == {"level": level, "mode": "own", "ppo": {"lr": 0.5}}
        assert trial["metric"] == level
        (path,) = Path("runs", "own", trial["run_id"]).rglob(f"run-{trial['run_id']}.wandb")
        file = RunFile(path).update()
        assert (file.sweep_id, file.run_id, file.exit_code) == (sweep_id, trial["run_id"], 0)
        # The run's configuration holds the agent's parameter file; the program received the parameters as flags.
        assert file.config["level"] == level
        assert file.config["ppo"] == {"lr": 0.5}
        assert file.config["seen"] == {"level": str(level), "mode": "own", "ppo": "{'lr': 0.5}"}
        assert file.config["cores"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert file.history("loss") == [level] * 4
    best, other = sorted(trials(), key=lambda trial: trial["metric"])
    assert output.index(best["run_id"], output.index("user_attrs")) < output.rindex(other["run_id"])

    again = sweep(config)
    assert len(calls()) == 2, again


def test_failures_are_recorded_and_the_sweep_goes_on(place, sweep):
    modes = ["crash", "silent", "other", "nan", "good"]
    output = sweep({"method": "grid", "parameters": {"mode": {"values": modes}}}, "--jobs", "2", "--report")
    crash, silent, other, nan, good = trials()
    assert [trial["status"] for trial in trials()] == ["failed"] * 4 + ["finished"]
    assert crash["message"].startswith("exit status 3")
    assert crash["message"].endswith("line one\nthe reason")
    assert len(crash["message"].splitlines()) == 21
    assert "no 'loss' was logged; it has logged nothing into the file of TRIMTAB_METRICS." in silent["message"]
    assert "no 'loss' was logged; it has logged other, step." in other["message"]
    assert "loss is nan" in nan["message"]
    assert good["metric"] == 0
    assert "trial 0 failed after 0 s: exit status 3; the end of" in output.replace("1 s", "0 s")


def test_a_sweep_without_a_trial_that_finished_has_failed(place, sweep):
    output = sweep({"method": "grid", "parameters": {"mode": {"values": ["crash", "nan"]}}}, status=1)
    assert output.endswith("trimtab sweep: error: every trial failed; each said why above.\n")


def test_failed_trials_run_again_on_request_only(place, sweep):
    config = {"method": "grid", "parameters": {"mode": {"value": "silent"}}}
    for flags, runs in ((), 1), ((), 1), (("--retry-failed",), 2):
        sweep(config, *flags, status=1)
        assert len(calls()) == runs
    (trial,) = trials()
    assert trial["run_id"] == calls()[1][1] != calls()[0][1]


def test_a_trial_that_sigterm_ends_runs_again_in_the_next_call(place, sweep):
    """A preempted training saves and ends with status 143; SIGTERM kills a program that has no handler."""
    config = {"method": "grid", "parameters": {"mode": {"values": ["preempted", "killed"]}}}
    output = sweep(config, status=143)
    assert [trial["status"] for trial in trials()] == ["interrupted", "interrupted"]
    assert "trial 0 interrupted" in output
    assert [call[0] for call in calls()] == ["preempted0", "killed0"]
    Path("go").touch()
    sweep(config, "--jobs", "2")
    assert [trial["status"] for trial in trials()] == ["finished", "finished"]


def test_a_bad_run_is_stopped_early(place, sweep):
    config = {
        "method": "grid",
        "parameters": {"mode": {"value": "long"}, "level": {"values": [0, 5, 0]}},
        "early_terminate": {"type": "hyperband", "min_iter": 2, "eta": 3},
    }
    sweep(config)
    assert [(trial["status"], trial["metric"]) for trial in trials()] == [
        ("finished", 0),
        ("stopped", 5),
        ("finished", 0),
    ]
    assert trials()[1]["message"] == "stopped early: 5 at iteration 2"
    assert len(log_of(FOLDER, 1).with_suffix(".jsonl").read_text().splitlines()) < 1200
    assert not is_alive(int(calls()[1][2]))


@pytest.mark.slow
def test_a_killed_sweep_goes_on_without_repeating_what_finished(place, sweep):
    config = {"method": "grid", "parameters": {"level": {"values": [1, 2]}, "mode": {"values": ["good", "wait"]}}}
    process = start(config)
    wait_for(lambda: len(calls()) == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cut = int(calls()[1][2])
    assert is_alive(cut)
    first = trials()[0]
    assert [trial["status"] for trial in trials()] == ["finished", "running"]

    process = start(config)
    wait_for(lambda: len(calls()) == 3)
    assert not is_alive(cut)  # otherwise two would write to the same files
    assert f"process {process.pid} on " in sweep(config, status=2)
    Path("go").touch()
    finished(process)
    assert [call[0] for call in calls()] == ["good1", "wait1", "wait1", "good2", "wait2"]
    assert [trial["status"] for trial in trials()] == ["finished"] * 4
    assert trials()[0] == first
    assert calls()[1][1] != calls()[2][1] == trials()[1]["run_id"]

    config["parameters"]["level"]["values"].append(3)
    assert "differs in parameters" in sweep(config, status=2)


@pytest.mark.parametrize("written", [None, "no study", "no settings"])
def test_a_sweep_that_a_kill_ended_before_its_settings_were_written_is_run_from_its_start(place, sweep, written):
    if written:
        FOLDER.mkdir(parents=True)
        storage = storage_in(FOLDER)
        if written == "no settings":
            optuna.create_study(storage=storage, study_name="s")
    with pytest.raises(SweepError, match="holds no sweep that has begun"):
        read_study(FOLDER)
    sweep({"method": "grid", "parameters": {"level": {"values": [1]}}}, status=0)
    assert [trial["status"] for trial in trials()] == ["finished"]


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        pytest.param(signal.SIGINT, "wait", marks=pytest.mark.slow),
        (signal.SIGTERM, "wait"),
        pytest.param(signal.SIGTERM, "deaf", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_the_running_trials(place, monkeypatch, number, mode):
    if mode == "deaf":
        monkeypatch.setenv("WANDB_AGENT_KILL_DELAY", "0.5")
    config = {"method": "random", "parameters": {"mode": {"value": mode}}}
    process = start(config, "--count", "3", "--jobs", "2")
    wait_for(lambda: len(calls()) == 2)
    process.send_signal(number)
    finished(process, status=128 + number)
    assert [trial["status"] for trial in trials()] == ["interrupted", "interrupted"]
    assert not any(is_alive(int(call[2])) for call in calls())


def test_the_target_ends_the_sweep(place, sweep):
    config = {
        "method": "grid",
        "metric": {"name": "loss", "goal": "maximize", "target": 2},
        "parameters": {"level": {"values": [2, 3]}},
    }
    sweep(config)
    assert [trial["metric"] for trial in trials()] == [2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "random", "parameters": {"x": {"min": 0, "max": 0}}}, "sweep.yaml: parameters.x: got {'min': 0"),
        ({"method": "random", "parameters": {"x": {"value": 0}}}, "method: random has no end. Give --count"),
        ({"method": "grid", "program": "gone.py", "parameters": {"x": {"value": 0}}}, "program: gone.py is not below"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(place, sweep, config, words):
    assert words in sweep(config, status=2)
    assert not Path("runs").exists()
