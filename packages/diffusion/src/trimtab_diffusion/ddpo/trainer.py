"""DDPO: policy gradients for diffusion pipelines (Black et al. 2023, arXiv:2305.13301)."""

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from trimtab_common.advantages import group_whitened
from trimtab_common.config import to_flat_dict
from trimtab_common.health import TrainingDivergedError, Vitals
from trimtab_common.hub import write_model_card
from trimtab_common.run import Stateful
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import Deviation, Mean, gather_over_ranks, gather_stats, merge_stats
from trimtab_common.surrogate import clipped_surrogate, surrogate_stats
from trimtab_common.tracking import Tracker, progress
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.prompt_stats import PerPromptStatTracker
from trimtab_diffusion.recording import Trajectories, predict
from trimtab_diffusion.rewards import jpeg_incompressibility
from trimtab_diffusion.steps import gaussian_kl, gaussian_logprob

from .config import DDPOConfig
from .loss import denoising_loss, rwr_weights, score_function_loss, sparse_weights
from .sampling import Pictures, PromptFunction, RewardFunction, Rewards, draw_prompts
from .selfcheck import check_replay
from .setup import HookTracker, accelerator_of, kl_controller, optimizer_of, place, run_of, warmup

Pairs = tuple[Tensor, Tensor]
SAMPLE, TRAIN = 0, 1  # what random numbers are for
USAGE = {
    True: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}")
pipeline.load_lora_weights("{{repo_id}}")""",
    False: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{{repo_id}}")""",
}


