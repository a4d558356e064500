"""Emoji of 24x24 pixels in six colours, with captions such as "a blue fox"."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from experiments.assets.registry import Package, unpacked

SIZE = 24
COLOURS = {
    "red": (0.87, 0.16, 0.19),
    "yellow": (0.99, 0.80, 0.18),
    "green": (0.36, 0.69, 0.26),
    "blue": (0.25, 0.53, 0.91),
    "purple": (0.55, 0.34, 0.80),
    "pink": (0.96, 0.56, 0.74),
}
CODES = {
    "apple": "1f34e",
    "balloon": "1f388",
    "bird": "1f426",
    "butterfly": "1f98b",
    "cactus": "1f335",
    "car": "1f697",
    "crab": "1f980",
    "crown": "1f451",
    "dress": "1f457",
    "fox": "1f98a",
    "frog": "1f438",
    "grapes": "1f347",
    "heart": "2764",
    "leaf": "1f341",
    "mushroom": "1f344",
    "octopus": "1f419",
    "pepper": "1f336",
    "pig": "1f437",
    "star": "2b50",
    "strawberry": "1f353",
    "tree": "1f332",
    "tulip": "1f337",
    "turtle": "1f422",
    "whale": "1f433",
}
"""The Unicode code point of each name, by which vendors call their files."""
NAMES = tuple(CODES)
CAPTIONS = tuple(f"a {colour} {name}" for name in NAMES for colour in COLOURS)
HELD_OUT = tuple(f"a {[*COLOURS][i % len(COLOURS)]} {name}" for i, name in enumerate(NAMES))
"""A caption for each name, and four for each colour, on which no model is pretrained."""
TRAINED = tuple(caption for caption in CAPTIONS if caption not in HELD_OUT)

PACKAGES = {
    "twitter": Package(
        "npm",
        "emoji-datasource-twitter",
        "16.0.0",
        {"package/img/twitter/64/*.png": "cdc7e0243c0b5270ee300d5af73105827dcb15d91d83e2650beaa1c852416f75"},
    ),
    "google": Package(
        "npm",
        "emoji-datasource-google",
        "16.0.0",
        {"package/img/google/64/*.png": "eee6bb1abafc5814029d4081b7d85e186ba8840949135a3c4142eea120ae6753"},
    ),
    "google 2017": Package(
        "npm",
        "emoji-datasource-google",
        "3.0.0",
        {"package/img/google/64/*.png": "3c5b23cb16146d3ba78da1d0c60b524b0a2c98076154397e70ce1c9fd33838c1"},
    ),
    "emojione": Package(
        "npm",
        "emojione",
        "2.2.7",
        {"package/assets/png/*.png": "6f8fd85fb1226c46c0d08bbde025dfa4f13a0a5ae3aba4318406344d5bb43ea0"},
    ),
}
"""Vendors' drawings of 64x64 pixels."""
BASE, OTHERS = "twitter", ("google", "google 2017", "emojione")
"""The vendor whose drawings the base model learns, and those from which the classifier learns."""

LUMA = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
HUE_WIDTH, HUE_EDGE = 50.0, 15.0  # degrees from the main hue within which pixels change, and where that fades out
GREY, VIVID = 0.08, 0.20  # chroma below which a pixel keeps its colour, and above which it changes
OVERSAMPLING = 3  # pixels are means over this many sampled points in each direction


@cache
def drawings(vendor: str) -> Tensor:
    """Returns a vendor's drawings of NAMES in each of COLOURS: RGB and opacity, 0 to 1, [24, 6, 4, 64, 64]."""
    package = PACKAGES[vendor]
    (pattern,) = package.members
    folder = (unpacked(package) / pattern).parent
    rows = []
    for code in CODES.values():
        (file,) = [path for path in (folder / f"{code}.png", folder / f"{code}-fe0f.png") if path.is_file()]
        with Image.open(file) as image:
            original = torch.from_numpy(np.array(image.convert("RGBA"))).permute(2, 0, 1) / 255
        rows.append(torch.stack([recoloured(original, colour) for colour in COLOURS.values()]))
    return torch.stack(rows)


