"""What the tasks on `transformers.Trainer` share: the settings of both sides, and a callback that times steps."""

import importlib
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tools.bench.measuring import Clock, Load, Measurement
from tools.bench.sizes import Size
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StepEnds(TrainerCallback):
    """Ends a clock's step after each optimizer step, so that a step covers everything between two of them."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Ends a step; `Trainer` calls this."""
        self.clock.tick()


def shared_arguments(size: Size, folder: str) -> dict[str, Any]:
    """Returns both sides' arguments: rows in dataset order, no checkpoints, no trackers, no recomputed activations."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": size.rows,
        "max_steps": size.steps + 1,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": size.device == "cpu",
        "bf16": size.device == "cuda",
        "gradient_checkpointing": False,
    }


def train(
    package: str,
    algorithm: str,
    size: Size,
    settings: Mapping[str, Any],
    load: Load,
    clock: Clock,
    facts: Mapping[str, float] = MappingProxyType({}),
    **arguments: Any,
) -> Measurement:
    """Runs the package's trainer for an algorithm, and measures all steps after the first.

    Args:
        package: trimtab_lm or trl.
        algorithm: prefix of its classes' names, such as SFT.
        size: sizes of the work.
        settings: config fields besides `shared_arguments`.
        load: work that the timed steps require.
        clock: clock that watches the models.
        facts: facts besides the first loss; the task may fill them in during training.
        arguments: arguments of the trainer.
    """
    module = importlib.import_module(package)
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(module, f"{algorithm}Config")(**{**shared_arguments(size, folder), **settings})
        kind = getattr(module, f"{algorithm}Trainer")
        trainer: Trainer = kind(args=args, callbacks=[StepEnds(clock)], **arguments)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return clock.measurement(size, load, {"first loss": losses[0], **clock.read, **facts})
