"""The gate: it repeats committed runs, passes what they gave, and stops a lost or a changed effect."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib import pyplot as plt

from experiments import gate
from experiments.claims import AGREES, from_json
from experiments.provenance import ROOT
from experiments.reproduce import PaperRuns, numbers_of, papers, read_json
from experiments.run_folders import Run, finished_runs, unpacked
from trimtab_cli.sweep.spec import read_sweep
from trimtab_cli.sweep.study import parameters_at

NFT = "zheng_2025_nft"
HOME = ROOT / "experiments"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The committed runs of the two methods that the gate repeats."""
    archive = HOME / NFT / "night_runs.zip"
    every = finished_runs(unpacked(archive, tmp_path_factory.mktemp("archive")))
    return [run for run in every if run.config["method"] in ("flow_grpo", "draft")]


@pytest.fixture
def flow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "EFFECTS", {NFT: gate.EFFECTS[NFT]})


def test_every_run_of_the_gate_is_one_of_the_night_tier():
    def points(paper: str, kind: str) -> list[str]:
        files = sorted((HOME / paper).glob(f"{kind}*.yaml"))
        return [
            yaml.safe_dump({"program": sweep.program, **parameters_at(sweep, point)})
            for sweep in map(read_sweep, files)
            for point in sweep.grid_points()
        ]

    assert set(papers(gate.TIER)) == set(gate.EFFECTS)
    for paper in gate.EFFECTS:
        repeated = points(paper, "gate")
        assert set(repeated) <= set(points(paper, "night")), paper
        seeds = {yaml.safe_load(point)["seed"] for point in repeated}
        assert len(seeds) == 16, paper


def test_the_effects_are_five_and_known():
    outcomes = {}
    for paper, texts in gate.EFFECTS.items():
        verdicts = from_json(read_json(numbers_of(paper, "night")))[2]
        outcomes |= {each.claim.text: each for each in verdicts if each.claim.text in texts}
    assert set(outcomes) == {text for texts in gate.EFFECTS.values() for text in texts}
    assert len(outcomes) == 5
    assert all(each.outcome == AGREES[each.claim.origin] and each.p < 1e-4 for each in outcomes.values())


def test_the_committed_runs_pass_to_the_bit(runs: Sequence[Run], flow_alone: None):
    found = gate.effects({NFT: (runs, gate.counterparts(runs, runs))})
    assert [effect.verdict.claim.text for effect in found] == list(gate.EFFECTS[NFT])
    assert all(effect.has_passed and str(effect).endswith("the same to the bit") for effect in found)
    assert all(effect.before == pytest.approx(effect.verdict.effect) for effect in found)


def weakened(run: Run, share: float, noise: float = 0.0) -> Run:
    """A run of Flow-GRPO on the reward whose gain is `share` of what it was, with noise in units of the reward."""
    if run.config["method"] != "flow_grpo" or run.config["reward"] != "warmth":
        return run
    before, after = (np.asarray(run.per_prompt[name]) for name in ("warmth_before", "warmth"))
    error = noise * np.random.default_rng(run.config["seed"]).standard_normal()
    changed = {**run.per_prompt, "warmth": list(before + share * (after - before) + error)}
    return replace(run, per_prompt=changed)


@pytest.mark.parametrize(
    ("share", "noise", "passes", "words"),
    [(1.0, 0.003, True, "no change is seen"), (0.5, 0.003, False, "CHANGED"), (0.0, 0.003, False, "CHANGED")],
)
def test_a_weaker_effect_is_stopped_and_noise_is_not(
    share: float, noise: float, passes: bool, words: str, runs: Sequence[Run], flow_alone: None
):
    new = [weakened(run, share, noise) for run in runs]
    grpo, draft = gate.effects({NFT: (new, gate.counterparts(new, runs))})
    assert grpo.has_passed == passes
    assert words in str(grpo)
    assert draft.has_passed


def test_an_effect_that_was_weak_already_is_stopped_because_the_judge_does_not_find_it(
    runs: Sequence[Run], flow_alone: None
):
    weak = [weakened(run, 0.0, 0.003) for run in runs]
    grpo, _ = gate.effects({NFT: (weak, weak)})
    assert grpo.p == 1.0
    assert not grpo.has_passed


def test_a_run_that_the_tracker_names_otherwise_has_its_counterpart(runs: Sequence[Run]):
    name = "tracker_kwargs.wandb.name"
    assert all(name in run.config for run in runs)
    renamed = [replace(run, config={**run.config, name: "another"}) for run in runs]
    assert gate.counterparts(renamed, runs) == runs


def test_a_run_without_a_counterpart_is_refused(runs: Sequence[Run]):
    others = [replace(run, config={**run.config, "pairs": 3}) for run in runs]
    with pytest.raises(ValueError, match="have no counterpart"):
        gate.counterparts(others, runs)
    with pytest.raises(ValueError, match="or several"):
        gate.counterparts(runs[:1], [*runs, *runs])


@pytest.mark.parametrize(("is_failed", "share", "status"), [(False, 1.0, 0), (True, 1.0, 1), (False, 0.3, 1)])
def test_the_program_stops_a_release(
    is_failed: bool,
    share: float,
    status: int,
    runs: Sequence[Run],
    flow_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    read = gate.finished_runs
    mine = [Path("new")]
    made = PaperRuns(NFT, gate.TIER, Path("out"), ["new"], ["run 1 failed"] * is_failed, 3.0)
    monkeypatch.setattr(gate, "run", lambda paper, tier, jobs: made)
    monkeypatch.setattr(
        gate,
        "finished_runs",
        lambda *folders: [weakened(run, share) for run in runs] if list(folders) == mine else read(*folders),
    )
    monkeypatch.setattr(sys, "argv", ["gate", NFT])
    monkeypatch.chdir(ROOT)
    assert gate.main() == status
    printed = capsys.readouterr().out
    assert ("failed  zheng_2025_nft: run 1 failed" in printed) == is_failed
    assert ("3 minutes" in printed) != is_failed
