"""DiffusionNFT's formulas: worked numbers, the regression that they amount to, and supervised training as a case."""

import pytest
import torch
from tests.diffusion import tiny
from torch import Tensor

from trimtab_diffusion import DDPOStableDiffusionPipeline
from trimtab_diffusion.nft.algorithm import optimality_of
from trimtab_diffusion.nft.config import DiffusionNFTConfig
from trimtab_diffusion.nft.loss import mean_square, nft_loss, old_decay, optimality, self_normalized
from trimtab_diffusion.steps import Steps

NUMBERS = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=NUMBERS, dtype=torch.float64)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), of)[0]


def test_the_loss_of_worked_numbers():
    """v = 1, v_old = 0, v_theta = 2 and beta = 1/2: v+ = 1 and v- = -1, whose squared errors are 0 and 4."""
    one, zero = torch.ones(3, 2, 2), torch.zeros(3, 2, 2)
    optimal = torch.tensor([1.0, 0.0, 0.75])
    loss = nft_loss(2 * one, zero, one, optimal, beta=0.5, distance=mean_square)
    assert loss.tolist() == pytest.approx([0.0, 4.0, 1.0])


def test_the_loss_of_worked_numbers_over_their_errors():
    """The errors of v- are -1 and -3: their squares have the mean 5, and they the mean size 2."""
    prediction, old, target = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]]), torch.zeros(2, 1, 2), torch.zeros(2, 1, 2)
    target[1] = torch.tensor([0.0, 1.0])
    loss = nft_loss(prediction, old, target, torch.tensor([0.5, 0.0]), beta=1, distance=self_normalized)
    assert loss.tolist() == pytest.approx([2.5 / 1.5, 5 / 2])


def test_the_size_of_errors_has_no_gradient():
    x, target = drawn(3, 4).requires_grad_(), drawn(3, 4)
    size = (x - target).abs().mean(1, keepdim=True).detach()
    torch.testing.assert_close(gradient(self_normalized(x, target), x), 2 * (x - target) / (4 * size))
    assert gradient(self_normalized(x, x.detach()), x).eq(0).all()  # without a division by 0


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0])
def test_the_loss_is_a_regression(beta: float):
    """Its gradient is beta^2 times that of |v_theta - (v_old + (2r - 1) / beta (v - v_old))|^2."""
    policy, old, target, optimal = drawn(6, 5).requires_grad_(), drawn(6, 5), drawn(6, 5), torch.rand(6).double()
    found = gradient(nft_loss(policy, old, target, optimal, beta=beta, distance=mean_square), policy)
    goal = old + ((2 * optimal - 1) / beta)[:, None] * (target - old)
    torch.testing.assert_close(found, beta**2 * gradient(mean_square(policy, goal), policy))


@pytest.mark.parametrize("distance", [mean_square, self_normalized])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_at_the_old_policy_the_gradient_is_the_advantage_times_that_of_supervised_training(beta, distance):
    old, target, optimal = drawn(6, 5), drawn(6, 5), torch.tensor([0.0, 0.2, 0.5, 0.7, 0.9, 1.0]).double()
    policy = old.clone().requires_grad_()
    found = gradient(nft_loss(policy, old, target, optimal, beta=beta, distance=distance), policy)
    supervised = gradient(distance(policy, target), policy)
    torch.testing.assert_close(found, ((2 * optimal - 1) * beta)[:, None] * supervised)
    assert not found[2].any()  # of an average sample


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_one_optimality_for_all_is_supervised_training(beta: float):
    """r = (1 + beta) / 2, which is 1 for beta = 1: beta^2 times its gradient, wherever the policy is."""
    policy, old, target = drawn(6, 5).requires_grad_(), drawn(6, 5), drawn(6, 5)
    optimal = torch.full((6,), (1 + beta) / 2, dtype=torch.float64)
    loss = nft_loss(policy, old, target, optimal, beta=beta, distance=mean_square)
    torch.testing.assert_close(gradient(loss, policy), beta**2 * gradient(mean_square(policy, target), policy))
    if beta == 1:
        torch.testing.assert_close(loss, mean_square(policy, target))


