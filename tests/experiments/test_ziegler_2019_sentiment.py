"""PPO with an adaptive KL on sentiment: the reward, a two-step run, and the verdicts on made-up runs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from tests.common.test_tracking import read_wandb_file
from tests.experiments.test_assets import checkpoint, tensors, tokenizer_bin
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.assets import convert_llama2c
from experiments.claims import judge
from experiments.provenance import provenance
from experiments.reports import report_on
from experiments.run_folders import Run, finished_runs, write_per_prompt
from experiments.samples import SAMPLES, write_samples
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation, StoriesRun, end_at, load
from experiments.ziegler_2019_sentiment import search, train
from experiments.ziegler_2019_sentiment.report import CLAIM, TITLE, read

ROOT = Path(__file__).resolve().parents[2]


def test_reward_is_the_sign_of_a_sentiment_and_zero_without_one():
    happy, sad, plain, empty = sentiment(
        [
            "She was happy and loved the wonderful party.",
            "He was sad and hated the terrible storm.",
            "It is a table.",
            "",
        ]
    )
    assert 0.5 < happy <= 1
    assert -1 <= sad < -0.5
    assert plain == empty == 0


def test_reward_knows_negation_and_degree():
    good, very_good, not_good = sentiment(["It was good.", "It was very good!", "It was not good."])
    assert not_good < 0 < good < very_good


# The run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a tiny Llama converted from a llama2.c checkpoint, and replaces the openings by ones in its words."""
    converted, tokenizer = convert_llama2c(checkpoint(tensors(shared=True)) + tokenizer_bin())
    converted.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        sentiment_ppo, "openings", lambda split: ["the there", "he there the", "abc", "there there", "the he", "he he"]
    )
    return str(tmp_path / "model")


