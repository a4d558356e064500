"""What scripts of 2024 read and set on a DDPOTrainer beside its documented arguments and methods."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab_common.accelerators import WeighingAccelerator
from trimtab_diffusion import prompt_stats as by_prompt

from .config import DDPOConfig
from .sampling import PromptFunction, RewardFunction, Rewards


class NamesOf2024:
    """Attributes of TRL's DDPOTrainer, on those of ours."""

    accelerator: WeighingAccelerator
    config: DDPOConfig
    model: nn.Module
    prompt_function: PromptFunction
    prompt_stats: by_prompt.PerPromptStatTracker | None
    rewards: Rewards

    @property
    def prompt_fn(self) -> PromptFunction:
        """What draws prompts."""
        return self.prompt_function

    @prompt_fn.setter
    def prompt_fn(self, function: PromptFunction) -> None:
        self.prompt_function = function

    @property
    def reward_fn(self) -> RewardFunction:
        """The reward that is trained on."""
        return self.rewards.function

    @reward_fn.setter
    def reward_fn(self, function: RewardFunction) -> None:
        self.rewards.function = function

    @property
    def stat_tracker(self) -> by_prompt.PerPromptStatTracker | None:
        """The statistics per prompt, if there are any."""
        return self.prompt_stats

    @property
    def num_train_timesteps(self) -> int:
        """Steps of a sample that are trained on."""
        return self.config.trained_steps

    @property
    def trainable_layers(self) -> list[nn.Parameter]:
        """The weights that train."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """A context for forward passes in the run's precision."""
        return self.accelerator.autocast


class PerPromptStatTracker(by_prompt.PerPromptStatTracker):
    """Statistics per prompt of NumPy's arrays; see `trimtab_diffusion.prompt_stats`."""

    def update(self, prompts: Sequence[str], rewards: Any) -> np.ndarray:  # type: ignore[override]
        """Adds rewards [B], and returns their advantages [B]."""
        return super().update([*map(str, prompts)], torch.as_tensor(np.asarray(rewards))).numpy()

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Mean, population deviation and count of the latest rewards of each prompt."""
        return {
            prompt: {"mean": float(np.mean(seen)), "std": float(np.std(seen)), "count": len(seen)}
            for prompt, seen in self.seen.items()
        }
