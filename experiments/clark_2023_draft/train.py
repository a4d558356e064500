"""Ways to train a diffusion model, side by side (Clark et al. 2023, arXiv:2309.17400). The numbers: README.md."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

from experiments.clark_2023_draft.report import CLAIM, DISTANCE, TITLE, read
from experiments.emoji.drawings import TRAINED
from experiments.emoji.judging import (
    AFTER,
    BEFORE,
    CONTROL,
    DURING,
    IN_TURN,
    QUALITY,
    SHOWN,
    at,
    contact_sheet,
    largest_kept,
)
from experiments.emoji.measure import sampled, shipped
from experiments.emoji.rewards import recognised, warmth
from experiments.reports import report_on_run
from experiments.run_folders import append, close_folder, from_recipe, open_folder, write_per_prompt
from experiments.small_flow import equal_steps
from trimtab_common.config import to_flat_dict
from trimtab_common.tracking import progress
from trimtab_diffusion import (
    AlignPropConfig,
    AlignPropTrainer,
    DDPOConfig,
    DDPOTrainer,
    DiffusionDPOConfig,
    DiffusionDPOTrainer,
    DiffusionNFTConfig,
    DiffusionNFTTrainer,
)
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.prompts import Prompts
from trimtab_diffusion.steps import Steps
from trimtab_diffusion.training.base import PipelineTrainer
from trimtab_diffusion.training.config import PipelineConfig
from trimtab_diffusion.training.sampling import RewardFunction
from trimtab_diffusion.trajectories import sampled_pairs

RECIPE = Path(__file__).with_name("recipe.yaml")


@dataclass
class FlowGRPOConfig(DDPOConfig):
    """The settings of DDPO, under a name of their own."""


CONFIGS: dict[str, type[PipelineConfig]] = {
    "ddpo": DDPOConfig,
    "flow_grpo": FlowGRPOConfig,
    "nft": DiffusionNFTConfig,
    "draft": AlignPropConfig,
    "diffusion_dpo": DiffusionDPOConfig,
}
METHODS = {"unet": ("ddpo", "nft", "draft", "diffusion_dpo")}
METHODS["flow"] = ("flow_grpo", *METHODS["unet"])
KNOWN = "; ".join(f"--base {base}: {', '.join(methods)}" for base, methods in METHODS.items())
EARLY = 1 / 4  # of the evaluations: once they are spent, a run with a reward is measured during its training


@dataclass(frozen=True)
class RunConfig:
    """The method, and what all methods share."""

    base: str = field(
        default="unet", metadata={"help": "The base model's denoiser: unet, or a flow's transformer, flow."}
    )
    method: str = field(
        default="draft",
        metadata={"help": f"draft is AlignPropTrainer, and flow_grpo DDPOTrainer on a flow. The methods are {KNOWN}."},
    )
    reward: str = field(
        default="warmth",
        metadata={"help": "warmth: mean of red minus mean of blue; random, the control: a random colour per picture."},
    )
    evaluations: int = field(
        default=3904,
        metadata={"help": "A training ends before it exceeds this many passes of a picture through the denoiser."},
    )
    pairs: int = field(default=108, metadata={"help": "For diffusion_dpo: pairs that the base model samples."})
    sample_num_steps: int = field(default=5, metadata={"help": "Denoising steps of a sample."})
    sample_guidance_scale: float = field(default=1.0, metadata={"help": "Scale of guidance; 1: none."})
    eval_pictures: int = field(
        default=144,
        metadata={"help": "Pictures from the same noise, before, during and after, of all captions in turn."},
    )


class Evaluations:
    """Counts what a denoiser computes, by hooks: 1 for a sample's forward pass, 2 for its backward pass.

    Args:
        denoiser: copies of it count here too, such as the reference of Diffusion-DPO.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self.count = 0

        def forward(module: nn.Module, inputs: Any, output: Any) -> None:  # no method: a copied model would copy self
            rows = len(output[0])
            self.count += rows
            if output[0].requires_grad:
                output[0].register_hook(lambda gradient: backward(rows))

        def backward(rows: int) -> None:
            self.count += 2 * rows

        denoiser.register_forward_hook(forward)


