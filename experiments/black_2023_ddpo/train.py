"""DDPO: rewards for what a diffusion model draws (Black et al. 2023, arXiv:2305.13301). The numbers: README.md."""

import os
from collections.abc import Container, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor
from tqdm.auto import tqdm

from experiments.black_2023_ddpo.bases import BASES
from experiments.black_2023_ddpo.pretrain import STEPS, shapes_pipeline
from experiments.black_2023_ddpo.report import CLAIM, HELD_OUT, TITLE, read
from experiments.emoji.judging import AFTER, BEFORE, CONTROL, DURING, QUALITY, SHOWN, at, contact_sheet, largest_kept
from experiments.emoji.pretrain import SHIPPED as EMOJI
from experiments.reports import report_on_run
from experiments.run_folders import append, close_folder, from_recipe, open_folder, write_per_prompt
from trimtab_common.config import to_flat_dict
from trimtab_common.tracking import progress
from trimtab_diffusion import prompts as prompt_sets
from trimtab_diffusion.ddpo import DDPOConfig, DDPOTrainer
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.prompts import Prompts
from trimtab_diffusion.rewards import (
    AestheticScore,
    ClipAlignment,
    jpeg_compressibility,
    jpeg_incompressibility,
)

PAPER = "black_2023_ddpo"
RECIPE = Path(__file__).with_name("recipe.yaml")
OF_FILES = {"jpeg_incompressibility": jpeg_incompressibility, "jpeg_compressibility": jpeg_compressibility}
OF_MODELS = ("aesthetic", "clip_alignment")


@dataclass(frozen=True)
class RunConfig:
    """The rewards and the model."""

    reward: list[str] = field(
        default_factory=lambda: ["warmth", "jpeg_incompressibility"],
        metadata={
            "help": "One training for each: warmth, colour_alignment, agreement, match_probability, recognised, "
            "name_match or colour_match (of emoji); rgb_alignment, colour_match or shape_match (of shapes); "
            "jpeg_incompressibility, jpeg_compressibility, aesthetic, clip_alignment; random, the "
            "control, which says nothing about the image."
        },
    )
    model: str = field(
        default="emoji",
        metadata={
            "help": "Hub id or folder of a diffusers pipeline; emoji and shapes are shipped with the experiments."
        },
    )
    pretrain_steps: int = field(
        default=STEPS, metadata={"help": "Pretraining steps of shapes; the shipped one has the default."}
    )
    prompts: str = field(
        default="simple_animals",
        metadata={"help": "For other models: simple_animals, imagenet_animals, nouns_activities or a text file."},
    )
    hold_out: bool = field(
        default=False,
        metadata={
            "help": "Train emoji on the captions of its pretraining, shapes on half of them; measure the others apart."
        },
    )
    use_lora: bool = field(default=False, metadata={"help": "Train adapters, not the whole U-Net."})
    lora_rank: int = field(default=4, metadata={"help": "Rank of the adapters."})
    aesthetic_head: str | None = field(
        default=None,
        metadata={"help": "For aesthetic: file, folder or hub id of LAION's sac+logos+ava1-l14-linearMSE"},
    )
    eval_pictures: int = field(
        default=144,
        metadata={"help": "Pictures from the same noise, before, halfway and after, of all prompts in turn."},
    )


