"""The committed verdicts follow from the committed numbers, and the READMEs show them."""

import json
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest

from experiments.black_2023_ddpo import report as black
from experiments.claims import HEADINGS, Claim, from_json, judge, rounded
from experiments.clark_2023_draft import report as clark
from experiments.emoji.judging import REACHABLE
from experiments.gao_2022_overoptimization import report as gao
from experiments.margins import margins
from experiments.rafailov_2023_dpo_frontier import report as rafailov
from experiments.reports import markdown, tables
from experiments.run_folders import Run, finished_runs, unpacked
from experiments.shao_2024_grpo import report as shao
from experiments.ziegler_2019_sentiment import report as ziegler

HOME = Path(__file__).resolve().parents[2] / "experiments"
FILES = sorted(HOME.glob("*/*numbers.json"))
ARCHIVES = sorted(HOME.glob("*/*runs.zip"))
NAMES = [f"{file.parent.name}/{file.stem}" for file in FILES]


def test_there_are_numbers_to_judge():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_each_verdict_follows_from_the_numbers_beside_it(file: Path):
    claims, measured, verdicts = from_json(json.loads(file.read_text(encoding="utf-8")))
    again = judge(claims, measured)
    assert [verdict.outcome for verdict in again] == [verdict.outcome for verdict in verdicts]
    for verdict, stored in zip(again, verdicts, strict=True):
        assert verdict.seeds >= 8
        assert (verdict.coverage, verdict.agree) == (stored.coverage, stored.agree)
        for name in ("effect", "low", "high", "p", "p_corrected", "power"):
            assert getattr(verdict, name) == pytest.approx(getattr(stored, name), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_the_readmes_show_these_verdicts(file: Path):
    _, _, verdicts = from_json(json.loads(file.read_text(encoding="utf-8")))
    assert tables(verdicts) in (file.parent / "README.md").read_text(encoding="utf-8")
    whole = (HOME / "README.md").read_text(encoding="utf-8")
    if file.name == "numbers.json" and (file.parent / "night_numbers.json").exists():
        return  # the table of all papers has the larger tier
    rows = [markdown([verdict.cells()[1:]], HEADINGS).splitlines()[-1].strip("| ") for verdict in verdicts]
    assert all(row in whole for row in rows)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_the_margins_are_those_of_the_file_and_were_fixed_before_the_runs(file: Path):
    content = json.loads(file.read_text(encoding="utf-8"))
    known = margins(file.parent.name).values()
    assert all(margin.margin > 0 and margin.meaning for margin in known)
    day = min(re.findall(r"\d{4}-\d\d-\d\d", content["about"]))  # Commit 1234567; 2026-11-24 and 2026-11-25; ...
    fixed = {(margin.margin, margin.unit) for margin in known if margin.fixed.isoformat() <= day}
    assert {(claim.matters, claim.unit) for claim in from_json(content)[0]} <= fixed


def claims_of_reports() -> dict[str, Iterable[Claim]]:
    """The claims that some papers' report.py makes about the committed settings."""
    run = Run(Path(), {"largest": 20, "eval_prompts": 48, "eval_split": "test"}, [], {})
    return {
        black.PAPER: [claim for reward in REACHABLE for claim in black.claims_about(reward)],
        clark.PAPER: clark.claims(),
        gao.PAPER: gao.claims_about(32, 512, 8),
        rafailov.PAPER: rafailov.claims_about(),
        shao.PAPER: shao.claims_about(8, shao.first_numbers(run)),
        ziegler.PAPER: ziegler.claims_about(["target 3", "target 12"], [3, 12]),
    }


def test_the_committed_claims_are_those_that_the_reports_make():
    for paper, made in claims_of_reports().items():
        files = [HOME / paper / name for name in ("numbers.json", "night_numbers.json")]
        file = next(file for file in files if file.exists())
        claims, measured, _ = from_json(json.loads(file.read_text(encoding="utf-8")))
        assert claims == [claim for claim in made if set(claim.compared) <= set(measured)], paper


@pytest.mark.parametrize("archive", ARCHIVES, ids=[file.parent.name for file in ARCHIVES])
def test_the_committed_runs_give_the_committed_numbers_and_figures(archive: Path, tmp_path: Path):
    module = import_module(f"experiments.{archive.parent.name}.report")
    report = module.read(finished_runs(unpacked(archive, tmp_path)))
    numbers = archive.with_name(archive.name.replace("runs.zip", "numbers.json"))
    claims, measured, _ = from_json(json.loads(numbers.read_text(encoding="utf-8")))
    found = rounded(report.measured)
    assert found.keys() == measured.keys()
    for name, values in found.items():
        assert values.keys() == measured[name].keys()
        for seed, value in values.items():
            # A slope that is 0 comes out as 1e-17, another on another processor.
            assert value == pytest.approx(measured[name][seed], rel=1e-9, abs=1e-12), (name, seed)
    assert claims == [claim for claim in report.claims if set(claim.compared) <= set(measured)]
    readme = (archive.parent / "README.md").read_text(encoding="utf-8")
    assert [caption for caption in report.captions.values() if f"*{caption}*" not in readme] == []
    assert all(
        (archive.parent / numbers.name.replace("numbers.json", f"{name}.png")).exists() for name in report.figures
    )


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_no_judged_seed_has_chosen_a_setting(file: Path):
    _, measured, _ = from_json(json.loads(file.read_text(encoding="utf-8")))
    seeds = {seed for numbers in measured.values() for seed in numbers}
    assert min(seeds) >= 10  # settings were tuned and judged on seeds 0 to 2
    assert max(seeds) < 100  # seeds from 100 on are for tuning
