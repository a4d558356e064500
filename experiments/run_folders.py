"""The settings of a run, and the files that every run leaves in its folder.

config.json holds the settings, starts.json the commit, versions, machine and command of each start, history.jsonl a row
for each step, per_prompt.json the numbers of each prompt of the evaluation, and summary.json the results of a finished
run.
"""

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib import pyplot as plt
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from experiments import figures
from experiments.provenance import provenance
from trimtab_common.config import parse_config, read_settings, to_flat_dict
from trimtab_common.run_record import folder_of_trial
from trimtab_common.sealing import checkpoints, keep_under_other_name
from trimtab_common.seeding import private_rng
from trimtab_lm.sampling.generate import generate
from trimtab_lm.sampling.rollout import sampling_config

WANDB_VARIABLES = {"group": "WANDB_RUN_GROUP", "job_type": "WANDB_JOB_TYPE"}
HISTORY, CONFIG, SUMMARY, FIGURE = "history.jsonl", "config.json", "summary.json", "report.png"
PER_PROMPT, STARTS, SAMPLES = "per_prompt.json", "starts.json", "samples.json"
ARCHIVE = "runs.zip"  # what reports read of several runs
PLACES = ("output_dir", "logdir", "logging_dir", "run_name", "pairs_folder", "log_with", "report_to")
"""Settings that change no number of a run, beside those of its tracker."""


def from_recipe(recipe: Path, *kinds: type, argv: Sequence[str] | None = None, **changes: object) -> tuple[Any, ...]:
    """Reads the settings of a run: the recipe, then `changes`, then `--config FILE.yaml`, then the flags.

    In a sweep, output_dir or logdir is followed by the ids of the sweep and of the run, so that no two runs share a
    folder.

    Args:
        recipe: A YAML file of settings, by the names of the flags.
        kinds: The dataclasses that the settings belong to.
        argv: The words of the command line; by default those of the running program.
        changes: Settings that replace the recipe's.

    Returns:
        An instance of each class. W&B shows the run under `run_name`, in the group of the recipe's folder, as a job of
        the recipe's kind (train, sft, reward).
    """
    transformers.utils.logging.disable_progress_bar()  # the models of experiments load in a second
    values = read_settings(recipe)
    configs = parse_config(*kinds, argv=argv, recipe=values | changes)
    base = parse_config(*kinds, argv=[], recipe=values | changes)
    name = run_name(to_flat_dict(*configs), to_flat_dict(*base))
    shown = {"group": recipe.parent.name, "job_type": recipe.stem.partition("_")[2] or "train"}
    for config in configs:
        for folder in {"output_dir", "logdir"} & {each.name for each in fields(config)}:
            setattr(config, folder, str(folder_of_trial(getattr(config, folder))))
        if isinstance(config, TrainingArguments):  # transformers gives W&B the name, and W&B reads the rest by itself
            config.run_name = config.run_name or name
            for key, value in shown.items():
                os.environ.setdefault(WANDB_VARIABLES[key], value)
        elif any(field.name == "tracker_kwargs" for field in fields(config)):
            options = config.tracker_kwargs
            options["wandb"] = {
                **{key: value for key, value in {"name": name, **shown}.items() if key not in options},
                **options.get("wandb", {}),
            }
    return configs


