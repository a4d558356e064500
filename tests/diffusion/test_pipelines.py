"""Preparing diffusers pipelines for training: what trains, what samples, and what is rejected."""

import warnings
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    KarrasVeScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
)
from tests.diffusion import tiny
from torch import nn

from trimtab_diffusion import (
    DDPOConfig,
    DDPOPipelineOutput,
    DDPOSchedulerOutput,
    DDPOStableDiffusionPipeline,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    pipelines,
)
from trimtab_diffusion.lora import add_lora
from trimtab_diffusion.pipelines import trainable_scheduler
from trimtab_diffusion.trajectories import sampled_pairs

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
GIVEN = BETAS | {"steps_offset": 1, "timestep_spacing": "trailing", "prediction_type": "v_prediction"}


class Checker(nn.Module):
    """Has the call of the stock safety checker."""

    def forward(self, images: Any, clip_input: Any) -> Any:
        return images, [True] * len(images)


def trained_with(pipeline: Any, **settings: Any) -> DDPOTrainer:
    """Returns a trainer after one epoch with four updates."""
    config = DDPOConfig(
        **{
            "mixed_precision": "no",
            "sample_num_steps": 2,
            "sample_guidance_scale": 3.0,
            "sample_batch_size": 2,
            "sample_num_batches_per_epoch": 2,
            "train_batch_size": 1,
            "train_learning_rate": 1e-2,
        }
        | settings
    )
    trainer = DDPOTrainer(config, lambda images, *_: images[:, 0].mean((1, 2)), lambda: ("a cat", {}), pipeline)
    trainer.step(0, 0)
    return trainer


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def changed(module: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}


# -------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize(
    ("old", "clips"),
    [
        (PNDMScheduler(**GIVEN), False),
        (DDPMScheduler(**GIVEN, clip_sample=False), False),
        (DDPMScheduler(**GIVEN, clip_sample=True), True),
        (EulerDiscreteScheduler(**GIVEN), False),
        (DPMSolverMultistepScheduler(**GIVEN), False),
    ],
)
def test_others_with_betas_become_ddim_with_their_settings(old, clips):
    with pytest.warns(UserWarning, match=f"{type(old).__name__} have no log-probability: DDIMScheduler"):
        new = trainable_scheduler(old)
    assert type(new) is DDIMScheduler
    for name in (*GIVEN, "num_train_timesteps"):
        assert new.config[name] == old.config[name], name
    assert new.config.clip_sample is clips
    torch.testing.assert_close(new.alphas_cumprod, old.alphas_cumprod, rtol=1e-5, atol=0)


ENDS = {"final_sigmas_type": "sigma_min"}
CLIPS = {"dynamic_thresholding_ratio": 0.9, "sample_max_value": 2.0}


