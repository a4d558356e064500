"""What a TrainerAdapter does beside the steps of transformers' loop, in one callback."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import rewrite_logs
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from trimtab_common.interruption import Interruption
from trimtab_common.tracking import append_metrics
from trimtab_common.weights_and_biases import STEP_AXIS

from .checkpoints import Checkpoints
from .streams import Passes
from .tracking import close_trackers


class AdapterCallback(TrainerCallback):
    """Takes over checkpoints, tells the ends of passes over a stream, and writes logs to the file of a sweep.

    It ends the process after the step in which SIGTERM or SIGINT came, once the step is logged and saved.

    Args:
        saves: whether a run that ends by a signal is saved.

    Attributes:
        stops: whether a signal makes the finished step the last one.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, passes: Passes, *, saves: bool) -> None:
        self.checkpoints, self.passes, self.saves, self.stops = checkpoints, passes, saves, False
        self.interruption = Interruption(trainer.accelerator, close=lambda status: close_trackers(trainer, status))

    @contextmanager
    def during_train(self) -> Iterator[None]:
        """Handles signals inside `Trainer.train`; ends the process if a signal came after the last step."""
        self.stops = False
        with self.interruption.during_train():
            yield
            if self.interruption.is_asked():
                self.interruption.end()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.checkpoints.begin(args, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Stop if a signal asks for it. Collective.

        A step after which `Trainer.train` logs, evaluates or saves an epoch is not the last one: the next one is.
        """
        if self.passes.loader is not None:
            self.passes.end_step(args, state, control)
        self.stops = self.interruption.is_asked() and not (self.interruption.is_in_train and _ends_epoch(args, state))
        if self.stops:
            control.should_training_stop = control.should_log = True
            control.should_save = self.saves
            if not self.saves:
                warnings.warn(
                    f"The process ends after step {state.global_step}, which is not saved, because save_strategy is "
                    "'no'. Set a save_strategy, or enable_jit_checkpoint=True to save in this case alone.",
                    stacklevel=2,
                )
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """End the process where `Trainer.train` would go on to finish the run. Collective then."""
        if self.checkpoints.is_finished:  # the last epoch has been logged, evaluated and saved already
            control.should_log = control.should_evaluate = control.should_save = False
        if self.stops:
            self.interruption.end()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.checkpoints.end(args)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the log, under the names that it has in W&B, to the file that TRIMTAB_METRICS names."""
        if state.is_world_process_zero:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            append_metrics({**rewrite_logs(numbers), STEP_AXIS: state.global_step})


def _ends_epoch(args: TrainingArguments, state: TrainerState) -> bool:
    strategies = (args.logging_strategy, args.eval_strategy, args.save_strategy)
    is_used = IntervalStrategy.EPOCH in strategies or SaveStrategy.EPOCH in strategies
    return is_used and state.epoch is not None and float(state.epoch).is_integer()
