"""A sweep that forks its trials: a trial's view of itself, its exit statuses, and programs that cannot be forked."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from experiments import preload
from trimtab_cli.sweep.study import read_study, status_of, trials_of

# Prints what a process sees of itself on a line of "seen"; its imports must be those of `once`.
LOOKING = """\
import json, os, signal, sys, threading
import once, numpy.random
seen = {
    "words": [__name__, __file__, *sys.argv, sys.path[0], sys.stdin.read()],
    "variables": {name: value for name, value in os.environ.items() if name.startswith(("WANDB", "OMP", "PATH"))},
    "leads its group": os.getpgid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "threads": threading.active_count(),
}
text = json.dumps(seen).replace(os.environ["WANDB_RUN_ID"], "the run")
with open("seen", "a") as file, open("drawn", "a") as numbers:
    file.write(text + "\\n")
    numbers.write(f"{numpy.random.random()}\\n")
with open(os.environ["TRIMTAB_METRICS"], "a") as file:
    print(json.dumps({"loss": 1.0}), file=file)
print("the log")
sys.exit(3 if sys.argv[1] == "--level=2" else 0)
"""
ONCE = "import os, numpy.random\nopen('imports', 'a').write(f'{os.getpid()}\\n')\n"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_wandb: None):
    """Returns a function that sweeps two trials in the working directory, with options of `experiments.preload`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)]))
    Path("program.py").write_text(LOOKING)
    Path("once.py").write_text(ONCE)

    def run(*flags: str, **changes: object) -> int:
        config = {"program": "program.py", "method": "grid", "metric": {"name": "loss"}, **changes}
        Path("sweep.yaml").write_text(yaml.safe_dump({**config, "parameters": {"level": {"values": [1, 2]}}}))
        words = [*flags, "sweep.yaml", "--sweep-id", "one", "--folder", "folder", "--jobs", "2"]
        monkeypatch.setattr(sys, "argv", ["preload", *words])
        return preload.main()

    return run


def test_a_forked_trial_sees_what_a_started_one_does(sweep):
    from trimtab_cli.sweep.command import main

    seen = {}
    for name, run in (("forked", lambda: sweep("--preload", "once")), ("started", lambda: main(sys.argv[3:]))):
        assert run() == 0
        assert [status_of(trial) for trial in trials_of(read_study(Path("folder")))] == ["finished", "failed"]
        assert {log.read_text() for log in Path("folder/logs").glob("*.log")} == {"the log\n"}
        seen[name] = sorted(map(json.loads, Path("seen").read_text().splitlines()), key=lambda row: row["words"])
        Path("folder").rename(name)
        Path("seen").unlink()
    assert len(seen["started"]) == 2
    assert seen["forked"] == seen["started"]
    assert len(Path("imports").read_text().split()) == 3  # once for both, and once in each started process
    assert len(set(Path("drawn").read_text().split())) == 4


@pytest.mark.parametrize(
    ("changes", "module", "words"),
    [
        ({"command": ["bash", "${program}"]}, "once", "has to begin with /usr/bin/env python"),
        ({}, "missing", "the process that imports missing has ended"),
        ({}, "wandb", "the process that imports wandb has ended"),
    ],
    ids=["command", "module", "folders"],
)
def test_what_cannot_be_forked_is_refused(sweep, changes, module, words):
    with pytest.raises(SystemExit, match=words):
        sweep("--preload", module, **changes)
    assert not Path("seen").exists()
