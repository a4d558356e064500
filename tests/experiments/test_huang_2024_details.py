"""The details of PPO: what each setting changes in the trainer, a two-step run, and verdicts on made-up runs."""

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
from experiments.claims import judge
from experiments.huang_2024_details import report, train
from experiments.huang_2024_details.details import DETAILS, make_trainer
from experiments.run_folders import Run
from experiments.samples import SAMPLES
from trimtab_cli.sweep.spec import read_sweep
from trimtab_cli.sweep.study import parameters_at
from trimtab_common.config import to_flat_dict

FOLDER = Path(train.__file__).parent
SMALL = {"mini_batch_size": 16, "log_with": None}
FOUR = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "log_with": None}


def trainer(**settings: Any) -> Any:
    policy = tiny.with_value_head(tiny.llama(), v_head_init_strategy="zero")
    return make_trainer(train.settings([], **FOUR | settings)[1], policy, tokenizer=tiny.tokenizer())


def scored(ppo: Any, model: Any) -> torch.Tensor:
    """The log-probabilities of four fixed responses, [4, R]."""
    queries, responses, _ = tiny.batch()
    inputs = ppo.prepare_model_inputs(queries, responses)
    return ppo.batched_forward_pass(model, queries, responses, inputs)[0]


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
        expected = tiny.taken_of(tiny.llama(), queries[0], responses[0], at)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    assert all(
        a.equal(b) for a, b in zip(by_temperature[None][0], by_temperature[1.0][0], strict=True)
    )  # the same samples


def test_adam_has_the_epsilon_and_trains_all_of_the_policy():
    ppo = trainer(adam_epsilon=0.5, learning_rate=0.25, value_learning_rate=0.5)
    assert [(group["eps"], group["lr"]) for group in ppo.optimizer.param_groups] == [(0.5, 0.25), (0.5, 0.5)]
    assert trainer().optimizer.param_groups[0]["eps"] == 1e-5


def test_a_random_value_head_has_values_and_the_recipes_has_none():
    assert not any(weight.any() for weight in trainer().model.v_head.parameters())
    head = trainer(random_value_head=True).model.v_head.summary
    assert float(head.weight.detach().std()) == pytest.approx((head.in_features + 1) ** -0.5, rel=0.5)
    assert not head.bias.any()


def test_learning_rates_fall_to_zero_in_a_line():
    ppo = trainer(anneal_learning_rate=True, learning_rate=0.5, value_learning_rate=1.0, steps=4)
    rates = []
    for _ in range(4):
        rates.append([group["lr"] for group in ppo.optimizer.param_groups])
        ppo.step(*tiny.batch())
    assert rates == [[0.5, 1.0], [0.375, 0.75], [0.25, 0.5], [0.125, 0.25]]
    assert [group["lr"] for group in ppo.optimizer.param_groups] == [0.0, 0.0]


def test_dropout_changes_the_updates_passes_alone():
    plain, ppo = trainer(), trainer(dropout=0.5)
    with torch.no_grad():
        for model, other in ((plain.model, ppo.model), (plain.reference_policy, ppo.reference_policy)):
            torch.testing.assert_close(scored(ppo, other), scored(plain, model))
    kept = scored(plain, plain.model)
    first, second = scored(ppo, ppo.model), scored(ppo, ppo.model)
    assert (first - kept).abs().max() > 0.01
    assert (first - second).abs().max() > 0.01


def test_the_reference_follows_the_policy():
    ppo = trainer(reference_decay=0.75, learning_rate=0.01)
    before = [weight.clone() for weight in ppo.reference.model.parameters()]
    ppo.step(*tiny.batch())
    policy = list(ppo.model.pretrained_model.parameters())
    assert any((old - new).abs().max() > 0.001 for old, new in zip(before, policy, strict=True))
    for old, new, now in zip(before, policy, ppo.reference.model.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * old + 0.25 * new.detach())


