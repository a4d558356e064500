"""DDPO on the Stable Diffusion of coloured shapes, until the mean reward of its images reaches the size's `reward`.

The reward is the size of an image's JPEG file in kB (Black et al. 2023, arXiv:2305.13301, section 5.1).
"""

import importlib
import io
import random
import tempfile
from collections import Counter
from typing import Any

import torch
from accelerate import PartialState
from PIL import Image
from tools.bench.measuring import Clock, Load, Measurement
from tools.bench.models import text_encoder_norm
from tools.bench.sizes import Size
from tools.bench.tasks.ddpo import forward_flops
from torch import Tensor, nn

CAPTIONS = [f"a {color} {shape}" for color in ("red", "green", "blue") for shape in ("circle", "square", "cross")]
LATENT, TOKENS = 8, 8  # the pipeline's latent width and prompt tokens
TRAININGS, MOST_EPOCHS = 2, 60


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side. A step is a whole training; its seed depends on the step and on the pair of processes.

    The warm-up ends after two epochs.
    """
    PartialState(cpu=size.device == "cpu")  # TRL logs before it prepares accelerate
    clock, rows, epochs = Clock(size.device), list[Counter[str]](), list[int]()
    pipelines = list[Any]()

    def training() -> None:
        seed = size.pair * TRAININGS + len(epochs)
        goal = size.reward if epochs else 0.0
        number, read, pipeline = train(package, size, settings, folder, seed=seed, goal=goal)
        epochs.append(number)
        rows.append(read)
        pipelines[:] = [pipeline]

    clock.time(training, TRAININGS)
    total, images = sum(rows[1:], Counter[str]()), size.scored * sum(epochs[1:])
    (pipeline,) = pipelines
    # The whole U-Net is trained, so a backward pass costs two forward passes.
    flops = forward_flops(pipeline.unet, LATENT, tokens=TOKENS) * (total["rows to sample"] + 3 * total["rows to train"])
    per_image = {name: number / images for name, number in total.items()}
    facts = {
        "text encoder's norm": text_encoder_norm(pipeline),
        "epochs": sum(epochs[1:]) / TRAININGS,
        **per_image,
    }
    return clock.measurement(size, Load(images, "images", flops), facts)


def train(
    package: str, size: Size, settings: dict[str, Any], folder: str, *, seed: int, goal: float
) -> tuple[int, Counter[str], Any]:
    """Trains until the mean reward of two epochs reaches the goal.

    Returns:
        The number of epochs, the rows that the U-Net read with and without gradients, and the pipeline.
    """
    module = importlib.import_module("trimtab_diffusion" if package == "trimtab_lm" else package)
    pipeline = module.DefaultDDPOStableDiffusionPipeline(f"{folder}/shapes", use_lora=False)
    draw, rewards, rows = random.Random(seed), list[float](), Counter[str]()

    def reward(images: Tensor, prompts: object, metadata: object) -> tuple[Tensor, dict[str, object]]:
        sizes = [jpeg_kb(image) for image in images]
        rewards.extend(sizes)
        return torch.tensor(sizes), {}

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = args[0] if args else kwargs["sample"]
        rows["rows to train" if torch.is_grad_enabled() else "rows to sample"] += len(sample)

    with tempfile.TemporaryDirectory() as logs:
        config = module.DDPOConfig(
            seed=seed,
            logdir=logs,
            project_kwargs={"project_dir": logs},
            sample_num_steps=10,
            sample_batch_size=size.scored // 2,
            sample_num_batches_per_epoch=2,
            train_batch_size=size.scored // 4,
            train_clip_range=1e-3,
            per_prompt_stat_tracking=True,
            mixed_precision="bf16" if size.device == "cuda" else "no",
            accelerator_kwargs={} if size.device == "cuda" else {"cpu": True},
            save_freq=1000,
            **settings,
        )
        trainer = module.DDPOTrainer(config, reward, lambda: (draw.choice(CAPTIONS), {}), pipeline)
        pipeline.unet.register_forward_pre_hook(count, with_kwargs=True)
        steps = 0
        for epoch in range(MOST_EPOCHS):
            steps = trainer.step(epoch, steps)
            latest = rewards[-2 * size.scored :]
            if epoch and sum(latest) / len(latest) >= goal:
                return epoch + 1, rows, pipeline
    raise RuntimeError(f"the mean reward is {sum(latest) / len(latest):.4f}, not {goal}, after {MOST_EPOCHS} epochs")


def jpeg_kb(image: Tensor) -> float:
    """Returns the size in kB of an image [3, H, W] in [0, 1] as a JPEG file of quality 95."""
    pixels = (image.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.tell() / 1000