def random_numbers(images: Tensor, prompts: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
    """Returns a number without a meaning for each image, [B], the same for the same image.

    The numbers are uniform in [0, 0.05): they vary about as much as the kB of the files of one caption, so that
    reward-weighted regression weighs its samples as unevenly as with that reward.
    """
    return 0.05 * (1e5 * images.double().flatten(1).sum(1)).frac().float()


def measures(reward: str, run: RunConfig) -> tuple[Any, dict[str, Any]]:
    """Returns the reward to train on, and other measures by name, which are only logged."""
    base = BASES.get(run.model)
    known = {**OF_FILES, **(base.measures if base else {})}
    if reward == "aesthetic":
        chosen: Any = AestheticScore(run.aesthetic_head or _no_head())
    elif reward == "clip_alignment":
        chosen = ClipAlignment()
    elif reward in known:
        chosen = known[reward]
    elif reward == CONTROL:
        chosen = random_numbers
    else:
        raise SystemExit(
            f"--reward {reward} is none of {', '.join([*known, *OF_MODELS, CONTROL])}, for --model {run.model}."
        )
    watched = [*base.watched] if base else []
    if base and reward == CONTROL:
        watched = [*base.measures]
    watched += [*OF_FILES] if reward == CONTROL else [] if reward in OF_FILES else ["jpeg_incompressibility"]
    return chosen, {name: known[name] for name in watched if name != reward}


def _no_head() -> str:
    raise SystemExit("--reward aesthetic needs --aesthetic_head, the weights of LAION's predictor.")


def folder_of(run: RunConfig) -> str:
    """Returns the folder or hub id of the model."""
    if run.model == "shapes":
        return str(shapes_pipeline(run.pretrain_steps))
    return str(EMOJI) if run.model == "emoji" else run.model


def prompt_set(run: RunConfig, *, training: bool) -> Prompts:
    """Returns the prompts of the model: those to train on, or all."""
    if base := BASES.get(run.model):
        captions = base.trained if training and run.hold_out else base.captions
        return Prompts(captions, ({},) * len(captions))
    if run.prompts in ("simple_animals", "imagenet_animals", "nouns_activities"):
        return getattr(prompt_sets, run.prompts)()
    return prompt_sets.from_file(run.prompts)


def pictures(pipeline: DDPOStableDiffusionPipeline, asked: Sequence[str], ddpo: DDPOConfig) -> Tensor:
    """Samples an image for each prompt, [B, 3, H, W] on the CPU, as in training; the noise of all calls is the same."""
    generator = torch.Generator(pipeline.device).manual_seed(ddpo.seed)
    negative = {"negative_prompt": ddpo.negative_prompts or ""} if ddpo.is_guided else {}
    batches = []
    for start in range(0, len(asked), ddpo.sample_batch_size):
        some = list(asked[start : start + ddpo.sample_batch_size])
        images = pipeline.sd_pipeline(
            some,
            num_inference_steps=ddpo.sample_num_steps,
            guidance_scale=ddpo.sample_guidance_scale,
            eta=ddpo.sample_eta,
            generator=generator,
            output_type="pt",
            **{name: [text] * len(some) for name, text in negative.items()},
        ).images
        batches.append(images.float().cpu())
    return torch.cat(batches)


def mean_of_each(values: Tensor, asked: Sequence[str], prompts: Container[str]) -> list[float]:
    """The mean of the values [B] of each of these prompts that was asked for, in the order of asking."""
    chosen = [prompt for prompt in dict.fromkeys(asked) if prompt in prompts]
    return [float(values[[one == prompt for one in asked]].mean()) for prompt in chosen]


def train(reward: str, run: RunConfig, ddpo: DDPOConfig, folder: Path) -> dict[str, tuple[float, float]]:
    """Trains on one reward, and writes history, pictures and pipeline; returns each measure before and after."""
    function, others = measures(reward, run)
    drawing = DiffusionPipeline.from_pretrained(folder_of(run))
    pipeline = DDPOStableDiffusionPipeline(drawing, use_lora=run.use_lora, lora_rank=run.lora_rank)
    asking, learnt = prompt_set(run, training=False), prompt_set(run, training=True)
    trainer = DDPOTrainer(ddpo, function, learnt, pipeline, other_rewards=others)
    is_main = trainer.accelerator.is_main_process
    if is_main:
        open_folder(folder, to_flat_dict(run, ddpo) | {"reward": reward}, goes_on=bool(ddpo.resume_from))
    known = zip(asking.prompts, asking.metadata, strict=True)
    asked, metadata = zip(*islice(cycle(known), run.eval_pictures), strict=True)
    means: dict[str, float] = {}
    of_prompts: dict[str, list[float]] = {}
    trainer.run.about = to_flat_dict(run) | {"reward": reward}
    with trainer.tracker as tracker:
        for sheet, epochs in ((BEFORE, 0), (DURING, ddpo.num_epochs // 2), (AFTER, ddpo.num_epochs)):
            learn(trainer, folder if is_main else None, epochs)
            images = pictures(pipeline, asked, ddpo)
            tracker.images(Path(sheet).stem, list(images[:SHOWN]), asked[:SHOWN], trainer.global_step)
            for measure, by in {reward: function, **others}.items():
                values = by(images, asked, metadata)
                means[at(sheet, measure)] = float(values.mean())
                for end, prompts in (("", learnt.prompts), (HELD_OUT, set(asking.prompts) - set(learnt.prompts))):
                    of_prompts[at(sheet, measure + end)] = mean_of_each(values, asked, prompts)
            if is_main:
                contact_sheet(images[:SHOWN]).save(folder / sheet)
        final = {f"final/{measure}": means[measure] for measure in (reward, *others)}
        final |= {"final/reward_kept": largest_kept(means, reward)} if QUALITY in means else {}
        tracker.finish(final | {"final/reward": means[reward]})
    if is_main:
        trainer.save_pretrained(folder / "pipeline")
        write_per_prompt(folder, {name: values for name, values in of_prompts.items() if values})
        close_folder(folder, means)
    return {measure: (means[at(BEFORE, measure)], means[measure]) for measure in (reward, *others)}


def learn(trainer: DDPOTrainer, folder: Path | None, epochs: int) -> None:
    """Runs the epochs that are left of the first `epochs`, and appends the statistics of each to the history."""
    config = trainer.config
    for epoch in progress(range(trainer.first_epoch, epochs), "DDPO epochs"):
        trainer.step(epoch, trainer.global_step)
        if (epoch + 1) % config.save_freq == 0:
            trainer.save_checkpoint()
        if folder is None:
            continue
        append(folder, {"step": trainer.global_step, **trainer.last_stats})
        if epoch % 5 == 0 or epoch + 1 == config.num_epochs:
            watched = [f"{name} {value:.3f}" for name, value in trainer.last_stats.items() if name.startswith("other/")]
            reward = f"{config.run_name}: epoch {epoch:3d}   reward {trainer.last_stats['reward_mean']:.3f}"
            tqdm.write("   ".join([reward, *watched]))


def side_by_side(run: RunConfig) -> int:
    """Trainings at a time: one per processor for shipped models, one in all for others."""
    is_alone = "WORLD_SIZE" not in os.environ and run.model in BASES and not torch.accelerator.is_available()
    return min(len(run.reward), os.cpu_count() or 1) if is_alone else 1


def one(reward: str, run: RunConfig, ddpo: DDPOConfig) -> dict[str, tuple[float, float]]:
    """`train` with quiet libraries."""
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if run.model in BASES:
        torch.set_num_threads(1)  # its layers are so small that a second thread mostly waits
    return train(reward, run, ddpo, Path(ddpo.logdir))


def main(run: RunConfig, ddpo: DDPOConfig) -> None:
    """Trains on each reward; without a sweep, writes one report of all trainings into the run's folder."""
    if len(run.reward) > 1 and os.environ.get("WANDB_SWEEP_ID"):
        raise SystemExit(
            f"--reward {' '.join(run.reward)} asks for {len(run.reward)} trainings, and a sweep's run is one. Name one "
            "reward, and vary it by the sweep."
        )
    folder = Path(ddpo.logdir)
    names = {
        reward: ddpo.run_name or reward + (f"-{ddpo.estimator}" if ddpo.estimator != "is" else "")
        for reward in run.reward
    }
    shown = ddpo.tracker_kwargs.get("wandb", {})
    configs = []
    for name in names.values():
        tracker = {**ddpo.tracker_kwargs, "wandb": {**shown, "name": f"{name} {shown.get('name', '')}".strip()}}
        configs.append(replace(ddpo, run_name=name, logdir=str(folder / name), tracker_kwargs=tracker))
    jobs = side_by_side(run)
    if run.model in BASES:
        folder_of(run)  # before several processes need it
    if jobs > 1:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(one, run.reward, repeat(run), configs))
    else:
        results = [one(reward, run, config) for reward, config in zip(run.reward, configs, strict=True)]
    for name, measured in zip(names.values(), results, strict=True):
        print(f"\n{name}\n{'-' * len(name)}")
        for measure, (first, last) in measured.items():
            print(f"{measure}: {first:.3f} -> {last:.3f}")
    if os.environ.get("RANK", "0") == "0":
        report_on_run(TITLE, CLAIM, read, [Path(config.logdir) for config in configs], folder)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, DDPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, DDPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