def test_the_kl_moves_from_the_rewards_to_the_loss():
    ppo = trainer(kl_in_loss=True, init_kl_coef=0.3)
    with torch.no_grad():  # a policy that has moved
        for weight in ppo.model.pretrained_model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    _, responses, scores = tiny.batch()
    mask = torch.zeros(4, max(map(len, responses)))
    for row, response in enumerate(responses):
        mask[row, : len(response)] = 1
    with torch.no_grad():
        ref_logprobs = scored(ppo, ppo.reference_policy)
    logprobs = scored(ppo, ppo.model)
    rewards, non_score, kl = ppo.compute_rewards(torch.stack(scores), logprobs.detach(), ref_logprobs, mask)
    torch.testing.assert_close(rewards.sum(1), torch.stack(scores))
    assert not non_score.any()
    torch.testing.assert_close(kl, (logprobs.detach() - ref_logprobs) * mask)
    noise = torch.randn(4, *mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    columns = (logprobs.detach(), noise[0], None, noise[1], logprobs, mask, noise[2], noise[3])
    loss, value_loss, _ = ppo.loss(*columns)
    plain, plain_value, _ = super(type(ppo), ppo).loss(*columns)
    ratio = ref_logprobs - logprobs
    expected = 0.3 * ((ratio.exp() - 1 - ratio) * mask).sum() / mask.sum()
    assert expected > 0.01
    torch.testing.assert_close(loss - plain, expected)
    torch.testing.assert_close(value_loss, plain_value)


@pytest.mark.parametrize("coefficient", [0.0, 10.0])
def test_a_kl_in_the_loss_pulls_an_update_towards_the_reference(coefficient: float):
    ppo = trainer(kl_in_loss=True, init_kl_coef=coefficient, learning_rate=0.01, ppo_epochs=20)
    queries, responses, scores = tiny.batch()
    ppo.step(queries, responses, scores)
    with torch.no_grad():
        gap = (scored(ppo, ppo.model) - scored(ppo, ppo.reference_policy)).abs().mean()
    assert (gap < 0.3) == (coefficient > 0)


# The program and its sweeps --------------------------------------------------------------------------------------


def test_two_steps_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    tiny.llama(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        sentiment_ppo, "openings", lambda split: ["the cat", "a dog", "he went", "so it", "one day", "at the"]
    )
    sizes = {"steps": 2, "max_new_tokens": 4, "eval_prompts": 2, "samples": 1, "stops": (".", "a")}
    folders = {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / "run")}
    train.main(*train.settings([], **SMALL, **sizes, **folders))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {name: config[name] for name in DETAILS} == DETAILS
    rows = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert "ppo/policy/policykl" in rows[0]
    assert "the recipe: the reward rises" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"figure.png"}


def test_the_sweep_has_the_recipe_and_each_detail_alone():
    file = FOLDER / "night.yaml"
    sweep = read_sweep(file)
    names = set()
    points = list(sweep.grid_points())
    for point in (point for point in points if point["seed"] == 0):
        words = [f"--{name}={value}" for name, value in parameters_at(sweep, point).items()]
        run, ppo = train.settings(words)
        (name,) = report.by_setting([Run(Path("x"), to_flat_dict(run, ppo), [], {})])
        names.add(name)
    seeds = yaml.safe_load(file.read_text())["parameters"]["seed"]["values"]
    assert len(names) == len(points) / len(seeds)  # no setting has two names
    assert len(seeds) >= 8
    assert min(seeds) >= 10  # settings were chosen on seeds 0 to 2
    assert names == {"recipe", *report.WORDS}


# The verdicts ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """Closes the figures that read() draws; otherwise only writing a page closes them."""
    yield
    plt.close("all")


def changes(setting: str) -> dict[str, Any]:
    """The setting as fields of the config: `ppo_epochs=4` as {"ppo_epochs": 4}."""
    return {} if setting == "recipe" else yaml.safe_load(setting.replace("=", ": "))


def planted(setting: str = "recipe", seed: int = 0, *, folder: Path, **summary: float) -> Run:
    """Returns a run whose updates each moved by `moved`, and that was evaluated once at half its KL and reward."""
    config = to_flat_dict(*train.settings([], log_with=None, seed=seed, **changes(setting)))
    numbers = {"reward_before": 0.2, "reward": 0.6, "kl": 4.0, "ended": 0.9, "moved": 0.05} | summary
    row = {"ppo/policy/policykl": numbers["moved"]}
    middle = {"eval_kl": numbers["kl"] / 2, "eval_reward": (numbers["reward_before"] + numbers["reward"]) / 2}
    history = [{"step": 1, **row, **middle}, {"step": 2, **row}]
    per_prompt = {"reward_before": [numbers["reward_before"]] * 3, "reward": [numbers["reward"]] * 3}
    (folder / setting / str(seed)).mkdir(parents=True, exist_ok=True)
    samples = {"query": ["a"], "before": ["b"], "after": ["c"], "reward": [0.5]}
    (folder / setting / str(seed) / SAMPLES).write_text(json.dumps(samples))
    return Run(folder / setting / str(seed), config, history, numbers, per_prompt)


@pytest.mark.parametrize("setting", list(report.WORDS))
def test_every_detail_is_a_setting_that_exists(setting: str, tmp_path: Path):
    assert list(report.by_setting([planted(setting, folder=tmp_path)])) == [setting]


