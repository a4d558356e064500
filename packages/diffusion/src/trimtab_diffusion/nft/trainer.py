"""DiffusionNFT: rewards by regression on noised samples (Zheng et al. 2025, arXiv:2509.16117)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from torch import Tensor

from trimtab_common.conditions import Vitals
from trimtab_common.health import check_rows
from trimtab_common.seeding import sampling_seed
from trimtab_common.sharding import divides_weights
from trimtab_common.stats import Deviation, Mean, Stats, gather_stats, merge_stats
from trimtab_common.time_limit import reward_limit
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.training import config as shared
from trimtab_diffusion.training.base import SAMPLE, TRAIN, PipelineTrainer
from trimtab_diffusion.training.hook import HookTracker
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.training.sampling import (
    PromptFunction,
    RewardFunction,
    captioned,
    check_own_call,
    draw_prompts,
    guidance_of,
    noise_of,
    of_all_processes,
    rewards_of,
)
from trimtab_diffusion.training.setup import reference_of
from trimtab_diffusion.trajectories import Schedule, Trajectories

from .algorithm import losses, optimality_of, update
from .config import WITHOUT_EFFECT, DiffusionNFTConfig
from .loss import old_decay
from .old_policy import OldPolicy


@dataclass
class Samples:
    """What one process sampled in an epoch: B images or videos.

    Args:
        path: their last latents, and what the denoiser got beside latents and time.
        prompts: B texts.
        rewards: [B], float32, on the CPU.
        batches: as the hook gets them, each [images, prompts, metadata, rewards, reward metadata].
    """

    path: Trajectories
    prompts: list[str]
    rewards: Tensor
    batches: list[list[Any]]


class DiffusionNFTTrainer(PipelineTrainer):
    """Samples images, scores them, and regresses the denoiser towards the better ones and away from the others.

    Args:
        config: a copy of it is `trainer.config`.
        reward_function: `(images, prompts, metadata) -> rewards [B]`, or a pair of rewards and metadata for the hook.
            Images are [B, 3, H, W], videos [B, F, 3, H, W], float32 within [0, 1].
        prompt_function: `() -> (prompt, metadata)`; see `DDPOTrainer`.
        sd_pipeline: a DDPOStableDiffusionPipeline; or a diffusers pipeline, all of whose denoiser is then trained.
        image_samples_hook: called after each epoch's sampling with its batches [images, prompts, metadata, rewards,
            reward metadata], the global step, and a tracker with `log_images` and `log`.
        solver: the diffusers scheduler that samples, such as a DPMSolverMultistepScheduler; None: the pipeline's own.

    Raises:
        ValueError: there is a solver and `config.sample_eta`, or the engine is FSDP or DeepSpeed.
        TypeError: there is a solver, and the pipeline's class replaces `__call__`, which solvers do not call.
    """

    method, paper = "DiffusionNFT", "Zheng et al. 2025, arXiv:2509.16117"
    watched = ("reward_mean", "reward_std", "loss", "policy/moved", "grad_norm")
    config: DiffusionNFTConfig

    def __init__(
        self,
        config: DiffusionNFTConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
        image_samples_hook: Callable[[list[list[Any]], int, HookTracker], object] | None = None,
        *,
        solver: SchedulerMixin | None = None,
    ) -> None:
        if solver is not None and config.sample_eta:
            raise ValueError(
                f"sample_eta={config.sample_eta} is the noise of the pipeline's own scheduler, and a solver samples. "
                "Set sample_eta=0, or leave out the solver."
            )
        super().__init__(config, sd_pipeline)
        if solver is not None:
            check_own_call(self.sd_pipeline, "solvers")
        if divides_weights(self.accelerator):
            raise ValueError(
                f"DiffusionNFT samples with averaged weights, which it cannot exchange for weights that "
                f"{self.accelerator.distributed_type.value} divides over processes. Train with DDP, and use_lora=True "
                "if memory is short."
            )
        self.image_samples_callback, self.solver = image_samples_hook, solver
        self.schedule: Schedule | None = None
        self.reference = reference_of(self.sd_pipeline, self.accelerator) if config.kl_coef else None
        self._prepare(without_effect=WITHOUT_EFFECT, held=shared.HELD)
        self.old = OldPolicy(self.accelerator.unwrap_model(self.model))
        self._keep_prompts(prompt_function, reward_function)
        self.run.keep(self, "old")
        self._resume()

    # ------------------------------------------------------------ the algorithm

    def step(self, epoch: int, global_step: int) -> int:
        """One iteration of algorithm 1: samples images, scores them, learns from them, and logs.

        Args:
            epoch: its number, from 0, on which its random numbers depend.
            global_step: optimizer steps before it.

        Returns:
            Optimizer steps after it.
        """
        self.run.begin_step(self.checkpoint_folder)
        started, config = time.perf_counter(), self.config
        self.global_step = global_step
        samples = self.draw(epoch)
        optimal = self.optimality(samples.prompts, samples.rewards)
        sampled = time.perf_counter()
        if self.image_samples_callback is not None:
            self.image_samples_callback(samples.batches, global_step, HookTracker(self.run.tracker))
        passes = config.train_num_inner_epochs
        updates = Updates(self.accelerator, self.model, self.optimizer, self.lr_scheduler, config, global_step)
        stats = update(
            optimal,
            samples.path,
            partial(
                losses,
                schedule=samples.path.schedule,
                model=self.model,
                old=self.old,
                reference=self.reference,
                config=config,
            ),
            updates,
            generators=[self._generator(TRAIN, epoch * passes + i) for i in range(passes)],
            config=config,
        )
        decay = old_decay(
            epoch + 1, start=config.old_decay_start, rate=config.old_decay_rate, largest=config.old_decay_max
        )
        self.old.update(decay)
        self.first_epoch, self.global_step = epoch + 1, updates.done
        times = {"time/sampling": sampled - started, "time/training": time.perf_counter() - sampled}
        of_epoch = {"policy/old_decay": decay, "learning_rate": updates.learning_rate}
        self._log(epoch, samples, optimal, [of_epoch | times, *stats])
        self.run.interruption.end_step(self.save_checkpoint, is_last=epoch + 1 >= config.num_epochs)
        return self.global_step

    def draw(self, epoch: int) -> Samples:
        """Samples an epoch's images on this process with the old policy, and scores them."""
        config = self.config
        seed = sampling_seed(config.seed, rank=self.accelerator.process_index, draw=2 * epoch)
        drawn = draw_prompts(self.prompt_fn, config.samples_per_epoch, group_size=config.group_size, seed=seed)
        generator = self._generator(SAMPLE, epoch, self.accelerator.device)
        paths, batches = list[Trajectories](), list[list[Any]]()
        with self.old():
            for start in range(0, len(drawn), config.sample_batch_size):
                texts, metadata = zip(*drawn[start : start + config.sample_batch_size], strict=True)
                images, path = self.sample(texts, generator)
                check_rows({"the pixels": images}, what="image")
                paths.append(replace(path, latents=path.latents[:, -1:], logprobs=path.logprobs[:, -1:]))
                batches.append([images, texts, metadata])
        for batch in batches:
            scores, facts = self.compute_rewards(*batch)
            batch += [rewards_of(scores, batch[1], "compute_rewards")[0], facts]
        self.queries += len(drawn) * self.accelerator.num_processes
        rewards = torch.cat([batch[3] for batch in batches])
        return Samples(Trajectories.joined(paths), [text for text, _ in drawn], rewards, batches)

    def sample(self, prompts: Sequence[str], generator: torch.Generator) -> tuple[Tensor, Trajectories]:
        """Samples an image for each prompt with the denoiser's present weights.

        Args:
            prompts: B texts.
            generator: draws the noise, on the pipeline's device.

        Returns:
            Images [B, 3, H, W] within [0, 1], and trajectories with their last latents.
        """
        config, pipeline = self.config, self.sd_pipeline
        call: dict[str, Any] = {"prompt": list(prompts), **guidance_of(pipeline, config, len(prompts))}
        steps: dict[str, Any] = {"num_inference_steps": config.sample_num_steps}
        if self.solver is None:
            output = pipeline(**call, **steps, **noise_of(config), generator=generator, output_type="pt")
            return output.images.float(), output.trajectories
        own, pipeline.sd_pipeline.scheduler = pipeline.scheduler, self.solver
        try:
            kwargs = pipeline.call_kwargs | call | steps | {"output_type": "latent", "return_dict": False}
            with torch.no_grad():
                latents = pipeline.sd_pipeline(generator=generator, **kwargs)[0]
        finally:
            pipeline.sd_pipeline.scheduler = own
        # The pipeline decodes these latents at the end of a call in which it shows what its denoiser gets.
        unused = torch.Generator(pipeline.device).manual_seed(0)
        call |= {"num_inference_steps": 2} if self.schedule else steps
        output = pipeline(**call, window=(0, 0), finish=lambda _: latents, generator=unused, output_type="pt")
        self.schedule = self.schedule or output.trajectories.schedule
        path = replace(output.trajectories, schedule=self.schedule, latents=latents[:, None])
        return output.images.float(), path

    def compute_rewards(
        self, images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]
    ) -> tuple[Tensor, Any]:
        """Rewards [b] of a batch, float32 on the CPU, and the reward function's metadata.

        Raises:
            RewardError: there is not one finite number per image.
        """
        with torch.no_grad(), reward_limit(self.config.reward_timeout):
            result = self.reward_fn(images, prompts, metadata)
        return rewards_of(result, prompts, "reward_function")

    def optimality(self, prompts: list[str], rewards: Tensor) -> Tensor:
        """The optimality, within [0, 1], of each of this process's samples, relative to all processes'. Collective.

        Args:
            prompts: B texts.
            rewards: [B].

        Returns:
            [B], float32.
        """
        every = of_all_processes(prompts, rewards)
        return optimality_of(every.rewards, every.numbers, self.config)[every.here].float()

    def _log(self, epoch: int, samples: Samples, optimal: Tensor, parts: list[Stats]) -> None:
        """Merges an epoch's statistics over processes, checks their health, and sends them on. Collective."""
        of_run = {
            "epoch": float(epoch),
            "queries": float(self.queries),
            "reward_mean": Mean.of(samples.rewards),
            "reward_std": Deviation.of(samples.rewards),
            "rewards": samples.rewards,
            "optimality/std": Deviation.of(optimal),
            "optimality/half": Mean.of((optimal == 0.5).float()),
        }
        gathered = gather_stats(merge_stats([of_run, *parts]))
        self._report(epoch, gathered, Vitals(reward_std=gathered["reward_std"]))
        images, prompts, _, rewards, _ = samples.batches[-1]
        self.run.tracker.images("pictures", *captioned(images, prompts, rewards), self.global_step)
