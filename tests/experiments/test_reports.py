"""What reports share: reading, grouping and judging finished runs, and measuring a policy from outside."""

import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments import reports
from experiments.claims import Claim, from_json, judge
from experiments.evaluation import answer_logprobs, continued, kl_of_samples
from experiments.huang_2024_details import report as huang
from experiments.provenance import in_words
from experiments.reports import Report, spread
from experiments.run_folders import (
    Run,
    append,
    by,
    close_folder,
    finished_run,
    finished_runs,
    of_seeds,
    open_folder,
    read_history,
    write_per_prompt,
)


def a_run(folder: Path, *, is_over: bool = True, **config: object) -> Path:
    open_folder(folder, config, goes_on=False)
    append(folder, {"step": 1, "reward": 0.5})
    if is_over:
        close_folder(folder, {"reward": 0.5})
    return folder


def test_a_run_is_read_back_once_it_is_over(tmp_path: Path):
    a_run(tmp_path / "sweep" / "b", seed=1)
    a_run(tmp_path / "sweep" / "a", seed=0)
    a_run(tmp_path / "sweep" / "c", is_over=False, seed=2)
    runs = finished_runs(tmp_path, tmp_path / "sweep" / "a")
    assert [(run.folder.name, run.config["seed"]) for run in runs] == [("a", 0), ("b", 1)]
    assert runs[0].history == [{"step": 1, "reward": 0.5}]
    assert runs[0].summary == {"reward": 0.5}
    assert runs[0].curve("step", "reward") == ([1], [0.5])


def test_a_run_that_begins_anew_is_not_over_and_one_that_goes_on_keeps_its_history(tmp_path: Path):
    a_run(tmp_path)
    open_folder(tmp_path, {"seed": 3}, goes_on=True)
    with pytest.raises(ValueError, match="no finished run"):
        finished_runs(tmp_path)
    assert len(read_history(tmp_path)) == 1
    for name in ("checkpoint-3", "checkpoints/checkpoint-4"):
        (tmp_path / name).mkdir(parents=True)
    open_folder(tmp_path, {"seed": 3}, goes_on=True)
    assert (tmp_path / "checkpoint-3").exists()
    open_folder(tmp_path, {"seed": 3}, goes_on=False)
    append(tmp_path, {"step": 7})
    assert read_history(tmp_path) == [{"step": 7}]
    assert {path.name for path in tmp_path.rglob("*checkpoint-*")} == {
        "_replaced-1-checkpoint-3",
        "_replaced-1-checkpoint-4",
    }


def test_history_has_a_row_for_each_step_and_the_later_number_counts(tmp_path: Path):
    for row in ({"step": 2, "x": 1}, {"step": 1, "x": 1}, {"step": 2, "y": 1}, {"step": 2, "x": 5}):
        append(tmp_path, row)
    assert read_history(tmp_path) == [{"step": 1, "x": 1}, {"step": 2, "x": 5, "y": 1}]


def run_with(reward: float = 0.0, **config: object) -> Run:
    return Run(Path(), config, [{"step": 1}, {"step": 2, "x": 3}], {"reward": reward})


def test_runs_are_grouped_by_what_varies():
    runs = [run_with(beta=beta, seed=seed) for seed in (0, 1) for beta in (0.5, 0.1)]
    assert {beta: len(group) for beta, group in by(runs, "beta").items()} == {0.1: 2, 0.5: 2}
    assert list(by(runs, "beta")) == [0.1, 0.5]
    assert list(by(runs, "beta", "seed")) == [(0.1, 0), (0.1, 1), (0.5, 0), (0.5, 1)]


def test_a_curve_has_the_steps_at_which_both_were_logged():
    assert run_with().curve("step", "x") == ([2], [3])


@pytest.mark.parametrize(
    ("values", "shown"), [([0.5], "0.500"), ([3, 1, 2], "2.000 (1.000 to 3.000)"), ([1, 2], "1.500 (1.000 to 2.000)")]
)
def test_spread_is_the_median_with_the_range(values: list[float], shown: str):
    assert spread(values) == shown


