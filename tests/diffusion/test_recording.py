"""Compares trajectories with the stock pipelines that they record, and each step with manual arithmetic."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
from tests.diffusion import tiny
from torch.distributions import Normal

from trimtab_common.health import TrainingDivergedError
from trimtab_diffusion.compat.trees import tree_leaves
from trimtab_diffusion.recorder import record
from trimtab_diffusion.steps import gaussian_logprob
from trimtab_diffusion.trajectories import Fixed, Trajectories, joined, sampled_pairs

PROMPTS = ["a red cat", "two dogs"]
NEGATIVE = ["dull", "blurred, grey"]
COUNT = 4
KINDS = ("stable_diffusion", "v_prediction", "stable_diffusion_xl", "controlnet", "stable_diffusion_3")
ETA = dict.fromkeys(KINDS, 1.0) | {"stable_diffusion_3": 0.7}
GUIDED = {"guidance_scale": 5.0, "negative_prompt": NEGATIVE}
FREE = {"guidance_scale": 1.0}
DTYPES = (None, torch.bfloat16, torch.float16)
NEAR = {"atol": 3e-6, "rtol": 0}  # kernels round differently in batches of different sizes


def built(kind: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a pipeline and the arguments of its call."""
    call = {"prompt": PROMPTS, "num_inference_steps": COUNT, "output_type": "pt"}
    if kind == "controlnet":
        pipeline, image = tiny.controlnet(**settings)
        return pipeline, call | {"image": image.repeat(2, 1, 1, 1)}
    if kind == "v_prediction":
        return tiny.stable_diffusion("v_prediction", **settings), call
    return getattr(tiny, kind)(**settings), call


def recorded(kind: str, settings: dict[str, Any], **options: Any) -> tuple[Any, torch.Tensor, Trajectories]:
    pipeline, call = built(kind)
    images, trajectories = record(pipeline, eta=ETA[kind], generator=tiny.generator(), **call, **settings, **options)
    return pipeline, images, trajectories


def denoiser(pipeline: Any) -> Any:
    return pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer


