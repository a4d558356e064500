"""One optimizer step over several minibatches: their weights, and whether to take the step."""

import math
import warnings

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from trimtab_common.accelerators import WeighingAccelerator
from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Mean, total_over_ranks

from .config import PPOConfig


class OptimizerStep:
    """The next optimizer step on the policy, of one or several minibatches.

    Attributes:
        waiting: mean ratio and loss of each minibatch since the device was waited for last, one after the other.
        kept: minibatches before these whose gradient the step has.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: PPOConfig, accelerator: WeighingAccelerator
    ):
        self.model, self.optimizer, self.config, self.accelerator = model, optimizer, config, accelerator
        self.waiting, self.kept = list[Tensor](), 0

    def descend(self, loss: Tensor, ratio: Tensor, *, step: int) -> dict[str, Mean]:
        """Adds the gradient of a minibatch, and takes the step if it is due. Collective if it is.

        A minibatch on which the mean ratio is above `ratio_threshold` is left out: its gradient is 0. No step is taken
        where all minibatches are left out.

        Args:
            ratio: to the policy before the updates, the minibatch's mean.
            step: PPO steps done before, for the error.

        Returns:
            Statistics: `policy/skipped`, and `grad_norm` before clipping where the step was taken.

        Raises:
            TrainingDivergedError: at the step, a loss or the gradient is not finite; the weights are untouched.
        """
        accelerator, is_skipped = self.accelerator, ratio > self.config.ratio_threshold
        stats, is_due = {"policy/skipped": Mean(is_skipped.float(), 1.0)}, accelerator.sync_gradients
        self.waiting += [ratio.float(), loss.detach().float()]
        # With the last gradient DeepSpeed takes the step, and a loss scaler that has divided it wants a step.
        asks_first = accelerator.distributed_type == DistributedType.DEEPSPEED or accelerator.scaler is not None
        if is_due and asks_first and not self._is_kept(step):
            return stats
        accelerator.backward(torch.where(is_skipped, 0.0, loss))
        if not is_due:
            return stats
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or float("inf"))
        if accelerator.scaler is None and not self._is_kept(step, norm.float()):
            return stats
        self.optimizer.step()
        self.drop()
        return stats | accelerator.norm_stats(norm)

    def _is_kept(self, step: int, *norm: Tensor) -> bool:
        """Whether any process has a gradient; else drops it. Waits for the device, once for all minibatches."""
        config, numbers = self.config, torch.stack([*self.waiting, *norm]).tolist()
        count, self.waiting = len(self.waiting), []
        for mean, loss in zip(numbers[0:count:2], numbers[1:count:2], strict=True):
            if mean > config.ratio_threshold:
                warnings.warn(
                    f"Mean ratio {mean:.3g} of a minibatch is above ratio_threshold={config.ratio_threshold}: it is "
                    "left out of the update. Lower learning_rate or ppo_epochs if this repeats.",
                    stacklevel=4,
                )
            elif not math.isfinite(loss):
                self.drop()
                raise TrainingDivergedError(
                    f"The loss of step {step} is {loss}. No update was made. Lower learning_rate "
                    f"({config.learning_rate}), clip gradients (max_grad_norm), or train in bfloat16 or float32."
                )
            else:
                self.kept += 1
        if norm and not math.isfinite(numbers[-1]):
            self.drop()
            is_taken = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            taken = "DeepSpeed has taken the step with it: resume from the last checkpoint."
            raise TrainingDivergedError(
                f"The gradient has norm {numbers[-1]}. {taken if is_taken else 'No update was made.'} Lower "
                f"learning_rate ({config.learning_rate}) or train in bfloat16 or float32."
            )
        if not (is_kept := bool(total_over_ranks(self.kept, self.accelerator.device))):
            self.drop()
        return is_kept

    def drop(self) -> None:
        """Clears the gradient."""
        self.optimizer.zero_grad()
        self.waiting, self.kept = [], 0
