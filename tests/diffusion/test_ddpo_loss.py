"""Compares DDPO's objectives with closed forms, and one update of the trainer with autograd through a manual loss."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_distributed import samples_of, trainer, weights
from tests.marks import slow_but
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from trimtab_diffusion.ddpo import DDPOTrainer
from trimtab_diffusion.ddpo.loss import denoising_loss, rwr_weights, score_function_loss, sparse_weights
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.trajectories import Trajectories, sampled_pairs

pytestmark = pytest.mark.filterwarnings("ignore")
PICTURES, STEPS, SCALE, CLIP = 4, 3, 3.0, 2e-3
PROMPT = "a red cat"
KINDS = ("epsilon", "v_prediction", "flow")


def test_score_function_loss_has_the_gradient_of_minus_advantage_times_logprob():
    logprobs = torch.tensor([-0.5, 1.5], requires_grad=True)
    loss = score_function_loss(logprobs, torch.tensor([2.0, -3.0]))
    assert loss.tolist() == [1.0, 4.5]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 3.0]


def test_rwr_weights_are_boltzmann_in_each_group():
    rewards, groups = torch.tensor([1.0, 5.0, 3.0, 7.0, 2.0]), torch.tensor([9, 4, 9, 4, 9])
    weights = rwr_weights(rewards, groups, beta=0.5)
    ratio = weights[:, None] / weights[None]
    for i, j in ((0, 2), (2, 4), (1, 3)):
        assert float(ratio[i, j]) == pytest.approx(math.exp(0.5 * float(rewards[i] - rewards[j])))
    assert float(weights[groups == 9].mean()) == pytest.approx(1)
    assert float(weights[groups == 4].mean()) == pytest.approx(1)
    torch.testing.assert_close(rwr_weights(rewards + 1000, groups, beta=0.5), weights)
    assert rwr_weights(rewards, groups, beta=0).tolist() == [1.0] * 5
    greedy = rwr_weights(rewards, groups, beta=1e6)
    assert greedy.tolist() == [0.0, 0.0, 3.0, 2.0, 0.0]


def test_sparse_weights_keep_the_best_and_their_ties():
    rewards = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0])
    assert sparse_weights(rewards, top=0.6).tolist() == [0, 1, 0, 1, 1]
    assert sparse_weights(rewards, top=0.2).tolist() == [0, 1, 0, 1, 0]
    assert sparse_weights(rewards, top=0.01).tolist() == [0, 1, 0, 1, 0]
    assert sparse_weights(rewards, top=1).tolist() == [1] * 5


def test_denoising_loss_is_a_weighted_square_per_dimension():
    prediction, target = torch.zeros(2, 1, 2, 2), torch.tensor([[1.0, 2, 3, 4], [2, 2, 2, 2]]).view(2, 1, 2, 2)
    loss = denoising_loss(prediction, target, torch.tensor([2.0, 0.5]))
    assert loss.tolist() == [2 * 30 / 4, 0.5 * 4]
    half = denoising_loss(prediction.bfloat16(), target + 1e-3, torch.ones(2))
    assert float(half[1]) == pytest.approx(2.001**2, rel=1e-6)  # not rounded to the prediction's dtype


def test_group_advantages_are_against_the_group(tmp_path: Path):
    ddpo = trainer(str(tmp_path), group_size=2)
    rewards = torch.tensor([1.0, 3.0, 100.0, 100.0, 8.0, 5.0, 0.0, 0.1])
    advantages = ddpo.advantages(["a", "a", "b", "b", "a", "a", "c", "c"], rewards)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1, 0, 0, 1, -1, -1, 1]))


def test_group_advantages_over_the_deviation_of_the_epoch(tmp_path: Path):
    sizes = {"sample_batch_size": 3, "train_batch_size": 3, "train_gradient_accumulation_steps": 1}
    ddpo = trainer(
        str(tmp_path), group_size=2, sample_num_batches_per_epoch=2, scale_rewards="batch", **sizes
    )  # the second group spans two sampling batches
    advantages = ddpo.advantages(list("aabbcc"), torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0, 6.0]))
    std = (14 / 6) ** 0.5  # squared distances 4, 0, 0, 0, 1, 9 from the mean 3
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1, 0, 0, -2, 2]) / std)


def test_advantages_against_the_epoch_and_their_limit(tmp_path: Path):
    ddpo = trainer(str(tmp_path), train_adv_clip_max=1.5)
    rewards = torch.tensor([0.0] * 7 + [80.0])
    advantages = ddpo.advantages(["a"] * 8, rewards)
    assert float(advantages[-1]) == 1.5
    torch.testing.assert_close(advantages[:7], torch.full((7,), -10 / (700**0.5)))  # mean 10, variance 5600 / 8


def test_one_rule_of_deviation_with_and_without_statistics_per_prompt(tmp_path: Path):
    tracking = {"per_prompt_stat_tracking": True, "per_prompt_stat_tracking_min_count": 2}
    rewards = torch.tensor([0.0, 3.0])  # two images of one prompt: mean 1.5, deviation 1.5
    for settings in ({}, tracking, {"group_size": 2}):
        advantages = trainer(str(tmp_path), **settings).advantages(["a", "a"], rewards)
        torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]))


def test_advantages_of_a_prompt_are_against_its_past(tmp_path: Path):
    ddpo = trainer(str(tmp_path), per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=4)
    ddpo.advantages(["a", "b", "a", "b"], torch.tensor([1.0, 10.0, 3.0, 10.0]))
    advantages = ddpo.advantages(["a", "b", "a", "b"], torch.tensor([1.0, 10.0, 3.0, 30.0]))
    torch.testing.assert_close(advantages, torch.tensor([-1, -5 / 75**0.5, 1, 15 / 75**0.5]))


def test_rwr_without_a_temperature_trains_on_all_alike(tmp_path: Path):
    ddpo = trainer(str(tmp_path), estimator="rwr", rwr_beta=0)
    assert ddpo.advantages(["a", "b"] * 4, torch.randn(8)).tolist() == [1.0] * 8
    sparse = trainer(str(tmp_path), estimator="rwr_sparse", rwr_top=0.25)
    assert sparse.advantages(["a"] * 8, torch.arange(8.0)).tolist() == [0.0] * 6 + [1.0] * 2


# ------------------------------------------------------------------ one update


def pipeline(kind: str) -> Any:
    """Returns a pipeline in float64."""
    if kind == "flow":
        return tiny.stable_diffusion_3(dtype=torch.float64)
    return tiny.stable_diffusion(kind, dtype=torch.float64)


def perturb(trained: DDPOTrainer, size: float) -> None:
    generator = tiny.generator(5)
    with torch.no_grad():
        for weight in trained.sd_pipeline.denoiser.parameters():
            weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def gradients(trained: DDPOTrainer) -> dict[str, Tensor]:
    """Returns a dict that receives the gradients of the next optimizer step, by weight name."""
    gradients_by_name: dict[str, Tensor] = {}

    def capture(*_: Any) -> None:
        named = trained.sd_pipeline.denoiser.named_parameters()
        gradients_by_name.update({name: weight.grad.clone() for name, weight in named if weight.grad is not None})

    trained.optimizer.optimizer.register_step_pre_hook(capture)
    return gradients_by_name


def text(pipe: Any) -> list[dict[str, Any]]:
    """Returns the denoiser's other inputs for PROMPT's images, without and with the prompt."""
    if not hasattr(pipe, "unet"):
        states, negative, pooled, negative_pooled = pipe.encode_prompt(
            PROMPT, None, None, negative_prompt="dull", num_images_per_prompt=1
        )
        return [
            {"encoder_hidden_states": negative, "pooled_projections": negative_pooled},
            {"encoder_hidden_states": states, "pooled_projections": pooled},
        ]
    states, negative = pipe.encode_prompt(PROMPT, "cpu", 1, True, negative_prompt="dull")
    return [{"encoder_hidden_states": negative}, {"encoder_hidden_states": states}]


def stepped(kind: str, denoiser: Any, pipe: Any, x: Tensor, step: int) -> Normal:
    """Returns where a step of one image leads from x, in plain arithmetic with two calls of the denoiser."""
    time = pipe.scheduler.timesteps[step]
    without, with_prompt = (denoiser(x[None], timestep=time[None], **conditions)[0][0] for conditions in text(pipe))
    output = (1 - SCALE) * without + SCALE * with_prompt
    if kind == "flow":
        sigmas = pipe.scheduler.sigmas.double().tolist()
        t, following = sigmas[step], sigmas[step + 1]
        noise = math.sqrt(t / (1 - (t if t < 1 else sigmas[1])))  # eta is 1
        score = -(x + (1 - t) * output) / t
        mean = x + (output - noise**2 / 2 * score) * (following - t)
        deviation = noise * math.sqrt(t - following)
    else:
        now, alphas = int(time), pipe.scheduler.alphas_cumprod.double()
        later = now - 1000 // STEPS
        a, b = float(alphas[now]), float(alphas[later] if later >= 0 else alphas[0])
        if kind == "epsilon":
            clean, noise_there = (x - math.sqrt(1 - a) * output) / math.sqrt(a), output
        else:
            clean = math.sqrt(a) * x - math.sqrt(1 - a) * output
            noise_there = math.sqrt(a) * output + math.sqrt(1 - a) * x
        deviation = math.sqrt((1 - b) / (1 - a) * (1 - a / b))
        mean = math.sqrt(b) * clean + math.sqrt(1 - b - deviation**2) * noise_there
    return Normal(mean, deviation)


def by_hand(
    kind: str, pipe: Any, drawn: Trajectories, old: Any, new: Any, rewards: Tensor
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Returns surrogate and KL of all pairs, per dimension, the number that the clip stops, and the advantages."""
    way = torch.cat([drawn.first[:, None], drawn.latents], 1)
    # The trainer passes advantages in float32.
    exact = rewards.double()
    advantages = ((exact - exact.mean()) / exact.std(correction=0)).float().double()
    losses, kls, stopped = [], [], 0
    for i in range(PICTURES):
        for step in range(STEPS):
            x, y, gain = way[i, step], way[i, step + 1], float(advantages[i])
            with torch.no_grad():
                drew = stepped(kind, old, pipe, x, step)
            now = stepped(kind, new, pipe, x, step)
            kls.append(kl_divergence(now, drew).mean())
            ratio = torch.exp((now.log_prob(y) - drew.log_prob(y)).mean())
            outside = float(ratio) > 1 + CLIP if gain > 0 else float(ratio) < 1 - CLIP
            stopped += outside
            limit = 1 + CLIP if gain > 0 else 1 - CLIP
            losses.append(-gain * (torch.tensor(limit, dtype=torch.float64) if outside else ratio))
    return torch.stack(losses).mean(), torch.stack(kls).mean(), stopped, advantages


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_follows_the_gradient_of_the_loss_by_hand(tmp_path: Path, kind: str):
    """Weights move between sampling and training, so that ratios lie on both sides of the clip range.

    The penalty's reference is the policy that sampled.
    """
    copies: dict[str, Any] = {}

    def move(batches: list[Any], *_: Any) -> None:
        copies["old"] = copy.deepcopy(ddpo.sd_pipeline.denoiser)
        perturb(ddpo, 3e-3 if kind == "flow" else 3e-4)
        copies["new"] = copy.deepcopy(ddpo.sd_pipeline.denoiser)
        copies["rewards"] = torch.cat([batch[3] for batch in batches])

    ddpo = trainer(
        str(tmp_path),
        pipeline(kind),
        prompt_function=lambda: (PROMPT, {}),
        image_samples_hook=move,
        sample_num_batches_per_epoch=PICTURES // 2,
        train_batch_size=2,
        train_gradient_accumulation_steps=2,
        train_clip_range=CLIP,
        negative_prompts="dull",
        init_kl_coef=0.3,
    )
    computed, samples = gradients(ddpo), samples_of(ddpo)
    ddpo.step(0, 0)
    drawn, pipe = samples[0].trajectories, ddpo.sd_pipeline.sd_pipeline
    new = copies["new"].requires_grad_(True)
    loss, kl, stopped, advantages = by_hand(kind, pipe, drawn, copies["old"], new, copies["rewards"])
    (loss + 0.3 * kl).backward()
    assert 0 < stopped < PICTURES * STEPS
    assert ddpo.last_stats["clipfrac"] == pytest.approx(stopped / (PICTURES * STEPS))
    assert {float(sign) for sign in advantages.sign()} == {-1.0, 1.0}
    assert ddpo.last_stats["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert ddpo.last_stats["objective/kl"] == pytest.approx(float(kl) * drawn.dimensions * STEPS, rel=1e-6)
    largest = max(float(weight.grad.abs().max()) for weight in new.parameters() if weight.grad is not None)
    # A flow's time steps are differences of its schedule's float32 sigmas.
    near = {"rtol": 1e-5, "atol": 1e-6 * largest} if kind == "flow" else {"rtol": 1e-6, "atol": 1e-9 * largest}
    for name, weight in new.named_parameters():
        torch.testing.assert_close(computed[name], weight.grad, **near, msg=name)


def trained(folder: Path, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[dict[str, Tensor], Any]:
    """Returns the weights after two epochs of 8 images from the same noise, and the last statistics."""
    ddpo = trainer(str(folder), tiny.stable_diffusion(dtype=dtype), **settings)
    for epoch in range(2):
        ddpo.step(epoch, ddpo.global_step)
    return weights(ddpo), ddpo.last_stats


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], **tolerance, msg=name)


