"""A PPO run on disk: everything that its next step depends on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_common.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from .trainer import PPOTrainer

COUNTERS = ("steps_done", "best_score", "run_id")


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
        keep=trainer.config.save_total_limit,
    )


def load(trainer: "PPOTrainer", path: str | Path) -> None:
    """Put a trainer where `save` found one. CheckpointError if the two do not train the same weights and parts."""
    checkpoint = load_checkpoint(path, accelerator=trainer.accelerator)
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


def resume(trainer: "PPOTrainer", path: str | Path) -> None:
    """Load the checkpoint `path`; for "latest" the newest in the config's output_dir, or none if there is none."""
    if path != "latest":
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