@pytest.mark.parametrize(
    ("old", "first", "ends_at_one"),
    [  # the first of five timesteps, as each kind defines it: 4 * 200 and an offset, or the last one of the schedule
        (PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1), 801, False),
        (PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=True), 801, True),
        (PNDMScheduler(**BETAS, timestep_spacing="trailing", skip_prk_steps=True), 999, False),
        (EulerDiscreteScheduler(**BETAS), 999, True),
        (EulerDiscreteScheduler(timestep_spacing="leading", prediction_type="v_prediction"), 801, True),
        (EulerDiscreteScheduler(**ENDS), 999, False),
        (EulerAncestralDiscreteScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True), 999, True),
        (HeunDiscreteScheduler(), 999, True),
        (LMSDiscreteScheduler(beta_schedule="scaled_linear", num_train_timesteps=500), 499, True),
        (DDPMScheduler(timestep_spacing="trailing", clip_sample_range=3.0, **CLIPS), 999, True),
        (DPMSolverMultistepScheduler(), 999, True),
        (DPMSolverMultistepScheduler(timestep_spacing="trailing", **ENDS, **CLIPS), 999, False),
        (UniPCMultistepScheduler(**BETAS), 999, True),
    ],
    ids=lambda value: type(value).__name__.removesuffix("Scheduler"),
)
def test_training_and_later_sampling_see_the_timesteps_of_the_replaced_scheduler(tmp_path, old, first, ends_at_one):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers sets the offset of a scheduler to 1, and its clip_sample to False
        pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(scheduler=old))
    new = pipeline.scheduler
    for name in DDIMScheduler().config.keys() & old.config.keys() - {"_use_default_values", "_class_name"}:
        assert new.config[name] == old.config[name], name
    assert float(new.final_alpha_cumprod) == (1.0 if ends_at_one else float(new.alphas_cumprod[0]))
    trained = pipeline("a cat", num_inference_steps=5, output_type="latent").trajectories.schedule.times
    pipeline.save_pretrained(tmp_path)
    for stock in (
        DiffusionPipeline.from_pretrained(tmp_path).scheduler,
        DDIMScheduler.from_config(type(old).from_config(new.config).config),
    ):
        stock.set_timesteps(5)
        assert stock.timesteps.tolist() == trained.tolist()
    assert trained[0] == first


def test_settings_that_were_never_given_are_kept_too():
    with pytest.warns(UserWarning, match="takes its place"):
        new = trainable_scheduler(HeunDiscreteScheduler())  # its default betas differ from DDIM's
    assert (new.config.beta_start, new.config.beta_end) == (0.00085, 0.012)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers corrects the offset of old Stable Diffusion files
        stock = tiny.stable_diffusion(scheduler=PNDMScheduler(**BETAS, skip_prk_steps=True))
        assert DDPOStableDiffusionPipeline(stock).scheduler.config.steps_offset == 1


@pytest.mark.parametrize(
    ("old", "shift"),
    [
        (DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction"), 5.0),
        (FlowMatchHeunDiscreteScheduler(shift=3.0), 3.0),
        (FlowMatchEulerDiscreteScheduler(shift=2.0, stochastic_sampling=True), 2.0),
    ],
)
def test_others_along_a_flow_become_flow_matching_euler(old, shift):
    with pytest.warns(UserWarning, match=f"{type(old).__name__} have no log-probability: FlowMatchEuler"):
        new = trainable_scheduler(old)
    assert type(new) is FlowMatchEulerDiscreteScheduler
    assert (new.config.shift, new.config.stochastic_sampling) == (shift, False)


@pytest.mark.parametrize("scheduler", [tiny.ddim(), FlowMatchEulerDiscreteScheduler(shift=3.0)])
def test_schedulers_with_log_probabilities_stay(scheduler):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainable_scheduler(scheduler) is scheduler
        pipeline = tiny.stable_diffusion() if isinstance(scheduler, DDIMScheduler) else tiny.stable_diffusion_3()
        pipeline.scheduler = scheduler
        assert DDPOStableDiffusionPipeline(pipeline).scheduler is scheduler


def test_a_scheduler_that_is_neither_is_refused():
    with pytest.raises(ValueError, match=r"KarrasVeScheduler has no log-probabilities.*DDIMScheduler or a FlowMatch"):
        trainable_scheduler(KarrasVeScheduler())


@pytest.mark.parametrize("old", [PNDMScheduler(**BETAS, skip_prk_steps=True), EulerDiscreteScheduler(**BETAS)])
def test_a_pipeline_with_another_scheduler_draws_and_trains(old):
    with pytest.warns(UserWarning, match="takes its place"):
        pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(scheduler=old))
    before = weights(pipeline.unet)
    trained_with(pipeline)
    assert changed(pipeline.unet, before)


# ------------------------------------------------------------------------- trainable weights