def test_settings_that_differ_are_shown_with_all_their_values():
    shown = reports.settings([run_with(seed=seed, beta=0.1) for seed in (2, 0, 1)])
    assert shown == {"seed": "0, 1, 2", "beta": "0.1"}
    assert reports.settings([run_with(k=4), run_with(target=6.0)]) == {"k": "4", "target": "6.0"}
    assert reports.settings([run_with(seed=seed) for seed in range(13)]) == {"seed": "13 values"}


@pytest.mark.parametrize(("effect", "code"), [(0.5, 0), (0.0, 1), (-0.5, 1)])
def test_the_program_exits_by_its_verdicts_and_leaves_what_they_follow_from(
    effect: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def read(runs: Sequence[Run]) -> Report:
        rewards = of_seeds(runs, lambda run: run.summary["reward"] - 0.5 + effect + run.config["seed"] / 100)
        claim = Claim("the reward | rises", ("reward",), "more", 0.1, "points", number="0.7", place="figure 2")
        samples = {"query": ["a|b"], "after": ["line\nbreak"]}
        return Report({"reward": rewards}, [claim], {"curve": plt.figure()}, {"curve": "two seeds"}, samples)

    for seed in range(-4, 5):
        a_run(tmp_path / "runs" / str(seed), seed=seed)
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        reports.main("title", "claim", read)
    assert ended.value.code == code
    stored = json.loads((tmp_path / "out" / "numbers.json").read_text())
    claims, measured, verdicts = from_json(stored)
    assert judge(claims, measured) == verdicts
    assert (
        verdicts[0].outcome == {0.5: "reproduced", 0.0: "no effect that matters", -0.5: "does not carry over"}[effect]
    )
    assert "<title>title</title>" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "curve.png").exists()
    assert (tmp_path / "out" / "curve.pdf").exists()
    assert capsys.readouterr().out.count("the reward | rises") == 1
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| the reward \\| rises (adapted: figure 2) | 0.7 |" in text
    assert "![title: curve](curve.png)\n\n*two seeds*" in text
    assert "| a\\|b | line break |" in text
    assert "torch " in text


def test_one_run_has_its_effects_in_place_of_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def read(runs: Sequence[Run]) -> Report:
        rewards = of_seeds(runs, lambda run: run.summary["reward"])
        claim = Claim("the reward rises", ("reward",), "more", 0.1, "points")
        return Report({"reward": rewards}, [claim], {}, {})

    for number, words in ((1, "the reward rises: +0.5 points\none run"), (2, "undecided     the reward rises")):
        a_run(tmp_path / str(number), seed=number)
        reports.report_on("title", "claim", read, finished_runs(tmp_path), tmp_path)
        assert capsys.readouterr().out.startswith(words)


def test_every_start_of_a_run_is_recorded(tmp_path: Path):
    a_run(tmp_path, seed=4)
    open_folder(tmp_path, {"seed": 4}, goes_on=True)
    close_folder(tmp_path, {"reward": 0.5})
    (run,) = finished_runs(tmp_path)
    assert len(run.starts) == 2
    assert set(run.starts[0]) == {"commit", "is_changed", "day", "machine", "python", "versions", "command"}
    words = in_words(run.starts)
    assert run.starts[0]["commit"] in words
    assert f"torch {version('torch')}" in words  # PyPI's builds leave the local suffix of torch.__version__ out
    starts = [run.starts[0], {**run.starts[0], "commit": "0ther", "is_changed": True, "day": "2000-01-02"}]
    starts += [{**run.starts[0], "commit": "third", "is_changed": False, "day": "2000-01-01"}] * 2
    commit, day = (run.starts[0][name] for name in ("commit", "day"))
    commit += " with uncommitted changes" * run.starts[0]["is_changed"]
    start = f"Commit {commit}, 0ther with uncommitted changes and third; 2000-01-01, 2000-01-02 and {day}; "
    assert in_words(starts).startswith(start)


