"""An epoch's samples: prompts, images and rewards."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trimtab_common.health import check_rows
from trimtab_common.stats import Deviation, Mean, Stats
from trimtab_common.time_limit import reward_limit
from trimtab_diffusion.compat.trees import tree_leaves
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.steps import ScheduleError, Steps
from trimtab_diffusion.training.sampling import RewardFunction, checked_prompt, guidance_of, rewards_of
from trimtab_diffusion.trajectories import TEXT, Schedule, Trajectories

from .config import DDPOConfig


@dataclass
class Samples:
    """What one process sampled in an epoch: B images or videos.

    Args:
        trajectories: how they came about.
        prompts: B texts.
        rewards: [B], float32, on the CPU.
        others: statistics of rewards that are not trained on.
        batches: as the documented hook gets them, each [images, prompts, metadata, rewards, reward metadata].
    """

    trajectories: Trajectories
    prompts: list[str]
    rewards: Tensor
    others: Stats
    batches: list[list[Any]]

    def stats(self, advantages: Tensor, clip_range: float) -> Stats:
        """Statistics of rewards and advantages, of the trajectories' memory, and of the ratio's clip range."""
        path = self.trajectories
        memory = sum(leaf.nbytes for leaf in tree_leaves(vars(path)) if isinstance(leaf, Tensor))
        return {
            "reward_mean": Mean.of(self.rewards),
            "reward_std": Deviation.of(self.rewards),
            "rewards": self.rewards,
            "advantages/zero": Mean.of((advantages == 0).float()),
            "memory/trajectories_mb": memory / 1e6,
            "clip_range": clip_range,
            "clip_range_nats": clip_range * path.dimensions,
            **self.others,
        }


@dataclass
class Batches(Sequence[list[Any]]):
    """An epoch's batches [images, prompts, metadata]; each is sampled when it is first asked for.

    So the rewards of a batch may be computed while the next one is sampled.

    Args:
        pipeline: draws `config.sample_batch_size` images or videos at a time.
        drawn: prompts and their metadata.
        generator: draws the noise, on the pipeline's device.
        config: says how images are sampled.
        window: the steps that have noise; None: all.

    Attributes:
        trajectories: one for each batch that was sampled.
    """

    pipeline: DDPOStableDiffusionPipeline
    drawn: Sequence[tuple[str, Any]]
    generator: torch.Generator
    config: DDPOConfig
    window: tuple[int, int] | None = None
    trajectories: list[Trajectories] = field(default_factory=list, init=False)
    _sampled: list[list[Any]] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return -(-len(self.drawn) // self.config.sample_batch_size)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        wanted = range(len(self))[index]
        while len(self._sampled) <= wanted:
            self._sample(len(self._sampled) * self.config.sample_batch_size)
        return self._sampled[wanted]

    def _sample(self, start: int) -> None:
        config, pipeline = self.config, self.pipeline
        prompts, metadata = zip(*self.drawn[start : start + config.sample_batch_size], strict=True)
        output = pipeline(
            prompt=list(prompts),
            eta=config.sample_eta,
            window=self.window,
            generator=self.generator,
            output_type="pt",
            num_inference_steps=config.sample_num_steps,
            storage_dtype=getattr(torch, config.trajectory_dtype) if config.trajectory_dtype else None,
            storage_device="cpu" if config.trajectory_on_cpu else None,
            **guidance_of(pipeline, config, len(prompts)),
        )
        images = output.images.float()
        check_rows({"the pixels": images}, what="image")
        self.trajectories.append(output.trajectories)
        self._sampled.append([images, prompts, metadata])


def checked_prompts(prompts: Sequence[tuple[str, Any]], config: DDPOConfig, processes: int) -> list[tuple[str, Any]]:
    """The prompts of evaluations with their metadata.

    Raises:
        TypeError, ValueError: one is no such pair, there is none although `config` has settings of evaluations, or they
            do not divide into equal shares for the processes.
    """
    asked = [f"{name}={vars(config)[name]}" for name in ("eval_freq", "eval_num_steps") if vars(config)[name]]
    if asked and not prompts:
        raise ValueError(
            f"{' and '.join(asked)} came without prompts of evaluations. Pass eval_prompts=[(prompt, metadata), ...] "
            "to the trainer, --eval_dataset to trimtab ddpo, or leave this out."
        )
    if len(prompts) % processes:
        raise ValueError(
            f"{len(prompts)} eval_prompts came for {processes} processes, which call the denoiser equally often. Pass "
            f"a multiple of {processes}."
        )
    return [checked_prompt(prompt, "eval_prompts holds") for prompt in prompts]


def without_noise(
    pipeline: DDPOStableDiffusionPipeline,
    drawn: Sequence[tuple[str, Any]],
    generators: Sequence[torch.Generator],
    config: DDPOConfig,
) -> Iterator[list[Any]]:
    """Yields batches [images, prompts, metadata] that the pipeline's own steps sample, `config.eval_num_steps` of them.

    Args:
        pipeline: samples `config.sample_batch_size` images or videos at a time.
        drawn: prompts and their metadata.
        generators: one per prompt, draws the noise from which its image starts.
        config: says how images are sampled.
    """
    for start in range(0, len(drawn), config.sample_batch_size):
        part = slice(start, start + config.sample_batch_size)
        prompts, metadata = zip(*drawn[part], strict=True)
        arguments = pipeline.call_kwargs | guidance_of(pipeline, config, len(prompts))
        output = pipeline.sd_pipeline(
            prompt=list(prompts),
            generator=list(generators[part]),
            output_type="pt",
            num_inference_steps=config.eval_num_steps or config.sample_num_steps,
            **arguments,
        )
        images = output[0].float()  # .images, or .frames
        check_rows({"the pixels": images}, what="image")
        yield [images, prompts, metadata]


def score(
    function: RewardFunction,
    batches: Iterable[Sequence[Any]],
    name: str,
    *,
    timeout: float | None = None,
    workers: int | None = None,
) -> tuple[list[Tensor], list[Any]]:
    """Rewards [b] of each batch [images, prompts, metadata, ...], and the reward function's metadata.

    Args:
        function: the reward function, which is called without gradients.
        batches: this process's batches.
        name: the function's name, for errors.
        timeout: seconds that a batch may take where several processes train; see `reward_limit`.
        workers: threads that score batches while others are sampled; None scores one after the other.
    """
    function = torch.no_grad()(function)  # in whichever thread
    if workers is None:
        results = [rewards_of(reward_limit(timeout)(function)(*batch[:3]), batch[1], name) for batch in batches]
    else:
        with ThreadPoolExecutor(workers) as pool:
            pending = [(batch[1], pool.submit(function, *batch[:3])) for batch in batches]
            results = [rewards_of(reward_limit(timeout)(each.result)(), prompts, name) for prompts, each in pending]
    rewards, metadata = zip(*results, strict=True)
    return list(rewards), list(metadata)


def steps_of(pipeline: DDPOStableDiffusionPipeline, config: DDPOConfig) -> Steps:
    """The steps of the pipeline's scheduler, in the config's number and with its noise."""
    scheduler = copy.deepcopy(pipeline.scheduler)
    scheduler.set_timesteps(config.sample_num_steps)
    return Steps.of(scheduler, config.sample_eta)


def schedule_of(
    pipeline: DDPOStableDiffusionPipeline, config: DDPOConfig, embeds: Tensor | Mapping[str, Any], count: int
) -> tuple[Schedule, Mapping[str, Any]]:
    """The schedule of the pipeline's last call (before the first call, the config's), and `embeds` by name.

    There is guidance where the prompts' embeddings have twice `count` rows.

    Raises:
        ScheduleError: before the first call, the scheduler's steps depend on the size of the images.
    """
    conditions = embeds if isinstance(embeds, Mapping) else {TEXT: embeds}
    schedule = pipeline.schedule
    if schedule is None:
        if pipeline.scheduler.config.get("use_dynamic_shifting"):
            raise ScheduleError(
                "calculate_loss came before the pipeline's first call, and the scheduler shifts the steps by the size "
                "of the images (use_dynamic_shifting), which is unknown until then. Call the pipeline, draw or step "
                "before."
            )
        steps = steps_of(pipeline, config)
        _, name, *_ = inspect.signature(type(pipeline.denoiser).forward).parameters
        schedule = Schedule(steps, steps.timesteps, name)
    if (states := conditions.get(TEXT)) is None:
        return schedule, conditions
    is_guided = len(states) == 2 * count
    scale = schedule.guidance or config.sample_guidance_scale
    return replace(schedule, guidance=scale if is_guided else None), conditions
