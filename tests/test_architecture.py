"""The rules of the tree: import directions, promised names, and parts that work by themselves."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trimtab_common.config import Computed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"trimtab_common": "common", "trimtab_lm": "lm", "trimtab_diffusion": "diffusion", "trimtab_cli": "cli"}

# What each package promises. A name is added here in the commit that adds it, and removed only after a deprecation.
EXPORTS: dict[str, set[str]] = {
    "trimtab_common": {
        "AdaptiveKLController",
        "FixedKLController",
        "RunningMoments",
        "clipped_surrogate",
        "explained_variance",
        "gather_stats",
        "group_centred",
        "group_whitened",
        "masked_mean",
        "masked_var",
        "rescale",
        "set_seed",
        "surrogate_stats",
        "whiten",
    },
    "trimtab_lm": {
        "AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead",
        "BestOfNSampler",
        "ConstantLengthDataset",
        "DPOConfig",
        "DPODataCollatorWithPadding",
        "DPOTrainer",
        "DataCollatorForCompletionOnlyLM",
        "GRPOConfig",
        "GRPOTrainer",
        "IterativeSFTConfig",
        "IterativeSFTTrainer",
        "KTOConfig",
        "KTOTrainer",
        "LengthSampler",
        "PPOConfig",
        "PPOTrainer",
        "PreTrainedModelWrapper",
        "RewardConfig",
        "RewardDataCollatorWithPadding",
        "RewardTrainer",
        "SFTConfig",
        "SFTTrainer",
        "create_reference_model",
        "set_seed",
    },
    "trimtab_diffusion": {
        "AlignPropConfig",
        "AlignPropTrainer",
        "DDPOConfig",
        "DDPOPipelineOutput",
        "DDPOSchedulerOutput",
        "DDPOStableDiffusionPipeline",
        "DDPOTrainer",
        "DefaultDDPOStableDiffusionPipeline",
        "DiffusionDPOConfig",
        "DiffusionDPOTrainer",
        "DiffusionNFTConfig",
        "DiffusionNFTTrainer",
    },
    "trimtab_cli": set(),
}

# Top-level names that a package must not import; `packages/*` all share the last three.
OUTSIDE = {"experiments", "tests", "tools"}
FORBIDDEN = {
    "trimtab_common": {"trimtab_cli", "trimtab_lm", "trimtab_diffusion", "transformers", "diffusers"} | OUTSIDE,
    "trimtab_lm": {"trimtab_cli", "trimtab_diffusion", "diffusers"} | OUTSIDE,
    "trimtab_diffusion": {"trimtab_cli", "trimtab_lm"} | OUTSIDE,
    "trimtab_cli": OUTSIDE,
}


def python_files(folder: Path) -> list[Path]:
    """Returns the Python files under a folder, apart from caches and hidden folders."""
    hidden = (".", "__pycache__")
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(part.startswith(hidden) for part in path.relative_to(folder).parts)
    )


def source_of(package: str) -> Path:
    return ROOT / "packages" / PACKAGES[package] / "src" / package


def module_name(path: Path) -> str:
    """Returns the dotted name of a file under packages/<folder>/src."""
    parts = path.relative_to(ROOT / "packages").with_suffix("").parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def listed_files() -> list[str]:
    """Returns the files of the working tree that git does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