def test_a_run_of_another_experiment_is_refused_by_its_folder(tmp_path: Path):
    run = finished_run(a_run(tmp_path / "other", seed=2))
    assert by([run], "seed") == {2: [run]}
    with pytest.raises(ValueError, match="other has no setting k; runs of this report's own programs are needed"):
        by([run], "seed", "k")
    with pytest.raises(ValueError, match="has no setting whiten_advantages"):
        huang.read([run])


def test_numbers_of_prompts_are_read_back_by_seed(tmp_path: Path):
    for seed in (2, 1):
        write_per_prompt(a_run(tmp_path / str(seed), seed=seed), {"reward": [seed, 0.5]})
    runs = finished_runs(tmp_path)
    assert of_seeds(runs, lambda run: run.per_prompt["reward"]) == {1: [1, 0.5], 2: [2, 0.5]}
    with pytest.raises(ValueError, match="one run of each setting and seed"):
        of_seeds([*runs, runs[0]], lambda run: 0.0)
    places = {"output_dir": "elsewhere", "tracker_kwargs.wandb.name": "another"}
    assert of_seeds([runs[0], replace(runs[1], config={"seed": 2, **places})], lambda run: 0.0).keys() == {1, 2}
    steps = [replace(run, config={**run.config, "steps": count}) for run, count in zip(runs, (30, 60), strict=True)]
    with pytest.raises(ValueError, match=r"differ in more than the seed: steps \(30 and 60\)"):
        of_seeds(steps, lambda run: 0.0)


