"""Runs DDPO on the same images however an epoch is divided; each process writes its results into a folder.

Each process draws the whole epoch's images from the same noise, and keeps its share.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests.diffusion import tiny
from tests.processes import process_of_many
from torch import Tensor

from trimtab_common.stats import world_size
from trimtab_diffusion.ddpo import DDPOConfig, DDPOTrainer
from trimtab_diffusion.ddpo.sampling import Samples
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.trajectories import Trajectories

PROMPTS = ["a cat", "two dogs", "a red ant", "an owl"]
COUNT = 8  # pictures of an epoch, over all processes
EPOCHS = 2

KINDS: dict[str, Callable[..., Any]] = {
    "sd": tiny.stable_diffusion,
    "sdxl": tiny.stable_diffusion_xl,
    "sd3": tiny.stable_diffusion_3,
}
CASES: dict[str, dict[str, Any]] = {
    "is": {"train_num_inner_epochs": 2},
    "sf": {"estimator": "sf"},
    "per_prompt": {
        "per_prompt_stat_tracking": True,
        "per_prompt_stat_tracking_min_count": 2,
        "train_num_inner_epochs": 2,
    },
    "groups": {
        "group_size": 2,
        "init_kl_coef": 0.5,
        "adap_kl_ctrl": True,
        "target": 1,
        "horizon": 20,
        "train_num_inner_epochs": 2,
        "eval_freq": 2,
        "eval_num_steps": 4,
    },
}


def brightness(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Tensor:
    return images.mean((1, 2, 3))


class Turns:
    """Returns prompts in turn; the list may begin anywhere."""

    def __init__(self, prompts: list[str] = PROMPTS):
        self.prompts, self.drawn = prompts, 0

    def __call__(self) -> tuple[str, dict[str, Any]]:
        self.drawn += 1
        return self.prompts[(self.drawn - 1) % len(self.prompts)], {"number": self.drawn - 1}


def config(folder: str, **settings: Any) -> DDPOConfig:
    """Returns a config with few images and steps, no logs and float32, changed by `settings`."""
    defaults: dict[str, Any] = {
        "log_with": None,
        "logdir": folder,
        "mixed_precision": "no",
        "sample_num_steps": 3,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 4,
        "train_batch_size": 4,
        "train_gradient_accumulation_steps": 2,
        "train_clip_range": 1e-3,
        "train_max_grad_norm": 1e6,
        "sample_guidance_scale": 3.0,
    }
    return DDPOConfig(**defaults | settings)


def trainer(
    folder: str, pipeline: Any = None, reward: Any = brightness, *, use_lora: bool = False, **settings: Any
) -> DDPOTrainer:
    """Returns a trainer, of a tiny Stable Diffusion by default; `settings` go to the config or to the trainer."""
    names = ("image_samples_hook", "other_rewards", "prompt_function", "kind", "eval_prompts")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    base = KINDS[arguments.pop("kind", "sd")]() if pipeline is None else pipeline
    prompts = arguments.pop("prompt_function", None) or Turns()
    with tiny.from_seed(1):  # adapters are random at the start
        wrapped = DDPOStableDiffusionPipeline(base, use_lora=use_lora)
    return DDPOTrainer(config(folder, **settings), reward, prompts, wrapped, **arguments)


def weights(trained: DDPOTrainer) -> dict[str, Tensor]:
    """Returns the trainable weights by name."""
    named = trained.sd_pipeline.denoiser.named_parameters()
    return {name: weight.detach().clone() for name, weight in named if weight.requires_grad}


def samples_of(trained: DDPOTrainer) -> list[Samples]:
    """Returns a list to which every epoch adds its samples."""
    kept: list[Samples] = []
    usual = trained.draw

    def draw(epoch: int) -> Samples:
        kept.append(usual(epoch))
        return kept[-1]

    trained.draw = draw  # type: ignore[method-assign]
    return kept


class SameSamples(DDPOTrainer):
    """Samples the epoch of all processes, two images at a time, and keeps this process's share."""

    def draw(self, epoch: int) -> Samples:
        generator, parts, rewards = tiny.generator(100 + epoch), [], []
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        for start in range(0, COUNT, 2):
            sampled = self.sd_pipeline(
                prompt=prompts[start : start + 2],
                generator=generator,
                output_type="pt",
                num_inference_steps=3,
                guidance_scale=3.0,
                negative_prompt=[""] * 2,
            )
            parts.append(sampled.trajectories)
            rewards.append(brightness(sampled.images, (), ()))
        each = COUNT // world_size()
        share = slice(each * self.accelerator.process_index, each * (self.accelerator.process_index + 1))
        batches = slice(share.start // 2, share.stop // 2)
        scores = torch.cat(rewards).float()[share]
        batch = [sampled.images, ("", ""), (), scores[-2:], {}]
        return Samples(Trajectories.joined(parts[batches]), prompts[share], scores, {}, [batch])


def run(name: str, *, processes: int = 1) -> dict[str, Any]:
    """Runs a case for two epochs in float64; returns weights, advantages, prompt statistics and logs."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each = COUNT // processes
        settings = config(
            folder,
            sample_num_batches_per_epoch=each // 2,
            train_batch_size=each // 2,
            train_max_grad_norm=0.5,
            **CASES[name],
        )
        pipeline, others = (
            tiny.stable_diffusion(dtype=torch.float64),
            {"red": lambda images, *_: images[:, 0].mean((1, 2))},
        )
        prompts = [(prompt, {}) for prompt in PROMPTS]
        ddpo = SameSamples(settings, brightness, Turns(), pipeline, other_rewards=others, eval_prompts=prompts)
        advantages_of_epochs: list[Tensor] = []
        usual = ddpo.advantages

        def advantages(prompts: list[str], rewards: Tensor) -> Tensor:
            advantages_of_epochs.append(usual(prompts, rewards))
            return advantages_of_epochs[-1]

        ddpo.advantages = advantages  # type: ignore[method-assign]
        history = []
        for epoch in range(EPOCHS):
            ddpo.step(epoch, ddpo.global_step)
            history.append(
                {key: value for key, value in ddpo.last_stats.items() if not key.startswith(("time/", "memory/"))}
            )
    return {
        "weights": weights(ddpo),
        "advantages": torch.stack(advantages_of_epochs),
        "prompt_stats": ddpo.prompt_stats.state_dict() if ddpo.prompt_stats else None,
        "history": history,
    }


ORDINARY: dict[str, dict[str, Any]] = {
    "lora": {"use_lora": True, "init_kl_coef": 0.1},
    "sdxl_rwr": {"kind": "sdxl", "estimator": "rwr", "rwr_beta": 100.0},
    "sd3": {"kind": "sd3", "init_kl_coef": 0.1},
}


def ordinary(name: str) -> dict[str, Any]:
    """Runs one epoch with one or two updates as users do: each process draws its own images."""
    sizes = {"sample_num_batches_per_epoch": 2, "train_batch_size": 1, "train_gradient_accumulation_steps": 2}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddpo = trainer(folder, **sizes | ORDINARY[name])
        before, samples = weights(ddpo), samples_of(ddpo)
        ddpo.step(0, 0)
        return {
            "before": before,
            "weights": weights(ddpo),
            "noise": samples[0].trajectories.first,
        }


def main(folder: str) -> None:
    with process_of_many() as (rank, world_size):
        results: dict[str, Any] = {name: run(name, processes=world_size) for name in CASES}
        results |= {name: ordinary(name) for name in ORDINARY}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
