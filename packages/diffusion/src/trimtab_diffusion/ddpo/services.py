"""What DDPOTrainer offers besides the algorithm: its tracker and its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import Tensor, nn

from trimtab_common.accelerators import WeighingAccelerator
from trimtab_common.config import to_flat_dict
from trimtab_common.hub import write_model_card
from trimtab_common.run import Run
from trimtab_common.sharding import divides_weights
from trimtab_common.tracking import Tracker
from trimtab_diffusion.lora import base_name
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

from .config import DDPOConfig
from .names_of_2024 import NamesOf2024

USAGE = {
    True: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}")
pipeline.load_lora_weights("{repo_id}")""",
    False: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{repo_id}")""",
}


class PipelineServices(NamesOf2024):
    """The methods of DDPOTrainer that are no part of the algorithm. DDPOTrainer's constructor sets the attributes."""

    config: DDPOConfig
    sd_pipeline: DDPOStableDiffusionPipeline
    accelerator: WeighingAccelerator
    run: Run
    first_epoch: int
    model: nn.Module

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

    def _full_weights(self) -> dict[str, Tensor] | None:
        """The denoiser's weights, gathered on the main process; None where each process has them. Collective."""
        return self.accelerator.get_state_dict(self.model) if divides_weights(self.accelerator) else None

    def _write(self, folder: str | Path, weights: dict[str, Tensor] | None, repo_id: str | None = None) -> None:
        if self.accelerator.is_main_process:
            self.sd_pipeline.save_pretrained(folder, **({} if weights is None else {"weights": weights}))
            self.create_model_card(str(folder), repo_id=repo_id)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo | None:
        """Uploads what `save_pretrained` writes; kwargs as of huggingface_hub.upload_folder, and `private`.

        Collective likewise.
        """
        weights = self._full_weights()
        return self.run.push(lambda folder: self._write(folder, weights, repo_id), repo_id, **kwargs)

    def create_model_card(
        self, path: str, model_name: str | None = "TRL DDPO Model", *, repo_id: str | None = None
    ) -> None:
        """Writes a model card (README.md) into the folder `path`.

        Args:
            path: created where it does not exist.
            model_name: the card's title.
            repo_id: what the model is loaded by; by default the folder's name.
        """
        base = base_name(self.sd_pipeline.sd_pipeline)
        write_model_card(
            path,
            name=model_name or "Model",
            trainer=type(self).__name__,
            paper="Black et al. 2023, arXiv:2305.13301",
            usage=USAGE[self.sd_pipeline.use_lora],
            library="diffusers",
            base_model=base,
            settings=to_flat_dict(self.config),
            repo_id=repo_id,
            tags=["text-to-image", "lora"] if self.sd_pipeline.use_lora else ["text-to-image"],
        )


class HookTracker:
    """The tracker as `image_samples_hook` knows it from accelerate."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def log(self, values: Mapping[str, Any], step: int, **_: Any) -> None:
        """Logs numbers."""
        self.tracker.log(values, step)

    def log_images(self, values: Mapping[str, Any], step: int, **_: Any) -> None:
        """Logs images by caption: one [3, H, W], or a batch [n, 3, H, W] or a list, which share the caption."""
        images = [(image, caption) for caption, value in values.items() for image in _images(value)]
        self.tracker.images("hook", [image for image, _ in images], [caption for _, caption in images], step)


def _images(value: Any) -> list[Any]:
    return list(value) if getattr(value, "ndim", None) == 4 or isinstance(value, list | tuple) else [value]
