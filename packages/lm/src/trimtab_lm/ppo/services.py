"""What PPOTrainer offers besides the algorithm and its samples: statistics and files."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn

from trimtab_common.config import to_flat_dict
from trimtab_common.formulas.kl import FixedKLController
from trimtab_common.hub import write_model_card
from trimtab_common.sharding import divides_weights
from trimtab_common.stats import RunningMoments, gather_over_ranks, gather_stats
from trimtab_common.tracking import Tracker
from trimtab_lm.legacy.ppo_names import NamesOf2024

from .checks import check_logged
from .generation import Generation
from .statistics import (
    LENGTH_CORRELATION,
    Clock,
    Rollout,
    as_numbers,
    ended,
    one_dimensional,
    rollout_stats,
    token_stats,
)

USAGE = """from transformers import AutoTokenizer
from trimtab_lm import {model}

model = {model}.from_pretrained("{repo_id}")  # transformers' own Auto classes load the language model alone
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")"""


class PolicyServices(NamesOf2024, Generation):
    """The methods of PPOTrainer that are no part of the algorithm. PPOTrainer's constructor sets the attributes."""

    optimizer: torch.optim.Optimizer
    kl_ctl: FixedKLController
    running: RunningMoments
    best_score: float

    @property
    def model_params(self) -> list[nn.Parameter]:
        """The parameters that train: of the policy, and of the critic where there is one."""
        return [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]

    # ---------------------------------------------------------------- scores and statistics

    def _shaped(self, scores: Tensor, responses: list[Tensor]) -> Tensor:
        """Scores less the penalty for a missing end token, then scaled, normed and clipped as the config says."""
        config = self.config
        if config.missing_eos_penalty is not None:
            unended = ~ended(responses, self.sampler.ends(self.model))
            scores = scores - config.missing_eos_penalty * unended
        if config.use_score_scaling:
            self.running.update(scores)
            scores = (scores - (self.running.mean if config.use_score_norm else 0.0)) / self.running.std
        return scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)

    def _step_stats(self, rollout: Rollout, train_stats: Mapping[str, Tensor], clock: Clock) -> dict[str, Any]:
        """The statistics of a step, over all processes."""
        stats = self.record_step_stats(kl_coef=self.kl_ctl.value, **rollout.step_data(), train_stats=train_stats)
        clock.lap("calc_stats")
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        stats |= token_stats(rollout.samples, rollout.scores, self.tokenizer, ends=self.sampler.ends(self.model))
        stats = one_dimensional({**stats, "ppo/learning_rate": learning_rate, **clock.stats()})
        numbers = as_numbers(self.gather_stats(stats))
        if math.isnan(numbers.get(LENGTH_CORRELATION, 0.0)):  # lengths or scores do not vary
            del numbers[LENGTH_CORRELATION]
        return numbers

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """This process's statistics of a step, under their documented names.

        Args:
            kl_coef: the coefficient of the KL penalty in this step.
            data: `queries`, `responses` and `scores` of the batch; `masks`, `logprobs`, `ref_logprobs`, `kls`,
                `non_score_reward`, `values`, `advantages`, `returns` and `entropy` [B, R], 0 where the mask is 0; and
                `train_stats`, of the updates: tensors whose mean over the first axis is the statistic.
        """
        train_stats = data.pop("train_stats")
        return {
            **rollout_stats(kl_coef=kl_coef, **data),
            **{f"ppo/{name}": value.mean(0) for name, value in train_stats.items()},
        }

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics of all processes: floats and 1-D tensors, equal on each of them."""
        return gather_stats(stats)

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Any],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> dict[str, Any]:
        """Send a step's statistics to the tracker, with the rewards; every `log_table_every` steps a table of samples.

        Args:
            stats: of `step`.
            batch: columns of this process's batch.
            rewards: one number per response of this process.
            columns_to_log: columns of `batch` for the table.

        Returns:
            The statistics that were sent.
        """
        check_logged(batch, rewards, columns_to_log)
        rows = list(zip(*(batch[name] for name in columns_to_log), map(float, rewards), strict=True))
        gathered = [row for part in gather_over_ranks(rows) for row in part]
        distribution = torch.tensor([row[-1] for row in gathered])
        logs = {
            **stats,
            "env/reward_mean": float(distribution.mean()),
            "env/reward_std": float(distribution.std(correction=0)),
            "env/reward_dist": distribution,
        }
        self.tracker.log(logs, self.steps_done)
        if (self.steps_done - 1) % self.config.log_table_every == 0:
            self.tracker.table("game_log", [*columns_to_log, "reward"], gathered, self.steps_done)
        return logs

    @property
    def tracker(self) -> Tracker:
        """Where statistics go; started at its first use, so that a resumed run goes on under its id."""
        return self.run.tracker

    # ---------------------------------------------------------------- files

    def save_checkpoint(self, output_dir: str | Path | None = None) -> Path:
        """Write everything that the next step depends on, atomically, as `checkpoint-<steps>` into `output_dir`.

        Args:
            output_dir: the folder of checkpoints; default: the config's.
        """
        root = output_dir or self.config.output_dir
        if root is None:
            raise ValueError("save_checkpoint needs a folder: give it one, or PPOConfig(output_dir=...).")
        return self.run.save(root, self.steps_done, keep=self.config.save_total_limit)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint, in a trainer with the models, config and data of the one that saved it."""
        self.run.load(path)

    def _resume(self, where: str | Path | None) -> None:
        """Go on from a checkpoint, or begin a run in the config's `output_dir`.

        Args:
            where: a checkpoint's folder, or "latest" for the newest in `output_dir`, if there is one; None: begin.

        Raises:
            CheckpointError: a new run would save beside the checkpoints of another.
        """
        root = self.config.output_dir
        if where == "latest" and root is None:
            raise ValueError('resume_from="latest" looks into PPOConfig(output_dir=...), which is None.')
        if where is not None:
            self.run.resume(where, root or where)
        elif root is not None and self.config.save_steps:
            self.run.record.claim(root)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the policy with its value head, the tokenizer and a model card into one folder.

        Collective where the processes share the weights (FSDP, DeepSpeed): call it on each of them.

        Args:
            save_directory: the folder, which is created if need be.
            kwargs: of the model's `save_pretrained`.
        """
        self._save_pretrained(str(save_directory), **kwargs)

    def _save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """What a subclass of 2024 replaces, of `save_pretrained`."""
        self._write_policy(save_directory, self._full_weights(), **kwargs)

    def _full_weights(self) -> dict[str, Tensor] | None:
        """The policy's weights, gathered on the main process; None where each process has them. Collective."""
        if not divides_weights(self.accelerator):
            return None
        weights = self.accelerator.get_state_dict(self.actor_critic) or {}
        policy = {name: weight for name, weight in weights.items() if name.startswith("policy.")}
        return {name.removeprefix("policy."): weight for name, weight in policy.items()}

    def _write_policy(
        self, folder: str, weights: Mapping[str, Tensor] | None, repo_id: str | None = None, **kwargs: Any
    ) -> None:
        if self.accelerator.is_main_process:
            self.model.save_pretrained(folder, **{"state_dict": weights, **kwargs})
            self.tokenizer.save_pretrained(folder)
            self.create_model_card(folder, repo_id=repo_id)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo | None:
        """Upload what `save_pretrained` writes; arguments as of the model's `push_to_hub`. Collective likewise."""
        weights = self._full_weights()
        return self.run.push(lambda folder: self._write_policy(folder, weights, repo_id), repo_id, **kwargs)

    def _push_if_best(self, mean_score: float) -> None:
        options = self.config.push_to_hub_if_best_kwargs
        if options and self.steps_done % self.config.compare_steps == 0 and mean_score > self.best_score:
            self.best_score = mean_score
            self.push_to_hub(**options)

    def create_model_card(self, path: str, model_name: str | None = "TRL Model", *, repo_id: str | None = None) -> None:
        """Write a model card, README.md, into a folder.

        Args:
            path: the folder.
            model_name: the title.
            repo_id: what the model is loaded by; default: the folder's name.
        """
        write_model_card(
            path,
            name=model_name or "Model",
            trainer=type(self).__name__,
            paper="Ziegler et al. 2019, arXiv:1909.08593",
            usage=USAGE.replace("{model}", type(self.model).__name__),
            library="transformers",
            repo_id=repo_id,
            base_model=self.model.config.name_or_path or None,
            settings={name: value for name, value in to_flat_dict(self.config).items() if value not in (None, {})},
        )
