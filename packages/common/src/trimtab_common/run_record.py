"""The record of a run in its checkpoints: its id, settings, data and model."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import date, time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor, nn

from trimtab_common.config import to_flat_dict
from trimtab_common.sealing import (
    CheckpointError,
    checkpoints,
    clean,
    is_complete,
    keep_under_other_name,
    read_manifest,
)
from trimtab_common.stats import gather_over_ranks

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FINGERPRINT_ROWS = 256


class Rows(Protocol):
    """A dataset, or a list of rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def folder_of_trial(folder: str | Path) -> Path:
    """Returns the folder of a run; in a sweep, adds the ids of sweep and run, so that no two runs share a folder."""
    return Path(folder, os.environ.get("WANDB_SWEEP_ID", ""), os.environ.get("WANDB_RUN_ID", ""))


@dataclass(frozen=True)
class RunRecord:
    """The identity of a run: stored in each of its checkpoints, compared when it is resumed.

    Args:
        id: random, equal on all processes; empty for a run whose checkpoints do not name it.
        settings: what the result depends on, by name; values that JSON can hold.
        data: fingerprint of the dataset; None where it is not known, as for a stream.
        model: fingerprint of the model's layout; None where the checkpoint's own weights tell.
        unset: names of the settings at their defaults.
        without: patterns of settings that change no result, where a record is compared with a saved one.
    """

    id: str
    settings: Mapping[str, object]
    data: str | None = None
    model: str | None = None
    unset: Collection[str] = ()
    without: Collection[str] = ()

    @classmethod
    def of(
        cls,
        config: DataclassInstance,
        *,
        without: Collection[str],
        data: str | None = None,
        model: str | None = None,
        **facts: object,
    ) -> RunRecord:
        """Returns a record of a configuration's `result_settings` with a new id, the same everywhere. Collective."""
        settings, new_id = result_settings(config, without=without, **facts), gather_over_ranks(secrets.token_hex(4))[0]
        return cls(new_id, settings, data, model, _unset(config), without)

    def as_dict(self) -> dict[str, object]:
        """The record as a manifest holds it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "without"}

    def check_folder(self, root: str | Path) -> None:
        """Raises CheckpointError if the folder holds checkpoints of another run."""
        complete = [folder for folder in checkpoints(root).values() if is_complete(folder)]
        others = [folder for folder in complete if read_manifest(folder).get("run", {"id": ""})["id"] != self.id]
        if others:
            raise CheckpointError(
                f"{root} holds {', '.join(folder.name for folder in others[:4])} of another run, whose checkpoints "
                "would mix with those of this one. Resume that run, choose another folder for this one, or move the "
                "old checkpoints away."
            )

    def leave_branch(self, root: Path, step: int) -> None:
        """Renames checkpoints with more steps than the one that the run resumed from, so that none of them is "latest".

        Raises:
            CheckpointError: the folder holds checkpoints of another run.
        """
        clean(root)
        if later := [folder for at, folder in checkpoints(root).items() if at > step]:
            self.check_folder(root)
            names = [f"{folder.name} to {keep_under_other_name(folder).name}" for folder in reversed(later)]
            warnings.warn(
                f"{root}: the run goes on from step {step}. Renamed its later checkpoints: {', '.join(names)}. Remove "
                "them once you do not need them.",
                stacklevel=3,
            )

    def continued(
        self, path: str | Path, saved: RunRecord | None, *, accepts_changes: bool, held: Collection[str] = ()
    ) -> RunRecord:
        """Returns this record with the id of the run that saved a checkpoint, to resume it.

        Args:
            path: the checkpoint, for messages.
            saved: what the checkpoint says of its run; None for a checkpoint that says nothing, which is not compared,
                and whose run has the empty id.
            accepts_changes: warn of differences instead of raising.
            held: names of settings, or patterns, whose values a checkpoint's state brings along: those stay in effect.

        Raises:
            CheckpointError: settings, data or model differ.
        """
        if saved is None:
            return dataclasses.replace(self, id="")
        if differences := _differences(saved, self):
            listed = "; ".join(f"{name} was {before!r}, is {after!r}" for name, before, after in differences)
            if not accepts_changes:
                raise CheckpointError(
                    f"{path} was saved by a run that differs: {listed}. Resume with what it was saved with; or start a "
                    "new run from its weights in another folder; or set resume_with_changes=True to go on with what "
                    "this run has."
                )
            kept = [name for name, _, _ in differences if any(fnmatchcase(name, pattern) for pattern in held)]
            stays = f" The checkpoint's state holds {', '.join(kept)}: its values stay in effect." if kept else ""
            warnings.warn(f"Resuming {path} with changes: {listed}.{stays}", stacklevel=3)
        return dataclasses.replace(self, id=saved.id)


def result_settings(config: DataclassInstance, *, without: Collection[str], **facts: object) -> dict[str, object]:
    """Returns the settings that can change a result, as plain JSON values.

    Args:
        without: names of fields that change no result (where files go, what is logged), and prefixes that end in `*`.
        facts: more settings, such as the number of processes.
    """
    settings = {name: value for name, value in to_flat_dict(config).items() if not _matches(name, without)}
    return json.loads(json.dumps(settings | facts, default=str))


def rows_fingerprint(rows: Rows, content: Callable[[Any], object] = lambda row: row) -> str:
    """Returns a hash of a dataset's length and of up to 256 evenly spaced rows, including the first and the last.

    Args:
        content: gives what is hashed of a row: numbers, texts, tensors, lists and dicts of them.
    """
    count = len(rows)
    places = sorted({round(i * (count - 1) / (FINGERPRINT_ROWS - 1)) for i in range(FINGERPRINT_ROWS)}) if count else []
    return _hash([count, *(content(rows[place]) for place in places)])


def layout_fingerprint(model: nn.Module) -> str:
    """Returns a hash of each parameter's name, shape and `requires_grad`."""
    return _hash([[name, list(weight.shape), weight.requires_grad] for name, weight in model.named_parameters()])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_as_json).encode()).hexdigest()[:16]


