"""Shared parts of the training subcommands: settings, models, data and rewards by name, one-line errors."""

import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any, Literal, cast

import datasets
import torch
import transformers
from datasets import Dataset
from datasets.exceptions import DatasetsError
from peft import LoraConfig
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.utils import is_bitsandbytes_available

from trimtab_common.config import Count, CountFromZero, Positive, parse_config, setting, without_secrets
from trimtab_common.config.values import read_flags
from trimtab_common.health import TrainingDivergedError
from trimtab_common.reward_checks import RewardError
from trimtab_common.run_record import folder_of_trial
from trimtab_common.sealing import CheckpointError, latest_checkpoint
from trimtab_lm.data.prompts import open_dataset
from trimtab_lm.models.loading import tokenizer_options
from trimtab_lm.tokens.positions import Positions

from .places import is_on_hub, refuse_missing_path
from .rows import columns_of_words, recognized, tokenizer_of, with_columns

TUNED: dict[str, dict[str, object]] = {
    "sft": {"learning_rate": 2e-5},
    "reward": {"learning_rate": 1e-5},
    "dpo": {"learning_rate": 1e-6},
    "kto": {"learning_rate": 1e-6},
    "ppo": {
        "steps": 200,
        "batch_size": 32,
        "mini_batch_size": 16,
        "ppo_epochs": 2,
        "learning_rate": 1e-5,
        "lr_warmup_steps": 5,
        "value_learning_rate": 3e-4,
        "max_grad_norm": 1.0,
        "init_kl_coef": 0.1,
        "kl_gain": 2.0,
        "horizon": 96.0,
    },
    "ddpo": {
        "sample_batch_size": 4,
        "sample_num_batches_per_epoch": 16,
        "train_batch_size": 4,
        "train_gradient_accumulation_steps": 8,
    },
    "align-prop": {"train_batch_size": 4, "train_gradient_accumulation_steps": 8},
}
"""Defaults of subcommands in place of those of the configurations, which scripts of 2024 depend on.

PPO's are those of experiments/ziegler_2019_sentiment, at half its learning rate, for twice as many updates a step.
Updates of DDPO and AlignProp take 32 images; those of the configurations take 1.
"""
OF_ROUNDS = """
--help-all explains the settings that all trainers take from transformers. The everyday ones are --learning_rate,
--per_device_train_batch_size, --gradient_accumulation_steps, --bf16, --seed, --gradient_checkpointing,
--save_strategy, --save_steps, --lr_scheduler_type, --warmup_steps.

Other defaults: without an accelerator dataloader_pin_memory is False; in a sweep report_to is wandb."""
"""The end of what --help says of a trainer on transformers.Trainer that trains in rounds, without an evaluation."""
EVERYDAY = OF_ROUNDS.replace("--save_strategy", "--num_train_epochs, --max_steps, --eval_strategy, --save_strategy")
"""The same of one that passes over its dataset."""
UNNAMED = (
    *("config", "model", "dataset", "dataset_config", "split", "eval_dataset", "eval_dataset_config"),
    *("output_dir", "resume_from", "report_to", "log_with", "seed"),
)
"""Flags that a run's name in a tracker leaves out."""
DURING_TRAINING = (CheckpointError, RewardError, TrainingDivergedError)
"""Errors of a training that the user can correct."""


