"""Batches of images, as reward functions take them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
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


def chunks(images: Images, size: int) -> Iterator[tuple[slice, list[Image.Image]]]:
    """Yields the images, `size` at a time, with their place in the batch.

    Raises:
        ValueError: a tensor is not [B, 3, H, W].
    """
    if isinstance(images, Tensor) and images.dim() != 4:
        raise ValueError(f"images of shape {tuple(images.shape)} came in; [B, 3, H, W] is needed.")
    for start in range(0, len(images), size):
        place = slice(start, start + size)
        yield place, [to_pil(image) for image in images[place]]


def to_tensor(picture: Image.Image) -> Tensor:
    """Returns an RGB image as a tensor [3, H, W] within [0, 1]."""
    return torch.tensor(np.asarray(picture)).permute(2, 0, 1).float() / 255


def check_count(name: str, values: Sequence[object], images: Images) -> None:
    """Raises a ValueError unless there is one value for each image."""
    if len(values) != len(images):
        raise ValueError(f"{len(values)} {name} came with {len(images)} images. Pass one for each image.")
