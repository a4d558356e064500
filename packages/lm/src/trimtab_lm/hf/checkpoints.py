"""Checkpoints of `transformers.Trainer`: sealed, of one run, and verified before they are resumed."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments

from trimtab_common.checkpoint import bytes_of
from trimtab_common.checkpoint_shards import refuse_code
from trimtab_common.locks import free, hold
from trimtab_common.run_record import RunRecord, layout_fingerprint, rows_fingerprint
from trimtab_common.sealing import (
    CheckpointError,
    SaveError,
    clean,
    find_checkpoint,
    free_bytes,
    is_of_files,
    latest_checkpoint,
    no_checkpoint,
    publish,
    rotate,
    save_error,
    unfinished,
    verify,
    warn_once,
    warn_unsaved,
)
from trimtab_common.stats import everywhere, gather_over_ranks

from .config import TrainerConfig
from .types import DataSource

WITHOUT_EFFECT = (
    "output_dir", "overwrite_output_dir", "resume_*", "run_name", "project", "trackio_*", "report_to", "log_*",
    "logging_*", "disable_tqdm", "do_*", "eval_*", "per_device_eval_batch_size", "prediction_loss_only",
    "include_for_metrics", "include_num_input_tokens_seen", "batch_eval_metrics", "save_*", "enable_jit_checkpoint",
    "restore_callback_states_from_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "push_to_hub*", "hub_*", "local_rank", "ddp_*", "debug", "skip_memory_metrics", "torch_empty_cache_steps",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataset_num_proc", "num_train_epochs", "max_steps", "num_eval_samples",
    "generate_during_eval", "max_new_tokens", "ref_log_probs_cache", "log_completions",
    "num_completions_to_print", "optimize_device_cache", "model_init_kwargs", "ref_model_init_kwargs",
    "reward_timeout", "on_save_error", "padding_value", "gradient_checkpointing*", "activation_checkpointing*",
)  # fmt: skip
"""Settings that a resumed run may change, such as `max_steps` and `num_train_epochs`."""


STATE = "trainer_state.json"
"""The file in which transformers.Trainer keeps how far a run has come."""

HELD = ("learning_rate", "weight_decay", "adam_*")
"""Settings whose values the optimizer brings along from a checkpoint."""


def make_output_dir(args: TrainingArguments) -> None:
    """Make the folder of the checkpoints, and the target of a dangling link, which Trainer would not make."""
    if args.should_save:
        Path(str(args.output_dir)).resolve().mkdir(parents=True, exist_ok=True)


class Checkpoints:
    """The checkpoints of a run: Trainer saves under a temporary name; this seals, renames and rotates."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.run: RunRecord | None = None
        self.keep: int | None = None
        self._output_dir = Path()
        self._staging: Path | None = None  # stands in for output_dir while a checkpoint is written
        self._saving: Path | None = None  # its folder, by the name that it gets
        self._resumed: int | None = None  # the steps of the checkpoint, until training goes on
        self.is_finished = False  # before training began

    def open_run(
        self, config: TrainerConfig, data: DataSource | None, resume_from: str | Path | bool | None, *, is_trial: bool
    ) -> str | None:
        """Begin a run on this data with a new id, or resume one and return its verified checkpoint. Collective.

        Raises:
            CheckpointError: the checkpoint is damaged or of another run, or the folder holds those of another run.
        """
        model = self.trainer.model  # a trial makes its model later
        record = RunRecord.of(
            config,
            without=WITHOUT_EFFECT,
            data=rows_fingerprint(data) if isinstance(data, Dataset) else None,
            model=layout_fingerprint(model) if isinstance(model, nn.Module) else None,
            processes=config.world_size,
        )
        if resume_from:
            return self.resume(config, record, resume_from)
        self.run, args = record, cast(Any, config)
        if args.save_strategy != "no" and not is_trial:  # a trial has a folder of its own
            everywhere(lambda: self._hold(config))
            if not args.overwrite_output_dir:
                record.check_folder(args.output_dir)
        return None

    def resume(self, args: TrainerConfig, record: RunRecord, where: str | Path | Literal[True]) -> str:
        """Verify a checkpoint and resume its run; returns its folder."""
        problem, folder = None, ""
        if args.should_save or args.local_process_index == 0:  # one process a machine reads the files
            try:
                self._hold(args)
                self.run, folder = self._verified(args, record, where)
            except CheckpointError as error:
                problem = str(error)
        answers = gather_over_ranks((problem, self.run, folder))
        if problems := [answer[0] for answer in answers if answer[0] is not None]:
            raise CheckpointError(problems[0])
        _, self.run, folder = answers[0]
        return folder

    def _verified(
        self, args: TrainerConfig, record: RunRecord, where: str | Path | Literal[True]
    ) -> tuple[RunRecord, str]:
        if where is True:
            output_dir = Path(str(args.output_dir))
            clean(output_dir)
            newest = latest_checkpoint(output_dir)
            if newest is None:
                raise CheckpointError(
                    f"There is no complete checkpoint in {args.output_dir}. Start without resume_from_checkpoint, or "
                    "name the checkpoint's folder."
                )
            folder = newest
        elif (found := find_checkpoint(where)) is None:
            raise no_checkpoint(where, "True (on the command line: latest)")
        else:
            folder = found
        manifest = verify(folder)
        refuse_code(folder)
        self._resumed = manifest["step"]
        if not manifest.get("resumable", True):
            raise CheckpointError(
                f"{folder} was saved with save_only_model=True: it holds the model, and neither optimizer nor random "
                "states. Load the model from it to start a new run."
            )
        saved = RunRecord(**manifest["run"]) if "run" in manifest else None
        return record.continued(folder, saved, accepts_changes=args.resume_with_changes, held=HELD), str(folder)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Put it around saving: Trainer writes the checkpoint under a temporary name, and `publish` renames it.

        Explains where the file system refuses, or warns if the run is to go on. What begins a save fails in all
        processes. What fails later, when the disk fills up while it is written, fails in one; with several processes
        the run then ends, whatever `on_save_error` says.

        Raises:
            SaveError: in place of the error of the file system. What is unfinished of the checkpoint is removed.
        """
        args, state, best_before = self.trainer.args, self.trainer.state, self.trainer.state.best_model_checkpoint
        self._output_dir = Path(str(args.output_dir))
        self._staging = unfinished(self._output_dir / f"checkpoint-{state.global_step}")
        args.output_dir = str(self._staging)  # from where Trainer takes the checkpoint's folder
        try:
            yield
            self.publish()
        except Exception as error:
            folder = self._saving
            if folder is None or not (isinstance(error, SaveError) or is_of_files(error)):
                raise
            refused = error if isinstance(error, SaveError) else save_error(folder, error, needed=self._needed_bytes())
            is_alone = refused is not error and self.accelerator.num_processes > 1
            warn_unsaved(refused, "raise" if is_alone else cast(TrainerConfig, args).on_save_error)
            state.best_model_checkpoint = best_before
        finally:
            args.output_dir, self._staging, self._saving = str(self._output_dir), None, None

    def begin_save(self, output_dir: str | None) -> bool:
        """Open the folder into which `saving` writes a checkpoint. Collective.

        Returns:
            Whether a checkpoint is being written.

        Raises:
            SaveError: in every process, if the folder cannot be opened or its disk has too little room.
        """
        if self._staging is None or output_dir is None:
            return False
        assert self.run is not None
        written, args, root = Path(output_dir), self.trainer.args, self._output_dir
        args.output_dir = str(root)  # what the files and the uploads name
        folder = self._saving = root / written.relative_to(self._staging)
        self.run.check_folder(folder.parent)
        needed = self._needed_bytes()
        self.accelerator.wait_for_everyone()  # no process reads the folder while another changes it

        def open_folder() -> None:
            try:
                folder.parent.resolve().mkdir(parents=True, exist_ok=True)
                hold(folder.parent, self)
                for place in {root, folder.parent}:
                    clean(place)
                self._leave_branch()
                written.mkdir(parents=True)
                if (free := free_bytes(written)) is None:
                    warn_once(f"The file system of {root} does not tell how much room it has: no save checks it.")
                elif free < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise save_error(folder, error, needed=needed) from error

        everywhere(open_folder if args.should_save else lambda: None)
        return True

    def publish(self) -> Path | None:
        """Seal the checkpoint, rename it, then remove checkpoints beyond save_total_limit. Collective.

        Returns:
            The checkpoint's folder; None if there is none that is being written.
        """
        folder, staging, args, state = self._saving, self._staging, self.trainer.args, self.trainer.state
        if folder is None or staging is None:
            return None
        assert self.run is not None
        self.accelerator.wait_for_everyone()  # all have written their files
        best = folder.with_name(f"checkpoint-{state.best_global_step}")
        if is_new := bool(state.best_global_step) and (best == folder or best.is_dir()):
            is_new, state.best_model_checkpoint = state.best_model_checkpoint != str(best), str(best)
        if args.should_save:
            written = staging / folder.relative_to(self._output_dir)
            if is_new:
                state.save_to_json(str(written / STATE))
            facts = {"resumable": not args.save_only_model, "run": self.run.as_dict()}
            publish(written, folder, {"step": state.global_step, **facts})
            clean(self._output_dir)
            if self.keep is not None and self.keep > 0:
                protected = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
                rotate(folder.parent, folder, self.keep, protected=protected)
        self.accelerator.wait_for_everyone()
        self._staging = self._saving = None
        return folder

    def _leave_branch(self) -> None:
        """Rename the later checkpoints of a run that resumed from an earlier one, so that none of them is "latest"."""
        if self._resumed is not None and self.run is not None:
            with suppress(OSError):  # the save explains it
                self.run.leave_branch(Path(str(self.trainer.args.output_dir)), self._resumed)
                self._resumed = None

    def _hold(self, args: TrainingArguments) -> None:
        """Lock output_dir against other runs, if this process writes there; see `trimtab_common.locks`."""
        folder = Path(str(args.output_dir))
        if args.should_save and args.save_strategy != "no" and folder.is_dir():
            hold(folder, self)

    def _needed_bytes(self) -> int:
        """The size of a checkpoint: the weights (with PEFT only the trained ones), and the optimizer's moments."""
        model, optimizer = cast(nn.Module, self.trainer.model), self.trainer.optimizer
        weights = [weight for weight in model.parameters() if weight.requires_grad or not isinstance(model, PeftModel)]
        moments = {} if self.trainer.args.save_only_model or optimizer is None else optimizer.state
        return bytes_of(weights) + bytes_of(moments)

    def begin(self, args: TrainingArguments, state: TrainerState) -> None:
        """Take over save_total_limit: Trainer would remove checkpoints before the new one is sealed."""
        if args.save_total_limit is not None:
            self.keep, args.save_total_limit = args.save_total_limit, None
        self.is_finished = bool(state.max_steps) and state.global_step >= state.max_steps
        if self.is_finished:
            warnings.warn(
                f"The run is finished: {state.global_step} of {state.max_steps} steps are done. Nothing is trained. "
                "Raise max_steps or num_train_epochs to train on.",
                stacklevel=2,
            )
        elif args.should_save and args.save_strategy != "no":
            self._leave_branch()

    def end(self, args: TrainingArguments) -> None:
        """Give save_total_limit back, and the folder to other runs."""
        free(self)
        args.save_total_limit, self.keep = self.keep, None
