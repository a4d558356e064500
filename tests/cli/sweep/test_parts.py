"""The parts of `trimtab sweep`: reading, drawing, suggesting, stopping and starting."""

import math
import random
import statistics
from pathlib import Path

import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from trimtab_cli.sweep.distributions import KINDS
from trimtab_cli.sweep.runner import fill_command
from trimtab_cli.sweep.spec import Hyperband, SweepError, parse_sweep, read_sweep
from trimtab_cli.sweep.study import new_study, next_trial

ROOT = Path(__file__).resolve().parents[3]
EDGES = [0.0, 1e-9, 0.2, 0.5, 0.8, 1 - 1e-9, 1.0]


def sweep_of(parameters, **rest):
    return parse_sweep({"method": "random", "program": "train.py", "parameters": parameters, **rest}, "default")


def parameter(**settings):
    (parameter,) = sweep_of({"x": settings}).all
    return parameter


def suggestions(sweep, count, seed=0):
    study = new_study(sweep)
    trials = [next_trial(sweep, study, seed=seed, count=count) for _ in range(count)]
    return [trial.user_attrs["parameters"] for trial in trials if trial]


# --- distributions -----------------------------------------------------------------------------------------------

STANDARD = statistics.NormalDist()
CLOSED_FORMS = [
    ({"distribution": "uniform", "min": -1, "max": 3}, lambda u: -1 + 4 * u),
    ({"distribution": "log_uniform", "min": math.log(2), "max": math.log(8)}, lambda u: 2 * 4**u),
    ({"distribution": "log_uniform_values", "min": 2, "max": 8}, lambda u: 2 * 4**u),
    # log(1/X) uniform between min and max: X runs from e^-max to e^-min
    ({"distribution": "inv_log_uniform", "min": math.log(2), "max": math.log(8)}, lambda u: 4**u / 8),
    ({"distribution": "inv_log_uniform_values", "min": 2, "max": 8}, lambda u: 2 * 4**u),
    ({"distribution": "normal", "mu": 3, "sigma": 2}, lambda u: 3 + 2 * STANDARD.inv_cdf(u)),
    ({"distribution": "log_normal", "mu": -1, "sigma": 0.5}, lambda u: math.exp(-1 + STANDARD.inv_cdf(u) / 2)),
    ({"distribution": "beta", "a": 2, "b": 1}, lambda u: u**0.5),
    ({"distribution": "beta", "a": 1, "b": 3}, lambda u: 1 - (1 - u) ** (1 / 3)),
    ({"distribution": "beta", "a": 0.5, "b": 0.5}, lambda u: math.sin(math.pi * u / 2) ** 2),
]


def form_name(item):
    """Returns a test name that is the same in every process."""
    return " ".join(map(str, item.values())) if isinstance(item, dict) else ""


@pytest.mark.parametrize(("settings", "quantile"), CLOSED_FORMS, ids=form_name)
def test_quantiles_are_those_of_the_distribution(settings, quantile):
    for u in (0.01, 0.3, 0.5, 0.9):
        assert parameter(**settings).at(u) == pytest.approx(quantile(u), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "quantile"),
    [form for form in CLOSED_FORMS if not form[0]["distribution"].startswith("inv_")],
    ids=form_name,
)
def test_quantized_ones_are_the_same_rounded_to_q(settings, quantile):
    name = f"q_{settings['distribution']}"
    for q in (0.25, 1):
        for u in (0.013, 0.29, 0.47, 0.91):
            value = parameter(**{**settings, "distribution": name, "q": q}).at(u)
            assert value == round(quantile(u) / q) * q
            assert isinstance(value, type(q))


@pytest.mark.parametrize(
    "settings",
    [
        {"min": 2, "max": 5},
        {"min": 0.5, "max": 2},
        {"distribution": "log_uniform_values", "min": 1.0e-5, "max": 1.0e-3},
        {"distribution": "inv_log_uniform_values", "min": 1.0e-5, "max": 1.0e-3},
    ],
    ids=str,
)
def test_bounds_are_reached_and_never_left(settings):
    values = [parameter(**settings).at(u) for u in EDGES]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (settings["min"], settings["max"])