def relative_to_root(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


LAUNCHED = source_of("trimtab_lm") / "__main__.py"
"""The only file of the other packages that imports the command."""
PACKAGE_FILES = [path for package in PACKAGES for path in python_files(source_of(package)) if path != LAUNCHED]
EXPERIMENT_FILES = python_files(ROOT / "experiments")
TOOL_FILES = python_files(ROOT / "tools")
PROGRAM_FILES = [file for file in TOOL_FILES + EXPERIMENT_FILES if "__main__" in file.name + file.read_text("utf-8")]
EXPERIMENT_SCRIPTS = sorted((ROOT / "experiments").glob("*/train.py"))
TRAINERS = {package: {path.parent.name for path in source_of(package).glob("*/trainer.py")} for package in PACKAGES}
PAPERS = {path.parent.name for path in EXPERIMENT_SCRIPTS}


# Import directions -----------------------------------------------------------------------------------------------


def imports(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields line, level (0 is absolute) and dotted name of every import in a source, one for each imported name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = [node.module] if node.module else []
            yield from ((node.lineno, node.level, ".".join([*prefix, alias.name])) for alias in node.names)


def package_faults(source: str, package: str) -> list[str]:
    """Returns the imports in a package's file that leave the package in a forbidden direction."""
    return [
        f"line {line}: {package} must not import {name}"
        for line, level, name in imports(source)
        if level == 0 and name.partition(".")[0] in FORBIDDEN[package]
    ]


def trainer_faults(source: str, package: str, folder: str, trainers: set[str]) -> list[str]:
    """Returns the imports that would stop a copy of a trainer's folder from running, or tie it to another trainer."""
    faults, shared = [], (["loss"], ["algorithm"])
    for line, level, name in imports(source):
        parts = name.split(".")
        is_trainers = parts[0] == package and parts[1:2] and parts[1] in trainers
        if level > 1:
            faults.append(f"line {line}: write {package}.{name}, shared files are imported absolutely")
        elif level == 0 and parts[:2] == [package, folder]:
            faults.append(f"line {line}: write .{'.'.join(parts[2:])}, a trainer imports its own files relatively")
        elif level == 0 and is_trainers and parts[2:3] not in shared:
            faults.append(f"line {line}: {name}: only the loss or the algorithm of another trainer may be imported")
        elif level == 0 and parts[0] == package and (len(parts) == 1 or parts[1] in EXPORTS[package]):
            faults.append(f"line {line}: {name}: import it from the module that defines it")
    return faults


def experiment_faults(source: str, folder: str, papers: set[str]) -> list[str]:
    """Returns the imports in an experiment that reach tests, tools or the folder of another of the papers."""
    faults = []
    for line, level, name in imports(source):
        parts = name.split(".")
        target = parts[1] if parts[0] == "experiments" and len(parts) > 1 else parts[0]
        if level == 0 and (parts[0] in {"tests", "tools"} or target in papers - {folder}):
            faults.append(f"line {line}: {name}: an experiment imports packages and its own folder")
    return faults


@pytest.mark.parametrize("file", relative_to_root(PACKAGE_FILES))
def test_packages_import_in_the_right_direction(file: str):
    path = ROOT / file
    package, *inner = path.relative_to(ROOT / "packages").parts[2:]
    source = path.read_text(encoding="utf-8")
    faults = package_faults(source, package)
    if len(inner) > 1 and inner[0] in TRAINERS.get(package, ()):
        faults += trainer_faults(source, package, inner[0], TRAINERS[package])
    assert not faults


@pytest.mark.parametrize("file", relative_to_root(EXPERIMENT_FILES))
def test_experiments_import_packages_and_their_own_folder(file: str):
    path = ROOT / file
    folder = path.relative_to(ROOT / "experiments").parts[0]
    # Sweeps may run the program of another paper, whose report is then read too.
    sweeps = "".join(sweep.read_text(encoding="utf-8") for sweep in path.parent.glob("*.yaml"))
    run = set(re.findall(r"^program: experiments/(\w+)/", sweeps, re.MULTILINE))
    assert not experiment_faults(path.read_text(encoding="utf-8"), folder, PAPERS - run)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("trimtab_common", "import transformers"),
        ("trimtab_common", "def f():\n    from diffusers.utils import x"),
        ("trimtab_common", "from trimtab_lm.tokens.logprobs import x"),
        ("trimtab_lm", "import trimtab_diffusion.ddpo as d"),
        ("trimtab_lm", "if TYPE_CHECKING:\n    from experiments.assets import x"),
        ("trimtab_diffusion", "from trimtab_lm import PPOConfig"),
        ("trimtab_diffusion", "from tools import sizes"),
        ("trimtab_lm", "import tests.tiny"),
        ("trimtab_lm", "from trimtab_cli.main import main"),
        ("trimtab_cli", "from experiments import run_folders"),
    ],
)
def test_a_wrong_direction_is_seen(package: str, source: str):
    assert len(package_faults(source, package)) == 1


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("from .config import PPOConfig", 0),
        ("from . import loss", 0),
        ("from trimtab_lm.tokens.logprobs import x", 0),
        ("from trimtab_lm.tokens import logprobs", 0),
        ("from trimtab_common.formulas.kl import x", 0),
        ("from trimtab_lm.dpo.loss import x", 0),
        ("from trimtab_lm.dpo.algorithm import x", 0),
        ("from trimtab_lm.dpo import loss", 0),
        ("from trimtab_lm.dpo.trainer import x", 1),
        ("from trimtab_lm.dpo import DPOTrainer", 1),
        ("from trimtab_lm import dpo", 1),
        ("from trimtab_lm.ppo.loss import x", 1),
        ("from trimtab_lm.ppo import loss", 1),
        ("from trimtab_lm import PPOConfig", 1),
        ("import trimtab_lm", 1),
        ("from ..tokens.logprobs import x", 1),
        ("from .. import tokens", 1),
    ],
)
def test_what_a_trainer_folder_may_import(source: str, faults: int):
    assert len(trainer_faults(source, "trimtab_lm", "ppo", {"ppo", "dpo"})) == faults


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("from trimtab_lm import PPOTrainer", 0),
        ("from experiments.assets import stories", 0),
        ("from experiments.mine.rewards import x", 0),
        ("import rewards", 0),
        ("from experiments.theirs import rewards", 1),
        ("from experiments import theirs", 1),
        ("import theirs.rewards", 1),
        ("import tools.sizes", 1),
        ("from tests import tiny", 1),
    ],
)
def test_what_an_experiment_may_import(source: str, faults: int):
    assert len(experiment_faults(source, "mine", {"mine", "theirs"})) == faults


