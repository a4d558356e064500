"""The details of PPO: what each setting changes in the trainer, a run of two steps, and verdicts on made-up runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.huang_2024_details import report, train
from experiments.huang_2024_details.details import DETAILS, make_trainer
from experiments.runs import Run
from trimtab_cli.sweep.search import grid_size, suggest
from trimtab_cli.sweep.spec import read_sweep
from trimtab_common.config import to_flat_dict

FOLDER = Path(train.__file__).parent
SMALL = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "log_with": None}


def trainer(**settings: Any) -> Any:
    return make_trainer(train.settings([], **SMALL | settings)[1], tiny.policy(), tokenizer=tiny.tokenizer())


# What the settings do --------------------------------------------------------------------------------------------


def test_advantages_are_left_as_they_are_on_request():
    values, rewards = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.ones(3, 4)
    mask[0, 2:] = 0
    kept, whitened, returns = trainer().compute_advantages(values, rewards * mask, mask)
    unwhitened, raw, same = trainer(whiten_advantages=False).compute_advantages(values, rewards * mask, mask)
    torch.testing.assert_close(unwhitened, kept)
    torch.testing.assert_close(same, returns)
    torch.testing.assert_close(raw, (returns - kept) * mask)
    counted = whitened[mask.bool()]
    torch.testing.assert_close(counted.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert abs(float(raw[mask.bool()].mean())) > 0.01


def test_log_probabilities_can_be_taken_at_the_wrong_temperature():
    queries, _, _ = tiny.batch()
    sampling = {"return_prompt": False, "do_sample": True, "max_new_tokens": 4, "temperature": 0.7}
    by_temperature = {}
    for temperature in (None, 1.0):
        ppo = trainer(logprob_temperature=temperature)
        responses = ppo.generate(queries, **sampling)
        inputs = ppo.prepare_model_inputs(queries, responses)
        logprobs, _, _, _ = ppo.batched_forward_pass(ppo.model, queries, responses, inputs)
        by_temperature[temperature] = responses, logprobs[0, : len(responses[0])]
    for temperature, at in ((None, 0.7), (1.0, 1.0)):
        responses, logprobs = by_temperature[temperature]
        expected = tiny.taken_of(tiny.gpt2(), queries[0], responses[0], at)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    assert all(
        a.equal(b) for a, b in zip(by_temperature[None][0], by_temperature[1.0][0], strict=True)
    )  # sampled alike


def test_adam_has_the_epsilon_and_trains_all_of_the_policy():
    ppo = trainer(adam_epsilon=0.5, learning_rate=0.25)
    (group,) = ppo.optimizer.param_groups
    assert (group["eps"], group["lr"]) == (0.5, 0.25)
    assert trainer().optimizer.param_groups[0]["eps"] == 1e-5


# The program and its sweeps --------------------------------------------------------------------------------------


def test_two_steps_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    tiny.llama(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        sentiment_ppo, "openings", lambda: ["the cat", "a dog", "he went", "so it", "one day", "at the"]
    )
    sizes = {"steps": 2, "max_new_tokens": 4, "eval_prompts": 2, "samples": 1, "stops": (".", "a")}
    folders = {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / "run")}
    train.main(*train.settings([], **SMALL, **sizes, **folders))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {name: config[name] for name in DETAILS} == DETAILS
    rows = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(name in rows[0] for name, _ in report.STABILITY.values())
    assert "the recipe: the reward rises" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"figure.png", "effects.png"}


@pytest.mark.parametrize("file", [FOLDER / "reproduce.yaml", FOLDER / "sweep.yaml"], ids=lambda file: file.name)
def test_a_sweep_has_the_recipe_and_reproduce_each_detail_alone(file: Path):
    sweep = read_sweep(file)
    names = set()
    for number in range(grid_size(sweep)):
        suggestion = suggest(sweep, number=number, seed=0, trials=[], history=lambda trial: [])
        words = [f"--{name}={value}" for name, value in suggestion.parameters.items()]
        run, ppo = train.settings(words)
        (name,) = report.by_setting([Run(Path("x"), to_flat_dict(run, ppo), [], {})])
        names.add(name)
    assert "recipe" in names
    assert len(names) == grid_size(sweep) / 3  # no setting is there under two names
    if file.name == "reproduce.yaml":
        assert names == {"recipe", *report.EXPECTED}
        assert yaml.safe_load(file.read_text())["parameters"]["seed"]["values"] == [0, 1, 2]


# The verdicts ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """judge() draws; only a page that is written closes what it holds."""
    yield
    plt.close("all")


CHANGED = {
    "whiten_advantages=False": {"whiten_advantages": False},
    "whiten_rewards=True": {"whiten_rewards": True},
    "cliprange_value=1000.0": {"cliprange_value": 1000.0},
    "adam_epsilon=1e-08": {"adam_epsilon": 1e-8},
    "missing_eos_penalty=None": {"missing_eos_penalty": None},
    "logprob_temperature=1.0": {"logprob_temperature": 1.0},
    "use_score_scaling=True": {"use_score_scaling": True},
}


def made_up(setting: str = "recipe", seed: int = 0, **summary: float) -> Run:
    config = to_flat_dict(*train.settings([], log_with=None, seed=seed, **CHANGED.get(setting, {})))
    row = {name: 1.0 for name, _ in report.STABILITY.values()}
    summary_of_run = {"reward_before": 0.2, "reward": 0.6, "kl": 4.0, "ended": 0.9} | summary
    return Run(Path("none", setting, str(seed)), config, [{"step": 1, **row}, {"step": 2, **row}], summary_of_run)


def verdict(setting: str, *gaps: float) -> bool | None:
    """Of the claim about a setting, by its differences to the recipe in the seeds 0, 1, ..."""
    claim, name, _ = report.EXPECTED[setting]
    recipe = made_up().summary[name]
    runs = [made_up(seed=seed) for seed in range(len(gaps))]
    runs += [made_up(setting, seed, **{name: recipe + gap}) for seed, gap in enumerate(gaps)]
    return {verdict.claim: verdict.passed for verdict in report.judge(runs).verdicts}[claim]


def test_every_expectation_is_of_a_setting_that_exists():
    assert set(CHANGED) == set(report.EXPECTED)
    assert {next(iter(report.by_setting([made_up(name)]))) for name in CHANGED} == set(CHANGED)


@pytest.mark.parametrize(
    ("setting", "gaps", "passed"),
    [
        ("whiten_advantages=False", (-0.1, -0.01), True),
        ("whiten_advantages=False", (-0.1, 0.01), False),
        ("logprob_temperature=1.0", (-0.1, -0.2, -0.3), True),
        ("logprob_temperature=1.0", (-0.1, -0.2, 0.3), False),
        ("missing_eos_penalty=None", (-0.3, -0.1), True),
        ("missing_eos_penalty=None", (-0.3, 0.05), False),
        ("use_score_scaling=True", (0.5, 0.1), True),
        ("use_score_scaling=True", (0.5, -0.1), False),
        ("adam_epsilon=1e-08", (-0.5, 0.09, 0.5), True),
        ("adam_epsilon=1e-08", (-0.5, 0.11, 0.5), False),
        ("whiten_rewards=True", (-0.5, 0.09, 0.5), True),
        ("whiten_rewards=True", (-0.5, -0.11, 0.5), False),
        ("cliprange_value=1000.0", (0.5, -0.05, -0.5), True),
        ("cliprange_value=1000.0", (0.5, 0.11, -0.5), False),
    ],
)
def test_a_detail_is_judged_by_its_differences_to_the_recipe(setting: str, gaps: tuple[float, ...], passed: bool):
    assert verdict(setting, *gaps) is passed


def test_the_recipe_itself_must_raise_the_reward_in_every_seed():
    (alone,) = report.judge([made_up()]).verdicts
    assert alone.passed
    (fell,) = report.judge([made_up(), made_up(seed=1, reward=0.1)]).verdicts
    assert not fell.passed


def test_what_is_not_there_is_not_judged():
    assert report.judge([made_up("whiten_rewards=True")]).verdicts == []
    other = report.judge([made_up(), made_up("whiten_rewards=True", seed=1)])
    assert [verdict.claim for verdict in other.verdicts] == ["the recipe: the reward rises"]


def test_differences_are_paired_by_seed_and_a_seed_that_comes_twice_is_refused():
    runs = [made_up(seed=1, reward=0.5), made_up(seed=0), made_up("whiten_rewards=True", 1, reward=0.75)]
    assert report.differences(report.by_setting(runs), "whiten_rewards=True", "reward") == [0.25]
    with pytest.raises(ValueError, match="one run of each"):
        report.judge([made_up(), made_up()])


def test_the_table_of_effects():
    runs = [made_up(), made_up("whiten_rewards=True", reward=0.75), made_up("adam_epsilon=1e-08", seed=2)]
    columns = report.effects(report.by_setting(runs))
    assert columns["setting"] == ["recipe", "whiten_rewards=True", "adam_epsilon=1e-08"]
    assert columns["reward, difference"] == ["+0.00", "+0.15", ""]
    assert columns["kl"] == ["4.0"] * 3
    assert columns["largest mean ratio"] == ["1.00"] * 3
