"""A sampler that differs from the policy is measured, and truncated importance weights correct for it."""

import pytest
import torch

from trimtab_common.stats import gather_stats
from trimtab_lm.sampling.mismatch import importance_weights, mismatch_stats, with_largest


def test_weights_make_means_over_the_sampler_means_over_the_trainer():
    """Exact for a vocabulary of 50: E_sampler[w f] = E_trainer[f] without a cap; with one, w is at most the cap."""
    torch.manual_seed(0)
    trainer, sampler = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    values = torch.randn(50, dtype=torch.float64)
    weights = importance_weights(trainer, sampler, cap=1e9)
    torch.testing.assert_close((sampler.exp() * weights * values).sum(), (trainer.exp() * values).sum())
    capped = importance_weights(trainer, sampler, cap=2.0)
    assert float(capped.max()) == 2.0
    torch.testing.assert_close(capped[weights < 2], weights[weights < 2])
    far = importance_weights(torch.zeros(1), torch.tensor([-500.0]), cap=1e9)
    torch.testing.assert_close(far, torch.tensor([20.0]).exp())


def test_the_mismatch_of_a_sampler_by_hand():
    logprobs, sampler = torch.tensor([0.5, 1.0, 4.0]).log(), torch.zeros(3)
    torch.testing.assert_close(importance_weights(logprobs, sampler, cap=2.0), torch.tensor([0.5, 1.0, 2.0]))
    stats = mismatch_stats(logprobs, sampler, lengths=torch.tensor([1, 2]), cap=2.0)
    numbers = with_largest(gather_stats(stats))
    assert numbers["sampling/logp_difference/mean"] == pytest.approx(3 * torch.tensor(2.0).log() / 3)
    assert numbers["sampling/token_ratio/mean"] == pytest.approx(5.5 / 3)
    assert numbers["sampling/token_ratio/max"] == pytest.approx(4)
    assert numbers["sampling/token_ratio/truncated"] == pytest.approx(1 / 3)
    assert numbers["sampling/importance_ratio/mean"] == pytest.approx((0.5 + 4) / 2)
    stats = mismatch_stats(logprobs, sampler, lengths=torch.tensor([1, 2]), cap=None)
    assert "sampling/token_ratio/truncated" not in stats


def test_without_tokens_and_without_log_probabilities():
    none = torch.zeros(0)
    stats = mismatch_stats(none, none, lengths=torch.tensor([0]), cap=2.0)
    assert "sampling/token_ratio/max" not in with_largest(gather_stats(stats))
    with pytest.raises(ValueError, match=r"importance_sampling_cap=2.0 needs the log-probabilities .* 'vllm_server'"):
        importance_weights(none, None, cap=2.0)
