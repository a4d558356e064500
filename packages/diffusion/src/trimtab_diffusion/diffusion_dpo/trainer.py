"""Diffusion-DPO: preferences between pictures of one caption (Wallace et al. 2023, arXiv:2311.12908)."""

import time
import warnings
from functools import partial

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from trimtab_common.conditions import Vitals
from trimtab_common.run_record import rows_fingerprint
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import gather_stats, merge_stats
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.training import config as shared
from trimtab_diffusion.training.base import TRAIN, PipelineTrainer
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.training.setup import reference_of

from .algorithm import RefErrors, precomputed, reference_errors, update
from .config import DiffusionDPOConfig
from .data import Pairs, check_autoencoder, check_inputs, check_pairs, content_of, encoded, picture_of

WITHOUT_EFFECT = (*shared.WITHOUT_EFFECT, "encode_batch_size", "precompute_ref_errors")
"""Settings that change no result."""


class DiffusionDPOTrainer(PipelineTrainer):
    """Makes a pipeline's denoiser better at chosen pictures than at rejected ones, relative to how it was.

    Args:
        config: a copy of it is `trainer.config`.
        sd_pipeline: a DDPOStableDiffusionPipeline of Stable Diffusion 1 to 3 or SDXL; or such a diffusers pipeline, all
            of whose denoiser is then trained.
        train_dataset: rows with a caption `prompt` and two pictures of one size, `chosen` and `rejected`: PIL images,
            or arrays [3, H, W] or [H, W, 3], uint8 or float within [0, 1].
        is_checked: whether `check_pairs` has read these rows, so that all pictures are not decoded once more.

    Raises:
        ValueError: the pipeline has no AutoencoderKL, or cannot divide the pictures' size, or its `call_kwargs` have
            arguments of the trainer; a row has no caption or no picture, sizes differ, there are fewer pairs than an
            update takes, or there is no whole copy of the reference for precompute_ref_errors.
    """

    method, paper = "Diffusion-DPO", "Wallace et al. 2023, arXiv:2311.12908"
    watched = ("loss", "rewards/margins", "rewards/accuracies", "errors/chosen", "grad_norm")
    config: DiffusionDPOConfig

    def __init__(
        self,
        config: DiffusionDPOConfig,
        sd_pipeline: DDPOStableDiffusionPipeline | DiffusionPipeline,
        train_dataset: Pairs,
        *,
        is_checked: bool = False,
    ) -> None:
        check_autoencoder(sd_pipeline)
        if not is_checked:
            check_pairs(train_dataset)
        super().__init__(config, sd_pipeline)
        check_inputs(self.sd_pipeline, picture_of(train_dataset[0]["chosen"], "chosen of row 0").size)
        self.pairs = len(train_dataset)
        self.facts = {"data": f"{self.pairs:,} pairs of pictures"}
        per_update = config.samples_per_update * self.accelerator.num_processes
        if self.pairs < per_update:
            raise ValueError(
                f"{self.pairs} pairs came, and an update takes {per_update}: train_batch_size x "
                "train_gradient_accumulation_steps on each process. Lower one of these, or pass more pairs."
            )
        if rest := self.pairs % per_update:
            warnings.warn(
                f"Each epoch leaves out {rest} of {self.pairs} pairs, others each time: they fill no update of "
                f"{per_update}.",
                stacklevel=2,
            )
        self.reference = reference_of(self.sd_pipeline, self.accelerator, rests_on_cpu=config.precompute_ref_errors)
        self._prepare(without_effect=WITHOUT_EFFECT, held=shared.HELD, data=rows_fingerprint(train_dataset, content_of))
        self._resume()
        self.pictures = encoded(self.sd_pipeline, train_dataset, batch_size=config.encode_batch_size)

    def step(self, epoch: int, global_step: int) -> int:
        """One pass over the pairs, in a new order, and its statistics.

        Args:
            epoch: its number, from 0, on which its random numbers depend.
            global_step: optimizer steps before it.

        Returns:
            Optimizer steps after it.
        """
        self.run.begin_step(self.checkpoint_folder)
        started, config = time.perf_counter(), self.config
        self.global_step, batches = global_step, self.batches(epoch)
        ref_errors: RefErrors = partial(reference_errors, self.pictures, self.reference)
        if config.precompute_ref_errors:
            device, generator = self.accelerator.device, self._generator(TRAIN, epoch)
            ref_errors = precomputed(self.pictures, self.reference, batches, device, generator=generator, config=config)
        updates = Updates(self.accelerator, self.model, self.optimizer, self.lr_scheduler, config, global_step)
        stats = update(
            self.pictures,
            self.model,
            ref_errors,
            batches,
            updates,
            generator=self._generator(TRAIN, epoch),
            config=config,
        )
        self.first_epoch, self.global_step = epoch + 1, updates.done
        of_run = {
            "epoch": float(epoch),
            "learning_rate": updates.learning_rate,
            "time/epoch": time.perf_counter() - started,
        }
        gathered = gather_stats(merge_stats([of_run, *stats]))
        self._report(epoch, gathered, Vitals())
        self.run.interruption.end_step(self.save_checkpoint, is_last=epoch + 1 >= config.num_epochs)
        return self.global_step

    def batches(self, epoch: int) -> list[Tensor]:
        """The numbers of this process's pairs in each update of an epoch."""
        order = torch.Generator().manual_seed(sampling_seed(self.config.seed, rank=0, draw=2 * epoch))
        processes, own = self.accelerator.num_processes, self.accelerator.process_index
        per_update = self.config.samples_per_update * processes
        whole = torch.randperm(self.pairs, generator=order)[: self.pairs // per_update * per_update]
        return [rows.chunk(processes)[own] for rows in whole.split(per_update)]
