"""Pictures of coloured shapes and captions drawn by formulas, and measures of how well a picture fits its caption."""

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
BACKGROUNDS = ("plain", "gradient", "stripe", "checker")  # no caption names them
JITTER = 1.0  # pixels by which a shape is off the centre, at most
RADII = (4.5, 6.0)  # smallest and largest
CORE = slice(SIZE // 2 - 2, SIZE // 2 + 2)  # rows and columns that every shape fills, but for a corner of a cross


def draw(captions: Tensor, generator: torch.Generator) -> Tensor:
    """A picture [3, 16, 16] from 0 to 1 for each index [B] into CAPTIONS: place, size and background are random."""
    count = len(captions)
    colour = _palette(captions.device)[captions // len(SHAPES)][..., None, None]
    low, high = RADII
    radius = low + (high - low) * torch.rand(count, generator=generator)
    centre = JITTER * (2 * torch.rand(count, 2, generator=generator) - 1)
    cover = masks(captions % len(SHAPES), radius, centre)[:, None]
    return cover * colour + (1 - cover) * _backgrounds(count, generator)


def masks(shapes: Tensor, radius: Tensor, centre: Tensor) -> Tensor:
    """How much of each pixel a shape covers, [B, 16, 16]. shapes: [B], index into SHAPES; radius: [B], centre: [B, 2],
    rows and columns from the middle, both in pixels."""
    ticks = torch.arange(SIZE) - (SIZE - 1) / 2
    y = ticks[:, None] - centre[:, 0, None, None]
    x = ticks[None, :] - centre[:, 1, None, None]
    r = radius[:, None, None]
    slope = (x.abs() * 3**0.5 - y) / 2  # towards each of a triangle's upper sides
    # Distances to the border, negative inside.
    circle = (x**2 + y**2).sqrt() - r
    square = torch.maximum(x.abs(), y.abs()) - 0.85 * r
    triangle = torch.maximum(slope, y) - 0.6 * r
    bars = [torch.maximum(a.abs() - r, b.abs() - 0.36 * r) for a, b in ((x, y), (y, x))]
    distances = torch.stack([circle, square, triangle, torch.minimum(*bars)], dim=1)
    rows = torch.arange(len(shapes))
    return (0.5 - distances[rows, shapes]).clamp(0, 1)


def _backgrounds(count: int, generator: torch.Generator) -> Tensor:
    """[count, 3, 16, 16]: two muted colours in one of four patterns."""
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
    """Minus the Euclidean distance in RGB between the prompted colour and the middle of the picture, [B]; 0 is best.

    images: [B, 3, 16, 16], 0 to 1. The middle is the mean over four by four pixels, which every shape fills, but for
    a corner of a cross.
    """
    colours, _ = _wanted(prompts, images.device)
    return -(_middle(images) - _palette(images.device)[colours]).norm(dim=1)


def colour_match(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """1 where the middle of the picture is nearer to the prompted colour than to the other three, else 0; [B]."""
    colours, _ = _wanted(prompts, images.device)
    return (torch.cdist(_middle(images), _palette(images.device)).argmin(1) == colours).float()


def shape_match(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """1 where the picture's shape is more like the prompted one than like the other three, else 0; [B].

    A picture is reduced to how near each pixel is to the colour of its middle; of all shapes at all sizes and places
    the one is taken whose mask correlates most with that.
    """
    _, shapes = _wanted(prompts, images.device)
    nearness = -(images.float() - _middle(images)[..., None, None]).square().sum(1).sqrt().flatten(1)
    offsets = torch.linspace(-JITTER, JITTER, 5)
    grid = torch.cartesian_prod(torch.arange(len(SHAPES)).float(), torch.linspace(*RADII, 4), offsets, offsets)
    known = masks(grid[:, 0].long(), grid[:, 1], grid[:, 2:]).flatten(1).to(images.device)
    found = grid[:, 0].long().to(images.device)[(_standardized(nearness) @ _standardized(known).T).argmax(1)]
    return (found == shapes).float()


def _wanted(prompts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices [B] of the prompts' colours and of their shapes."""
    if unknown := set(prompts).difference(CAPTIONS):
        raise ValueError(f"{sorted(unknown)[0]!r} names no colour and shape; prompts must be of {', '.join(CAPTIONS)}.")
    indices = torch.tensor([CAPTIONS.index(prompt) for prompt in prompts], device=device)
    return indices // len(SHAPES), indices % len(SHAPES)


def _middle(images: Tensor) -> Tensor:
    return images[:, :, CORE, CORE].float().mean((2, 3))


def _palette(device: torch.device) -> Tensor:
    return torch.tensor(list(COLOURS.values()), device=device)


def _standardized(rows: Tensor) -> Tensor:
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
