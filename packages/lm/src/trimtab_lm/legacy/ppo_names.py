"""Undocumented attributes of a PPOTrainer that scripts of 2024 read and set."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trimtab_common import stats
from trimtab_common.run import Run
from trimtab_common.tracking import Tracker
from trimtab_lm.models.adapters import adapters_off
from trimtab_lm.models.value_head import PreTrainedModelWrapper


class NamesOf2024:
    """Attributes of TRL's PPOTrainer, mapped to trimtab's."""

    accelerator: Accelerator
    actor_critic: nn.Module
    config: Any
    run: Run
    model: PreTrainedModelWrapper
    steps_done: int
    best_score: float

    @property
    def current_step(self) -> int:
        """The number of finished steps, at which `log_stats` logs."""
        return self.steps_done

    @current_step.setter
    def current_step(self, steps: int) -> None:
        self.steps_done = steps

    compare_step = current_step

    @property
    def highest_reward(self) -> Tensor:
        """The best mean score that was pushed to the hub; -inf before."""
        return torch.tensor(self.best_score)

    @highest_reward.setter
    def highest_reward(self, score: Tensor | float) -> None:
        self.best_score = float(score)

    @property
    def push_to_hub_kwargs(self) -> dict[str, Any]:
        """Arguments of `push_to_hub` for the best policy."""
        return self.config.push_to_hub_if_best_kwargs

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train."""
        return self.accelerator.num_processes > 1

    @property
    def is_peft_model(self) -> bool:
        """Whether the policy has adapters."""
        return self.model.is_peft_model

    @property
    def current_device(self) -> torch.device:
        """Where batches and rewards are: accelerate's device, until another one is assigned."""
        return self._device

    @current_device.setter
    def current_device(self, device: torch.device | str | int) -> None:
        self._device = torch.device(device)

    @property
    def model_params(self) -> list[nn.Parameter]:
        """The trained parameters of the policy, and of a critic if there is one."""
        return [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]

    @property
    def tracker(self) -> Tracker:
        """The tracker; starts at its first use, so that a resumed run continues under its id."""
        return self.run.tracker

    def optional_peft_ctx(self) -> AbstractContextManager[None]:
        """A context manager that runs the policy without its adapters, if it has any."""
        return adapters_off(self.model.pretrained_model) if self.is_peft_model else nullcontext()


class RunningMoments(stats.RunningMoments):
    """Running moments; `mean`, `std` (sample), `var` (population) and `count` can be set in any order.

    What was set becomes the state at the next update or `state_dict`. A deviation without a count lasts until then.

    Args:
        accelerator: not used.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        super().__init__()
        self._set: dict[str, float] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("mean", "std", "var", "count"):
            self._set[name] = float(value)
        else:
            super().__setattr__(name, value)

    @property
    def count(self) -> float:
        """How many numbers were seen."""
        return self._set.get("count", super().state_dict()["count"])

    @property
    def mean(self) -> float:
        return self._set.get("mean", super().mean)

    @property
    def std(self) -> float:
        return self._set.get("std", super().std)

    @property
    def var(self) -> float:
        """The population's variance; 1 before the first two numbers."""
        return self._set.get("var", self.std**2 * (self.count - 1) / self.count if self.count > 1 else 1.0)

    def update(self, x: Tensor) -> tuple[float, float]:  # type: ignore[override]
        """Adds the numbers of every process. Collective. Returns the mean and the deviation of the new numbers."""
        batch = stats.RunningMoments()
        batch.update(x)
        self._take()
        super().update(x)
        return batch.mean, batch.std

    def state_dict(self) -> dict[str, float]:
        self._take()
        return super().state_dict()

    def _take(self) -> None:
        if self._set:
            count = self.count
            squares = self._set["var"] * count if "var" in self._set else self.std**2 * max(count - 1, 0.0)
            state, self._set = {"count": count, "mean": self.mean, "squares": squares}, {}
            self.load_state_dict(state)
