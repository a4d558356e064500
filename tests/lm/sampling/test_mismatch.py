"""A sampler that differs from the policy is measured, and truncated importance weights correct for it."""

import pytest
import torch

from trimtab_common.stats import gather_stats
from trimtab_lm.sampling.mismatch import corrected, sampler_mismatch, truncated_importance_weights, with_largest


def test_the_mismatch_of_a_sampler_by_hand():
    trainer, sampler = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.0])
    difference, token_ratio, sequence_ratio = sampler_mismatch(trainer, sampler, lengths=torch.tensor([2, 1]))
    torch.testing.assert_close(difference, torch.tensor([0.5, 0.0, 1.0]))
    torch.testing.assert_close(token_ratio, torch.tensor([0.5, 0.0, -1.0]).exp())
    torch.testing.assert_close(sequence_ratio, torch.tensor([0.5, -1.0]).exp())
    far = sampler_mismatch(torch.zeros(2), torch.full((2,), -500.0), lengths=torch.tensor([2, 0]))
    torch.testing.assert_close(far.sequence_ratio, torch.tensor([20.0, 0.0]).exp())


def test_weights_make_means_over_the_sampler_means_over_the_trainer():
    """Exact for a vocabulary of 50: E_sampler[w f] = E_trainer[f] without a cap; with one, w is at most the cap."""
    torch.manual_seed(0)
    trainer, sampler = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    values = torch.randn(50, dtype=torch.float64)
    ratio = sampler_mismatch(trainer, sampler, lengths=torch.tensor([50])).token_ratio
    weights = truncated_importance_weights(ratio, cap=1e9)
    torch.testing.assert_close((sampler.exp() * weights * values).sum(), (trainer.exp() * values).sum())
    capped = truncated_importance_weights(ratio, cap=2.0)
    assert float(capped.max()) == 2.0
    torch.testing.assert_close(capped[ratio < 2], weights[ratio < 2])


def test_advantages_are_weighed_and_the_share_above_the_cap_is_told():
    logprobs, sampler = torch.tensor([0.5, 1.0, 4.0]).log(), torch.zeros(3)
    lengths, advantages = torch.tensor([1, 2]), torch.tensor([1.0, -1.0, 3.0])
    weighed, stats = corrected(advantages, logprobs, sampler, lengths=lengths, cap=2.0)
    torch.testing.assert_close(weighed, torch.tensor([0.5, -1.0, 6.0]))
    numbers = with_largest(gather_stats(stats))
    assert numbers["sampling/token_ratio/mean"] == pytest.approx(5.5 / 3)
    assert numbers["sampling/token_ratio/max"] == pytest.approx(4)
    assert numbers["sampling/token_ratio/truncated"] == pytest.approx(1 / 3)
    assert numbers["sampling/importance_ratio/mean"] == pytest.approx((0.5 + 4) / 2)
    same, stats = corrected(advantages, logprobs, sampler, lengths=lengths, cap=None)
    assert torch.equal(same, advantages)
    assert "sampling/token_ratio/truncated" not in stats


def test_without_tokens_and_without_log_probabilities():
    none = torch.zeros(0)
    _, stats = corrected(none, none, none, lengths=torch.tensor([0]), cap=2.0)
    assert "sampling/token_ratio/max" not in with_largest(gather_stats(stats))
    assert corrected(none, none, None, lengths=torch.tensor([0]), cap=None)[1] == {}
    with pytest.raises(ValueError, match=r"importance_sampling_cap=2.0 needs the log-probabilities .* 'vllm_server'"):
        corrected(none, none, None, lengths=torch.tensor([0]), cap=2.0)