def test_equal_rewards_lead_back_to_the_old_policy():
    """r = 1/2 for all: beta^2 times the gradient of a regression on the old policy, whatever the samples are."""
    config = DiffusionNFTConfig(mixed_precision="no")
    optimal = optimality_of(torch.full((6,), 0.3).double(), torch.tensor([0, 0, 0, 1, 1, 1]), config)
    assert optimal.tolist() == [0.5] * 6
    policy, old, target = drawn(6, 5).requires_grad_(), drawn(6, 5), drawn(6, 5)
    found = gradient(nft_loss(policy, old, target, optimal, beta=0.5, distance=mean_square), policy)
    torch.testing.assert_close(found, 0.25 * gradient(mean_square(policy, old), policy))


def test_the_minimum_is_the_old_policy_and_twice_the_guidance_over_beta():
    """Theorem 3.2 with two images of one noised one: v_old is the mean of their targets."""
    beta, targets, optimal = 0.5, torch.tensor([[2.0], [-2.0]]), torch.tensor([0.9, 0.3])
    old, policy = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True)
    optimizer = torch.optim.SGD([policy], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        both = policy.expand(2, 1), old.expand(2, 1)
        nft_loss(*both, targets, optimal, beta=beta, distance=mean_square).mean().backward()
        optimizer.step()
    positive = (optimal[:, None] * targets).sum() / optimal.sum()  # v+, the mean under pi+
    guidance = optimal.mean() * positive  # alpha (v+ - v_old)
    assert policy.item() == pytest.approx(2 / beta * guidance.item(), rel=1e-5)


def test_optimality_of_worked_numbers():
    advantages = torch.tensor([-9.0, -5.0, -2.5, 0.0, 1.0, 5.0, 6.0])
    assert optimality(advantages, largest=5).tolist() == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.6, 1.0, 1.0])


def test_rewards_are_relative_to_their_prompt_and_to_the_deviation_of_all():
    """The means are 2 and 12, and the deviation of 1, 3, 11, 13 about 7 is the root of (36 + 16 + 16 + 36) / 3."""
    config = DiffusionNFTConfig(mixed_precision="no", train_adv_clip_max=0.5)
    optimal = optimality_of(torch.tensor([1.0, 13.0, 3.0, 11.0]).double(), torch.tensor([0, 1, 0, 1]), config)
    step = 0.5 * (1 / (104 / 3) ** 0.5) / 0.5
    assert optimal.tolist() == pytest.approx([0.5 - step, 0.5 + step, 0.5 + step, 0.5 - step])


def test_the_decay_rises_to_its_bound():
    usual = {"start": 0, "rate": 0.001, "largest": 0.5}
    assert [old_decay(i, **usual) for i in (0, 1, 100, 500, 900)] == pytest.approx([0, 0.001, 0.1, 0.5, 0.5])
    late = {"start": 75, "rate": 0.0075, "largest": 0.999}
    assert [old_decay(i, **late) for i in (1, 75, 76, 175, 400)] == pytest.approx([0, 0, 0.0075, 0.75, 0.999])


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample", "flow"])
def test_targets_lead_back_to_the_clean_latents(kind: str):
    build = tiny.stable_diffusion_3 if kind == "flow" else lambda: tiny.stable_diffusion(kind)
    scheduler = DDPOStableDiffusionPipeline(build()).scheduler
    scheduler.set_timesteps(5)
    steps = Steps.of(scheduler, 0.0)
    clean, noise, index = drawn(5, 4, 3, 3), drawn(5, 4, 3, 3), torch.arange(5)
    noised, target = steps.noised(clean, noise, index)
    torch.testing.assert_close(steps.denoised(target, noised, index), clean)
