"""A DDPO run on disk: everything that its next epoch depends on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_common.checkpoint import load_checkpoint, save_checkpoint
from trimtab_common.runs import RunRecord, result_settings
from trimtab_common.sealing import CheckpointError, latest_checkpoint

if TYPE_CHECKING:
    from .trainer import DDPOTrainer

COUNTERS = ("first_epoch", "global_step", "queries", "run_id")
WITHOUT_EFFECT = (
    "exp_name", "run_name", "log_with", "tracker_*", "project_kwargs", "logdir", "num_epochs", "save_freq",
    "num_checkpoint_limit", "resume_*", "max_workers", "async_reward_computation", "train_gradient_checkpointing",
    "trajectory_on_cpu",
)  # fmt: skip
"""Fields of DDPOConfig that change no result."""
HELD = ("train_learning_rate", "train_adam_*", "init_kl_coef")
"""Fields of DDPOConfig whose values the optimizer and the KL controller bring along from a checkpoint."""


def record_of(trainer: "DDPOTrainer") -> RunRecord:
    """What this trainer runs with, under a new id. Collective."""
    return RunRecord.new(result_settings(trainer.config, without=WITHOUT_EFFECT))


def save(trainer: "DDPOTrainer") -> Path:
    """Weights that are trained, optimizer, schedule, scaler, controller, prompt statistics, counters, random states.

    Collective. Weights that are not trained are the caller's to load as before.
    """
    state = trainer.prompt_function.state_dict() if hasattr(trainer.prompt_function, "state_dict") else None
    return save_checkpoint(
        trainer.checkpoint_folder,
        trainer.first_epoch,
        accelerator=trainer.accelerator,
        weights=trainable(trainer),
        state={
            **{name: part.state_dict() for name, part in stateful(trainer).items()},
            **{name: getattr(trainer, name) for name in COUNTERS},
        },
        rank_state={"prompt_function": state},
        run=trainer.run,
        keep=trainer.config.project_kwargs.get("total_limit") or trainer.config.num_checkpoint_limit,
    )


def load(trainer: "DDPOTrainer", path: str | Path) -> None:
    """Put a trainer where `save` found one.

    Raises CheckpointError if the two do not train the same weights and parts, or with other settings.
    """
    checkpoint = load_checkpoint(path, accelerator=trainer.accelerator)
    accepts_changes = trainer.config.resume_with_changes
    run = trainer.run.continued(checkpoint.path, checkpoint.run, accepts_changes=accepts_changes, held=HELD)
    parts, weights = stateful(trainer), trainable(trainer)
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    found = {name: list(weight.shape) for name, weight in checkpoint.weights.items()}
    needed = {*parts, *COUNTERS}
    unlike = sorted(
        [name for name in {*shapes, *found} if shapes.get(name) != found.get(name)] + [*needed ^ set(checkpoint.state)]
    )
    if unlike:
        raise CheckpointError(
            f"{path} was saved by another trainer: {', '.join(unlike[:4])} is on one side alone, or of another shape. "
            "Make the trainer as the one that saved it: same pipeline, LoRA and config."
        )
    for name, weight in weights.items():
        weight.data.copy_(checkpoint.weights[name])
    for name, part in parts.items():
        part.load_state_dict(checkpoint.state[name])
    for name in COUNTERS:
        setattr(trainer, name, checkpoint.state[name])
    if checkpoint.rank_state["prompt_function"] is not None:
        trainer.prompt_function.load_state_dict(checkpoint.rank_state["prompt_function"])  # type: ignore[attr-defined]
    checkpoint.restore_rng()
    trainer.run = run


def resume(trainer: "DDPOTrainer", where: str) -> None:
    """Load a checkpoint's folder, or the newest in a folder of them; "latest": in this run's own, if there is one."""
    if where == "latest":
        newest = latest_checkpoint(trainer.checkpoint_folder)
        if newest is None:
            return
    elif (Path(where) / "manifest.json").is_file():
        newest = Path(where)
    else:
        newest = latest_checkpoint(where)
    if newest is None:
        state = "is not a checkpoint, and holds none" if Path(where).is_dir() else "does not exist"
        raise CheckpointError(
            f"resume_from={where!r}: {state}. Give a folder checkpoint-<epochs>, the folder they are in, or 'latest'."
        )
    load(trainer, newest)


def trainable(trainer: "DDPOTrainer") -> dict[str, Any]:
    """The weights that train, by name."""
    module = trainer.accelerator.unwrap_model(trainer.model)
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def stateful(trainer: "DDPOTrainer") -> dict[str, Any]:
    """The parts whose state goes with the weights."""
    parts = {
        "optimizer": trainer.optimizer,
        "lr_scheduler": trainer.lr_scheduler,
        "scaler": trainer.accelerator.scaler,
        "kl_ctl": trainer.kl_ctl,
        "prompt_stats": trainer.prompt_stats,
        "health": trainer.health,
    }
    return {name: part for name, part in parts.items() if part is not None}
