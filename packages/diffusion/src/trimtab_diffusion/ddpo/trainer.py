"""DDPO: policy gradients for diffusion pipelines (Black et al. 2023, arXiv:2305.13301)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from trimtab_common.formulas.kl import kl_controller
from trimtab_common.formulas.surrogate import clipped_surrogate
from trimtab_common.health import TrainingDivergedError
from trimtab_common.overrides import is_replaced
from trimtab_common.run import Stateful
from trimtab_common.sealing import save_or_warn
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import Mean, gather_over_ranks, gather_stats, merge_stats
from trimtab_common.tracking import progress
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.recording import Trajectories
from trimtab_diffusion.rewards import jpeg_incompressibility, mean_over_frames

from . import setup
from .config import DDPOConfig
from .objective import Stats, advantages_of, policy_loss, regression_loss
from .replay import Replay, draw_pairs
from .sampling import PromptFunction, RewardFunction, Rewards, Samples, draw_prompts, sample_and_score
from .selfcheck import check_first
from .services import HookTracker, PipelineServices
from .statistics import vitals

SAMPLE, TRAIN = 0, 1  # what random numbers are for


class DDPOTrainer(PipelineServices):
    """Samples images, scores them, and makes the denoising steps that led to the better ones more probable.

    Args:
        config: a copy of it is `trainer.config`.
        reward_function: `(images, prompts, metadata) -> rewards [B]`, or a pair of rewards and metadata for the hook.
            Images are [B, 3, H, W], videos [B, F, 3, H, W], float32 within [0, 1].
        prompt_function: `() -> (prompt, metadata)`. Python's, NumPy's and torch's generators are seeded around it, for
            each process and epoch by itself. Checkpoints keep its state if it has `state_dict` and `load_state_dict`.
        sd_pipeline: a DDPOStableDiffusionPipeline; or a diffusers pipeline, all of whose denoiser is then trained.
        image_samples_hook: called after each epoch's sampling with its batches [images, prompts, metadata, rewards,
            reward metadata], the global step, and a tracker with `log_images` and `log`.
        other_rewards: rewards by name that are logged, not trained on; by default the images' size in kB as JPEG.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
        image_samples_hook: Callable[[list[list[Any]], int, HookTracker], object] | None = None,
        *,
        other_rewards: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self.config = config = replace(config)
        self.prompt_function, self.image_samples_callback = prompt_function, image_samples_hook
        if not isinstance(sd_pipeline, DDPOStableDiffusionPipeline):
            sd_pipeline = DDPOStableDiffusionPipeline(sd_pipeline)
        self.sd_pipeline = sd_pipeline
        others = {"jpeg_kb": mean_over_frames(jpeg_incompressibility)} if other_rewards is None else other_rewards
        workers = config.max_workers if config.async_reward_computation else None
        self.rewards = Rewards(reward_function, others, workers=workers, timeout=config.reward_timeout)
        self.accelerator = setup.accelerator_of(config)
        setup.place(config, sd_pipeline, self.accelerator)
        self.reference = setup.reference_of(config, sd_pipeline, self.accelerator)
        optimizer = setup.optimizer_of(config, sd_pipeline.denoiser)
        self.model, self.optimizer = self.accelerator.prepare(sd_pipeline.denoiser, optimizer)
        setup.return_float32(sd_pipeline.denoiser, self.accelerator)
        self.model.eval()  # dropout would make the policy that trains another than the one that sampled
        self.lr_scheduler = setup.warmup(optimizer, config.train_warmup_steps)
        target = config.target if config.adap_kl_ctrl else None
        self.kl_ctl = kl_controller(config.init_kl_coef, target=target, horizon=config.horizon)
        self.prompt_stats = setup.prompt_stats_of(config)
        self.first_epoch = self.global_step = self.queries = 0
        self.last_stats: dict[str, float] = {}
        self.run = setup.run_of(config, self.accelerator, self.model)
        self.run.keep(
            self, "optimizer", "lr_scheduler", "kl_ctl", "prompt_stats", "first_epoch", "global_step", "queries"
        )
        self.run.keep(self.accelerator, "scaler")
        if isinstance(prompt_function, Stateful):
            self.run.keep_per_rank("prompt_function", prompt_function)
        if config.resume_from:
            self.run.resume(config.resume_from, self.checkpoint_folder)

    # ------------------------------------------------------------ the algorithm

    def train(self, epochs: int | None = None) -> list[dict[str, float]]:
        """Runs epochs up to number `epochs` (default: the config's); logs and saves.

        The tracker stays open for what you log yourself; `with trainer.tracker:` around the call closes it.

        Returns:
            The numbers that each epoch logged.

        Raises:
            CheckpointError: a new run would save beside the checkpoints of another.
        """
        if self.first_epoch == 0:
            self.run.record.claim(self.checkpoint_folder)
        history = []
        total = self.config.num_epochs if epochs is None else epochs
        setup.check_saves(self.config, self.accelerator, total)
        with self.run.training(self.checkpoint_folder):
            for epoch in progress(range(self.first_epoch, total), "DDPO epochs"):
                self.step(epoch, self.global_step)
                history.append(self.last_stats)
                if (epoch + 1) % self.config.save_freq == 0:
                    save_or_warn(self.save_checkpoint, self.config.on_save_error)
                self.run.interruption.end_if_asked(self.save_checkpoint)
        return history

    def step(self, epoch: int, global_step: int) -> int:
        """One epoch: samples images, scores them, learns from them, and logs.

        Args:
            epoch: its number, from 0, on which its random numbers depend.
            global_step: optimizer steps before it.

        Returns:
            Optimizer steps after it.
        """
        self.run.begin_step(self.checkpoint_folder)
        started = time.perf_counter()
        self.global_step = global_step
        samples = self.draw(epoch)
        advantages = self.advantages(samples.prompts, samples.rewards)
        sampled = time.perf_counter()
        stats: list[Mapping[str, Mean | float]] = []
        if global_step == 0:
            stats.append(check_first(samples.trajectories, self.model, self.reference, self.config, self.accelerator))
        if self.image_samples_callback is not None:
            self.image_samples_callback(samples.batches, global_step, HookTracker(self.tracker))
        for inner_epoch in range(self.config.train_num_inner_epochs):
            generator = self._generator(TRAIN, epoch * self.config.train_num_inner_epochs + inner_epoch)
            rows = torch.randperm(len(advantages), generator=generator)
            for start in range(0, len(rows), self.config.samples_per_update):
                chosen = rows[start : start + self.config.samples_per_update]
                stats += self._update(samples.trajectories, advantages, chosen, generator)
        self.first_epoch = epoch + 1
        stats.append({"time/sampling": sampled - started, "time/training": time.perf_counter() - sampled})
        self._log(epoch, samples, advantages, stats)
        self.run.interruption.end_step(self.save_checkpoint, is_last=epoch + 1 >= self.config.num_epochs)
        return self.global_step

    def draw(self, epoch: int) -> Samples:
        """Samples an epoch's images on this process, and scores them."""
        config, generator = self.config, self._generator(SAMPLE, epoch, self.accelerator.device)
        seed = sampling_seed(config.seed, rank=self.accelerator.process_index, draw=2 * epoch)
        drawn = draw_prompts(self.prompt_function, config.samples_per_epoch, group_size=config.group_size, seed=seed)
        samples = sample_and_score(
            self.sd_pipeline,
            drawn,
            self.rewards,
            config=config,
            generator=generator,
            compute_rewards=self.compute_rewards if is_replaced(self, DDPOTrainer, "compute_rewards") else None,
        )
        self.queries += len(drawn) * self.accelerator.num_processes
        return samples

    def advantages(self, prompts: list[str], rewards: Tensor) -> Tensor:
        """How much better than expected each of this process's samples is; for RWR its weight. Collective.

        Args:
            prompts: B texts.
            rewards: [B].

        Returns:
            [B], float32.
        """
        gathered = gather_over_ranks((prompts, rewards))
        advantages = advantages_of(
            [prompt for part, _ in gathered for prompt in part],
            torch.cat([part for _, part in gathered]).double(),
            config=self.config,
            prompt_stats=self.prompt_stats,
        )
        return advantages.split([len(part) for part, _ in gathered])[self.accelerator.process_index].float()

    def _update(
        self, trajectories: Trajectories, advantages: Tensor, rows: Tensor, generator: torch.Generator
    ) -> list[Stats]:
        """One optimizer step on the samples `rows`: their trained steps, in shuffled micro-batches of pairs."""
        config = self.config
        rows, steps = draw_pairs(trajectories.steps, rows, count=config.trained_steps, generator=generator)
        chunks = torch.randperm(len(rows), generator=generator).split(config.train_batch_size)
        parts = []
        for i, chunk in enumerate(chunks, start=1):
            with self.accelerator.part_of_step(self.model, is_last=i == len(chunks)):
                loss, stats = self._loss(trajectories, advantages, rows[chunk], steps[chunk], generator)
                self._require_finite(loss, "loss")
                self.accelerator.backward(loss * len(chunk) / len(rows))
            parts.append(stats)
        return [*parts, self._take_step()]

    def _take_step(self) -> Stats:
        norm = torch.as_tensor(
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.train_max_grad_norm)
        )
        if self.accelerator.scaler is None:  # which would skip the update by itself
            self._require_finite(norm, "gradient's norm")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.global_step += 1
        return self.accelerator.norm_stats(norm)

    def _require_finite(self, value: Tensor, name: str) -> None:
        if not torch.isfinite(value):
            self.optimizer.zero_grad()
            raise TrainingDivergedError(
                f"The {name} is {float(value)} at update {self.global_step}. No update was made. Lower "
                f"train_learning_rate ({self.config.train_learning_rate}), or train in bf16 or float32."
            )

    # ------------------------------------------------------------------ losses

    def _loss(
        self, trajectories: Trajectories, advantages: Tensor, rows: Tensor, steps: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Stats]:
        """The mean loss of pairs of samples `rows` [n] and steps `steps` [n], with its statistics."""
        weights = advantages[rows].to(self.accelerator.device)
        if self.config.is_regression:
            return regression_loss(self.model, trajectories, rows, steps, weights, generator)
        replay = Replay.of(trajectories, rows, steps, weights.device)
        if not is_replaced(self, DDPOTrainer, "calculate_loss"):
            return self._policy_loss(replay, weights)
        loss, approx_kl, clipped = self.calculate_loss(
            replay.latents, replay.timesteps, replay.next_latents, replay.logprobs, weights, replay.conditions
        )
        return loss, {"loss": Mean.of(loss), "approx_kl": Mean.of(approx_kl), "clipfrac": Mean.of(clipped)}

    def _policy_loss(self, replay: Replay, advantages: Tensor) -> tuple[Tensor, Stats]:
        return policy_loss(
            self.model,
            replay,
            advantages,
            config=self.config,
            reference=self.reference,
            kl_coef=self.kl_ctl.value,
            loss=self.loss if is_replaced(self, DDPOTrainer, "loss") else None,
        )

    def loss(self, advantages: Tensor, clip_range: float, ratio: Tensor) -> Tensor:
        """The clipped loss of B steps, a mean; `calculate_loss` calls a method that replaces this one.

        Args:
            advantages: [B].
            clip_range: how far from 1 the ratio is clipped.
            ratio: [B], of the steps' probability densities now and when they were sampled.
        """
        return clipped_surrogate(ratio.log(), advantages, clip_low=clip_range, clip_high=clip_range).mean()

    def compute_rewards(
        self, prompt_image_pairs: Sequence[Sequence[Any]], is_async: bool = False
    ) -> tuple[list[Tensor], list[Any]]:
        """Rewards [b] of each batch, and the reward function's metadata.

        The trainer calls a method that replaces this one; its own rewards come while the next batch is sampled.

        Args:
            prompt_image_pairs: batches [images, prompts, metadata].
            is_async: whether the batches are scored side by side, by `config.max_workers` threads.
        """
        workers = self.config.max_workers if is_async else None
        rewards = Rewards(self.rewards.function, {}, workers=workers, timeout=None)  # the caller has a limit
        scored = [wait() for wait in [rewards.start(*batch[:3]) for batch in prompt_image_pairs]]
        return [each.rewards for each in scored], [each.metadata for each in scored]

    def calculate_loss(
        self,
        latents: Tensor,
        timesteps: Tensor,
        next_latents: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        embeds: Tensor | Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """DDPO's loss of B steps, of the schedule that the pipeline's last call set.

        Before the first call the schedule has the config's `sample_num_steps`.

        Args:
            latents: [B, ...], before the step.
            timesteps: [B].
            next_latents: [B, ...], after the step.
            log_probs: [B], when sampled, nats per dimension.
            advantages: [B].
            embeds: of the prompts, [B, ...], or with guidance [2B, ...], those without a prompt first; or all of the
                denoiser's other arguments by name.

        Returns:
            Tensors without a dimension: the loss, a mean over the B; its approximate KL; the share that was clipped.

        Raises:
            ValueError: a timestep is not one of the schedule.
        """
        replay = Replay.by_scheduler(
            self.sd_pipeline, self.config, latents, timesteps, next_latents, logprobs=log_probs, embeds=embeds
        )
        loss, stats = self._policy_loss(replay, advantages)
        # Tensors on the device: a number would make every micro-batch wait for it.
        approx_kl, clipped = (
            torch.as_tensor(stats[key].total / stats[key].weight) for key in ("approx_kl", "clipfrac")
        )
        return loss, approx_kl, clipped

    def _generator(self, use: int, number: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers that depend on the seed, the process, their use and its number, and not on earlier draws."""
        seed = sampling_seed(self.config.seed, rank=self.accelerator.process_index, draw=2 * number + use)
        return torch.Generator(device).manual_seed(seed)

    # -------------------------------------------------------------- statistics

    def _log(self, epoch: int, samples: Samples, advantages: Tensor, stats: list[Mapping[str, Mean | float]]) -> None:
        """Merges an epoch's statistics over processes, checks their health, and sends them on. Collective."""
        summary = samples.stats() | {
            "epoch": float(epoch),
            "advantages/zero": Mean.of((advantages == 0).float()),
            "queries": float(self.queries),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "clip_range": (clip_range := self.config.clip_range(samples.trajectories.dimensions)),
            "clip_range_nats": clip_range * samples.trajectories.dimensions,
        }
        gathered = gather_stats(merge_stats([*stats, summary]))
        if "objective/kl" in gathered:
            gathered["objective/kl_coef"] = self.kl_ctl.value
        self.last_stats = {name: value for name, value in gathered.items() if isinstance(value, float)}
        health = self.run.check_health(vitals(self.last_stats, self.config), self.last_stats, when=f"epoch {epoch}")
        if "objective/kl" in gathered:
            self.kl_ctl.update(gathered["objective/kl"], len(samples.rewards) * self.accelerator.num_processes)
        self.tracker.log({**gathered, **health}, self.global_step)
        self.tracker.images("pictures", *samples.captioned(16), self.global_step)