class RandomColours:
    """The control: how much of a colour there is in a picture, another colour for each picture and call.

    Its gradient is as large as that of `warmth` and says nothing about the picture; nor does the order of its values.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, images: Tensor, captions: Sequence[str], metadata: Sequence[Any] = ()) -> Tensor:
        """Returns numbers [B] of images [B, 3, H, W]."""
        colours = torch.randn(len(images), 3, generator=self.generator)
        colours *= 2**0.5 / colours.norm(dim=1, keepdim=True)  # the length of warmth's (1, 0, -1)
        return (images.float().mean((2, 3)) * colours.to(images.device)).sum(1)


class Drift:
    """How far a pipeline's predictions are from what they were, on noised pictures of its own.

    Args:
        pipeline: the base model.
        images: its samples, [B, 3, H, W].
        captions: theirs.
        seed: of noise and noise levels.
    """

    def __init__(
        self, pipeline: DDPOStableDiffusionPipeline, images: Tensor, captions: Sequence[str], seed: int
    ) -> None:
        generator, vae = torch.Generator().manual_seed(seed), pipeline.sd_pipeline.vae
        # A short sampling shows with which conditions the pipeline calls its denoiser.
        call = {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "latent"}
        path = pipeline(list(captions), generator=torch.Generator().manual_seed(seed), **call).trajectories
        rows = torch.arange(len(images))
        self.conditions = sampled_pairs(path, pipeline.device, rows, torch.zeros_like(rows)).conditions
        steps = Steps.of_training(pipeline.scheduler)
        self.schedule = replace(path.schedule, steps=steps, times=steps.timesteps)
        self.levels = torch.randint(len(steps), (len(images),), generator=generator)
        with torch.no_grad():
            latents = vae.encode(2 * images - 1).latent_dist.mode() - (vae.config.shift_factor or 0.0)
        noise = torch.randn(latents.shape, generator=generator)
        self.noised, _ = steps.noised(vae.config.scaling_factor * latents, noise, self.levels)
        self.first = self.predictions(pipeline.denoiser)

    @torch.no_grad()
    def predictions(self, denoiser: nn.Module) -> Tensor:
        """A denoiser's predictions, [B, ...]."""
        return self.schedule.ask(denoiser, self.noised, self.levels, self.conditions)

    def __call__(self, denoiser: nn.Module) -> Tensor:
        """The squared differences from the first predictions, in per cent of these predictions' mean square, [B]."""
        moved = (self.predictions(denoiser) - self.first).square().flatten(1).mean(1)
        return 100 * moved / self.first.square().mean()


def loaded(base: str, steps: int) -> DDPOStableDiffusionPipeline:
    """A base model, as the trainers take it; a flow always takes `steps` steps."""
    call = equal_steps(steps) if base == "flow" else {}
    call.pop("num_inference_steps", None)  # trainers pass it
    return DDPOStableDiffusionPipeline(shipped(base), call_kwargs=call)


def pictures(pipeline: DDPOStableDiffusionPipeline, captions: Sequence[str], run: RunConfig, seed: int) -> Tensor:
    """Samples a picture of each caption, [B, 3, H, W], in as many steps as in training."""
    steps, guidance = run.sample_num_steps, run.sample_guidance_scale
    return sampled(pipeline.sd_pipeline, captions, steps=steps, guidance=guidance, seed=seed)


def labelled_pairs(
    pipeline: DDPOStableDiffusionPipeline, reward: RewardFunction, run: RunConfig, seed: int
) -> list[dict[str, Any]]:
    """Two samples of each of `run.pairs` captions: the one with more reward is chosen, the other rejected."""
    captions = random.Random(seed).choices(TRAINED, k=run.pairs)
    both = pictures(pipeline, captions * 2, run, seed).chunk(2)
    first, second = reward(torch.cat(both), (*captions, *captions), ()).chunk(2)
    pairs = []
    for caption, one, other, is_first in zip(captions, *both, (first >= second).tolist(), strict=True):
        chosen, rejected = (one, other) if is_first else (other, one)
        pairs.append({"prompt": caption, "chosen": chosen, "rejected": rejected})
    return pairs


