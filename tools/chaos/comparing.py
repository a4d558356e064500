"""Compares two finished runs bit for bit: weights, optimizer, schedule, random state and everything logged."""

from collections import defaultdict
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog
from tools.chaos.trees import tree_difference
from tools.chaos.works import is_repeatable

from trimtab_common.weights_and_biases import STEP_AXIS

History = dict[str, list[tuple[int, float]]]


def difference(run: Path, straight: Path) -> str:
    """Returns the first difference between the runs; empty if they are equal.

    Raises:
        ValueError: the undisturbed run has no final state, or logged nothing.
    """
    finals = sorted(straight.glob("final-*.pt"))
    if not finals:
        raise ValueError(f"{straight} holds no final-<rank>.pt: the undisturbed run has not ended, or was removed.")
    for file in finals:
        one, other = (torch.load(folder / file.name, weights_only=True) for folder in (run, straight))
        if where := tree_difference(one, other):
            return f"{file.stem}{where}"
    read = wandb_scalars if any(straight.rglob("run-*.wandb")) else tensorboard_scalars
    expected = read(straight)
    if not expected:
        raise ValueError(f"{straight} holds no scalars of its tracker: there is no history to compare.")
    return tree_difference(read(run), expected, "/tracker")


def wandb_scalars(run: Path) -> History:
    """Returns each name's steps and values in a run's W&B files; a step repeated with an equal value counts once.

    Each start of the process writes its own file. W&B accepts a step of a run once.
    """
    from tools.chaos.wandb_files import (  # imports wandb, which each forked process must import itself
        RunFile,
        is_finite,
    )

    history: History = defaultdict(list)
    for file in sorted(run.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        for row in RunFile(file).update().rows:
            step = row.get(STEP_AXIS)
            for name, value in row.items():
                if is_finite(value) and is_repeatable(name) and (step, value) not in history[name]:
                    history[name].append((step, value))
    return {
        name: sorted(values, key=lambda value: value[0])
        for name, values in history.items()
        if values and not name.startswith("_")
    }


def tensorboard_scalars(run: Path) -> History:
    """Returns each name's steps and values as TensorBoard shows them, in the order of the steps.

    A session's first event gives the step from which earlier events no longer count. transformers does not write such
    an event, so in its folders a step repeated with an equal value counts once.
    """
    history: History = defaultdict(list)
    for file in sorted(run.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns):
        is_ours = "tensorboard" in file.parts
        for event in EventFileLoader(str(file)).Load():
            if event.session_log.status == SessionLog.START:
                for values in history.values():
                    values[:] = [value for value in values if value[0] < event.step]
            for value in event.summary.value:
                logged = (event.step, *value.tensor.float_val[:1])
                if len(logged) == 2 and is_repeatable(value.tag) and (is_ours or logged not in history[value.tag]):
                    history[value.tag].append(logged)
    return {name: sorted(values, key=lambda value: value[0]) for name, values in history.items() if values}
