"""AlignProp and DRaFT: gradients against finite differences, the trainer, and its refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tests.diffusion import tiny
from tests.diffusion.run_alignprop_distributed import CASES, redness, run
from tests.processes import results_of_two
from torch import Tensor

from trimtab_common.reward_checks import RewardError
from trimtab_diffusion import AlignPropConfig, AlignPropTrainer, DDPOStableDiffusionPipeline
from trimtab_diffusion.alignprop.algorithm import first_step, latents_with_gradient, redrawn_latents, reward_loss
from trimtab_diffusion.trajectories import sampled_pairs

STEPS = 3
KINDS = {"sd": tiny.stable_diffusion, "sdxl": tiny.stable_diffusion_xl, "sd3": tiny.stable_diffusion_3}
FIXED: dict[str, Any] = {"truncated_backprop_rand": False, "truncated_backprop_timestep": STEPS - 1}


def trainer(
    folder: Path, reward: Callable[..., Any] = redness, *, pipeline: Any = None, use_lora: bool = False, **settings: Any
) -> AlignPropTrainer:
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "mixed_precision": "no",
        "sample_num_steps": STEPS,
        "sample_guidance_scale": 3.0,
        "train_batch_size": 2,
        "train_learning_rate": 1e-2,
    }
    names = ("image_samples_hook",)
    arguments = {name: settings.pop(name) for name in names if name in settings}
    with tiny.from_seed(1):  # adapters are random at the start
        wrapped = DDPOStableDiffusionPipeline(pipeline or tiny.stable_diffusion(), use_lora=use_lora)
    return AlignPropTrainer(
        AlignPropConfig(**defaults | settings), reward, lambda: ("a cat", {"kind": "pet"}), wrapped, **arguments
    )


# The gradient


def moved(module: torch.nn.Module, direction: dict[str, Tensor], size: float) -> None:
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.add_(direction[name], alpha=size)


def slope(
    function: Callable[[], Tensor], module: torch.nn.Module, direction: dict[str, Tensor], size: float = 1e-7
) -> float:
    """The derivative of a number along a direction of the weights, by central differences in float64."""
    values = []
    for change in (size, -2 * size):
        moved(module, direction, change)
        with torch.no_grad():
            values.append(float(function()))
    moved(module, direction, size)
    return (values[0] - values[1]) / (2 * size)


def along(module: torch.nn.Module, direction: dict[str, Tensor]) -> float:
    """The gradient's component in a direction of the weights."""
    return sum(float((weight.grad * direction[name]).sum()) for name, weight in module.named_parameters())


def direction_of(module: torch.nn.Module) -> dict[str, Tensor]:
    noise = tiny.generator(5)
    return {
        name: torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
        for name, weight in module.named_parameters()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_through_all_steps_is_that_of_sampling(kind: str):
    """The pipeline samples anew with other weights and the same noise."""
    pipeline = DDPOStableDiffusionPipeline(KINDS[kind](dtype=torch.float64))
    denoiser, direction = pipeline.denoiser, direction_of(pipeline.denoiser)

    def reward(first: int | None) -> Tensor:
        finish = None if first is None else lambda path: latents_with_gradient(path, denoiser, first)
        call: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "output_type": "pt"}
        images = pipeline(["a cat", "a dog"], eta=0.7, generator=tiny.generator(), finish=finish, **call).images
        return redness(images).sum()

    rewarded = reward(0)
    assert torch.equal(rewarded.detach(), reward(None))
    rewarded.backward()
    size = 1e-5 if kind == "sd3" else 1e-7  # its pipeline computes in float32 in places, which rounds
    expected = slope(lambda: reward(None), denoiser, direction, size)
    assert along(denoiser, direction) == pytest.approx(expected, rel=3e-5 if kind == "sd3" else 1e-6)