def trainer_of(
    run: RunConfig, config: PipelineConfig, reward: RewardFunction, pipeline: DDPOStableDiffusionPipeline
) -> PipelineTrainer:
    """The trainer of the method; for diffusion_dpo it samples the pairs."""
    prompts = Prompts(TRAINED, ({},) * len(TRAINED))
    if isinstance(config, DDPOConfig):
        return DDPOTrainer(config, reward, prompts, pipeline, other_rewards={})
    if isinstance(config, DiffusionNFTConfig):
        return DiffusionNFTTrainer(config, reward, prompts, pipeline)
    if isinstance(config, AlignPropConfig):
        return AlignPropTrainer(config, reward, prompts, pipeline)
    assert isinstance(config, DiffusionDPOConfig)
    return DiffusionDPOTrainer(config, pipeline, labelled_pairs(pipeline, reward, run, config.seed))


def main(run: RunConfig, *configs: PipelineConfig) -> None:
    """Measures, trains until the evaluations are spent, measures again, and writes the run's report into its folder.

    Args:
        run: names the method.
        configs: one of each class in CONFIGS, in their order.
    """
    if run.method not in METHODS.get(run.base, ()) or run.reward not in ("warmth", CONTROL):
        raise SystemExit(
            f"--base {run.base} --method {run.method} --reward {run.reward}: the methods are {KNOWN}. The rewards are "
            f"warmth and {CONTROL}."
        )
    config = configs[[*CONFIGS].index(run.method)]
    if config.resume_from:
        raise SystemExit("--resume_from: these runs are too short to resume, and would count from 0. Start it again.")
    for library in (diffusers.utils.logging, transformers.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    torch.set_num_threads(1)  # the layers are so small that a second thread mostly waits
    folder, captions = Path(config.logdir), [*islice(cycle(IN_TURN), run.eval_pictures)]
    open_folder(folder, to_flat_dict(run, config), goes_on=False)
    pipeline = loaded(run.base, run.sample_num_steps)
    first = pictures(pipeline, captions, run, config.seed)
    drift, evaluations = Drift(pipeline, first, captions, config.seed), Evaluations(pipeline.denoiser)
    means: dict[str, float] = {}
    of_captions: dict[str, list[float]] = {}

    def measure(sheet: str) -> None:
        spent = evaluations.count
        images = first if sheet == BEFORE else pictures(pipeline, captions, run, config.seed)
        measures = {"warmth": warmth(images, captions), QUALITY: recognised(images, captions)}
        measures[DISTANCE] = drift(pipeline.denoiser)
        for name, values in measures.items():
            means[at(sheet, name)], of_captions[at(sheet, name)] = float(values.mean()), values.tolist()
        means[at(sheet, "evaluations")] = evaluations.count = spent  # measuring is no training
        contact_sheet(images[:SHOWN]).save(folder / sheet)
        trainer.tracker.images(Path(sheet).stem, list(images[:SHOWN]), captions[:SHOWN], trainer.global_step)

    reward = warmth if run.reward == "warmth" else RandomColours(config.seed)
    trainer = trainer_of(run, config, reward, pipeline)
    trainer.run.about = to_flat_dict(run)
    with trainer.tracker as tracker:
        measure(BEFORE)
        for epoch in progress(range(config.num_epochs), f"epochs of {run.method}"):
            began = evaluations.count
            trainer.step(epoch, trainer.global_step)
            append(folder, {"step": epoch + 1, "evaluations": evaluations.count, **trainer.last_stats})
            is_early = at(DURING, "warmth") not in means and evaluations.count >= EARLY * run.evaluations
            if is_early and run.reward != CONTROL:
                measure(DURING)
            if 2 * evaluations.count - began > run.evaluations:
                break
        measure(AFTER)
        final = {f"final/{name}": means[name] for name in ("warmth", QUALITY, DISTANCE, "evaluations")}
        tracker.finish(final | {"final/warmth_kept": largest_kept(means, "warmth")})
    write_per_prompt(folder, of_captions)
    close_folder(folder, means)
    report_on_run(TITLE, CLAIM, read, [folder])


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[Any, ...]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, *CONFIGS.values(), argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
