"""The loop of `PPOTrainer.train`, and what comes after each step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelerate.utils.memory import clear_device_cache
from torch.utils.data import DataLoader

from trimtab_common.sealing import save_or_warn
from trimtab_common.tracking import progress
from trimtab_lm.data.prompts import endless, upcoming_queries
from trimtab_lm.rewards.functions import RewardSet

from .sampler import completions_of, told_by
from .statistics import sampling_stats, vitals


def run_steps(
    trainer: Any,
    rewards: RewardSet,
    options: Mapping[str, Any],
    loader: DataLoader[Any],
    total: int,
    on_step: Callable[[int, dict[str, Any], dict[str, Any]], None] | None,
) -> list[dict[str, Any]]:
    """Steps until `total` are done; returns the numbers among the logged statistics of each.

    Args:
        trainer: a PPOTrainer, whose methods may be replaced.
        rewards: score the responses.
        options: of `generate`.
        loader: prompts.
        total: PPO steps in all.
        on_step: see `PPOTrainer.train`.
    """
    config, run, generation = trainer.config, trainer.run, trainer.generation
    read = partial(completions_of, tokenizer=trainer.tokenizer, is_encoder_decoder=trainer.is_encoder_decoder)
    history, batches = [], endless(loader)
    for number in progress(range(trainer.steps_done + 1, total + 1), "PPO steps"):
        batch = next(batches)
        run.begin_step(config.output_dir)
        generation.begin_step(trainer.steps_done, None if number == total else partial(upcoming_queries, loader))
        sampled = generation.sample(batch, options, trainer.generate)
        scored = rewards(*read(batch, sampled.completions))
        scores = scored.rewards.tolist()
        stats = trainer.step(batch["input_ids"], sampled.completions, scores, **told_by(sampled))
        if more := sampling_stats(sampled, rewards.names, scored, step=trainer.steps_done - 1):
            stats |= trainer.gather_stats(more)
        if (episodes := sampled.episodes) is not None:
            scores = [score + float(row.sum()) for score, row in zip(scores, episodes.rewards, strict=True)]
        logs = trainer.log_stats(stats, batch, scores)
        history.append({name: value for name, value in logs.items() if isinstance(value, float)})
        if on_step is not None:
            on_step(trainer.steps_done, logs, batch)
        if config.save_steps and trainer.steps_done % config.save_steps == 0:
            save_or_warn(trainer.save_checkpoint, config.on_save_error)
        run.interruption.end_if_asked(trainer.save_checkpoint)
    return history


def after_step(trainer: Any, stats: dict[str, Any]) -> dict[str, Any]:
    """Moves the learning rate and the coefficient of the KL, pushes the best policy, ends the process if told.

    Args:
        trainer: a PPOTrainer.
        stats: of the step, equal on all processes.

    Returns:
        The statistics, with the health report.
    """
    config, best = trainer.config, trainer.config.push_to_hub_if_best_kwargs
    if trainer.lr_scheduler is not None:
        trainer.lr_scheduler.step()
    trainer.steps_done += 1
    if best and trainer.steps_done % config.compare_steps == 0 and stats["ppo/mean_scores"] > trainer.best_score:
        trainer.best_score = stats["ppo/mean_scores"]
        trainer.push_to_hub(**best)
    if config.optimize_device_cache:
        clear_device_cache()
    numbers = {name: value for name, value in stats.items() if isinstance(value, float)}
    stats |= trainer.run.check_health(vitals(numbers, config), numbers, when=f"step {trainer.steps_done}")
    trainer.kl_ctl.update(stats["objective/kl"], config.batch_size * trainer.accelerator.num_processes)
    trainer.run.interruption.end_step(trainer.save_checkpoint, is_last=trainer.steps_done >= config.steps)
    return stats