def pairs(trajectories: Trajectories) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns every (image, step), image by image."""
    rows, steps = len(trajectories), len(trajectories.schedule.steps)
    return torch.arange(rows).repeat_interleave(steps), torch.arange(steps).repeat(rows)


def replayed(pipeline: Any, trajectories: Trajectories, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    some = sampled_pairs(trajectories, torch.device("cpu"), rows, steps)
    with torch.no_grad():
        mean, std = trajectories.schedule.gaussian(denoiser(pipeline), some.latents, steps, some.conditions)
    return gaussian_logprob(some.next_latents, mean, std)


# By hand: what the pipelines compute, from their parts


def by_hand(kind: str, pipeline: Any, call: dict[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the denoiser's guided output for all prompts' latents at one time, by a plain forward pass per half."""
    scale, negative = call.get("guidance_scale", 1.0), call.get("negative_prompt")
    texts = {"prompt": PROMPTS, "negative_prompt": negative, "do_classifier_free_guidance": scale > 1}
    if kind == "stable_diffusion_3":
        texts |= dict.fromkeys(("prompt_2", "prompt_3"))
    else:
        texts |= {"device": "cpu", "num_images_per_prompt": 1}
    states, empty, *pooled = pipeline.encode_prompt(**texts)
    sizes = torch.tensor([[16.0, 16, 0, 0, 16, 16]] * 2)  # original, crop, target

    def half(x: torch.Tensor, t: torch.Tensor, states: torch.Tensor, pooled: Any) -> torch.Tensor:
        if kind == "stable_diffusion_3":
            return pipeline.transformer(x, states, pooled, t.expand(len(x))).sample
        extra: dict[str, Any] = {}
        if kind == "stable_diffusion_xl":
            extra["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": sizes}
        if kind == "controlnet":
            control = pipeline.controlnet(x, t, states, controlnet_cond=call["image"])
            extra["down_block_additional_residuals"] = control.down_block_res_samples
            extra["mid_block_additional_residual"] = control.mid_block_res_sample
        return pipeline.unet(x, t, states, **extra).sample

    @torch.no_grad()
    def output(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        prompted = half(x, t, states, pooled[0] if pooled else None)
        if scale <= 1:
            return prompted
        bare = half(x, t, empty, pooled[1] if pooled else None)
        return bare + scale * (prompted - bare)

    return output


def step_by_hand(kind: str, scheduler: Any, output: Any, x: torch.Tensor, index: int) -> tuple[torch.Tensor, float]:
    """Returns mean and deviation after a step: diffusers' DDIM without noise, or the flow's SDE in plain numbers."""
    eta, time = ETA[kind], scheduler.timesteps[index]
    if kind != "stable_diffusion_3":
        mean = scheduler.step(output, time, x, eta=eta, variance_noise=torch.zeros_like(x)).prev_sample
        variance = scheduler._get_variance(time, time - scheduler.config.num_train_timesteps // COUNT)
        return mean, eta * math.sqrt(float(variance))
    sigmas = scheduler.sigmas.tolist()
    t, dt = sigmas[index], sigmas[index] - sigmas[index + 1]
    s = eta * math.sqrt(t / (1 - (sigmas[1] if index == 0 else t)))
    return x - dt * (output + s**2 / (2 * t) * (x + (1 - t) * output)), s * math.sqrt(dt)


# The pipeline is unchanged


@pytest.mark.parametrize("settings", [GUIDED, {"guidance_scale": 3.0}, FREE])
@pytest.mark.parametrize("kind", KINDS[:4])
def test_images_are_those_of_the_stock_pipeline_to_the_bit(kind: str, settings: dict[str, Any]):
    pipeline, images, _ = recorded(kind, settings)
    stock = pipeline(generator=tiny.generator(), eta=1.0, **built(kind)[1], **settings).images
    assert images.shape == (2, 3, 16, 16)
    assert torch.equal(images, stock)
    assert not torch.equal(images, pipeline(generator=tiny.generator(), eta=0.9, **built(kind)[1], **settings).images)


@pytest.mark.parametrize("settings", [GUIDED, FREE])
def test_a_flow_with_hardly_any_noise_draws_the_stock_image(settings: dict[str, Any]):
    pipeline, call = built("stable_diffusion_3")
    images, _ = record(pipeline, eta=1e-5, generator=tiny.generator(), **call, **settings)
    stock = pipeline(generator=tiny.generator(), **call, **settings).images
    torch.testing.assert_close(images, stock, atol=1e-3, rtol=0)


@pytest.mark.parametrize("settings", [GUIDED, FREE])
def test_a_flow_draws_its_noise_from_the_generator_as_the_sde_needs_it(settings: dict[str, Any]):
    kind = "stable_diffusion_3"
    pipeline, images, trajectories = recorded(kind, settings)
    output, generator = by_hand(kind, pipeline, settings), tiny.generator()
    x = torch.randn(2, 4, 8, 8, generator=generator)
    assert torch.equal(trajectories.first, x)
    for index in range(COUNT):
        scheduler = pipeline.scheduler
        mean, std = step_by_hand(kind, scheduler, output(x, scheduler.timesteps[index]), x, index)
        x = mean + std * torch.randn(x.shape, generator=generator)
        torch.testing.assert_close(trajectories.latents[:, index], x, atol=1e-4, rtol=1e-4)
    vae = pipeline.vae
    with torch.no_grad():
        decoded = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor).sample
    torch.testing.assert_close(images, (decoded / 2 + 0.5).clamp(0, 1), atol=1e-3, rtol=0)


def test_latents_are_those_that_the_pipeline_goes_on_with():
    for kind in KINDS:
        seen: list[torch.Tensor] = []

        def keep(pipeline: Any, index: int, time: Any, tensors: dict[str, Any], seen: list = seen) -> dict[str, Any]:
            seen.append(tensors["latents"].clone())
            return {}

        _, _, trajectories = recorded(kind, GUIDED, callback_on_step_end=keep, storage_dtype=torch.bfloat16)
        assert trajectories.latents.dtype == torch.bfloat16
        assert torch.equal(trajectories.latents.float(), torch.stack(seen, 1))
        assert torch.equal(trajectories.first, torch.randn(2, 4, 8, 8, generator=tiny.generator()))
        rows, steps = pairs(trajectories)
        chain = torch.cat([trajectories.first[:, None], trajectories.latents.float()], 1)
        every = sampled_pairs(trajectories, torch.device("cpu"), rows, steps)
        assert torch.equal(every.latents, chain[rows, steps])
        assert torch.equal(every.next_latents, chain[rows, steps + 1])


@contextmanager
def untouched(pipeline: Any) -> Iterator[None]:
    hooks = dict(denoiser(pipeline)._forward_hooks)
    yield
    assert denoiser(pipeline)._forward_hooks == hooks
    assert "step" not in vars(pipeline.scheduler)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_on_the_pipeline(kind: str):
    pipeline, call = built(kind)
    before = pipeline(generator=tiny.generator(), **call).images
    with untouched(pipeline):
        record(pipeline, eta=ETA[kind], generator=tiny.generator(), **call)
    with untouched(pipeline), pytest.raises(KeyError, match="spoiled"):
        record(pipeline, eta=ETA[kind], callback_on_step_end=spoil, **call)
    assert torch.equal(pipeline(generator=tiny.generator(), **call).images, before)


def spoil(*arguments: Any) -> dict[str, Any]:
    raise KeyError("spoiled")


# Log-probabilities


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("settings", [GUIDED, FREE])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_each_step_by_hand(kind: str, settings: dict[str, Any], dtype: torch.dtype | None):
    pipeline, _, trajectories = recorded(kind, settings, storage_dtype=dtype)
    output = by_hand(kind, pipeline, built(kind)[1] | settings)
    x = trajectories.first
    assert trajectories.logprobs.shape == (2, COUNT)
    for index, time in enumerate(pipeline.scheduler.timesteps):
        mean, std = step_by_hand(kind, pipeline.scheduler, output(x, time), x, index)
        x = trajectories.latents[:, index].float()
        expected = Normal(mean, std).log_prob(x).flatten(1).mean(1)
        torch.testing.assert_close(trajectories.logprobs[:, index], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [GUIDED, FREE])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_gives_the_logprobs_in_any_order_and_mix(kind: str, settings: dict[str, Any], dtype: Any):
    pipeline, _, trajectories = recorded(kind, settings, storage_dtype=dtype)
    rows, steps = pairs(trajectories)
    order = torch.randperm(len(rows), generator=tiny.generator(3))
    for some in order.split(3):
        got = replayed(pipeline, trajectories, rows[some], steps[some])
        torch.testing.assert_close(got, trajectories.logprobs[rows[some], steps[some]], **NEAR)
    twice = replayed(pipeline, trajectories, rows[[5, 5]], steps[[5, 5]])
    torch.testing.assert_close(twice, trajectories.logprobs[1, 1].expand(2), **NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_the_same_batch_is_exact(kind: str, dtype: torch.dtype):
    """Also holds in half precision, where kernels round differently in other batches."""
    pipeline, call = built(kind, dtype=dtype)
    _, trajectories = record(pipeline, eta=ETA[kind], generator=tiny.generator(), **call, **GUIDED)
    assert trajectories.latents.dtype == dtype
    assert trajectories.logprobs.dtype == torch.float32
    for step in range(COUNT):
        got = replayed(pipeline, trajectories, torch.arange(2), torch.tensor([step] * 2))
        assert torch.equal(got, trajectories.logprobs[:, step])


def test_replay_has_gradients():
    pipeline, _, trajectories = recorded("stable_diffusion", GUIDED)
    rows, steps = pairs(trajectories)
    some = sampled_pairs(trajectories, torch.device("cpu"), rows, steps)
    trajectories.schedule.ask(pipeline.unet, some.latents, steps, some.conditions).square().sum().backward()
    assert all(weight.grad is not None for weight in pipeline.unet.parameters())


def test_steps_without_noise_have_logprob_0():
    pipeline = tiny.stable_diffusion(scheduler=tiny.ddim(set_alpha_to_one=True))
    _, call = built("stable_diffusion")
    _, trajectories = record(pipeline, eta=1.0, generator=tiny.generator(), **call)
    assert trajectories.logprobs[:, -1].tolist() == [0, 0]
    assert trajectories.logprobs[:, :-1].ne(0).all()
    assert trajectories.logprobs.isfinite().all()


# What is kept


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def kept(trajectories: Trajectories) -> list[torch.Tensor]:
    return tensors_of(vars(trajectories))


@pytest.mark.parametrize("guided", [True, False])
def test_only_half_precision_latents_are_kept_per_step(guided: bool):
    per_step = {}
    for count in (3, 6):
        pipeline, call = built("stable_diffusion")
        call |= {"num_inference_steps": count} | (GUIDED if guided else FREE)
        _, trajectories = record(pipeline, eta=1.0, storage_dtype=torch.bfloat16, **call)
        text = 2 * (1 + guided) * tiny.TEXT_LENGTH * tiny.WIDTH * 4
        latents, logprobs = 2 * 4 * 8 * 8 * 2, 2 * 4
        size = sum(tensor.nbytes for tensor in kept(trajectories))
        assert size == 2 * 4 * 8 * 8 * 4 + text + count * (latents + logprobs)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept(trajectories)}
        assert sum(storage.nbytes() for storage in storages.values()) == size
        fixed = [leaf.value for leaf in trajectories.conditions.values() if isinstance(leaf, Fixed)]
        assert not tensors_of(fixed)
        per_step[count] = size
    assert per_step[6] - per_step[3] == 3 * (2 * 4 * 8 * 8 * 2 + 2 * 4)


def test_trajectories_say_what_they_are():
    _, _, guided = recorded("stable_diffusion", GUIDED)
    _, _, free = recorded("stable_diffusion", FREE)
    assert (guided.schedule.guidance, free.schedule.guidance) == (5.0, None)
    assert len(guided) == 2
    assert guided.dimensions == 4 * 8 * 8
    assert torch.equal(guided.schedule.times, guided.schedule.steps.timesteps)
    assert not any(tensor.requires_grad for tensor in kept(guided))


def test_trajectories_are_kept_where_they_should_be():
    _, images, here = recorded("controlnet", GUIDED)
    _, same, there = recorded("controlnet", GUIDED, storage_device="meta")
    assert torch.equal(images, same)
    assert {tensor.device.type for tensor in kept(there)} == {"meta"}
    assert [tensor.shape for tensor in kept(there)] == [tensor.shape for tensor in kept(here)]


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_joined(kind: str):
    """Joins calls of one image, and of two images for each of two prompts."""
    pipeline, call = built(kind)
    parts = []
    for seed, prompts in enumerate((["a red cat"], PROMPTS)):
        some = call | {"prompt": prompts, "guidance_scale": 3.0, "num_images_per_prompt": seed + 1}
        some |= {"negative_prompt": NEGATIVE[: len(prompts)]}
        if "image" in call:
            some["image"] = call["image"][: len(prompts)] * (1 - seed / 2)
        parts.append(record(pipeline, eta=ETA[kind], generator=tiny.generator(seed), **some)[1])
    joined = Trajectories.joined(parts)
    assert [len(part) for part in parts] == [1, 4]
    assert len(joined) == 5
    rows, steps = pairs(joined)
    order = torch.randperm(len(rows), generator=tiny.generator(3))
    expected = torch.cat([part.logprobs for part in parts])[rows[order], steps[order]]
    torch.testing.assert_close(replayed(pipeline, joined, rows[order], steps[order]), expected, **NEAR)


# What cannot be replayed is rejected


@pytest.mark.parametrize("kind", ["stable_diffusion", "stable_diffusion_3"])
def test_no_noise_is_refused(kind: str):
    pipeline, call = built(kind)
    with pytest.raises(ValueError, match="eta=0 makes every step deterministic"):
        record(pipeline, eta=0, **call)


def test_two_calls_of_the_denoiser_in_a_step_are_refused():
    pipeline, call = built("stable_diffusion_3")
    call |= {"skip_guidance_layers": [0], "num_inference_steps": 10}  # the second step calls the denoiser again
    with untouched(pipeline), pytest.raises(ValueError, match="2 times for one step, on 2 and 1 copies of"):
        record(pipeline, eta=0.7, **call)


def test_three_copies_in_one_call_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch):
    pipeline, call = built("stable_diffusion")
    original = type(pipeline.unet).__call__

    def call_thrice(self: Any, sample: torch.Tensor, timestep: Any, **rest: Any) -> Any:
        states = rest.pop("encoder_hidden_states")
        return (original(self, torch.cat([sample] * 3), timestep, states.repeat(3, 1, 1), **rest)[0].chunk(3)[0],)

    monkeypatch.setattr(type(pipeline.unet), "__call__", call_thrice)
    with untouched(pipeline), pytest.raises(ValueError, match="called its unet 1 time for one step, on 3 copies of"):
        record(pipeline, eta=1.0, **call, **FREE)