@dataclass(kw_only=True)
class RunConfig:
    """The model that trains, and on which rows."""

    model: str = setting("Hub id or folder of the model to train.")
    dataset: str = setting("Hub id, folder or file (.jsonl, .json, .csv, .parquet, .txt) of the training data.")
    dataset_config: str | None = setting(
        "Configuration of a hub dataset that has several, such as main of openai/gsm8k.", default=None
    )
    split: str = setting("Split to train on, or a part of it, such as train[:90%].", default="train")
    columns: dict[str, str] | str | None = setting(
        "New names of the dataset's columns, such as prompt=question,completion=answer.", default=None
    )
    chat_template: str | None = setting(
        "Chat template of the tokenizer: a file, chatml, or the hub id or folder of a model that has one. None: its "
        "own.",
        default=None,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = setting(
        "Type of the loaded weights. auto: the checkpoint's. None: float32, or auto where only adapters train.",
        default=None,
    )
    lora_r: CountFromZero = setting("Train LoRA adapters of this rank. 0: train all weights.", default=0)
    lora_alpha: Positive | None = setting("Scale of the adapters, over their rank. None: 2 x lora_r.", default=None)
    lora_target_modules: list[str] | None = setting("Layers that get adapters. None: all linear layers.", default=None)
    load_in_4bit: bool = setting("Keep the weights under adapters in 4 bits (NF4); needs bitsandbytes.", default=False)
    resume_from: str | None = setting(
        "Checkpoint to go on from: its folder, its parent's, or latest, the newest in output_dir if there is one.",
        default=None,
    )

    def __post_init__(self) -> None:
        self.tokenizer_options: dict[str, Any] = {}  # those of the trainer's model_init_kwargs; see `settings`
        refuse_missing_path(self.model)
        refuse_missing_path(self.dataset)
        if isinstance(self.columns, str):
            self.columns = columns_of_words(self.columns)
        if (Path(self.model) / "adapter_config.json").is_file():
            raise ValueError(
                f"model={self.model} holds an adapter, and a whole model is needed. Merge it: "
                f"trimtab merge {self.model} NEW_FOLDER."
            )
        if not self.lora_r and (self.lora_alpha or self.lora_target_modules):
            raise ValueError("lora_alpha and lora_target_modules are settings of adapters. Set lora_r, such as 16.")
        if self.load_in_4bit and not self.lora_r:
            raise ValueError(
                "load_in_4bit=True: weights in 4 bits cannot train, adapters on them can. Set lora_r to 16."
            )
        if self.load_in_4bit and not is_bitsandbytes_available():
            raise ValueError('load_in_4bit=True needs bitsandbytes: pip install "trimtab-lm[quantization]".')

    def rows(self) -> Dataset:
        """The rows to train on, in a format of the trainers."""
        return self.prepared(open_dataset(self.dataset, self.split, self.dataset_config))

    def prepared(self, rows: Dataset) -> Dataset:
        """The rows of a dataset in a format of the trainers, with the columns renamed."""
        if isinstance(self.columns, dict):
            rows = with_columns(rows, self.columns)
        return recognized(rows, lambda: self.tokenizer)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with the chat template."""
        return tokenizer_of(self.model, self.chat_template, **self.tokenizer_options)

    def init_kwargs(self, others: Mapping[str, object] | None) -> dict[str, object]:
        """Arguments of `from_pretrained`: those of the trainer's configuration, and the type of the weights."""
        kwargs: dict[str, object] = {} if self.dtype is None else {"dtype": self.dtype}
        if self.load_in_4bit:
            nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
            kwargs["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **nf4)
        return kwargs | dict(others or {})

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder."""
        return bool(AutoConfig.from_pretrained(self.model, **self.tokenizer_options).is_encoder_decoder)

    def adapters(self, task: str | None = None) -> LoraConfig | None:
        """The adapters to train; None where all weights train.

        Args:
            task: PEFT's name of what the model does; None: it writes texts.
        """
        if not self.lora_r:
            return None
        task = task or ("SEQ_2_SEQ_LM" if self.is_encoder_decoder else "CAUSAL_LM")
        modules = self.lora_target_modules or "all-linear"
        alpha = self.lora_alpha or 2 * self.lora_r
        return LoraConfig(r=self.lora_r, lora_alpha=alpha, target_modules=modules, task_type=task)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class EvaluationConfig:
    """On which rows the model is evaluated."""

    eval_dataset: str | None = setting(
        "Hub id, folder or file of the rows to evaluate on. None: dataset, where eval_split names a split.",
        default=None,
    )
    eval_dataset_config: str | None = setting("Configuration of eval_dataset, as dataset_config.", default=None)
    eval_split: str | None = setting(
        "Split to evaluate on, such as test or train[90%:]: after training, and as eval_strategy says. None: train of "
        "eval_dataset; without eval_dataset no evaluation.",
        default=None,
    )

    def __post_init__(self) -> None:
        check_eval_dataset(self.eval_dataset, self.eval_dataset_config)

    def rows(self, run: RunConfig) -> Dataset | None:
        """The rows to evaluate on, in the format of those to train on; None: there is no evaluation."""
        if self.eval_dataset is not None:
            rows = open_dataset(self.eval_dataset, self.eval_split or "train", self.eval_dataset_config)
        elif self.eval_split is not None:
            rows = open_dataset(run.dataset, self.eval_split, run.dataset_config)
        else:
            return None
        return run.prepared(rows)


def check_eval_dataset(name: str | None, config: str | None) -> None:
    """ValueError if the dataset to evaluate on is a path that is missing, or there is a configuration of none."""
    if name is not None:
        refuse_missing_path(name)
    elif config is not None:
        raise ValueError(
            f"eval_dataset_config={config} is of eval_dataset, which is missing. Set it, or name the configuration in "
            "dataset_config."
        )


@dataclass(kw_only=True)
class RewardsConfig:
    """What scores the completions."""

    reward: list[str] = setting(
        "file.py:function, module:function, or hub id or folder of a reward model. The scores of several are added."
    )

    def functions(self) -> list[Any]:
        """The reward functions, and the names of reward models.

        Raises:
            ValueError: a name is neither that of a function nor of a reward model.
        """
        for name in self.reward:
            if not (":" in name or "/" in name or Path(name).exists() or is_on_hub(name)):
                raise ValueError(
                    f"reward={name}: there is no such folder or model of the hub. Name a function, file.py:{name} or "
                    f"module:{name}, or a reward model."
                )
        return [named(name) for name in self.reward]


@dataclass(kw_only=True)
class CompletionsConfig:
    """How long completions are."""

    max_new_tokens: Count = setting("Tokens of a completion at most.", default=64)


def settings(
    name: str,
    argv: Sequence[str],
    *kinds: type,
    about: str,
    recipe: Mapping[str, object],
    without: Collection[str] = (),
) -> tuple[Any, ...]:
    """The settings of a training subcommand: the recipe, then `--config FILE.yaml`, then the flags.

    In a sweep, the folder that a run writes into is followed by the ids of the sweep and of the run.

    Args:
        kinds: the classes of its settings, that of the trainer at the end.
        recipe: its defaults, in place of those of the classes.
        without: fields that the subcommand has under another name.
    """
    keep_pipes_quiet()
    tuned = TUNED.get(name, {})
    configs = parse_config(
        *kinds, argv=argv, description=about, recipe={**recipe, **tuned}, program=f"trimtab {name}", without=without
    )
    if isinstance(run := configs[0], RunConfig):
        run.tokenizer_options = tokenizer_options(configs[-1].model_init_kwargs)
    config = next(each for each in configs if hasattr(each, "output_dir"))
    with errors_in_one_line(name):
        if config.output_dir is None:
            raise ValueError("output_dir=None: name the folder that the run writes into.")
    name_run(name, argv, configs)
    config.output_dir = str(folder_of_trial(config.output_dir))
    if tuned and os.environ.get("RANK", "0") == "0":
        print("Settings:", ", ".join(f"{each} {getattr(configs[-1], each)}" for each in tuned), flush=True)
    return configs


def about_run(run: Any) -> dict[str, object]:
    """What a run trains, and on what, for the tracker and the model card."""
    config = {} if run.dataset_config is None else {"dataset_config": run.dataset_config}
    return {"model": run.model, "dataset": run.dataset, **config, "split": run.split}


def name_run(name: str, argv: Sequence[str], configs: Sequence[Any]) -> None:
    """Names the run in trackers by the flags that the user gives and the seed, unless the user names it.

    W&B's group is the subcommand with model and dataset. WANDB_RUN_GROUP and WANDB_JOB_TYPE take precedence.
    """
    run, config = configs[0], configs[-1]
    words = {flag.replace("-", "_"): " ".join(map(str, words)) for flag, words in read_flags(argv)}
    said = cast(dict[str, str], without_secrets(words))
    settings = [f"{flag}={value}" for flag, value in said.items() if flag.split(".")[-1] not in UNNAMED]
    title = " ".join([*settings, f"seed={config.seed}"])[:128]
    field = "run_name" if "run_name" in {one.name for one in fields(config)} else "exp_name"
    if "run_name" not in said and "exp_name" not in said and getattr(config, field) in (None, "", name):
        setattr(config, field, title)
    group = " ".join([name, *(Path(part).stem for part in (run.model, run.dataset))])
    os.environ.setdefault("WANDB_RUN_GROUP", group)
    os.environ.setdefault("WANDB_JOB_TYPE", "train")


def tracker() -> str:
    """The tracker without a flag: W&B in a sweep, which reads its metric there; otherwise none."""
    return "wandb" if "WANDB_SWEEP_ID" in os.environ else "none"


def defaults(name: str) -> dict[str, object]:
    """The settings of a trainer on transformers.Trainer that a subcommand changes."""
    shown = {"logging_steps": 10, "logging_first_step": True}
    pinned = {"dataloader_pin_memory": torch.accelerator.is_available()}
    return {"output_dir": f"runs/{name}", "report_to": tracker(), "project": "trimtab", **shown, **pinned}


def checkpoint_of(run: RunConfig, args: TrainingArguments) -> str | bool | None:
    """The checkpoint that the user names; for "latest", whether there is one in output_dir."""
    name = run.resume_from or args.resume_from_checkpoint
    return latest_checkpoint(str(args.output_dir)) is not None if name == "latest" else name


def check_room(model: Any, prompts: Iterable[Sequence[int]], new: int, *, is_encoder_decoder: bool) -> None:
    """ValueError if a prompt leaves no room for `new` tokens in the model's positions."""
    remedy = f"Lower max_new_tokens ({new}), or leave long prompts out."
    Positions.of(model).check_sample(max(map(len, prompts)), new, is_encoder_decoder=is_encoder_decoder, remedy=remedy)


def finish(trainer: Trainer, use: str) -> int:
    """Save the model with its tokenizer, and say where it is and how it is used; the exit status."""
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"The model is in {trainer.args.output_dir}. {use}")
    return 0


def chat_with(folder: str | None, run: RunConfig) -> str:
    """The command that shows the model in a folder."""
    return f"Look at it: trimtab chat {folder} --reference {run.model}"


def named(name: str) -> Callable[..., Any] | str:
    """The function that `file.py:function` or `module:function` names; a name without a colon, as it is.

    A class is called without arguments to make the function.

    Raises:
        ValueError: there is no such file, folder, module or function, the file or module raises an error, or a class
            needs arguments.
    """
    source, colon, function = name.rpartition(":")
    if not colon:
        refuse_missing_path(name)
        if name.endswith(".py"):
            raise ValueError(f"{name} is a file: which of its functions? Write {name}:function.")
        return name
    members = _members_of(source)
    value = members.get(function)
    if not callable(value) or (isinstance(value, type) and "__call__" not in dir(value)):
        others = [one for one, other in members.items() if callable(other) and one != function]
        near = difflib.get_close_matches(function, others, n=1)
        raise ValueError(f"{source} has no function {function!r}.{f' Did you mean {near[0]}?' if near else ''}")
    return _instance(value, name) if isinstance(value, type) else cast(Callable[..., Any], value)


def _instance(kind: type, name: str) -> Callable[..., Any]:
    """An instance of a class of functions, which `name` names."""
    parameters = inspect.signature(kind).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [one.name for one in parameters if one.default is one.empty and one.kind not in variable]:
        source = name.rpartition(":")[0]
        is_file, call = source.endswith(".py"), f"{kind.__name__}({', '.join(f'{each}=...' for each in needed)})"
        file, line = (source, "") if is_file else ("rewards.py", f"from {source} import {kind.__name__}; ")
        raise ValueError(
            f"{name} is a class that needs {', '.join(needed)}. Write into {file}: {line}reward = {call}. Then name "
            f"{file}:reward."
        )
    return cast(Callable[..., Any], kind())


def keep_pipes_quiet() -> None:
    """Shows no progress bars where they would be lines of their own."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def _members_of(source: str) -> Mapping[str, Any]:
    """What the file or module of a user's function defines; modules of the working directory are found, too."""
    if source.endswith(".py") and not Path(source).is_file():
        raise ValueError(f"There is no file {source}.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for good: a function may import when it is called
    try:
        return run_path(source, run_name=Path(source).stem) if source.endswith(".py") else vars(import_module(source))
    except ModuleNotFoundError as error:
        if error.name and not source.endswith(".py") and f"{source}.".startswith(f"{error.name}."):
            raise ValueError(f"There is no module {source!r}. Name a file: path/to/file.py:function.") from error
        raise ValueError(f"{source} imports {error.name}, which is not installed. Install it.") from error
    except Exception as error:  # whatever it is, it is the user's
        if source.partition(".")[0] in {"trimtab_common", "trimtab_lm", "trimtab_diffusion"}:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
        where = f"{source}, line {lines[-1]}" if lines else source
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


@contextmanager
def errors_in_one_line(
    name: str, kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, DatasetsError, CheckpointError)
) -> Iterator[None]:
    """End the program with status 2 and one line at an error that the user can correct.

    Args:
        kinds: kinds of errors; by default those of settings, models, data and checkpoints that cannot be used, and of
            packages that are missing.
    """
    try:
        yield
    except kinds as error:
        cause = f": {error.__cause__}" if isinstance(error, DatasetsError) and error.__cause__ else ""
        print(f"trimtab {name}: error: {' '.join(f'{error}{cause}'.split())}", file=sys.stderr)
        raise SystemExit(2) from error
