"""`make reproduce` on a small tree of made-up papers: runs, verdicts, figures and tables in READMEs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.claims import HEADINGS, Claim, judge, to_json
from trimtab_cli.sweep.study import read_study, trials_of

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = reproduce.marks("default")
SWEEP = """
program: experiments/{paper}/train.py
name: {paper}
method: grid
metric: {{name: score, goal: maximize}}
command: ["${{env}}", "${{interpreter}}", "${{program}}", "${{args}}"]
parameters:
  seed: {{values: [1, 2]}}
"""
TRAIN = """
import json, os, sys
from pathlib import Path
seed = int(sys.argv[1].partition("=")[2])
if seed == {fails}:
    sys.exit("no data")
folder = Path("runs", "{paper}", os.environ["WANDB_SWEEP_ID"], os.environ["WANDB_RUN_ID"])
folder.mkdir(parents=True)
(folder / "config.json").write_text(json.dumps({{"seed": seed}}))
(folder / "history.jsonl").write_text(json.dumps({{"step": 1}}) + "\\n")
(folder / "summary.json").write_text(json.dumps({{"score": seed}}))
from experiments.provenance import provenance
(folder / "starts.json").write_text(json.dumps([provenance()]))
with open(os.environ["TRIMTAB_METRICS"], "a") as metrics:
    print(json.dumps({{"score": seed}}), file=metrics)
"""
REPORT = """
from matplotlib import pyplot as plt
from experiments.claims import Claim
from experiments.reports import Report, main
from experiments.run_folders import of_seeds

def read(runs):
    scores = of_seeds(runs, lambda run: run.summary["score"])
    claim = Claim("scores | count", ("scores",), "more", 1.0, "points")
    return Report({"scores": scores}, [claim], {"figure": plt.figure()}, {"figure": "about"})