@pytest.mark.parametrize("name", ["normal", "log_normal", "beta", "q_normal", "q_log_normal", "q_beta"])
def test_unbounded_ones_give_numbers_at_the_edges_too(name):
    assert all(math.isfinite(parameter(distribution=name).at(u)) for u in EDGES)


def test_whole_numbers_and_choices_are_equally_likely():
    whole, choice = parameter(min=1, max=4), parameter(values=["a", None, [1, 2]])
    assert [whole.at(u) for u in (0.24, 0.26, 0.49, 0.51, 0.76, 1.0)] == [1, 2, 2, 3, 4, 4]
    assert [choice.at(u) for u in (0.3, 0.34, 0.66, 0.67, 1.0)] == ["a", None, None, [1, 2], [1, 2]]


def test_probabilities_weigh_values_and_zero_is_never():
    weighted = parameter(values=["a", "b", "c", "d"], probabilities=[0.2, 0, 0.8, 0])
    assert [weighted.at(u) for u in (0.0, 0.19, 0.21, 0.99, 1.0)] == ["a", "a", "c", "c", "c"]


def test_every_distribution_of_the_schema_is_there():
    assert set(KINDS) == {
        *("constant", "categorical", "categorical_w_probabilities", "int_uniform", "uniform", "q_uniform"),
        *("log_uniform", "log_uniform_values", "q_log_uniform", "q_log_uniform_values"),
        *("inv_log_uniform", "inv_log_uniform_values", "normal", "q_normal", "log_normal", "q_log_normal"),
        *("beta", "q_beta"),
    }


