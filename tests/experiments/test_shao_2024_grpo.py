"""GRPO and rejection-sampling fine-tuning on sums: measures and files of runs, and what the report reads."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments.best_of import powers
from experiments.claims import judge
from experiments.run_folders import Run, finished_runs
from experiments.samples import SAMPLES
from experiments.shao_2024_grpo import ppo, report, train
from experiments.shao_2024_grpo.answers import is_a_number, maj_at, pass_at
from experiments.shao_2024_grpo.variance import Variance

CONFIG = {
    "method": "grpo",
    "per_device_train_batch_size": 4,
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": 10,
    "majority_of": 4,
    "eval_prompts": 20,
    "eval_split": "test",
    "largest": 20,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Changes the working directory, and closes the figures that read() draws; writing a page closes its own."""
    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


# Answers ---------------------------------------------------------------------------------------------------------


def majority(answers: Sequence[str], truth: str) -> float:
    """1 if the most frequent answer is the truth; where n answers are equally frequent, 1 / n."""
    counts = Counter(answers)
    most = max(counts.values())
    return float(counts[truth] == most) / sum(count == most for count in counts.values())


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("truth", ["5", "6", "8", "9"])
def test_maj_at_k_is_the_mean_over_all_sets_of_answers(k: int, truth: str):
    lines = {"5": 0.5, "6": 0.3, "8": 0.2}
    expected = sum(
        prod(lines[line] for line in chosen) * majority(chosen, truth) for chosen in product(lines, repeat=k)
    )
    assert maj_at(k, lines, truth) == pytest.approx(expected, abs=1e-12)


def test_missing_lines_differ_from_one_another():
    lines, draw = {"5": 0.4, "6": 0.3}, random.Random(0)
    sets = [draw.choices(["5", "6", None], [0.4, 0.3, 0.3], k=8) for _ in range(20_000)]
    named = [[line or f"rare {i}" for i, line in enumerate(chosen)] for chosen in sets]
    assert maj_at(8, lines, "5") == pytest.approx(fmean(majority(chosen, "5") for chosen in named), abs=0.01)
    assert maj_at(2, {"5": 0.4}, "5") == pytest.approx(0.4)  # both right, or half of the chance that one is
    assert maj_at(4, {"6": 1.0}, "5") == 0


def test_pass_at_k_is_the_share_of_sets_with_a_right_answer():
    draws = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(0)) < 0.3
    for k in (1, 2, 4):
        assert pass_at(k, 0.3) == pytest.approx(float(draws[:, :k].any(1).float().mean()), abs=0.01)


def test_the_form_of_an_answer_is_a_number_alone_on_its_line():
    assert is_a_number([" 12", "13\n3 +", " 12 and", "", "1\n", "1,"]) == [1, 1, 0, 0, 1, 0]


def test_variance_is_that_of_the_vectors():
    vectors = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)) + 3
    variance = Variance()
    for vector in vectors:
        variance.add(vector)
    assert variance.value == pytest.approx(float(vectors.var(0).sum()), rel=1e-4)


# Runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_runs_of_the_methods_leave_what_the_report_reads(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "right", lambda completions, **_: [float(len(text) % 2) for text in completions])
    sizes = {"largest": 6, "eval_prompts": 2, "majority_of": 2, "samples": 1, "max_steps": 2, "num_generations": 4}
    quiet = {"model": model, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2}
    quiet |= {"logging_steps": 1}
    for method in train.METHODS:
        folder = str(tmp_path / "runs" / method)
        chosen = {"variance_prompts": 2} if method == "grpo" else {"only_after": True}
        train.main(*train.settings([], **sizes, **quiet, **chosen, method=method, output_dir=folder))
    steps = {"steps": 2, "batch_size": 8, "mini_batch_size": 8, "log_with": None}
    ppo_sizes = {name: sizes[name] for name in ("largest", "eval_prompts", "majority_of", "samples")}
    ppo.main(*ppo.settings([], **ppo_sizes, **steps, model=model, output_dir=str(tmp_path / "runs" / "ppo")))
    runs = {run.config["method"]: run for run in finished_runs(tmp_path / "runs")}
    assert {name: run.config["scale_rewards"] for name, run in runs.items() if name != "ppo"} == {
        "grpo": "group",
        "dr_grpo": "none",
        "online_rft": "raw",
        "rft": "raw",
        "form": "group",
    }
    assert runs["dr_grpo"].config["loss_type"] == "dr_grpo"
    assert "right_before" not in runs["rft"].per_prompt
    assert len(runs["grpo"].per_prompt["maj@2_before"]) == 2
    assert runs["grpo"].summary["variance/raw"] > 0
    read = report.read(list(runs.values()))
    assert set(read.measured) >= {f"right, {name}" for name in report.METHODS.values()}
    assert list(read.samples) == ["run", "sum", "before", "after", "right after"]
    assert read.samples["run"] == [name for name in report.METHODS.values() for _ in range(2)]
    assert all(text.endswith("=") for text in read.samples["sum"])


