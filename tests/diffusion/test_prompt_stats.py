"""Advantages relative to a prompt's earlier rewards: closed forms, and what must not change them."""

import json
import math

import numpy as np
import pytest
import torch

from trimtab_diffusion.ddpo.names_of_2024 import PerPromptStatTracker as NumpyTracker
from trimtab_diffusion.prompt_stats import LEAST_DEVIATION, PerPromptStatTracker


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_each_prompt_is_its_own_measure():
    # cat: 1, 3 have mean 2 and deviation 1; dog: 10, 10, 16 have mean 12 and deviation sqrt(8).
    prompts, rewards = ["cat", "dog", "dog", "cat", "dog"], tensor(1, 10, 10, 3, 16)
    advantages = PerPromptStatTracker(buffer_size=8, min_count=2).update(prompts, rewards)
    expected = tensor(-1, -2 / math.sqrt(8), -2 / math.sqrt(8), 1, 4 / math.sqrt(8))
    torch.testing.assert_close(advantages, expected)


def test_earlier_rewards_count():
    tracker = PerPromptStatTracker(buffer_size=8, min_count=2)
    tracker.update(["cat", "cat"], tensor(0, 2))
    advantages = tracker.update(["cat", "dog", "cat"], tensor(4, -7, 6))  # 0, 2, 4, 6: mean 3, variance 5
    torch.testing.assert_close(advantages[[0, 2]], tensor(1 / math.sqrt(5), 3 / math.sqrt(5)))


def test_a_prompt_seldom_seen_is_measured_by_all_new_rewards():
    tracker = PerPromptStatTracker(buffer_size=8, min_count=3)
    tracker.update(["dog", "dog"], tensor(100, 200))  # no dog in the next update
    advantages = tracker.update(["cat", "bird", "cat", "fish"], tensor(1, 2, 3, 6))  # mean 3, variance 14 / 4
    torch.testing.assert_close(advantages, tensor(-2, -1, 0, 3) / math.sqrt(3.5))
    # After its third reward, the cat is measured by its own rewards: 1, 3, 8 have mean 4 and variance 26 / 3.
    advantages = tracker.update(["cat", "mouse"], tensor(8, 0))
    torch.testing.assert_close(advantages, tensor(4 / math.sqrt(26 / 3), -1))


def test_the_buffer_forgets_the_oldest():
    tracker = PerPromptStatTracker(buffer_size=2, min_count=2)
    tracker.update(["cat", "cat", "cat"], tensor(-50, 70, 1))
    advantages = tracker.update(["cat"], tensor(3))
    torch.testing.assert_close(advantages, tensor(1))  # relative to 1 and 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.float32])
def test_rewards_of_any_dtype(dtype):
    advantages = PerPromptStatTracker(8, 2).update(["cat", "cat", "cat"], torch.tensor([0, 1, 5], dtype=dtype))
    torch.testing.assert_close(advantages, tensor(-2, -1, 3) / math.sqrt(14 / 3))


@pytest.mark.parametrize("reward", [0.1, 0.0, -1e6 / 3, 1e-9 / 7])
@pytest.mark.parametrize("min_count", [2, 12])
def test_equal_rewards_are_no_news(reward, min_count):
    """The mean of eleven such numbers differs from the number in the last bit."""
    prompts = ["cat"] * 11 + ["dog"] * 11
    advantages = PerPromptStatTracker(12, min_count).update(prompts, torch.full((22,), reward, dtype=torch.float64))
    assert torch.equal(advantages, torch.zeros(22, dtype=torch.float64))


def test_a_tie_within_a_prompt_is_no_news_beside_others():
    advantages = PerPromptStatTracker(8, 2).update(["cat", "dog", "cat", "dog"], tensor(0.1, 0, 0.1, 1))
    torch.testing.assert_close(advantages, tensor(0, -1, 0, 1))


