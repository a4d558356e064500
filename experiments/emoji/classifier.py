"""Recognises the names and colours of emoji, having learnt them from other vendors' drawings than the base model."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.emoji.drawings import COLOURS, NAMES, OTHERS, drawings, rendered
from trimtab_common.tracking import progress

SHIPPED = Path(__file__).with_name("classifier.safetensors")
STEPS, BATCH, LEARNING_RATE = 800, 96, 3e-3


class Classifier(nn.Module):
    """A convolutional network of 0.3M parameters with a head for the name and one for the colour."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        channels = [3, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(pairwise(channels)):
            stride = 2 if index in (1, 3) else 1
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.names = nn.Linear(8 * width, len(NAMES))
        self.colours = nn.Linear(8 * width, len(COLOURS))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of names [B, 24] and of colours [B, 6] for images [B, 3, 24, 24], 0 to 1."""
        features = self.trunk(2 * images - 1)
        pooled = F.dropout(torch.cat([features.mean((2, 3)), features.amax((2, 3))], dim=1), 0.3, self.training)
        return self.names(pooled).log_softmax(1), self.colours(pooled).log_softmax(1)


@cache
def shipped_classifier() -> Classifier:
    """Returns the shipped classifier in eval mode; its weights do not train."""
    model = Classifier()
    model.load_state_dict({name: weight.float() for name, weight in load_file(SHIPPED).items()})
    return model.eval().requires_grad_(False)


def main() -> None:
    """Trains, and writes the weights next to this file in half precision."""
    model = trained_classifier(torch.stack([drawings(vendor) for vendor in OTHERS]))
    save_file({name: weight.half() for name, weight in model.state_dict().items()}, SHIPPED)


def trained_classifier(drawn: Tensor, steps: int = STEPS, *, seed: int = 0) -> Classifier:
    """Trains a classifier on distorted renderings.

    Args:
        drawn: Drawings of each vendor, [V, 24, 6, 4, 64, 64].
        steps: Optimizer steps of BATCH images.
        seed: Determines the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
        for _ in progress(steps, "training the classifier"):
            vendors, names, colours = (torch.randint(n, (BATCH,), generator=generator) for n in drawn.shape[:3])
            images = rendered(drawn[vendors, names, colours], generator, scales=(0.65, 1.1), shift=3, turn=0.35)
            by_name, by_colour = model(distorted(warped(images, generator), generator))
            loss = F.nll_loss(by_name, names) - 0.1 * by_name.mean() + F.nll_loss(by_colour, colours)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


def warped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Stretches and bends images [B, 3, H, W] by random smooth displacements, as another hand may draw."""
    count, size = len(images), images.shape[-1]
    bend = 0.12 * torch.randn(count, 2, 4, 4, generator=generator)
    bend = F.interpolate(bend, (size, size), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    stretch = 1 + 0.25 * (2 * torch.rand(count, 2, generator=generator) - 1)
    affine = torch.diag_embed(stretch)
    grid = F.affine_grid(F.pad(affine, (0, 1)), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid + bend, padding_mode="border", align_corners=False)


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blurs half of the images [B, 3, H, W], and changes brightness, contrast and pixels, all by random amounts."""
    count = len(images)
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    share = (torch.rand(count, 1, 1, 1, generator=generator) - 0.3).clamp(min=0)
    images = images + share * (blurred - images)
    contrast = 0.7 + 0.5 * torch.rand(count, 1, 1, 1, generator=generator)
    brightness = 0.2 * torch.rand(count, 1, 1, 1, generator=generator) - 0.1
    noise = 0.06 * torch.rand(count, 1, 1, 1, generator=generator) * torch.randn(images.shape, generator=generator)
    return (0.5 + contrast * (images - 0.5) + brightness + noise).clamp(0, 1)


if __name__ == "__main__":
    main()
