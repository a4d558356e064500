"""The files of PPO: checkpoints, the trained policy, and what a step logs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trimtab_common.cards import facts_of, write_model_card
from trimtab_common.config import to_flat_dict
from trimtab_common.run import Run
from trimtab_common.sharding import divides_weights
from trimtab_common.stats import gather_over_ranks
from trimtab_lm.data.sources import rows_in_words
from trimtab_lm.interface import base_of

from .checks import check_logged
from .config import PPOConfig

USAGE = """from transformers import AutoTokenizer
from trimtab_lm import {model}

model = {model}.from_pretrained("{repo_id}")  # transformers' own Auto classes load the language model alone
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")"""


def resume(run: Run, config: PPOConfig, where: str | Path | None) -> None:
    """Resumes from a checkpoint, or begins a run in the config's `output_dir`.

    Args:
        where: a checkpoint's folder, or "latest" for the newest in `output_dir`, if there is one; None: begin.

    Raises:
        CheckpointError: a new run would mix its checkpoints with another run's.
    """
    root = config.output_dir
    if where == "latest" and root is None:
        raise ValueError('resume_from="latest" looks into PPOConfig(output_dir=...), which is None.')
    if where is not None:
        run.resume(where, root or where)
    elif root is not None:
        run.record.check_folder(root)  # without save_steps too: a run that a signal ends is saved there


def full_weights(accelerator: Accelerator, actor_critic: nn.Module) -> dict[str, Tensor] | None:
    """The policy's weights, gathered on the main process; None if every process has them. Collective."""
    if not divides_weights(accelerator):
        return None
    weights = accelerator.get_state_dict(actor_critic) or {}
    policy = {name: weight for name, weight in weights.items() if name.startswith("policy.")}
    return {name.removeprefix("policy."): weight for name, weight in policy.items()}


def write_policy(
    trainer: Any, folder: str, weights: dict[str, Tensor] | None, repo_id: str | None = None, **kwargs: Any
) -> None:
    """Writes the policy with its value head, the tokenizer and a model card, on the main process.

    Args:
        trainer: a PPOTrainer.
        weights: what `full_weights` returned.
        repo_id: what the model is loaded by; None: the folder's name.
    """
    if trainer.accelerator.is_main_process:
        trainer.model.save_pretrained(folder, **{"state_dict": weights, **kwargs})
        trainer.tokenizer.save_pretrained(folder)
        trainer.create_model_card(folder, repo_id=repo_id)


def write_card(trainer: Any, path: str, *, name: str | None, repo_id: str | None) -> None:
    """See `PPOTrainer.create_model_card`."""
    write_model_card(
        path,
        name=name,
        trainer=type(trainer).__name__,
        method="PPO",
        paper="Ziegler et al. 2019, arXiv:1909.08593",
        usage=USAGE.replace("{model}", type(trainer.model).__name__),
        library="transformers",
        repo_id=repo_id,
        base_model=base_of(trainer.model.pretrained_model).config.name_or_path or None,
        facts=facts_of(trainer.run.about, data=rows_in_words(trainer.dataset)),
        settings=to_flat_dict(trainer.config),
        tags=["reinforcement-learning"],
    )


def log_step(
    trainer: Any,
    stats: Mapping[str, Any],
    batch: Mapping[str, Sequence[Any]],
    rewards: Sequence[Any],
    columns: Sequence[str],
) -> dict[str, Any]:
    """See `PPOTrainer.log_stats`. Collective."""
    check_logged(batch, rewards, columns)
    rows = list(zip(*(batch[name] for name in columns), map(float, rewards), strict=True))
    gathered = [row for part in gather_over_ranks(rows) for row in part]
    distribution = torch.tensor([row[-1] for row in gathered])
    logs = {
        **stats,
        "env/reward_mean": float(distribution.mean()),
        "env/reward_std": float(distribution.std(correction=0)),
        "env/reward_dist": distribution,
    }
    step = trainer.steps_done
    trainer.tracker.log(logs, step)
    if (step - 1) % trainer.config.log_table_every == 0:
        trainer.tracker.table("game_log", [*columns, "reward"], gathered, step)
    return logs
