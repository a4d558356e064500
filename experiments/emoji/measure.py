"""Measures the shipped base models, and draws their samples: `python -m experiments.emoji.measure`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline, StableDiffusionPipeline
from matplotlib import pyplot as plt
from torch import Tensor

from experiments.emoji.drawings import BASE, CAPTIONS, COLOURS, HELD_OUT, NAMES, OTHERS, TRAINED, drawings, rendered
from experiments.emoji.pretrain import SHIPPED as UNET
from experiments.emoji.pretrain_flow import SHIPPED as FLOW
from experiments.emoji.rewards import colour_match, name_match, recognised
from experiments.small_flow import equal_steps, load_flow

BASES = {"unet": (StableDiffusionPipeline.from_pretrained, UNET), "flow": (load_flow, FLOW)}
"""How a base model is loaded, and from where."""
FIGURES = {"unet": "samples.png", "flow": "flow_samples.png"}
STEPS, GUIDANCE = 20, 3.0  # of the figure
COUNT, BATCH = 120, 60  # samples that are measured, and samples at a time


def main() -> None:
    """Prints the table of the page, and writes the figures. Accuracies need the drawings, a download."""
    for vendor in (*OTHERS, BASE):
        by_name, by_colour = accuracy(vendor)
        print(f"classifier on renderings of {vendor}: names {by_name.mean():.3f}, colours {by_colour:.3f}")
        weakest = by_name.argsort()[:6].tolist()
        print("    " + ", ".join(f"{NAMES[index]} {by_name[index]:.2f}" for index in weakest))
    for base, file in FIGURES.items():
        pipeline = shipped(base)
        figure(pipeline).savefig(Path(__file__).with_name(file), dpi=100)
        print(f"{base}: VAE on renderings that it was not fitted to: {decibels(pipeline):.1f} dB")
        for steps, guidance in ((10, 1.0), (STEPS, 1.0), (STEPS, GUIDANCE)):
            for kind, captions in (("pretrained on", TRAINED), ("held out", HELD_OUT)):
                asked = list(captions) * (COUNT // len(captions))
                images = sampled(pipeline, asked, steps=steps, guidance=guidance)
                shares = [f"{float(by(images, asked).mean()):.2f}" for by in (name_match, colour_match, recognised)]
                print(f"| {steps} steps, guidance {guidance:g}, {kind} | {' | '.join(shares)} |", flush=True)


def shipped(base: str) -> Any:
    """Loads one of BASES."""
    load, folder = BASES[base]
    pipeline = load(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def decibels(pipeline: Any) -> float:
    """The peak signal-to-noise ratio of images that the VAE encodes and decodes."""
    images = rendered(drawings(BASE).flatten(0, 1), torch.Generator().manual_seed(1))
    with torch.no_grad():
        again = pipeline.vae.decode(pipeline.vae.encode(2 * images - 1).latent_dist.mode()).sample
    return float(-10 * torch.log10(((again / 2 + 0.5).clamp(0, 1) - images).square().mean()))


def accuracy(vendor: str, repeats: int = 10) -> tuple[Tensor, float]:
    """The classifier's accuracy on renderings of a vendor's drawings: for each name [24], and of the colours."""
    generator = torch.Generator().manual_seed(1)
    drawn = drawings(vendor).flatten(0, 1)
    images = torch.cat([rendered(drawn, generator) for _ in range(repeats)])
    captions = CAPTIONS * repeats
    with torch.no_grad():
        is_name, is_colour = name_match(images, captions), colour_match(images, captions)
    return is_name.view(repeats, len(NAMES), len(COLOURS)).mean((0, 2)), float(is_colour.mean())


def sampled(
    pipeline: DiffusionPipeline, captions: Sequence[str], *, steps: int, guidance: float, seed: int = 0
) -> Tensor:
    """Samples an image for each caption, [B, 3, 24, 24]: DDIM with the noise of DDPM (eta = 1), a flow by its ODE."""
    generator, call = torch.Generator().manual_seed(seed), cast(Any, pipeline)
    is_flow = isinstance(pipeline, StableDiffusion3Pipeline)
    extra = equal_steps(steps) if is_flow else {"num_inference_steps": steps, "eta": 1.0}
    batches = []
    for start in range(0, len(captions), BATCH):
        images = call(
            list(captions[start : start + BATCH]),
            guidance_scale=guidance,
            generator=generator,
            output_type="pt",
            **extra,
        ).images
        batches.append(images)
    return torch.cat(batches)


def figure(pipeline: DiffusionPipeline) -> plt.Figure:
    """A sample of each name in two colours: one that was pretrained with the name, and one that was not."""
    colours = [*COLOURS]
    trained = [f"a {colours[(i + 2 + i // 6) % 6]} {name}" for i, name in enumerate(NAMES)]
    rows = [trained[:12], trained[12:], HELD_OUT[:12], HELD_OUT[12:]]
    images = sampled(pipeline, [caption for row in rows for caption in row], steps=STEPS, guidance=GUIDANCE)
    plot, axes = plt.subplots(4, 12, figsize=(12, 5.4))
    plot.subplots_adjust(left=0.03, right=0.995, bottom=0.005, top=0.92, wspace=0.06, hspace=0.42)
    for axis, image, caption in zip(axes.flat, images, [c for row in rows for c in row], strict=True):
        axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axis.set_title(caption.removeprefix("a ").replace(" ", "\n"), fontsize=10, pad=3)
        axis.axis("off")
    for height, label in ((0.73, "pretrained on"), (0.22, "held out")):
        plot.text(0.008, height, label, rotation=90, va="center", fontsize=11)
    return plot


if __name__ == "__main__":
    main()