@pytest.mark.parametrize("first", [1, 2])
def test_a_truncated_gradient_takes_the_latents_before_it_as_given(first: int):
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(dtype=torch.float64))
    denoiser, direction = pipeline.denoiser, direction_of(pipeline.denoiser)
    path = pipeline(
        ["a cat"], eta=0.7, generator=tiny.generator(), num_inference_steps=STEPS, guidance_scale=3.0, output_type="pt"
    ).trajectories
    noises = []
    for step in range(first, STEPS):
        pairs = sampled_pairs(path, torch.device("cpu"), torch.arange(1), torch.tensor([step]))
        with torch.no_grad():
            mean, _ = path.schedule.gaussian(denoiser, pairs.latents, torch.tensor([step]), pairs.conditions)
        noises.append(pairs.next_latents - mean)

    def replayed() -> Tensor:
        latents = path.latents[:, first - 1]
        for step, noise in zip(range(first, STEPS), noises, strict=True):
            index = torch.tensor([step])
            pairs = sampled_pairs(path, torch.device("cpu"), torch.arange(1), index)
            mean, _ = path.schedule.gaussian(denoiser, latents, index, pairs.conditions)
            latents = mean + noise
        return latents.square().sum()

    latents = latents_with_gradient(path, denoiser, first)
    assert torch.equal(latents.detach(), path.latents[:, -1])
    latents.square().sum().backward()
    assert along(denoiser, direction) == pytest.approx(slope(replayed, denoiser, direction), rel=1e-6)


def test_redrawn_latents_follow_the_last_step_from_other_noise():
    pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(dtype=torch.float64))
    denoiser, direction = pipeline.denoiser, direction_of(pipeline.denoiser)
    path = pipeline(["a cat", "a dog"], generator=tiny.generator(), num_inference_steps=STEPS, output_type="pt")
    path = path.trajectories

    def total() -> Tensor:
        return redrawn_latents(path, denoiser, 3, tiny.generator(7)).square().sum()

    latents = redrawn_latents(path, denoiser, 3, tiny.generator(7))
    assert latents.shape == (6, *path.first.shape[1:])
    assert not torch.allclose(latents[:2], latents[2:4])
    steps = path.schedule.steps
    last = torch.full((6,), STEPS - 1)
    noise = torch.randn(latents.shape, generator=tiny.generator(7))
    level = steps.before[-1].double()
    noised = level.sqrt() * path.latents[:, -1].repeat(3, 1, 1, 1).float() + (1 - level).sqrt() * noise
    pairs = sampled_pairs(path, torch.device("cpu"), torch.arange(2).repeat(3), last)
    with torch.no_grad():
        mean, _ = path.schedule.gaussian(denoiser, noised.double(), last, pairs.conditions)
    assert torch.allclose(latents.detach(), mean, atol=1e-6)
    total().backward()
    assert along(denoiser, direction) == pytest.approx(slope(total, denoiser, direction), rel=1e-4)


def test_the_loss_has_the_gradient_of_the_mean_reward():
    rewards = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    loss = reward_loss(rewards)
    loss.backward()
    assert loss == 7.0
    assert torch.allclose(rewards.grad, torch.full((3,), -1 / 3))


def test_the_first_step_is_drawn_within_its_bounds():
    config = AlignPropConfig(mixed_precision="no", sample_num_steps=5, truncated_rand_backprop_minmax=(1, 50))
    noise = tiny.generator()
    drawn = [first_step(config, noise) for _ in range(400)]
    assert set(drawn) == {1, 2, 3, 4}
    assert drawn.count(4) > 300  # draws beyond the last step mean the last


def test_bounds_beyond_the_schedule_are_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    trainer(tmp_path, truncated_rand_backprop_minmax=(1, STEPS))
    assert not [warning for warning in recwarn if "reaches beyond" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"=\(0, 50\) reaches beyond the 3 steps.*: 96% of the draws.* to \(0, 2\)"):
        trainer(tmp_path)


def test_a_fixed_first_step_that_a_draw_replaces_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    trainer(tmp_path, **FIXED)
    trainer(tmp_path, truncated_rand_backprop_minmax=(1, STEPS))
    assert not [warning for warning in recwarn if "has no effect" in str(warning.message)]
    with pytest.warns(
        UserWarning, match=r"truncated_backprop_timestep=2 has no effect: .* Set truncated_backprop_rand"
    ):
        trainer(tmp_path, truncated_backprop_timestep=STEPS - 1)


def test_a_last_step_through_which_a_flow_hardly_trains_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    with pytest.warns(UserWarning, match=r"last step alone.* from t = 0\.0089.* almost nothing trains"):
        trainer(tmp_path, pipeline=tiny.stable_diffusion_3(), **FIXED).step(0, 0)
    recwarn.clear()
    earlier = {"truncated_backprop_timestep": 1}
    trainer(tmp_path, pipeline=tiny.stable_diffusion_3(), **FIXED | earlier).step(0, 0)
    trainer(tmp_path, **FIXED).step(0, 0)
    assert not [warning for warning in recwarn if "almost nothing trains" in str(warning.message)]


# The trainer


