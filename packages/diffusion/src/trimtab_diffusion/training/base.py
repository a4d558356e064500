"""The run of a trainer of diffusion pipelines: epochs, checkpoints, files."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from huggingface_hub import CommitInfo
from torch import Tensor, nn

from trimtab_common.cards import facts_of, write_model_card
from trimtab_common.conditions import Vitals
from trimtab_common.config import to_flat_dict
from trimtab_common.lines import Lines
from trimtab_common.run import Stateful
from trimtab_common.sealing import save_or_warn
from trimtab_common.seeding import sampling_seed
from trimtab_common.sharding import divides_weights
from trimtab_common.tracking import Tracker, progress
from trimtab_diffusion.compat.pipelines import absent_parts
from trimtab_diffusion.lora import base_name
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

from . import setup
from .config import PipelineConfig, SamplingConfig
from .optimizing import optimizer_of, warmup
from .sampling import PromptFunction, RewardFunction, check_call

SAMPLE, TRAIN = 0, 1  # what random numbers are for
EVALUATION = 2**32 - 1  # the draw of an evaluation, which no epoch has
USAGE = {
    True: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{{base}}"{absent})
pipeline.load_lora_weights("{{repo_id}}")""",
    False: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{{repo_id}}"{absent})""",
}
"""The code of a model card, with and without adapters."""


