"""Converts images to PIL images in RGB, for trackers, rewards and trainers."""

import reprlib

import numpy as np
import torch
from PIL import Image, ImageOps

Picture = Image.Image | np.ndarray | torch.Tensor


def to_pil(image: Picture) -> Image.Image:
    """Converts an image to RGB; transparent pixels show a white background.

    Args:
        image: a PIL image, which is turned as its EXIF orientation says, as `datasets` turns files; or an array
            [3, H, W] or [H, W, 3], uint8 or float within [0, 1].

    Raises:
        ValueError: it is neither, the image has more than 8 bits per channel, or the array another shape or floats
            outside [0, 1].
    """
    if isinstance(image, Image.Image):
        if image.mode[0] in "IF":  # such as I;16; PIL would cut its values off at 255
            raise ValueError(
                f"an image of mode {image.mode} came in, with more than 8 bits per channel; 8 bits are needed. Scale "
                'its values to 0 to 255, then image.convert("L").'
            )
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    if isinstance(image, torch.Tensor):
        image = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
    array = np.asarray(image)
    if array.ndim == 0:  # NumPy makes it of whatever is no array
        raise ValueError(
            f"{reprlib.repr(image)} ({type(image).__name__}) came in; a PIL image or an array is needed. Open a file: "
            "PIL.Image.open(name), or for a whole column dataset.cast_column(column, datasets.Image())."
        )
    if array.ndim != 3 or 3 not in (array.shape[0], array.shape[2]):
        raise ValueError(f"an image of shape {array.shape} came in; [3, H, W] or [H, W, 3] is needed.")
    if array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8:
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"an image of {array.dtype} with values from {low} to {high} came in; floats must lie in [0, 1]. "
                "Clamp it, after (x + 1) / 2 if it is a decoder's output in [-1, 1]."
            )
        array = (array * 255).round().astype(np.uint8)
    return Image.fromarray(array)