@pytest.mark.parametrize("settings", [{}, FIXED | {"low_variance_samples": 2}], ids=["random", "low variance"])
@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
def test_rewards_rise(use_lora: bool, settings: dict[str, Any], tmp_path: Path):
    trained = trainer(tmp_path, use_lora=use_lora, num_epochs=8, save_freq=100, train_learning_rate=3e-2, **settings)

    def reward() -> float:
        return float(redness(trained.draw([("a cat", {})] * 4, STEPS - 1, tiny.generator())["images"]).mean())

    before, history = reward(), trained.train()
    assert reward() > 1.05 * before
    assert {"reward_mean", "reward_std", "loss", "grad_norm", "gradient/steps", "queries"} <= set(history[0])


def test_only_steps_from_the_first_have_a_gradient(tmp_path: Path):
    asked = []
    trained = trainer(tmp_path, **FIXED | {"truncated_backprop_timestep": 1})
    trained.model.register_forward_hook(lambda *_: asked.append(torch.is_grad_enabled()))
    trained.step(0, 0)
    assert asked == [False] * STEPS + [True] * 2


def test_images_without_noise_are_those_of_the_stock_pipeline(tmp_path: Path):
    trained = trainer(tmp_path, sample_eta=0.0, **FIXED)
    images = trained.draw([("a cat", {})] * 2, STEPS - 1, tiny.generator())["images"]
    call = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "eta": 0.0, "output_type": "pt"}
    stock = tiny.stable_diffusion()(["a cat"] * 2, generator=tiny.generator(), **call).images
    torch.testing.assert_close(images.detach(), stock, rtol=1e-4, atol=1e-5)
    trained.step(0, 0)
    assert trained.last_stats["grad_norm"] > 0


def test_the_learning_rate_is_that_of_the_update(tmp_path: Path):
    settings = {"train_learning_rate": 1e-2, "train_warmup_steps": 4, "save_freq": 100}
    history = trainer(tmp_path, **settings, **FIXED).train(5)
    assert [stats["learning_rate"] for stats in history] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])


def test_checkpointing_activations_changes_no_gradient(tmp_path: Path):
    first = trainer(tmp_path / "a", pipeline=tiny.stable_diffusion(dtype=torch.float64), **FIXED)
    second = trainer(
        tmp_path / "b",
        pipeline=tiny.stable_diffusion(dtype=torch.float64),
        train_gradient_checkpointing=True,
        **FIXED,
    )
    assert second.sd_pipeline.vae.decoder.gradient_checkpointing
    calls: list[tuple[AlignPropTrainer, bool]] = []
    for each in (first, second):
        each.model.down_blocks[0].resnets[0].register_forward_pre_hook(
            lambda module, args, each=each: calls.append((each, torch.is_grad_enabled()))
        )
        each.step(0, 0)
    assert calls.count((second, True)) == 2 * calls.count((first, True)) > 0
    assert first.last_stats["grad_norm"] == pytest.approx(second.last_stats["grad_norm"], rel=1e-9)
    for one, other in zip(first.trainable_layers, second.trainable_layers, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_the_hook_sees_every_second_update(tmp_path: Path):
    seen = []
    trained = trainer(
        tmp_path, log_image_freq=2, num_epochs=4, image_samples_hook=lambda batch, step, _: seen.append((step, batch))
    )
    trained.train()
    assert [step for step, _ in seen] == [2, 4]
    batch = seen[0][1]
    assert batch["images"].shape == (2, 3, 16, 16)
    assert batch["prompts"] == ("a cat", "a cat")
    assert batch["prompt_metadata"] == ({"kind": "pet"}, {"kind": "pet"})
    assert batch["rewards"].shape == (2,)
    assert not batch["rewards"].requires_grad


def test_what_is_saved_loads_in_diffusers(tmp_path: Path):
    trained = trainer(tmp_path / "run", use_lora=True, num_epochs=1)
    trained.train()
    trained.save_pretrained(tmp_path / "model")
    again = tiny.stable_diffusion()
    again.load_lora_weights(tmp_path / "model")
    assert "Prabhudesai et al. 2023" in (tmp_path / "model" / "README.md").read_text()


def test_bf16_trains(tmp_path: Path):
    AcceleratorState._reset_state(reset_partial_state=True)
    trained, dtypes = trainer(tmp_path, mixed_precision="bf16", num_epochs=2, **FIXED), set[torch.dtype]()
    trained.model.conv_in.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    history = trained.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert dtypes == {torch.bfloat16}
    assert all(stats["grad_norm"] > 0 for stats in history)


# Refusals

JUDGE = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 1), torch.nn.Flatten(0))
"""A reward model whose weights require gradients."""


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda images, *_: images.detach().mean((1, 2, 3)), "a Tensor without a gradient"),
        (lambda images, *_: JUDGE(images.detach()), "a Tensor without a gradient to the images"),
        (lambda images, *_: [1.0] * len(images), "returned a list"),
        (lambda images, *_: (images.mean((1, 2, 3)).tolist(), {}), "returned a list"),
        (lambda images, *_: tuple(images.mean((1, 2, 3))), "returned a tuple"),
        (lambda images, *_: images.mean((1, 2, 3)) * float("nan"), "nan"),
        (lambda images, *_: images.mean((1, 2, 3))[:1], "1 scores for 2 items|has 1"),
        (lambda images, *_: images.mean(), "shape"),
    ],
)
def test_a_reward_that_teaches_nothing_is_refused_before_sampling(reward: Any, words: str, tmp_path: Path):
    trained = trainer(tmp_path, reward)
    trained.model.register_forward_hook(lambda *_: pytest.fail("images were sampled"))
    with pytest.raises((ValueError, TypeError), match=words):
        trained.step(0, 0)