@pytest.mark.parametrize("kind", ["stable_diffusion", "stable_diffusion_xl"])
def test_rescaled_guidance_is_refused(kind: str):
    pipeline, call = built(kind)
    with untouched(pipeline), pytest.raises(ValueError, match="guidance_rescale=0"):
        record(pipeline, eta=1.0, **call, **GUIDED, guidance_rescale=0.7)
    record(pipeline, eta=1.0, **call, **FREE, guidance_rescale=0.7)  # rescales nothing


def test_guidance_that_changes_on_the_way_is_refused():
    def louder(pipeline: Any, index: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipeline._guidance_scale = 7.0
        return {}

    def off(pipeline: Any, index: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipeline._guidance_scale = 0.0
        return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]} if index == 0 else {}

    for change in (louder, off):
        pipeline, call = built("stable_diffusion")
        call |= {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
        with untouched(pipeline), pytest.raises(ValueError, match="guidance"):
            record(pipeline, eta=1.0, **call, **GUIDED)


def test_latents_mixed_with_others_are_refused():
    parts = tiny.stable_diffusion().components | {"unet": tiny.unet(in_channels=9)}
    pipeline = tiny.quiet(StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False), torch.float32)
    images = {"image": torch.zeros(2, 3, 16, 16), "mask_image": torch.ones(2, 1, 16, 16), "height": 16, "width": 16}
    with untouched(pipeline), pytest.raises(ValueError, match=r"reads \[4, 9, 8, 8\], the scheduler steps from \[2, 4"):
        record(pipeline, eta=1.0, **built("stable_diffusion")[1], **GUIDED, **images)