def test_each_detail_has_one_claim_about_the_reward_at_equal_kl():
    for setting in report.WORDS:
        assert [quantity.name for _, quantity, *_ in report.expected(setting)].count(report.REWARD.name) == 1


@pytest.mark.parametrize(
    ("setting", "name", "changed", "effect"),
    [
        ("whiten_advantages=False", "reward at equal KL", {"reward": 0.5}, -0.1),
        ("whiten_rewards=True", "reward at equal KL", {"reward": 0.4}, -0.2),
        ("adam_epsilon=1e-08", "KL of an update", {"moved": 0.25}, 0.2),
        ("missing_eos_penalty=None", "share of responses that ended", {"ended": 0.6}, -0.3),
        ("logprob_temperature=1.0", "KL at the end", {"kl": 7.0}, 3.0),
        ("logprob_temperature=1.0", "reward at equal KL", {"kl": 8.0}, -0.2),
    ],
)
def test_a_detail_is_judged_by_its_differences_to_the_recipe(
    setting: str, name: str, changed: dict[str, float], effect: float, tmp_path: Path
):
    runs = [planted(seed=seed, folder=tmp_path) for seed in (3, 4)]
    runs += [planted(setting, seed, folder=tmp_path, **changed) for seed in (4, 3)]
    result = report.read(runs)
    verdicts = judge(result.claims, result.measured)
    (verdict,) = [v for v in verdicts if v.claim.compared[0].startswith(name)]
    assert verdict.effect == pytest.approx(effect)
    assert verdict.seeds == 2


@pytest.mark.parametrize(
    ("points", "other", "expected"),
    [
        ([(0, 0.0), (2, 0.4), (4, 0.6)], [(0, 0.0), (3, 0.9)], 0.5),
        ([(0, 0.0), (2, 0.4), (4, 0.6)], [(0, 0.0), (9, 0.9)], 0.6),
        ([(0, 0.0), (5, 0.4), (4, 0.6)], [(0, 0.0), (2.5, 0.9)], 0.2),
    ],
)
def test_equal_kl_is_the_largest_that_both_reached(points: list, other: list, expected: float):
    def run(points: list) -> Run:
        history = [{"step": i, "eval_kl": kl, "eval_reward": reward} for i, (kl, reward) in enumerate(points[1:-1])]
        return Run(Path(), {}, history, {"reward_before": points[0][1], "kl": points[-1][0], "reward": points[-1][1]})

    assert report.at_equal_kl(run(points), run(other)) == pytest.approx(expected)


def test_a_setting_without_the_recipe_is_not_judged_and_a_seed_that_comes_twice_is_refused(tmp_path: Path):
    assert report.read([planted("whiten_rewards=True", folder=tmp_path)]).claims == []
    other = report.read([planted(folder=tmp_path), planted("whiten_rewards=True", 1, folder=tmp_path)])
    assert [claim.text for claim in other.claims] == ["the recipe: the reward rises"]
    with pytest.raises(ValueError, match="one run of each"):
        report.read([planted(folder=tmp_path), planted(folder=tmp_path)])


def test_a_detail_matters_or_does_not_by_its_margin(tmp_path: Path):
    runs = [planted(seed=seed, folder=tmp_path, reward=0.6 + 0.001 * seed) for seed in range(8)]
    runs += [planted("ppo_epochs=4", seed, folder=tmp_path, reward=0.58) for seed in range(8)]
    runs += [planted("dropout=0.1", seed, folder=tmp_path, reward=0.4) for seed in range(8)]
    result = report.read(runs)
    outcomes = {verdict.claim.text: verdict.outcome for verdict in judge(result.claims, result.measured)}
    assert outcomes["four epochs in place of two: the reward at equal KL hardly changes"] == "holds"
    assert outcomes["dropout 0.1 in the updates: the reward at equal KL hardly changes"] == "does not hold"


def test_the_figure_has_a_row_for_each_detail_and_the_margins(tmp_path: Path):
    runs = [planted(seed=seed, folder=tmp_path) for seed in (0, 1)]
    runs += [
        planted(name, seed, folder=tmp_path, reward=0.7) for name in ("ppo_epochs=4", "dropout=0.1") for seed in (0, 1)
    ]
    reward, kl = report.figure(report.by_setting(runs)).axes
    labels = [label.get_text() for label in reward.get_yticklabels()]
    assert labels == ["four epochs in place of two", "dropout 0.1 in the updates"]
    assert [line.get_xdata()[0] for line in kl.lines if line.get_linestyle() == ":"] == [-1.0, 1.0]
