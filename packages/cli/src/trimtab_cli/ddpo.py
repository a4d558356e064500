"""`trimtab ddpo`, `nft`, `align-prop`, `diffusion-dpo`: a diffusion pipeline from rewards, or pairs of pictures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.features.features import require_decoding
from diffusers.utils.logging import disable_progress_bar

from trimtab_common.config import CountFromZero, setting
from trimtab_common.seeding import set_seed
from trimtab_diffusion import (
    AlignPropConfig,
    AlignPropTrainer,
    DDPOConfig,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    DiffusionDPOConfig,
    DiffusionDPOTrainer,
    DiffusionNFTConfig,
    DiffusionNFTTrainer,
)
from trimtab_diffusion.ddpo.selfcheck import ReplayError
from trimtab_diffusion.diffusion_dpo.data import check_pairs, row_of
from trimtab_diffusion.prompts import Prompts
from trimtab_diffusion.steps import ScheduleError
from trimtab_diffusion.training.sampling import RewardFunction
from trimtab_lm.data.prompts import open_dataset

from .places import refuse_missing_path
from .subcommands import DURING_TRAINING, about_run, check_eval_dataset, errors_in_one_line, named, settings, tracker

ABOUT = """Learning from rewards of images. The dataset has a column `prompt` (or `text`, such as the lines of a .txt
file); the reward function gets the others as metadata: reward(images, prompts, metadata) -> one number per image.

  trimtab ddpo --model stable-diffusion-v1-5/stable-diffusion-v1-5 --dataset prompts.txt \\
      --reward trimtab_diffusion.rewards:jpeg_incompressibility --num_epochs 50"""
ABOUT_NFT = """Learning from rewards of images by regression on noised samples, without log-probabilities. The
dataset has a column `prompt` (or `text`); the reward function gets the others as metadata: reward(images, prompts,
metadata) -> one number per image. The samples of a prompt, group_size, are compared with each other.

  trimtab nft --model stable-diffusion-v1-5/stable-diffusion-v1-5 --dataset prompts.txt \\
      --reward trimtab_diffusion.rewards:jpeg_incompressibility --num_epochs 50"""
ABOUT_GRADIENT = """Learning from the gradient of a reward of images, through the denoising steps. The dataset
has a column `prompt` (or `text`); reward(images, prompts, metadata) -> one number per image, differentiable in the
images.

  trimtab align-prop --model stable-diffusion-v1-5/stable-diffusion-v1-5 --dataset prompts.txt \\
      --reward rewards.py:redness --num_epochs 50"""
ABOUT_PAIRS = """Learning from pairs of pictures of a caption. The dataset has the columns `prompt`, `chosen` and
`rejected`. A folder of pictures has them in its metadata.jsonl, as the names of files:
{"prompt": "a cat", "chosen_file_name": "1.png", "rejected_file_name": "2.png"}

  trimtab diffusion-dpo --model stable-diffusion-v1-5/stable-diffusion-v1-5 --dataset pictures --num_epochs 4"""
DEFAULTS = """