def test_latents_changed_between_steps_are_refused():
    """A callback changes them, or inpainting with a plain denoiser, which restores the known part after each step."""

    def halve(pipeline: Any, index: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] / 2}

    pipeline, call = built("stable_diffusion")
    with untouched(pipeline), pytest.raises(ValueError, match="latents"):
        record(pipeline, eta=1.0, **call, **GUIDED, callback_on_step_end=halve)
    painter = StableDiffusionInpaintPipeline(**pipeline.components, requires_safety_checker=False)
    images = {"image": torch.zeros(2, 3, 16, 16), "mask_image": torch.ones(2, 1, 16, 16), "height": 16, "width": 16}
    images["mask_image"][..., :8] = 0
    with untouched(pipeline), pytest.raises(ValueError, match="latents"):
        record(tiny.quiet(painter, torch.float32), eta=1.0, **call, **GUIDED, **images)


def test_a_walk_from_the_middle_is_refused():
    parts = tiny.stable_diffusion().components
    pipeline = tiny.quiet(StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False), torch.float32)
    with untouched(pipeline), pytest.raises(ValueError, match="took 2 of 4 steps"):
        record(pipeline, eta=1.0, **built("stable_diffusion")[1], image=torch.zeros(2, 3, 16, 16), strength=0.5)


