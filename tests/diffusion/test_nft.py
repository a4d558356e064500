"""DiffusionNFT: its losses on pipelines, the policy that samples, the trainer, and its refusals."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate.state import AcceleratorState
from tests.diffusion import test_modern_pipelines as modern
from tests.diffusion import tiny
from tests.diffusion.run_nft_distributed import KINDS, redness, run
from tests.marks import slow_but
from tests.processes import results_of_two

from trimtab_common.reward_checks import RewardError
from trimtab_common.stats import Mean
from trimtab_diffusion import DDPOStableDiffusionPipeline, DiffusionNFTConfig, DiffusionNFTTrainer
from trimtab_diffusion.nft import trainer as nft_trainer
from trimtab_diffusion.nft.algorithm import losses
from trimtab_diffusion.nft.loss import mean_square, self_normalized
from trimtab_diffusion.trajectories import noised_pairs

STEPS = 3
CPU = torch.device("cpu")
BUILD = {
    "epsilon": tiny.stable_diffusion,
    "v": lambda **kwargs: tiny.stable_diffusion("v_prediction", **kwargs),
    "sdxl": tiny.stable_diffusion_xl,
    "sd3": tiny.stable_diffusion_3,
}


def trainer(
    folder: Path, pipeline: Any = None, reward: Any = redness, *, use_lora: bool = False, **settings: Any
) -> DiffusionNFTTrainer:
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "mixed_precision": "no",
        "sample_num_steps": STEPS,
        "sample_batch_size": 4,
        "sample_num_batches_per_epoch": 2,
        "group_size": 4,
        "train_batch_size": 4,
        "train_gradient_accumulation_steps": 2,
        "train_learning_rate": 1e-2,
    }
    arguments = {name: settings.pop(name) for name in ("solver", "image_samples_hook") if name in settings}
    with tiny.from_seed(1):  # adapters are random at the start
        wrapped = DDPOStableDiffusionPipeline(pipeline or tiny.stable_diffusion(), use_lora=use_lora)
    config = DiffusionNFTConfig(**defaults | settings)
    return DiffusionNFTTrainer(config, reward, lambda: ("a cat", {"kind": "pet"}), wrapped, **arguments)


# The losses


def mean_of(mean: Mean) -> float:
    return float(mean.total / mean.weight)


@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "adaptive"])
@pytest.mark.parametrize("kind", BUILD)
def test_losses_are_those_of_the_denoisers_outputs(kind: str, adaptive: bool, tmp_path: Path):
    """Worked from the outputs of the old, the new and the first denoiser on latents that diffusers noises."""
    trained = trainer(
        tmp_path, BUILD[kind](dtype=torch.float64), beta=0.5, kl_coef=0.1, adaptive_weights=adaptive, old_decay_max=0.9
    )
    config, model = trained.config, trained.model
    for weights, seed in ((dict(model.named_parameters()), 5), (trained.old.weights, 6)):
        for weight in weights.values():
            weight.data += 0.03 * torch.randn(weight.shape, generator=tiny.generator(seed), dtype=torch.float64)
    path = trained.draw(0).path
    rows, levels, optimal = torch.tensor([5, 0, 7]), torch.tensor([2, 0, 1]), torch.tensor([0.9, 0.2, 0.5]).double()
    pairs = noised_pairs(path, CPU, rows, levels, tiny.generator(4))
    found, stats = losses(pairs, levels, optimal, path.schedule, model, trained.old, trained.reference, config)

    x0, noise = path.latents[rows, -1], torch.randn(3, *path.first.shape[1:], generator=tiny.generator(4)).double()
    scheduler, times = trained.sd_pipeline.scheduler, path.schedule.steps.timesteps[levels]
    if kind == "sd3":
        noised, target = scheduler.scale_noise(x0, times, noise), noise - x0
    else:
        noised = scheduler.add_noise(x0, noise, times)
        target = scheduler.get_velocity(x0, noise, times) if kind == "v" else noise

    def output() -> torch.Tensor:
        return path.schedule.ask(model, noised, levels, pairs.conditions)

    new = output()
    with torch.no_grad():
        with trained.old():
            old = output()
        with trained.reference() as frozen:
            first = path.schedule.ask(frozen, noised, levels, pairs.conditions)
    assert not torch.allclose(new, old, rtol=1e-2)
    plus, minus = 0.5 * old + 0.5 * new, 1.5 * old - 0.5 * new
    if adaptive:  # the error of x_0 is this multiple of the output's
        share = path.schedule.steps.before[levels].double()
        factor = {"sd3": share, "v": (1 - share).sqrt()}.get(kind, ((1 - share) / share).sqrt())[:, None, None, None]
        plus, minus, target_0 = factor * plus, factor * minus, factor * target
    else:
        target_0 = target
    distance = self_normalized if adaptive else mean_square
    eq_5 = optimal * distance(plus, target_0) + (1 - optimal) * distance(minus, target_0)
    expected = 5 / 0.5 * eq_5 + 0.1 * (new - first).square().mean((1, 2, 3))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-5)  # levels are float32
    assert mean_of(stats["policy/loss"]) == pytest.approx(float(eq_5.mean()), rel=2e-4)
    assert mean_of(stats["objective/kl"]) == pytest.approx(float((new - first).square().mean()), rel=2e-4)
    assert not old.requires_grad


def test_equal_rewards_change_nothing(tmp_path: Path):
    trained = trainer(tmp_path, reward=lambda images, *_: torch.ones(len(images)), train_adam_weight_decay=0.0)
    before = [weight.clone() for weight in trained.trainable_layers]
    trained.step(0, 0)
    assert trained.last_stats["optimality/half"] == 1
    assert all(torch.equal(one, other) for one, other in zip(before, trained.trainable_layers, strict=True))


# The policy that samples


def test_images_are_those_of_the_old_weights_without_noise(tmp_path: Path):
    trained = trainer(tmp_path, sample_batch_size=8, sample_num_batches_per_epoch=1)
    before = {name: weight.clone() for name, weight in trained.old.trained.items()}
    for weight in trained.old.weights.values():
        weight += 0.02
    drawn = trained.draw(0)
    assert all(torch.equal(before[name], weight) for name, weight in trained.old.trained.items())
    assert drawn.path.latents.shape[:2] == (8, 1)
    stock = tiny.stable_diffusion()
    stock.scheduler = trained.sd_pipeline.scheduler
    with torch.no_grad():
        for weight in stock.unet.parameters():
            weight += 0.02
    images = stock(
        ["a cat"] * 8,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        eta=0.0,
        generator=trained._generator(0, 0),
        output_type="pt",
    ).images
    torch.testing.assert_close(drawn.batches[0][0], images)


@pytest.mark.parametrize(("start", "decays"), [(0, (0.25, 0.4, 0.4)), (1, (0.0, 0.25))])
def test_the_old_policy_follows_the_trained_one_by_its_schedule(start: int, decays: tuple[float, ...], tmp_path: Path):
    trained = trainer(tmp_path, old_decay_start=start, old_decay_rate=0.25, old_decay_max=0.4)
    old = {name: weight.clone() for name, weight in trained.old.weights.items()}
    for epoch, decay in enumerate(decays):
        trained.step(epoch, trained.global_step)
        assert trained.last_stats["policy/old_decay"] == pytest.approx(decay)
        for name, weight in trained.old.trained.items():
            expected = decay * old[name] + (1 - decay) * weight
            torch.testing.assert_close(trained.old.weights[name], expected)
            old[name] = trained.old.weights[name].clone()


def test_without_a_decay_the_old_policy_is_the_trained_one(tmp_path: Path):
    trained = trainer(tmp_path, old_decay_max=0.0)
    trained.step(0, 0)
    assert all(torch.equal(trained.old.weights[name], weight) for name, weight in trained.old.trained.items())


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("kind", "solver"),
    [
        ("epsilon", diffusers.DPMSolverMultistepScheduler),
        ("epsilon", diffusers.EulerDiscreteScheduler),  # scales what the denoiser reads
        ("epsilon", diffusers.HeunDiscreteScheduler),  # asks twice a step
        ("sd3", diffusers.FlowMatchHeunDiscreteScheduler),
    ],
)
def test_any_solver_samples(kind: str, solver: Any, use_lora: bool, tmp_path: Path):
    pipeline = BUILD[kind]()
    chosen = solver.from_config(pipeline.scheduler.config)
    trained = trainer(tmp_path, pipeline, solver=chosen, use_lora=use_lora)
    drawn, own = trained.draw(0), trained.sd_pipeline.scheduler
    own.set_timesteps(STEPS)
    assert pipeline.scheduler is own is not chosen
    assert torch.equal(drawn.path.schedule.steps.timesteps, own.timesteps)
    other = trainer(tmp_path / "other", BUILD[kind](), use_lora=use_lora).draw(0).path
    for name, value in other.conditions.items():  # those of a call of the pipeline alone
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(drawn.path.conditions[name], value)
    pipeline.scheduler = solver.from_config(own.config)
    call = {"guidance_scale": 1.0, "output_type": "pt", "num_inference_steps": STEPS}
    generator = trained._generator(0, 0)
    images = [pipeline(["a cat"] * 4, generator=generator, **call).images for _ in range(2)]
    pipeline.scheduler = own
    torch.testing.assert_close(torch.cat([batch[0] for batch in drawn.batches]), torch.cat(images))
    before = [weight.clone() for weight in trained.trainable_layers]
    trained.step(0, 0)
    assert any(not torch.equal(one, other) for one, other in zip(before, trained.trainable_layers, strict=True))


def test_rewards_are_computed_without_gradients(tmp_path: Path):
    modes = []
    trainer(tmp_path, reward=lambda *given: (modes.append(torch.is_grad_enabled()), redness(*given))[1]).step(0, 0)
    assert modes == [False, False]


# The trainer


@pytest.mark.parametrize("kind", slow_but(["v", "sd3"], "v"))
def test_rewards_rise(kind: str, tmp_path: Path):
    """For the same noise, by a deviation of the first rewards."""
    trained = trainer(
        tmp_path,
        BUILD[kind](),
        save_freq=100,
        sample_batch_size=24,
        group_size=24,
        sample_num_batches_per_epoch=1,
        train_batch_size=24,
        train_gradient_accumulation_steps=1,
        train_learning_rate=3e-3,
    )

    def reward() -> torch.Tensor:
        return redness(trained.sample(["a cat"] * 24, tiny.generator(9))[0])

    before, _ = reward(), trained.train(8)
    assert reward().mean() > before.mean() + before.std()


def test_the_reference_of_trained_adapters_has_them_as_they_were(tmp_path: Path):
    trained = trainer(tmp_path, tiny.with_trained_adapters(tiny.stable_diffusion()), use_lora=True, kl_coef=0.1)
    trained.step(0, 0)
    assert trained.last_stats["objective/kl"] == pytest.approx(0, abs=1e-9)
    trained.step(1, trained.global_step)
    assert trained.last_stats["objective/kl"] > 1e-6


def test_it_trains_with_guidance_and_noise(tmp_path: Path):
    trained = trainer(tmp_path, sample_guidance_scale=3.0, sample_eta=0.7)
    path = trained.draw(0).path
    assert path.schedule.guidance == 3.0
    trained.step(0, 0)
    assert trained.last_stats["grad_norm"] > 0


def test_an_epoch_trains_each_sample_at_a_share_of_the_levels(tmp_path: Path):
    asked = list[int]()
    trained = trainer(tmp_path, train_timestep_fraction=0.67, train_num_inner_epochs=2, kl_coef=0)
    hook = trained.model.register_forward_hook(
        lambda module, inputs, output: asked.append(len(output[0])) if torch.is_grad_enabled() else None
    )
    trained.step(0, 0)
    hook.remove()
    assert trained.global_step == 2
    assert asked == [4] * 8  # two passes over 8 samples at 2 of 3 levels


def test_the_hook_sees_each_epoch(tmp_path: Path):
    seen = list[Any]()
    trained = trainer(tmp_path, image_samples_hook=lambda batches, step, _: seen.append((batches, step)))
    trained.train(2)
    (batches, step), (_, later) = seen
    assert (step, later, len(batches)) == (0, 1, 2)
    images, prompts, metadata, rewards, facts = batches[0]
    assert images.shape == (4, 3, 16, 16)
    assert prompts == ("a cat",) * 4
    assert metadata == ({"kind": "pet"},) * 4
    torch.testing.assert_close(rewards, redness(images))
    assert facts == {}


def test_what_is_saved_loads_in_diffusers(tmp_path: Path):
    trained = trainer(tmp_path / "run", use_lora=True)
    trained.train(1)
    trained.save_pretrained(tmp_path / "model")
    tiny.stable_diffusion().load_lora_weights(tmp_path / "model")
    assert "Zheng et al. 2025" in (tmp_path / "model" / "README.md").read_text()


def test_bf16_trains(tmp_path: Path):
    AcceleratorState._reset_state(reset_partial_state=True)
    trained, dtypes = trainer(tmp_path, mixed_precision="bf16"), set[torch.dtype]()
    trained.model.conv_in.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    history = trained.train(2)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert dtypes == {torch.bfloat16}
    assert all(stats["grad_norm"] > 0 for stats in history)


# Refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sample_guidance_scale": float("inf")}, "sample_guidance_scale=inf must be a finite number"),
        ({"negative_prompts": "dull"}, "needs guidance, and sample_guidance_scale=1.0 is none"),
        ({"train_batch_size": 7}, "48 samples of an epoch.*updates of 42"),
        ({"group_size": 1}, "group_size=1: rewards are compared within a prompt"),
        ({"group_size": 5}, "group_size=5.*divisor of an epoch's 48"),
        ({"train_timestep_fraction": 0.05}, "less than one level.*at least 0.1"),
        ({"beta": 0}, "beta"),
        ({"sample_eta": -1}, "sample_eta"),
        ({"old_decay_max": 1.0}, "old_decay_max"),
        ({"kl_coef": -1}, "kl_coef"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        DiffusionNFTConfig(**{"mixed_precision": "no"} | settings)


def test_a_solver_beside_noise_of_the_own_scheduler_is_refused(tmp_path: Path):
    pipeline = tiny.stable_diffusion()
    solver = diffusers.DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    with pytest.raises(ValueError, match=r"sample_eta=0\.5 is the noise of the pipeline's own scheduler"):
        trainer(tmp_path, pipeline, solver=solver, sample_eta=0.5)


def test_weights_that_processes_divide_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nft_trainer, "divides_weights", lambda accelerator: True)
    with pytest.raises(ValueError, match=r"divides over processes\. Train with DDP"):
        trainer(tmp_path)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda images, *_: [float("nan")] * len(images), "nan"),
        (lambda images, *_: [1.0], "1 scores for 4 items|has 1"),
    ],
)
def test_a_faulty_reward_is_refused(reward: Any, words: str, tmp_path: Path):
    with pytest.raises((ValueError, TypeError), match=words):
        trainer(tmp_path, reward=reward).step(0, 0)


def test_what_replaced_rewards_return_is_checked_as_in_ddpo(tmp_path: Path):
    own = trainer(tmp_path)
    own.compute_rewards = lambda images, prompts, metadata: (range(len(prompts)), {})  # type: ignore[method-assign]
    assert torch.equal(own.draw(0).rewards, torch.tensor([0.0, 1, 2, 3] * 2))
    own.compute_rewards = lambda images, *_: (torch.full((4,), torch.nan), {})  # type: ignore[method-assign]
    with pytest.raises(RewardError, match="What compute_rewards returned has nan for image 0"):
        own.draw(0)


def test_conditions_that_depend_on_the_latents_are_refused(tmp_path: Path):
    pipeline, image = tiny.controlnet()
    wrapped = DDPOStableDiffusionPipeline(pipeline, call_kwargs={"image": image})
    sizes = {"sample_batch_size": 2, "sample_num_batches_per_epoch": 1, "group_size": 2, "train_batch_size": 2}
    config = DiffusionNFTConfig(
        logdir=str(tmp_path), mixed_precision="no", train_gradient_accumulation_steps=1, sample_num_steps=2, **sizes
    )
    with pytest.raises(ValueError, match="conditions depend on the latents"):
        DiffusionNFTTrainer(config, redness, lambda: ("a cat", {}), wrapped).step(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", modern.BUILD)
def test_modern_pipelines_train(kind: str, tmp_path: Path):
    with tiny.from_seed(1):
        pipeline = DDPOStableDiffusionPipeline(
            modern.BUILD[kind](), use_lora=True, call_kwargs=modern.SIZES.get(kind, {})
        )
    config = DiffusionNFTConfig(
        logdir=str(tmp_path),
        mixed_precision="no",
        sample_num_steps=2,
        sample_batch_size=2,
        group_size=2,
        train_batch_size=2,
        train_gradient_accumulation_steps=2,
    )
    trained = DiffusionNFTTrainer(config, modern.brightness, lambda: ("a cat", {}), pipeline)
    trained.step(0, 0)
    assert trained.last_stats["grad_norm"] > 0


# Two processes


@pytest.mark.distributed
def test_two_processes_are_one(tmp_path: Path):
    first, second = results_of_two("tests.diffusion.run_nft_distributed", tmp_path)
    for kind in KINDS:
        alone = run(kind)
        for part in ("weights", "old"):
            for name, weight in first[kind][part].items():
                assert torch.equal(weight, second[kind][part][name])
                # images are scored in float32, and Adam magnifies the rounding of a small gradient; a step is 3e-4
                torch.testing.assert_close(weight, alone[part][name], rtol=1e-6, atol=1e-7)
        for mine, its in zip(first[kind]["history"], alone["history"], strict=True):
            assert mine == pytest.approx(its, rel=1e-5, abs=1e-6)
