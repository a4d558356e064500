"""A PPO run on disk: everything that its next step depends on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from trimtab_common.checkpoint import load_checkpoint, save_checkpoint
from trimtab_common.runs import RunRecord, result_settings, rows_fingerprint
from trimtab_common.sealing import CheckpointError, latest_checkpoint

if TYPE_CHECKING:
    from .trainer import PPOTrainer

COUNTERS = ("steps_done", "best_score", "run_id")
WITHOUT_EFFECT = (
    "exp_name", "log_with", "task_name", "tracker_*", "project_kwargs", "push_to_hub_if_best_kwargs", "compare_steps",
    "steps", "model_name", "query_dataset", "reward_model", "optimize_device_cache", "output_dir", "save_*",
    "resume_with_changes", "*backward_batch_size", "global_batch_size",
)  # fmt: skip
"""Fields of PPOConfig that change no result; of the model and the data the checkpoint knows more than their names."""
HELD = ("learning_rate", "init_kl_coef")
"""Fields of PPOConfig whose values the optimizer and the KL controller bring along from a checkpoint."""


def record_of(trainer: "PPOTrainer") -> RunRecord:
    """What this trainer runs with, under a new id. Collective."""
    data = rows_fingerprint(trainer.dataset) if isinstance(trainer.dataset, Dataset) else None
    return RunRecord.new(result_settings(trainer.config, without=WITHOUT_EFFECT), data=data)


def save(trainer: "PPOTrainer", root: str | Path) -> Path:
    """Weights that are trained, optimizer, scheduler, scaler, controllers, counters, data position and random states.

    Collective. Weights that are not trained (a frozen base, the reference) are the caller's to load as before.
    """
    accelerator = trainer.accelerator
    weights = accelerator.get_state_dict(trainer.actor_critic)
    return save_checkpoint(
        root,
        trainer.steps_done,
        accelerator=accelerator,
        weights={name: weights[name] for name in _trainable(trainer)},
        state={
            **{name: part.state_dict() for name, part in _stateful(trainer).items()},
            **{name: getattr(trainer, name) for name in COUNTERS},
        },
        run=trainer.run,
        keep=trainer.config.save_total_limit,
    )


def load(trainer: "PPOTrainer", path: str | Path) -> None:
    """Put a trainer where `save` found one.

    Raises CheckpointError if the two do not train the same weights and parts, or with other settings or data.
    """
    checkpoint = load_checkpoint(path, accelerator=trainer.accelerator)
    accepts_changes = trainer.config.resume_with_changes
    run = trainer.run.continued(checkpoint.path, checkpoint.run, accepts_changes=accepts_changes, held=HELD)
    parts, needed = _stateful(trainer), _trainable(trainer)
    for what, here, there in (
        ("weights", needed, set(checkpoint.weights)),
        ("parts", {*parts, *COUNTERS}, set(checkpoint.state)),
    ):
        if here != there:
            raise CheckpointError(
                f"{path} holds other {what} than this trainer: {', '.join(sorted(here ^ there)[:4])} on one side "
                "alone. Make the trainer as the one that saved it: same model, config, scheduler and data."
            )
    module = trainer.accelerator.unwrap_model(trainer.actor_critic)
    shapes = {name: weight.shape for name, weight in module.named_parameters(remove_duplicate=False)}
    unlike = [name for name, weight in checkpoint.weights.items() if weight.shape != shapes[name]]
    if unlike:
        raise CheckpointError(
            f"{path}: {unlike[0]} has shape {list(checkpoint.weights[unlike[0]].shape)}, this trainer's has "
            f"{list(shapes[unlike[0]])}. Make the trainer with the model that was saved."
        )
    module.load_state_dict(checkpoint.weights, strict=False)
    for name, part in parts.items():
        part.load_state_dict(checkpoint.state[name])
    for name in COUNTERS:
        setattr(trainer, name, checkpoint.state[name])
    checkpoint.restore_rng()
    trainer.run = run


def resume(trainer: "PPOTrainer", path: str | Path | None) -> None:
    """Load the checkpoint `path`; for "latest" the newest in the config's output_dir, or none if there is none.

    Raises CheckpointError where a new run would save beside the checkpoints of another.
    """
    if path is None:
        if trainer.config.save_steps and trainer.config.output_dir:
            trainer.run.claim(trainer.config.output_dir)
    elif path != "latest":
        load(trainer, path)
    elif trainer.config.output_dir is None:
        raise ValueError('resume_from="latest" looks into PPOConfig(output_dir=...), which is None.')
    elif newest := latest_checkpoint(trainer.config.output_dir):
        load(trainer, newest)


def _stateful(trainer: "PPOTrainer") -> dict[str, Any]:
    parts = {
        "optimizer": trainer.optimizer,
        "lr_scheduler": trainer.lr_scheduler,
        "scaler": trainer.accelerator.scaler,
        "kl_ctl": trainer.kl_ctl,
        "sampler": trainer.sampler,
        "running": trainer.running,
        "health": trainer.health,
        "batches": trainer.batches,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _trainable(trainer: "PPOTrainer") -> set[str]:
    module = trainer.accelerator.unwrap_model(trainer.actor_critic)
    return {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
