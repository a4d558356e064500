"""One optimizer step over several minibatches: their weights, and whether to take the step."""

import math
import warnings
from collections.abc import Sequence

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimtab_common.accelerators import WeighingAccelerator
from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Mean, total_over_ranks

from .config import PPOConfig


class OptimizerStep:
    """The next optimizer step on the policy, of one or several minibatches.

    Attributes:
        kept: minibatches whose gradient the step has.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: PPOConfig, accelerator: WeighingAccelerator
    ):
        self.model, self.optimizer, self.config, self.accelerator = model, optimizer, config, accelerator
        self.kept = 0

    def descend(self, loss: Tensor, ratio: Tensor, *, outputs: Sequence[Tensor], step: int) -> dict[str, Mean]:
        """Adds the gradient of a minibatch, and takes the step if it is due. Collective if it is.

        A minibatch on which the mean ratio is above `ratio_threshold` is left out. No step is taken where all
        minibatches are left out.

        Args:
            loss: the minibatch's loss.
            ratio: to the policy before the updates, the minibatch's mean.
            outputs: what the models returned. A minibatch that is left out has gradient 0, for which others wait.
            step: PPO steps done before, for the error.

        Returns:
            Statistics: `policy/skipped`, and `grad_norm` before clipping where the step was taken.

        Raises:
            TrainingDivergedError: the loss or the gradient is not finite; the weights are untouched.
        """
        config, accelerator = self.config, self.accelerator
        # In one piece, because each reading waits for the device.
        mean, loss_value = torch.stack([ratio.float(), loss.detach().float()]).tolist()
        is_skipped = mean > config.ratio_threshold
        if is_skipped:
            warnings.warn(
                f"Mean ratio {mean:.3g} of a minibatch is above ratio_threshold={config.ratio_threshold}: it is "
                "left out of the update. Lower learning_rate or ppo_epochs if this repeats.",
                stacklevel=3,
            )
            loss = 0.0 * torch.stack([output.sum() for output in outputs]).sum()
        elif not math.isfinite(loss_value):
            self.drop()
            raise TrainingDivergedError(
                f"The loss of step {step} is {loss_value}. No update was made. Lower learning_rate "
                f"({config.learning_rate}), clip gradients (max_grad_norm), or train in bfloat16 or float32."
            )
        self.kept += not is_skipped
        stats = {"policy/skipped": Mean(float(is_skipped), 1.0)}
        is_due = accelerator.sync_gradients
        if is_due and not total_over_ranks(
            self.kept, accelerator.device
        ):  # before the last gradient: with that DeepSpeed takes the step
            self.drop()
            return stats
        if not is_skipped or accelerator.num_processes > 1:
            accelerator.backward(loss)
        return stats | self._take() if is_due else stats

    def _take(self) -> dict[str, Mean]:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or float("inf"))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)  # DeepSpeed's is a number
        if self.accelerator.scaler is None and not torch.isfinite(norm):
            self.drop()
            is_taken = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            taken = "DeepSpeed has taken the step with it: resume from the last checkpoint."
            raise TrainingDivergedError(
                f"The gradient has norm {float(norm)}. {taken if is_taken else 'No update was made.'} Lower "
                f"learning_rate ({self.config.learning_rate}) or train in bfloat16 or float32."
            )
        self.optimizer.step()
        self.drop()
        return self.accelerator.norm_stats(norm)

    def drop(self) -> None:
        """Clears the gradient."""
        self.optimizer.zero_grad()
        self.kept = 0
