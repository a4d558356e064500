"""Loads reward models and places them on a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn

from .batches import Images

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def settle(model: nn.Module, images: Images, device: str | torch.device | None) -> None:
    """Moves the model to its device; without one, to the images' device."""
    if device is None and isinstance(images, Tensor):
        device = images.device
    if device is not None:
        model.to(device)


def image_processor(checkpoint: str | Path) -> BaseImageProcessor:
    """Loads the image processor of a model."""
    from transformers import AutoImageProcessor

    # The published scores use PIL's resizing. torchvision's differs, and may not be installed.
    return AutoImageProcessor.from_pretrained(checkpoint, backend="pil")


def pixels(processor: BaseImageProcessor, pictures: list[Image.Image], model: PreTrainedModel) -> Tensor:
    """Returns the images as the model's inputs."""
    return processor(images=pictures, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)


def weights_file(checkpoint: str | Path, pattern: str = "*") -> Path:
    """Returns the one file of weights of a checkpoint, which is downloaded if it is a hub id.

    Args:
        checkpoint: a file, a folder or a hub id.
        pattern: names the file among several, up to its suffix.

    Raises:
        FileNotFoundError: it is the path of a file that does not exist.
        ValueError: there are several files, or none.
    """
    path = Path(checkpoint)
    if path.is_file():
        return path
    if not path.is_dir():
        if path.suffix in WEIGHT_SUFFIXES or path.is_absolute():
            raise FileNotFoundError(f"There is no file {path}. Pass one, or a folder or hub id that has one.")
        from huggingface_hub import snapshot_download

        patterns = [f"{pattern}{suffix}" for suffix in WEIGHT_SUFFIXES]
        path = Path(snapshot_download(str(checkpoint), allow_patterns=patterns))
    files = sorted(file for file in path.glob(pattern + ".*") if file.suffix in WEIGHT_SUFFIXES)
    if len(files) != 1:
        raise ValueError(
            f"{checkpoint} has {len(files)} files of weights ({', '.join(file.name for file in files) or 'none'}), and "
            "one is needed. Pass the path of the right one."
        )
    return files[0]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a file of weights, without running code that it may hold."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
