"""Rewards that are computed from other rewards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batches import Images, Metadata, Reward


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
    """The sum of rewards, each times its weight. Rewards differ in scale, so that weights should too.

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