def _as_json(value: object) -> object:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value.isoformat() if isinstance(value, date | time) else type(value).__name__


def _differences(saved: RunRecord, current: RunRecord) -> list[tuple[str, object, object]]:
    names = [name for name in sorted({*saved.settings, *current.settings}) if not _matches(name, current.without)]
    pairs = [
        (name, saved.settings.get(name), current.settings.get(name))
        for name in names
        if not _is_unset_in_both(name, saved, current)
    ]
    known = ("training data", saved.data, current.data), ("model", saved.model, current.model)
    pairs += [(name, before, now) for name, before, now in known if before is not None]
    return [pair for pair in pairs if pair[1] != pair[2] and not (_is_address(pair[1]) or _is_address(pair[2]))]


def _is_unset_in_both(name: str, saved: RunRecord, current: RunRecord) -> bool:
    """Whether both runs have the default of a setting, although releases differ in its name or in its empty default."""
    before, now = saved.settings.get(name), current.settings.get(name)
    if name not in saved.settings:
        return name in current.unset or _is_nothing(now)
    if name not in current.settings:
        return name in saved.unset or _is_nothing(before)
    is_unset_before = name in saved.unset or _is_nothing(before)
    return name in current.unset and is_unset_before and not before and not now


def _unset(config: DataclassInstance) -> list[str]:
    """Returns the names of settings at their defaults; None, False and empty values count as equal."""
    default = copy.copy(config)
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            vars(default)[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            vars(default)[field.name] = field.default_factory()
    values, defaults = to_flat_dict(config), to_flat_dict(default)
    return [
        name
        for name in values.keys() & defaults.keys()
        if values[name] == defaults[name] or (_is_nothing(values[name]) and _is_nothing(defaults[name]))
    ]


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name.partition(".")[0], pattern) for pattern in patterns)


def _is_address(value: object) -> bool:
    """Whether a setting was written as an object's address, which differs in every process."""
    return isinstance(value, str) and " at 0x" in value
