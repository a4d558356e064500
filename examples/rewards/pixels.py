"""Images as CLIP and BLIP read them."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the red, green and blue of CLIP's images, within [0, 1]."""


def to_tensor(picture: Image.Image) -> Tensor:
    """Returns an RGB image as a tensor [3, H, W] within [0, 1]."""
    return torch.tensor(np.asarray(picture)).permute(2, 0, 1).float() / 255


def normalize(images: Tensor) -> Tensor:
    """Returns images [B, 3, H, W] within [0, 1], less CLIP's mean and divided by its standard deviation."""
    mean, deviation = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, DEVIATION))
    return (images - mean) / deviation
