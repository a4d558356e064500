import torch

from trimtab_lm.ppo.loss import clipped_value_loss, gae, per_token_rewards


def test_gae_with_lambda_one_is_discounted_return_minus_value():
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    returns = torch.stack([rewards[:, t:] @ 0.9 ** torch.arange(5.0 - t) for t in range(5)], dim=1)
    advantages = gae(rewards, values, mask=torch.ones(2, 5), gamma=0.9, lam=1.0)
    torch.testing.assert_close(advantages, returns - values)


def test_gae_with_lambda_zero_is_the_temporal_difference():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 8.0]])
    advantages = gae(rewards, values, mask=torch.ones(1, 3), gamma=0.5, lam=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[1 + 0.125 - 0.5, 2 + 4 - 0.25, 4.0 - 8.0]]))


def test_gaps_and_padding_are_as_if_they_were_cut_out():
    rewards, values = torch.randn(1, 7), torch.randn(1, 7)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0]])
    kept = mask.bool()
    advantages = gae(rewards, values, mask=mask, gamma=0.9, lam=0.8)
    compact = gae(rewards[kept][None], values[kept][None], mask=torch.ones(1, 4), gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[kept], compact[0])
    assert (advantages[~kept] == 0).all()


def test_the_score_falls_on_the_last_token_that_counts():
    kl = torch.tensor([[0.1, 0.2, 9.0, 9.0], [0.1, 9.0, 0.3, 0.4]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]])
    rewards, non_score = per_token_rewards(torch.tensor([5.0, -7.0]), kl, mask, kl_coef=2.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.2, 4.6, 0, 0], [-0.2, 0, -0.6, -7.8]]))
    torch.testing.assert_close(non_score, torch.tensor([[-0.2, -0.4, 0, 0], [-0.2, 0, -0.6, -0.8]]))


def test_value_loss_takes_the_worse_of_clipped_and_unclipped():
    values, returns = torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    vpreds = torch.tensor([0.1, 0.9, 0.9], requires_grad=True)
    losses = clipped_value_loss(vpreds, values, returns, clip=0.2)
    torch.testing.assert_close(losses, torch.tensor([0.5 * 0.81, 0.5 * 0.64, 0.5 * 3.61]))
    losses.sum().backward()
    torch.testing.assert_close(vpreds.grad, torch.tensor([-0.9, 0.0, 1.9]))