def test_a_reward_without_a_gradient_is_refused_where_the_size_of_images_is_unknown(tmp_path: Path):
    trained = trainer(tmp_path, lambda images, *_: JUDGE(images.detach()))
    trained.sd_pipeline.call_kwargs = {"height": 16, "width": 16}
    before = [weight.detach().clone() for weight in trained.trainable_layers]
    with pytest.raises(RewardError, match="without a gradient to the images"):
        trained.step(0, 0)
    assert all(torch.equal(*pair) for pair in zip(trained.trainable_layers, before, strict=True))


def test_a_reward_model_with_weights_that_require_gradients_may_judge(tmp_path: Path):
    assert trainer(tmp_path, lambda images, *_: JUDGE(images)).step(0, 0) == 1


def test_a_reward_may_return_facts_beside_its_numbers(tmp_path: Path):
    trained = trainer(tmp_path, lambda images, *_: (redness(images), [{"any": 1}] * len(images)))
    assert trained.step(0, 0) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"truncated_backprop_rand": False}, "truncated_backprop_timestep=49 is beyond the last step, 2"),
        ({"truncated_rand_backprop_minmax": (3, 9)}, "beyond the last step, 2"),
        ({"truncated_rand_backprop_minmax": (2, 1)}, "not larger than the second"),
        ({"truncated_rand_backprop_minmax": (1,)}, r"=\(1,\): two whole numbers are needed"),
        ({"truncated_rand_backprop_minmax": (1.0, 2.0)}, r"=\(1\.0, 2\.0\): two whole numbers are needed"),
        ({"low_variance_samples": 2}, "through the last step alone"),
        ({"mixed_precision": "half"}, "none of no, fp16, bf16"),
        ({"train_learning_rate": 0}, "train_learning_rate"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        AlignPropConfig(**{"sample_num_steps": 3, "mixed_precision": "no"} | settings)


# Two processes


@pytest.mark.distributed
def test_two_processes_are_one(tmp_path: Path):
    first, second = results_of_two("tests.diffusion.run_alignprop_distributed", tmp_path)
    for name in CASES:
        alone = run(name)
        for key, weight in first[name]["weights"].items():
            assert torch.equal(weight, second[name]["weights"][key])
            assert torch.allclose(weight, alone["weights"][key.removeprefix("module.")], atol=1e-10), (name, key)
        for mine, its in zip(first[name]["history"], alone["history"], strict=True):
            assert mine == pytest.approx(its, rel=1e-6)


def test_a_step_that_a_reward_has_ended_leaves_no_gradient(tmp_path: Path):
    calls = list[int]()

    def fails_once(images: Tensor, *others: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:  # after the check and the first part
            raise ConnectionError
        return redness(images, *others)

    failed, whole = (trainer(tmp_path, each, train_gradient_accumulation_steps=2) for each in (fails_once, redness))
    with pytest.raises(ConnectionError):
        failed.step(0, 0)
    for each in (failed, whole):
        each.step(0, 0)
    assert all(map(torch.equal, failed.model.parameters(), whole.model.parameters()))
    assert failed.last_stats["grad_norm"] == whole.last_stats["grad_norm"]
