"""Memory of a DDPO training: `trimtab memory ddpo --model ID_OR_FOLDER --sample_batch_size 8 --train_batch_size 4`.

The pipeline is built from its configuration files, and its weights are not read. The trainer runs an epoch of few
samples and steps on tensors without memory, whose bytes are counted.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from trimtab_common.config import CountFromZero, parse_config, setting
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer
from trimtab_diffusion.compat.trees import tree_leaves
from trimtab_diffusion.trajectories import Trajectories
from trimtab_lm.compat.tracing import LiveBytes, without_memory

from .subcommands import TUNED, errors_in_one_line
from .tables import print_gib

STEPS = 3
"""Denoising steps of the counted epoch: without the last, which may have no noise, there are two backward passes."""


@dataclass(kw_only=True)
class TrainedPipeline:
    """What trains."""

    model: str = setting("Hub id or folder of a diffusers pipeline.")
    lora_rank: CountFromZero = setting("Train LoRA adapters of this rank. 0: all weights of the denoiser.", default=4)


class Memory(NamedTuple):
    """Bytes on the GPU at the peak of sampling or of training.

    Attributes:
        weights: the pipeline's, and those of the frozen denoiser to which a KL penalty without adapters compares.
        gradients: those of the trained weights.
        optimizer: AdamW's two moments of these weights.
        recorded: the epoch's images and their trajectories.
        activations: what else is in use while a batch is sampled, or while gradients are computed.
    """

    weights: int
    gradients: int
    optimizer: int
    recorded: int
    activations: int


def without_weights(source: str) -> DiffusionPipeline:
    """A pipeline of the hub or of a folder on torch's meta device, built from its configuration files."""

    def part(name: str, library: str | None, kind: str | None) -> Any:
        if library is None or kind is None or name == "safety_checker":
            return None
        loaded = getattr(import_module(library), kind)
        if not issubclass(loaded, nn.Module):
            return loaded.from_pretrained(source, subfolder=name)
        with torch.device("meta"):
            if library == "transformers":
                return loaded(loaded.config_class.from_pretrained(source, subfolder=name))
            return loaded.from_config(loaded.load_config(source, subfolder=name))

    index = DiffusionPipeline.load_config(source)
    parts = {name: value for name, value in index.items() if not name.startswith("_")}
    kind = getattr(diffusers, index["_class_name"])
    return kind(**{name: part(name, *value) if isinstance(value, list) else value for name, value in parts.items()})


def counted_epoch(config: DDPOConfig) -> DDPOConfig:
    """The config of an epoch with the same batches, of few samples and steps, and one update."""
    samples = math.lcm(config.sample_batch_size, config.train_batch_size)
    return replace(
        config,
        sample_num_steps=min(config.sample_num_steps, STEPS),
        sample_num_batches_per_epoch=samples // config.sample_batch_size,
        sample_window=0,
        group_size=1,
        per_prompt_stat_tracking=False,
        eval_freq=0,
        eval_num_steps=None,
        train_num_inner_epochs=1,
        train_timestep_fraction=1.0,
        train_gradient_accumulation_steps=samples // config.train_batch_size,
        train_use_8bit_adam=False,  # which needs a GPU
        train_compile=None,
        mixed_precision="no" if config.mixed_precision == "no" else "bf16",  # a CPU has no fp16
        accelerator_kwargs={"cpu": True, "device_placement": False},
        resume_from="",
        log_with="none",
    )


def bytes_of(path: Trajectories, steps: int) -> int:
    """The bytes of trajectories if they had so many steps."""
    conditions = [leaf for leaf in tree_leaves(path.conditions) if isinstance(leaf, Tensor)]
    leaves, recorded = [path.latents, path.logprobs, *conditions], len(path.schedule.steps)
    return path.first.nbytes + sum(leaf[:, 0].nbytes * (steps if leaf.shape[1] == recorded else 1) for leaf in leaves)


def memory(pipeline: DiffusionPipeline, config: DDPOConfig, *, lora_rank: int) -> dict[str, Memory]:
    """The memory of sampling and of training, from the second epoch on.

    The samples and steps that the counted epoch lacks add what is recorded of them, and nothing else.

    Args:
        pipeline: as `without_weights` builds it; the call changes it.
        lora_rank: the rank of the adapters that train. 0: all weights of the denoiser.
    """
    live: LiveBytes
    peaks, epoch = list[int](), counted_epoch(config)

    def reward(images: Tensor, prompts: tuple[str, ...], metadata: object) -> list[float]:
        peaks.append(live.peak)
        return [0.0] * len(prompts)

    def begin_training(*_: object) -> None:
        live.peak = 0

    wrapped = DDPOStableDiffusionPipeline(pipeline, use_lora=lora_rank > 0, lora_rank=lora_rank)
    options: dict[str, Any] = {"image_samples_hook": begin_training, "other_rewards": {}}
    with without_memory():
        trainer = DDPOTrainer(epoch, reward, lambda: ("a picture", {}), wrapped, **options)
    trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: peaks.append(live.peak))
    modules = [part for part in wrapped.sd_pipeline.components.values() if isinstance(part, nn.Module)]
    if trainer.reference is not None:
        with trainer.reference() as frozen:
            modules.append(frozen)
    weights = {id(weight): weight for part in modules for weight in chain(part.parameters(), part.buffers())}
    with LiveBytes(weights.values()) as live:
        samples = trainer.draw(0)
        images = sum(batch[0].nbytes for batch in samples.batches) // epoch.samples_per_epoch
        counted, real = (
            bytes_of(samples.trajectories, steps) // epoch.samples_per_epoch
            for steps in (epoch.sample_num_steps, config.sample_num_steps)
        )
        del samples
        trainer.step(0, 0)
    sampling, *_, training = peaks  # of the first batch, and until the update

    trained = [weight for weight in wrapped.denoiser.parameters() if weight.requires_grad]
    gradients = sum(weight.nbytes for weight in trained)
    moments = 2 * sum(weight.numel() * (1 if config.train_use_8bit_adam else weight.itemsize) for weight in trained)
    trajectories = 0 if config.trajectory_on_cpu else config.samples_per_epoch * real
    copies = trajectories if config.sample_num_batches_per_epoch > 1 else 0  # while batches are joined
    sampling -= config.sample_batch_size * (images + counted)
    training -= epoch.samples_per_epoch * (images + counted) + gradients
    size, recorded = sum(weight.nbytes for weight in weights.values()), config.samples_per_epoch * images + trajectories
    return {
        "sampling": Memory(size, 0, moments, recorded, max(sampling, copies)),
        "training": Memory(size, gradients, moments, recorded, training),
    }


def main(argv: Sequence[str]) -> int:
    """Print the table of the pipeline that the words of the command line name; the exit status."""
    kinds = TrainedPipeline, DDPOConfig
    recipe = {"exp_name": "ddpo", **TUNED["ddpo"]}  # exp_name is by default the program's file, which --help would show
    run, config = parse_config(*kinds, argv=argv, description=__doc__, recipe=recipe, program="trimtab memory ddpo")
    warnings.simplefilter("ignore")
    diffusers.utils.logging.set_verbosity_error()
    with errors_in_one_line("memory ddpo"):
        rows = memory(without_weights(run.model), config, lora_rank=run.lora_rank)
    print(f"{run.model} on one GPU, GiB at the peak of each:")
    print_gib(["part", *Memory._fields], rows.items())
    return 0