def run_name(settings: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """The settings that differ from the recipe's, and the seed: "target=6.0 seed=1"."""
    hidden = (
        *("output_dir", "logdir", "run_name", "exp_name", "report_to", "log_with", "resume", "tracker_", "project_"),
        *("backward_batch_size", "global_", "total_ppo_epochs", "samples"),
    )
    changed = [
        f"{name}={value}"
        for name, value in settings.items()
        if value != base.get(name) and name != "seed" and not name.startswith(hidden)
    ]
    return " ".join([*changed, f"seed={settings['seed']}"])


def begin(project: str, run: Any, args: TrainingArguments) -> "History":
    """Sets the seed, names W&B's project and writes config.json; returns the callback that writes history.jsonl."""
    transformers.logging.set_verbosity_error()
    transformers.set_seed(args.seed)
    os.environ.setdefault("WANDB_PROJECT", project)
    folder = Path(str(args.output_dir))
    if args.process_index == 0:
        open_folder(folder, to_flat_dict(run, args), goes_on=bool(args.resume_from_checkpoint))
    return History(folder / HISTORY, to_flat_dict(run))


def open_folder(folder: Path, config: Mapping[str, Any], *, goes_on: bool) -> None:
    """Writes config.json and starts.json, and puts the files of an earlier run out of the way.

    A folder holds the history and the checkpoints of one run. Unless the run continues an earlier one, this function
    removes the earlier history and renames the earlier checkpoints to _replaced-1-checkpoint-N.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / SUMMARY).unlink(missing_ok=True)
    starts = _json(folder / STARTS) if goes_on and (folder / STARTS).exists() else []
    (folder / STARTS).write_text(json.dumps([*starts, provenance()], indent=2) + "\n", encoding="utf-8")
    if not goes_on:
        (folder / HISTORY).unlink(missing_ok=True)
        for checkpoint in (*checkpoints(folder).values(), *checkpoints(folder / "checkpoints").values()):
            keep_under_other_name(checkpoint)


def numbers_in(stats: Mapping[str, Any]) -> dict[str, float]:
    """What a row of history.jsonl keeps of a step's statistics: the numbers, without histograms and tables."""
    return {name: value for name, value in stats.items() if isinstance(value, int | float)}


def append(folder: Path, row: Mapping[str, Any]) -> None:
    """Appends a row, which has a `step`, to history.jsonl as a line of JSON."""
    with (folder / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(row)) + "\n")


def write_per_prompt(folder: Path, numbers: Mapping[str, Sequence[float]]) -> None:
    """Writes per_prompt.json: for each name, a number for each prompt of the evaluation, in the prompts' order."""
    (folder / PER_PROMPT).write_text(json.dumps(dict(numbers)) + "\n", encoding="utf-8")


def close_folder(folder: Path, summary: Mapping[str, float]) -> None:
    """Writes summary.json, which tells a report that the run has finished."""
    (folder / SUMMARY).write_text(json.dumps(dict(summary), indent=2) + "\n", encoding="utf-8")


class History(TrainerCallback):
    """Appends every log of a trainer to history.jsonl, with the number of optimizer steps.

    Args:
        path: The file.
        config: Settings that the W&B run shows with the trainer's.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]):
        self.path, self.config = path, config

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and "wandb" in args.report_to:
            import wandb

            if wandb.run is not None:
                wandb.run.config.update(dict(self.config), allow_val_change=True)

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            append(self.path.parent, {"step": state.global_step, **(logs or {})})


def sampled(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    seed: int,
    **settings: Any,
) -> list[torch.Tensor]:
    """Samples a continuation of each prompt, as token ids; leaves the random state of training as it is."""
    queries = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    return sampled_ids(model, tokenizer, queries, max_new_tokens=max_new_tokens, seed=seed, **settings)


def sampled_ids(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[torch.Tensor],
    *,
    max_new_tokens: int,
    seed: int,
    batch_size: int = 64,
    **settings: Any,
) -> list[torch.Tensor]:
    """`sampled` for prompts of token ids, each [Q]."""
    settings = {"do_sample": True, "max_new_tokens": max_new_tokens, **settings}
    config, rest = sampling_config(model, tokenizer, **settings)
    was_training, _ = model.training, model.eval()
    with private_rng(seed, model.device):
        rows = generate(model, queries, config, batch_size=batch_size, return_prompt=False, **rest)
    model.train(was_training)
    return rows


def texts(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_new_tokens: int, seed: int
) -> list[str]:
    """Samples a continuation of each prompt, as text on one line."""
    rows = sampled(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=seed)
    return [" ".join(text.split()) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def show(title: str, prompts: Sequence[str], answers: Sequence[str]) -> None:
    """Prints samples, each prompt in brackets before its answer."""
    lines = [f"[{prompt}] {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
    print("\n".join(["", title, "-" * len(title), *lines, ""]), flush=True)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, settings, rows of history.jsonl in order, summary, numbers per prompt, and starts."""

    folder: Path
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    summary: Mapping[str, float]
    per_prompt: Mapping[str, Sequence[float]] = field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, apart from the seed, that can change a number of the run."""
        return {
            name: value
            for name, value in self.config.items()
            if name not in (*PLACES, "seed") and not name.startswith("tracker_kwargs")
        }

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """The values of two names, from the rows with both."""
        rows = [row for row in self.history if x in row and y in row]
        return [row[x] for row in rows], [row[y] for row in rows]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Reads history.jsonl as one row per step, in order; where a resumed run repeated a step, the later values win."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (folder / HISTORY).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def finished_runs(*folders: Path) -> list[Run]:
    """Reads every finished run below the folders, sorted by seed, then by path.

    Raises:
        ValueError: If there is none.
    """
    finished = sorted({path.parent for folder in folders for path in Path(folder).rglob(SUMMARY)})
    if not finished:
        names = ", ".join(map(str, folders))
        raise ValueError(
            f"no finished run is below {names}: a folder with {SUMMARY} is needed. Give the folder of a run or of a "
            "sweep, or let a run finish."
        )
    return sorted(map(finished_run, finished), key=lambda run: run.config.get("seed", 0))


def finished_run(folder: Path) -> Run:
    """Reads the finished run in a folder, and none of those below it."""
    return Run(
        folder,
        _json(folder / CONFIG),
        read_history(folder),
        _json(folder / SUMMARY),
        _json(folder / PER_PROMPT) if (folder / PER_PROMPT).exists() else {},
        _json(folder / STARTS),
    )


def pack(runs: Sequence[Run], archive: Path) -> None:
    """Writes what reports read of the runs into an archive: their files of JSON, and the pictures of the first seed."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as file:
        for run in runs:
            is_first = run.config.get("seed", 0) == runs[0].config.get("seed", 0)
            sheets = [sheet for sheet in sorted(run.folder.glob("*.png")) if is_first and sheet.name != FIGURE]
            for path in (*sorted(run.folder.glob("*.json*")), *sheets):
                file.write(path, Path(*path.parts[-3:]))  # sweep, run, file


