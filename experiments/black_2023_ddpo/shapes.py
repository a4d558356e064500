"""Synthetic images of coloured shapes with captions, and measures of how well an image matches its caption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 16
COLOURS = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.75, 0.20),
    "blue": (0.20, 0.30, 0.95),
    "yellow": (0.95, 0.85, 0.15),
}
SHAPES = ("circle", "square", "triangle", "cross")
CAPTIONS = tuple(f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES)
TRAINED = tuple(caption for i, caption in enumerate(CAPTIONS) if (i // len(SHAPES) + i) % 2 == 0)
"""Half of the captions, with two shapes of each colour and two colours of each shape."""
BACKGROUNDS = ("plain", "gradient", "stripe", "checker")  # no caption names them
JITTER = 1.0  # largest distance of a shape from the centre in each direction, in pixels
RADII = (4.5, 6.0)  # smallest and largest, in pixels
CORE = slice(SIZE // 2 - 2, SIZE // 2 + 2)  # rows and columns that every shape covers, except a corner of a cross


def draw(captions: Tensor, generator: torch.Generator) -> Tensor:
    """Renders images [B, 3, 16, 16], 0 to 1, of indices [B] into CAPTIONS, with random place, size and background."""
    count = len(captions)
    colour = _palette(captions.device)[captions // len(SHAPES)][..., None, None]
    low, high = RADII
    radius = low + (high - low) * torch.rand(count, generator=generator)
    centre = JITTER * (2 * torch.rand(count, 2, generator=generator) - 1)
    cover = masks(captions % len(SHAPES), radius, centre)[:, None]
    return cover * colour + (1 - cover) * _backgrounds(count, generator)


def masks(shapes: Tensor, radius: Tensor, centre: Tensor) -> Tensor:
    """Computes the share of each pixel that a shape covers.

    Args:
        shapes: Indices into SHAPES, [B].
        radius: In pixels, [B].
        centre: Rows and columns from the middle of the image, in pixels, [B, 2].

    Returns:
        [B, 16, 16], from 0 to 1.
    """
    ticks = torch.arange(SIZE) - (SIZE - 1) / 2
    y = ticks[:, None] - centre[:, 0, None, None]
    x = ticks[None, :] - centre[:, 1, None, None]
    r = radius[:, None, None]
    slope = (x.abs() * 3**0.5 - y) / 2  # distance towards the nearer of a triangle's upper sides
    # Signed distances to the border, negative inside.
    circle = (x**2 + y**2).sqrt() - r
    square = torch.maximum(x.abs(), y.abs()) - 0.85 * r
    triangle = torch.maximum(slope, y) - 0.6 * r
    bars = [torch.maximum(a.abs() - r, b.abs() - 0.36 * r) for a, b in ((x, y), (y, x))]
    distances = torch.stack([circle, square, triangle, torch.minimum(*bars)], dim=1)
    rows = torch.arange(len(shapes))
    return (0.5 - distances[rows, shapes]).clamp(0, 1)


def _backgrounds(count: int, generator: torch.Generator) -> Tensor:
    """Renders backgrounds [count, 3, 16, 16]: two muted colours in one of four patterns."""
    first, second = 0.25 + 0.5 * torch.rand(2, count, 3, 1, 1, generator=generator)
    ticks = torch.arange(SIZE)
    ramp = (ticks / (SIZE - 1))[None, :].expand(SIZE, SIZE)
    stripe = (ticks // 4 % 2)[None, :].expand(SIZE, SIZE)
    checker = (ticks[:, None] // 4 + ticks[None, :] // 4) % 2
    patterns = torch.stack([torch.zeros(SIZE, SIZE), ramp, stripe, checker])
    chosen = patterns[torch.randint(len(BACKGROUNDS), (count,), generator=generator)]
    turned = torch.rand(count, generator=generator) < 0.5
    share = torch.where(turned[:, None, None], chosen.transpose(1, 2), chosen)[:, None]
    return share * second + (1 - share) * first


def rgb_alignment(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns minus the Euclidean distance in RGB between the prompted colour and the image's centre, [B]; 0 is best.

    The colour of the centre is the mean over four by four pixels. Every shape covers them, except a corner of a cross.

    Args:
        images: [B, 3, 16, 16], from 0 to 1.
        prompts: One of CAPTIONS per image.
        metadata: Not used; rewards of DDPOTrainer take it.
    """
    colours, _ = _wanted(prompts, images.device)
    return -(_centre_colour(images) - _palette(images.device)[colours]).norm(dim=1)


def colour_match(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns 1 where the centre is nearer to the prompted colour than to the other three, else 0; [B]."""
    colours, _ = _wanted(prompts, images.device)
    return (torch.cdist(_centre_colour(images), _palette(images.device)).argmin(1) == colours).float()


def shape_match(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns 1 where the image shows the prompted shape rather than one of the other three, else 0; [B].

    The nearness of each pixel to the colour of the centre is correlated with the masks of all shapes at several sizes
    and places. The shape of the mask with the highest correlation counts as the shape of the image.
    """
    _, shapes = _wanted(prompts, images.device)
    nearness = -(images.float() - _centre_colour(images)[..., None, None]).square().sum(1).sqrt().flatten(1)
    offsets = torch.linspace(-JITTER, JITTER, 5)
    grid = torch.cartesian_prod(torch.arange(len(SHAPES)).float(), torch.linspace(*RADII, 4), offsets, offsets)
    templates = masks(grid[:, 0].long(), grid[:, 1], grid[:, 2:]).flatten(1).to(images.device)
    best = (_standardized(nearness) @ _standardized(templates).T).argmax(1)
    return (grid[:, 0].long().to(images.device)[best] == shapes).float()


def _wanted(prompts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices of the prompts' colours and of their shapes, [B] each."""
    if unknown := set(prompts).difference(CAPTIONS):
        raise ValueError(f"{sorted(unknown)[0]!r} names no colour and shape; prompts must be of {', '.join(CAPTIONS)}.")
    indices = torch.tensor([CAPTIONS.index(prompt) for prompt in prompts], device=device)
    return indices // len(SHAPES), indices % len(SHAPES)


def _centre_colour(images: Tensor) -> Tensor:
    return images[:, :, CORE, CORE].float().mean((2, 3))


def _palette(device: torch.device) -> Tensor:
    return torch.tensor(list(COLOURS.values()), device=device)


def _standardized(rows: Tensor) -> Tensor:
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