@pytest.mark.parametrize("use_lora", [False, True])
@pytest.mark.parametrize("kind", ["stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3"])
def test_only_the_denoiser_or_its_adapters_train(kind, use_lora):
    stock = getattr(tiny, kind)()
    denoiser = stock.transformer if "3" in kind else stock.unet
    stock.vae.train()
    pipeline = DDPOStableDiffusionPipeline(stock, use_lora=use_lora)
    before = {name: weights(part) for name, part in stock.components.items() if isinstance(part, nn.Module)}
    parts = {name: getattr(stock, name) for name in before}
    trained_with(pipeline, sample_eta=0.7 if "3" in kind else 1.0)
    moved = {name: changed(part, before[name]) for name, part in parts.items()}
    assert {name for name, names in moved.items() if names} == {pipeline.name}
    assert all("lora_" in name for name in moved[pipeline.name]) is use_lora
    assert moved[pipeline.name] <= {name for name, weight in denoiser.named_parameters() if weight.requires_grad}
    frozen = [part for name, part in parts.items() if name != pipeline.name]
    assert not any(weight.requires_grad for part in frozen for weight in part.parameters())
    assert not any(part.training for part in parts.values())
    assert pipeline.get_trainable_layers() is pipeline.denoiser is pipeline.unet is denoiser


@pytest.mark.parametrize("rank", [2, 4])
def test_adapters_have_the_rank_that_is_asked_for_and_start_as_nothing(rank):
    stock = tiny.stable_diffusion()
    call = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "pt"}
    before = stock(**call, generator=tiny.generator()).images
    pipeline = DDPOStableDiffusionPipeline(stock, use_lora=True, lora_rank=rank)
    assert torch.equal(stock(**call, generator=tiny.generator()).images, before)
    ranks = {len(weight) for name, weight in pipeline.unet.named_parameters() if "lora_A" in name}
    assert ranks == {rank}


def test_adapters_are_float32_on_a_denoiser_that_is_not():
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(dtype=torch.bfloat16), use_lora=True)
    for name, weight in pipeline.unet.named_parameters():
        assert weight.requires_grad is ("lora_" in name)
        assert weight.dtype is (torch.float32 if "lora_" in name else torch.bfloat16), name


def test_whole_weights_below_adapters_are_refused_until_these_are_merged():
    stock = tiny.stable_diffusion()
    add_lora(stock.unet, rank=2)
    with pytest.raises(ValueError, match=r"adapters on unet.*use_lora=True.*fuse_lora\(\)"):
        DDPOStableDiffusionPipeline(stock)
    stock.fuse_lora()
    stock.unload_lora_weights()
    names = {name for name, _ in DDPOStableDiffusionPipeline(stock).denoiser.named_parameters()}
    assert names == {name for name, _ in tiny.unet().named_parameters()}


@pytest.mark.parametrize(("words", "named"), [(("a cat", 64), {}), (("a cat",), {"prompt": "a dog"})])
def test_only_the_prompt_is_passed_by_its_place(words, named):
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion())
    with pytest.raises(TypeError, match="Pass the prompt once, and everything else by name"):
        pipeline(*words, num_inference_steps=2, **named)


def test_the_safety_checker_is_switched_off_and_that_is_said():
    stock = tiny.stable_diffusion()
    stock.register_modules(safety_checker=Checker())
    with pytest.warns(UserWarning, match="safety checker is off"):
        pipeline = DDPOStableDiffusionPipeline(stock)
    assert stock.safety_checker is None
    images = pipeline("a cat", num_inference_steps=2, output_type="pt").images
    assert images.amax() > 0


def test_any_diffusers_pipeline_can_be_handed_to_the_trainer():
    stock = tiny.stable_diffusion_xl()
    before = weights(stock.unet)
    trainer = trained_with(stock)
    assert isinstance(trainer.sd_pipeline, DDPOStableDiffusionPipeline)
    assert not trainer.sd_pipeline.use_lora
    assert {name.partition(".")[0] for name in changed(stock.unet, before)} > {"conv_in", "mid_block", "conv_out"}


