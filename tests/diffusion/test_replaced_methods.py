"""What a subclass of a pipeline or of DDPOTrainer replaces is used, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from peft import LoraConfig
from tests.diffusion import tiny

from trimtab_diffusion import (
    DDPOConfig,
    DDPOStableDiffusionPipeline,
    DDPOTrainer,
    DiffusionDPOConfig,
    DiffusionDPOTrainer,
    DiffusionNFTConfig,
    DiffusionNFTTrainer,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def trained(
    kind: type[DDPOStableDiffusionPipeline], folder: Path, *, use_lora: bool = False, resume_from: str = ""
) -> tuple[DiffusionDPOTrainer, set[str]]:
    """Returns a trainer after two updates, and the names of the weights that changed."""
    rows = [{"prompt": "a cat", "chosen": torch.ones(3, 16, 16), "rejected": torch.zeros(3, 16, 16)}] * 4
    sizes: dict[str, Any] = {"num_epochs": 1, "train_batch_size": 2, "mixed_precision": "no"}
    config = DiffusionDPOConfig(**sizes, logdir=str(folder), resume_from=resume_from)
    trainer = DiffusionDPOTrainer(config, kind(tiny.stable_diffusion(), use_lora=use_lora), rows)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    return trainer, {
        name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, before[name])
    }


class UpBlocks(DDPOStableDiffusionPipeline):
    def get_trainable_layers(self) -> Any:
        return self.denoiser.up_blocks


class UpBlockWeights(DDPOStableDiffusionPipeline):
    def get_trainable_layers(self) -> Any:
        return [*self.denoiser.up_blocks.parameters()]


class UpBlockList(DDPOStableDiffusionPipeline):
    def get_trainable_layers(self) -> Any:
        return [self.denoiser.up_blocks]


@pytest.mark.parametrize("kind", [UpBlocks, UpBlockWeights, UpBlockList])
def test_a_pipeline_that_returns_fewer_layers_trains_fewer(kind: type, tmp_path: Path):
    trainer, changed = trained(kind, tmp_path)
    assert changed
    assert all(name.startswith("up_blocks.") for name in changed)
    assert sum(weight.numel() for weight in trainer.trainable_layers) == sum(
        weight.numel() for weight in trainer.sd_pipeline.denoiser.up_blocks.parameters()
    )


def test_a_part_of_the_adapters_trains_beside_a_reference_without_adapters(tmp_path: Path):
    trainer, changed = trained(UpBlocks, tmp_path, use_lora=True)
    assert changed
    assert all(name.startswith("up_blocks.") for name in changed)
    assert {id(weight) for weight in trainer.trainable_layers} == {
        id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]
    }
    assert all(weight.grad is None for weight in trainer.model.parameters())
    resumed, changed = trained(UpBlocks, tmp_path, use_lora=True, resume_from="latest")
    assert resumed.first_epoch == 1
    assert not changed


@pytest.mark.parametrize("part", ["vae", None])
def test_layers_that_cannot_train_are_refused(part: str | None, tmp_path: Path):
    class Wrong(DDPOStableDiffusionPipeline):
        def get_trainable_layers(self) -> Any:
            return self.vae.requires_grad_(True) if part else []

    with pytest.raises(ValueError, match=r"get_trainable_layers returned .* 0 of them are the denoiser's"):
        trained(Wrong, tmp_path)


def test_adapters_that_could_not_be_loaded_are_refused(tmp_path: Path):
    class Adds(DDPOStableDiffusionPipeline):
        def get_trainable_layers(self) -> Any:
            self.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
            return self.unet

    with pytest.raises(ValueError, match=r"added adapters to a pipeline with use_lora=False"):
        trained(Adds, tmp_path)


def test_a_wrapped_pipeline_takes_another_scheduler():
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion())
    pipeline.scheduler = tiny.ddim(set_alpha_to_one=True)
    assert pipeline.scheduler is pipeline.sd_pipeline.scheduler
    assert pipeline.scheduler.config.set_alpha_to_one


@pytest.mark.parametrize(
    ("name", "instead"), [("scheduler_step", "pipeline.scheduler"), ("autocast", "mixed_precision")]
)
def test_a_method_of_a_pipeline_that_no_trainer_calls_cannot_be_replaced(name: str, instead: str):
    kind = type("Own", (DDPOStableDiffusionPipeline,), {name: lambda self: None})
    with pytest.raises(TypeError, match=f"Own replaces {name}, which no trainer calls.*{instead}"):
        kind(tiny.stable_diffusion())


class OwnCall(DDPOStableDiffusionPipeline):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return super().__call__(*arguments, **options)


def test_a_call_that_evaluations_and_solvers_do_not_make_cannot_be_replaced(tmp_path: Path):
    def reward(images: torch.Tensor, *_: Any) -> torch.Tensor:
        return images.flatten(1).mean(1)

    where: dict[str, Any] = {"mixed_precision": "no", "logdir": str(tmp_path)}
    pipeline, prompts = OwnCall(tiny.stable_diffusion()), lambda: ("a cat", {})
    with pytest.raises(TypeError, match="OwnCall replaces __call__, which evaluations do not call"):
        DDPOTrainer(DDPOConfig(**where), reward, prompts, pipeline, eval_prompts=[("a cat", {})])
    DDPOTrainer(DDPOConfig(**where), reward, prompts, pipeline)
    solver = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    with pytest.raises(TypeError, match="OwnCall replaces __call__, which solvers do not call"):
        DiffusionNFTTrainer(DiffusionNFTConfig(**where), reward, prompts, pipeline, solver=solver)


def test_a_reference_that_is_a_frozen_copy_cannot_be_replaced(tmp_path: Path):
    class Own(UpBlocks):
        def reference(self) -> Any:
            return super().reference()

    with pytest.raises(TypeError, match="Own replaces reference, which is called where new adapters train alone"):
        trained(Own, tmp_path)
    assert trained(Own, tmp_path, use_lora=True)


@pytest.mark.parametrize("name", ["loss", "calculate_loss"])
def test_a_clipped_loss_that_the_score_function_does_not_call_cannot_be_replaced(name: str, tmp_path: Path):
    kind = type("Own", (DDPOTrainer,), {name: lambda self, *arguments: None})
    config = DDPOConfig(estimator="sf", mixed_precision="no", train_batch_size=2, logdir=str(tmp_path))
    inputs = (lambda images, *_: images.flatten(1).mean(1), lambda: ("a cat", {}), tiny.stable_diffusion())
    if name == "calculate_loss":
        assert kind(config, *inputs)
    else:
        with pytest.raises(TypeError, match=r"Own replaces loss, which estimator='sf' does not call.*calculate_loss"):
            kind(config, *inputs)


@pytest.mark.parametrize("estimator", ["rwr", "rwr_sparse"])
@pytest.mark.parametrize("name", ["calculate_loss", "loss"])
def test_a_loss_that_a_regression_does_not_call_cannot_be_replaced(estimator: str, name: str):
    kind = type("Own", (DDPOTrainer,), {name: lambda self, *arguments: None})
    config = DDPOConfig(estimator=estimator, mixed_precision="no")
    with pytest.raises(TypeError, match=f"Own replaces {name}.*Replace advantages"):
        kind(config, lambda images, *_: images.flatten(1).mean(1), lambda: ("a cat", {}), tiny.stable_diffusion())
