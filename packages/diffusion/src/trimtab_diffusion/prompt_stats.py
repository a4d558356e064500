"""Advantages relative to the earlier rewards of the same prompt."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trimtab_common.reward_checks import require_finite

LEAST_DEVIATION = 1e-2
"""The least standard deviation of a prompt, as a share of that of all rewards: it keeps near-ties small."""


class PerPromptStatTracker:
    """Whitens rewards by the mean and standard deviation of each prompt's latest rewards.

    Black et al. 2023, arXiv:2305.13301, section 4.2. Prompts are equal if their whole texts are.

    Args:
        buffer_size: how many rewards of each prompt are kept.
        min_count: a prompt with fewer rewards uses the mean and standard deviation of all new rewards.
    """

    def __init__(self, buffer_size: int, min_count: int):
        self.buffer_size, self.min_count = buffer_size, min_count
        self.seen: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Tensor) -> Tensor:
        """Adds rewards to the buffers and returns their advantages.

        Args:
            prompts: B texts, those of all processes.
            rewards: [B].

        Returns:
            [B], float64; 0 where all rewards are equal.

        Raises:
            ValueError: there is no reward, not one for each prompt, or one is not finite. None was added.
        """
        rewards = rewards.double()
        if len(prompts) == 0 or rewards.shape != (len(prompts),):
            raise ValueError(
                f"rewards has the shape {list(rewards.shape)} for {len(prompts)} prompts: give one reward per prompt, "
                "and one at least."
            )
        require_finite("PerPromptStatTracker", **{f"rewards[{i}]": x for i, x in enumerate(rewards.tolist())})
        everything = float(rewards.std(correction=0))
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            self.seen.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        means, deviations = torch.full_like(rewards, float(rewards.mean())), torch.full_like(rewards, everything)
        largest = torch.full_like(rewards, float(rewards.abs().max()))
        for i, prompt in enumerate(prompts):
            latest = torch.tensor(self.seen[prompt], dtype=torch.float64)
            if len(latest) >= self.min_count:
                means[i], largest[i] = latest.mean(), latest.abs().max()
                deviations[i] = latest.std(correction=0).clamp(min=LEAST_DEVIATION * everything)
        rounding = 1e-6 * largest  # the standard deviation that rounding leaves of equal rewards
        return torch.where(deviations > rounding, (rewards - means) / deviations.clamp(min=1e-30), 0.0)

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the rewards of each prompt, oldest first."""
        return {prompt: list(rewards) for prompt, rewards in self.seen.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores what `state_dict` returned; ValueError if it is not finite."""
        require_finite("PerPromptStatTracker", **{name: sum(rewards) for name, rewards in state.items()})
        self.seen = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}
