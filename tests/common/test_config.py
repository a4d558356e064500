from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from transformers import TrainingArguments

from trimtab_common.config import (
    Count,
    CountFromZero,
    Decay,
    Fraction,
    NotNegative,
    Positive,
    Seed,
    Share,
    check_ranges,
    computed,
    parse_config,
    read_settings,
    setting,
    to_flat_dict,
)


@dataclass(frozen=True)
class PPOConfig:
    learning_rate: float = field(default=1e-5, metadata={"help": "Step size of Adam."})
    steps: int = 10
    seed: int = 0
    mode: Literal["a", "b"] = "a"
    limit: Optional[int] = None  # noqa: UP045
    names: list[str] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    rates: list[float] = field(default_factory=list)
    tracker_kwargs: dict[str, Any] = field(default_factory=lambda: {"entity": "me"})
    flag: bool = False
    either: Union[int, str] = "x"  # noqa: UP007
    text: str | None = "t"
    prompt: str = "p"
    folder: Path = Path("out")
    runtime: int = field(init=False, default=3)

    def __post_init__(self):
        if self.steps > 100:
            raise ValueError(f"steps={self.steps} is too many. Use 100 or fewer.")


@dataclass
class RunConfig:
    model: str = "gpt2"
    seed: int = 1


def ppo(*argv: str) -> PPOConfig:
    return parse_config(PPOConfig, RunConfig, argv=argv)[0]


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--learning_rate", "1e-4"], "learning_rate", 1e-4),
        (["--learning-rate=1e-4"], "learning_rate", 1e-4),
        (["--learning_rate", "-1e-4"], "learning_rate", -1e-4),
        (["--learning_rate=1"], "learning_rate", 1.0),
        (["--learning_rate=inf"], "learning_rate", float("inf")),
        (["--ppo.learning_rate=0.5"], "learning_rate", 0.5),
        (["--ppo.learning-rate=0.5"], "learning_rate", 0.5),
        (["--ppo={'learning_rate': 0.5, 'steps': 3}"], "learning_rate", 0.5),
        (["--steps=50.0"], "steps", 50),
        (["--mode=b"], "mode", "b"),
        (["--limit=None"], "limit", None),
        (["--limit=7"], "limit", 7),
        (["--names=['a', 'b']"], "names", ["a", "b"]),
        (["--names=[a, b]"], "names", ["a", "b"]),
        (["--names", "a", "b"], "names", ["a", "b"]),
        (["--names=a"], "names", ["a"]),
        (["--names", "1", "2"], "names", ["1", "2"]),
        (["--sizes=[1, 2]"], "sizes", (1, 2)),
        (["--rates=[1e-4, 2]"], "rates", [1e-4, 2.0]),
        (
            ["--tracker_kwargs={'a': 1, 'b': None, 'c': True}"],
            "tracker_kwargs",
            {"a": 1, "b": None, "c": True},
        ),
        (['--tracker_kwargs={"a": null, "b": 1e-3}'], "tracker_kwargs", {"a": None, "b": 1e-3}),
        (["--tracker_kwargs.project=x"], "tracker_kwargs", {"entity": "me", "project": "x"}),
        (["--ppo.tracker_kwargs.a.b-c=3"], "tracker_kwargs", {"entity": "me", "a": {"b-c": 3}}),
        (["--flag"], "flag", True),
        (["--flag", "--mode=a"], "flag", True),
        (["--flag=True"], "flag", True),
        (["--flag=true", "--flag=False"], "flag", False),
        (["--either=3"], "either", 3),
        (["--either=y"], "either", "y"),
        (["--text=None"], "text", None),
        (["--text=none"], "text", "none"),
        (["--text=True"], "text", "True"),
        (["--text=3"], "text", "3"),
        (["--text="], "text", ""),
        (["--prompt=[INST] a: {b}=c"], "prompt", "[INST] a: {b}=c"),
        (["--prompt='quoted'"], "prompt", "'quoted'"),
        (["--folder=a/b"], "folder", Path("a/b")),
    ],
)
def test_what_people_and_sweep_agents_pass(argv, name, value):
    got = getattr(ppo(*argv), name)
    assert got == value
    assert type(got) is type(value) or isinstance(got, Path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learning_rat=1"], ["--learning_rat", "Did you mean learning_rate?"]),
        (["--ppo.stepps=1"], ["--ppo.stepps", "ppo.steps"]),
        (["--zzzzzz=1"], ["--help"]),
        (["--runtime=1"], ["--runtime"]),
        (["lonely"], ["'lonely'", "--name=value"]),
        (["--steps=1.5"], ["--steps", "1.5", "expected int", "fractional"]),
        (["--steps=True"], ["--steps", "expected int"]),
        (["--steps"], ["--steps", "expected int"]),
        (["--learning_rate=fast"], ["fast", "float"]),
        (["--mode=c"], ["'c'", "'a' or 'b'"]),
        (["--prompt=None"], ["--prompt", "None", "expected str"]),
        (["--steps.x=1"], ["--steps.x"]),
        (["--steps=1000"], ["PPOConfig: steps=1000 is too many. Use 100 or fewer."]),
        (["--config=nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["--config"], ["--config needs"]),
    ],
)
def test_mistakes_end_with_a_short_message_and_status_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        ppo(*argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def test_file_then_flags_and_class_before_shared_names(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 1e-4\nseed: 5\nrun:\n  seed: 6\ntracker_kwargs: {lr: 1e-3}\nsteps: 4\n")
    config, run = parse_config(PPOConfig, RunConfig, argv=["--steps=9", f"--config={file}", "--tracker_kwargs.a=1"])
    assert (config.learning_rate, config.steps, config.seed, run.seed) == (1e-4, 9, 5, 6)
    assert config.tracker_kwargs == {"lr": 1e-3, "a": 1}
    config, run = parse_config(PPOConfig, RunConfig, argv=["--run.seed=8", "--seed=7"])
    assert (config.seed, run.seed) == (7, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [("stepz: 4", "stepz is not a setting. Did you mean steps?"), ("steps: 4.5", "4.5"), ("- 1", "list")],
)
def test_mistakes_in_a_file_name_the_file(tmp_path, capsys, content, words):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        ppo("--config", str(file))
    error = capsys.readouterr().err
    assert str(file) in error
    assert words in error


def bomb(line: str) -> str:
    """Returns nine lines, each of which refers to the previous line nine times."""
    return "\n".join(["a0: &a0 {x: 1}", *(line.format(n=n, m=", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 10))])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bomb("a{n}: &a{n} [{m}]"), "its aliases stand for more than 100,000 characters"),
        (bomb("a{n}: &a{n}\n  <<: [{m}]"), "its aliases stand for more than 100,000 characters"),
        (f"a: &a {'x' * 1000}\nb: [{', '.join(['*a'] * 1000)}]", "its aliases stand for more than 100,000 characters"),
        ("a: &a [1, *a]", "line 1: a value holds an alias of itself"),
        ("seed: 1\nsteps: 2\nseed: 3", "line 3 sets 'seed', and so does line 1"),
        ("tracker_kwargs:\n  a: {b: 1,\n    'b': 2}", "line 3 sets 'b', and so does line 2"),
        ("1: 2\n'1': 3", "line 2 sets '1', and so does line 1"),
    ],
    ids=range(7),
)
def test_aliases_without_measure_and_keys_that_come_twice_are_refused_at_once(tmp_path, capsys, content, words):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        ppo("--config", str(file))
    assert f"{file}: not readable as YAML: {words}" in capsys.readouterr().err


def test_anchors_aliases_and_merges_of_ordinary_size_are_read(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "x: {y: &base {a: 1, rates: [1e-5, .5e3, -.5, 2]}}\nmerged: &more {<<: *base, a: 2, c: 3}\n"
        "twice: {<<: [*base, *more], a: 4}\nalias: *base\n"
    )
    base = {"a": 1, "rates": [1e-5, 500.0, -0.5, 2]}
    merged = base | {"a": 2, "c": 3}
    expected = {"x": {"y": base}, "merged": merged, "twice": merged | {"a": 4}, "alias": base}
    assert read_settings(file) == expected


def test_a_recipe_replaces_defaults_and_files_and_flags_replace_the_recipe(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("steps: 4\n")
    recipe = {"steps": 3, "learning_rate": 1e-4, "seed": 5, "run": {"seed": 6}, "tracker_kwargs": {"a": 1}}
    argv = [f"--config={file}", "--learning_rate=1e-3", "--tracker_kwargs.b=2"]
    config, run = parse_config(PPOConfig, RunConfig, argv=argv, recipe=recipe)
    assert (config.steps, config.learning_rate, config.seed, run.seed) == (4, 1e-3, 5, 6)
    assert config.tracker_kwargs == {"a": 1, "b": 2}
    assert recipe["tracker_kwargs"] == {"a": 1}


def test_help_shows_the_defaults_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(PPOConfig, argv=["--help"], recipe={"steps": 77})
    assert stop.value.code == 0
    assert "--steps  int, default 77" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"]])
@pytest.mark.parametrize(
    ("recipe", "words"),
    [({"stepz": 4}, "recipe: stepz is not a setting. Did you mean steps?"), ({"steps": "many"}, "recipe: steps")],
)
def test_a_mistake_in_a_recipe_is_an_error(argv, recipe, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(PPOConfig, argv=argv, recipe=recipe)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_missing_value_and_help(capsys):
    @dataclass
    class Needs:
        path: str

    with pytest.raises(SystemExit):
        parse_config(Needs, argv=[])
    assert "--path" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        parse_config(PPOConfig, Needs, argv=["--help"], description="What it does.")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "What it does.",
        "--learning_rate  float, default 1e-05",
        "Step size of Adam.",
        "required",
        "--ppo.",
    ):
        assert word in text
    assert "runtime" not in text


@dataclass
class TrainedConfig(TrainingArguments):
    learning_rate: float = setting("Ours, of the algorithm.", default=1e-6)
    new: Optional[int] = setting("A name of the algorithm.", default=None)  # noqa: UP045
    old: int | None = setting("Deprecated name of new.", default=None)
    both: int | None = computed("Counted by the trainer.")


def help_of(capsys, *argv: str, **options: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_config(TrainedConfig, argv=argv, **options)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_algorithm_and_what_the_recipe_sets(capsys):
    text = help_of(capsys, "--help", recipe={"warmup_steps": 7}, program="trimtab x")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert flags == ["--learning_rate", "--new", "--warmup_steps", "--help-all"]
    assert text.startswith("usage: trimtab x [--config FILE.yaml]")
    assert "--new  int | None, default None" in text
    assert "the others, of transformers.TrainingArguments." in text


def test_help_all_shows_every_flag_and_ours_first(capsys):
    text = help_of(capsys, "--help-all")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert flags[:3] == ["--learning_rate", "--new", "--old"]
    inherited = {f"--{one.name}" for one in fields(TrainingArguments) if one.init}
    assert set(flags[3:]) == inherited - {"--learning_rate"}


def test_a_computed_field_is_no_flag(capsys):
    for flag in ("--both=3", "--trained.both=3"):
        with pytest.raises(SystemExit) as stop:
            parse_config(TrainedConfig, argv=[flag])
        assert stop.value.code == 2
        assert "is no setting, because it is computed" in capsys.readouterr().err


def test_flat_dict_has_plain_values_and_tells_apart_what_differs():
    @dataclass
    class SomeOptions:
        hub_token: str = "secret"
        model: str = "gpt2"

    flat = to_flat_dict(ppo("--tracker_kwargs.a.b=1"), RunConfig(), SomeOptions())
    assert flat["tracker_kwargs.a.b"] == 1
    assert (flat["ppo.seed"], flat["run.seed"], flat["model"]) == (0, 1, "gpt2")
    assert (flat["folder"], flat["sizes"]) == ("out", [])
    assert "secret" not in flat.values()
    nested = to_flat_dict(ppo("--tracker_kwargs={'token': 'secret', 'api_key': 'secret', 'tokens': 'kept'}"))
    assert "secret" not in nested.values()
    assert nested["tracker_kwargs.tokens"] == "kept"
    assert not {"seed", "tracker_kwargs", "run.model"} & flat.keys()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"api-key": "hush"},
        {"headers": {"Authorization": "Bearer hush"}},
        {"servers": [{"url": "here", "password": "hush"}, {"db_passwd": "hush"}]},
        {"a": [[{"client_secret": "hush"}]], "AWS_SECRET_ACCESS_KEY": "hush"},
        {"servers": ["http://me:hush@node:8000/v1"], "base_url": "https://hush@node"},
        {"credentials": {"user": "me", "value": "hush"}},
    ],
)
def test_no_secret_reaches_a_tracker(kwargs: dict[str, Any]):
    config = PPOConfig(tracker_kwargs={"wandb": kwargs, "mode": "kept"})
    flat = to_flat_dict(config)
    assert "hush" not in repr(flat)
    assert flat["tracker_kwargs.mode"] == "kept"
    assert config.tracker_kwargs["wandb"] == kwargs


def test_flat_dict_leaves_deprecated_names_out():
    @dataclass
    class Options:
        new: int = 1
        old: int | None = field(default=None, metadata={"help": "Deprecated: use new."})

    assert to_flat_dict(Options()) == {"new": 1}


@dataclass
class Shapes:
    sizes: list[int] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--sizes=many"], "unable to parse string as an integer"),
        (["--sizes", "1", "2.5", "3"], "got a number with a fractional part"),
        (["--limits.high=low"], "unable to parse string as a number"),
        (["--limits=3"], "should be a valid dictionary"),
    ],
)
def test_the_problem_that_is_shown_lies_deepest_in_the_value(argv, problem, capsys):
    with pytest.raises(SystemExit):
        parse_config(Shapes, argv=argv)
    assert problem in capsys.readouterr().err


@dataclass
class Ranges:
    count: Count = setting("A count.", default=1)
    retries: CountFromZero = setting("A count.", default=0)
    rate: Positive | None = setting("A rate.", default=None)
    weight: NotNegative = setting("A weight.", default=0.0)
    share: Share = setting("A share.", default=1.0)
    decay: Decay = setting("A decay.", default=0.0)
    fraction: Fraction = setting("A fraction.", default=0.5)
    seed: Seed = setting("A seed.", default=0)
    free: float = 0.0

    def __post_init__(self):
        check_ranges(self)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 0}, "count=0 must be a whole number of at least 1"),
        ({"count": 1.5}, "count=1.5 must be a whole number"),
        ({"count": float("inf")}, "count=inf must be a whole number"),
        ({"retries": -1}, "retries=-1 must be a whole number, 0 or above"),
        ({"rate": 0.0}, "rate=0.0 must be a finite number above 0"),
        ({"rate": float("inf")}, "rate=inf must be a finite number"),
        ({"weight": -1.0}, "weight=-1.0 must be a finite number, 0 or above"),
        ({"weight": float("inf")}, "weight=inf"),
        ({"share": 0.0}, "share=0.0 must be a number above 0 and up to 1"),
        ({"share": 1.1}, "share=1.1"),
        ({"decay": 1.0}, "decay=1.0 must be a number from 0 to below 1"),
        ({"decay": -0.1}, "decay=-0.1"),
        ({"fraction": 1.1}, "fraction=1.1 must be a number from 0 to 1"),
        ({"seed": 2**32}, r"seed=4294967296 must be in \[0, 2\*\*32\)"),
        ({"count": None}, "count=None must be a whole number of at least 1"),
    ],
)
def test_a_setting_outside_its_range_is_refused_with_the_range(settings, words):
    with pytest.raises(ValueError, match=words):
        Ranges(**settings)


def test_the_ends_of_a_range_and_an_absent_setting_are_accepted():
    Ranges(count=3.0, rate=1e-9, weight=0.0, share=1.0, decay=0.0, fraction=1.0, seed=0, free=float("nan"))
    Ranges(rate=None)


def test_a_count_that_is_a_float_becomes_an_int():
    settings = Ranges(count=64 / 2, retries=2.0, weight=2.0)
    assert [type(value) for value in (settings.count, settings.retries, settings.weight)] == [int, int, float]
    assert settings.count == 32
