"""What a run leaves behind, the same way in every experiment: settings, numbers, curves and samples.

In the run's folder: config.json at its start, history.jsonl as it goes, and summary.json once it is over.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from trimtab_common.config import parse_config, read_settings, to_flat_dict
from trimtab_common.sealing import checkpoints, keep_under_other_name
from trimtab_common.seeding import private_rng
from trimtab_lm.sampling.generate import eos_token_ids, generate, sampling_config

matplotlib.use("Agg")  # files only: the machine may have no display

from matplotlib import pyplot as plt

HISTORY, CONFIG, SUMMARY, FIGURE = "history.jsonl", "config.json", "summary.json", "report.png"


def from_recipe(recipe: Path, *kinds: type, argv: Sequence[str] | None = None, **changes: object) -> tuple[Any, ...]:
    """Reads the settings of a run: the recipe, then `changes`, then `--config FILE.yaml`, then the flags.

    In a sweep, the recipe's output_dir or logdir is followed by the ids of the sweep and of the run, so that no two
    runs share a folder.

    Args:
        recipe: A YAML file of settings, by the names of the flags.
        kinds: The dataclasses that the settings belong to.
        argv: The words of the command line. None: those of the running program.
        changes: Settings that replace the recipe's.

    Returns:
        An instance of each class.
    """
    values = read_settings(recipe)
    ids = [os.environ.get(name, "") for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID")]
    values |= {name: str(Path(str(values[name]), *ids)) for name in ("output_dir", "logdir") if name in values}
    return parse_config(*kinds, argv=argv, recipe=values | changes)


def begin(project: str, run: Any, args: TrainingArguments) -> "History":
    """Quiet libraries, seed, name W&B's project, write config.json; the callback that writes history.jsonl."""
    transformers.logging.set_verbosity_error()
    transformers.set_seed(args.seed)
    os.environ.setdefault("WANDB_PROJECT", project)
    folder = Path(str(args.output_dir))
    if args.process_index == 0:
        open_folder(folder, to_flat_dict(run, args), goes_on=bool(args.resume_from_checkpoint))
    return History(folder / HISTORY, to_flat_dict(run))


def open_folder(folder: Path, config: Mapping[str, Any], *, goes_on: bool) -> None:
    """Write config.json. Unless a run goes on, remove the history that an earlier one left, and rename its checkpoints.

    A folder holds the checkpoints of one run: those of an earlier one stay as replaced-1-checkpoint-N.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / SUMMARY).unlink(missing_ok=True)
    if not goes_on:
        (folder / HISTORY).unlink(missing_ok=True)
        for checkpoint in (*checkpoints(folder).values(), *checkpoints(folder / "checkpoints").values()):
            keep_under_other_name(checkpoint)


def append(folder: Path, row: Mapping[str, Any]) -> None:
    """A line of JSON at the end of history.jsonl; it has a step."""
    with (folder / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(row)) + "\n")


def close_folder(folder: Path, summary: Mapping[str, float]) -> None:
    """Write summary.json, by which a report knows that the run is over."""
    (folder / SUMMARY).write_text(json.dumps(dict(summary), indent=2) + "\n", encoding="utf-8")


class History(TrainerCallback):
    """Appends what is logged to a file, a line of JSON with the optimizer steps that were done.

    config: what W&B's run is to know besides the trainer's own settings.
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
    batch_size: int = 64,
    **settings: Any,
) -> list[torch.Tensor]:
    """Token ids that `model` continues each prompt with; the same random numbers for a seed, and none of training's."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    settings = {"do_sample": True, "max_new_tokens": max_new_tokens, **settings}
    config, _ = sampling_config(model, pad_token_id=pad, **settings)
    queries = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    eos = eos_token_ids(model, tokenizer.eos_token_id, config)
    was_training, _ = model.training, model.eval()
    with private_rng(seed, model.device):
        rows = generate(model, queries, config, eos_ids=eos, batch_size=batch_size, return_prompt=False)
    model.train(was_training)
    return rows


def texts(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_new_tokens: int, seed: int
) -> list[str]:
    """What `sampled` gives, in words."""
    rows = sampled(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=seed)
    return [" ".join(text.split()) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def show(title: str, prompts: Sequence[str], answers: Sequence[str]) -> None:
    """Print samples, the prompt set apart from what the model wrote."""
    lines = [f"[{prompt}] {answer}" for prompt, answer in zip(prompts, answers, strict=True)]
    print("\n".join(["", title, "-" * len(title), *lines, ""]), flush=True)


@dataclass(frozen=True)
class Run:
    """A run that is over: its settings, what it logged (a dict for each step, in order), and what came out."""

    folder: Path
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    summary: Mapping[str, float]

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """What was logged under two names, where both were."""
        rows = [row for row in self.history if x in row and y in row]
        return [row[x] for row in rows], [row[y] for row in rows]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, a dict for each step, in order; of a step that a resumed run did again, the later numbers."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (folder / HISTORY).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def finished_runs(*folders: Path) -> list[Run]:
    """Every run below the folders that is over, by its place; at least one."""
    found = sorted({path.parent for folder in folders for path in Path(folder).rglob(SUMMARY)})
    if not found:
        names = ", ".join(map(str, folders))
        raise ValueError(
            f"no run that is over lies below {names}: a folder with {SUMMARY} is needed. Give the folder of a run or "
            "of a sweep's runs, or let one finish."
        )
    return [Run(folder, _json(folder / CONFIG), read_history(folder), _json(folder / SUMMARY)) for folder in found]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def by(runs: Iterable[Run], *names: str) -> dict[Any, list[Run]]:
    """Runs by what a setting is in them, in the order of that; by several settings, their tuples are the keys.

    What is left in a list should differ in its seed alone.
    """
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        values = tuple(run.config[name] for name in names)
        groups.setdefault(values if len(names) > 1 else values[0], []).append(run)
    return dict(sorted(groups.items(), key=lambda item: item[0]))


def finish(trainer: Trainer, title: str, panels: Mapping[str, Sequence[str]], summary: Mapping[str, float]) -> None:
    """Log the summary as eval_<name>, write it, draw report.png, and say where it is. Every process calls it.

    panels: title -> names of what was logged, drawn over the optimizer steps.
    """
    trainer.log({f"eval_{name}": value for name, value in summary.items()})
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(trainer.args.output_dir))
    close_folder(folder, summary)
    rows = read_history(folder)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.4), layout="constrained", squeeze=False)
    for axis, (heading, names) in zip(axes.flat, panels.items(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 15 else None)
        axis.set_title(heading, fontsize=10)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(folder / FIGURE, dpi=130)
    plt.close(figure)
    print(f"figure: {folder / FIGURE}")
