"""Pictures of coloured shapes and captions drawn by formulas, and measures of how well a picture fits its caption."""

from __future__ import annotations

import random
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
CORE = slice(SIZE // 2 - 2, SIZE // 2 + 2)  # rows and columns that are inside of every shape


def draw(captions: Tensor, generator: torch.Generator) -> Tensor:
    """A picture [3, 16, 16] from 0 to 1 for each index [B] into CAPTIONS: place, size and background are random."""
    count = len(captions)
    palette = torch.tensor(list(COLOURS.values()))
    colour = palette[captions // len(SHAPES)][..., None, None]
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


def random_caption() -> tuple[str, dict[str, Any]]:
    """One of the sixteen captions, by Python's random numbers, and no metadata."""
    return random.choice(CAPTIONS), {}


def rgb_alignment(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...] = ()) -> Tensor:
    """Minus the distance between the prompted colour and the middle of the picture, [B]; 0 is best, -1 worst.

    images: [B, 3, 16, 16], 0 to 1. The middle is the 4x4 pixels that every shape covers; the distance is the Euclidean
    one in RGB over that from black to white, and a picture's is the mean over those pixels.
    """
    core = images[:, :, CORE, CORE].float()
    wanted = torch.tensor([COLOURS[_colour(prompt)] for prompt in prompts], device=images.device)[..., None, None]
    return -(core - wanted).square().mean(1).sqrt().mean((1, 2))


def colour_match(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...] = ()) -> Tensor:
    """1 where the middle of the picture is nearer to the prompted colour than to the other three, else 0; [B]."""
    middle = images[:, :, CORE, CORE].float().mean((2, 3))
    palette = torch.tensor(list(COLOURS.values()), device=images.device)
    wanted = torch.tensor([list(COLOURS).index(_colour(prompt)) for prompt in prompts], device=images.device)
    return (torch.cdist(middle, palette).argmin(1) == wanted).float()


def shape_match(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...] = ()) -> Tensor:
    """1 where the picture's shape is more like the prompted one than like the other three, else 0; [B].

    A picture is reduced to its distance, pixel by pixel, from the colour of its middle; of all shapes at all sizes and
    places, the one is taken whose mask correlates with that most.
    """
    images = images.float()
    middle = images[:, :, CORE, CORE].mean((2, 3), keepdim=True)
    nearness = -(images - middle).square().mean(1).sqrt().flatten(1)
    bank, shapes = _all_masks()
    likeness = _standardized(nearness) @ _standardized(bank).to(images.device).T
    found = shapes.to(images.device)[likeness.argmax(1)]
    wanted = torch.tensor([SHAPES.index(prompt.split()[-1]) for prompt in prompts], device=images.device)
    return (found == wanted).float()


def _all_masks() -> tuple[Tensor, Tensor]:
    """Masks [N, 256] of every shape over a grid of sizes and places, and the index [N] of the shape of each."""
    offsets = torch.linspace(-JITTER, JITTER, 5)
    grid = torch.cartesian_prod(torch.arange(4.0), torch.linspace(*RADII, 4), offsets, offsets)
    shapes = grid[:, 0].long()
    return masks(shapes, grid[:, 1], grid[:, 2:]).flatten(1), shapes


def _standardized(rows: Tensor) -> Tensor:
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)


def _colour(prompt: str) -> str:
    return prompt.split()[1]
