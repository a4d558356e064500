"""The reward of ImageReward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from trimtab_diffusion.rewards.aesthetic import AestheticHead
from trimtab_diffusion.rewards.batches import Images, Metadata, check_count, chunks
from trimtab_diffusion.rewards.loading import read_weights, settle, weights_file

from .names import translate
from .pixels import normalize, to_tensor

if TYPE_CHECKING:
    from transformers import BlipConfig, PreTrainedTokenizerBase

VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
"""The image encoder, a ViT-L/16. transformers' defaults are a ViT-B/16 with another epsilon."""

TEXT = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
"""The text encoder, a BERT-base. transformers' default is 8 heads."""

TEXT_LENGTH = 35
"""In tokens, with [CLS] and [SEP]."""

ADDED_TOKENS = ["[DEC]", "[ENC]"]
"""BLIP's additions to BERT's vocabulary."""

MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
"""Of the published model's scores; the reward is standardized by them."""

BEGINNINGS = {
    "blip.visual_encoder.cls_token": "vision.embeddings.class_embedding",
    "blip.visual_encoder.pos_embed": "vision.embeddings.position_embedding",
    "blip.visual_encoder.patch_embed.proj.": "vision.embeddings.patch_embedding.",
    "blip.visual_encoder.blocks.": "vision.encoder.layers.",
    "blip.visual_encoder.norm.": "vision.post_layernorm.",
    "blip.text_encoder.": "text.",
    "mlp.": "head.",
}
"""Beginnings of BLIP's names of weights, and the names in `BlipScorer`."""

PARTS = {".norm1.": ".layer_norm1.", ".norm2.": ".layer_norm2."}
PARTS |= {".attn.qkv.": ".self_attn.qkv.", ".attn.proj.": ".self_attn.projection."}
"""The same inside a layer of the image encoder."""

UNUSED = {f"blip.{name}_proj.{kind}" for name in ("vision", "text") for kind in ("weight", "bias")}
UNUSED |= {"blip.text_encoder.embeddings.position_ids"}
"""What the file also holds and the reward does not use: two projections of BLIP's pretraining, and token positions."""


class ImageReward:
    """ImageReward: the score of a BLIP that learnt experts' rankings of images for a prompt.

    Xu et al. 2023, arXiv:2304.05977. Rewards are roughly standard normal. The image's shorter side becomes 224 pixels,
    and the model reads the central square. Prompts are truncated to 35 tokens.

    Args:
        checkpoint: the weights `ImageReward.pt`: a file, or a folder or hub id with the file.
        tokenizer: folder or hub id of BERT's tokenizer.
        config: the model's shape. None: the shape of the published weights.
        batch_size: images per call of the model.
        device: the model's device. None: the images' device (see `trimtab_diffusion.rewards`).
        dtype: of BLIP; the perceptron after it computes in float32.

    Raises:
        FileNotFoundError: raised by the first call, for a file that does not exist.
        ValueError: raised by a call, for weights of another model or shape, or for another number of prompts than
            images.
    """

    def __init__(
        self,
        checkpoint: str | Path = "zai-org/ImageReward",
        *,
        tokenizer: str | Path = "google-bert/bert-base-uncased",
        config: BlipConfig | None = None,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.checkpoint, self.tokenizer_name, self._config = checkpoint, tokenizer, config
        self.batch_size, self.device, self.dtype = batch_size, device, dtype

    @cached_property
    def model(self) -> BlipScorer:
        """The model, in eval mode."""
        from transformers import BlipConfig

        path = weights_file(self.checkpoint, "ImageReward")
        weights = read_weights(path)
        try:
            model = from_blip(weights, self._config or BlipConfig(vision_config=VISION, text_config=TEXT))
        except RuntimeError as error:
            raise ValueError(
                f"{path} is not an ImageReward of this shape. Pass the published ImageReward.pt, or config= with the "
                f"shape of these weights. {error}"
            ) from error
        model.vision.to(self.dtype)
        model.text.to(self.dtype)
        return model.eval()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
        tokenizer.add_tokens(ADDED_TOKENS, special_tokens=True)
        return tokenizer

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns rewards [B]."""
        check_count("prompts", prompts, images)
        settle(self.model, images, self.device)
        size, device = self.model.vision.config.image_size, self.model.vision.device
        rewards = []
        texts = iter(prompts)
        for pictures in chunks(images, self.batch_size):
            pixels = normalize(torch.stack([_centre(picture, size) for picture in pictures]))
            tokens = self.tokenizer(
                list(islice(texts, len(pictures))),
                padding="max_length",
                truncation=True,
                max_length=TEXT_LENGTH,
                return_tensors="pt",
            ).to(device)
            scores = self.model(pixels.to(device, self.dtype), tokens["input_ids"], tokens["attention_mask"])
            rewards.append((scores - MEAN) / DEVIATION)
        return torch.cat(rewards).cpu()


class BlipScorer(nn.Module):
    """BLIP's encoder of images, its encoder of texts, which attends to the image, and a perceptron on the first token.

    Args:
        config: the shape of the encoders.
    """

    def __init__(self, config: BlipConfig) -> None:
        from transformers import BlipTextModel, BlipVisionModel

        super().__init__()
        vision: Any = config.vision_config  # transformers also declares dictionaries and None
        text: Any = config.text_config
        self.vision: Any = BlipVisionModel(vision)
        self.text: Any = BlipTextModel(text, add_pooling_layer=False)
        self.head = AestheticHead(text.hidden_size)

    def forward(self, pixels: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns scores [B], float32.

        Args:
            pixels: [B, 3, size, size], normalized.
            token_ids: [B, T]; the first column is [CLS].
            mask: [B, T], 0 at padding.
        """
        patches = self.vision(pixels).last_hidden_state
        states = self.text(token_ids, attention_mask=mask, encoder_hidden_states=patches).last_hidden_state
        return self.head(states[:, 0].float())


def from_blip(weights: Mapping[str, Tensor], config: BlipConfig) -> BlipScorer:
    """Returns a model with weights by BLIP's names.

    Args:
        weights: the contents of the file `ImageReward.pt`.
        config: the shape of the model.

    Raises:
        RuntimeError: a weight is missing, unknown or of another shape.
    """
    model = BlipScorer(config)
    used = {name: weight for name, weight in weights.items() if name not in UNUSED}
    model.load_state_dict({translate(name, BEGINNINGS, PARTS): weight for name, weight in used.items()})
    return model


def _centre(picture: Image.Image, size: int) -> Tensor:
    """Returns the centre [3, size, size] of an image, within [0, 1], after its shorter side has become `size`."""
    shorter = min(picture.size)
    width, height = (int(size * side / shorter) for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    return to_tensor(resized.crop((left, top, left + size, top + size)))