def unpacked(folder: Path, place: Path) -> Path:
    """A folder of runs; an archive of `pack` is unpacked into a folder of its own in `place`."""
    if folder.suffix != ".zip":
        return folder
    with zipfile.ZipFile(folder) as file:
        file.extractall(place / folder.stem)
    return place / folder.stem


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def of_seeds(runs: Iterable[Run], value: Callable[[Run], float | Sequence[float]]) -> dict[int, Any]:
    """A value of each run by the run's seed.

    Raises:
        ValueError: Two runs have one seed, or two differ in more than the seed.
    """
    values: dict[int, Any] = {}
    folders: dict[int, Path] = {}
    known: dict[str, Any] = {}
    for run in runs:
        seed = run.config["seed"]
        if others := {name: value for name, value in run.settings.items() if known.setdefault(name, value) != value}:
            words = ", ".join(f"{name} ({known[name]} and {value})" for name, value in others.items())
            raise ValueError(
                f"{next(iter(folders.values()))} and {run.folder} differ in more than the seed: {words}. Runs of one "
                "setting are needed. Give the folder of one sweep."
            )
        if seed in folders:
            raise ValueError(
                f"{folders[seed]} and {run.folder} have the seed {seed}; one run of each setting and seed is needed. "
                "Give the folder of one sweep."
            )
        folders[seed], values[seed] = run.folder, value(run)
    return values


def by(runs: Iterable[Run], *names: str) -> dict[Any, list[Run]]:
    """Groups runs by the value of a setting, sorted by that value; by several settings, the keys are tuples.

    The runs of a group should differ in their seed alone.
    """
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        values = tuple(setting_of(run, name) for name in names)
        groups.setdefault(values if len(names) > 1 else values[0], []).append(run)
    return dict(sorted(groups.items(), key=lambda item: item[0]))


def setting_of(run: Run, name: str) -> Any:
    """A setting of a run; an error names the run of another experiment, which has no such setting."""
    if name not in run.config:
        raise ValueError(
            f"{run.folder} has no setting {name}; runs of this report's own programs are needed. Give their folder."
        )
    return run.config[name]


def finish(trainer: Trainer, title: str, panels: Mapping[str, Sequence[str]], summary: Mapping[str, float]) -> None:
    """Logs the summary as eval_<name>, writes it, and draws report.png. Every process calls this function.

    Args:
        trainer: The trainer of the run.
        title: The title of the figure.
        panels: For each panel, its title and the logged names that it draws over the optimizer steps.
        summary: The results by name.
    """
    trainer.log({f"eval_{name}": value for name, value in summary.items()})
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(trainer.args.output_dir))
    close_folder(folder, summary)
    rows = read_history(folder)
    figure, axes = figures.panels(list(panels))
    for axis, names in zip(axes, panels.values(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 15 else None)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(folder / FIGURE, dpi=130)
    plt.close(figure)
    print(f"figure: {folder / FIGURE}")