# Every module imports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [module_name(path) for path in PACKAGE_FILES])
def test_package_module_imports(name: str):
    importlib.import_module(name)


@pytest.fixture
def as_script() -> Iterator[None]:
    """Removes the modules that scripts import, because two folders may each have a module of the same name."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        folders = "experiments", "tools"
        # A folder of an experiment is a namespace package: it has no file, and must not outlive `experiments`.
        if name.partition(".")[0] in folders or any(file.is_relative_to(ROOT / folder) for folder in folders):
            del sys.modules[name]


def import_script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a file as if it were run from its folder, without its main guard."""
    monkeypatch.syspath_prepend(path.parent)
    name = f"script_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("as_script")
@pytest.mark.parametrize("file", relative_to_root(PROGRAM_FILES))
def test_script_imports(file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [file])
    assert import_script(ROOT / file, monkeypatch).__doc__


def help_of(words: list[str], folder: Path) -> str:
    """Returns what a program prints with --help, and checks that it leaves no file in its folder."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, *words, "--help"]
    environment = os.environ | {"PYTHONPATH": paths}
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert list(folder.iterdir()) == []
    return shown.stdout


@pytest.mark.usefixtures("as_script")
@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_the_help_of_an_experiment_shows_its_recipe_as_defaults(paper: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [paper, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"experiments.{paper}", run_name="__main__")
    assert stopped.value.code == 0
    assert f"default 'runs/{paper}'" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_experiment_is_run_as_a_module(tmp_path: Path):
    shown = help_of(["-m", "experiments.ziegler_2019_sentiment"], tmp_path)
    assert shown.startswith("usage: python -m experiments.ziegler_2019_sentiment [--config FILE.yaml]")


@pytest.mark.slow
def test_an_experiment_is_run_by_its_path_too(tmp_path: Path):
    shown = help_of([str(EXPERIMENT_SCRIPTS[0])], tmp_path)
    assert shown.startswith("usage: train.py [--config FILE.yaml]")


def test_the_description_of_an_argument_says_what_it_is():
    """`tokenizer: of the model.` is half a sentence."""
    halves = [
        f"{path.name}: {line.strip()}"
        for path in (ROOT / "packages").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s+[a-z_]+(, [a-z_]+)*: of ", line)
    ]
    assert halves == []


def test_no_file_changes_the_path_of_its_imports():
    files = [ROOT / name for name in listed_files() if name.endswith(".py")]
    insert = "sys.path" + ".insert"
    assert [path.name for path in files if insert in path.read_text(encoding="utf-8")] == []


# Promised names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_the_promised_names(package: str):
    names = getattr(importlib.import_module(package), "__all__", ())
    assert sorted(names) == sorted(EXPORTS[package])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_it_exports_only_when_it_is_used(package: str):
    program = f"import sys, {package}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "transformers", "diffusers", "wandb"}.isdisjoint(loaded)


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_resolve_and_are_documented(package: str):
    module = importlib.import_module(package)
    assert module.__doc__
    undocumented = []
    for name in EXPORTS[package]:
        value = getattr(module, name)
        assert inspect.isclass(value) or inspect.isfunction(value), f"{package}.{name} is a {type(value).__name__}"
        doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        if not doc or doc.startswith(f"{name}("):
            undocumented.append(name)
    assert not undocumented


def configs() -> list[tuple[str, str]]:
    return [(package, name) for package in PACKAGES for name in sorted(EXPORTS[package]) if name.endswith("Config")]


def squeezed(text: str) -> str:
    """Removes what a help formatter changes: line breaks, indentation, - for _ and doubled percent signs."""
    return re.sub(r"\s+", "", text).replace("_", "-").replace("%%", "%")


@pytest.mark.parametrize(("package", "name"), configs())
def test_help_of_every_config_names_every_field(package: str, name: str, capsys, monkeypatch):
    from trimtab_common.config import parse_config

    monkeypatch.setenv("COLUMNS", "200")
    config = getattr(importlib.import_module(package), name)
    with pytest.raises(SystemExit) as exit_info:
        parse_config(config, argv=["--help-all"])
    assert exit_info.value.code == 0
    shown = squeezed(capsys.readouterr().out)
    fields = [
        one for one in dataclasses.fields(config) if one.init and not isinstance(one.metadata.get("help"), Computed)
    ]
    assert [field.name for field in fields if not field.metadata.get("help")] == []
    assert [field.name for field in fields if squeezed(f"--{field.name}") not in shown] == []
    assert [field.name for field in fields if squeezed(field.metadata["help"]) not in shown] == []


# A copied trainer folder runs --------------------------------------------------------------------------------------


def tiny_tokenizer():
    """Returns a tokenizer with sixteen words, one token each; the first two are padding and end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(14))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 16, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1, pad_token_id=0))


