"""The pipeline of Stiennon et al.: its pieces by hand, the whole on a tiny model, and the report's conclusions."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import wandb
from datasets import Dataset, DatasetDict
from matplotlib import pyplot as plt
from tests.lm import tiny
from tools.chaos.wandb_files import RunFile
from transformers import AutoModelForSequenceClassification

from experiments.best_of import expected_best_of
from experiments.claims import judge
from experiments.run_folders import Run, read_history
from experiments.stiennon_2020_summarize import comparisons, stages, train
from experiments.stiennon_2020_summarize import judgements as judgements_program
from experiments.stiennon_2020_summarize.judgements import JudgementsConfig, by_instruction, learn_judgements
from experiments.stiennon_2020_summarize.report import read

SIZES = {
    "max_length": 64,
    "max_new_tokens": 5,
    "sft_steps": 2,
    "sft_batch_size": 2,
    "comparisons": (2, 4),
    "eval_comparisons": 4,
    "reward_batch_size": 2,
    "best_of": (2, 3),
    "kl_coefs": (0.05, 0.0),
    "eval_prompts": 4,
    "samples": 2,
}
PPO = {"steps": 2, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3, "accelerator_kwargs": {"cpu": True}}


# Pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "chance"), [(0.0, 0.5), (log(3), 0.75), (-log(3), 0.25), (-5000.0, 0.0)])
def test_a_labeller_prefers_by_bradley_and_terry(gap: float, chance: float):
    rng = random.Random(0)
    draws = [comparisons.preferred_first(0.2 * gap + 1, 1.0, temperature=0.2, rng=rng) for _ in range(4000)]
    assert fmean(draws) == pytest.approx(chance, abs=0.025)


def test_without_noise_the_better_answer_is_preferred_and_a_tie_is_a_toss():
    rng = random.Random(0)
    assert all(comparisons.preferred_first(0.1, 0.0, temperature=0, rng=rng) for _ in range(50))
    assert not any(comparisons.preferred_first(0.0, 0.1, temperature=0, rng=rng) for _ in range(50))
    assert 0.4 < fmean(comparisons.preferred_first(1.0, 1.0, temperature=0, rng=rng) for _ in range(1000)) < 0.6


def test_pairs_of_which_nothing_can_be_learnt_are_left_out():
    pairs = [(" good", " bad"), (" same", "same "), ("", " x"), (" bad", " good")]
    rows = comparisons.compared(list("abcd"), pairs, [(1, -1), (0, 0), (0, 1), (-1, 1)], temperature=0, seed=0)
    assert rows.to_list() == [
        {"prompt": prompt, "chosen": " good", "rejected": " bad", "gold_chosen": 1, "gold_rejected": -1}
        for prompt in "ad"
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_best_of_n_is_the_mean_over_all_draws_of_n(n: int):
    golds, proxies = [0.3, -1.0, 2.0, 0.7], [4.0, 1.0, 3.0, 2.0]
    every = [max(draw, key=lambda i: proxies[i]) for draw in combinations(range(4), n)]
    ranked = [golds[i] for i in sorted(range(4), key=lambda i: -proxies[i])]
    assert expected_best_of(ranked, n) == pytest.approx(fmean(golds[i] for i in every))


@pytest.mark.parametrize("n", [0, 5])
def test_best_of_more_than_there_are_is_refused(n: int):
    with pytest.raises(ValueError, match="of 4 samples"):
        expected_best_of([1.0] * 4, n)


def rows_of(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p {i}", "completion": " c"} for i in range(count)]


def test_splits_are_found_in_files_and_in_what_was_saved(tmp_path: Path):
    for name, count in (("train", 3), ("validation", 2)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({**row, "id": 0}) for row in rows_of(count)))
    train_part, held_out = comparisons.splits(str(tmp_path), ["prompt", "completion"])
    assert (train_part.to_list(), held_out.to_list()) == (rows_of(3), rows_of(2))
    saved = DatasetDict({"train": train_part, "test": held_out})
    saved.save_to_disk(tmp_path / "saved")
    assert comparisons.splits(str(tmp_path / "saved"), ["prompt"])[1].to_list() == [
        {"prompt": f"p {i}"} for i in (0, 1)
    ]
    with pytest.raises(ValueError, match=r"lacks.*chosen"):
        comparisons.splits(str(tmp_path / "saved"), ["prompt", "chosen"])
    DatasetDict({"train": train_part}).save_to_disk(tmp_path / "alone")
    with pytest.raises(ValueError, match="test or validation"):
        comparisons.splits(str(tmp_path / "alone"), ["prompt"])


# The pipeline ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Writes a tiny Llama and its tokenizer, and returns their folder."""
    folder = tmp_path / "model"
    tiny.llama(max_position_embeddings=256).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def books(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = {
        split: {f"the {split} {a}{b}": " was so good to me." for a in letters[start:] for b in letters[:10]}
        for split, start in (("train", 0), ("test", 16))
    }
    monkeypatch.setattr(stages, "endings", texts.__getitem__)
    monkeypatch.setattr(comparisons, "load_gold", lambda name, device: gold)


def gold(texts: Sequence[str]) -> list[float]:
    """A gold score without ties that single letters can earn."""
    return [text.count("e") + len(text) / 100 for text in texts]


def run_of(tmp_path: Path, model: str, ppo: dict[str, Any] | None = None, **run: Any) -> Path:
    folder = tmp_path / "run"
    quiet = {"model": model, "log_with": None, "output_dir": str(folder)}
    train.main(*train.settings([], **quiet | PPO | SIZES | (ppo or {}) | run))
    return folder


@pytest.mark.slow
def test_two_steps_of_each_stage_leave_numbers_samples_and_a_report(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = run_of(tmp_path, model)
    summary = json.loads((folder / "summary.json").read_text())
    assert {"accuracy_2", "accuracy_4", "gold_reference", "gold_sft", "gold_best_of_2", "gold_best_of_3"} < set(summary)
    per_prompt = json.loads((folder / "per_prompt.json").read_text())
    assert set(per_prompt) == {"gold_sft", "gold_best_of_2", "gold_best_of_3", "gold_ppo_0.05", "gold_ppo_0"}
    for name, values in per_prompt.items():
        assert len(values) == 4
        assert fmean(values) == pytest.approx(summary[name])
    assert summary["kl_best_of_3"] == pytest.approx(log(3) - 2 / 3)
    assert 0 != summary["kl_ppo_0"] != summary["kl_ppo_0.05"] != 0
    assert summary["proxy_sft"] < summary["proxy_best_of_2"] < summary["proxy_best_of_3"]
    history = read_history(folder)
    steps = [(row["ppo/coefficient"], row["ppo/step"]) for row in history if "ppo/step" in row]
    assert steps == [(0.05, 1), (0.05, 2), (0.0, 1), (0.0, 2)]
    assert [row["reward/comparisons"] for row in history if "reward/comparisons" in row] == [2, 4]
    assert len([row for row in history if "sft/eval_loss" in row]) == 2
    assert history[-1]["final/gold_ppo_0.05"] == summary["gold_ppo_0.05"]
    samples = json.loads((folder / "samples.json").read_text())
    assert {len(cells) for cells in samples.values()} <= {3, 4}  # two prompts, and the three worst
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert (folder / "report.html").exists()
    assert "PPO (coefficient 0.05) beats fine-tuning" in capsys.readouterr().out


@pytest.mark.slow
def test_stages_that_are_done_are_not_done_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("killed")

    folder = run_of(tmp_path, model)
    expected = json.loads((folder / "summary.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(train, "optimise", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_of(tmp_path, model)
    assert not (folder / "summary.json").exists()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"sft", "comparisons", "reward"}
    before = read_history(folder)
    with monkeypatch.context() as patch:
        for name in ("fine_tune", "compare", "learn_rewards"):
            patch.setattr(train, name, killed)
        run_of(tmp_path, model, resume=True, keep_models=True)
    assert json.loads((folder / "summary.json").read_text()) == pytest.approx(expected)
    assert read_history(folder)[: len(before)] == before
    assert (folder / "ppo_0" / "config.json").exists()


@pytest.mark.slow
def test_ppo_goes_on_from_its_checkpoint(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = json.loads((run_of(tmp_path, model, {"save_steps": 1}) / "summary.json").read_text())
    save = stages.PPOTrainer.save_checkpoint

    def killed(self: Any, folder: Any) -> None:
        save(self, folder)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(stages.PPOTrainer, "save_checkpoint", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_of(tmp_path, model, {"save_steps": 1})
    folder = run_of(tmp_path, model, {"save_steps": 1}, resume=True)
    assert json.loads((folder / "summary.json").read_text()) == pytest.approx(expected)
    assert [row["ppo/step"] for row in read_history(folder) if "ppo/step" in row] == [1, 2, 1, 2]


@pytest.mark.slow
def test_values_start_as_the_reward_models_scores_which_are_0_on_average_for_human_answers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: dict[str, Any] = {}

    class Spied(stages.PPOTrainer):
        def step(self, queries: Any, responses: Any, scores: Any) -> Any:
            if not seen:
                seen["text"] = "the film was good"
                ids = torch.tensor([*self.tokenizer(seen["text"])["input_ids"], self.tokenizer.eos_token_id])
                rows = [ids], [ids[:1]]  # there is a value wherever a next token is predicted
                with torch.no_grad():
                    _, _, seen["value"], _ = self.batched_forward_pass(
                        self.model, *rows, self.prepare_model_inputs(*rows)
                    )
            return super().step(queries, responses, scores)

    monkeypatch.setattr(stages, "PPOTrainer", Spied)
    folder = run_of(tmp_path, model, keep_models=True)
    proxy = stages.normalised_proxy(folder / "reward")
    assert seen["value"].item() == pytest.approx(proxy([seen["text"]])[0], rel=1e-4)
    run = train.RunConfig(model=model, **SIZES)
    references = [row["prompt"] + row["completion"] for row in stages.read_data(run, 0).policy]
    assert fmean(proxy(references)) == pytest.approx(0, abs=1e-5)
    assert fmean(stages.raw_proxy(folder / "reward")(references)) != pytest.approx(0, abs=1e-3)
    start, learnt = (
        AutoModelForSequenceClassification.from_pretrained(folder / name, num_labels=1) for name in ("sft", "reward")
    )
    gaps = [
        (a - b).detach().abs().max().item()
        for a, b in zip(start.model.parameters(), learnt.model.parameters(), strict=True)
    ]
    assert 0 < max(gaps) < 0.05  # the reward model starts from the fine-tuned one


@pytest.mark.slow
def test_posts_and_preferences_of_files_are_taken(model: str, tmp_path: Path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    posts = [{"prompt": f"post {a}", "completion": f" says {a}."} for a in letters]
    pairs = [{"prompt": f"post {a}", "chosen": " good one", "rejected": " bad"} for a in letters]
    for kind, rows in (("posts", posts), ("pairs", pairs)):
        (tmp_path / kind).mkdir()
        for part, chosen in (("train", rows[:18]), ("validation", rows[18:])):
            (tmp_path / kind / f"{part}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    scorer = tiny.scorer()
    scorer.save_pretrained(tmp_path / "gold")
    tiny.tokenizer().save_pretrained(tmp_path / "gold")
    names = {name: str(tmp_path / name) for name in ("posts", "pairs", "gold")}
    folder = run_of(
        tmp_path, model, dataset=names["posts"], preferences=names["pairs"], gold=names["gold"], keep_models=True
    )
    assert json.loads((folder / "samples.json").read_text())["prompt"][:2] == ["post s", "post t"]
    known = DatasetDict.load_from_disk(folder / "comparisons")
    assert set(known["train"]["chosen"]) == {" good one"}
    assert len(known["test"]) == 4
    scores = comparisons.gold_score(names["gold"])(["post s"], [" says s."])
    assert scores == comparisons.RewardModel(scorer, tiny.tokenizer())(["post s"], [" says s."])


@pytest.mark.slow
def test_without_a_step_of_fine_tuning_the_model_is_taken_as_it_is_and_every_text_is_the_policys(
    model: str, tmp_path: Path
):
    folder = run_of(tmp_path, model, sft_steps=0, keep_models=True)
    assert (folder / "sft" / "model.safetensors").read_bytes() == Path(model, "model.safetensors").read_bytes()
    run = train.RunConfig(model=model, **SIZES | {"sft_steps": 0})
    data = stages.read_data(run, 0)
    assert (len(data.sft), len(data.policy)) == (0, 260)
    assert data.held_out[0] == {"prompt": "the test qa", "completion": " was so good to me."}


def test_the_labeller_reads_prompt_and_answer():
    assert comparisons.gold_score("minilm")(["the", "a"], [" end", " b"]) == gold(["the end", "a b"])


@pytest.mark.parametrize("sizes", [{"comparisons": (4, 4000)}, {"eval_prompts": 100}])
def test_too_few_comparisons_are_refused(model: str, tmp_path: Path, sizes: dict[str, Any]):
    with pytest.raises(ValueError, match=r"comparisons=.*Lower them"):
        run_of(tmp_path, model, **sizes)


@pytest.mark.parametrize(
    "settings",
    [{"comparisons": ()}, {"best_of": (0, 4)}, {"kl_coefs": ()}, {"kl_coefs": (-1.0,)}, {"preferences": "x"}],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"[01] or more|Set gold"):
        train.RunConfig(**settings)


def test_flags_and_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        train.settings(["--help"])
    assert "--sft_learning_rate" in capsys.readouterr().out
    run, ppo = train.settings(["--comparisons=[3, 5]", "--steps=7"])
    assert (run.comparisons, ppo.steps) == ((3, 5), 7)


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_wandb: None) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.finish()


@pytest.mark.slow
def test_the_pipeline_is_one_run_of_wandb(model: str, tmp_path: Path, tracked: None):
    run_of(tmp_path, model, {"log_with": "wandb"})
    wandb.teardown()
    (file,) = tmp_path.rglob("run-*.wandb")
    record = RunFile(file).update()
    assert record.exit_code == 0
    assert (
        record.summary["final/gold_ppo_0"] == json.loads((tmp_path / "run" / "summary.json").read_text())["gold_ppo_0"]
    )
    assert record.config["sft_steps"] == record.config["steps"] == 2
    assert {"samples._type", "comparisons._type"} <= set(record.summary)


# Real judgements -------------------------------------------------------------------------------------------------


def judgements(count: int, instructions: int, offset: int) -> Dataset:
    """Returns pairs; the better answer has the letter e, which the judge likes, and is shorter in every third pair."""
    rows = []
    for i in range(count):
        word = "abcdfghi"[i % 8] * (1 + i % 5)
        better, worse = f"{word} e{word}", f"{word} o{word}" + " oo" * (i % 3 == 0)
        rows.append({"prompt": f"say {offset + i % instructions}", "chosen": better, "rejected": worse})
    return Dataset.from_list(rows)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    splits = DatasetDict({"train": judgements(64, 8, 0), "test": judgements(24, 4, 100)})
    monkeypatch.setattr(judgements_program, "preferences", lambda annotator, held_out: splits)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


def small(model: str, **settings: Any) -> JudgementsConfig:
    sizes = {"pairs": (2, 64), "pool": 64, "held_out_pairs": 24, "penalty": 0.01, "tokens": 16}
    return JudgementsConfig(models=(model,), **sizes | settings)


def test_two_runs_begin_with_different_halves_of_the_texts_and_get_the_same_states(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    texts = ["the", "a cat", "he ran", "so", "the end", "dog", "abc"]
    whole = judgements_program.part_of_states(model, texts, 16)
    monkeypatch.setattr(judgements_program, "PART", 2)
    read: list[list[str]] = []
    part_of_states = judgements_program.part_of_states
    monkeypatch.setattr(
        judgements_program,
        "part_of_states",
        lambda model, part, tokens: (read.append(list(part)), part_of_states(model, part, tokens))[1],
    )
    for seed, first in ((10, ["the", "a cat"]), (11, ["the end", "dog"])):
        monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / f"cache-{seed}"))
        read.clear()
        torch.testing.assert_close(judgements_program.states_of(model, texts, 16, seed=seed), whole)
        assert read[0] == first
        assert sorted(map(len, read)) == [1, 2, 2, 2]


@pytest.mark.usefixtures("judged")
def test_a_head_on_a_frozen_model_learns_what_the_judge_likes(model: str):
    accuracies = learn_judgements(small(model))
    assert set(accuracies) == {"judged_longer", "judged_model_2", "judged_model_64"}
    assert {len(values) for values in accuracies.values()} == {4}  # one for each instruction
    assert fmean(accuracies["judged_model_64"]) > 0.9
    assert fmean(accuracies["judged_longer"]) == 0
    again = learn_judgements(small(model, seed=1))
    assert again["judged_longer"] == accuracies["judged_longer"]


@pytest.mark.usefixtures("judged")
def test_labels_that_say_nothing_are_learnt_to_chance(model: str, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(0)
    pairs = DatasetDict({name: toss(judgements(200, 50, offset), rng) for name, offset in (("train", 0), ("test", 99))})
    monkeypatch.setattr(judgements_program, "preferences", lambda annotator, held_out: pairs)
    accuracies = learn_judgements(small(model, pairs=(200,), pool=200, held_out_pairs=200, penalty=1.0))
    assert 0.35 < fmean(accuracies["judged_model_200"]) < 0.65


def toss(rows: Dataset, rng: random.Random) -> Dataset:
    """Swaps the answers of each pair with probability one half."""
    pairs = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if rng.random() < 0.5 else row
        for row in rows.to_list()
    ]
    return Dataset.from_list(pairs)


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("name", ["pool", "held_out_pairs"])
def test_more_judgements_than_there_are_are_refused(name: str, model: str):
    with pytest.raises(ValueError, match=rf"{name}=65 needs more than the (64|24) judgements"):
        learn_judgements(small(model, **{name: 65}))


@pytest.mark.parametrize("settings", [{"models": ()}, {"pairs": ()}, {"pairs": (0,)}, {"pairs": (128,), "pool": 64}])
def test_heads_that_learn_from_nothing_or_from_more_than_the_pool_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"is empty|numbers of 1 to pool"):
        JudgementsConfig(**settings)


@pytest.mark.usefixtures("judged")
def test_the_program_writes_an_accuracy_for_each_number_of_judgements_and_a_report(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    judgements_program.main(small(model, output_dir=str(tmp_path / "run")))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = read_history(tmp_path / "run")
    assert [(row["step"], row["accuracy/model"]) for row in rows] == [
        (count, summary[f"judged_model_{count}"]) for count in (2, 64)
    ]
    assert "head on model: accuracy rises" in capsys.readouterr().out
    assert (tmp_path / "run" / "judgements.png").exists()


def test_an_accuracy_is_that_of_its_instruction():
    pairs = [{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in ("x", "y", "x", "x")]
    assert by_instruction(pairs, torch.tensor([1.0, 0.0, 0.0, 0.5])) == [0.5, 0.0]


# The report ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """Closes the figures that read() draws; otherwise only writing a page closes them."""
    yield
    plt.close("all")


def planted(seed: int, **changes: float) -> list[Run]:
    """Returns runs of both programs in which every claim holds, unless `changes` moves a gold, proxy or accuracy."""
    return [planted_policies(seed, **changes), planted_heads(seed + 50, **changes)]


def planted_heads(seed: int, **changes: float) -> Run:
    rng = random.Random(seed)
    levels = {"judged_longer": 0.6}
    levels |= {f"judged_stories15m_{2**k}": 0.5 + 0.02 * k for k in (5, 6, 7)}
    levels |= {f"judged_smollm2_{2**k}": 0.6 + 0.02 * k for k in (5, 6, 7)}
    levels |= {name: level for name, level in changes.items() if name in levels}
    per_prompt = {name: [level + rng.gauss(0, 0.01) for _ in range(12)] for name, level in levels.items()}
    return Run(Path("nowhere"), {"seed": seed}, [], {}, per_prompt)


def planted_policies(seed: int, **changes: float) -> Run:
    rng = random.Random(seed)
    levels = {"gold_sft": 0.1, "gold_best_of_4": 0.2, "gold_best_of_8": 0.3, "gold_ppo_0.2": 0.4, "gold_ppo_0.05": 0.7}
    levels |= {"gold_ppo_0": 0.5}
    levels |= {name: level for name, level in changes.items() if name in levels}
    per_prompt = {name: [level + rng.gauss(0, 0.01) for _ in range(12)] for name, level in levels.items()}
    proxies = {"sft": 0.0, "best_of_4": 0.5, "best_of_8": 0.8, "ppo_0.2": 1.0, "ppo_0.05": 2.0, "ppo_0": 4.0}
    summary = {f"proxy_{name}": changes.get(f"proxy_{name}", value + seed / 100) for name, value in proxies.items()}
    summary |= {f"kl_{name}": value for name, value in proxies.items()} | {"gold_reference": 0.05}
    summary |= {name: fmean(values) for name, values in per_prompt.items()}
    history = [
        {"step": i, "ppo/step": i, "ppo/coefficient": c, "ppo/mean_scores": i, "ppo/gold": i, "objective/kl": i}
        for c in (0.2, 0.05, 0.0)
        for i in (1, 2)
    ]
    return Run(Path("nowhere"), {"seed": seed}, history, summary, per_prompt)


def outcomes(runs: list[Run]) -> dict[str, str]:
    report = read(runs)
    return {verdict.claim.text: verdict.outcome for verdict in judge(report.claims, report.measured)}


def test_planted_effects_are_reproduced():
    runs = [run for seed in range(8) for run in planted(seed)]
    results = outcomes(runs)
    assert len(results) == 7
    assert set(results.values()) == {"reproduced"}
    report = read(runs)
    growth = report.measured["accuracy for each doubling, stories15m"]
    assert sorted(growth) == list(range(50, 58))
    assert fmean(growth[50]) == pytest.approx(0.02, abs=0.005)
    assert list(report.figures) == list(report.captions) == ["figure", "training", "judgements"]
    assert "8 seeds" in report.captions["figure"]
    assert "12 held-out instructions" in report.captions["judgements"]


@pytest.mark.parametrize(
    ("changes", "opposed"),
    [
        ({"gold_ppo_0.05": 0.0, "gold_ppo_0": -0.3}, "PPO (coefficient 0.05)"),
        ({"gold_best_of_8": 0.0}, "the best of 8"),
        ({"gold_ppo_0": 0.9}, "lowers the labeller's score"),
        ({"proxy_ppo_0": 1.0}, "buys a higher score"),
        ({"judged_stories15m_128": 0.4}, "head on stories15m: accuracy rises"),
        ({"judged_smollm2_128": 0.5}, "a head on smollm2 is more accurate"),
    ],
)
def test_the_opposite_does_not_carry_over(changes: dict[str, float], opposed: str):
    results = outcomes([run for seed in range(8) for run in planted(seed, **changes)])
    assert [outcome for text, outcome in results.items() if opposed in text] == ["does not carry over"]


def test_a_single_coefficient_and_a_single_head_leave_their_claims_out():
    run, heads = planted(0)
    per_prompt = {name: values for name, values in run.per_prompt.items() if name[-4:] not in ("0.05", "_0.2")}
    report = read([Run(run.folder, run.config, run.history, run.summary, per_prompt)])
    assert [claim.text for claim in report.claims] == [
        "PPO (coefficient 0) beats fine-tuning by the labeller's score",
        "the best of 8 beats fine-tuning by the labeller's score",
    ]
    per_prompt = {name: heads.per_prompt[name] for name in ("judged_longer", "judged_smollm2_64")}
    report = read([Run(heads.folder, heads.config, [], {}, per_prompt)])
    assert (list(report.measured), report.claims) == (["accuracy on real judgements, smollm2"], [])


def test_a_run_of_another_program_is_refused():
    with pytest.raises(ValueError, match=r"gold_sft or judged_longer.*run of train\.py"):
        read([Run(Path("nowhere"), {"seed": 0}, [], {"accuracy": 0.8})])
