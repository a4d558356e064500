"""A training run: tracker, health checks, checkpoints and upload to the hub.

A trainer that owns its loop has one `Run` and tells it which attributes its next step depends on. `Run` knows no
algorithm, and never looks at a trainer beyond the attributes that the trainer named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimtab_common.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from trimtab_common.checkpoint_shards import Owner, Place
from trimtab_common.health import HealthMonitor
from trimtab_common.hub import push_folder
from trimtab_common.interruption import Interruption
from trimtab_common.locks import free, hold
from trimtab_common.run_record import RunRecord
from trimtab_common.sealing import CheckpointError, find_checkpoint, latest_checkpoint, no_checkpoint
from trimtab_common.stats import everywhere, gather_over_ranks
from trimtab_common.tracking import Tracker

TRACKER_ID = "run_id"
"""The name under which checkpoints hold the tracker's id."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state goes into checkpoints."""

    def state_dict(self) -> Mapping[str, Any]:
        """A tree of tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Restores what `state_dict` returned."""


class Run:
    """The services of a training loop.

    Args:
        accelerator: places and synchronises the model.
        model: as the accelerator prepared it. Checkpoints hold the weights that require gradients; the caller loads
            the other weights as for a new run.
        record: the run's identity, and the settings that it is resumed with.
        health: checks the statistics of every step.
        start_tracker: `start_tracking` with all settings but `run_id` and `is_main`.
        accepts_changes: whether `load` warns, instead of raising, if settings differ from the checkpoint's.
        held: names of settings, or patterns; a resumed run keeps the checkpoint's values for them.

    Attributes:
        tracker_id: the id of the tracker's run, which a resumed run continues; None until the tracker starts.
        about: settings of the program, which the tracker shows with the trainer's; set them before the tracker starts.
        interruption: how the run takes SIGTERM and SIGINT.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        record: RunRecord,
        *,
        health: HealthMonitor,
        start_tracker: Callable[..., Tracker],
        accepts_changes: bool = False,
        held: Collection[str] = (),
    ) -> None:
        self.accelerator, self.model, self.record, self.health = accelerator, model, record, health
        self.accepts_changes, self.held = accepts_changes, held
        self.tracker_id: str | None = None
        self.about: Mapping[str, object] = {}
        self._start_tracker = start_tracker
        self._tracker: Tracker | None = None
        self.interruption = Interruption(accelerator, close=self._close_tracker)
        self._kept: dict[str, object] = {"health": self}
        self._kept_per_rank: dict[str, Stateful] = {}
        self._resumed: int | None = None  # the steps of the checkpoint, until training goes on

    def keep(self, owner: object, *names: str) -> None:
        """Puts attributes of `owner` into every checkpoint.

        They are read when a checkpoint is saved: the state of an attribute that is `Stateful`, any other as it is.
        None is left out.
        """
        self._kept |= dict.fromkeys(names, owner)

    def keep_per_rank(self, name: str, part: Stateful) -> None:
        """Puts an object into every checkpoint whose state differs between processes."""
        self._kept_per_rank[name] = part

    # ---------------------------------------------------------------- checkpoints

    def save(self, root: str | Path, step: int, *, keep: int | None = None) -> Path:
        """Writes and returns root/checkpoint-<step>, with everything that the next step depends on. Collective.

        Args:
            root: a folder that holds checkpoints of this run alone.
            step: how many steps of the run are done.
            keep: how many checkpoints stay, this one included; None keeps all.

        Raises:
            CheckpointError: the folder holds checkpoints of another run, or the engine is DeepSpeed's.
        """
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise CheckpointError(
                "DeepSpeed's engine holds weights and moments in parts that only the engine saves, so a checkpoint of "
                "this run would lack them. Set save_steps=None and save the model alone, or train with FSDP2."
            )
        weights: Mapping[str, Tensor] = self._trained()
        if not any(isinstance(weight, DTensor) for weight in weights.values()):
            full = self.accelerator.get_state_dict(self.model)
            weights = {name: weight for name, weight in full.items() if name in weights}
        parts, numbers = self._parts_and_numbers()
        # Before the process ends the tracker starts, so that the run goes on under its id.
        tracker_id = self.tracker.run_id if self.interruption.number else self.tracker_id
        self._hold(root, makes_folder=True)
        self._leave_branch(root)
        return save_checkpoint(
            root,
            step,
            accelerator=self.accelerator,
            weights=weights,
            state={**{name: part.state_dict() for name, part in parts.items()}, **numbers, TRACKER_ID: tracker_id},
            rank_state={name: part.state_dict() for name, part in self._kept_per_rank.items()},
            run=self.record,
            keep=keep,
        )

    def load(self, path: str | Path) -> None:
        """Resumes from a checkpoint: restores everything that `save` wrote.

        Args:
            path: a folder named checkpoint-<step>.

        Raises:
            CheckpointError: the checkpoint is damaged, or was saved with other settings, data, weights or parts.
        """
        checkpoint = load_checkpoint(path, accelerator=self.accelerator, accepts_changes=self.accepts_changes)
        record = self.record.continued(
            checkpoint.path, checkpoint.run, accepts_changes=self.accepts_changes, held=self.held
        )
        rank_state = {name: state for name, state in checkpoint.rank_state.items() if state}
        parts, numbers = self._parts_and_numbers()
        checkpoint.divide(self._owner(parts))
        self._check_weights(checkpoint)
        per_rank = self._kept_per_rank.keys()  # a part that was saved without a state stays as it is
        needed, saved = {*parts, *numbers, TRACKER_ID, *per_rank}, {*checkpoint.state, *rank_state, *per_rank}
        _check_names(checkpoint.path, "parts", needed, saved)

        self.accelerator.unwrap_model(self.model).load_state_dict(checkpoint.weights, strict=False)
        for name, part in parts.items():
            part.load_state_dict(checkpoint.state[name])
        for name in numbers:
            setattr(self._kept[name], name, checkpoint.state[name])
        for name, state in rank_state.items():
            self._kept_per_rank[name].load_state_dict(state)
        self._close_tracker(0)  # its steps go forward alone
        self.tracker_id = checkpoint.state[TRACKER_ID]
        self.record, self._resumed = record, checkpoint.step
        checkpoint.restore_rng()

    def resume(self, where: str | Path, root: str | Path) -> Path | None:
        """Finds a checkpoint and resumes from it.

        Args:
            where: a checkpoint's folder, a folder of checkpoints for the newest one in it, or "latest" for the newest
                one in `root`.
            root: the folder that this run saves to.

        Returns:
            The checkpoint's folder; None if `where` is "latest" and there is no checkpoint, so that a new run starts.

        Raises:
            CheckpointError: there is no checkpoint, `load` refuses it, or `root` holds checkpoints of another run.
        """
        self._hold(root)  # first: a run that was killed may still publish a checkpoint
        find = partial(latest_checkpoint, root) if where == "latest" else partial(find_checkpoint, where)
        newest = gather_over_ranks(find() if self.accelerator.is_main_process else None)[0]
        if newest is not None:
            try:
                self.load(newest)
                everywhere(lambda: self.record.check_folder(root) if self.accelerator.is_main_process else None)
            except BaseException:
                free(self)
                raise
            return newest
        free(self)
        if where != "latest":
            raise no_checkpoint(where, "'latest'")
        return None

    def begin_step(self, root: str | Path | None) -> None:
        """Call it before each step, before sampling. Collective.

        Ends the process if a signal came in the last step of a caller's loop; renames the later checkpoints of a run
        that resumed from an earlier one.

        Args:
            root: the folder of checkpoints; None if there is none.
        """
        self.interruption.begin_step()
        if root is not None and self._resumed is not None:
            self._hold(root)
            self._leave_branch(root)

    def _leave_branch(self, root: str | Path) -> None:
        if (step := self._resumed) is not None:
            leaves = self.accelerator.is_main_process
            with suppress(OSError):  # the save explains it
                everywhere(lambda: self.record.leave_branch(Path(root), step) if leaves else None)
                self._resumed = None

    def _parts_and_numbers(self) -> tuple[dict[str, Stateful], dict[str, object]]:
        """The present values of the attributes that the trainer named in `keep`."""
        values = {name: getattr(owner, name) for name, owner in self._kept.items()}
        parts = {name: value for name, value in values.items() if isinstance(value, Stateful)}
        numbers = {name: value for name, value in values.items() if value is not None and name not in parts}
        return parts, numbers

    def _trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by all of their names; under FSDP this process's parts."""
        weights = self.accelerator.unwrap_model(self.model).state_dict(keep_vars=True)  # FSDP divides what it gathered
        named = {name: weight for name, weight in weights.items() if isinstance(weight, nn.Parameter)}
        return {name: weight for name, weight in named.items() if weight.requires_grad}

    def _owner(self, parts: Mapping[str, Stateful]) -> Owner:
        """Maps a tensor's place in a checkpoint to its parameter; see `Checkpoint.divide`."""
        weights = self._trained()
        optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        moments_of = {
            name: [weight for group in optimizer.param_groups for weight in group["params"]]
            for name, optimizer in optimizers.items()
        }

        def owner(place: Place) -> Tensor | None:
            match place:
                case ("weights", str(name)):
                    return weights.get(name)
                case ("state", str(name), "state", int(number), *_) if name in moments_of:
                    return moments_of[name][number]
            return None

        return owner

    def _check_weights(self, checkpoint: Checkpoint) -> None:
        shapes = {name: list(weight.shape) for name, weight in self._trained().items()}
        _check_names(checkpoint.path, "weights", set(shapes), set(checkpoint.weights))
        for name, weight in checkpoint.weights.items():
            if list(weight.shape) != shapes[name]:
                raise CheckpointError(
                    f"{checkpoint.path}: {name} has shape {list(weight.shape)}, this trainer's has {shapes[name]}. "
                    "Make the trainer with the model that was saved."
                )

    @contextmanager
    def training(self, root: str | Path | None) -> Iterator[None]:
        """Put it around a training loop: handles signals, and locks the folder against other runs. Collective.

        Args:
            root: the folder of checkpoints; None if there is none.
        """
        if root is not None:
            self._hold(root, makes_folder=True)
        try:
            with self.interruption.during_train():
                yield
        finally:
            free(self)

    def _hold(self, root: str | Path, *, makes_folder: bool = False) -> None:
        """Locks a folder, if it exists, against other runs until this one ends; see `locks`. Collective."""

        def hold_here() -> None:
            if makes_folder:
                with suppress(OSError):  # save_checkpoint explains it
                    Path(root).resolve().mkdir(parents=True, exist_ok=True)
            if Path(root).is_dir():
                hold(Path(root), self)

        everywhere(hold_here if self.accelerator.is_main_process else lambda: None)

    # ------------------------------------------------------- tracker, health, hub

    @property
    def tracker(self) -> Tracker:
        """The tracker; starts at its first use, so that a resumed run continues under its id."""
        if self._tracker is None:
            self._tracker = self._start_tracker(run_id=self.tracker_id, is_main=self.accelerator.is_main_process)
            self._tracker.describe(self.about)
            self.tracker_id = self._tracker.run_id
        return self._tracker

    def _close_tracker(self, exit_code: int) -> None:
        """Closes the tracker, which starts again under the same id if the program goes on."""
        if self._tracker is not None:
            self._tracker.finish(exit_code=exit_code)
            self._tracker = None

    def push(self, write: Callable[[str], None], repo_id: str, **options: Any) -> CommitInfo | None:
        """Uploads the files that `write` puts into a folder.

        Args:
            write: takes the folder; called on the main process.
            repo_id: the repository, created where it does not exist.
            options: see `trimtab_common.hub.push_folder`.

        Returns:
            The commit; None on other processes than the main one.
        """
        if not self.accelerator.is_main_process:
            return None
        with TemporaryDirectory() as folder:
            write(folder)
            return push_folder(Path(folder), repo_id, **options)


def _check_names(path: Path, what: str, needed: set[str], saved: set[str]) -> None:
    if needed != saved:
        raise CheckpointError(
            f"{path} holds other {what} than this trainer: {', '.join(sorted(needed ^ saved)[:4])} on one side alone. "
            "Make the trainer as the one that saved it: same model, config, scheduler and data."
        )