def recoloured(drawing: Tensor, colour: tuple[float, float, float]) -> Tensor:
    """Gives the parts of the drawing's main hue another colour, and leaves the others as they are.

    Where a part is darker or brighter than the mean of these parts, the new colour is, too.

    Args:
        drawing: RGB and opacity, 0 to 1, [4, H, W].
        colour: RGB, 0 to 1.
    """
    rgb, opacity = drawing[:3], drawing[3]
    hue = torch.atan2(3**0.5 * (rgb[1] - rgb[2]), 2 * rgb[0] - rgb[1] - rgb[2])
    chroma = rgb.amax(0) - rgb.amin(0)
    hues = torch.linspace(-torch.pi, torch.pi, 73)[:-1, None, None]
    density = (chroma * opacity * torch.exp(8 * (torch.cos(hue - hues) - 1))).sum((1, 2))
    away = torch.rad2deg(torch.acos(torch.cos(hue - hues[density.argmax()]).clamp(-1, 1)))
    share = ((HUE_WIDTH - away) / HUE_EDGE).clamp(0, 1) * ((chroma - GREY) / (VIVID - GREY)).clamp(0, 1)
    brightness = (LUMA * rgb).sum(0)
    middle = (brightness * share * opacity).sum() / (share * opacity).sum()
    paint = torch.tensor(colour)[:, None, None]
    light = ((brightness - middle) / (1 - middle)).clamp(0, 1)
    painted = torch.where(brightness < middle, paint * brightness / middle, paint + (1 - paint) * light)
    return torch.cat([share * painted + (1 - share) * rgb, drawing[3:]])


def rendered(
    drawn: Tensor,
    generator: torch.Generator,
    *,
    scales: tuple[float, float] = (0.8, 1.0),
    shift: float = 1.5,
    turn: float = 0.0,
) -> Tensor:
    """Renders drawings at random places and sizes, half of them mirrored, on random backgrounds.

    Args:
        drawn: RGB and opacity, [B, 4, 64, 64].
        generator: Determines what is random.
        scales: Smallest and largest share of the image's width that a drawing spans.
        shift: Largest distance from the centre in each direction, in pixels.
        turn: Largest angle in each direction, in radians.

    Returns:
        [B, 3, 24, 24], from 0 to 1.
    """
    count, fine = len(drawn), SIZE * OVERSAMPLING
    scale = scales[0] + (scales[1] - scales[0]) * torch.rand(count, generator=generator)
    mirror = 1 - 2 * (torch.rand(count, generator=generator) < 0.5).float()
    place = (2 * torch.rand(count, 2, generator=generator) - 1) * 2 * shift / SIZE
    affine = torch.zeros(count, 2, 3)
    angle = turn * (2 * torch.rand(count, generator=generator) - 1) if turn else torch.zeros(count)
    affine[:, 0, 0], affine[:, 0, 1] = mirror * angle.cos() / scale, -mirror * angle.sin() / scale
    affine[:, 1, 0], affine[:, 1, 1] = angle.sin() / scale, angle.cos() / scale
    affine[:, :, 2] = place
    premultiplied = torch.cat([drawn[:, :3] * drawn[:, 3:], drawn[:, 3:]], dim=1)
    grid = F.affine_grid(affine, [count, 4, fine, fine], align_corners=False)
    placed = F.avg_pool2d(F.grid_sample(premultiplied, grid, align_corners=False), OVERSAMPLING)
    return (placed[:, :3] + (1 - placed[:, 3:]) * backgrounds(count, generator)).clamp(0, 1)


def backgrounds(count: int, generator: torch.Generator) -> Tensor:
    """Renders backgrounds [count, 3, 24, 24]: one light colour, or two in a gradient, stripes or a checkerboard."""
    first, second = 0.7 + 0.3 * torch.rand(2, count, 3, 1, 1, generator=generator)
    ticks = torch.arange(SIZE)
    ramp = (ticks / (SIZE - 1))[:, None].expand(SIZE, SIZE)
    stripes = (ticks // 4 % 2)[:, None].expand(SIZE, SIZE).float()
    checks = ((ticks[:, None] // 4 + ticks[None, :] // 4) % 2).float()
    plain = torch.zeros(SIZE, SIZE)
    patterns = torch.stack([plain, plain, plain, plain, ramp, ramp.T, stripes, checks])
    share = patterns[torch.randint(len(patterns), (count,), generator=generator)][:, None]
    return share * second + (1 - share) * first
