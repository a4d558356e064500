"""Batches of images for reward functions, and rewards made from other rewards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from trimtab_common.images import Picture, to_pil

Images: TypeAlias = Tensor | Sequence[Picture]
"""A batch of images: see the package."""

Metadata: TypeAlias = Sequence[Any]
"""What the prompt function returned with each prompt."""

Reward: TypeAlias = Callable[[Images, Sequence[str], Metadata], Tensor]
"""See the package."""


def chunks(images: Images, size: int) -> Iterator[list[Image.Image]]:
    """Yields the images, `size` at a time.

    Raises:
        ValueError: a tensor is not [B, 3, H, W].
    """
    if isinstance(images, Tensor) and images.dim() != 4:
        raise ValueError(f"images of shape {tuple(images.shape)} came in; [B, 3, H, W] is needed.")
    for start in range(0, len(images), size):
        yield [to_pil(image) for image in images[start : start + size]]


def check_count(name: str, values: Sequence[object], images: Images) -> None:
    """Raises a ValueError unless there is one value for each image."""
    if len(values) != len(images):
        raise ValueError(f"{len(values)} {name} came with {len(images)} images. Pass one for each image.")


def mean_over_frames(reward: Reward) -> Reward:
    """Returns a reward of videos [B, F, 3, H, W]: the mean of a reward of images over the frames.

    Args:
        reward: `(images [n, 3, H, W], prompts, metadata) -> rewards [n]`. It gets images as they are.
    """

    def score(images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        if not (isinstance(images, Tensor) and images.dim() == 5):
            return reward(images, prompts, metadata)
        count, frames = images.shape[:2]
        texts = [prompt for prompt in prompts for _ in range(frames)]
        facts = [fact for fact in metadata for _ in range(frames)]
        return torch.as_tensor(reward(images.flatten(0, 1), texts, facts)).reshape(count, frames).float().mean(1)

    return score


class WeightedSum:
    """A weighted sum of rewards. Choose weights that make up for their scales.

    Args:
        terms: pairs of a reward and its weight, which may be negative.

    Raises:
        ValueError: there are no terms.
    """

    def __init__(self, *terms: tuple[Reward, float]) -> None:
        if not terms:
            raise ValueError("WeightedSum() has nothing to add. Pass pairs of a reward and its weight.")
        self.terms = terms

    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns the sums [B].

        Raises:
            ValueError: a reward returns another number of values than there are images.
        """
        total = torch.zeros(len(images))
        for reward, weight in self.terms:
            values = torch.as_tensor(reward(images, prompts, metadata)).float().cpu()
            if values.shape != total.shape:
                raise ValueError(f"{reward!r} returns {tuple(values.shape)} for {len(images)} images. Return [B].")
            total += weight * values
        return total