class Distilled(StableDiffusionPipeline):
    """Takes no negative prompt, and guidance as `true_cfg_scale`; its denoiser says nothing of embedded guidance."""

    def __call__(self, prompt: Any = None, *, true_cfg_scale: float = 1.0, **kwargs: Any) -> Any:
        assert "negative_prompt" not in kwargs
        return super().__call__(prompt, guidance_scale=true_cfg_scale, **kwargs)


def test_a_pipeline_without_negative_prompts_trains_with_guidance_and_refuses_them():
    stock = Distilled(**tiny.stable_diffusion().components, requires_safety_checker=False)
    stock.set_progress_bar_config(disable=True)
    trainer = trained_with(stock, sample_guidance_scale=3.0)
    assert trainer.sd_pipeline.guidance_argument == "true_cfg_scale"
    assert trainer.sd_pipeline.schedule.guidance == 3.0
    with pytest.raises(ValueError, match="negative_prompts='dull' came, and Distilled takes no negative prompt"):
        trained_with(stock, negative_prompts="dull")


def test_a_controlnet_pipeline_trains_on_its_image():
    def drawn(image: torch.Tensor) -> tuple[DDPOTrainer, torch.Tensor]:
        stock, _ = tiny.controlnet()
        pipeline = DDPOStableDiffusionPipeline(stock, call_kwargs={"image": image})
        trainer = trained_with(pipeline)
        assert trainer.last_stats["selfcheck/nats"] < 0.01
        return trainer, trainer.draw(1).trajectories.latents

    _, image = tiny.controlnet()
    (one, first), (other, second) = drawn(image), drawn(1 - image)
    assert changed(one.sd_pipeline.unet, weights(tiny.controlnet()[0].unet))
    assert not changed(one.sd_pipeline.sd_pipeline.controlnet, weights(other.sd_pipeline.sd_pipeline.controlnet))
    assert not torch.equal(first, second)


def test_a_pipeline_without_a_denoiser_is_refused():
    with pytest.raises(ValueError, match="Checker has neither unet nor transformer"):
        DDPOStableDiffusionPipeline(Checker())


# ---------------------------------------------------------------------------- drawing


def test_pictures_come_with_how_they_were_drawn():
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion())
    sampled = pipeline(["a cat", "a dog"], num_inference_steps=3, output_type="pt", generator=tiny.generator())
    assert isinstance(sampled, DDPOPipelineOutput)
    assert sampled.images.shape == (2, 3, 16, 16)
    assert [latents.shape for latents in sampled.latents] == [(2, 4, 8, 8)] * 4
    assert [logprobs.shape for logprobs in sampled.log_probs] == [(2,)] * 3
    noise = torch.randn(2, 4, 8, 8, generator=tiny.generator())
    assert torch.equal(sampled.latents[0], noise)
    decoded = pipeline.vae.decode(sampled.latents[-1] / pipeline.vae.config.scaling_factor).sample
    torch.testing.assert_close(sampled.images, (decoded / 2 + 0.5).clamp(0, 1))
    assert all(not tensor.requires_grad for tensor in (*sampled.latents, *sampled.log_probs, sampled.images))


@pytest.mark.parametrize("kind", ["stable_diffusion", "stable_diffusion_3"])
def test_a_step_by_hand_is_the_recorded_one(kind):
    pipeline, eta = DDPOStableDiffusionPipeline(getattr(tiny, kind)()), 0.7
    sampled = pipeline(
        ["a cat", "a dog"],
        eta=eta,
        num_inference_steps=4,
        guidance_scale=3.0,
        output_type="pt",
        generator=tiny.generator(),
    )
    tracks = sampled.trajectories
    for i, time in enumerate(pipeline.scheduler.timesteps):
        rows, steps = torch.arange(2), torch.full((2,), i)
        pairs = sampled_pairs(tracks, torch.device("cpu"), rows, steps)
        before = pairs.latents
        assert torch.equal(before, sampled.latents[i])
        with torch.no_grad():
            output = tracks.schedule.ask(pipeline.unet, before, steps, pairs.conditions)
        scored = pipeline.scheduler_step(output, time, before, eta=eta, prev_sample=sampled.latents[i + 1])
        assert isinstance(scored, DDPOSchedulerOutput)
        assert torch.equal(scored.latents, sampled.latents[i + 1])
        torch.testing.assert_close(scored.log_probs, sampled.log_probs[i])


