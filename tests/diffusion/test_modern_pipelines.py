"""Records, replays, guides, trains, saves and resumes Flux, SD3, Qwen-Image and Wan, all unmodified."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import modern, tiny
from torch import Tensor

from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer
from trimtab_diffusion.recorder import record
from trimtab_diffusion.steps import gaussian_logprob
from trimtab_diffusion.training.sampling import captioned
from trimtab_diffusion.trajectories import Fixed, Trajectories, sampled_pairs

BUILD: dict[str, Callable[[], Any]] = {
    "flux": modern.flux,
    "flux_schnell": lambda: modern.flux(embeds_guidance=False),
    "sd3": tiny.stable_diffusion_3,
    "qwen_image": modern.qwen_image,
    "wan": modern.wan,
}
SIZES: dict[str, dict[str, Any]] = {
    "flux": {"height": 16, "width": 16, "max_sequence_length": 16},
    "flux_schnell": {"height": 16, "width": 16, "max_sequence_length": 16},
    "sd3": {},
    "qwen_image": {"height": 16, "width": 16},
    "wan": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16},
}
PROMPTS = ("a cat", "two big dogs", "a red ant", "an owl asleep")
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:The steps of UniPCMultistepScheduler have no log-probability")


class Turns:
    """Returns prompts of different lengths in turn."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> tuple[str, dict[str, Any]]:
        self.calls += 1
        return PROMPTS[self.calls % 4], {}

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def brightness(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Tensor:
    return images.flatten(1).mean(1)


def trainer(kind: str, folder: Path, *, use_lora: bool, **settings: Any) -> DDPOTrainer:
    with tiny.from_seed(1):
        pipeline = DDPOStableDiffusionPipeline(BUILD[kind](), use_lora=use_lora, call_kwargs=SIZES[kind])
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "mixed_precision": "no",
        "sample_num_steps": 3,
        "sample_eta": 0.7,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 2,
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
        "train_num_inner_epochs": 2,
        "train_clip_range": 1e-2,
        "train_learning_rate": 1e-2,
        "sample_guidance_scale": 3.0,
    }
    return DDPOTrainer(DDPOConfig(**defaults | settings), brightness, Turns(), pipeline)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def differing(module: torch.nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}


def gaps(denoiser: torch.nn.Module, trajectories: Trajectories) -> Tensor:
    """Returns the replayed minus the recorded log-probabilities of every step of every sample."""
    every = torch.cartesian_prod(torch.arange(len(trajectories)), torch.arange(len(trajectories.schedule.steps)))
    rows, steps = every.unbind(1)
    pairs = sampled_pairs(trajectories, CPU, rows, steps)
    with torch.no_grad():
        mean, std = trajectories.schedule.gaussian(denoiser, pairs.latents, steps, pairs.conditions)
    return gaussian_logprob(pairs.next_latents, mean, std) - pairs.logprobs


# Training


@pytest.mark.parametrize(
    "use_lora", [pytest.param(False, marks=pytest.mark.slow, id="full"), pytest.param(True, id="lora")]
)
@pytest.mark.parametrize("kind", BUILD)
def test_a_pipeline_is_trained_saved_and_resumed(kind: str, use_lora: bool, tmp_path: Path):
    ddpo = trainer(kind, tmp_path, use_lora=use_lora)
    pipeline = ddpo.sd_pipeline.sd_pipeline
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    before = {name: weights(part) for name, part in parts.items()}
    history = ddpo.train(2)

    assert all(torch.isfinite(torch.tensor(stats["loss"])) for stats in history)
    assert history[0]["selfcheck/nats"] < 0.01  # nats of a joint probability: the ratio is 1 before the first update
    assert history[0]["ratio"] != 1  # after the first update
    changed = {name: differing(part, before[name]) for name, part in parts.items()}
    assert set(filter(changed.get, changed)) == {"transformer"}
    if use_lora:
        assert all("lora_" in name for name in changed["transformer"])

    again = trainer(kind, tmp_path, use_lora=use_lora, resume_from=str(tmp_path / "checkpoints" / "checkpoint-1"))
    again.step(1, again.global_step)
    assert not differing(again.sd_pipeline.denoiser, weights(ddpo.sd_pipeline.denoiser))
    assert again.last_stats["reward_mean"] == history[1]["reward_mean"]


