"""Reward functions for images: `(images, prompts, metadata) -> rewards [B]`, float32, on the CPU.

All reward functions take:

    images: [B, 3, H, W], float within [0, 1], or B images, each as `trimtab_common.images.to_pil` takes it. Other
        shapes and values raise a ValueError; `mean_over_frames` takes videos. The reward is that of the 8-bit image,
        as it would be in a file.
    prompts: B texts.
    metadata: B dictionaries.

Models are loaded from a folder or a hub id at the first call. They run in eval mode and without gradients, in `dtype`,
on `batch_size` images at a time. They run on `device`; if that is None, on the device of the images; and if the images
are not a tensor, where the model is.
"""

from .aesthetic import AestheticHead, AestheticScore
from .batches import Images, Metadata, Reward, WeightedSum, mean_over_frames
from .clip import CLIP, ClipAlignment, ClipScore, PickScore
from .jpeg import jpeg_compressibility, jpeg_incompressibility

__all__ = [
    "CLIP",
    "AestheticHead",
    "AestheticScore",
    "ClipAlignment",
    "ClipScore",
    "Images",
    "Metadata",
    "PickScore",
    "Reward",
    "WeightedSum",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "mean_over_frames",
]