def all_answers(policy: Any, reference: Any) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every answer of two tokens to one prompt: its probability, its log-ratio, and its estimate of the KL."""
    size = policy.config.vocab_size
    rows = [torch.tensor([first, second]) for first in range(size) for second in range(size)]
    prompts = [tiny.rows(1, 4, 4)[0]] * len(rows)
    ours, theirs = (torch.tensor(answer_logprobs(model, prompts, rows)) for model in (policy, reference))
    steps = torch.tensor([kl_of_samples(policy, reference, prompts[:1], [row]) for row in rows[::size]])
    return prompts, ours.exp(), ours - theirs, steps.repeat_interleave(size)


def test_the_kl_by_exact_steps_has_the_expectation_of_the_log_ratio_and_less_variance():
    policy, reference = tiny.llama(0).train(), tiny.llama(1)
    _, probabilities, gaps, steps = all_answers(policy, reference)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-5)
    exact = float((probabilities * gaps).sum())  # the KL of whole answers, by its definition
    assert float((probabilities * steps).sum()) == pytest.approx(exact, rel=1e-4)
    of_gaps, of_steps = (float((probabilities * (values - exact) ** 2).sum()) for values in (gaps, steps))
    assert of_steps < of_gaps / 2
    assert policy.training


def test_the_kl_of_samples_is_a_mean_over_answers_of_any_length():
    policy, reference = tiny.llama(0), tiny.llama(1)
    prompts, answers = tiny.rows(5, 2, 4), tiny.rows(5, 1, 5, seed=1)
    alone = [kl_of_samples(policy, reference, [prompt], [row]) for prompt, row in zip(prompts, answers, strict=True)]
    assert min(alone) > 0
    assert kl_of_samples(policy, reference, prompts, answers, batch_size=2) == pytest.approx(sum(alone) / 5, rel=1e-4)
    assert kl_of_samples(policy, policy, prompts, answers) == 0


def test_log_probabilities_of_answers_are_those_of_a_plain_forward_pass():
    model, prompts, answers = tiny.llama(0), tiny.rows(5, 2, 4), tiny.rows(5, 1, 5, seed=1)
    plain = [float(tiny.taken_of(model, *row).sum()) for row in zip(prompts, answers, strict=True)]
    assert answer_logprobs(model, prompts, answers, batch_size=2) == pytest.approx(plain, rel=1e-4)


def test_a_continuation_keeps_the_space_before_it():
    model, tokenizer = tiny.llama(0), tiny.tokenizer()
    prompts = ["a b", "c"]
    rows, texts = continued(model, tokenizer, prompts, max_new_tokens=4, seed=0)
    for prompt, row, text in zip(prompts, rows, texts, strict=True):
        ids = torch.cat([torch.tensor(tokenizer(prompt)["input_ids"]), row])
        assert prompt + text == tokenizer.decode(ids, skip_special_tokens=True)
    again, _ = continued(model, tokenizer, prompts, max_new_tokens=4, seed=0)
    assert all(torch.equal(one, other) for one, other in zip(rows, again, strict=True))


def test_a_run_has_a_page_of_its_own_outside_of_a_sweep_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def read(runs: Sequence[Run]) -> Report:
        seen.append([run.folder for run in runs])
        return Report({}, [], {}, {})

    folder = a_run(tmp_path, seed=0)
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    reports.report_on_run("title", "claim", read, [folder])
    assert not (folder / "report.html").exists()
    monkeypatch.delenv("WANDB_SWEEP_ID")
    a_run(folder / "sweep" / "0", seed=0)  # of another day
    reports.report_on_run("title", "claim", read, [folder])
    assert seen == [[folder]]
    page = (folder / "report.html").read_text()
    assert "Nothing is judged" in page
    assert "verdict" not in page  # without rows there is no table, and no word about verdicts


def test_runs_that_were_measured_on_other_prompts_are_not_judged_together(tmp_path: Path):
    for seed, split in enumerate(("test", "tune")):
        folder = tmp_path / split
        open_folder(folder, {"seed": seed, "eval_split": split, "eval_prompts": 2}, goes_on=False)
        append(folder, {"step": 1})
        close_folder(folder, {"reward": 0.5})
    with pytest.raises(ValueError, match=r"several values of eval_split: test \(.*\), tune \(.*\); runs that are meas"):
        reports.report_on("title", "claim", lambda runs: Report({}, [], {}, {}), finished_runs(tmp_path), tmp_path)


def test_a_report_of_packed_runs_is_that_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, bool, list[Any]]] = []

    def read(runs: Sequence[Run]) -> Report:
        seen.extend((run.config["seed"], (run.folder / "after.png").exists(), [*run.history]) for run in runs)
        claim = Claim("scores | count", ("scores",), "more", 1.0, "points")
        return Report({"scores": of_seeds(runs, lambda run: run.summary["score"])}, [claim], {}, {})

    for seed in (1, 2):
        folder = tmp_path / "runs" / str(seed) / "of one reward"
        open_folder(folder, {"seed": seed}, goes_on=False)
        append(folder, {"step": 1, "loss": 0.1 + seed})
        (folder / "after.png").write_bytes(b"a picture")
        (folder / "weights.bin").write_bytes(b"weights")
        close_folder(folder, {"score": 0.1 * seed})
    for name in ("out", "first", "both"):
        (tmp_path / name).mkdir()
    for words in (
        ["runs", "--out", "out", "--pack"],
        ["out/runs.zip", "--out", "."],
        ["runs/1", "--out", "first", "--pack"],
        ["first/runs.zip", "runs/2", "--out", "both", "--pack"],
        ["out/runs.zip"],
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["report.py", *words])
        with pytest.raises(SystemExit) as end:
            reports.main("t", "c", read)
    assert end.value.code == 2  # an archive is no place for a page
    assert seen[:2] == [(1, True, [{"step": 1, "loss": 1.1}]), (2, True, [{"step": 1, "loss": 2.1}])]
    assert seen[2:4] == [seen[0], (2, False, seen[1][2])]  # the pictures of the first seed are enough
    assert zipfile.ZipFile("both/runs.zip").namelist() == zipfile.ZipFile("out/runs.zip").namelist()
    assert (tmp_path / "numbers.json").read_text() == (tmp_path / "out" / "numbers.json").read_text()
    assert "weights" not in str(zipfile.ZipFile(tmp_path / "out" / "runs.zip").namelist())