def test_a_step_by_hand_draws_what_ddim_does():
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion())
    pipeline.scheduler.set_timesteps(4)
    output, x = torch.randn(2, 3, 4, 8, 8, generator=tiny.generator())
    time = pipeline.scheduler.timesteps[1]
    stock = pipeline.scheduler.step(output, time, x, eta=0.5, generator=tiny.generator(1)).prev_sample
    stepped = pipeline.scheduler_step(output, time, x, eta=0.5, generator=tiny.generator(1))
    torch.testing.assert_close(stepped.latents, stock, atol=1e-5, rtol=1e-5)
    again = pipeline.scheduler_step(output, time.expand(3), x, eta=0.5, prev_sample=stepped.latents)
    assert torch.equal(again.log_probs, stepped.log_probs)
    assert stepped.log_probs.shape == (3,)


# ---------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("pipeline")
    tiny.stable_diffusion(seed=5).save_pretrained(where)
    return str(where)


@pytest.mark.parametrize("use_lora", [True, False])
def test_the_pipeline_of_a_folder(folder, use_lora):
    pipeline = DefaultDDPOStableDiffusionPipeline(folder, use_lora=use_lora, lora_rank=3)
    stock = tiny.stable_diffusion(seed=5)
    call = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "pt"}
    assert type(pipeline.sd_pipeline) is type(stock)
    pipeline.set_progress_bar_config(disable=True)
    images = [each(**call, generator=tiny.generator()).images for each in (pipeline.sd_pipeline, stock)]
    assert torch.equal(*images)
    trains = {name for name, weight in pipeline.unet.named_parameters() if weight.requires_grad}
    assert trains == {name for name, _ in pipeline.unet.named_parameters() if "lora_" in name or not use_lora}
    ranks = {len(weight) for name, weight in pipeline.unet.named_parameters() if "lora_A" in name}
    assert ranks == ({3} if use_lora else set())


def test_adapters_are_the_default_as_documented(folder):
    assert DefaultDDPOStableDiffusionPipeline(folder).use_lora
    assert not DDPOStableDiffusionPipeline(tiny.stable_diffusion()).use_lora


@pytest.mark.slow
def test_what_loads_a_pipeline_is_passed_on(monkeypatch):
    calls = []

    class Library:
        @staticmethod
        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return tiny.stable_diffusion()

    monkeypatch.setattr(pipelines, "DiffusionPipeline", Library)
    DefaultDDPOStableDiffusionPipeline("someone/sd", pretrained_model_revision="v2", load_kwargs={"variant": "fp16"})
    pipeline = DefaultDDPOStableDiffusionPipeline("someone/sd", call_kwargs={"height": 24, "width": 8})
    assert calls == [
        (("someone/sd",), {"revision": "v2", "variant": "fp16"}),
        (("someone/sd",), {"revision": "main"}),
    ]
    assert pipeline("a cat", num_inference_steps=2, output_type="pt").images.shape == (1, 3, 24, 8)
    assert pipeline("a cat", num_inference_steps=2, output_type="pt", height=8).images.shape == (1, 3, 8, 8)


def test_a_dtype_is_that_of_the_frozen_parts(folder):
    pipeline = DefaultDDPOStableDiffusionPipeline(folder, load_kwargs={"torch_dtype": torch.bfloat16})
    assert pipeline.vae.dtype is pipeline.text_encoder.dtype is torch.bfloat16