def tiny_scorer():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    shape = {"vocab_size": 16, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": 1}
    return GPT2ForSequenceClassification(GPT2Config(**shape, pad_token_id=0))


def step_ppo(mine: ModuleType, arguments: dict) -> torch.nn.Module:
    from trimtab_lm import AutoModelForCausalLMWithValueHead

    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_gpt2())
    config = mine.PPOConfig(batch_size=4, mini_batch_size=2, ppo_epochs=1, learning_rate=1e-2)
    trainer = mine.PPOTrainer(config, model, tokenizer=tiny_tokenizer())
    queries = [torch.randint(2, 16, (length,)) for length in (2, 3, 4, 5)]
    responses = [torch.randint(2, 16, (length,)) for length in (5, 2, 4, 3)]
    trainer.step(queries, responses, [torch.tensor(float(i)) for i in range(4)])
    return trainer


def train(kind: type, config: object, columns: dict, model: torch.nn.Module, **arguments: object) -> object:
    from datasets import Dataset

    data = Dataset.from_dict(columns)
    trainer = kind(model, args=config, train_dataset=data, processing_class=tiny_tokenizer(), **arguments)
    trainer.train()
    return trainer


PAIR = {"prompt": ["w1 w2 "] * 2, "chosen": ["w3"] * 2, "rejected": ["w4 w5"] * 2}
LABELLED = {"prompt": ["w1 w2 "] * 2, "completion": ["w3", "w4 w5"], "label": [True, False]}
STEPS = {
    "ppo": step_ppo,
    "sft": lambda mine, args: train(mine.SFTTrainer, mine.SFTConfig(**args), {"text": ["w1 w2", "w3 w4"]}, tiny_gpt2()),
    "dpo": lambda mine, args: train(mine.DPOTrainer, mine.DPOConfig(**args), PAIR, tiny_gpt2()),
    "kto": lambda mine, args: train(mine.KTOTrainer, mine.KTOConfig(**args), LABELLED, tiny_gpt2()),
    "reward": lambda mine, args: train(mine.RewardTrainer, mine.RewardConfig(**args), PAIR, tiny_scorer()),
    "grpo": lambda mine, args: train(
        mine.GRPOTrainer,
        mine.GRPOConfig(**args, num_generations=2, max_completion_length=3),
        {"prompt": ["w1", "w2"]},
        tiny_gpt2(),
        reward_funcs=lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
    ),
    "iterative_sft": lambda mine, args: train(
        mine.IterativeSFTTrainer, mine.IterativeSFTConfig(**args), {"text": ["w1 w2", "w3 w4"]}, tiny_gpt2()
    ),
}


