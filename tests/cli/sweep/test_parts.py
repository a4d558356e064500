"""The parts of `trimtab sweep`: what is read, drawn, suggested, stopped and started."""

import math
import random
import statistics
from pathlib import Path

import pytest
import yaml

from trimtab_cli.sweep.distributions import KINDS, SweepError
from trimtab_cli.sweep.hyperband import brackets, runs_to_stop
from trimtab_cli.sweep.launch import fill_command
from trimtab_cli.sweep.search import imputed, suggest
from trimtab_cli.sweep.spec import Hyperband, Metric, parse_sweep, read_sweep
from trimtab_cli.sweep.store import FAILED, FINISHED, RUNNING, Trial

ROOT = Path(__file__).resolve().parents[3]
EDGES = [0.0, 1e-9, 0.2, 0.5, 0.8, 1 - 1e-9, 1.0]


def sweep_of(parameters, **rest):
    return parse_sweep({"method": "random", "program": "train.py", "parameters": parameters, **rest}, "default")


def parameter(**settings):
    (parameter,) = sweep_of({"x": settings}).parameters
    return parameter


def suggestions(sweep, count, seed=0):
    suggestions = [suggest(sweep, number=n, seed=seed, trials=[], history=lambda trial: []) for n in range(count)]
    return [item.parameters for item in suggestions if item]


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
    """A test's name that is the same in every process."""
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
        ({"method": "gird"}, "method: got 'gird'; did you mean grid"),
        ({"method": None}, "method: got None"),
        ({"metrik": {}}, "metrik: unknown key; did you mean metric"),
        ({"job": "x"}, "job: cannot be run here"),
        ({"parameters": {}}, "parameters: empty"),
        ({"parameters": {"lr": 3}}, "parameters.lr: got 3"),
        ({"parameters": {"1x": {"value": 3}}}, "parameters.1x: not a name"),
        ({"parameters": {"lr": {"min": 1}}}, "parameters.lr.max: missing"),
        ({"parameters": {"lr": {"min": "1e-4", "max": 1}}}, "parameters.lr.min: got '1e-4'; a number.*without quotes"),
        ({"parameters": {"lr": {"min": 2, "max": 1}}}, "parameters.lr.min: got 2, which is not below max"),
        ({"parameters": {"lr": {"distribution": "unifrom", "min": 0, "max": 1}}}, "did you mean uniform"),
        ({"parameters": {"lr": {"distribution": "normal", "mean": 0}}}, "parameters.lr.mean: unknown key"),
        ({"parameters": {"lr": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "lr.min: got 0"),
        ({"parameters": {"lr": {"distribution": "log_uniform", "min": 1, "max": 2048}}}, "lr.max.*exponent of e"),
        ({"parameters": {"lr": {"values": [1, 2], "probabilities": [0.5, 0.6]}}}, "lr.probabilities: got"),
        (
            {"parameters": {"lr": {"values": [3e-4, "1e-5", 2]}}},
            "lr.values: got .* '1e-5' is text, and other values are",
        ),
        ({"parameters": {"lr": {"values": ["-.5", 2], "probabilities": [0.5, 0.5]}}}, "'-.5' is text, and other"),
        ({"parameters": {"lr": {"values": [1, 2], "probabilities": [1.0]}}}, "lr.probabilities: 1 for 2 values"),
        ({"parameters": {"a": {"parameters": {"b": {"values": []}}}}}, r"parameters.a.parameters.b.values: got \[\]"),
        ({"parameters": {"a": {"parameters": {"b": {"value": 1}}, "min": 1}}}, "parameters.a.min: unknown key"),
        ({"metric": {"goal": "minimize"}}, "metric.name"),
        ({"metric": {"name": "m", "goal": "max"}}, "metric.goal: got 'max'; one of minimize, maximize"),
        ({"method": "bayes"}, "metric: missing; method: bayes"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 2}}, "metric: missing; early_terminate"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate: min_iter is needed, or max_iter with s"),
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
    file.write_text(FILE_OF_FLOATS.replace("base: &lr {values: [1e-5, 3e-4, 2, -.5, 1E+3]}\n", ""))
    settings = {one.name: one.settings for one in read_sweep(file).parameters}
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
        assert (ROOT / read_sweep(file).get("program")).is_file()


# --- what comes next ---------------------------------------------------------------------------------------------


def test_grid_lists_every_combination_once():
    sweep = sweep_of(
        {
            "a": {"values": [1, "x"]},
            "b": {"min": 3, "max": 5},
            "c": {"value": None},
            "d": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5},  # without its max, as W&B's grid
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
    # Draws of one trial are independent: as often both high as chance has it.
    assert sum(item["lr"] > 0.5 and item["decay"] > 0.5 for item in drawn) / 400 == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize("method", ["grid", "random", "bayes"])
def test_nested_parameters_arrive_as_mappings(method):
    ppo = {"parameters": {"lr": {"values": [0.5]}, "deep": {"parameters": {"x": {"value": "y"}}}}}
    sweep = sweep_of({"ppo": ppo, "seed": {"value": 3}}, method=method, metric={"name": "m"})
    assert suggestions(sweep, 1) == [{"ppo": {"lr": 0.5, "deep": {"x": "y"}}, "seed": 3}]


def bayes_run(sweep, objective, count, seed=0):
    trials = []
    for number in range(count):
        suggestion = suggest(sweep, number=number, seed=seed, trials=trials, history=lambda trial: [])
        value = objective(suggestion.parameters)
        status = FAILED if value is None else FINISHED
        trials.append(Trial(number, suggestion.parameters, suggestion.point, status=status, metric=value))
    return trials


BAYES = {
    "lr": {"distribution": "log_uniform_values", "min": 1.0e-6, "max": 1.0},
    "width": {"min": 1, "max": 64},
    "kind": {"values": ["good", "bad", [1]]},
}


def objective(values):
    return (math.log10(values["lr"]) + 3) ** 2 + abs(values["width"] - 40) / 20 + (values["kind"] != "good")


def test_bayes_goes_where_the_metric_is_good():
    sweep = sweep_of(BAYES, method="bayes", metric={"name": "m"})
    late = [trial.metric for trial in bayes_run(sweep, objective, 40)[-15:]]
    chance = [objective(item) for item in suggestions(sweep_of(BAYES), 200)]
    assert statistics.median(late) < statistics.quantiles(chance, n=10)[0]  # better than nine tenths of all draws
    assert all(trial.parameters["kind"] in ("good", "bad", [1]) for trial in bayes_run(sweep, objective, 12))


def test_bayes_maximizes_too_and_is_the_same_for_a_seed():
    sweep = sweep_of(BAYES, method="bayes", metric={"name": "m", "goal": "maximize"})
    trials = bayes_run(sweep, lambda values: -objective(values), 40)
    assert statistics.median(trial.metric for trial in trials[-15:]) > -2
    assert [trial.parameters for trial in trials[:14]] == [
        trial.parameters for trial in bayes_run(sweep, lambda values: -objective(values), 14)
    ]


def test_bayes_keeps_away_from_where_runs_fail():
    sweep = sweep_of({"x": {"min": 0.0, "max": 1.0}}, method="bayes", metric={"name": "m"})
    trials = bayes_run(sweep, lambda values: None if values["x"] > 0.5 else random.Random(values["x"]).random(), 40)
    assert sum(trial.parameters["x"] > 0.5 for trial in trials[20:]) <= 3


def test_imputed_metrics_by_hand():
    trials = [Trial(0, {}, metric=1.0, status=FINISHED), Trial(1, {}, metric=4.0, status=FINISHED), Trial(2, {})]
    seen = {2: [3.0, 2.0, 2.5]}

    def of(how, goal="minimize"):
        metric = Metric("m", goal)
        return imputed(how, trials[2], metric, trials, lambda trial: seen.get(trial.number, []))

    assert (of("worst"), of("worst", "maximize")) == (4.0, 1.0)
    assert (of("latest"), of("best"), of("best", "maximize")) == (2.5, 2.0, 3.0)
    seen.clear()
    assert of("latest") == 4.0
    trials[0].metric = trials[1].metric = None
    assert of("worst") is None


def test_bayes_does_not_crowd_around_running_trials():
    sweep = sweep_of({"x": {"min": 0.0, "max": 1.0}}, method="bayes", metric={"name": "m"})
    trials = bayes_run(sweep, lambda values: (values["x"] - 0.3) ** 2, 25)
    spread = []
    for _ in range(6):
        suggestion = suggest(sweep, number=len(trials), seed=0, trials=trials, history=lambda trial: [])
        trials.append(Trial(len(trials), suggestion.parameters, suggestion.point, status=RUNNING))
        spread.append(suggestion.parameters["x"])
    assert min(abs(a - b) for i, a in enumerate(spread) for b in spread[:i]) > 0
    assert statistics.pstdev(spread) > 0.01


# --- early stopping ----------------------------------------------------------------------------------------------


def test_brackets_as_documented():
    assert brackets(Hyperband(min_iter=3), longest=100) == [3, 9, 27, 81]
    assert brackets(Hyperband(max_iter=27, s=2), longest=100) == [3, 9]
    assert brackets(Hyperband(max_iter=30, s=9, eta=2), longest=100) == [1, 3, 7, 15]


def test_the_documented_example_stops_b():
    """The example in the docstring of W&B's `sweeps`: b does not pass the first bracket; a finished run is left."""
    histories = {"a": [10, 9], "b": [10, 10], "c": [10, 8, 8], "d": [10, 7, 7], "e": [10, 6, 6]}
    settings = Hyperband(max_iter=5, eta=2, s=2, strict=True)
    assert set(runs_to_stop(settings, histories, ["b", "c", "d"], sign=1, compared={})) == {"b"}
    assert set(runs_to_stop(settings, histories, ["a", "b"], sign=1, compared={})) == {"a", "b"}
    negative = {key: [-value for value in values] for key, values in histories.items()}
    assert set(runs_to_stop(settings, negative, ["b", "c", "d"], sign=-1, compared={})) == {"b"}


def test_strict_looks_at_the_bracket_and_lenient_at_the_best_so_far():
    histories = {"x": [0, 0, 0], "y": [1, 1, 1], "late": [3, 3, 0.5], "early": [0.5, 3, 3]}
    for strict, stopped in ((True, {"late", "early"}), (False, set())):
        settings = Hyperband(min_iter=2, eta=4, strict=strict)
        assert set(runs_to_stop(settings, histories, ["late", "early"], sign=1, compared={})) == stopped


def test_a_bracket_passed_between_two_looks_counts_and_an_old_one_does_not():
    """b is bad at 2 and alone at 6; once it was compared beyond 2, better runs that come later do not end it."""
    histories = {"a": [0, 0, 0], "b": [5] * 7}
    settings = Hyperband(min_iter=2)
    for compared, stopped in (({}, {"b"}), ({"b": 1}, {"b"}), ({"b": 3}, set())):
        assert set(runs_to_stop(settings, histories, ["b"], sign=1, compared=compared)) == stopped


def test_nobody_is_stopped_before_the_first_bracket_or_alone():
    assert runs_to_stop(Hyperband(min_iter=3), {"a": [0, 0, 0], "b": [9, 9]}, ["b"], sign=1, compared={}) == {}
    assert runs_to_stop(Hyperband(min_iter=1), {"b": [9, 9]}, ["b"], sign=1, compared={}) == {}


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
    """W&B's own agent, told to run the same, starts the same words with the same parameter file."""
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