@pytest.mark.parametrize("kind", BUILD)
def test_saved_adapters_are_loaded_by_diffusers(kind: str, tmp_path: Path):
    ddpo = trainer(kind, tmp_path, use_lora=True)
    ddpo.step(0, 0)
    ddpo.save_pretrained(tmp_path / "adapters")
    fresh, stock = BUILD[kind](), BUILD[kind]()
    fresh.load_lora_weights(tmp_path / "adapters")
    fresh.scheduler = stock.scheduler = ddpo.sd_pipeline.scheduler
    call = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "pt", **SIZES[kind]}
    pipelines = (ddpo.sd_pipeline.sd_pipeline, fresh, stock)
    trained, loaded, untrained = (each(generator=tiny.generator(), **call)[0] for each in pipelines)
    torch.testing.assert_close(loaded, trained)
    assert not torch.allclose(trained, untrained)


def test_rewards_get_images_or_videos(tmp_path: Path):
    shapes = []

    def reward(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Tensor:
        shapes.append(tuple(images.shape))
        assert 0 <= images.min() <= images.max() <= 1
        return brightness(images, prompts, metadata)

    for kind in ("flux", "wan"):
        ddpo = trainer(
            kind, tmp_path, use_lora=True, sample_num_batches_per_epoch=1, train_gradient_accumulation_steps=1
        )
        ddpo.reward_fn = reward
        samples = ddpo.draw(0)
        images, prompts, _, rewards, _ = samples.batches[-1]
        pictures, captions = captioned(images, prompts, rewards, limit=1)
        shapes.append(tuple(pictures[0].shape))
        assert len(pictures) == len(captions) == 1
    assert shapes == [(2, 3, 16, 16), (3, 16, 16), (2, 5, 3, 16, 16), (3, 16, 5 * 16)]


# Guidance: by hand, from plain forward passes of each half


def output_of(pipeline: Any, latents: Tensor, time: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return pipeline.transformer(latents, timestep=time.expand(1), return_dict=False, **arguments)[0]


def first_step(pipeline: Any, **call: Any) -> tuple[Trajectories, Tensor, Tensor]:
    """Returns a sample's trajectory, its noise, and the denoiser's replayed output for it."""
    call |= {"prompt": ["a cat"], "num_inference_steps": 2, "output_type": "pt", "generator": tiny.generator()}
    _, trajectories = record(pipeline, eta=0.7, **call)
    row, step = torch.tensor([0]), torch.tensor([0])
    with torch.no_grad():
        conditions = sampled_pairs(trajectories, CPU, row, step).conditions
        replayed = trajectories.schedule.ask(pipeline.transformer, trajectories.first, step, conditions)
    return trajectories, trajectories.first, replayed


def test_flux_takes_embedded_and_classifier_free_guidance():
    pipeline, scale = modern.flux(), 4.0
    options = {"guidance_scale": 3.5, "true_cfg_scale": scale, "negative_prompt": ["dull"], **SIZES["flux"]}
    trajectories, noise, replayed = first_step(pipeline, **options)

    def alone(prompt: str) -> Tensor:
        states, pooled, text_ids = pipeline.encode_prompt(prompt, None, max_sequence_length=16)
        ids = pipeline._prepare_latent_image_ids(1, 4, 4, CPU, torch.float32)
        texts = {"encoder_hidden_states": states, "pooled_projections": pooled, "txt_ids": text_ids, "img_ids": ids}
        return output_of(pipeline, noise, trajectories.schedule.times[0], guidance=torch.tensor([3.5]), **texts)

    expected = alone("dull") + scale * (alone("a cat") - alone("dull"))
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-5)
    _, _, other = first_step(pipeline, **options | {"guidance_scale": 1.0})
    assert not torch.allclose(replayed, other, atol=1e-3)


def test_a_negative_prompt_that_embedded_guidance_does_not_read_is_refused(tmp_path: Path):
    config = DDPOConfig(mixed_precision="no", logdir=str(tmp_path), negative_prompts="dull")
    for call in ({}, {"true_cfg_scale": 1.0}):
        wrapped = DDPOStableDiffusionPipeline(modern.flux(), call_kwargs=SIZES["flux"] | call)
        with pytest.raises(ValueError, match="'dull' came, and the guidance_scale of FluxPipeline is embedded"):
            DDPOTrainer(config, brightness, lambda: ("a cat", {}), wrapped)
    wrapped = DDPOStableDiffusionPipeline(modern.flux(), call_kwargs=SIZES["flux"] | {"true_cfg_scale": 2.0})
    assert DDPOTrainer(config, brightness, lambda: ("a cat", {}), wrapped)


def test_qwen_image_keeps_the_norm_of_every_token():
    pipeline, scale = modern.qwen_image(), 4.0
    options = {"true_cfg_scale": scale, "negative_prompt": ["something dull"], **SIZES["qwen_image"]}
    trajectories, noise, replayed = first_step(pipeline, **options)

    def alone(prompt: str) -> Tensor:
        states, _ = pipeline.encode_prompt(prompt)
        texts = {"encoder_hidden_states": states, "img_shapes": [[(1, 4, 4)]]}
        return output_of(pipeline, noise, trajectories.schedule.times[0], **texts)

    with_prompt, without = alone("a cat"), alone("something dull")  # lengths differ: the replay pads one
    combined = without + scale * (with_prompt - without)
    expected = combined / combined.norm(dim=-1, keepdim=True) * with_prompt.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(replayed.norm(dim=-1), with_prompt.norm(dim=-1))
    assert not torch.allclose(replayed, combined, atol=1e-3)


def test_wan_takes_classifier_free_guidance():
    pipeline, scale = modern.wan(), 4.0
    pipeline = DDPOStableDiffusionPipeline(pipeline).sd_pipeline  # its scheduler has log-probabilities
    trajectories, noise, replayed = first_step(pipeline, guidance_scale=scale, negative_prompt=["dull"], **SIZES["wan"])
    assert noise.shape == (1, 4, 3, 8, 8)
    with_prompt, without = (
        output_of(pipeline, noise, trajectories.schedule.times[0], encoder_hidden_states=states)
        for states in pipeline.encode_prompt("a cat", "dull", max_sequence_length=16)
    )
    torch.testing.assert_close(replayed, without + scale * (with_prompt - without), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BUILD)
def test_the_configs_scale_is_that_of_the_pipelines_guidance(kind: str, tmp_path: Path):
    settings = {"sample_num_batches_per_epoch": 1, "train_gradient_accumulation_steps": 1}
    weak, strong = (
        trainer(kind, tmp_path, use_lora=True, sample_guidance_scale=scale, **settings).draw(0).trajectories
        for scale in (2.0, 6.0)
    )
    assert torch.equal(weak.first, strong.first)
    assert not torch.allclose(weak.latents, strong.latents, atol=1e-3)
    assert (weak.schedule.guidance, strong.schedule.guidance) == ((None, None) if kind == "flux" else (2.0, 6.0))


# Batches


@pytest.mark.parametrize("kind", BUILD)
def test_samples_of_several_batches_are_replayed_in_one(kind: str, tmp_path: Path):
    """Prompt lengths differ between batches, and between prompts and negative prompts."""
    ddpo = trainer(kind, tmp_path, use_lora=True)
    assert float(gaps(ddpo.model, ddpo.draw(0).trajectories).abs().max()) < 3e-6


def test_as_many_samples_as_tokens_are_no_rows_of_positions():
    """Flux's position ids have a row per token; 16 images with 16 tokens must not get one row each."""
    pipeline = DDPOStableDiffusionPipeline(modern.flux())
    call = {"num_inference_steps": 2, "output_type": "pt", "guidance_scale": 3.5, **SIZES["flux"]}
    trajectories = pipeline(["a cat"] * 16, eta=0.7, **call).trajectories
    assert isinstance(trajectories.conditions["img_ids"], Fixed)
    assert float(gaps(pipeline.denoiser, trajectories).abs().max()) < 3e-6


def test_latents_are_kept_as_the_pipeline_has_them_and_read_as_the_denoiser_wants_them():
    """Wan keeps float32 latents even for a bfloat16 denoiser."""
    pipeline = DDPOStableDiffusionPipeline(modern.wan(dtype=torch.bfloat16))
    call = {"num_inference_steps": 2, "output_type": "pt", "guidance_scale": 3.0, **SIZES["wan"]}
    trajectories = pipeline(["a cat", "a dog"], eta=0.7, **call).trajectories
    assert trajectories.latents.dtype is torch.float32
    assert trajectories.schedule.dtype is torch.bfloat16
    assert float(gaps(pipeline.denoiser, trajectories).abs().max()) < 0.05
