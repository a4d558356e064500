"""Compilation, memory formats, checkpointing and bf16: what each changes, while the numbers agree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from tests.diffusion import modern, tiny
from tests.diffusion.run_ddpo_distributed import brightness, trainer, weights
from torch._dynamo.utils import counters

from trimtab_diffusion import DDPOTrainer
from trimtab_diffusion.rewards import mean_over_frames

ONE_UPDATE: dict[str, Any] = {
    "sample_num_batches_per_epoch": 2,
    "train_batch_size": 2,
    "train_gradient_accumulation_steps": 2,
    "train_learning_rate": 1.0,
    "train_adam_epsilon": 1.0,  # far above the gradients: changes are proportional to them
}
FLUX: dict[str, Any] = {"height": 16, "width": 16, "max_sequence_length": 16}


class Updated(NamedTuple):
    """A trainer after its first update, and what the update added to each weight."""

    trainer: DDPOTrainer
    changes: dict[str, torch.Tensor]


def after_an_update(folder: Path, pipeline: Any, call: dict[str, Any], **settings: Any) -> Updated:
    ddpo = trainer(str(folder), pipeline, mean_over_frames(brightness), **ONE_UPDATE, **settings)
    ddpo.sd_pipeline.call_kwargs = call
    before = weights(ddpo)
    ddpo.step(0, 0)
    return Updated(ddpo, {name: weight - before[name] for name, weight in weights(ddpo).items()})


def assert_same(other: Updated, plain: Updated, rtol: float) -> None:
    for name in ("reward_mean", "loss", "grad_norm"):
        expected = plain.trainer.last_stats[name]
        assert other.trainer.last_stats[name] == pytest.approx(expected, rel=rtol, abs=1e-5)
    largest = max(float(change.abs().max()) for change in plain.changes.values())
    for name, change in plain.changes.items():
        torch.testing.assert_close(other.changes[name], change, rtol=rtol, atol=rtol * largest, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), [("flux", "inductor"), ("unet", "inductor"), ("sd3", "aot_eager")])
def test_compiled_blocks_make_the_same_update(kind: str, backend: str, tmp_path: Path):
    builders = {"flux": modern.flux, "unet": tiny.stable_diffusion, "sd3": tiny.stable_diffusion_3}
    build, call = builders[kind], FLUX if kind == "flux" else {}
    plain = after_an_update(tmp_path, build(), call)
    torch._dynamo.reset()
    counters.clear()
    compiled = after_an_update(tmp_path, build(), call, train_compile=backend)
    assert counters["stats"]["unique_graphs"] > 0
    assert_same(compiled, plain, 1e-3)
    assert compiled.trainer.last_stats["selfcheck/nats"] < 0.01


def test_channels_last_makes_the_same_update(tmp_path: Path):
    plain = after_an_update(tmp_path, tiny.stable_diffusion(), {})
    pipeline = tiny.stable_diffusion()
    outputs: list[torch.Tensor] = []
    pipeline.unet.conv_in.register_forward_hook(lambda module, args, output: outputs.append(output))
    other = after_an_update(tmp_path, pipeline, {}, train_channels_last=True)
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in outputs)
    assert not any(output.is_contiguous() for output in outputs)
    assert other.trainer.model.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert_same(other, plain, 1e-3)


def test_channels_last_of_a_video_denoiser_is_that_of_three_dimensions(tmp_path: Path):
    with pytest.warns(UserWarning, match="UniPC"):
        ddpo = trainer(str(tmp_path), modern.wan(), train_channels_last=True)
    assert ddpo.model.patch_embedding.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_channels_last_without_convolutions_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="QwenImageTransformer2DModel has none"):
        trainer(str(tmp_path), modern.qwen_image(), train_channels_last=True)


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
def test_checkpointing_recomputes_the_blocks_of_a_transformer(tmp_path: Path, use_lora: bool):
    calls = []
    for is_recomputed in (False, True):
        pipeline = modern.flux()
        counted: list[bool] = []
        pipeline.transformer.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args, counted=counted: counted.append(torch.is_grad_enabled())
        )
        end = after_an_update(tmp_path, pipeline, FLUX, use_lora=use_lora, train_gradient_checkpointing=is_recomputed)
        calls.append((sum(counted), end))
    (plain_calls, plain), (calls_again, again) = calls
    assert calls_again == 2 * plain_calls
    assert_same(again, plain, 1e-4)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Resets accelerate, which allows one precision per program."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", ["flux", "qwen_image", "wan"])
@pytest.mark.filterwarnings("ignore:The steps of UniPC")
def test_bf16_computes_in_bf16_and_trains_in_float32(tmp_path: Path, kind: str):
    pipeline = getattr(modern, kind)()
    call = {"height": 16, "width": 16, "max_sequence_length": 16} | ({"num_frames": 5} if kind == "wan" else {})
    dtypes = set()
    block = (pipeline.transformer.blocks if kind == "wan" else pipeline.transformer.transformer_blocks)[0]
    linear = next(module for module in block.modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    settings = {"mixed_precision": "bf16", "train_clip_range": 1e-1}
    ddpo, _ = after_an_update(tmp_path, pipeline, call, use_lora=True, **settings)
    assert dtypes == {torch.bfloat16}
    assert all(weight.dtype is torch.float32 for weight in weights(ddpo).values())
    assert ddpo.sd_pipeline.sd_pipeline.text_encoder.dtype is torch.bfloat16
    assert torch.isfinite(torch.tensor(ddpo.last_stats["loss"]))
    assert ddpo.last_stats["ratio"] == pytest.approx(1, abs=0.05)