def test_offline_answers_are_those_of_the_pretrained_model(model: str, tmp_path: Path):
    """The policy changes at every step, but its answers do not; in online fine-tuning they do."""
    seen: dict[str, list[list[str]]] = {}

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen[method].append(completions)
        return [1.0, 0.0] * (len(completions) // 2)

    patch = pytest.MonkeyPatch()
    patch.setattr(train, "right", reward)
    sizes = {"largest": 6, "eval_prompts": 2, "majority_of": 2, "samples": 1, "max_steps": 3, "num_generations": 2}
    quiet = {"model": model, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2}
    quiet |= {"learning_rate": 0.5, "warmup_steps": 0, "only_after": True}
    with patch.context():
        for method in ("rft", "online_rft"):
            seen[method] = []
            train.main(*train.settings([], **sizes, **quiet, method=method, output_dir=str(tmp_path / method)))
    patch.undo()
    assert len(seen["rft"]) == len(seen["online_rft"]) == 3
    assert seen["rft"][0] == seen["online_rft"][0]
    assert seen["rft"][1:] != seen["online_rft"][1:]


def splits(run: train.RunConfig) -> dict[str, set[frozenset[str]]]:
    """Returns the numbers that each split's sums add."""
    return {
        name: {frozenset(prompt.splitlines()[-1].strip("=").split("+")) for prompt in rows["prompt"]}
        for name, rows in train.sums(run, seed=0).items()
    }


def test_no_sum_is_in_two_splits_in_either_order():
    found = splits(train.RunConfig(largest=9, eval_prompts=20))
    assert not found["test"] & found["train"]
    assert not found["tune"] & found["train"]
    assert not found["test"] & found["tune"]
    shots = {frozenset("23"), frozenset("76")}
    pairs = {frozenset((str(a), str(b))) for a in range(1, 10) for b in range(1, 10)}
    assert found["test"] | found["tune"] | found["train"] == pairs - shots


@pytest.mark.parametrize("setting", [{"majority_of": 12}, {"variance_prompts": 1}, {"variance_prompts": 49}])
def test_numbers_of_answers_that_cannot_be_evaluated_are_refused(setting: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(setting))):
        train.RunConfig(**setting)


# The report ------------------------------------------------------------------------------------------------------


def planted(method: str, seed: int, *, right: float, before: float = 0.3, never: int = 0, **config: Any) -> Run:
    """Returns a run on twenty sums with a little noise, and writes its samples into the folder.

    The first `never` sums have no right answer after training.
    """
    scores = {"right": right, "maj@4": right}
    summary = {"right": right} | {f"maj@{k}": right for k in (1, 2, 4)}
    summary |= {f"pass@{k}": train.pass_at(k, right) for k in powers(train.MOST)}
    if method == "grpo":
        scores |= {"right_before": before, "maj@4_before": before}
        summary |= {f"{name}_before": before for name in tuple(summary)}
        summary |= {"variance/raw": 4.0, "variance/centred": 1.0 + seed / 100}
    noise = random.Random(f"{method} {seed}")
    numbers = {name: [value + noise.gauss(0, 0.02) for _ in range(20)] for name, value in scores.items()}
    numbers["right"] = [0.0] * never + numbers["right"][never:]
    history = [{"step": step, "reward": 0.4 + step / 50} for step in (2, 4, 6, 8, 10)]
    settings = CONFIG | ({"batch_size": 32, "steps": 10} if method == "ppo" else {})
    settings |= {"method": method, "seed": seed} | config
    (folder := Path("runs", f"{method}-{seed}")).mkdir(parents=True, exist_ok=True)
    (folder / SAMPLES).write_text(json.dumps({"sum": ["1+2="], "after": [method]}))
    return Run(folder, settings, history, summary, numbers)


def test_planted_effects_have_their_names_seeds_and_signs():
    rights = {"grpo": 0.8, "dr_grpo": 0.8, "ppo": 0.7, "online_rft": 0.7, "rft": 0.5, "form": 0.4}
    runs = [planted(method, seed, right=right) for method, right in rights.items() for seed in range(10, 18)]
    read = report.read(runs)
    assert set(read.measured["right, RFT"]) == set(range(10, 18))
    assert read.measured["variance ratio, GRPO"][10] == pytest.approx(-1.862, abs=0.001)
    verdicts = judge(read.claims, read.measured)
    assert len(verdicts) == len(read.claims) == 10
    others = {verdict.claim.text for verdict in verdicts if verdict.outcome not in ("reproduced", "holds")}
    assert others == {
        "GRPO leaves Pass@4 as it is",  # 0.3 became 0.8, so that four answers have a right one more often
        "GRPO lowers Pass@1,024, although it raises the accuracy",
    }
    assert list(read.figures) == list(read.captions) == ["figure"]
    assert read.samples["after"] == ["grpo", "dr_grpo", "ppo", "online_rft", "rft", "form"]


def test_sums_that_are_never_right_after_training_lower_pass_at_large_k():
    runs = [planted("grpo", seed, right=0.8, never=12) for seed in range(10, 18)]
    verdicts = {verdict.claim.text: verdict for verdict in judge(*attrgetter("claims", "measured")(report.read(runs)))}
    lowered = verdicts["GRPO lowers Pass@1,024, although it raises the accuracy"]
    assert lowered.outcome == "reproduced"
    assert lowered.effect == pytest.approx(-12 / 20, abs=1e-6)


def test_an_order_that_is_not_the_papers_is_contradicted():
    rights = {"grpo": 0.5, "online_rft": 0.7}
    runs = [planted(method, seed, right=right) for method, right in rights.items() for seed in range(10, 18)]
    read = report.read(runs)
    outcomes = {verdict.claim.text: verdict.outcome for verdict in judge(read.claims, read.measured)}
    assert outcomes["GRPO is more accurate than online RFT after equally many answers"] == "does not carry over"
    assert "online RFT is more accurate than RFT after equally many answers" not in outcomes


def test_runs_that_do_not_compare_are_refused():
    run = planted("grpo", 0, right=0.6)
    with pytest.raises(ValueError, match=r"no accuracy per sum is in runs.grpo-0\. Give"):
        report.read([run, replace(run, per_prompt={})])
    with pytest.raises(ValueError, match="320 of grpo, 64 of rft"):
        report.read([run, planted("rft", 0, right=0.6, max_steps=2)])
    with pytest.raises(ValueError, match="have the seed 0"):
        report.read([run, planted("grpo", 0, right=0.7, learning_rate=1.0)])
