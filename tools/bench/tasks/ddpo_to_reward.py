"""DDPO on a small trained Stable Diffusion, until the mean reward of its images reaches a goal.

On coloured shapes the reward is the size of an image's JPEG file in kB (Black et al. 2023, arXiv:2305.13301, section
5.1). On emoji it is the mean of red minus the mean of blue, and the goal is a gain over the base model's mean for the
same captions: which captions an epoch draws does not decide whether it is reached.
"""

import importlib
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from PIL import Image
from tools.bench.measuring import Clock, Load, Measurement
from tools.bench.models import CAPTIONS, CLASSIFIER, EMOJI_GUIDANCE, EMOJI_STEPS, text_encoder_norm
from tools.bench.sizes import Size
from tools.bench.tasks.ddpo import forward_flops
from torch import Tensor, nn

SETTINGS: dict[str, dict[str, Any]] = {
    "shapes": {"sample_num_steps": 10, "per_prompt_stat_tracking": True},
    "emoji": {"sample_num_steps": EMOJI_STEPS, "sample_guidance_scale": EMOJI_GUIDANCE},
}
"""Of both sides, where a work does not change them."""
TRAININGS, MOST_EPOCHS = 2, 60


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side. A step is a whole training; its seed depends on the step and on the pair of processes.

    The warm-up ends after two epochs. What a classifier recognises is measured after the last training.
    """
    PartialState(cpu=size.device == "cpu")  # TRL logs before it prepares accelerate
    clock, rows, epochs = Clock(size.device), list[Counter[str]](), list[int]()
    pipelines = list[Any]()

    def training() -> None:
        seed = size.pair * TRAININGS + len(epochs)
        goal = size.goals[size.base] if epochs else float("-inf")
        number, read, pipeline = train(package, size, settings, folder, seed=seed, goal=goal)
        epochs.append(number)
        rows.append(read)
        pipelines.append(pipeline)

    clock.time(training, TRAININGS)
    total, images = sum(rows[1:], Counter[str]()), size.scored * sum(epochs[1:])
    pipeline = pipelines[-1]
    # The whole U-Net is trained, so a backward pass costs two forward passes.
    forward = forward_flops(pipeline.unet, pipeline.unet.config.sample_size, tokens=pipeline.tokenizer.model_max_length)
    flops = forward * (total["rows to sample"] + 3 * total["rows to train"])
    per_image = {name: number / images for name, number in total.items()}
    facts = {
        "text encoder's norm": text_encoder_norm(pipeline),
        "epochs": sum(epochs[1:]) / TRAININGS,
        **per_image,
    }
    measurement = clock.measurement(size, Load(images, "images", flops), facts)  # first: the rest takes memory too
    if size.base == "emoji":
        base = Path(folder, size.base)
        shares = [recognised(each, base) for each in (pipeline_of(package, base), *pipelines[1:])]
        after = {"recognised before": shares[0], "recognised": sum(shares[1:]) / TRAININGS}
        measurement = replace(measurement, facts={**facts, **after})
    return measurement


def train(
    package: str, size: Size, settings: dict[str, Any], folder: str, *, seed: int, goal: float
) -> tuple[int, Counter[str], Any]:
    """Trains until the mean reward of two epochs reaches the goal.

    Returns:
        The number of epochs, the rows that the U-Net read with and without gradients, and the pipeline.
    """
    module = module_of(package)
    base, score = Path(folder, size.base), {"shapes": jpeg_kb, "emoji": warmth}[size.base]
    pipeline = pipeline_of(package, base)
    before = json.loads((base / CAPTIONS).read_text())
    settings = SETTINGS[size.base] | settings
    captions = drawn([*before], times=settings.pop("captions_repeated", 1), seed=seed)
    gains, rows = list[float](), Counter[str]()

    def reward(images: Tensor, prompts: Sequence[str], metadata: object) -> tuple[Tensor, dict[str, object]]:
        scores = [float(score(image)) for image in images]
        gains.extend(value - before[prompt] for value, prompt in zip(scores, prompts, strict=True))
        return torch.tensor(scores), {}

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = args[0] if args else kwargs["sample"]
        rows["rows to train" if torch.is_grad_enabled() else "rows to sample"] += len(sample)

    with tempfile.TemporaryDirectory() as logs:
        config = module.DDPOConfig(
            seed=seed,
            logdir=logs,
            project_kwargs={"project_dir": logs},
            sample_batch_size=size.scored // 2,
            sample_num_batches_per_epoch=2,
            train_batch_size=size.scored // 4,
            train_clip_range=1e-3,
            mixed_precision="bf16" if size.device == "cuda" else "no",
            accelerator_kwargs={} if size.device == "cuda" else {"cpu": True},
            save_freq=1000,
            **settings,
        )
        trainer = module.DDPOTrainer(config, reward, lambda: (next(captions), {}), pipeline)
        pipeline.unet.register_forward_pre_hook(count, with_kwargs=True)
        steps = 0
        for epoch in range(MOST_EPOCHS):
            steps = trainer.step(epoch, steps)
            latest = gains[-2 * size.scored :]
            if epoch and sum(latest) / len(latest) >= goal:
                return epoch + 1, rows, pipeline
    raise RuntimeError(f"the mean reward is {sum(latest) / len(latest):.4f}, not {goal}, after {MOST_EPOCHS} epochs")


def drawn(captions: Sequence[str], *, times: int, seed: int) -> Iterator[str]:
    """Draws captions without end, each `times` times in a row."""
    draw = random.Random(seed)
    while True:
        yield from [draw.choice(captions)] * times


def module_of(package: str) -> Any:
    """Imports the side's package."""
    return importlib.import_module("trimtab_diffusion" if package == "trimtab_lm" else package)


def pipeline_of(package: str, folder: Path) -> Any:
    """Loads a pipeline as the side's trainer takes it, whose whole U-Net trains."""
    return module_of(package).DefaultDDPOStableDiffusionPipeline(str(folder), use_lora=False)


def recognised(pipeline: Any, folder: Path, repeats: int = 2) -> float:
    """Returns the share of a pipeline's images, sampled as in training, that still show their captions."""
    captions, classifier = [*json.loads((folder / CAPTIONS).read_text())], torch.export.load(folder / CLASSIFIER)
    generator, shares = torch.Generator().manual_seed(0), []
    for _ in range(repeats):
        images = pipeline.sd_pipeline(
            captions,
            num_inference_steps=SETTINGS["emoji"]["sample_num_steps"],
            guidance_scale=SETTINGS["emoji"]["sample_guidance_scale"],
            eta=1.0,
            generator=generator,
            output_type="pt",
        ).images
        shares.append(classifier.module()(images.float()).mean().item())
    return sum(shares) / repeats


def warmth(image: Tensor) -> Tensor:
    """Returns the mean of red minus the mean of blue of an image [3, H, W] in [0, 1]."""
    red, _, blue = image.float().mean((1, 2))
    return red - blue


def jpeg_kb(image: Tensor) -> float:
    """Returns the size in kB of an image [3, H, W] in [0, 1] as a JPEG file of quality 95."""
    pixels = (image.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.tell() / 1000
