"""Rewards and measures of emoji: `(images [B, 3, 24, 24], captions, metadata) -> [B]`.

`warmth`, `colour_alignment`, `agreement` and `match_probability` have a gradient with respect to the images.
The size of the file is `trimtab_diffusion.rewards.jpeg_incompressibility`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.emoji.classifier import shipped_classifier
from experiments.emoji.drawings import CAPTIONS, COLOURS, SIZE

CORE = slice(SIZE // 4, SIZE - SIZE // 4)  # rows and columns that most drawings cover


def warmth(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns the mean of red minus the mean of blue, [B], from -1 to 1, whatever the caption says."""
    means = images.float().mean((2, 3))
    return means[:, 0] - means[:, 2]


def colour_alignment(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns minus the distance in RGB between the caption's colour and the pixels of the core, averaged, [B]."""
    palette = torch.tensor(list(COLOURS.values()), device=images.device)
    _, colours = wanted(captions, images.device)
    distances = (images[:, :, CORE, CORE].float() - palette[colours][..., None, None]).square().sum(1)
    return -(distances + 1e-8).sqrt().mean((1, 2))  # the root has no gradient at 0


def agreement(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns the log-probability of the caption's name and colour under the classifier, [B]."""
    by_name, by_colour, names, colours = _read(images, captions)
    rows = torch.arange(len(names), device=names.device)
    return by_name[rows, names] + by_colour[rows, colours]


def match_probability(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns the probability of the caption's name and colour under the classifier, [B]."""
    return agreement(images, captions).exp()


def name_match(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns 1 where the classifier finds the caption's name likelier than the other 23, else 0; [B]."""
    by_name, _, names, _ = _read(images, captions)
    return (by_name.argmax(1) == names).float()


def colour_match(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns 1 where the classifier finds the caption's colour likelier than the other five, else 0; [B]."""
    _, by_colour, _, colours = _read(images, captions)
    return (by_colour.argmax(1) == colours).float()


def recognised(images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns 1 where the image shows both the name and the colour of its caption, else 0; [B]."""
    return name_match(images, captions) * colour_match(images, captions)


def wanted(captions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices of the captions' names and colours, [B] each."""
    if unknown := set(captions).difference(CAPTIONS):
        raise ValueError(
            f"{sorted(unknown)[0]!r} is no caption of an emoji. Captions are 'a COLOUR NAME', such as {CAPTIONS[0]!r}; "
            "experiments.emoji.drawings has COLOURS and NAMES."
        )
    indices = torch.tensor([CAPTIONS.index(caption) for caption in captions], device=device)
    return indices // len(COLOURS), indices % len(COLOURS)


def _read(images: Tensor, captions: Sequence[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns log-probabilities of names and of colours, and the indices of those that the captions name."""
    classifier = shipped_classifier().to(images.device)
    return (*classifier(images.float()), *wanted(captions, images.device))
