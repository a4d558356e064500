"""Training on a stream: passes one after another, so that a resumed run finds its place in any pass."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from trimtab_common.seeding import private_rngs, sampling_seed

from .types import Batch

NO_BATCH = (
    "gave no batch, so there is nothing to train on. A filter or a limit such as max_length may leave none of its "
    "rows, or it can be read only once. Check the filters, raise the limit, or give a stream that begins again at each "
    "iter()."
)


class Passes(torch.utils.data.IterableDataset[Batch]):
    """The batches of one pass over a stream after the other, without an end; and each pass's end told to callbacks.

    Trainer takes max_steps for the length of a stream's epoch: with the stream alone it would resume a later pass at
    the wrong row, and carry the gradient of a pass's last, incomplete step into the next pass. Here the whole run is
    one epoch of Trainer's, which it resumes by skipping batches. What callbacks do at the end of an epoch they do at
    the end of each pass, and `epoch` counts passes.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.loader: DataLoader[Batch] | None = None
        self.ends: list[int] = []
        """How many batches there were up to the end of each pass so far."""
        self.before = 0, 0
        """The steps and passes before the first batch: of a resumed run that begins the stream again."""

    def over(self, loader: DataLoader[Batch]) -> DataLoader[Batch]:
        """A loader of all passes, from the loader of one pass; a loader that knows its length is returned as it is."""
        self.loader = None if has_length(loader) else loader
        return loader if self.loader is None else DataLoader(self, batch_size=None, collate_fn=lambda batch: batch)

    def __iter__(self) -> Iterator[Batch]:
        loader: Any = self.loader
        args, state, given = self.trainer.args, self.trainer.state, 0
        self.ends, self.before = [], (state.global_step, int(state.epoch or 0)) if args.ignore_data_skip else (0, 0)
        for number in count():
            before = given
            loader.set_epoch(number)
            batches = iter(loader)
            # A loader draws a random number when a pass begins. A resumed run begins its pass at another time.
            with private_rngs(sampling_seed(args.seed, rank=args.process_index, draw=number)):
                batch = next(batches, None)
            while batch is not None:
                given += 1
                if loader.end_of_dataloader:
                    self.ends.append(given)
                yield batch
                batch = next(batches, None)
            if given == before:
                raise ValueError(f"Pass {number + 1} over the training data {NO_BATCH}")

    def end_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Sets the epoch, and tells the callbacks if a pass ended in this step."""
        per_step = args.gradient_accumulation_steps
        steps, whole_passes = self.before
        done = (state.global_step - steps) * per_step
        passes = bisect_right(self.ends, done)
        last_end = self.ends[passes - 1] if passes else 0
        state.epoch = whole_passes + passes + (done - last_end) / (state.max_steps * per_step)
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if passes and last_end > done - per_step and not is_last:
            handler = self.trainer.callback_handler
            handler.on_epoch_end(args, state, control)
            handler.on_epoch_begin(args, state, control)
