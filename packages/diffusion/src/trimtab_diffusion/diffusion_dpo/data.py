"""Pairs of pictures with a caption: their checks, and their latents."""

import hashlib
import math
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from diffusers import AsymmetricAutoencoderKL, AutoencoderKL, ConsistencyDecoderVAE, DiffusionPipeline
from PIL import Image
from torch import Tensor

from trimtab_common.images import to_pil
from trimtab_diffusion.compat.trees import tree_leaves
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.steps import Steps
from trimtab_diffusion.training.sampling import SAMPLES_PER_PROMPT
from trimtab_diffusion.trajectories import Arguments, Schedule, Trajectories, joined

PICTURES = ("chosen", "rejected")
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # a broken PNG is a SyntaxError


class Pairs(Protocol):
    """A dataset, or a list of dicts."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def check_autoencoder(pipeline: DiffusionPipeline | DDPOStableDiffusionPipeline) -> None:
    """ValueError where a pipeline's autoencoder, if any, gives its latents in another way than Stable Diffusion's."""
    stock: Any = pipeline.sd_pipeline if isinstance(pipeline, DDPOStableDiffusionPipeline) else pipeline
    vae = stock.components.get("vae")
    if not isinstance(vae, AutoencoderKL | AsymmetricAutoencoderKL | ConsistencyDecoderVAE):
        came = "no autoencoder" if vae is None else f"an {type(vae).__name__}"
        raise ValueError(
            f"{type(stock).__name__} has {came}. Diffusion-DPO noises the latents of an AutoencoderKL: use a pipeline "
            "with one, such as Stable Diffusion 1 to 3 or SDXL."
        )


def check_pairs(pairs: Pairs) -> None:
    """Checks all rows before any work; warns of rows whose two pictures are the same.

    Raises:
        ValueError: there are no rows, a column is missing, a caption is empty, a picture cannot be read, or pictures
            differ in size.
    """
    if not len(pairs):
        raise ValueError("The dataset has no pairs. Pass rows with `prompt`, `chosen` and `rejected`.")
    size, alike = None, list[int]()
    for i in range(len(pairs)):
        row = row_of(pairs, i)
        if missing := [name for name in ("prompt", *PICTURES) if row.get(name) is None]:
            raise ValueError(
                f"Row {i} has no {' and no '.join(missing)}; it has {', '.join(row)}. Each row needs a caption "
                "`prompt` and two pictures, `chosen` and `rejected`."
            )
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise ValueError(f"Row {i} has the prompt {row['prompt']!r}. Write a caption, or leave the row out.")
        chosen, rejected = (picture_of(row[name], f"{name} of row {i}") for name in PICTURES)
        for name, came in (("chosen", chosen.size), ("rejected", rejected.size)):
            size = size or came
            if came != size:
                raise ValueError(
                    f"The {name} picture of row {i} has {came[0]} x {came[1]} pixels, the first picture has {size[0]} "
                    f"x {size[1]}. Resize all pictures to one size, that of the pipeline."
                )
        if chosen.tobytes() == rejected.tobytes():
            alike.append(i)
    if alike:
        warnings.warn(
            f"{len(alike)} of {len(pairs)} rows have the same picture as chosen and as rejected, the first of them row "
            f"{alike[0]}: nothing is learnt from these. Correct them, or leave them out.",
            stacklevel=3,
        )


def row_of(rows: Pairs, number: int, source: str = "") -> Mapping[str, Any]:
    """A row of a dataset, which decodes its pictures; `source` ends its name in errors.

    Raises:
        ValueError: a picture cannot be read.
    """
    try:
        return rows[number]
    except UNREADABLE as error:
        raise ValueError(
            f"A picture of row {number}{source} cannot be read: {error}. Replace the file, or leave the row out."
        ) from error


def check_inputs(pipeline: DDPOStableDiffusionPipeline, size: tuple[int, int]) -> None:
    """Checks a pipeline for pictures of a size, width and height in pixels; warns if it is far from its own.

    Raises:
        ValueError: its autoencoder or its denoiser cannot divide the size, or its `call_kwargs` have arguments of the
            trainer.
    """
    passed = {"prompt", "negative_prompt", "generator", "num_inference_steps", "output_type", "height", "width"}
    if clash := sorted(pipeline.call_kwargs.keys() & (passed | {pipeline.guidance_argument, *SAMPLES_PER_PROMPT})):
        raise ValueError(
            f"call_kwargs has {', '.join(clash)}, which the trainer passes itself: it takes the size of the pictures, "
            "each of their captions once and no guidance. Leave it out."
        )
    config, scale, words = pipeline.denoiser.config, pipeline.sd_pipeline.vae_scale_factor, f"{size[0]} x {size[1]}"
    factor, native = scale * (config.get("patch_size") or 1), config.get("sample_size")
    if size[0] % factor or size[1] % factor:
        raise ValueError(
            f"The pictures have {words} pixels, and {type(pipeline.sd_pipeline).__name__} takes sides that are "
            f"multiples of {factor}. Resize or crop the pictures."
        )
    if isinstance(native, int) and not 1 / 2 <= math.sqrt(size[0] * size[1]) / (native * scale) <= 2:
        warnings.warn(
            f"The pictures have {words} pixels, and the pipeline's own size is {native * scale} x {native * scale}: it "
            "draws badly at sizes that are far from that. Resize the pictures.",
            stacklevel=3,
        )


def picture_of(value: Any, name: str) -> Image.Image:
    """A picture in RGB.

    Raises:
        ValueError: the value is none, or its file cannot be read.
    """
    try:
        return to_pil(value)
    except (*UNREADABLE, TypeError) as error:
        raise ValueError(f"The {name} is no picture: {error}") from error


def content_of(row: Mapping[str, Any]) -> list[str]:
    """The caption and hashes of the pictures of a checked row, for the fingerprint of a dataset."""
    pixels = [picture_of(row[name], name).tobytes() for name in PICTURES]
    return [row["prompt"], *(hashlib.sha256(each).hexdigest() for each in pixels)]


def pixels_of(pictures: list[Image.Image]) -> Tensor:
    """Pixels [B, 3, H, W] within [-1, 1]."""
    return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in pictures]).float() / 127.5 - 1


@torch.no_grad()
def encoded(pipeline: DDPOStableDiffusionPipeline, pairs: Pairs, *, batch_size: int) -> Trajectories:
    """The latents of all pictures, and what the denoiser reads of their captions once for each caption, on the CPU.

    The pipeline is called for the new captions of each batch, for two steps, to see what it passes to its denoiser.

    Args:
        pipeline: without guidance it passes its denoiser arguments that no step changes.
        pairs: N checked rows.
        batch_size: rows that have room at a time.

    Returns:
        Trajectories of N pairs with two steps: the chosen picture, then the rejected one; the schedule has all noise
        levels of the pipeline's training.

    Raises:
        ValueError: the denoiser's conditions depend on the latents, its latents are not those of the autoencoder, or
            latents are not finite.
    """
    vae, device = pipeline.sd_pipeline.vae, pipeline.device
    latents, conditions, dtype = list[Tensor](), list[Arguments](), vae.dtype
    known, captions = dict[str, int](), list[int]()  # each caption's row in the conditions, and that of each pair
    if vae.config.get("force_upcast") and dtype == torch.float16:
        vae.to(torch.float32)  # as in diffusers' pipelines: SDXL's autoencoder overflows in float16
    call: dict[str, Any] = {pipeline.guidance_argument: 1.0, "num_inference_steps": 2, "output_type": "latent"}
    for start in range(0, len(pairs), batch_size):
        rows = [pairs[i] for i in range(start, min(start + batch_size, len(pairs)))]
        pixels = pixels_of([picture_of(row[name], name) for name in PICTURES for row in rows])
        clean = latents_of(vae, pixels.to(device, vae.dtype)).float()
        if not bool(clean.isfinite().all()):
            raise ValueError(
                f"The autoencoder's latents of the pictures in rows {start} to {start + len(rows) - 1} are not finite "
                f"in {vae.dtype}. Set mixed_precision='no', or use an autoencoder for half precision."
            )
        latents.append(torch.stack(clean.cpu().chunk(2), 1))
        if new := [text for text in dict.fromkeys(row["prompt"] for row in rows) if text not in known]:
            call |= {"height": pixels.shape[2], "width": pixels.shape[3], "prompt": new}
            seen = pipeline(generator=torch.Generator(device).manual_seed(0), storage_device="cpu", **call).trajectories
            _check(seen, clean, pipeline)
            conditions.append(seen.conditions)
            known |= {text: len(known) + i for i, text in enumerate(new)}
        captions += [known[row["prompt"]] for row in rows]
    if vae.dtype != dtype:
        vae.to(dtype)
    found, steps, whole = seen.schedule, Steps.of_training(pipeline.scheduler), torch.cat(latents)
    return Trajectories(
        Schedule(steps, steps.timesteps, found.name, dtype=found.dtype),
        first=whole[:, 0],
        latents=whole,
        logprobs=torch.zeros(whole.shape[:2]),
        conditions=joined(conditions, dim=0),
        condition_rows=torch.tensor(captions),
    )


def latents_of(vae: Any, pixels: Tensor) -> Tensor:
    """The latents of pixels [B, 3, H, W]: the mode of the autoencoder's distribution, in the denoiser's units."""
    mode, config = vae.encode(pixels).latent_dist.mode(), vae.config
    if config.get("latents_mean") is None or config.get("latents_std") is None:
        return (mode - (config.get("shift_factor") or 0.0)) * config.scaling_factor
    mean, std = (mode.new_tensor(numbers).view(1, -1, 1, 1) for numbers in (config.latents_mean, config.latents_std))
    return (mode - mean) * config.scaling_factor / std


def _check(seen: Trajectories, clean: Tensor, pipeline: DDPOStableDiffusionPipeline) -> None:
    kind = type(pipeline.sd_pipeline).__name__
    if any(isinstance(leaf, Tensor) and leaf.shape[1] > 1 for leaf in tree_leaves(seen.conditions)):
        raise ValueError(
            f"{kind} passes its denoiser arguments that depend on the latents, which noised pictures have not. Use a "
            "pipeline of text alone."
        )
    if seen.first.shape[1:] != clean.shape[1:]:
        raise ValueError(
            f"{kind} denoises latents of {list(seen.first.shape[1:])}, and its autoencoder encodes a picture as "
            f"{list(clean.shape[1:])}. Diffusion-DPO trains pipelines whose latents are the autoencoder's own, such as "
            "Stable Diffusion 1 to 3 and SDXL."
        )
    if not torch.equal(seen.schedule.times.float(), seen.schedule.steps.timesteps.float()):
        raise ValueError(
            f"{kind} rescales the timesteps for its denoiser, which Diffusion-DPO does not know. Use another."
        )