@pytest.mark.parametrize("estimator", slow_but(["is", "sf", "rwr"], "is"))
def test_an_update_may_be_cut_into_any_micro_batches(tmp_path: Path, estimator: str):
    """Pairs of images and steps, half of each image's steps: training does not depend on the micro-batch size."""
    same = {"estimator": estimator, "train_timestep_fraction": 0.7, "rwr_beta": 100.0}
    whole, stats = trained(tmp_path, train_batch_size=8, train_gradient_accumulation_steps=1, **same)
    # Reward-weighted regression uses float32 internally.
    near = {"rtol": 1e-4, "atol": 1e-6} if estimator == "rwr" else {"rtol": 1e-6, "atol": 1e-9}
    for size in (1, 2):
        cut, others = trained(tmp_path, train_batch_size=size, train_gradient_accumulation_steps=8 // size, **same)
        assert_same(cut, whole, **near)
        assert others["loss"] == pytest.approx(stats["loss"], rel=1e-5, abs=1e-9)
    assert stats["grad_norm"] > 1e-3


def test_importance_sampling_with_one_update_is_the_score_function(tmp_path: Path):
    """At a ratio of 1 their gradients are equal (Black et al. 2023, section 4.3)."""
    sampled, stats = trained(tmp_path, estimator="is")
    scored, others = trained(tmp_path, estimator="sf")
    assert_same(sampled, scored, rtol=1e-8, atol=1e-10)
    assert stats["grad_norm"] == pytest.approx(others["grad_norm"], rel=1e-9)
    assert stats["grad_norm"] > 1
    assert stats["loss"] == pytest.approx(0, abs=1e-6)  # advantages sum to 0
    assert abs(others["loss"]) > 1e-4


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [("stable_diffusion", DDIMScheduler), ("stable_diffusion_3", FlowMatchEulerDiscreteScheduler)],
)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_calculate_loss_by_hand_is_what_the_loop_computes(tmp_path: Path, kind: str, scheduler: type, scale: float):
    """As documented: embeds are [2B, ...] with guidance, negative prompts first, and [B, ...] without guidance."""
    results: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(batches: list[Any], *_: Any) -> None:
        perturb(ddpo, 3e-4)
        drawn, pipe = samples[0].trajectories, ddpo.sd_pipeline.sd_pipeline
        assert isinstance(pipe.scheduler, scheduler)
        way = torch.cat([drawn.first[:, None], drawn.latents], 1)
        rewards = torch.cat([batch[3] for batch in batches]).double()
        advantages = ((rewards - rewards.mean()) / rewards.std(correction=0)).float()
        guided = scale > 1
        if kind == "stable_diffusion":
            states, negative = pipe.encode_prompt(PROMPT, "cpu", 1, guided, negative_prompt="")
            embeds = torch.cat([each.repeat(4, 1, 1) for each in ([negative, states] if guided else [states])])
        else:
            encoded = pipe.encode_prompt(PROMPT, None, None, negative_prompt="", do_classifier_free_guidance=guided)
            states, negative, pooled, negative_pooled = encoded
            both = [(negative, negative_pooled), (states, pooled)][0 if guided else 1 :]
            embeds = {
                "encoder_hidden_states": torch.cat([each.repeat(4, 1, 1) for each, _ in both]),
                "pooled_projections": torch.cat([each.repeat(4, 1) for _, each in both]),
            }
        for step in range(STEPS):
            times = pipe.scheduler.timesteps[step].expand(4)
            with torch.no_grad():
                results.append(
                    ddpo.calculate_loss(
                        way[:, step], times, way[:, step + 1], drawn.logprobs[:, step], advantages, embeds
                    )
                )

    ddpo = trainer(
        str(tmp_path),
        getattr(tiny, kind)(dtype=torch.float64),
        prompt_function=lambda: (PROMPT, {}),
        image_samples_hook=hook,
        sample_num_batches_per_epoch=2,
        train_batch_size=4,
        train_gradient_accumulation_steps=1,
        sample_guidance_scale=scale,
    )
    samples = samples_of(ddpo)
    ddpo.step(0, 0)
    loss, approx_kl, clipped = (torch.stack([each[i] for each in results]).mean() for i in range(3))
    assert ddpo.last_stats["loss"] == pytest.approx(float(loss), rel=1e-5, abs=1e-8)
    assert ddpo.last_stats["approx_kl"] == pytest.approx(float(approx_kl), rel=1e-3)
    assert ddpo.last_stats["clipfrac"] == pytest.approx(float(clipped))
    assert float(approx_kl) > 1e-9