main("t", "c", read)
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_wandb: None) -> Path:
    """Writes two papers; the second, older one has a run that fails, and reports on the others."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for paper, fails in (("b_2020", -1), ("a_2019", 1)):
        folder = tmp_path / "experiments" / paper
        folder.mkdir(parents=True)
        (folder / "reproduce.yaml").write_text(SWEEP.format(paper=paper))
        (folder / "train.py").write_text(TRAIN.format(paper=paper, fails=fails))
        (folder / "report.py").write_text(REPORT)
        (folder / "README.md").write_text(f"# {paper}\n{BEGIN}\nold\n{END}\nend\n")
    # The papers here and the modules of the real package are found under one name.
    extended = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
    (tmp_path / "experiments" / "__init__.py").write_text(extended)
    (tmp_path / "experiments" / "README.md").write_text(f"all\n{BEGIN}\n{END}\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    once = "import os\nprint(__name__, os.environ.get('MALLOC_MMAP_MAX_'), file=open('imported', 'a'))\n"
    (tmp_path / "once.py").write_text(once)
    monkeypatch.setattr(reproduce, "PRELOADED", ["once"])
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words])
    return reproduce.main()


def rows_of(readme: Path) -> list[list[str]]:
    lines = [line for line in readme.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_the_table_has_every_paper_with_its_verdicts(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch) == 1  # one run failed
    assert (tree / "imported").read_text() == "once 0\n" * 2  # by two sweeps with two runs each
    home = tree / "experiments"
    assert "Claims that are counted: 1." in (home / "README.md").read_text()
    first, second = rows_of(home / "README.md")[-2:]
    assert first[:2] == ["[a_2019](a_2019/README.md)", "not judged yet"]
    assert second[:3] == ["[b_2020](b_2020/README.md)", "undecided", "scores / count (adapted)"]
    assert "failed        run " in capsys.readouterr().out
    readme = (home / "b_2020" / "README.md").read_text()
    assert readme.startswith("# b_2020\n")
    assert readme.endswith("end\n")
    assert "old" not in readme
    assert "(figure.png)" in readme
    assert (home / "b_2020" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (home / "b_2020" / "figure.pdf").exists()
    assert json.loads((home / "b_2020" / "numbers.json").read_text())["measured"] == {"scores": {"1": 1.0, "2": 2.0}}
    # Some of the runs would judge other claims, so the committed page of a paper with a failed run stays.
    assert "old" in (home / "a_2019" / "README.md").read_text()
    assert not (home / "a_2019" / "numbers.json").exists()


def test_runs_on_a_gpu_are_not_forked(monkeypatch: pytest.MonkeyPatch):
    for has_gpu, program in ((False, "experiments.preload"), (True, "trimtab_cli")):
        monkeypatch.setattr("torch.accelerator.is_available", partial(bool, has_gpu))
        assert reproduce.sweep_program()[0] == program


@pytest.mark.slow
def test_what_was_run_is_not_run_again(tree: Path, monkeypatch: pytest.MonkeyPatch):
    assert run(monkeypatch, "b_2020") == 0
    assert [row[1] for row in rows_of(tree / "experiments" / "README.md")[-2:]] == ["not judged yet", "undecided"]
    known = sorted(tree.rglob("summary.json"))
    assert len(known) == 2
    assert run(monkeypatch, "b_2020", "--jobs", "1") == 0
    assert sorted(tree.rglob("summary.json")) == known
    trials = trials_of(read_study(tree / "runs/reproduce/default/b_2020/reproduce"))
    (headings, _, row) = rows_of(tree / "experiments" / "b_2020" / "README.md")
    assert headings == list(HEADINGS)
    assert row[:2] == ["undecided", "scores / count (adapted)"]
    minutes = sum(trial.user_attrs["seconds"] for trial in trials) / 60
    assert f"{minutes:.1f} minutes of runs, 1 at" in (tree / "experiments" / "b_2020" / "README.md").read_text()


@pytest.mark.slow
def test_a_report_that_fails_is_a_failure_and_an_old_verdict_is_not_taken_for_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
):
    assert run(monkeypatch, "b_2020") == 0
    (tree / "experiments" / "b_2020" / "report.py").write_text("raise SystemExit('broken')")
    assert run(monkeypatch, "b_2020") == 1
    assert len(rows_of(tree / "experiments" / "b_2020" / "README.md")) == 3  # the committed page stays


@pytest.mark.slow
def test_another_tier_runs_its_sweeps_and_leaves_the_committed_pages(tree: Path, monkeypatch: pytest.MonkeyPatch):
    home = tree / "experiments" / "b_2020"
    (home / "smoke.yaml").write_text(SWEEP.format(paper="b_2020"))
    before = (home / "README.md").read_text()
    assert run(monkeypatch, "--tier", "smoke") == 0
    assert (home / "README.md").read_text() == before
    assert (tree / "runs/reproduce/smoke/b_2020/report.html").exists()
    assert not (tree / "runs/reproduce/default").exists()
    with pytest.raises(SystemExit):
        run(monkeypatch, "a_2019", "--tier", "smoke")


def test_committed_numbers_are_judged_again_without_a_run(tree: Path, monkeypatch: pytest.MonkeyPatch):
    home = tree / "experiments" / "b_2020"
    scores = {seed: 2 + seed / 10 for seed in range(8)}
    claims = [
        Claim("scores | count", ("scores",), "more", 1.0, "points", origin="ours"),
        Claim("they are there", ("scores",), "more", 1.0, "points", trivial="they are"),
    ]
    stale = [replace(verdict, outcome="undecided", p=0.9) for verdict in judge(claims, {"scores": scores})]
    content = {"minutes": 2.0, "about": "Commit 1234567.", **to_json({"scores": scores}, stale)}
    (home / "numbers.json").write_text(json.dumps(content))
    page = f"# b\n{BEGIN}\n\n| old |\n\nCommit 1234567.\n\n![figure](figure.png)\n\n{END}\nend\n"
    (home / "README.md").write_text(page)
    assert run(monkeypatch, "--judge-again") == 0
    text = (home / "README.md").read_text()
    assert "| holds | scores \\| count (ours) |" in text
    assert "| old |" not in text
    assert text.endswith(f"Commit 1234567.\n\n![figure](figure.png)\n\n{END}\nend\n")
    assert [row["outcome"] for row in json.loads((home / "numbers.json").read_text())["verdicts"]] == [
        "holds",
        "reproduced",
    ]
    whole = (tree / "experiments" / "README.md").read_text()
    assert "Claims that are counted: 1." in whole
    assert "| ours | 1 | 1 holds | 0 does not hold | 0 | 0 |" in whole
    assert whole.index("scores \\| count") < whole.index("Checks") < whole.index("they are there")
    assert not (tree / "runs").exists()


def test_nothing_is_run_where_the_table_has_no_place(tree: Path, monkeypatch: pytest.MonkeyPatch):
    (tree / "experiments" / "a_2019" / "README.md").write_text("no marks")
    with pytest.raises(SystemExit, match="the lines"):
        run(monkeypatch)
    assert not (tree / "runs").exists()


@pytest.mark.slow
def test_the_night_tier_is_committed_where_a_page_has_its_marks(tree: Path, monkeypatch: pytest.MonkeyPatch):
    home = tree / "experiments" / "b_2020"
    (home / "night.yaml").write_text(SWEEP.format(paper="b_2020"))
    before = (home / "README.md").read_text()
    assert run(monkeypatch, "--tier", "night") == 0
    assert (home / "README.md").read_text() == before
    assert not list(home.glob("night_*"))
    (home / "README.md").write_text(f"{before}\n{reproduce.marks('night')[0]}\n{reproduce.marks('night')[1]}\n")
    assert run(monkeypatch, "--tier", "night") == 0
    text = (home / "README.md").read_text()
    assert text.startswith(before)
    assert "![t: figure](night_figure.png)" in text
    assert "([PDF](night_figure.pdf))" in text
    assert {file.name for file in home.glob("night_*")} == {
        "night_figure.pdf",
        "night_figure.png",
        "night_numbers.json",
        "night_runs.zip",
    }
    assert not (home / "numbers.json").exists()


def test_the_table_has_the_largest_tier_and_says_which_verdict_has_changed(tree: Path, monkeypatch: pytest.MonkeyPatch):
    home = tree / "experiments" / "b_2020"
    claims = [
        Claim(text, (name,), "more", 1.0, "points", origin="ours")
        for text, name in (("it grows", "growth"), ("it is there", "presence"))
    ]
    (home / "README.md").write_text("# b\n")
    for tier, growth in (("default", 0.01), ("night", 3.0)):
        measured = {
            name: {seed: first + seed / 10 for seed in range(-4, 4)}
            for name, first in (("growth", growth), ("presence", 2.0))
        }
        content = {"minutes": 2.0, "about": f"Commit of {tier}.", **to_json(measured, judge(claims, measured))}
        reproduce.numbers_of("b_2020", tier).write_text(json.dumps(content))
        begin, end = reproduce.marks(tier)
        with (home / "README.md").open("a") as page:
            page.write(f"{begin}\n\n| old |\n\nCommit of {tier}.\n\n{end}\n")
    assert run(monkeypatch, "--judge-again") == 0
    whole = (tree / "experiments" / "README.md").read_text()
    rows = [row for row in rows_of(tree / "experiments" / "README.md") if "it " in row[2]]
    assert [row[1] for row in rows] == ["holds (default tier: no effect that matters)", "holds"]
    assert "- b_2020: Commit of night." in whole
    assert "Commit of default." not in whole
    text = (home / "README.md").read_text()
    assert text.count("| it grows (ours) |") == 2
    assert "| old |" not in text