# --- the file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "gird"}, "method: got 'gird'; Input should be 'grid', 'random' or 'bayes'"),
        ({"metrik": {}}, "metrik: got {}; .*Did you mean metric"),
        ({"job": "x"}, "job: got 'x'; Extra inputs are not permitted"),
        ({"parameters": {}}, "parameters: empty"),
        ({"parameters": {"lr": 3}}, "parameters.lr: got 3"),
        ({"parameters": {"1x": {"value": 3}}}, "parameters.1x: no name"),
        ({"parameters": {"lr": {"min": 1}}}, "parameters.lr: got .*; uniform has min, max"),
        (
            {"parameters": {"lr": {"min": "1e-4", "max": 1}}},
            "parameters.lr: got {'min': '1e-4'.* not supported between",
        ),
        ({"parameters": {"lr": {"min": 2, "max": 1}}}, "parameters.lr: got .*; min has to be below max"),
        ({"parameters": {"lr": {"distribution": "unifrom", "min": 0, "max": 1}}}, "got 'unifrom'; known are uniform"),
        ({"parameters": {"lr": {"distribution": "normal", "mean": 0}}}, "parameters.lr: .*normal has mu, sigma"),
        ({"parameters": {"lr": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "parameters.lr: got"),
        (
            {"parameters": {"lr": {"distribution": "log_uniform", "min": 1, "max": 2048}}},
            "lr: got .*; math range error",
        ),
        (
            {"parameters": {"lr": {"values": [1, 2], "probabilities": [0.5, 0.6]}}},
            "lr: .*probabilities that add up to 1",
        ),
        ({"parameters": {"lr": {"values": [1, 2], "probabilities": [1.0]}}}, "parameters.lr: got .*shorter"),
        (
            {"parameters": {"a": {"parameters": {"b": {"values": []}}}}},
            r"parameters.a.parameters.b.values: got \[\]; a list of one value at least is needed",
        ),
        ({"parameters": {"lr": {"values": 1}}}, "parameters.lr.values: got 1; a list of one value at least is needed"),
        ({"parameters": {"lr": {"valeus": [1]}}}, "parameters.lr: got .*; value, values, or min and max are needed"),
        ({"parameters": {"a": {"parameters": {"b": {"value": 1}}, "min": 1}}}, "parameters.a: got"),
        ({"metric": {"goal": "minimize"}}, "metric.name: got .*; Field required"),
        ({"metric": {"name": "m", "goal": "max"}}, "metric.goal: got 'max'; Input should be 'minimize' or 'maximize'"),
        ({"metric": {"name": "m", "impute": "best"}}, "metric.impute: got 'best'; Input should be 'worst'"),
        ({"method": "bayes"}, "metric: missing; method: bayes"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 2}}, "metric: missing; early_terminate"),
        ({"early_terminate": {"type": "hyperband"}, "metric": {"name": "m"}}, "early_terminate: min_iter, or max_iter"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 0}}, "early_terminate.min_iter: got 0"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 1}}, "early_terminate.eta: got 1"),
        ({"run_cap": 0}, "run_cap: got 0"),
        ({"program": 3}, "program: got 3"),
        ({"command": "python x"}, "command: got 'python x'"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_file_is_named_by_its_key(change, words):
    with pytest.raises(SweepError, match=words):
        sweep_of({"lr": {"min": 0.0, "max": 1.0}} if "parameters" not in change else change.pop("parameters"), **change)


FILE_OF_FLOATS = """
method: random
program: train.py
parameters:
  lr: {values: [1e-5, 3e-4, 2, -.5, 1E+3]}
  one: {value: 1e-5}
  ppo:
    parameters:
      lr: {min: 1e-5, max: 3e-4}
      mixed: {values: [null, true, 2, none]}
      kwargs: {values: [{eps: 1e-8}]}
"""


def test_floats_without_a_dot_are_numbers_in_every_key(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE_OF_FLOATS)
    settings = {one.name: one.settings for one in read_sweep(file).all}
    assert settings == {
        "lr": {"values": [1e-5, 3e-4, 2, -0.5, 1000.0]},
        "one": {"value": 1e-5},
        "ppo.lr": {"min": 1e-5, "max": 3e-4},
        "ppo.mixed": {"values": [None, True, 2, "none"]},
        "ppo.kwargs": {"values": [{"eps": 1e-8}]},
    }


def test_keys_that_come_twice_are_named(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("method: grid\nprogram: train.py\nparameters:\n  lr: {value: 1}\n  lr: {value: 2}\n")
    with pytest.raises(SweepError, match=r"sweep\.yaml: not readable as YAML: line 5 sets 'lr', and so does line 4"):
        read_sweep(file)


def test_a_program_is_needed_unless_the_command_does_without():
    source = {"method": "random", "parameters": {"x": {"value": 1}}}
    with pytest.raises(SweepError, match="program: missing"):
        parse_sweep(source, "n")
    assert parse_sweep({**source, "command": ["make", "${args_no_hyphens}"]}, "n").command[0] == "make"


def test_the_sweeps_of_the_experiments_are_valid_and_find_their_programs():
    files = sorted(ROOT.glob("experiments/*/sweep*.yaml"))
    assert files
    for file in files:
        assert (ROOT / read_sweep(file).program).is_file()


# --- the next trial ----------------------------------------------------------------------------------------------


def test_grid_lists_every_combination_once():
    sweep = sweep_of(
        {
            "a": {"values": [1, "x"]},
            "b": {"min": 3, "max": 5},
            "c": {"value": None},
            "d": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5},  # a grid omits the maximum, as W&B's does
        },
        method="grid",
    )
    wanted = [{"a": a, "b": b, "c": None, "d": d} for a in (1, "x") for b in (3, 4, 5) for d in (0.0, 0.5)]
    assert suggestions(sweep, 20) == wanted


def test_grid_refuses_what_has_no_end():
    with pytest.raises(SweepError, match=r"parameters\.a\.parameters\.lr: a grid cannot list uniform"):
        sweep_of({"a": {"parameters": {"lr": {"min": 0.0, "max": 1.0}}}}, method="grid")


def test_random_is_the_same_for_a_seed_and_has_the_right_shares():
    unit, kind = {"min": 0.0, "max": 1.0}, {"values": ["a", "b"], "probabilities": [0.9, 0.1]}
    sweep = sweep_of({"lr": unit, "decay": unit, "kind": kind})
    drawn = suggestions(sweep, 400)
    assert drawn == suggestions(sweep, 400)
    assert drawn[:5] != suggestions(sweep, 5, seed=1)
    assert statistics.mean(item["lr"] for item in drawn) == pytest.approx(0.5, abs=0.05)
    assert sum(item["kind"] == "a" for item in drawn) / 400 == pytest.approx(0.9, abs=0.05)
    # Draws within a trial are independent: both are high as often as chance allows.
    assert sum(item["lr"] > 0.5 and item["decay"] > 0.5 for item in drawn) / 400 == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize("method", ["grid", "random", "bayes"])
def test_nested_parameters_arrive_as_mappings(method):
    ppo = {"parameters": {"lr": {"values": [0.5]}, "deep": {"parameters": {"x": {"value": "y"}}}}}
    sweep = sweep_of({"ppo": ppo, "seed": {"value": 3}}, method=method, metric={"name": "m"})
    assert suggestions(sweep, 1) == [{"ppo": {"lr": 0.5, "deep": {"x": "y"}}, "seed": 3}]


def bayes_run(sweep, objective, count, seed=0, study=None):
    """Returns the parameters and values of the trials in order; a failed trial has the value None."""
    study, seen = study or new_study(sweep), []
    for _ in range(count):
        trial = next_trial(sweep, study, seed=seed, count=math.inf)
        value = objective(trial.user_attrs["parameters"])
        study.tell(trial, value, TrialState.PRUNED if value is None else TrialState.COMPLETE)
        seen.append((trial.user_attrs["parameters"], value))
    return seen


BAYES = {
    "lr": {"distribution": "log_uniform_values", "min": 1.0e-6, "max": 1.0},
    "width": {"min": 1, "max": 64},
    "kind": {"values": ["good", "bad", [1]]},
}


def objective(values):
    return (math.log10(values["lr"]) + 3) ** 2 + abs(values["width"] - 40) / 20 + (values["kind"] != "good")


def test_bayes_goes_where_the_metric_is_good():
    sweep = sweep_of(BAYES, method="bayes", metric={"name": "m"})
    seen = bayes_run(sweep, objective, 40)
    chance = [objective(item) for item in suggestions(sweep_of(BAYES), 200)]
    late = statistics.median(value for _, value in seen[-15:])
    assert late < statistics.quantiles(chance, n=10)[0]  # better than nine tenths of all draws
    assert all(parameters["kind"] in ("good", "bad", [1]) for parameters, _ in seen)


def test_bayes_maximizes_too_and_goes_on_in_another_process_as_in_one(tmp_path):
    sweep = sweep_of(BAYES, method="bayes", metric={"name": "m", "goal": "maximize"})
    seen = bayes_run(sweep, lambda values: -objective(values), 40)
    assert statistics.median(value for _, value in seen[-15:]) > -2
    again = []
    for count in (12, 2):
        storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
        again += bayes_run(sweep, lambda values: -objective(values), count, study=new_study(sweep, storage))
    assert again == seen[:14]


def test_bayes_keeps_away_from_where_runs_fail():
    sweep = sweep_of({"x": {"min": 0.0, "max": 1.0}}, method="bayes", metric={"name": "m"})
    seen = bayes_run(sweep, lambda values: None if values["x"] > 0.5 else random.Random(values["x"]).random(), 40)
    assert sum(parameters["x"] > 0.5 for parameters, _ in seen[20:]) <= 3


def test_bayes_does_not_crowd_around_running_trials():
    sweep = sweep_of({"x": {"min": 0.0, "max": 1.0}}, method="bayes", metric={"name": "m"})
    study = new_study(sweep)
    bayes_run(sweep, lambda values: (values["x"] - 0.3) ** 2, 25, study=study)
    trials = [next_trial(sweep, study, seed=0, count=math.inf) for _ in range(6)]
    spread = [trial.user_attrs["parameters"]["x"] for trial in trials]
    assert len(set(spread)) == len(spread)
    assert statistics.pstdev(spread) > 0.01


# --- early stopping ----------------------------------------------------------------------------------------------


def test_runs_are_compared_at_the_documented_iterations():
    band = {"type": "hyperband"}
    assert Hyperband(**band, min_iter=3).rungs[:4] == [3, 9, 27, 81]
    assert Hyperband(**band, max_iter=27, s=2).rungs == [3, 9]
    assert Hyperband(**band, max_iter=30, s=9, eta=2).rungs == [1, 2, 4, 8, 16]


def test_the_worse_ones_are_stopped_and_the_best_go_on():
    """Runs reach iteration 2 one by one; a run continues if it is in the best third so far: 1, later 2, of them."""
    rest = {"metric": {"name": "m"}, "early_terminate": {"type": "hyperband", "min_iter": 2, "eta": 3}}
    sweep = sweep_of({"x": {"min": 0.0, "max": 1.0}}, **rest)
    study, stopped = new_study(sweep), []
    for value in (3.0, 4.0, 2.0, 5.0, 1.0, 1.5):
        trial = next_trial(sweep, study, seed=0, count=math.inf)
        trial.report(value, 1)
        assert not trial.should_prune()
        trial.report(value, 2)
        stopped.append(trial.should_prune())
    assert stopped == [False, True, False, True, False, False]


# --- the command -------------------------------------------------------------------------------------------------

ARGS = {"lr": 1.0e-4, "flag": True, "off": False, "ppo": {"a": [1, 2]}, "text": "two words", "none": None}
COMMANDS = [
    ["${env}", "${interpreter}", "${program}", "${args}"],
    ["${program}", "${args_no_hyphens}", "x"],
    ["${interpreter}", "-u", "${program}", "${args_no_boolean_flags}", 3],
    ["${program}", "--config=${envvar:PLACE}/c.yaml", "${envvar:MISSING_ONE}", "${args_json}"],
    ["${program}", "${args_json_file}", "${unknown}"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_are_those_of_the_agent(command, tmp_path, monkeypatch):
    """W&B's own agent, given the same command, starts the same words with the same parameter file."""
    from wandb import wandb_agent

    class Started:
        def __init__(self, command, env, forward_signals):
            self.command, self.env = command, env

    monkeypatch.setattr(wandb_agent, "AgentProcess", Started)
    monkeypatch.setenv("PLACE", "/some/where")
    for name, value in (("WANDB_DIR", str(tmp_path)), ("WANDB_SWEEP_ID", "s"), ("WANDB_RUN_ID", "r")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", "")
    agent = object.__new__(wandb_agent.Agent)
    agent._in_jupyter, agent._function, agent._forward_signals = False, None, False
    agent._sweep_command, agent._run_processes = list(command), {}
    args = {name: {"value": value} for name, value in ARGS.items()}
    agent._command_run({"run_id": "r", "program": "train.py", "args": args})
    theirs = agent._run_processes["r"]

    json_file = tmp_path / "wandb" / "sweep-s" / "config-r.json"
    theirs_json = json_file.read_text() if json_file.exists() else None
    json_file.unlink(missing_ok=True)
    assert fill_command(command, program="train.py", args=args, json_file=json_file) == theirs.command
    assert (json_file.read_text() if json_file.exists() else None) == theirs_json
    written = yaml.safe_load(Path(theirs.env["WANDB_SWEEP_PARAM_PATH"]).read_text())
    assert written == {"wandb_version": 1, **args}
