"""Every experiment's sweep.yaml: its programs accept an agent's arguments, and report the metric under its name."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wandb
import yaml
from datasets import Dataset, DatasetDict
from PIL import Image
from tests.lm import tiny
from tests.marks import slow_but
from tokenizers import Tokenizer, models, pre_tokenizers
from tools.chaos.wandb_files import RunFile
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, TrainingArguments
from transformers.integrations.integration_utils import rewrite_logs

from experiments.assets.data import GUTENBERG
from experiments.black_2023_ddpo import train as ddpo
from experiments.clark_2023_draft import train as draft
from experiments.dong_2023_raft import ppo as raft_ppo
from experiments.dong_2023_raft import train as raft
from experiments.gao_2022_overoptimization import train as gao
from experiments.huang_2024_details import train as details
from experiments.rafailov_2023_dpo_frontier import grpo as frontier_grpo
from experiments.rafailov_2023_dpo_frontier import ppo as frontier_ppo
from experiments.rafailov_2023_dpo_frontier import raft as frontier_raft
from experiments.rafailov_2023_dpo_frontier import sft as frontier_sft
from experiments.rafailov_2023_dpo_frontier import train as dpo
from experiments.shao_2024_grpo import ppo as sums_ppo
from experiments.shao_2024_grpo import train as grpo
from experiments.stiennon_2020_summarize import judgements, reward, sft
from experiments.stiennon_2020_summarize import train as pipeline
from experiments.ziegler_2019_sentiment import search
from experiments.ziegler_2019_sentiment import train as ppo
from trimtab_cli.sweep.runner import fill_command, is_finite
from trimtab_cli.sweep.spec import Sweep, SweepError, read_sweep
from trimtab_cli.sweep.study import new_study, next_trial, parameters_at, read_study, status_of, trials_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    file
    for kind in ("smoke", "sweep", "reproduce", "night", "gate")
    for file in (ROOT / "experiments").glob(f"*/{kind}*.yaml")
)
QUICK = ("smoke", "reproduce")  # of the tiers
PROSE = "the cat was so happy and good but a sad bad dog hated it then he loved her and they cried in a terrible storm"
COMMANDS = {
    "args": ["${env}", "${interpreter}", "${program}", "${args}"],
    "args_no_boolean_flags": ["${env}", "${interpreter}", "${program}", "${args_no_boolean_flags}"],
    "args_json_file": ["${env}", "${interpreter}", "${program}", "--config", "${args_json_file}"],
}
SHORT = {"max_new_tokens": 4, "samples": 1}
STEPS = {"steps": 2, "batch_size": 4, "mini_batch_size": 2}
BATCH = {"logging_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "use_cpu": True}
# What agents pass: a float with an e in Python, none, true and false, a mapping; below also lists and nested names.
AWKWARD = {
    "learning_rate": 1e-05,
    "resume_from_checkpoint": None,
    "eval_on_start": False,
    "disable_tqdm": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
AWKWARD_STEPS = {
    "learning_rate": 1e-05,
    "max_grad_norm": None,
    "adap_kl_ctrl": True,
    "use_score_scaling": False,
    "tracker_kwargs": {"tags": ["a", "b"]},
}
SECTIONS = {  # classes, as a parameter names them
    "run",
    "stories_run",
    "search",
    "ppo",
    "details_ppo",
    "sft",
    "reward",
    "iterative_sft",
    "dpo",
    "grpo",
    "ddpo",
    "flow_grpo",
    "diffusion_nft",
    "align_prop",
    "diffusion_dpo",
}


def logging_config(configs: Sequence[Any]) -> Any:
    """The settings that say where a run logs: the trainer's, which are second, or the only ones."""
    return configs[:2][-1]


def folder_setting(config: Any) -> str:
    return "logdir" if hasattr(config, "logdir") else "output_dir"


@dataclass(frozen=True)
class Program:
    """A program, and parameters for a two-step run on a tiny model."""

    module: ModuleType
    sizes: Mapping[str, Any]
    awkward: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    """Sections of the methods that this run does not choose, which its config.json lacks."""

    @property
    def path(self) -> str:
        return str(Path(str(self.module.__file__)).relative_to(ROOT))

    @property
    def is_own_loop(self) -> bool:
        """Whether our tracker logs, instead of transformers' callbacks."""
        return not isinstance(logging_config(self.parse([])), TrainingArguments)

    @property
    def takes_model(self) -> bool:
        return self.module not in (ddpo, draft)

    def parse(self, words: list[str]) -> tuple[Any, ...]:
        return self.module.settings(words)


