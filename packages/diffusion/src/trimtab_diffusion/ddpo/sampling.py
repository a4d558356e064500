"""An epoch's pictures: prompts, drawing, rewards."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trimtab_common.seeding import private_rngs
from trimtab_diffusion.recording import Trajectories

RewardFunction = Callable[[Tensor, tuple[str, ...], tuple[Any, ...]], Any]


class PromptFunction(Protocol):
    """Draws a prompt, with metadata for the reward function."""

    def __call__(self) -> tuple[str, Any]:
        """A text, and what the reward function is to know of it."""


@dataclass
class Pictures:
    """What an epoch drew on this process: B pictures.

    batches: as the documented hook gets them, each [images, prompts, metadata, rewards, reward metadata].
    """

    trajectories: Trajectories
    prompts: list[str]
    rewards: Tensor  # [B], float32, on the CPU
    others: dict[str, Tensor]  # of rewards that are not trained on, [B]
    batches: list[list[Any]]


def draw_prompts(prompt_function: PromptFunction, count: int, *, group_size: int, seed: int) -> list[tuple[str, Any]]:
    """`count` prompts with their metadata, each `group_size` times in a row; whatever it draws with is seeded.

    Prompts are plain `str` from here on, as checkpoints need them: `np.random.choice` returns a subclass.
    """
    with private_rngs(seed):
        drawn = [prompt_function() for _ in range(count // group_size)]
    for prompt in drawn:
        if not (isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[0], str)):
            raise TypeError(f"prompt_function returned {prompt!r}; a tuple of a text and its metadata is needed.")
    return [(str(prompt), metadata) for prompt, metadata in drawn for _ in range(group_size)]


class Rewards:
    """Calls reward functions on each batch of pictures, in this thread or in others, and checks what they return."""

    def __init__(self, function: RewardFunction, others: Mapping[str, RewardFunction], *, workers: int | None):
        self.function, self.others = function, others
        self._pool = None if workers is None else ThreadPoolExecutor(workers)

    def start(self, images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Callable[[], list[Any]]:
        """Begin to score a batch; the result is a function that waits for it.

        It returns rewards [b], their metadata, and the rewards of the others by name.
        """

        def score() -> list[Any]:
            rewards, found = checked_rewards(self.function(images, prompts, metadata), prompts, "reward_function")
            others = {name: checked_rewards(function(images, prompts, metadata), prompts, name)[0]
                      for name, function in self.others.items()}  # fmt: skip
            return [rewards, found, others]

        if self._pool is None:
            scored = score()
            return lambda: scored
        future: Future[list[Any]] = self._pool.submit(score)
        return future.result


def checked_rewards(result: Any, prompts: Sequence[str], name: str) -> tuple[Tensor, Any]:
    """Rewards [b] as float32 on the CPU, and their metadata ({} if the function gave none); ValueError if unusable."""
    rewards, metadata = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    values = torch.as_tensor(rewards).detach().float().cpu()
    if values.dim() > 1 and values.shape[1:].numel() == 1:
        values = values.flatten()
    if values.shape != (len(prompts),):
        raise ValueError(
            f"{name} returned rewards of shape {list(values.shape)} for {len(prompts)} pictures. Return one number for "
            "each: a tensor [B], or the pair of it and metadata."
        )
    broken = (~values.isfinite()).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"{name} returned {float(values[broken[0]])} for picture {broken[0]} of a batch, prompt "
            f"{prompts[broken[0]]!r} ({len(broken)} of {len(prompts)} are not finite). Nothing was trained on them."
        )
    return values, metadata
