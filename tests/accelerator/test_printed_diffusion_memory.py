"""`trimtab memory ddpo` prints what sampling and training take on the pretend accelerator."""

import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.accelerator.budgets import collected, quiet
from tests.accelerator.runs import forget_accelerator
from tests.diffusion import tiny
from tests.diffusion.test_modern_pipelines import Turns, brightness

from trimtab_cli.diffusion_memory import Memory, memory, without_weights
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]
BUILD = {"sd": tiny.stable_diffusion, "sdxl": tiny.stable_diffusion_xl, "sd3": tiny.stable_diffusion_3}
MANY = {"sample_num_batches_per_epoch": 5}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # pipeline, rank of adapters, settings
    "many samples, bfloat16": ("sd", 4, {**MANY, "mixed_precision": "bf16"}),
    "all weights and a reference": ("sd", 0, {"init_kl_coef": 0.1}),
    "a flow, all weights, bfloat16": ("sd3", 0, {"mixed_precision": "bf16"}),
    "checkpointing, trajectories on the CPU": (
        "sdxl",
        4,
        {"train_gradient_checkpointing": True, "trajectory_on_cpu": True},
    ),
}


class Measured(DDPOTrainer):
    """Measures the second epoch."""

    device: Any

    def draw(self, epoch: int) -> Any:
        gc.collect()
        self.device.clear()
        samples = super().draw(epoch)
        self.sampling = self.device.peak()
        self.device.clear()
        return samples

    def _log(self, *arguments: Any) -> None:
        self.training = self.device.peak()
        super()._log(*arguments)


def config(folder: Path, settings: dict[str, Any]) -> DDPOConfig:
    sizes = {"sample_num_steps": 3, "sample_batch_size": 4, "sample_num_batches_per_epoch": 2, "train_batch_size": 4}
    defaults = {"mixed_precision": "no", "sample_eta": 0.7, "log_with": "none", "logdir": str(folder)}
    return DDPOConfig(**defaults | sizes | settings)


@pytest.mark.parametrize("case", CASES)
def test_the_peaks_are_those_of_an_epoch_within_ten_percent(case: str, tmp_path: Path, device: ModuleType):
    kind, rank, settings = CASES[case]
    BUILD[kind]().save_pretrained(tmp_path / "pipeline")
    printed: dict[str, Memory] = memory(
        without_weights(str(tmp_path / "pipeline")), config(tmp_path, settings), lora_rank=rank
    )
    forget_accelerator()
    with quiet(), collected():
        held = device.memory_allocated()
        pipeline = DDPOStableDiffusionPipeline(BUILD[kind](), use_lora=rank > 0, lora_rank=rank)
        Measured.device = device
        trainer = Measured(config(tmp_path, settings), brightness, Turns(), pipeline, other_rewards={})
        trainer.train(2)
    assert sum(printed["sampling"]) == pytest.approx(trainer.sampling - held, rel=0.1)
    assert sum(printed["training"]) == pytest.approx(trainer.training - held, rel=0.1)
