"""Images of random colours, and how reward models read them."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.diffusion import tiny
from torch import Tensor

SIZE = 12  # what the models see; pictures are larger
PROMPTS = ("a cat", "a dog riding a bike", "a cat", "an ant playing chess", "a bee")
MODEL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pictures(count: int = 5, seed: int = 0) -> Tensor:
    """Returns blotches of random colours, [count, 3, 18, 18]."""
    coarse = torch.rand(count, 3, 3, 3, generator=tiny.generator(seed))
    return coarse.repeat_interleave(6, dim=2).repeat_interleave(6, dim=3)


def by_pil(images: Tensor) -> list[Image.Image]:
    return [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in images]


def pixel_values(images: Tensor, resample: Image.Resampling, mean: Any, std: Any) -> Tensor:
    resized = [np.asarray(picture.resize((SIZE, SIZE), resample), dtype=np.float32) for picture in by_pil(images)]
    values = (np.stack(resized) / 255 - np.array(mean)) / np.array(std)
    return torch.tensor(values, dtype=torch.float32).permute(0, 3, 1, 2)