def test_a_trial_of_a_search_logs_the_mean_over_the_seeds_so_far(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (search, train):
        monkeypatch.setattr(module, "sentiment", lambda texts: [len(set(text)) + len(text) / 10 for text in texts])
    sizes = {"model": model, "max_new_tokens": 4, "eval_prompts": 2, "samples": 1, "look_every": 1, "seed": 5}
    sizes |= {"steps": 2, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-2, "log_with": None}
    search.main(*search.settings([], **sizes, seeds=3, output_dir=str(tmp_path / "trial")))
    alone = []
    for seed in (5, 6, 7):
        folder = tmp_path / str(seed)
        train.main(*train.settings([], **sizes | {"seed": seed}, output_dir=str(folder)))
        alone.append(json.loads((folder / "summary.json").read_text())["reward_within_8"])
    rows = [json.loads(line) for line in (tmp_path / "trial" / "history.jsonl").read_text().splitlines()]
    means = [row["search/reward_within_8"] for row in rows]
    assert means == [pytest.approx(sum(alone[:count]) / count) for count in (1, 2, 3)]
    assert len(set(alone)) > 1
    assert json.loads((tmp_path / "trial" / "summary.json").read_text())["search/reward_within_8"] == means[-1]
    assert sorted(path.name for path in (tmp_path / "trial").iterdir()) == [
        "config.json",
        "history.jsonl",
        "starts.json",
        "summary.json",
    ]


def test_a_trial_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seeds=0: a trial needs 1"):
        search.SearchConfig(seeds=0)


def test_two_steps_on_a_tiny_model_leave_record_samples_and_page(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    sizes = {"model": model, "max_new_tokens": 4, "eval_prompts": 2, "samples": 1}
    sizes |= {"steps": 2, "batch_size": 4, "mini_batch_size": 2}
    run, ppo = train.settings([], **sizes, log_with=None, output_dir=str(folder))
    train.main(run, ppo)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert json.loads((folder / "config.json").read_text())["max_new_tokens"] == 4
    summary = json.loads((folder / "summary.json").read_text())
    assert {"reward_before", "reward", "kl", "ended", "kl_held"} <= set(summary)
    assert summary["reward_within_8"] == max(summary["reward_before"], summary["reward"])  # both are within 8 nats
    assert summary["kl_held"] == rows[1]["objective/kl"]
    # All samples of two prompts, the first and the worst, and the worst three.
    assert json.loads((folder / "samples.json").read_text())["query"] == ["the there", "he there the"]
    assert len(json.loads((folder / "per_prompt.json").read_text())["reward"]) == 2
    shown = capsys.readouterr().out
    assert shown.count("[the there]") == 2
    assert "before training" in shown
    before, after = (f"{summary[name]:.3f}" for name in ("reward_before", "reward"))
    assert f"reward on unseen openings {before} -> {after} (" in shown
    assert f"KL {summary['kl_held']:.2f} nats per response, target 8 (" in shown
    assert "undecided" not in shown
    assert f"figure: {folder / 'figure.png'}" in shown
    assert (folder / "figure.png").exists()
    page = (folder / "report.html").read_text()
    assert f"reward on unseen openings {before}" in page
    assert page.count("<img ") == 4
    assert not [words for words in ("bands", "black", "undecided", "Holm") if words in page]


def test_ppo_on_a_learnt_reward_is_judged_by_the_true_one(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """PPO trains on a reward learnt from choices; the evaluation uses the reward behind the choices."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(train, "sentiment", lambda texts: [100.0 + len(text) for text in texts])
    monkeypatch.setattr(train, "openings", lambda split: ["the there", "he there the", "abc"])
    folder = tmp_path / "run"
    sizes = {"model": model, "max_new_tokens": 4, "eval_prompts": 2, "steps": 1, "batch_size": 4, "mini_batch_size": 2}
    run, ppo = train.settings([], **sizes, labels=64, log_with=None, output_dir=str(folder))
    train.main(run, ppo)
    (row,) = (json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines())
    summary = json.loads((folder / "summary.json").read_text())
    assert abs(row["ppo/mean_scores"]) < 10
    assert summary["reward_before"] > 100
    assert summary["reward"] > 100
    assert summary["choice_accuracy"] > 0.6  # of four; chance gives a quarter, ties more
    assert f"in {summary['choice_accuracy']:.0%} of other choices" in capsys.readouterr().out


def test_the_best_of_a_choice_is_right_if_gold_has_none_above_it():
    states = torch.tensor([[[3.0], [1.0]], [[0.0], [2.0]], [[5.0], [4.0]]])
    golds = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]])
    proxy = train.Proxy(None, None, torch.ones(1))
    assert train.choice_accuracy(proxy, train.Samples(golds, states)) == pytest.approx(2 / 3)


@pytest.mark.usefixtures("offline_wandb")
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_which_has_the_settings_of_both(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    sizes = {"batch_size": 4, "mini_batch_size": 2, "save_steps": 1, "output_dir": str(tmp_path / "run")}
    run = StoriesRun(model=model, max_new_tokens=4, eval_prompts=2, samples=1)
    for steps, resume_from in ((1, None), (2, "latest")):
        (_, ppo) = train.settings([], **sizes, steps=steps, seed=3)
        sentiment_ppo.train(replace(run, resume_from=resume_from), ppo, sentiment)
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    records = [read_wandb_file(next(folder.glob("*.wandb"))) for folder in folders]
    starts = [record["run"][0] for record in records]
    assert len({start.run_id for start in starts}) == 1
    assert {(start.display_name, start.run_group, start.job_type) for start in starts} == {
        ("seed=3", "ziegler_2019_sentiment", "train")
    }
    updates = [start.config for start in starts] + [config for record in records for config in record["config"]]
    config = {item.key: item.value_json for update in updates for item in update.update}
    assert (config["seed"], config["target"], config["eval_prompts"]) == ("3", "8.0", "2")


def test_a_negative_number_of_labels_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        train.settings(["--labels", "-1"])
    assert "labels=-1: use the number of choices" in capsys.readouterr().err


def test_stops_end_responses_where_they_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sentiment_ppo, "openings", lambda split: ["the cat", "a dog", "he ran", "so"])
    tiny.llama().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    policy, tokenizer = load(str(tmp_path))
    run = StoriesRun(max_new_tokens=3, eval_prompts=4)
    reward = lambda texts: [float(len(text)) for text in texts]  # noqa: E731
    lengths = []
    for stops in ((), tuple(tiny.CHARACTERS)):
        end_at(policy, tokenizer, stops)
        numbers = Evaluation(policy.pretrained_model, tokenizer, reward, run, seed=0).look().numbers
        lengths.append((numbers["ended"], numbers["reward"]))
    (early, long), (ended, short) = lengths
    assert early < 1
    assert ended > early
    assert short <= 1 < long
    with pytest.raises(ValueError, match=r"\['the end'\] is no token"):
        end_at(policy, tokenizer, ("the end", "a"))


def test_another_trainer_can_be_given(model: str, tmp_path: Path):
    sizes = {"steps": 1, "batch_size": 4, "mini_batch_size": 2}
    of_adam = {"value_learning_rate": None, "lr_warmup_steps": 0}
    _, ppo = train.settings([], **sizes, **of_adam, log_with=None, output_dir=str(tmp_path))
    trainers = []

    def make_trainer(config: Any, policy: Any, **others: Any) -> Any:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.25)
        trainers.append(sentiment_ppo.PPOTrainer(config, policy, optimizer=optimizer, **others))
        return trainers[0]

    run = StoriesRun(model=model, max_new_tokens=4, eval_prompts=2, samples=1)
    sentiment_ppo.train(run, ppo, sentiment, make_trainer=make_trainer)
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["ppo/learning_rate"] for row in rows] == [0.25]
    assert trainers[0].steps_done == 1


@pytest.mark.parametrize("name", ["gpu.yaml"])
def test_the_files_of_settings_are_of_this_program(name: str):
    file = ROOT / "experiments" / "ziegler_2019_sentiment" / name
    run, ppo = train.settings(["--config", str(file)])
    assert run.model == "gpt2"
    assert ppo.target == 12


# The verdicts ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """Closes the figures that read() draws; otherwise only writing a page closes them."""
    yield
    plt.close("all")


def planted(
    folder: Path, target: float, seed: int, *, gain: float = 0.5, kl: float | None = None, noise: int = 0, **others: Any
) -> Run:
    """Returns a run that holds its target, unless `kl` differs, and gains reward, with noise per run and prompt."""
    folder = folder / f"{target}-{seed}-{'-'.join(map(str, others.values()))}"
    folder.mkdir(parents=True)
    config = {"target": target, "seed": seed, "adap_kl_ctrl": True, "init_kl_coef": 0.1, "labels": 0, **others}
    rng = np.random.default_rng([seed, int(10 * target), noise])
    held = (target if kl is None else kl) * float(np.exp(0.03 * rng.normal()))
    rows = [{"step": i, "ppo/mean_scores": i / 5, "objective/kl": held, "objective/kl_coef": 0.1} for i in (1, 2)]
    before = rng.normal(size=48) * 0.4
    after = before + gain + 0.05 * rng.normal() + 0.2 * rng.normal(size=48)
    samples = {"query": ["x"], "before": ["old"], "after": [f"new {target:g}"], "reward": [0.5]}
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "starts.json").write_text(json.dumps([provenance()]))
    summary = {"kl_held": held, "kl": held, "reward": float(after.mean()), "choice_accuracy": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_per_prompt(folder, {"reward_before": before.tolist(), "reward": after.tolist()})
    return finished_runs(folder)[0]


def outcomes(runs: Sequence[Run]) -> dict[str, str]:
    report = read(runs)
    return {verdict.claim.text: verdict.outcome for verdict in judge(report.claims, report.measured)}


def test_claims_that_hold_are_reproduced(tmp_path: Path):
    runs = [planted(tmp_path, target, seed, gain=target / 5) for seed in range(8) for target in (4.0, 2.0)]
    assert outcomes(runs) == {
        "target 2: the reward of other books' openings rises": "reproduced",
        "target 4: the reward of other books' openings rises": "reproduced",
        "target 2: a controller with a gain holds the KL within 25%": "holds",
        "target 4: a controller with a gain holds the KL within 25%": "holds",
        "target 4 gives more reward than 2": "reproduced",
    }


def test_rewards_from_more_labels_and_the_true_reward_are_compared_at_one_target(tmp_path: Path):
    gains = {0: 0.7, 64: 0.2, 512: 0.45}
    runs = [planted(tmp_path, 4.0, seed, gain=gains[labels], labels=labels) for seed in range(8) for labels in gains]
    assert outcomes(runs) == {
        "target 4: the reward of other books' openings rises": "reproduced",
        "target 4 with 64 labels: the reward of other books' openings rises": "reproduced",
        "target 4 with 512 labels: the reward of other books' openings rises": "reproduced",
        "target 4: a controller with a gain holds the KL within 25%": "holds",
        "target 4 with 512 labels gives more reward than target 4 with 64 labels": "reproduced",
        "target 4 gives more reward than target 4 with 512 labels": "reproduced",
    }
    assert set(read(runs).measured["accuracy, target 4 with 64 labels"].values()) == {0.5}


def test_a_reward_that_training_does_not_move_reproduces_no_gain(tmp_path: Path):
    """PPO on random scores: the KL is wherever the noise of its updates leaves it."""
    for noise in range(5):
        runs = [
            planted(tmp_path / str(noise), target, seed, gain=0.0, kl=1.0, noise=noise)
            for seed in range(8)
            for target in (2.0, 4.0)
        ]
        assert "reproduced" not in outcomes(runs).values()
        assert outcomes(runs)["target 4: a controller with a gain holds the KL within 25%"] == "does not hold"


def test_a_fixed_coefficient_has_no_target_to_hold(tmp_path: Path):
    runs = [planted(tmp_path, 8.0, seed, adap_kl_ctrl=False, init_kl_coef=0.3) for seed in range(8)]
    assert outcomes(runs) == {"coefficient 0.3: the reward of other books' openings rises": "reproduced"}


def test_runs_that_differ_in_more_than_the_seed_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="one run of each setting and seed"):
        read([planted(tmp_path, 8.0, 0), planted(tmp_path, 8.0, 0, learning_rate=1.0)])


def test_the_page_is_written_from_finished_runs(tmp_path: Path):
    for seed in range(2):
        planted(tmp_path, 8.0, seed)
    report_on(TITLE, CLAIM, read, finished_runs(tmp_path), tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "target 8: a controller with a gain holds the KL" in page
    assert "bands from the lower to the upper quartile" in page
    assert "new 8" in page


def test_samples_have_the_first_prompts_and_those_with_the_lowest_rewards(tmp_path: Path):
    rewards = [0.5, 0.4, 0.9, -0.5, 0.8, 0.1]
    columns = {"query": list("abcdef"), "after": list("ABCDEF"), "reward": rewards}
    table = write_samples(tmp_path, columns, rewards=rewards, count=2)
    assert table["query"] == ["a", "b", "d", "f"]  # b is also among the worst three
    assert table["after"] == ["A", "B", "D", "F"]
    assert table["reward"] == [0.5, 0.4, -0.5, 0.1]
    assert json.loads((tmp_path / SAMPLES).read_text()) == table