def test_every_trainer_is_copied():
    assert set(STEPS) == TRAINERS["trimtab_lm"]
    assert TRAINERS["trimtab_diffusion"] == set(PIPELINE_TRAINERS)


@contextmanager
def copied(package: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Copies a trainer's folder elsewhere and imports it under another name."""
    copy = f"my_{folder}"
    shutil.copytree(source_of(package) / folder, tmp_path / copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        mine = importlib.import_module(copy)
        borrowed = {
            f"{name}.{attribute}"
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == copy
            for attribute, value in vars(module).items()
            if str(getattr(value, "__module__", "")).startswith(f"{package}.{folder}.")
        }
        assert not borrowed
        yield mine
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == copy]:
            del sys.modules[name]


@pytest.mark.parametrize("folder", STEPS)
def test_a_copied_trainer_folder_runs(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
    }
    with copied("trimtab_lm", folder, tmp_path, monkeypatch) as mine:
        torch.manual_seed(0)
        start = (tiny_scorer if folder == "reward" else tiny_gpt2)()
        before = {name: value.clone() for name, value in start.state_dict().items()}
        torch.manual_seed(0)
        trainer = STEPS[folder](mine, arguments)
        assert type(trainer).__module__ == f"my_{folder}.trainer"
        model = getattr(trainer.model, "pretrained_model", trainer.model)
        assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def from_rewards(mine: ModuleType, kind: str, settings: dict, pipeline: object) -> object:
    config = getattr(mine, f"{kind}Config")(**settings, sample_num_steps=2)
    trainer = getattr(mine, f"{kind}Trainer")
    return trainer(config, lambda images, *_: images.mean((1, 2, 3)), lambda: ("a cat", {}), pipeline)


def from_pairs(mine: ModuleType, settings: dict, pipeline: object) -> object:
    rows = [{"prompt": "a cat", "chosen": torch.ones(3, 16, 16), "rejected": torch.zeros(3, 16, 16)}] * 2
    return mine.DiffusionDPOTrainer(mine.DiffusionDPOConfig(**settings), pipeline, rows)


PIPELINE_TRAINERS = {
    "ddpo": lambda mine, settings, pipeline: from_rewards(
        mine, "DDPO", settings | {"sample_batch_size": 2, "sample_num_batches_per_epoch": 1}, pipeline
    ),
    "alignprop": lambda mine, settings, pipeline: from_rewards(mine, "AlignProp", settings, pipeline),
    "diffusion_dpo": from_pairs,
    "nft": lambda mine, settings, pipeline: from_rewards(
        mine,
        "DiffusionNFT",
        settings | {"sample_batch_size": 2, "group_size": 2, "train_gradient_accumulation_steps": 1},
        pipeline,
    ),
}


@pytest.mark.parametrize("folder", PIPELINE_TRAINERS)
def test_a_copied_trainer_folder_of_pipelines_runs(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.diffusion import tiny

    with copied("trimtab_diffusion", folder, tmp_path, monkeypatch) as mine:
        settings = {"train_batch_size": 2, "mixed_precision": "no", "logdir": str(tmp_path)}
        trainer = PIPELINE_TRAINERS[folder](mine, settings, tiny.stable_diffusion())
        assert type(trainer).__module__ == f"my_{folder}.trainer"
        before = [weight.clone() for weight in trainer.model.parameters()]
        trainer.step(0, 0)
        assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


# No paths of a developer's machine -------------------------------------------------------------------------------


def test_no_file_reaches_beside_the_checkout():
    beside = ("../" + "shared").encode()
    files = [ROOT / name for name in listed_files()]
    assert [path.name for path in files if beside in path.read_bytes()] == []
