"""The reward of the Human Preference Score, version 2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from trimtab_diffusion.rewards.clip import CLIP_OF_PREFERENCES, ClipAlignment, ClipEmbedder
from trimtab_diffusion.rewards.loading import read_weights, weights_file

from .names import translate
from .pixels import normalize, to_tensor

if TYPE_CHECKING:
    from transformers import CLIPConfig

BEGINNINGS = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
}
"""Beginnings of open_clip's names of weights, and what transformers calls them."""

PARTS = {".ln_1.": ".layer_norm1.", ".ln_2.": ".layer_norm2.", ".attn.": ".self_attn."}
PARTS |= {".mlp.c_fc.": ".mlp.fc1.", ".mlp.c_proj.": ".mlp.fc2."}
"""The same inside a layer."""


class HumanPreferenceScore(ClipAlignment):
    """HPS v2: the cosine of a CLIP that learnt people's rankings of images, around 0.25.

    Wu et al. 2023, arXiv:2306.09341. The image's longer side becomes the model's size, and black bars fill the rest.

    Args:
        checkpoint: open_clip's weights: a file, or a folder or hub id with the file.
        version: v2 or v2.1: chooses the file `HPS_v2_compressed` or `HPS_v2.1_compressed` of a folder or hub id.
        clip: folder or hub id of the CLIP from which it was trained: its shape, and its tokenizer.
        batch_size: images per call of the model.
        device: the model's device. None: the images' device (see `trimtab_diffusion.rewards`).
        dtype: of the model.
    """

    def __init__(
        self,
        checkpoint: str | Path = "xswu/HPSv2",
        *,
        version: str = "v2.1",
        clip: str | Path = CLIP_OF_PREFERENCES,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        options: dict[str, Any] = {"batch_size": batch_size, "device": device, "dtype": dtype}
        self.clip = _Embedder(checkpoint, f"HPS_{version}_compressed", processor=clip, **options)


class _Embedder(ClipEmbedder):
    """A CLIP with open_clip's weights, which reads whole images between black bars."""

    def __init__(self, checkpoint: str | Path, file: str, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self.file = file

    @cached_property
    def model(self) -> Any:
        """The model, in eval mode."""
        from transformers import CLIPConfig

        state: dict[str, Any] = read_weights(weights_file(self.checkpoint, self.file))
        model = from_open_clip(state.get("state_dict", state), CLIPConfig.from_pretrained(self.processor_name))
        return model.to(dtype=self.dtype).eval()

    def pixels(self, pictures: list[Image.Image]) -> Tensor:
        """Returns the images [B, 3, size, size], in the model's size."""
        size = self.model.config.vision_config.image_size
        values = torch.stack([_between_bars(picture, size) for picture in pictures])
        return normalize(values).to(self.model.device, self.model.dtype)


def from_open_clip(weights: Mapping[str, Tensor], config: CLIPConfig) -> Any:
    """Returns a transformers CLIP with the weights of one of open_clip.

    Args:
        weights: by open_clip's names.
        config: the shape of the model.

    Raises:
        RuntimeError: the weights have another shape.
    """
    from transformers import CLIPModel

    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        target = translate(name, BEGINNINGS, PARTS)
        if "in_proj_" in target:  # query, key and value, one below the other
            parts = zip("qkv", weight.chunk(3), strict=True)
            renamed |= {target.replace("in_proj_", f"{letter}_proj."): part for letter, part in parts}
        else:
            renamed[target] = weight.T if name in ("visual.proj", "text_projection") else weight
    model = CLIPModel(config)
    model.load_state_dict(renamed)
    return model


def _between_bars(picture: Image.Image, size: int) -> Tensor:
    """Returns an image [3, size, size] within [0, 1], whose longer side fills the size, with black bars."""
    values = to_tensor(picture)
    height, width = values.shape[1:]
    scale = size / max(height, width)
    if scale == 1:
        shape = (height, width)
    else:
        shape = (round(height * scale), round(width * scale))
        values = F.interpolate(values[None], shape, mode="bicubic", antialias=True, align_corners=False)[0]
    top, left = (size - shape[0]) // 2, (size - shape[1]) // 2
    return F.pad(values, (left, size - shape[1] - left, top, size - shape[0] - top))
