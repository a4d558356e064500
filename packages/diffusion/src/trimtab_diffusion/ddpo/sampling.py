"""An epoch's samples: prompts, images and rewards."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trimtab_common.health import check_rows
from trimtab_common.scores import checked_scores
from trimtab_common.seeding import private_rngs
from trimtab_common.stats import Deviation, Mean
from trimtab_common.time_limit import reward_limit
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.recording import Trajectories

from .config import DDPOConfig

RewardFunction = Callable[[Tensor, tuple[str, ...], tuple[Any, ...]], Any]


class PromptFunction(Protocol):
    """Draws a prompt, with metadata for the reward function."""

    def __call__(self) -> tuple[str, Any]:
        """A text, and what the reward function is to know of it."""


@dataclass
class Samples:
    """What one process sampled in an epoch: B images or videos.

    Args:
        trajectories: how they came about.
        prompts: B texts.
        rewards: [B], float32, on the CPU.
        others: rewards that are not trained on, [B] each, by name.
        batches: as the documented hook gets them, each [images, prompts, metadata, rewards, reward metadata].
    """

    trajectories: Trajectories
    prompts: list[str]
    rewards: Tensor
    others: dict[str, Tensor]
    batches: list[list[Any]]

    def stats(self) -> dict[str, Any]:
        """Statistics of the rewards, and the memory of the trajectories."""
        return {
            "reward_mean": Mean.of(self.rewards),
            "reward_std": Deviation.of(self.rewards),
            "rewards": self.rewards,
            "memory/trajectories_mb": self.trajectories.nbytes / 1e6,
            **{f"other/{name}": Mean.of(values) for name, values in self.others.items()},
        }

    def captioned(self, limit: int) -> tuple[list[Tensor], list[str]]:
        """At most `limit` images of the last batch, each with its prompt and its reward; a video's frames in a row."""
        images, prompts, _, rewards, _ = self.batches[-1]
        if images.dim() == 5:
            images = images.permute(0, 2, 3, 1, 4).flatten(3)  # [B, 3, H, F W]
        captions = [f"{prompt} | {reward:.3f}" for prompt, reward in zip(prompts, rewards.tolist(), strict=True)]
        return list(images.clamp(0, 1))[:limit], captions[:limit]


class Scored(NamedTuple):
    """A batch's rewards [b], the reward function's metadata, and rewards [b] that are not trained on, by name."""

    rewards: Tensor
    metadata: Any
    others: dict[str, Tensor]


