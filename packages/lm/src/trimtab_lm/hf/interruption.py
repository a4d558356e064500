"""How `transformers.Trainer` takes SIGTERM and SIGINT: it stops after the step, saves, and ends the process."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from trimtab_common.interruption import Interruption

from .tracking import close_trackers


class EndsBySignal(TrainerCallback):
    """Ends a Trainer's process after the step in which a signal came, once the step is logged and saved.

    Args:
        trainer: whose callback it is.
        saves: whether a run that ends is saved.

    Attributes:
        stops: whether the finished step is the last one.
    """

    def __init__(self, trainer: Trainer, *, saves: bool) -> None:
        self.saves, self.stops = saves, False
        self.interruption = Interruption(trainer.accelerator, close=lambda status: close_trackers(trainer, status))

    @contextmanager
    def during_train(self) -> Iterator[None]:
        """Handles signals inside `Trainer.train`; ends the process if a signal came after the last step."""
        self.stops = False
        with self.interruption.during_train():
            yield
            if self.interruption.is_asked():
                self.interruption.end()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Stop if a signal asks for it. Collective.

        A step after which `Trainer.train` logs, evaluates or saves an epoch is not the last one: the next one is.
        """
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
        if self.stops:
            self.interruption.end()


def _ends_epoch(args: TrainingArguments, state: TrainerState) -> bool:
    strategies = (args.logging_strategy, args.eval_strategy, args.save_strategy)
    is_used = IntervalStrategy.EPOCH in strategies or SaveStrategy.EPOCH in strategies
    return is_used and state.epoch is not None and float(state.epoch).is_integer()