@pytest.mark.parametrize("settings", [FREE, GUIDED])
@pytest.mark.parametrize("step", [0, 2])
def test_an_output_that_is_not_finite_ends_the_run(settings: dict[str, Any], step: int):
    pipeline, call = built("stable_diffusion")
    seen = list[int]()

    def breaks(module: Any, inputs: Any, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        seen.append(1)
        return (output[0] * (torch.nan if len(seen) > step else 1),)

    pipeline.unet.register_forward_hook(breaks)
    with pytest.raises(TrainingDivergedError, match="The denoiser's output is not finite"):
        record(pipeline, eta=1.0, generator=tiny.generator(), **call, **settings)


def test_a_pipeline_without_a_denoiser_is_refused():
    pipeline, call = built("stable_diffusion")
    pipeline.unet = None
    with pytest.raises(ValueError, match="StableDiffusionPipeline has neither unet nor transformer"):
        record(pipeline, eta=1.0, **call)


def test_calls_whose_fixed_arguments_differ_do_not_go_into_one_batch():
    def part(scale: float, ids: list[float]) -> dict[str, Any]:
        return {"scale": Fixed(scale), "ids": Fixed(torch.tensor(ids)), "others": Fixed(None)}

    assert joined([part(1.0, [0.0]), part(1.0, [0.0])], dim=0)["ids"].value.tolist() == [0.0]
    for other in (part(2.0, [0.0]), part(1.0, [1.0]), part(1.0, [0.0]) | {"others": Fixed(1)}):
        with pytest.raises(ValueError, match=r"do not go into one batch: .*differs between calls"):
            joined([part(1.0, [0.0]), other], dim=0)


def test_images_that_share_conditions_are_not_joined():
    _, _, path = recorded("stable_diffusion", FREE)
    shared = replace(path, condition_rows=torch.zeros(len(path), dtype=torch.int64))
    assert Trajectories.joined([shared]) is shared
    with pytest.raises(ValueError, match="Trajectories with condition_rows came"):
        Trajectories.joined([path, shared])


def test_trajectories_are_built_once():
    seen = list[Trajectories]()

    def finish(path: Trajectories) -> torch.Tensor:
        seen.append(path)
        return path.latents[:, -1]

    _, _, path = recorded("stable_diffusion", FREE, finish=finish)
    assert path is seen[0]
