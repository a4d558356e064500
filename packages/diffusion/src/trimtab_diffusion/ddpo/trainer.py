"""DDPO: policy gradients for diffusion pipelines (Black et al. 2023, arXiv:2305.13301)."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from torch import Tensor

from trimtab_common.conditions import Vitals
from trimtab_common.formulas.kl import kl_controller
from trimtab_common.formulas.surrogate import clipped_ratio, surrogate_stats
from trimtab_common.overrides import replaced
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import Mean, Stats, gather_stats, merge_stats
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.prompt_stats import PerPromptStatTracker
from trimtab_diffusion.rewards import jpeg_incompressibility, mean_over_frames
from trimtab_diffusion.steps import gaussian_kl, gaussian_logprob
from trimtab_diffusion.training.base import EVALUATION, SAMPLE, TRAIN, PipelineTrainer
from trimtab_diffusion.training.hook import HookTracker
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.training.sampling import (
    PromptFunction,
    RewardFunction,
    captioned,
    check_own_call,
    draw_prompts,
    of_all_processes,
    rewards_of,
)
from trimtab_diffusion.training.setup import reference_of
from trimtab_diffusion.trajectories import Trajectories, noised_pairs, sampled_pairs

from .algorithm import Losses, advantages_of, check_noise, update, warn_of_single_samples, window_of
from .config import HELD, WITHOUT_EFFECT, DDPOConfig
from .loss import denoising_loss, score_function_loss
from .sampling import Batches, Samples, checked_prompts, schedule_of, score, steps_of, without_noise
from .selfcheck import check_first


class DDPOTrainer(PipelineTrainer):
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
        eval_prompts: prompts and their metadata, for `evaluate`; their number is a multiple of the processes'.

    Raises:
        TypeError: a subclass replaces `calculate_loss` or `loss`, and the config's estimator is a regression, which
            calls neither, or `loss` alone, and it is the score function, which does not call it; or the pipeline's
            class replaces `__call__`, and there are `eval_prompts`, for which it is not called.
    """

    method, paper = "DDPO", "Black et al. 2023, arXiv:2305.13301"
    watched = ("reward_mean", "reward_std", "clipfrac", "policy/nats", "grad_norm")
    config: DDPOConfig

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
        image_samples_hook: Callable[[list[list[Any]], int, HookTracker], object] | None = None,
        *,
        other_rewards: Mapping[str, RewardFunction] | None = None,
        eval_prompts: Sequence[tuple[str, Any]] = (),
    ) -> None:
        names = replaced(self, DDPOTrainer, "calculate_loss", "loss")
        if names and config.is_regression:
            raise TypeError(
                f"{type(self).__name__} replaces {' and '.join(names)}, which estimator={config.estimator!r} does not "
                "call: it regresses on noised samples. Replace advantages, which gives their weights, or set "
                "estimator='is'."
            )
        if names == ["loss"] and config.estimator == "sf":
            raise TypeError(
                f"{type(self).__name__} replaces loss, which estimator='sf' does not call: it has no ratios to clip. "
                "Replace calculate_loss, or set estimator='is'."
            )
        super().__init__(config, sd_pipeline)
        if eval_prompts:
            check_own_call(self.sd_pipeline, "evaluations")
        self.eval_prompts = checked_prompts(eval_prompts, config, self.accelerator.num_processes)
        self.image_samples_callback = image_samples_hook
        default = {"jpeg_kb": mean_over_frames(jpeg_incompressibility)}
        self.other_rewards = default if other_rewards is None else other_rewards
        self.reference = reference_of(self.sd_pipeline, self.accelerator) if config.init_kl_coef else None
        target = config.target if config.adap_kl_ctrl else None
        self._prepare(without_effect=WITHOUT_EFFECT, held=HELD, kl_target=target)
        self.kl_ctl = kl_controller(config.init_kl_coef, target=target, horizon=config.horizon)
        self.prompt_stats = None
        if config.per_prompt_stat_tracking:
            size, count = config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
            self.prompt_stats = PerPromptStatTracker(size, count)
        self._keep_prompts(prompt_function, reward_function)
        self.run.keep(self, "kl_ctl", "prompt_stats")
        self._resume()

    # ------------------------------------------------------------ the algorithm

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
        if not global_step and isinstance(self.sd_pipeline.scheduler, DDIMScheduler):  # a flow's steps all have noise
            check_noise(self.config, steps_of(self.sd_pipeline, self.config))
        samples = self.draw(epoch)
        advantages = self.advantages(samples.prompts, samples.rewards)
        sampled = time.perf_counter()
        path, device = samples.trajectories, self.accelerator.device
        checks = check_first(path, self.model, self.reference, self.config, self.accelerator) if not global_step else {}
        if self.image_samples_callback is not None:
            self.image_samples_callback(samples.batches, global_step, HookTracker(self.run.tracker))
        self.sd_pipeline.schedule = path.schedule  # a reward function or the hook may have called the pipeline
        is_regression, passes = self.config.is_regression, self.config.train_num_inner_epochs
        updates = Updates(self.accelerator, self.model, self.optimizer, self.lr_scheduler, self.config, global_step)
        stats = update(
            advantages,
            path.schedule.steps.is_random.nonzero().flatten(),
            partial(noised_pairs if is_regression else sampled_pairs, path, device),
            self._regression_loss if is_regression else self.calculate_loss,
            updates,
            generators=[self._generator(TRAIN, epoch * passes + i) for i in range(passes)],
            config=self.config,
        )
        trained = time.perf_counter()
        self.first_epoch, self.global_step = epoch + 1, updates.done
        is_evaluated = self.config.eval_freq and (epoch + 1) % self.config.eval_freq == 0
        evaluation = self.evaluate() if is_evaluated else {}
        times = {"time/sampling": sampled - started, "time/training": trained - sampled}
        rate = {"learning_rate": updates.learning_rate}
        self._log(epoch, samples, advantages, [checks | rate | times | evaluation, *stats])
        self.run.interruption.end_step(self.save_checkpoint, is_last=epoch + 1 >= self.config.num_epochs)
        return self.global_step

    def draw(self, epoch: int) -> Samples:
        """Samples an epoch's images on this process, and scores them."""
        config = self.config
        seed = sampling_seed(config.seed, rank=self.accelerator.process_index, draw=2 * epoch)
        drawn = draw_prompts(self.prompt_fn, config.samples_per_epoch, group_size=config.group_size, seed=seed)
        generator = self._generator(SAMPLE, epoch, self.accelerator.device)
        batches = Batches(self.sd_pipeline, drawn, generator, config, window_of(config, epoch))
        rewards, facts = self.compute_rewards(batches, is_async=config.async_reward_computation)
        scored = [
            [*batch, rewards_of(each, batch[1], "compute_rewards")[0], fact]
            for batch, each, fact in zip(batches, rewards, facts, strict=True)
        ]
        others = {
            f"other/{name}": Mean.of(torch.cat(score(function, scored, name, timeout=config.reward_timeout)[0]))
            for name, function in self.other_rewards.items()
        }
        self.queries += len(drawn) * self.accelerator.num_processes
        _, prompts, _, all_rewards, _ = zip(*scored, strict=True)
        path = Trajectories.joined(batches.trajectories)
        return Samples(path, [*chain(*prompts)], torch.cat(all_rewards), others, scored)

    def evaluate(self) -> dict[str, float]:
        """Samples `eval_prompts` without noise in `config.eval_num_steps` steps, and scores the images. Collective.

        Each prompt's image starts from the same noise at every evaluation, in any number of processes.

        Returns:
            `eval/reward_mean`, and `eval/<reward>` for each of `other_rewards`.

        Raises:
            ValueError: there are no `eval_prompts`.
        """
        if not self.eval_prompts:
            raise ValueError("evaluate() needs prompts: pass eval_prompts=[(prompt, metadata), ...] to the trainer.")
        config, here = self.config, slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        seeds = [sampling_seed(config.seed, rank=i, draw=EVALUATION) for i in range(len(self.eval_prompts))]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds[here]]
        batches = [*without_noise(self.sd_pipeline, self.eval_prompts[here], generators, config)]
        rewards = zip(self.compute_rewards(batches)[0], batches, strict=True)
        scored = {"reward_mean": [rewards_of(each, batch[1], "compute_rewards")[0] for each, batch in rewards]}
        for name, function in self.other_rewards.items():
            scored[name] = score(function, batches, name, timeout=config.reward_timeout)[0]
        return gather_stats({f"eval/{name}": Mean.of(torch.cat(values)) for name, values in scored.items()})

    def compute_rewards(
        self, prompt_image_pairs: Iterable[Sequence[Any]], is_async: bool = False
    ) -> tuple[list[Tensor], list[Any]]:
        """Rewards [b] of each batch, and the reward function's metadata; called with all batches at once.

        An epoch calls it once, and so does an evaluation.

        `config.reward_timeout` limits the reward function. A replacement that scores otherwise has no limit.

        Args:
            prompt_image_pairs: batches [images, prompts, metadata], each of which is sampled when it is asked for.
            is_async: whether `config.max_workers` threads score batches while others are sampled.
        """
        workers, limit = self.config.max_workers if is_async else None, self.config.reward_timeout
        return score(self.reward_fn, prompt_image_pairs, "reward_function", timeout=limit, workers=workers)

    def advantages(self, prompts: list[str], rewards: Tensor) -> Tensor:
        """How much better than expected each of this process's samples is; for RWR its weight. Collective.

        With `per_prompt_stat_tracking` the expectation is that of the prompt's earlier rewards (Black et al. 2023,
        section 4.2).

        Args:
            prompts: B texts.
            rewards: [B].

        Returns:
            [B], float32.
        """
        every, limit = of_all_processes(prompts, rewards), self.config.train_adv_clip_max
        if self.config.estimator == "rwr" and self.config.rwr_beta and not self.global_step:
            warn_of_single_samples(every.numbers)
        if self.prompt_stats is not None:
            advantages = self.prompt_stats.update(every.prompts, every.rewards)
        else:
            advantages = advantages_of(every.rewards, every.numbers, self.config)
        if not self.config.is_regression:
            advantages = advantages.clamp(-limit, limit)
        return advantages[every.here].float()

    def calculate_loss(
        self,
        latents: Tensor,
        timesteps: Tensor,
        next_latents: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        embeds: Tensor | Mapping[str, Any],
    ) -> tuple[Tensor, ...]:
        """DDPO's loss of B steps (Black et al. 2023, Eqs. 6 and 7), with the KL penalty.

        The steps are those of `sd_pipeline.schedule`: in `step` that of the epoch's samples, elsewhere that of the
        pipeline's last call. Before the first call it has the config's `sample_num_steps`. `estimator="rwr"` and
        `"rwr_sparse"` do not call it.

        Args:
            latents: [B, ...], before the step.
            timesteps: [B].
            next_latents: [B, ...], after the step.
            log_probs: [B], when sampled, nats per dimension.
            advantages: [B].
            embeds: the prompts' embeddings, [B, ...], or with guidance [2B, ...], those without a prompt first; or all
                other arguments of the denoiser, by name.

        Returns:
            Tensors without a dimension: the loss, a mean over the B; its approximate KL; the share that was clipped.

        Raises:
            ValueError: a timestep is not one of the schedule; or, before the pipeline's first call, the steps depend on
                the size of the images (`use_dynamic_shifting`).
        """
        schedule, conditions = schedule_of(self.sd_pipeline, self.config, embeds, len(latents))
        index, dimensions = schedule.steps.index_of(timesteps), latents[0].numel()
        clip = self.config.clip_range(dimensions)
        mean, std = schedule.gaussian(self.model, latents, index, conditions)
        logprobs = gaussian_logprob(next_latents, mean, std)
        log_ratio = logprobs - log_probs
        if self.config.estimator == "sf":
            loss = surrogate = score_function_loss(logprobs, advantages).mean()
        else:
            loss = surrogate = self.loss(advantages, clip, log_ratio.exp())
        moved = surrogate_stats(log_ratio, advantages, torch.ones_like(log_ratio), clip_low=clip, clip_high=clip)
        approx_kl, clipped = moved["approxkl"], moved["clipfrac"]
        stats = {"ratio": moved["ratio"], "approx_kl": approx_kl, "clipfrac": clipped}
        stats["loss"] = Mean(surrogate.detach() * len(latents), len(latents))
        stats["policy/nats"] = Mean.of(log_ratio.abs() * dimensions)
        if self.reference is not None:
            with torch.no_grad(), self.reference() as frozen:
                ref_mean, _ = schedule.gaussian(frozen, latents, index, conditions)
            kl = gaussian_kl(mean, ref_mean, std)
            loss = loss + self.kl_ctl.value * kl.mean()
            stats["objective/kl"] = Mean.of(kl * dimensions * int(schedule.steps.is_random.sum()))
        # Tensors on the device: a number would make every micro-batch wait for it.
        means = torch.as_tensor(approx_kl.total / approx_kl.weight), torch.as_tensor(clipped.total / clipped.weight)
        return Losses(loss, *means, stats)

    def loss(self, advantages: Tensor, clip_range: float, ratio: Tensor) -> Tensor:
        """The clipped loss of B steps, a mean; `calculate_loss` calls it for `estimator="is"`.

        Args:
            advantages: [B].
            clip_range: how far from 1 the ratio is clipped.
            ratio: [B], of the steps' probability densities now and when they were sampled.
        """
        return clipped_ratio(ratio, advantages, clip_low=clip_range, clip_high=clip_range).mean()

    def _regression_loss(
        self, noised: Tensor, timesteps: Tensor, targets: Tensor, log_probs: Tensor, weights: Tensor, embeds: Any
    ) -> tuple[Tensor]:
        """The loss of reward-weighted regression (Black et al. 2023, section 4.1); arguments of `noised_pairs`."""
        schedule, conditions = schedule_of(self.sd_pipeline, self.config, embeds, len(noised))
        prediction = schedule.ask(self.model, noised, schedule.steps.index_of(timesteps), conditions)
        return (denoising_loss(prediction, targets, weights).mean(),)

    def _log(self, epoch: int, samples: Samples, advantages: Tensor, parts: list[Stats]) -> None:
        """Merges an epoch's statistics over processes, checks their health, and sends them on. Collective."""
        config = self.config
        of_samples = samples.stats(advantages, config.clip_range(samples.trajectories.dimensions))
        of_run = {"epoch": float(epoch), "queries": float(self.queries)}
        gathered = gather_stats(merge_stats([of_run | of_samples, *parts]))
        kl = gathered.get("objective/kl")
        if kl is None and config.adap_kl_ctrl:
            raise TypeError(
                "adap_kl_ctrl=True needs the KL that DDPOTrainer.calculate_loss measures, and a replaced one returned "
                "losses without its statistics. Set adap_kl_ctrl=False, or return what super().calculate_loss returned."
            )
        kl_coef = None if kl is None else self.kl_ctl.value
        if kl is not None:
            gathered["objective/kl_coef"] = kl_coef
        std, clipped = gathered["reward_std"], gathered.get("clipfrac")
        scale = config.rwr_beta * std if config.estimator == "rwr" else None  # other estimators divide by the deviation
        vitals = Vitals(kl=kl, kl_coef=kl_coef, clip_fraction=clipped, reward_std=std, scale=scale)
        self._report(epoch, gathered, vitals)
        if kl is not None:
            self.kl_ctl.update(kl, len(samples.rewards) * self.accelerator.num_processes)
        images, prompts, _, rewards, _ = samples.batches[-1]
        self.run.tracker.images("pictures", *captioned(images, prompts, rewards), self.global_step)

    # ------------------------------------------------- what scripts of 2024 read

    def create_model_card(
        self, path: str, model_name: str | None = "TRL DDPO Model", *, repo_id: str | None = None
    ) -> None:
        """Writes a model card, README.md; the default name stands for that of the folder, or of `repo_id`."""
        super().create_model_card(path, model_name, repo_id=repo_id)

    @property
    def stat_tracker(self) -> PerPromptStatTracker | None:
        """The statistics per prompt, if there are any."""
        return self.prompt_stats

    @property
    def num_train_timesteps(self) -> int:
        """Trained steps per sample, where as many have noise."""
        return self.config.trained_steps
