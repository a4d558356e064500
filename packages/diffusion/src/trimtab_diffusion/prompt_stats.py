"""Advantages against what each prompt's pictures were worth before."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST_DEVIATION = 1e-2  # of a prompt, as a share of all rewards' deviation: a near-tie is not a landslide


class PerPromptStatTracker:
    """Rewards of each prompt's last pictures, whose mean and deviation turn new ones into advantages.

    Black et al. 2023, arXiv:2305.13301, section 4.2. buffer_size: rewards that are remembered of a prompt.
    min_count: as long as a prompt has fewer, the mean and deviation of all the new rewards stand in for its own.
    Prompts are told apart by their whole text.
    """

    def __init__(self, buffer_size: int, min_count: int):
        self.buffer_size, self.min_count = buffer_size, min_count
        self.seen: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Tensor) -> Tensor:
        """Remember rewards [B], those of all processes, and return their advantages [B], float64."""
        rewards = rewards.double()
        everything = float(rewards.std(correction=0))
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            self.seen.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        means, deviations = torch.full_like(rewards, float(rewards.mean())), torch.full_like(rewards, everything)
        for i, prompt in enumerate(prompts):
            own = torch.tensor(self.seen[prompt], dtype=torch.float64)
            if len(own) >= self.min_count:
                means[i], deviations[i] = own.mean(), own.std(correction=0).clamp(min=LEAST_DEVIATION * everything)
        rounding = 1e-6 * rewards.abs().max()  # what is left of equal rewards
        return torch.where(deviations > rounding, (rewards - means) / deviations.clamp(min=1e-30), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {prompt: list(rewards) for prompt, rewards in self.seen.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}