@pytest.mark.parametrize("kind", ["stable_diffusion", "stable_diffusion_3"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_calculate_loss_works_before_any_step(tmp_path: Path, kind: str, scale: float):
    """A pipeline with the same weights sampled the steps: ratios are 1, and the loss is minus the advantage."""
    build, call = getattr(tiny, kind), {"num_inference_steps": STEPS, "guidance_scale": scale}
    elsewhere = DDPOStableDiffusionPipeline(build(dtype=torch.float64))
    drawn = elsewhere([PROMPT] * 4, generator=tiny.generator(3), output_type="pt", **call).trajectories
    ddpo = trainer(str(tmp_path), build(dtype=torch.float64), sample_guidance_scale=scale)
    advantages, rows = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.arange(4)
    for step in range(STEPS):
        pairs = sampled_pairs(drawn, torch.device("cpu"), rows, torch.full((4,), step))
        loss, approx_kl, clipped = ddpo.calculate_loss(
            pairs.latents, pairs.timesteps, pairs.next_latents, pairs.logprobs, advantages, pairs.conditions
        )
        assert float(loss) == pytest.approx(-0.625, rel=1e-6)
        assert (float(approx_kl), float(clipped)) == (pytest.approx(0, abs=1e-12), 0)


def test_a_subclass_trains_on_its_calculate_loss(tmp_path: Path):
    class Doubled(DDPOTrainer):
        def calculate_loss(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
            loss, approx_kl, clipped = super().calculate_loss(*arguments)
            return 2 * loss, approx_kl, clipped

    kinds = {name: trainer(str(tmp_path), tiny.stable_diffusion(dtype=torch.float64)) for name in ("plain", "doubled")}
    kinds["doubled"].__class__ = Doubled
    for ddpo in kinds.values():
        ddpo.step(0, 0)
    plain, doubled = (ddpo.last_stats for ddpo in kinds.values())
    assert doubled["loss"] == pytest.approx(2 * plain["loss"], rel=1e-5)
    assert doubled["approx_kl"] == pytest.approx(plain["approx_kl"], rel=1e-5)
    assert doubled["clipfrac"] == plain["clipfrac"]


def test_a_controller_refuses_losses_without_a_kl(tmp_path: Path):
    ddpo = trainer(str(tmp_path), init_kl_coef=0.1, adap_kl_ctrl=True)
    usual = ddpo.calculate_loss
    ddpo.calculate_loss = lambda *arguments: usual(*arguments)  # type: ignore[method-assign]
    ddpo.step(0, 0)
    ddpo.calculate_loss = lambda *arguments: tuple(usual(*arguments))  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"adap_kl_ctrl=True needs the KL .* Set adap_kl_ctrl=False, or return"):
        ddpo.step(1, ddpo.global_step)
