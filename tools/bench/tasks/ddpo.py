"""An epoch of DDPO with LoRA: samples images, scores them and trains on them."""

import importlib
import tempfile
from collections import Counter
from typing import Any

import torch
from accelerate import PartialState
from tools.bench.measuring import Clock, Load, Measurement
from tools.bench.models import text_encoder_norm
from tools.bench.sizes import Size
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

WORDS = ("cat", "dog", "bird", "fish")
ROWS = ("rows to sample", "rows to train")


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side, and counts the rows that the U-Net reads with and without gradients."""
    module = importlib.import_module("trimtab_diffusion" if package == "trimtab_lm" else package)
    PartialState(cpu=size.device == "cpu")  # TRL logs before it prepares accelerate
    clock, rows = Clock(size.device), Counter[str]()
    pipeline = module.DefaultDDPOStableDiffusionPipeline(f"{folder}/diffusion", use_lora=True)

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = args[0] if args else kwargs["sample"]
        rows["rows to train" if torch.is_grad_enabled() else "rows to sample"] += len(sample)

    drawn = iter(range(10**6))
    with tempfile.TemporaryDirectory() as logs:
        config = module.DDPOConfig(
            logdir=logs,
            project_kwargs={"project_dir": logs},
            sample_num_steps=size.denoising_steps,
            sample_batch_size=size.images // 2,
            sample_num_batches_per_epoch=2,
            train_batch_size=size.images // 2,
            mixed_precision="bf16" if size.device == "cuda" else "no",
            accelerator_kwargs={"cpu": size.device == "cpu"},
            save_freq=1000,
            **settings,
        )
        trainer = module.DDPOTrainer(config, brightness, lambda: (WORDS[next(drawn) % 4], {}), pipeline)
        flops = forward_flops(pipeline.unet, size.latent, tokens=77)
        pipeline.unet.register_forward_pre_hook(count, with_kwargs=True)
        updates, seen = [0], list[Counter[str]]()

        def epoch() -> None:
            updates.append(trainer.step(len(updates) - 1, updates[-1]))
            seen.append(rows.copy())

        clock.time(epoch, size.steps)
    first, last = seen[0], seen[-1]
    per_image = {name: (last[name] - first[name]) / size.steps / size.images for name in ROWS}
    norm = text_encoder_norm(pipeline)
    facts = {"text encoder's norm": norm, "updates": (updates[-1] - updates[1]) / size.steps, **per_image}
    return clock.measurement(size, needed(size, flops), facts)


def brightness(images: Tensor, prompts: object, metadata: object) -> tuple[Tensor, dict[str, object]]:
    """Returns the mean of each image's pixel values."""
    return torch.as_tensor(images).float().flatten(1).mean(1), {}


def forward_flops(unet: nn.Module, width: int, *, tokens: int) -> int:
    """Returns the FLOPs of the U-Net on one row of `width` x `width` latents, as torch counts them."""
    weight = next(unet.parameters())
    sample = weight.new_zeros(1, unet.config.in_channels, width, width)
    encoded = weight.new_zeros(1, tokens, unet.config.cross_attention_dim)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        unet(sample, torch.tensor(1, device=weight.device), encoded)
    return int(counter.get_total_flops())


def needed(size: Size, flops: int) -> Load:
    """Returns the load: per denoising step, guidance reads two rows, once to sample, and forward and backward to train.

    With frozen weights, a backward pass costs as much as a forward pass: the weights need no gradient.
    """
    images = size.steps * size.images
    return Load(images, "images", images * size.denoising_steps * 2 * 3 * flops)
