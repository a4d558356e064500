"""The reward of LAION's aesthetic predictor."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Images, Metadata
from .clip import CLIP, ClipEmbedder
from .loading import read_weights, settle, weights_file


class AestheticHead(nn.Module):
    """The multilayer perceptron of LAION's aesthetic predictor."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        # There are no nonlinearities. The dropout layers give the others the names of the published weights.
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """Returns scores [B] of unit embeddings [B, width]."""
        return self.layers(embeddings).squeeze(1)


class AestheticScore:
    """LAION's aesthetic predictor, from about 1 (ugly) to 10 (Black et al. 2023, arXiv:2305.13301, section 5.2).

    Args:
        checkpoint: the weights `sac+logos+ava1-l14-linearMSE`: a file, or a folder or hub id with this file alone.
        clip: the model on whose embeddings these weights were trained.
        options: batch_size, device and CLIP's dtype, as of `ClipEmbedder`; the perceptron computes in float32.

    Raises:
        FileNotFoundError: raised by the first call, for a file that does not exist.
        ValueError: raised by the first call, for weights of another shape.
    """

    def __init__(self, checkpoint: str | Path, *, clip: str | Path = CLIP, **options: Any) -> None:
        self.checkpoint, self.clip = checkpoint, ClipEmbedder(clip, reads_texts=False, **options)

    @cached_property
    def head(self) -> AestheticHead:
        """The perceptron, in eval mode."""
        width, path = self.clip.model.config.projection_dim, weights_file(self.checkpoint)
        head = AestheticHead(width)
        try:
            head.load_state_dict(read_weights(path))
        except RuntimeError as error:
            raise ValueError(
                f"{path} is not an aesthetic predictor for CLIP embeddings of {width} numbers. The weights "
                f"sac+logos+ava1-l14-linearMSE belong to {CLIP}. {error}"
            ) from error
        return head.eval()

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns aesthetic scores [B]."""
        settle(self.head, images, self.clip.device)
        return self.head(self.clip.embed_images(images)).cpu()