def draw_prompts(prompt_function: PromptFunction, count: int, *, group_size: int, seed: int) -> list[tuple[str, Any]]:
    """Draws prompts with their metadata, and repeats each `group_size` times in a row.

    Python's, NumPy's and torch's generators are seeded around the function. Prompts are plain `str`, as checkpoints
    need them: `np.random.choice` returns a subclass.

    Args:
        prompt_function: draws one prompt.
        count: prompts to return, repetitions included.
        group_size: divides `count`.
        seed: in [0, 2**63).

    Raises:
        TypeError: the function returns something else than a text and its metadata.
    """
    with private_rngs(seed):
        drawn = [prompt_function() for _ in range(count // group_size)]
    for prompt in drawn:
        if not (isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[0], str)):
            raise TypeError(f"prompt_function returned {prompt!r}; a tuple of a text and its metadata is needed.")
    return [(str(prompt), metadata) for prompt, metadata in drawn for _ in range(group_size)]


class Rewards:
    """Calls reward functions on each batch of images, and checks what they return.

    Args:
        function: the reward that is trained on.
        others: rewards that are logged only, by name.
        workers: threads that compute rewards while the next batch is sampled; None computes them at once.
        timeout: seconds that a batch may take where several processes train; see `reward_limit`.
    """

    def __init__(
        self,
        function: RewardFunction,
        others: Mapping[str, RewardFunction],
        *,
        workers: int | None,
        timeout: float | None,
    ) -> None:
        self.function, self.others, self.timeout = function, others, timeout
        self._pool = None if workers is None else ThreadPoolExecutor(workers)

    def start(self, images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Callable[[], Scored]:
        """Begins to score a batch; the result is a function that waits for its rewards."""

        def score() -> Scored:
            rewards, facts = checked_rewards(self.function(images, prompts, metadata), prompts, "reward_function")
            return Scored(rewards, facts, self._others(images, prompts, metadata))

        if self._pool is None:
            with reward_limit(self.timeout):
                scored = score()
            return lambda: scored
        future: Future[Scored] = self._pool.submit(score)
        return reward_limit(self.timeout)(future.result)

    def all_by(self, compute_rewards: Callable[..., Any], batches: Sequence[list[Any]]) -> list[Scored]:
        """Scores all batches by a method that replaces `DDPOTrainer.compute_rewards`."""
        with reward_limit(self.timeout):
            rewards, metadata = compute_rewards(batches, is_async=self._pool is not None)
        return [
            Scored(checked_rewards(each, batch[1], "compute_rewards")[0], facts, self._others(*batch))
            for batch, each, facts in zip(batches, rewards, metadata, strict=True)
        ]

    def _others(self, images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> dict[str, Tensor]:
        named = self.others.items()
        return {
            name: checked_rewards(function(images, prompts, metadata), prompts, name)[0] for name, function in named
        }


def sample_and_score(
    pipeline: DDPOStableDiffusionPipeline,
    drawn: Sequence[tuple[str, Any]],
    rewards: Rewards,
    *,
    config: DDPOConfig,
    generator: torch.Generator,
    compute_rewards: Callable[..., Any] | None = None,
) -> Samples:
    """Samples an image or a video for each prompt, records how, and scores it.

    Args:
        pipeline: draws `config.sample_batch_size` images at a time.
        drawn: prompts and their metadata.
        rewards: scores each batch.
        config: says how images are sampled.
        generator: of the noise, on the pipeline's device.
        compute_rewards: scores all batches once they are sampled, in the place of the reward function.
    """
    trajectories, pending, batches = [], [], []
    for start in range(0, len(drawn), config.sample_batch_size):
        prompts, metadata = zip(*drawn[start : start + config.sample_batch_size], strict=True)
        guidance: dict[str, Any] = {pipeline.guidance_argument: config.sample_guidance_scale}
        if config.is_guided:
            guidance["negative_prompt"] = [config.negative_prompts or ""] * len(prompts)
        output = pipeline(
            prompt=list(prompts),
            eta=config.sample_eta,
            generator=generator,
            output_type="pt",
            num_inference_steps=config.sample_num_steps,
            storage_dtype=getattr(torch, config.trajectory_dtype) if config.trajectory_dtype else None,
            storage_device="cpu" if config.trajectory_on_cpu else None,
            **guidance,
        )
        images = output.images.float()
        check_rows({"the pixels": images}, what="image")
        trajectories.append(output.trajectories)
        batches.append([images, prompts, metadata])
        if compute_rewards is None:
            pending.append(rewards.start(*batches[-1]))
    scored = [wait() for wait in pending] if compute_rewards is None else rewards.all_by(compute_rewards, batches)
    return Samples(
        Trajectories.joined(trajectories),
        [prompt for prompt, _ in drawn],
        torch.cat([each.rewards for each in scored]),
        {name: torch.cat([each.others[name] for each in scored]) for name in rewards.others},
        [[*batch, each.rewards, each.metadata] for batch, each in zip(batches, scored, strict=True)],
    )


def checked_rewards(result: Any, prompts: Sequence[str], name: str) -> tuple[Tensor, Any]:
    """Checks what a reward function returned for a batch.

    Args:
        result: rewards [b] or [b, 1], or a pair of rewards and metadata.
        prompts: the b prompts.
        name: of the function, for errors.

    Returns:
        Rewards [b] as float32 on the CPU, and their metadata; {} where there is none.

    Raises:
        TypeError, ValueError: there is not one finite number per image.
    """
    rewards, metadata = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    items = [f"image {i} of a batch, prompt {prompt!r}" for i, prompt in enumerate(prompts)]
    return torch.tensor(checked_scores(rewards, items, source=f"What {name} returned")), metadata