def test_a_near_tie_is_no_landslide():
    advantages = PerPromptStatTracker(8, 2).update(["cat", "cat", "dog", "dog"], tensor(5, 5 + 2e-5, 0, 10))
    everything = float(tensor(5, 5 + 2e-5, 0, 10).std(correction=0))
    torch.testing.assert_close(advantages[:2], tensor(-1e-5, 1e-5) / (LEAST_DEVIATION * everything))
    assert advantages[:2].abs().max() < 1e-3
    torch.testing.assert_close(advantages[2:], tensor(-1, 1))


def test_scale_and_shift_of_rewards_do_not_matter():
    prompts = ["cat", "dog"] * 4 + ["bird"]
    rewards = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (PerPromptStatTracker(8, 2).update(prompts, each) for each in (rewards, 1000 * rewards - 30))
    torch.testing.assert_close(one, other)


def test_prompts_are_told_apart_by_their_whole_text():
    long = "very " * 100  # longer than a tokenizer keeps
    prompts = [f"{long}good cat", f"{long}bad cat", f"{long}good cat", f"{long}bad cat", "Cat", "cat"]
    tracker = PerPromptStatTracker(8, 2)
    advantages = tracker.update(prompts, tensor(0, 10, 2, 14, 5, 5))
    torch.testing.assert_close(advantages[:4], tensor(-1, -1, 1, 1))
    assert len(tracker.seen) == 4


def test_advantages_follow_their_rewards():
    prompts, rewards = ["cat", "dog", "cat", "dog", "bird"], tensor(1, 8, 4, 2, 3)
    order = [3, 0, 4, 2, 1]
    straight = PerPromptStatTracker(8, 2).update(prompts, rewards)
    shuffled = PerPromptStatTracker(8, 2).update([prompts[i] for i in order], rewards[order])
    torch.testing.assert_close(shuffled, straight[order])


def test_state_goes_on_elsewhere():
    generator = torch.Generator().manual_seed(1)
    batches = [(["cat", "dog", "cat"], torch.randn(3, generator=generator)) for _ in range(6)]
    straight = PerPromptStatTracker(4, 2)
    expected = [straight.update(*batch) for batch in batches]
    first = PerPromptStatTracker(4, 2)
    for batch in batches[:3]:
        first.update(*batch)
    second = PerPromptStatTracker(4, 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    advantages = [second.update(*batch) for batch in batches[3:]]
    assert all(torch.equal(one, other) for one, other in zip(advantages, expected[3:], strict=True))
    assert second.state_dict() == straight.state_dict()


@pytest.mark.parametrize(
    ("prompts", "rewards", "words"),
    [
        (["cat"], [1.0, 2.0], r"shape \[2\] for 1 prompts"),
        ([], [], "one at least"),
        (["cat", "cat"], [1.0, math.nan], r"rewards\[1\]=nan came"),
        (["cat"], [-math.inf], r"rewards\[0\]=-inf came"),
    ],
)
def test_rewards_that_do_not_fit_change_nothing(prompts, rewards, words):
    tracker = PerPromptStatTracker(4, 2)
    tracker.update(["cat"], tensor(3))
    with pytest.raises(ValueError, match=words):
        tracker.update(prompts, tensor(*rewards))
    with pytest.raises(ValueError, match="cat=nan came"):
        tracker.load_state_dict({"keeper": [1.0], "cat": [2.0, math.nan]})
    assert tracker.state_dict() == {"cat": [3.0]}


def test_the_tracker_of_2024_takes_and_returns_arrays():
    tracker = NumpyTracker(buffer_size=4, min_count=2)
    advantages = tracker.update(np.array(["a", "a", "b"]), np.array([1, 3, 5]))
    assert isinstance(advantages, np.ndarray)
    np.testing.assert_allclose(advantages, [-1, 1, 2 / np.std([1, 3, 5])])
    assert tracker.get_stats() == {"a": {"mean": 2, "std": 1, "count": 2}, "b": {"mean": 5, "std": 0, "count": 1}}
