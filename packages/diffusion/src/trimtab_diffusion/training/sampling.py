"""The functions that a caller gives a trainer: what they are called with, and checks of what they return."""

import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import PartialState
from torch import Tensor

from trimtab_common.overrides import replaced
from trimtab_common.reward_checks import checked_scores
from trimtab_common.seeding import private_rngs
from trimtab_common.stats import gather_over_ranks
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

from .config import SamplingConfig

SAMPLES_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt")
RewardFunction = Callable[[Tensor, tuple[str, ...], tuple[Any, ...]], Any]


class PromptFunction(Protocol):
    """Draws a prompt, with metadata for the reward function."""

    def __call__(self) -> tuple[str, Any]:
        """A text, and its metadata for the reward function."""


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
    drawn: list[tuple[str, Any]] = []
    with private_rngs(seed):
        while len(drawn) < count:
            drawn += [checked_prompt(prompt_function(), "prompt_function returned")] * group_size
    return drawn


def checked_prompt(prompt: Any, source: str) -> tuple[str, Any]:
    """A text and its metadata, as they came after the words `source`; TypeError if it is something else."""
    if not (isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[0], str)):
        raise TypeError(f"{source} {prompt!r}; a tuple of a text and its metadata is needed.")
    return str(prompt[0]), prompt[1]


def guidance_of(pipeline: DDPOStableDiffusionPipeline, config: SamplingConfig, count: int) -> dict[str, Any]:
    """The arguments by which a call of the pipeline on `count` prompts is guided."""
    scale = {pipeline.guidance_argument: config.sample_guidance_scale}
    has_negative = config.is_guided and pipeline.takes_negative_prompt
    return scale | ({"negative_prompt": [config.negative_prompts or ""] * count} if has_negative else {})


def noise_of(config: SamplingConfig) -> dict[str, Any]:
    """The arguments by which the steps of a call are random, or with `sample_eta=0` deterministic."""
    return {"eta": config.sample_eta} if config.sample_eta else {"window": (0, 0)}


def check_call(pipeline: DDPOStableDiffusionPipeline, config: SamplingConfig) -> None:
    """Checks the arguments with which a pipeline will be called.

    Raises:
        ValueError: its `call_kwargs` have arguments of the trainer, or other steps than the config, or it does not take
            or does not read the config's negative prompt.
    """
    passed = {"prompt", "generator", "num_inference_steps", "output_type", "return_dict", "eta", *SAMPLES_PER_PROMPT}
    if clash := sorted(pipeline.call_kwargs.keys() & (passed | guidance_of(pipeline, config, 1).keys())):
        raise ValueError(
            f"call_kwargs has {', '.join(clash)}, which the trainer passes itself. Leave it out; steps, noise and "
            "guidance are the config's sample_num_steps, sample_eta, sample_guidance_scale and negative_prompts, and "
            "each prompt of a call gets one sample."
        )
    counts = {name: count for name, count in vars(config).items() if name.endswith("_num_steps") and count}
    for name in ("sigmas", "timesteps"):
        steps = pipeline.call_kwargs.get(name)
        if steps is not None and (others := [f"{key}={count}" for key, count in counts.items() if count != len(steps)]):
            raise ValueError(
                f"call_kwargs has {len(steps)} {name}, which are the steps of every call, and {' and '.join(others)} "
                f"came. Set {' and '.join(counts)} to {len(steps)}, or leave out the {name}."
            )
    if config.negative_prompts and not pipeline.takes_negative_prompt:
        raise ValueError(
            f"negative_prompts={config.negative_prompts!r} came, and {type(pipeline.sd_pipeline).__name__} takes no "
            "negative prompt. Leave negative_prompts empty."
        )
    scale = inspect.signature(type(pipeline.sd_pipeline).__call__).parameters.get("true_cfg_scale")
    given = guidance_of(pipeline, config, 1) | pipeline.call_kwargs
    if config.negative_prompts and scale is not None and given.get("true_cfg_scale", scale.default) <= 1:
        raise ValueError(
            f"negative_prompts={config.negative_prompts!r} came, and the guidance_scale of "
            f"{type(pipeline.sd_pipeline).__name__} is embedded: it reads no negative prompt. Add classifier-free "
            'guidance, DDPOStableDiffusionPipeline(..., call_kwargs={"true_cfg_scale": 2.0}), or leave '
            "negative_prompts empty."
        )


def check_own_call(pipeline: DDPOStableDiffusionPipeline, uses: str) -> None:
    """TypeError if a subclass replaces the pipeline's `__call__`, and `uses` sample with the diffusers pipeline."""
    if replaced(pipeline, DDPOStableDiffusionPipeline, "__call__"):
        raise TypeError(
            f"{type(pipeline).__name__} replaces __call__, which {uses} do not call: they sample with the diffusers "
            "pipeline itself. Leave them out, or make the change in a subclass of the diffusers pipeline."
        )


class Everyones(NamedTuple):
    """What all processes sampled: N prompts, their rewards [N] in float64, and numbers [N] that tell prompts apart.

    Attributes:
        here: where this process's samples are among them.
    """

    prompts: Sequence[str]
    rewards: Tensor
    numbers: Tensor
    here: slice


def of_all_processes(prompts: Sequence[str], rewards: Tensor) -> Everyones:
    """Gathers the prompts of this process and their rewards [B]. Collective."""
    gathered = gather_over_ranks([*zip(prompts, rewards.tolist(), strict=True)])
    texts, values = zip(*chain(*gathered), strict=True)
    numbers = torch.tensor([*map(texts.index, texts)])
    before = sum(map(len, gathered[: PartialState().process_index]))
    return Everyones(texts, torch.tensor(values, dtype=torch.float64), numbers, slice(before, before + len(prompts)))


def rewards_of(result: Any, prompts: Sequence[str], name: str) -> tuple[Tensor, Any]:
    """Checks a reward function's result for a batch.

    Args:
        result: rewards [b] or [b, 1], or a pair of rewards and metadata.
        prompts: the b prompts.
        name: the function's name, for errors.

    Returns:
        Rewards [b] as float32 on the CPU, and their metadata; {} where there is none.

    Raises:
        RewardError: there is not one finite number per image.
    """
    rewards, metadata = parted(result)
    items = [f"image {i} of a batch, prompt {prompt!r}" for i, prompt in enumerate(prompts)]
    return torch.tensor(checked_scores(rewards, items, source=f"What {name} returned")), metadata


def parted(result: Any) -> tuple[Any, Any]:
    """Parts a reward function's result into rewards and metadata, {} where there is none; two numbers are rewards."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return result, {}
    are_numbers = all(isinstance(part, Number) or getattr(part, "shape", None) == () for part in result)
    return (result, {}) if are_numbers else result


def captioned(
    images: Tensor, prompts: Sequence[str], rewards: Tensor, limit: int = 16
) -> tuple[list[Tensor], list[str]]:
    """At most `limit` images [B, 3, H, W], each with its prompt and its reward; a video's frames in a row."""
    if images.dim() == 5:
        images = images.permute(0, 2, 3, 1, 4).flatten(3)  # [B, 3, H, F W]
    captions = [f"{prompt} | {reward:.3f}" for prompt, reward in zip(prompts, rewards.tolist(), strict=True)]
    return list(images.clamp(0, 1))[:limit], captions[:limit]