Other defaults: without an accelerator mixed_precision is no; in a sweep log_with is wandb."""
COLUMNS = ("prompt", "text")


@dataclass(kw_only=True)
class PipelineArguments:
    """The pipeline that trains, and its rows."""

    model: str = setting("Hub id or folder of a diffusers pipeline.")
    dataset: str = setting("Hub id, folder or file of the rows.")
    dataset_config: str | None = setting("Configuration of a hub dataset that has several.", default=None)
    split: str = setting("Split of the dataset, or a part of it.", default="train")
    lora_rank: CountFromZero | None = setting(
        "Train LoRA adapters of this rank. 0: all weights of the denoiser. None: that of the model's adapters, or else "
        "4.",
        default=None,
    )
    output_dir: str = setting("Folder of the model, of checkpoints and of the tracker's files.", default="runs")

    def __post_init__(self) -> None:
        refuse_missing_path(self.model)
        refuse_missing_path(self.dataset)

    def pipeline(self) -> DefaultDDPOStableDiffusionPipeline:
        """The pipeline, with adapters if they train.

        Raises:
            ValueError: lora_rank is set, and the model has adapters of another rank.
        """
        rank = 4 if self.lora_rank is None else self.lora_rank
        pipeline = DefaultDDPOStableDiffusionPipeline(self.model, use_lora=rank > 0, lora_rank=rank)
        if self.lora_rank is not None and pipeline.use_lora and not pipeline.has_new_adapters:
            stored = pipeline.denoiser.peft_config[pipeline.denoiser.active_adapters()[0]].r
            if rank != stored:
                raise ValueError(
                    f"lora_rank={rank} came, and {self.model} has adapters of rank {stored}, which would go on "
                    "training. Leave out lora_rank, or name the model without adapters."
                )
        return pipeline


@dataclass(kw_only=True)
class PairArguments(PipelineArguments):
    """The pipeline that trains, and its pairs of pictures."""

    dataset: str = setting("Hub id, folder of pictures, or file (.parquet) of the pairs.")

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the trainer takes after its config, by position and by name."""
        pairs = pairs_of(self.dataset, self.split, self.dataset_config)
        return (self.pipeline(), pairs), {"is_checked": True}


