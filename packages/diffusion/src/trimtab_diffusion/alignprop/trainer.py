"""AlignProp: the gradient of a differentiable reward through the denoising steps (arXiv:2310.03739)."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from trimtab_common.conditions import Vitals
from trimtab_common.health import check_rows
from trimtab_common.reward_checks import RewardError
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import gather_stats, merge_stats
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
    draw_prompts,
    guidance_of,
    noise_of,
    parted,
    rewards_of,
)
from trimtab_diffusion.trajectories import Trajectories

from .algorithm import (
    depends_on,
    first_step,
    latents_with_gradient,
    redrawn_latents,
    reward_loss,
    update,
    warn_of_a_small_last_step,
    warn_of_first_steps,
)
from .config import WITHOUT_EFFECT, AlignPropConfig


class AlignPropTrainer(PipelineTrainer):
    """Samples images, and follows the gradient of their reward through the last denoising steps.

    Args:
        config: a copy of it is `trainer.config`.
        reward_function: `(images, prompts, metadata) -> rewards [B]`, differentiable in the images, or a pair of
            rewards and anything. Images are [B, 3, H, W], videos [B, F, 3, H, W], float32 within [0, 1].
        prompt_function: `() -> (prompt, metadata)`; see `DDPOTrainer`.
        sd_pipeline: a DDPOStableDiffusionPipeline; or a diffusers pipeline, all of whose denoiser is then trained.
        image_samples_hook: called after updates with a dict of the last images, prompts, prompt_metadata and rewards,
            the global step, and a tracker with `log_images` and `log`.
    """

    method, paper = "AlignProp", "Prabhudesai et al. 2023, arXiv:2310.03739"
    watched = ("reward_mean", "reward_std", "loss", "grad_norm", "learning_rate")
    config: AlignPropConfig

    def __init__(
        self,
        config: AlignPropConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
        image_samples_hook: Callable[[dict[str, Any], int, HookTracker], object] | None = None,
    ) -> None:
        warn_of_first_steps(config)
        super().__init__(config, sd_pipeline)
        self.image_samples_callback = image_samples_hook
        if config.train_gradient_checkpointing:
            self.sd_pipeline.sd_pipeline.vae.enable_gradient_checkpointing()
        self._prepare(without_effect=WITHOUT_EFFECT, held=shared.HELD)
        self._keep_prompts(prompt_function, reward_function)
        self._resume()

    def step(self, epoch: int, global_step: int) -> int:
        """One update: samples images, scores them, follows the gradient, and logs.

        Args:
            epoch: its number, from 0, on which its random numbers depend.
            global_step: updates before it.

        Returns:
            Updates after it.
        """
        self.run.begin_step(self.checkpoint_folder)
        started, config, process = time.perf_counter(), self.config, self.accelerator.process_index
        self.global_step = global_step
        seed = sampling_seed(config.seed, rank=process, draw=2 * epoch + SAMPLE)
        drawn = draw_prompts(self.prompt_fn, config.samples_per_update, group_size=1, seed=seed)
        if not global_step:
            self._check_reward(drawn[: config.train_batch_size])
        same = torch.Generator().manual_seed(sampling_seed(config.seed, rank=0, draw=2 * epoch + TRAIN))
        first, noise = first_step(config, same), self._generator(SAMPLE, epoch, self.accelerator.device)
        batches: list[dict[str, Any]] = []

        def score(part: Tensor) -> Tensor:
            batches[:] = [self.draw([drawn[i] for i in part.tolist()], first, noise)]
            batches[0]["rewards"] = self.compute_rewards(batches[0])
            return batches[0]["rewards"]

        updates = Updates(self.accelerator, self.model, self.optimizer, self.lr_scheduler, config, global_step)
        stats = update(len(drawn), score, self.calculate_loss, updates, config=config)
        if not (global_step or config.truncated_backprop_rand) and (schedule := self.sd_pipeline.schedule) is not None:
            warn_of_a_small_last_step(schedule.steps, first)
        self.queries += len(drawn) * max(1, config.low_variance_samples) * self.accelerator.num_processes
        self.first_epoch, self.global_step = epoch + 1, updates.done
        of_run = {
            "epoch": float(epoch),
            "queries": float(self.queries),
            "gradient/steps": config.sample_num_steps - first,
        }
        rate = {
            "learning_rate": updates.learning_rate,
            "time/step": time.perf_counter() - started,
        }
        self._log(epoch, batches[0], gather_stats(merge_stats([of_run | rate, *stats])))
        self.run.interruption.end_step(self.save_checkpoint, is_last=epoch + 1 >= config.num_epochs)
        return self.global_step

    def draw(self, prompts: Sequence[tuple[str, Any]], first: int, generator: torch.Generator) -> dict[str, Any]:
        """Samples images with a gradient.

        Args:
            prompts: texts with their metadata.
            first: the denoising steps from this one on have a gradient.
            generator: draws the noise, on the pipeline's device.

        Returns:
            `images` [B, 3, H, W], their `prompts` and their `prompt_metadata`.
        """
        config, (texts, metadata) = self.config, zip(*prompts, strict=True)
        finish: Callable[[Trajectories], Tensor] = partial(latents_with_gradient, denoiser=self.model, first=first)
        if count := config.low_variance_samples:
            finish = partial(redrawn_latents, denoiser=self.model, count=count, generator=generator)
        output = self.sd_pipeline(
            prompt=list(texts),
            generator=generator,
            output_type="pt",
            num_inference_steps=config.sample_num_steps,
            finish=finish,
            **guidance_of(self.sd_pipeline, config, len(texts)),
            **noise_of(config),
        )
        images, copies = output.images.float(), max(1, count)
        check_rows({"the pixels": images.detach()}, what="image")
        return {"images": images, "prompts": texts * copies, "prompt_metadata": metadata * copies}

    def compute_rewards(self, prompt_image_pairs: dict[str, Any]) -> Tensor:
        """Rewards [B] of images, with a gradient.

        Args:
            prompt_image_pairs: images, prompts and prompt_metadata, as `draw` returns them.

        Raises:
            RewardError: the reward function returns no tensor that depends on the images differentiably, or not one
                finite number per image.
        """
        with reward_limit(self.config.reward_timeout):
            result = self.reward_fn(*(prompt_image_pairs[name] for name in ("images", "prompts", "prompt_metadata")))
        rewards_of(result, prompt_image_pairs["prompts"], "reward_function")
        rewards, _ = parted(result)
        if not (isinstance(rewards, Tensor) and depends_on(rewards, prompt_image_pairs["images"])):
            kind = f"a {type(rewards).__name__}" + " without a gradient to the images" * isinstance(rewards, Tensor)
            raise RewardError(
                f"reward_function returned {kind}. AlignProp needs a tensor that depends differentiably on the images: "
                "compute it from them in torch, without no_grad, detach or numpy. For other rewards use DDPOTrainer."
            )
        return rewards.flatten().to(self.accelerator.device)  # a large reward model may be on another

    def calculate_loss(self, rewards: Tensor) -> Tensor:
        """The loss of rewards [B], which are differentiable; a mean."""
        return reward_loss(rewards)

    def _check_reward(self, prompts: Sequence[tuple[str, Any]]) -> None:
        """Calls the reward on random images before any are sampled, which takes longer, where their size is known."""
        pipeline, size = self.sd_pipeline.sd_pipeline, self.sd_pipeline.denoiser.config.get("sample_size")
        if not isinstance(size, int) or self.sd_pipeline.call_kwargs:
            return
        edge, (texts, metadata) = size * pipeline.vae_scale_factor, zip(*prompts, strict=True)
        images = torch.rand(len(texts), 3, edge, edge, device=self.accelerator.device, requires_grad=True)
        self.compute_rewards({"images": images, "prompts": texts, "prompt_metadata": metadata})

    def _log(self, epoch: int, batch: dict[str, Any], stats: dict[str, Any]) -> None:
        """Checks the health of an update's statistics, calls the hook and sends all on."""
        self._report(epoch, stats, Vitals())
        images, rewards = batch["images"].detach(), batch["rewards"].detach()
        self.run.tracker.images("pictures", *captioned(images, batch["prompts"], rewards), self.global_step)
        if self.image_samples_callback is not None and self.global_step % self.config.log_image_freq == 0:
            seen = batch | {"images": images, "rewards": rewards}
            self.image_samples_callback(seen, self.global_step, HookTracker(self.run.tracker))