class DDPOTrainer:
    """Draw pictures, score them, and make the steps that led to the better ones more probable.

    config: a DDPOConfig. reward_function: `(images [B, 3, H, W] within [0, 1], prompts, metadata) -> rewards [B]`, or
    the pair of them and metadata for the hook. prompt_function: `() -> (prompt, metadata)`; Python's, NumPy's and
    torch's generators are seeded around it, anew for each process and epoch. If it has `state_dict` and
    `load_state_dict`, checkpoints keep its state. sd_pipeline: a DDPOStableDiffusionPipeline, or a diffusers pipeline,
    all of whose denoiser is then trained.
    image_samples_hook: called after each epoch's drawing with its batches [images, prompts, metadata, rewards, reward
    metadata], the global step, and a tracker with `log_images` and `log`. other_rewards: rewards by name that are
    logged and not trained on, against over-optimisation; by default the pictures' size in kB as JPEG.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
        image_samples_hook: Callable[[Any, Any, Any], Any] | None = None,
        *,
        other_rewards: Mapping[str, RewardFunction] | None = None,
    ):
        self.config = config = replace(config)
        self.prompt_function, self.image_samples_callback = prompt_function, image_samples_hook
        if not isinstance(sd_pipeline, DDPOStableDiffusionPipeline):
            sd_pipeline = DDPOStableDiffusionPipeline(sd_pipeline)
        self.sd_pipeline = sd_pipeline
        others = {"jpeg_kb": jpeg_incompressibility} if other_rewards is None else other_rewards
        self.rewards = Rewards(
            reward_function, others, workers=config.max_workers if config.async_reward_computation else None
        )
        self.accelerator = accelerator_of(config)
        place(sd_pipeline, self.accelerator)
        if config.train_gradient_checkpointing:
            sd_pipeline.denoiser.enable_gradient_checkpointing()
        sd_pipeline.set_progress_bar_config(disable=True)
        self.reference = None
        if config.init_kl_coef and not sd_pipeline.use_lora:
            frozen = copy.deepcopy(sd_pipeline.denoiser).requires_grad_(False)
            self.reference = self.accelerator.prepare_model(frozen, evaluation_mode=True)  # in the policy's precision
        optimizer = optimizer_of(config, sd_pipeline.denoiser)
        self.model, self.optimizer = self.accelerator.prepare(sd_pipeline.denoiser, optimizer)
        self.model.eval()  # dropout would make the policy that trains another than the one that drew
        self.lr_scheduler = warmup(optimizer, config.train_warmup_steps)
        self.kl_ctl = kl_controller(config)
        self.prompt_stats = None
        if config.per_prompt_stat_tracking:
            self.prompt_stats = PerPromptStatTracker(
                config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
            )
        self.first_epoch = self.global_step = self.queries = 0
        self._drawn: Trajectories | None = None  # the last, whose schedule and guidance `calculate_loss` replays
        self._is_checked = False
        self._parts: list[dict[str, Mean]] = []  # statistics of losses, until they are logged
        self.run = run_of(config, self.accelerator, self.model)
        self.run.keep(
            self, "optimizer", "lr_scheduler", "kl_ctl", "prompt_stats", "first_epoch", "global_step", "queries"
        )
        self.run.keep(self.accelerator, "scaler")
        if isinstance(prompt_function, Stateful):
            self.run.keep_per_rank("prompt_function", prompt_function)
        if config.resume_from:
            self.run.resume(config.resume_from, self.checkpoint_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints go."""
        return Path(self.config.project_kwargs.get("project_dir") or self.config.logdir) / "checkpoints"

    @property
    def clip_range(self) -> float:
        """What ratios per dimension are clipped to: 1 +- this. In nats it is this times the latents' dimensions."""
        if self.config.train_clip_range_nats is None or self._drawn is None:
            return self.config.train_clip_range
        return self.config.train_clip_range_nats / self._drawn.dimensions

    # ------------------------------------------------------------ the algorithm

    def train(self, epochs: int | None = None) -> list[dict[str, float]]:
        """Run epochs up to number `epochs` (default: the config's), each drawing and learning; logs and saves.

        Returns the numbers that each epoch logged. The tracker stays open for what you log yourself;
        `with trainer.tracker:` around the call closes it.
        """
        if self.first_epoch == 0:
            self.run.record.claim(self.checkpoint_folder)
        history = []
        total = self.config.num_epochs if epochs is None else epochs
        for epoch in progress(range(self.first_epoch, total), "DDPO epochs"):
            self.step(epoch, self.global_step)
            history.append(self.last_stats)
            if (epoch + 1) % self.config.save_freq == 0:
                self.save_checkpoint()
        return history

    def step(self, epoch: int, global_step: int) -> int:
        """Draw an epoch's pictures, score them, learn from them and log; returns the number of updates made so far."""
        started = time.perf_counter()
        self.global_step = global_step
        pictures = self.draw(epoch)
        advantages = self.advantages(pictures.prompts, pictures.rewards)
        drawn = time.perf_counter()
        stats: dict[str, Any] = {}
        if not (self._is_checked or self.config.estimator.startswith("rwr")):
            stats["selfcheck/nats"] = self._check_replay(pictures.trajectories)
            self._is_checked = True
        if self.image_samples_callback is not None:
            self.image_samples_callback(pictures.batches, self.global_step, HookTracker(self.tracker))
        for inner_epoch in range(self.config.train_num_inner_epochs):
            generator = self._generator(TRAIN, epoch * self.config.train_num_inner_epochs + inner_epoch)
            order = torch.randperm(len(pictures.rewards), generator=generator)
            for rows in order.split(self.config.samples_per_update):
                self._update(pictures.trajectories, advantages, rows, generator)
        self.first_epoch = epoch + 1
        stats |= {"time/sampling": drawn - started, "time/training": time.perf_counter() - drawn, "epoch": float(epoch)}
        self._log(pictures, advantages, stats)
        return self.global_step

    def draw(self, epoch: int) -> Pictures:
        """An epoch's pictures with their rewards."""
        config, generator = self.config, self._generator(SAMPLE, epoch, self.accelerator.device)
        seed = sampling_seed(config.seed, rank=self.accelerator.process_index, draw=2 * epoch)
        drawn = draw_prompts(self.prompt_function, config.samples_per_epoch, group_size=config.group_size, seed=seed)
        parts, pending, batches = [], [], []
        dtype = getattr(torch, config.trajectory_dtype) if config.trajectory_dtype else None
        guidance = {"negative_prompt": config.negative_prompts or ""} if config.is_guided else {}
        for start in range(0, len(drawn), config.sample_batch_size):
            prompts, metadata = zip(*drawn[start : start + config.sample_batch_size], strict=True)
            made = self.sd_pipeline(
                prompt=list(prompts), eta=config.sample_eta, generator=generator, output_type="pt",
                num_inference_steps=config.sample_num_steps, guidance_scale=config.sample_guidance_scale,
                storage_dtype=dtype, storage_device="cpu" if config.trajectory_on_cpu else None,
                **{name: [text] * len(prompts) for name, text in guidance.items()},
            )  # fmt: skip
            parts.append(made.trajectories)
            images = made.images.float()
            pending.append(self.rewards.start(images, prompts, metadata))
            batches.append([images, prompts, metadata])
        scored = [wait() for wait in pending]
        self.queries += len(drawn) * self.accelerator.num_processes
        self._drawn = Trajectories.joined(parts)
        return Pictures(
            self._drawn, [prompt for prompt, _ in drawn], torch.cat([rewards for rewards, _, _ in scored]),
            {name: torch.cat([others[name] for _, _, others in scored]) for name in self.rewards.others},
            [[*batch, rewards, found] for batch, (rewards, found, _) in zip(batches, scored, strict=True)],
        )  # fmt: skip

    def advantages(self, prompts: list[str], rewards: Tensor) -> Tensor:
        """What each of this process's pictures is better than expected, or its weight for RWR; [B], float32.

        The measure is taken over all processes: the prompt's earlier rewards (section 4.2), the group of pictures of
        one draw of the prompt (GRPO), or the epoch. Deviations are the population's (Black et al. 2023). Collective.
        """
        config, rank = self.config, self.accelerator.process_index
        gathered = gather_over_ranks((prompts, rewards))
        everyone = [prompt for part, _ in gathered for prompt in part]
        whole = torch.cat([part for _, part in gathered]).double()
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(everyone))}
        of_prompt = torch.tensor([numbers[prompt] for prompt in everyone])
        if config.estimator == "rwr":
            found = rwr_weights(whole, of_prompt, beta=config.rwr_beta)
        elif config.estimator == "rwr_sparse":
            found = sparse_weights(whole, top=config.rwr_top)
        elif self.prompt_stats is not None:
            found = self.prompt_stats.update(everyone, whole)
        else:
            groups = torch.arange(len(whole)) // config.group_size if config.group_size > 1 else torch.zeros(len(whole))
            found = group_whitened(whole, groups.long(), correction=0)
        if not config.estimator.startswith("rwr"):
            found = found.clamp(-config.train_adv_clip_max, config.train_adv_clip_max)
        return found.split([len(part) for part, _ in gathered])[rank].float()

    def _update(self, made: Trajectories, advantages: Tensor, rows: Tensor, generator: torch.Generator) -> None:
        """One optimizer step from pictures `rows`: their trained steps, in shuffled micro-batches of pairs."""
        rows, steps = self._pairs(made, rows, generator)
        chunks = torch.randperm(len(rows), generator=generator).split(self.config.train_batch_size)
        for i, chunk in enumerate(chunks):
            pairs = rows[chunk], steps[chunk]
            is_last = i == len(chunks) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                loss = self._loss(made, advantages, pairs, generator)
                if not torch.isfinite(loss):
                    self.optimizer.zero_grad()
                    raise TrainingDivergedError(
                        f"The loss is {float(loss)} at update {self.global_step}. No update was made. Lower "
                        f"train_learning_rate ({self.config.train_learning_rate}), or train in bf16 or float32."
                    )
                self.accelerator.backward(loss * len(chunk) / len(rows))
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.train_max_grad_norm)
        if self.accelerator.scaler is None and not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise TrainingDivergedError(
                f"The gradient has norm {float(norm)} at update {self.global_step}. None was made."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.global_step += 1
        self._parts.append({"grad_norm": Mean(norm, 1.0)})

    def _pairs(self, made: Trajectories, rows: Tensor, generator: torch.Generator) -> Pairs:
        """Every picture of `rows` with its trained steps, drawn for each by itself from those that have noise."""
        random = made.steps.is_random.nonzero().flatten()
        if len(random) < len(made.steps) and self.global_step == 0:
            warnings.warn(
                f"{len(made.steps) - len(random)} of {len(made.steps)} steps have no noise in this schedule, and so no "
                "log-probability: they are left out of training. With timestep_spacing='leading', steps_offset=1 and "
                "set_alpha_to_one=False every step has.",
                stacklevel=4,
            )
        count = min(self.config.trained_steps, len(random))
        if count == 0:
            raise ValueError("No step of this schedule has noise: there is nothing to train. Use another scheduler.")
        chosen = torch.stack([random[torch.randperm(len(random), generator=generator)[:count]] for _ in rows])
        return rows.repeat_interleave(count), chosen.flatten()

    # ------------------------------------------------------------------ losses

    def _loss(self, made: Trajectories, advantages: Tensor, pairs: Pairs, generator: torch.Generator) -> Tensor:
        rows, steps = pairs
        device = self.accelerator.device
        weights = advantages[rows].to(device)
        if self.config.estimator.startswith("rwr"):
            return self._denoising_loss(made, weights, pairs, generator)
        loss, _, _ = self.calculate_loss(
            made.before(rows, steps, device), made.steps.timesteps[steps], made.after(rows, steps, device),
            made.scored(rows, steps, device), weights,
            made.conditions.select(rows, steps, device),
        )  # fmt: skip
        return loss

    def calculate_loss(
        self,
        latents: Tensor,
        timesteps: Tensor,
        next_latents: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        embeds: Tensor | Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """DDPO's loss of B steps of the last drawn schedule, with its approximate KL and the share that was clipped.

        latents, next_latents: [B, ...], before and after; timesteps: [B]; log_probs: [B], per dimension, when drawn;
        advantages: [B]; embeds: of the prompts, [B, ...], or [2B, ...] with those without a prompt first, or all of the
        denoiser's other arguments by name. The loss is a mean over the B.
        """
        if self._drawn is None:
            raise ValueError("calculate_loss replays steps of a schedule, and none was drawn yet: call step first.")
        conditions = embeds if isinstance(embeds, Mapping) else {"encoder_hidden_states": embeds}
        index = self._drawn.steps.index_of(timesteps)
        output = self._predict(self.model, latents, index, conditions)
        mean, std = self._drawn.steps.gaussian(output, latents, index)
        logprobs = gaussian_logprob(next_latents, mean, std)
        log_ratio, clip = logprobs - log_probs, self.clip_range
        if self.config.estimator == "sf":
            loss = score_function_loss(logprobs, advantages).mean()
        else:
            loss = clipped_surrogate(log_ratio, advantages, clip_low=clip, clip_high=clip).mean()
        everything = torch.ones_like(log_ratio)
        stats = surrogate_stats(log_ratio, advantages, everything, clip_low=clip, clip_high=clip)
        parts = {
            "loss": Mean.of(loss), "approx_kl": stats["approxkl"], "clipfrac": stats["clipfrac"],
            "ratio": stats["ratio"], "policy/nats": Mean.of(log_ratio.abs() * self._drawn.dimensions),
        }  # fmt: skip
        if self.config.init_kl_coef:
            ref_mean, _ = self._drawn.steps.gaussian(self._reference(latents, index, conditions), latents, index)
            kl = gaussian_kl(mean, ref_mean, std)
            loss = loss + self.kl_ctl.value * kl.mean()
            steps = int(self._drawn.steps.is_random.sum())
            parts["objective/kl"] = Mean.of(kl * self._drawn.dimensions * steps)
        self._parts.append(parts)
        # Tensors on the device: a number would make every micro-batch wait for it.
        approx_kl, clipped = (
            torch.as_tensor(stats[name].total / stats[name].weight) for name in ("approxkl", "clipfrac")
        )
        return loss, approx_kl, clipped

    def _denoising_loss(self, made: Trajectories, weights: Tensor, pairs: Pairs, generator: torch.Generator) -> Tensor:
        """Reward-weighted regression on the pictures that were drawn (section 4.1)."""
        rows, steps = pairs
        if made.conditions.stepwise:
            raise ValueError(
                "This pipeline's conditions depend on the latents of each step, which reward-weighted regression makes "
                "anew. Use estimator='is'."
            )
        device = self.accelerator.device
        x0 = made.after(rows, torch.full_like(rows, len(made.steps) - 1), device).float()
        noise = torch.randn(x0.shape, generator=generator).to(device)
        x, target = made.steps.noised(x0, noise, steps)
        output = self._predict(self.model, x.to(made.first.dtype), steps, made.conditions.select(rows, steps, device))
        loss = denoising_loss(output, target, weights).mean()
        self._parts.append({"loss": Mean.of(loss)})
        return loss

    def _predict(self, model: Any, latents: Tensor, index: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """The denoiser's output at steps `index` [B], guided as when the last pictures were drawn."""
        drawn = self._drawn
        assert drawn is not None
        times = drawn.times[index].to(latents.device)
        return predict(model, latents, times, conditions, guidance=drawn.guidance, name=drawn.name)

    @torch.no_grad()
    def _reference(self, latents: Tensor, index: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        if self.reference is not None:
            return self._predict(self.reference, latents, index, conditions)
        with self.sd_pipeline.reference():
            return self._predict(self.sd_pipeline.denoiser, latents, index, conditions)

    def _check_replay(self, made: Trajectories) -> float:
        device = self.accelerator.device

        def score(rows: Tensor, steps: Tensor) -> Tensor:
            before = made.before(rows, steps, device)
            output = made.predict(self.model, before, rows, steps)
            return made.steps.logprob(output, before, made.after(rows, steps, device), steps)

        config = self.config
        return check_replay(
            made, score, pictures=config.sample_batch_size, batch_size=config.train_batch_size, clip=self.clip_range,
            exact=self._is_exact and made.first.dtype in (torch.float32, torch.float64),
        )  # fmt: skip

    @property
    def _is_exact(self) -> bool:
        """Whether the denoiser computes in float32, or wider."""
        is_tf32 = self.config.allow_tf32 and self.accelerator.device.type == "cuda"
        return self.accelerator.mixed_precision == "no" and not is_tf32

    def _generator(self, use: int, number: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers that depend on the seed, the process, what they are for and which time: never on the past."""
        seed = sampling_seed(self.config.seed, rank=self.accelerator.process_index, draw=2 * number + use)
        return torch.Generator(device).manual_seed(seed)

    # -------------------------------------------------------------- statistics

    def _log(self, pictures: Pictures, advantages: Tensor, stats: dict[str, Any]) -> None:
        """Merge the epoch's statistics over processes, check their health, and send them on. Collective."""
        own = {
            **merge_stats(self._parts), **stats, "reward_mean": Mean.of(pictures.rewards),
            "reward_std": Deviation.of(pictures.rewards), "rewards": pictures.rewards,
            "advantages/zero": Mean.of((advantages == 0).float()), "queries": float(self.queries),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]), "clip_range": self.clip_range,
            "clip_range_nats": self.clip_range * pictures.trajectories.dimensions,
            "memory/trajectories_mb": pictures.trajectories.nbytes / 1e6,
            **{f"other/{name}": Mean.of(values) for name, values in pictures.others.items()},
        }  # fmt: skip
        self._parts.clear()
        gathered = gather_stats(own)
        if "objective/kl" in gathered:
            gathered["objective/kl_coef"] = self.kl_ctl.value
            self.kl_ctl.update(gathered["objective/kl"], len(pictures.rewards) * self.accelerator.num_processes)
        self.last_stats: dict[str, float] = {
            name: value for name, value in gathered.items() if isinstance(value, float)
        }
        vitals = Vitals(
            kl=self.last_stats.get("objective/kl"),
            clip_fraction=self.last_stats.get("clipfrac"),
            reward_std=self.last_stats["reward_std"],
        )
        health = self.run.check_health(vitals, self.last_stats, when=f"epoch {self.first_epoch - 1}")
        self.tracker.log({**gathered, **health}, self.global_step)
        images, prompts, _, rewards, _ = pictures.batches[-1]
        captions = [f"{prompt} | {reward:.3f}" for prompt, reward in zip(prompts, rewards.tolist(), strict=True)]
        self.tracker.images("pictures", list(images.clamp(0, 1))[:16], captions[:16], self.global_step)

    @property
    def tracker(self) -> Tracker:
        """Where statistics go; started at its first use, so that a resumed run goes on under its id."""
        return self.run.tracker

    @property
    def run_id(self) -> str | None:
        """The id of the tracker's run; None until it starts."""
        return self.run.tracker_id

    # ------------------------------------------------------------------ saving

    def save_checkpoint(self) -> Path:
        """Everything that the next epoch depends on, atomically, as checkpoint-<epochs> in `checkpoint_folder`."""
        keep = self.config.project_kwargs.get("total_limit") or self.config.num_checkpoint_limit
        return self.run.save(self.checkpoint_folder, self.first_epoch, keep=keep)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """The adapters, for `load_lora_weights`, or the whole pipeline, for `from_pretrained`; with a model card."""
        if self.accelerator.is_main_process:
            self.sd_pipeline.save_pretrained(save_directory)
            self.create_model_card(str(save_directory))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload what `save_pretrained` writes; arguments as of huggingface_hub.upload_folder, and `private`."""

        def write(folder: str) -> None:
            self.save_pretrained(folder)
            self.create_model_card(folder, repo_id=repo_id)

        return self.run.push(write, repo_id, **kwargs)

    def create_model_card(
        self, path: str, model_name: str | None = "TRL DDPO Model", *, repo_id: str | None = None
    ) -> None:
        """Write a model card (README.md) into the folder `path`; repo_id: what it is loaded by, if not its name."""
        pipeline = self.sd_pipeline.sd_pipeline
        base = getattr(pipeline.config, "_name_or_path", None) or None
        write_model_card(
            path,
            name=model_name or "Model",
            trainer=type(self).__name__,
            paper="Black et al. 2023, arXiv:2305.13301",
            usage=USAGE[self.sd_pipeline.use_lora].format(base=base or "<the base pipeline>"),
            library="diffusers",
            base_model=base,
            settings=to_flat_dict(self.config),
            repo_id=repo_id,
            tags=["text-to-image", "lora"] if self.sd_pipeline.use_lora else ["text-to-image"],
        )
