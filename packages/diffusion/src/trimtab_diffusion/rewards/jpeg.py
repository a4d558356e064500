"""Rewards for the size of the image file."""

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab_common.images import to_pil

from .batches import Images, Metadata

QUALITY = 95


def jpeg_incompressibility(images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
    """Returns the size of each image as a JPEG of quality 95 (Black et al. 2023, arXiv:2305.13301, section 5.1).

    Args:
        images: see the package; should have one size.
        prompts: not used.
        metadata: not used.

    Returns:
        [B], in kB of 1000 bytes.
    """
    sizes = []
    for image in images.cpu() if isinstance(images, Tensor) else images:  # one copy for all
        to_pil(image).save(file := io.BytesIO(), format="JPEG", quality=QUALITY)
        sizes.append(file.tell() / 1000)
    return torch.tensor(sizes)


def jpeg_compressibility(images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
    """Returns minus `jpeg_incompressibility` [B], in kB."""
    return -jpeg_incompressibility(images, prompts, metadata)
