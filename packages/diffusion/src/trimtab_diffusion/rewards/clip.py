"""Rewards of CLIP's embeddings of image and prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from .batches import Images, Metadata, check_count, chunks
from .loading import image_processor, pixels, settle

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase

CLIP = "openai/clip-vit-large-patch14"
CLIP_OF_CLIPSCORE = "openai/clip-vit-base-patch32"
CLIP_OF_PREFERENCES = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The CLIP from which PickScore and HPS v2 were trained; their tokenizer and image processor."""


class ClipEmbedder:
    """Unit embeddings of images and texts by a CLIP model.

    Args:
        checkpoint: folder or hub id of the model.
        processor: folder or hub id of its tokenizer and image processor. None: as checkpoint.
        reads_texts: False for a model without its text half, which saves half a gigabyte.
        batch_size: images per call of the model.
        device: where the model runs; None: the device of the images (see the package).
        dtype: the model's dtype.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        processor: str | Path | None = None,
        reads_texts: bool = True,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.checkpoint, self.processor_name, self.reads_texts = checkpoint, processor or checkpoint, reads_texts
        self.batch_size, self.device, self.dtype = batch_size, device, dtype

    @cached_property
    def model(self) -> Any:  # transformers declares neither the shape of its configs nor what its heads return
        """The model, in eval mode."""
        from transformers import CLIPModel

        # By default transformers takes the dtype of the file, and scores differ in half precision.
        model = CLIPModel.from_pretrained(self.checkpoint, dtype=self.dtype).eval()
        if not self.reads_texts:
            del model.text_model
        return model

    @cached_property
    def processor(self) -> BaseImageProcessor:
        """The image processor."""
        return image_processor(self.processor_name)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.processor_name)

    def pixels(self, pictures: list[Image.Image]) -> Tensor:
        """Returns the images as the model's inputs."""
        return pixels(self.processor, pictures, self.model)

    @torch.no_grad()
    def embed_images(self, images: Images) -> Tensor:
        """Returns unit embeddings [B, width], float32."""
        settle(self.model, images, self.device)
        batches = (self.pixels(pictures) for pictures in chunks(images, self.batch_size))
        return torch.cat([_unit(self.model.get_image_features(batch).pooler_output) for batch in batches])

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Returns unit embeddings [B, width], float32. Texts are truncated to the model's longest, 77 tokens."""
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        distinct, longest = list(rows), self.model.config.text_config.max_position_embeddings
        parts = []
        for start in range(0, len(distinct), self.batch_size):
            part = distinct[start : start + self.batch_size]
            tokens = self.tokenizer(part, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            tokens = tokens.to(self.model.device)
            features = self.model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])
            parts.append(_unit(features.pooler_output))
        return torch.cat(parts)[[rows[text] for text in texts]]


class ClipAlignment:
    """The cosine of CLIP's embeddings of image and prompt, within [-1, 1].

    The cosine varies little: the published CLIP models multiply it by 100 for their logits. Prompts are truncated to
    the model's longest text, 77 tokens.

    Args:
        checkpoint: folder or hub id of a CLIP model.
        options: batch_size, device and dtype, as of `ClipEmbedder`.
    """

    def __init__(self, checkpoint: str | Path = CLIP, **options: Any) -> None:
        self.clip = ClipEmbedder(checkpoint, **options)

    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns cosines [B]."""
        check_count("prompts", prompts, images)
        pictures = self.clip.embed_images(images)
        return (pictures * self.clip.embed_texts(prompts)).sum(1).cpu()


class ClipScore(ClipAlignment):
    """CLIPScore: 2.5 max(cosine, 0) of the image and "A photo depicts" with the prompt.

    Hessel et al. 2021, arXiv:2104.08718, section 3.

    Args:
        checkpoint: folder or hub id of a CLIP model. The paper's is a ViT-B/32.
        prefix: stands before each prompt.
        options: batch_size, device and dtype, as of `ClipEmbedder`.
    """

    def __init__(
        self, checkpoint: str | Path = CLIP_OF_CLIPSCORE, *, prefix: str = "A photo depicts ", **options: Any
    ) -> None:
        super().__init__(checkpoint, **options)
        self.prefix = prefix

    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns scores [B], from 0 to 2.5."""
        return 2.5 * super().__call__(images, [self.prefix + prompt for prompt in prompts], metadata).clamp(min=0)


class PickScore(ClipAlignment):
    """PickScore: the cosine of a CLIP that learnt people's choices between images, times its learnt scale of about 100.

    Kirstain et al. 2023, arXiv:2305.01569. Scores lie around 20. The difference of two images' scores for one prompt is
    the logit of choosing the first.

    Args:
        checkpoint: folder or hub id of the model.
        processor: folder or hub id of its tokenizer and image processor.
        options: batch_size, device and dtype, as of `ClipEmbedder`.
    """

    def __init__(
        self,
        checkpoint: str | Path = "yuvalkirstain/PickScore_v1",
        *,
        processor: str | Path = CLIP_OF_PREFERENCES,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, processor=processor, **options)

    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns scores [B]."""
        return self.clip.model.logit_scale.exp().item() * super().__call__(images, prompts, metadata)


def _unit(embeddings: Tensor) -> Tensor:
    return nn.functional.normalize(embeddings.float(), dim=1)