PROGRAMS = [
    Program(ppo, {**SHORT, **STEPS, "eval_prompts": 2}, {**AWKWARD_STEPS, "run": {"sampling_temperature": 0.9}}),
    Program(
        search,
        {**SHORT, **STEPS, "eval_prompts": 2, "look_every": 1, "seeds": 2},
        {**AWKWARD_STEPS, "search": {"sampling_temperature": 0.9}},
    ),
    Program(
        details,
        {**SHORT, **STEPS, "eval_prompts": 2, "stops": []},
        {
            **AWKWARD_STEPS,
            "logprob_temperature": None,
            "details_ppo": {"missing_eos_penalty": None},
            "stories_run": {"sampling_temperature": 0.9},
        },
    ),
    Program(
        gao,
        {
            **SHORT,
            **STEPS,
            "eval_prompts": 2,
            "labels": 4,
            "comparisons": 4,
            "bank_labels": [2, 4],
            "bank_prompts": 2,
            "bank_samples": 2,
        },
        {**AWKWARD_STEPS, "penalty": 10.0, "run": {"sampling_temperature": 0.9}},
    ),
    Program(
        sft,
        {**BATCH, **SHORT, "max_steps": 2, "max_length": 64, "words": 12, "eval_documents": 2},
        {**AWKWARD, "held_out": ["Cid"], "sft": {"weight_decay": 0.1}},
    ),
    Program(
        pipeline,
        {
            **SHORT,
            **STEPS,
            "max_new_tokens": 5,
            "max_length": 64,
            "sft_steps": 2,
            "comparisons": [2, 4],
            "eval_comparisons": 8,
            "reward_batch_size": 2,
            "best_of": [2, 3],
            "kl_coefs": [0.05],
            "eval_prompts": 1,
        },
        {
            "learning_rate": 1e-05,
            "max_grad_norm": None,
            "tracker_kwargs": {"tags": ["a", "b"]},
            "resume": False,
            "run": {"label_temperature": 0},
        },
    ),
    Program(
        judgements,
        {"pairs": [2, 4], "pool": 6, "held_out": 0.5, "held_out_pairs": 4, "tokens": 8},
        {"seed": 3, "penalty": 1e-05, "tracker_kwargs": {"tags": ["a", "b"]}},
    ),
    Program(
        reward,
        {**BATCH, "max_steps": 2, "eval_pairs": 2, "train_pairs": 6},
        {**AWKWARD, "run": {"words": 4}, "reward": {"weight_decay": 0.1}},
    ),
    Program(
        raft,
        {**BATCH, **SHORT, "rounds": 2, "prompts": 2, "eval_prompts": 2},
        {**AWKWARD, "max_length": None, "run": {"k": 3}},
    ),
    Program(
        raft_ppo, {**SHORT, **STEPS, "eval_prompts": 2}, {**AWKWARD_STEPS, "stories_run": {"sampling_temperature": 0.9}}
    ),
    Program(
        dpo,
        {**BATCH, **SHORT, "max_steps": 2, "prompts": 8, "eval_prompts": 2},
        {**AWKWARD, "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "run": {"per_prompt": 5}},
    ),
    Program(
        frontier_sft,
        {**BATCH, **SHORT, "max_steps": 2, "prompts": 8, "eval_prompts": 2, "look_every": 1},
        {**AWKWARD, "max_length": 64, "sft": {"weight_decay": 0.1}, "run": {"per_prompt": 5}},
    ),
    Program(
        frontier_grpo,
        {**BATCH, "samples": 1, "max_steps": 2, "eval_prompts": 2, "look_every": 1, "max_new_tokens": 4}
        | {"max_completion_length": 4, "num_generations": 2},
        {**AWKWARD, "epsilon_high": None, "reward_weights": [0.5], "grpo": {"beta": 0.1}},
    ),
    Program(
        frontier_ppo,
        {**SHORT, **STEPS, "eval_prompts": 2, "look_every": 1},
        {**AWKWARD_STEPS, "stories_run": {"sampling_temperature": 0.9}},
    ),
    Program(
        frontier_raft,
        {**BATCH, "samples": 1, "rounds": 2, "prompts": 2, "eval_prompts": 2, "look_every": 1} | {"max_new_tokens": 4},
        {**AWKWARD, "max_length": None, "run": {"k": 3}},
    ),
    Program(
        grpo,
        {**BATCH, "samples": 1, "max_steps": 2, "largest": 10, "eval_prompts": 2, "variance_prompts": 2},
        {
            **AWKWARD,
            "scale_rewards": "none",
            "epsilon_high": None,
            "reward_weights": [0.5],
            "grpo": {"num_generations": 2},
        },
    ),
    Program(
        sums_ppo,
        {**SHORT, **STEPS, "largest": 10, "eval_prompts": 2},
        {**AWKWARD_STEPS, "run": {"majority_of": 4}},
    ),
    Program(
        ddpo,
        {
            "num_epochs": 2,
            "sample_num_steps": 2,
            "sample_batch_size": 4,
            "sample_num_batches_per_epoch": 2,
            "group_size": 1,
            "train_batch_size": 2,
            "eval_pictures": 4,
            "train_timestep_fraction": 1.0,
        },
        {
            "train_learning_rate": 1e-05,
            "negative_prompts": None,
            "per_prompt_stat_tracking": True,
            "use_lora": False,
            "tracker_kwargs": {"tags": ["a", "b"]},
            "reward": ["colour_match"],
            "ddpo": {"estimator": "sf", "train_gradient_accumulation_steps": 4},
        },
    ),
    Program(
        draft,
        {
            "method": "draft",
            "evaluations": 40,
            "sample_num_steps": 4,
            "train_batch_size": 2,
            "truncated_backprop_timestep": 3,
            "eval_pictures": 4,
        },
        {
            "train_learning_rate": 1e-05,
            "negative_prompts": None,
            "truncated_backprop_rand": False,
            "tracker_kwargs": {"tags": ["a", "b"]},
            "align_prop": {"low_variance_samples": 2},
        },
        unused=("ddpo", "flow_grpo", "diffusion_nft", "diffusion_dpo"),
    ),
]
OF_PATH = {program.path: program for program in PROGRAMS}
ONE_OF_EACH_METRIC = list({(read_sweep(file).program, read_sweep(file).metric.name): file for file in FILES}.values())
ONE_OF_EACH_PROGRAM = {read_sweep(file).program: file for file in ONE_OF_EACH_METRIC}.values()


def name_of(item: Any) -> str:
    path = item.path if isinstance(item, Program) else str(item.relative_to(ROOT))
    return path.removeprefix("experiments/")


def program_of(sweep: Sweep) -> Program:
    return OF_PATH[sweep.program]


def first_of(sweep: Sweep) -> dict[str, Any]:
    """Returns the parameters of a sweep's first trial."""
    trial = next_trial(sweep, new_study(sweep), seed=0, count=1)
    assert trial is not None
    return trial.user_attrs["parameters"]


def words_of(parameters: Mapping[str, Any], macro: str, folder: Path) -> list[str]:
    """Returns an agent's arguments for the program."""
    args = {name: {"value": value} for name, value in parameters.items()}
    words = fill_command(COMMANDS[macro], program="train.py", args=args, json_file=folder / "args.json")
    return words[words.index("train.py") + 1 :]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def assert_holds(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Asserts that a run's configuration has the values, by field name; a name with a class prefix wins."""
    settings: dict[str, Any] = {}
    for name, value in sorted(flat(parameters), key=lambda item: item[0].partition(".")[0] in SECTIONS):
        head, _, field = name.partition(".")
        settings[field if field and head in SECTIONS else name] = value  # reward is a class and a field of DDPO
    if isinstance(settings.get("reward"), list):  # each training has one
        (settings["reward"],) = settings["reward"]
    assert {name: config.get(name, "missing") for name in settings} == settings


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tiny model with a few words, and a cache of made-up data, so that nothing is downloaded."""
    folder = tmp_path_factory.mktemp("place")
    vocabulary = {**tiny.SPECIAL}
    for word in [*PROSE.split(), "The", "He", *"0123456789", "+", "=", ".", "film"]:
        vocabulary.setdefault(word, len(vocabulary))
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder / "model")
    tiny.llama(vocab_size=len(vocabulary), max_position_embeddings=256).save_pretrained(folder / "model")
    for name in ("gold", "stories15m", "smollm2"):
        shutil.copytree(folder / "model", folder / name)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scorer.save_pretrained(folder / "gold")

    books = folder / "cache" / "npm" / f"{GUTENBERG.name}-{GUTENBERG.version}"
    words = PROSE.split()
    for i, member in enumerate(GUTENBERG.members):  # each book's sentences begin with other words
        sentences = [" ".join(words[j:] + words[:j]).capitalize() for j in range(4 * i, 4 * i + 4)]
        (books / member).parent.mkdir(parents=True, exist_ok=True)
        (books / member).write_text("\n\n".join(f"{sentence}." for sentence in sentences * 50))
    reviews = [
        {"text": f"the {'good' if i % 2 else 'bad'} film {words[i % len(words)]} {i}", "label": i % 2}
        for i in range(200)
    ]
    speeches = [{"year": i, "president": name, "text": f"{PROSE}. {PROSE}."} for i, name in enumerate(("Ann", "Cid"))]
    speeches += [{"year": 3, "president": "George Washington", "text": f"{PROSE}."}] * 2
    for name, rows in (("imdb-1", reviews), ("sotu-1", speeches)):
        Dataset.from_list(rows).save_to_disk(folder / "cache" / "data" / name)
    answers = [
        {"prompt": f"say {i % 2}", "chosen": f"{word} good", "rejected": f"{word} bad"}
        for i, word in enumerate(words[:8])
    ]
    judged = DatasetDict({split: Dataset.from_list(answers) for split in ("train", "test")})
    judged.save_to_disk(folder / "cache" / "data" / "preferences-claude-1-0.5")
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_wandb: None) -> Iterator[Path]:
    """Changes to a working directory with that cache, and puts W&B's folder into it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CACHE", str(place / "cache"))
    monkeypatch.setenv("WANDB_PROJECT", "tests")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    end_wandb()


def end_wandb() -> None:
    """Ends W&B as a program's exit does: only teardown waits until the run's file is written."""
    wandb.finish()
    wandb.teardown()


def tiny_run(program: Program, place: Path) -> dict[str, Any]:
    folders = {name: str(place / name) for name in ("model", "gold")} | {"encoder": str(place / "model")}
    values = {**folders, "models": [str(place / name) for name in ("stories15m", "smollm2")]}
    names = values.keys() & {field.name for field in fields(program.parse([])[0])}
    return {**program.sizes, **({name: values[name] for name in names} if program.takes_model else {})}


def run(program: Program, words: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs the program in this process; returns its config.json and the rows of its history.jsonl."""
    program.module.main(*program.parse(words))
    (history,) = Path("runs").rglob("history.jsonl")
    rows = history.read_text().splitlines()
    return json.loads((history.parent / "config.json").read_text()), [json.loads(row) for row in rows]


def reported(program: Program, history: list[dict[str, Any]]) -> set[str]:
    """Returns the logged names as W&B has them: transformers adds `eval/` or `train/`, our tracker nothing."""
    rows = history if program.is_own_loop else [rewrite_logs(row) for row in history]
    return {name for row in rows for name in row}


def test_every_experiment_has_a_sweep_and_every_program_is_in_one():
    programs, reports = ({*(ROOT / "experiments").glob(f"*/{name}")} for name in ("train.py", "report.py"))
    folders = {file.parent for file in FILES}
    assert {file.parent for file in programs} <= folders == {file.parent for file in reports}
    assert {read_sweep(file).program for file in FILES} == set(OF_PATH)


@pytest.mark.parametrize("file", slow_but(FILES, *(file for file in FILES if file.stem in QUICK)), ids=name_of)
def test_every_parameter_of_a_sweep_is_a_flag_of_its_program(file: Path, tmp_path: Path):
    sweep = read_sweep(file)
    assert sweep.metric is not None
    assert sweep.project == file.parent.name
    study = new_study(sweep)
    if sweep.method == "grid":  # every configuration, because a rejected one ends its trials
        points = [{**point, "seed": 0} if "seed" in point else point for point in sweep.grid_points()]
        chosen = [parameters_at(sweep, dict(point)) for point in {tuple(point.items()): None for point in points}]
    else:
        drawn = [next_trial(sweep, study, seed=0, count=10) for _ in range(10)]
        chosen = [trial.user_attrs["parameters"] for trial in drawn if trial]
    for parameters in chosen:
        program_of(sweep).parse(words_of(parameters, "args", tmp_path))
    parsed = [program_of(sweep).parse(words_of(chosen[0], macro, tmp_path)) for macro in COMMANDS]
    assert parsed[0] == parsed[1] == parsed[2]
    with pytest.raises(SystemExit):
        program_of(sweep).parse([*words_of(chosen[0], "args", tmp_path), "--no_such_flag=1"])


def test_sweeps_have_names_of_their_own():
    names = [read_sweep(file).name for file in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("macro", COMMANDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_what_an_agent_passes_is_understood_whichever_way_it_is_written(
    program: Program, macro: str, here: Path, place: Path
):
    parameters = {**tiny_run(program, place), **program.awkward}
    parsed = program.parse(words_of(parameters, macro, here))
    assert parsed == program.parse(words_of(parameters, "args", here))
    for name, value in parameters.items():
        config = next((config for config in parsed if hasattr(config, name)), None)
        if config is not None:
            setting = getattr(config, name)
            if name == "tracker_kwargs":  # it also has a name and a group for W&B
                setting = {key: option for key, option in setting.items() if key != "wandb"}
            assert (list(setting) if isinstance(setting, tuple) else setting) == value, name


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_runs_with_an_agents_arguments_and_its_config_has_them(program: Program, here: Path, place: Path):
    parameters = {**tiny_run(program, place), **program.awkward}
    nowhere = {"log_with": "none"} if program.is_own_loop else {"report_to": "none"}
    config, history = run(program, words_of(parameters | nowhere, "args", here))
    assert_holds(config, parameters)
    assert len(history) >= 2


@pytest.mark.parametrize("file", slow_but(ONE_OF_EACH_METRIC, *ONE_OF_EACH_PROGRAM), ids=name_of)
def test_the_metric_is_in_the_summary_under_its_name(
    file: Path, here: Path, place: Path, monkeypatch: pytest.MonkeyPatch
):
    sweep = read_sweep(file)
    program = program_of(sweep)
    parameters = {**first_of(sweep), **tiny_run(program, place)}
    parameters = {name: value for name, value in parameters.items() if name not in program.unused}
    monkeypatch.setenv("TRIMTAB_METRICS", "metrics.jsonl")
    config, history = run(program, words_of(parameters, "args", here))
    end_wandb()
    assert_holds(config, parameters)
    (run_file,) = here.rglob("run-*.wandb")
    file_of_run = RunFile(run_file).update()
    assert file_of_run.exit_code == 0
    assert sweep.metric is not None
    assert is_finite(file_of_run.summary[sweep.metric.name])
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [row[sweep.metric.name] for row in rows if sweep.metric.name in row][-1] == pytest.approx(
        file_of_run.summary[sweep.metric.name]
    )
    if not sweep.metric.name.startswith("final/"):  # the history has none of these
        assert sweep.metric.name in reported(program, history)
    assert file_of_run.config["seed"] == parameters["seed"]
    assert_samples_can_be_read(run_file, file_of_run.summary)


def assert_samples_can_be_read(run_file: Path, summary: Mapping[str, Any]) -> None:
    """Asserts that the files in the run's summary exist: tables with rows, as W&B reads them, or captioned images."""
    files = run_file.parent / "files"
    kinds = {name.removesuffix("._type"): kind for name, kind in summary.items() if name.endswith("._type")}
    tables = [name for name, kind in kinds.items() if kind == "table-file"]
    pictures = [name for name, kind in kinds.items() if kind == "images/separated"]
    assert tables or pictures
    for name in tables:
        table = wandb.Table.from_json(json.loads((files / summary[f"{name}.path"]).read_text()), None)
        assert table.data
        assert all(len(row) == len(table.columns) for row in table.data)
    for name in pictures:
        names = summary[f"{name}.filenames"]
        assert len(names) == len(summary[f"{name}.captions"]) > 0
        for file in names:
            with Image.open(files / file) as picture:
                assert picture.size > (0, 0)


@pytest.mark.parametrize("program", [raft, reward, dpo], ids=lambda module: module.__name__.split(".")[-2])
def test_the_experiments_own_settings_are_in_the_run_without_a_sweep(program: ModuleType, here: Path, place: Path):
    (chosen,) = [known for known in PROGRAMS if known.module is program]
    parameters = tiny_run(chosen, place)
    run(chosen, words_of(parameters, "args", here))
    end_wandb()
    (file,) = here.rglob("run-*.wandb")
    assert_holds(RunFile(file).update().config, parameters)


def test_a_sweeps_run_of_ddpo_is_one_training(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    with pytest.raises(SystemExit, match="2 trainings"):
        ddpo.main(*ddpo.settings([], reward=["rgb_alignment", "colour_match"], log_with=None))
    assert not Path("runs").exists()


@pytest.mark.parametrize("file", [file for file in FILES if not file.name.startswith("sweep")], ids=name_of)
def test_reproduce_finds_a_tiers_runs(file: Path):
    config = logging_config(program_of(read_sweep(file)).parse([]))
    folder = Path(getattr(config, folder_setting(config)))
    assert folder.parent == Path("runs")  # experiments.reproduce looks in runs/*/SWEEP


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_no_two_runs_of_a_sweep_share_a_folder(program: Program, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    name = folder_setting(logging_config(program.parse([])))
    for run_id, words in (("1", []), ("2", [f"--{name}=mine"])):
        monkeypatch.setenv("WANDB_RUN_ID", run_id)
        folder = str(getattr(logging_config(program.parse(words)), name))
        assert folder.endswith(f"s/{run_id}")
        assert folder.startswith("mine" if words else "runs")


# With processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["ziegler_2019_sentiment", "rafailov_2023_dpo_frontier"])
def test_a_sweep_that_is_killed_goes_on(folder: str, here: Path, place: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_DIR", "WANDB_PROJECT", "WANDB_MODE"):  # the tool sets these itself
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    file = ROOT / "experiments" / folder / "sweep.yaml"
    sweep = read_sweep(file)
    program = program_of(sweep)
    source = yaml.safe_load(file.read_text())
    source["program"] = str(ROOT / source["program"])
    source["parameters"] |= {name: {"value": value} for name, value in tiny_run(program, place).items()}
    Path("sweep.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    tool = [sys.executable, "-m", "trimtab_cli", "sweep", "sweep.yaml", "--count", "2", "--folder", "sweep"]

    process = subprocess.Popen(tool, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        cut = wait_for_second(process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    first, second = trials()
    assert (first["status"], second["status"]) == ("finished", "running")
    assert second["run_id"] == cut["run_id"]

    again = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert trials()[0] == first
    assert trials()[1]["run_id"] != cut["run_id"]
    sweep_id = read_study(Path("sweep")).user_attrs["id"]
    assert sweep.metric is not None
    for trial in trials():
        assert trial["status"] == "finished", trial["message"]
        (file,) = here.rglob(f"run-{trial['run_id']}.wandb")
        record = RunFile(file).update()
        assert (record.sweep_id, record.run_id, record.exit_code) == (sweep_id, trial["run_id"], 0)
        assert record.summary[sweep.metric.name] == trial["metric"]
        assert {name: record.config[name] for name in trial["parameters"]} == trial["parameters"]
        (history,) = [path for path in Path("runs").rglob("history.jsonl") if trial["run_id"] in path.parts]
        assert_holds(json.loads((history.parent / "config.json").read_text()), trial["parameters"])


def trials() -> list[dict[str, Any]]:
    found = []
    with suppress(SweepError):  # until the sweep begins its first trial
        found = trials_of(read_study(Path("sweep")))
    return [{**trial.user_attrs, "status": status_of(trial), "metric": trial.value} for trial in found]


def wait_for_second(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Returns the second trial as soon as it begins to write; the first has then finished."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, trials()
        later = trials()[1:]
        if later and any(later[0].get("run_id") in folders for _, folders, _ in os.walk("runs")):
            return later[0]
        time.sleep(0.02)
    raise AssertionError(trials())