class PipelineTrainer:
    """Runs epochs, each of which is a `step` that a subclass writes.

    A subclass calls `_prepare` once the pipeline is as it starts, `_keep_prompts` if it samples, and then `_resume`.

    Args:
        config: a copy of it is `trainer.config`.
        sd_pipeline: a DDPOStableDiffusionPipeline; or a diffusers pipeline, all of whose denoiser is then trained.

    Attributes:
        method, paper: the algorithm and its paper, for the model card.
        watched: names of the statistics that the line of an epoch shows.
        facts: what the pipeline is trained on, for the model card.
        last_stats: the numbers that the last epoch logged.
    """

    method: str
    paper: str
    watched: tuple[str, ...]
    config: PipelineConfig

    def __init__(
        self,
        config: PipelineConfig,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
    ) -> None:
        self.config = replace(config)
        if not isinstance(sd_pipeline, DDPOStableDiffusionPipeline):
            sd_pipeline = DDPOStableDiffusionPipeline(sd_pipeline)
        if isinstance(config, SamplingConfig):
            check_call(sd_pipeline, config)
        self.sd_pipeline = sd_pipeline
        self.accelerator = setup.accelerator_of(config)
        setup.place(config, sd_pipeline, self.accelerator)
        self.first_epoch = self.global_step = 0
        self.last_stats: dict[str, float] = {}
        self.facts: dict[str, object] = {}

    def _prepare(
        self,
        *,
        without_effect: Collection[str],
        held: Collection[str],
        kl_target: float | None = None,
        data: str | None = None,
    ) -> None:
        """Prepares the denoiser and its optimizer; arguments as of `setup.run_of`. Collective."""
        denoiser = self.sd_pipeline.denoiser
        optimizer = optimizer_of(self.config, self.sd_pipeline)
        self.model, self.optimizer = self.accelerator.prepare(denoiser, optimizer)
        setup.return_float32(denoiser, self.accelerator)
        self.model.eval()  # no dropout: the updated policy must be the one that sampled
        self.lr_scheduler = warmup(optimizer, self.config.train_warmup_steps)
        settings = {"without_effect": without_effect, "held": held}
        self.run = setup.run_of(self.config, self.accelerator, self.model, **settings, kl_target=kl_target, data=data)
        self.run.keep(self, "optimizer", "lr_scheduler", "first_epoch", "global_step")
        self.run.keep(self.accelerator, "scaler")

    def _keep_prompts(self, prompt_function: PromptFunction, reward_function: RewardFunction) -> None:
        """Takes the functions; checkpoints hold the prompts' state, if any, and the number of images scored so far."""
        self.prompt_fn, self.reward_fn, self.queries = prompt_function, reward_function, 0
        self.facts = {"prompts": _name_of(prompt_function), "reward": _name_of(reward_function)}
        self.run.keep(self, "queries")
        if isinstance(prompt_function, Stateful):
            self.run.keep_per_rank("prompt_function", prompt_function)

    def _resume(self) -> None:
        """Loads the checkpoint that the config names, if it names one. Collective."""
        if self.config.resume_from:
            self.run.resume(self.config.resume_from, self.checkpoint_folder)

    def step(self, epoch: int, global_step: int) -> int:
        """One epoch: learns from images, and logs.

        Args:
            epoch: its number, from 0, on which its random numbers depend.
            global_step: optimizer steps before it.

        Returns:
            Optimizer steps after it.
        """
        raise NotImplementedError

    def train(self, epochs: int | None = None) -> list[dict[str, float]]:
        """Runs epochs up to number `epochs` (default: the config's); logs and saves.

        The tracker stays open for what you log yourself; `with trainer.tracker:` around the call closes it.

        Returns:
            The numbers that each epoch logged.

        Raises:
            CheckpointError: a new run would mix its checkpoints with another run's.
        """
        if self.first_epoch == 0:
            self.run.record.check_folder(self.checkpoint_folder)
        history = []
        total = self.config.num_epochs if epochs is None else epochs
        setup.check_saves(self.config, self.accelerator, total)
        lines = Lines("epoch", self.watched, total=total, done=self.first_epoch)
        with self.run.training(self.checkpoint_folder):
            for epoch in progress(range(self.first_epoch, total), "epochs"):
                self.step(epoch, self.global_step)
                history.append(self.last_stats)
                if self.accelerator.is_main_process:
                    lines.show(epoch + 1, self.last_stats)
                if (epoch + 1) % self.config.save_freq == 0:
                    save_or_warn(self.save_checkpoint, self.config.on_save_error)
                self.run.interruption.end_if_asked(self.save_checkpoint)
        return history

    def _report(self, epoch: int, stats: Mapping[str, Any], vitals: Vitals) -> None:
        """Keeps an epoch's numbers as `last_stats`, checks their health, and sends them on."""
        self.sd_pipeline.has_trained = True
        self.last_stats = {name: value for name, value in stats.items() if isinstance(value, float)}
        warns = self.accelerator.is_main_process
        health = self.run.health.report(vitals, self.last_stats, when=f"epoch {epoch}", warns=warns)
        self.run.tracker.log({**stats, **health}, self.global_step)

    def _generator(self, use: int, number: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers that depend on the seed, the process, their use and its number, and not on earlier draws."""
        seed = sampling_seed(self.config.seed, rank=self.accelerator.process_index, draw=2 * number + use)
        return torch.Generator(device).manual_seed(seed)

    # ------------------------------------------------------------------- files

    @property
    def tracker(self) -> Tracker:
        """Where statistics go; started at its first use, so that a resumed run goes on under its id."""
        return self.run.tracker

    @property
    def run_id(self) -> str | None:
        """The id of the tracker's run; None until it starts."""
        return self.run.tracker_id

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints go."""
        return Path(self.config.project_kwargs.get("project_dir") or self.config.logdir) / "checkpoints"

    def save_checkpoint(self) -> Path:
        """Writes everything that the next epoch depends on, atomically, as checkpoint-<epochs>. Collective."""
        keep = self.config.project_kwargs.get("total_limit") or self.config.num_checkpoint_limit
        return self.run.save(self.checkpoint_folder, self.first_epoch, keep=keep)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the adapters, for `load_lora_weights`, or the pipeline, for `from_pretrained`; with a model card.

        Collective where the processes share the weights (FSDP, DeepSpeed): call it on each of them.
        """
        self._write(save_directory, self._full_weights())

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo | None:
        """Uploads what `save_pretrained` writes; kwargs as of huggingface_hub.upload_folder, and `private`.

        Collective likewise.
        """
        weights = self._full_weights()
        return self.run.push(lambda folder: self._write(folder, weights, repo_id), repo_id, **kwargs)

    def create_model_card(self, path: str, model_name: str | None = None, *, repo_id: str | None = None) -> None:
        """Writes a model card (README.md) into the folder `path`.

        Args:
            path: created where it does not exist.
            model_name: the card's title; by default the name of the folder, or of `repo_id`.
            repo_id: what the model is loaded by; by default the folder.
        """
        pipeline, stock = self.sd_pipeline, self.sd_pipeline.sd_pipeline
        absent = "".join(f", {name}=None" for name in absent_parts(stock))
        write_model_card(
            path,
            name=model_name,
            trainer=type(self).__name__,
            method=self.method,
            paper=self.paper,
            usage=USAGE[pipeline.use_lora].format(absent=absent),
            library="diffusers",
            base_model=base_name(stock),
            facts=facts_of(self.run.about, **self.facts),
            settings=to_flat_dict(self.config),
            repo_id=repo_id,
            tags=["text-to-image", "lora"] if pipeline.use_lora else ["text-to-image"],
        )

    def _full_weights(self) -> dict[str, Tensor] | None:
        """The denoiser's weights, gathered on the main process; None if every process has them. Collective."""
        return self.accelerator.get_state_dict(self.model) if divides_weights(self.accelerator) else None

    def _write(self, folder: str | Path, weights: dict[str, Tensor] | None, repo_id: str | None = None) -> None:
        if self.accelerator.is_main_process:
            self.sd_pipeline.save_pretrained(folder, **({} if weights is None else {"weights": weights}))
            self.create_model_card(str(folder), repo_id=repo_id)

    # ------------------------------------------------- what scripts of 2024 read

    @property
    def trainable_layers(self) -> list[nn.Parameter]:
        """The trained weights."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """A context for forward passes in the run's precision."""
        return self.accelerator.autocast


def _name_of(function: Callable[..., Any]) -> str:
    """A function's name; for an object that is called, the name of its class."""
    return str(getattr(function, "__qualname__", type(function).__name__))