@dataclass(kw_only=True)
class RewardArguments(PipelineArguments):
    """The pipeline that trains, its prompts and its reward."""

    dataset: str = setting("Hub id, folder or file (.jsonl, .json, .csv, .parquet, .txt) of the prompts.")
    reward: str = setting("file.py:function or module:function that scores images, or a class of such functions.")

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the trainer takes after its config, by position and by name."""
        prompts = prompts_of(self.dataset, self.split, self.dataset_config)
        function, options = self.function(), self.options()
        return (function, prompts, self.pipeline()), options

    def options(self) -> dict[str, Any]:
        """What the trainer takes by name."""
        return {}

    def function(self) -> RewardFunction:
        """The reward function.

        Raises:
            ValueError: the name is not that of a function.
        """
        if isinstance(function := named(self.reward), str):
            raise ValueError(f"reward={self.reward} is no function. Write file.py:function or module:function.")
        return function


@dataclass(kw_only=True)
class DDPOArguments(RewardArguments):
    """The pipeline that trains, its prompts, those of evaluations, and its reward."""

    eval_dataset: str | None = setting(
        "Prompts to evaluate on after training, and as eval_freq says. None: dataset, where eval_split names a split.",
        default=None,
    )
    eval_dataset_config: str | None = setting("Configuration of eval_dataset, as dataset_config.", default=None)
    eval_split: str | None = setting(
        "Split to evaluate on, or a part of it. None: train of eval_dataset; without eval_dataset no evaluation.",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eval_dataset(self.eval_dataset, self.eval_dataset_config)

    def options(self) -> dict[str, Any]:
        """What the trainer takes by name."""
        if self.eval_dataset is not None:
            rows = prompts_of(self.eval_dataset, self.eval_split or "train", self.eval_dataset_config)
        elif self.eval_split is not None:
            rows = prompts_of(self.dataset, self.eval_split, self.dataset_config)
        else:
            return {}
        return {"eval_prompts": [*zip(rows.prompts, rows.metadata, strict=True)]}


def prompts_of(dataset: str, split: str, config: str | None = None) -> Prompts:
    """The rows of a dataset as a prompt function.

    Raises:
        ValueError: the dataset has no column of prompts or no rows, a prompt is no text or blank, or a picture beside
            one cannot be read.
    """
    rows = open_dataset(dataset, split, config)
    column = next((name for name in COLUMNS if name in rows.column_names), None)
    if column is None:
        raise ValueError(
            f"The dataset has the columns {rows.column_names}, and none of prompt and text. Rename the column with the "
            "prompts to 'prompt'."
        )
    prompts = tuple(rows[column])
    if not prompts:
        raise ValueError(f"{dataset} has no prompts in the split {split}. Give it at least one row with a prompt.")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(
                f"Row {number} of {dataset} has the {column} {prompt!r}. Write a text there, or leave the row out."
            )
    if len(rows.column_names) == 1:
        return Prompts(prompts, [{}] * len(rows))
    # The other columns stay in the dataset, which decodes the pictures of a row again when its prompt is drawn.
    metadata = rows.remove_columns(column)
    if any(map(require_decoding, metadata.features.values())):
        for number in range(len(metadata)):
            row_of(metadata, number, f" of {dataset}")
    return Prompts(prompts, metadata)


def ddpo(argv: Sequence[str]) -> int:
    """Train a diffusion pipeline from rewards."""
    return _train("ddpo", argv, DDPOArguments, DDPOConfig, DDPOTrainer, about=ABOUT)


def nft(argv: Sequence[str]) -> int:
    """Train a diffusion pipeline from rewards, by regression on noised samples."""
    return _train("nft", argv, RewardArguments, DiffusionNFTConfig, DiffusionNFTTrainer, about=ABOUT_NFT)


def align_prop(argv: Sequence[str]) -> int:
    """Train a diffusion pipeline by the gradient of a reward."""
    return _train("align-prop", argv, RewardArguments, AlignPropConfig, AlignPropTrainer, about=ABOUT_GRADIENT)


def diffusion_dpo(argv: Sequence[str]) -> int:
    """Train a diffusion pipeline from pairs of pictures."""
    return _train("diffusion-dpo", argv, PairArguments, DiffusionDPOConfig, DiffusionDPOTrainer, about=ABOUT_PAIRS)


def pairs_of(dataset: str, split: str, config: str | None = None) -> Dataset:
    """The rows of pairs of pictures, all of which can be read.

    Raises:
        ValueError: a folder's metadata.jsonl does not name the pictures, or `check_pairs` refuses a row.
    """
    metadata = Path(dataset, "metadata.jsonl")
    if metadata.is_file():
        try:
            with metadata.open(encoding="utf-8") as lines:
                columns = list(dict(json.loads(next(lines, "{}"))))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{metadata}, line 1, is no JSON object: {error}. Write one object in each line."
            ) from error
        if missing := {"prompt", "chosen_file_name", "rejected_file_name"}.difference(columns):
            raise ValueError(
                f"{metadata} has {columns}, and not {sorted(missing)}. Each line needs a caption and the names of two "
                'files beside it: {"prompt": "a cat", "chosen_file_name": "1.png", "rejected_file_name": "2.png"}.'
            )
    rows = open_dataset(dataset, split, config)
    check_pairs(rows)  # in place of the trainer, before the pipeline is loaded
    return rows


def _train(name: str, argv: Sequence[str], arguments: Any, config_kind: Any, kind: Any, *, about: str) -> int:
    """Trains a pipeline, and saves it."""
    recipe = {"output_dir": f"runs/{name}", "exp_name": name, "tracker_project_name": "trimtab", "log_with": tracker()}
    if not torch.accelerator.is_available():
        recipe["mixed_precision"] = "no"  # half precision is for accelerators
    run, config = settings(
        name, argv, arguments, config_kind, about=about + DEFAULTS, recipe=recipe, without=["logdir"]
    )
    config.logdir = run.output_dir
    disable_progress_bar()
    with errors_in_one_line(name):
        set_seed(config.seed)
        inputs, options = run.inputs()
        trainer = kind(config, *inputs, **options)
        trainer.run.about = about_run(run)
    trainer.sd_pipeline.set_progress_bar_config(disable=True)
    with errors_in_one_line(name, (*DURING_TRAINING, ReplayError, ScheduleError)):
        trainer.train()
        if "eval_prompts" in options and "eval/reward_mean" not in trainer.last_stats:  # not in the last epoch
            numbers = trainer.evaluate()
            trainer.tracker.log(numbers, trainer.global_step)
            shown = (f"{each} {value:.4g}" for each, value in numbers.items())
            trainer.accelerator.print(" | ".join(["evaluation", *shown]))
    trainer.save_pretrained(run.output_dir)
    if trainer.accelerator.is_main_process:
        is_lora = trainer.sd_pipeline.use_lora
        how = "pipeline.load_lora_weights" if is_lora else "DiffusionPipeline.from_pretrained"
        print(f'The model is in {run.output_dir}. Load it: {how}("{run.output_dir}")')
    return 0
