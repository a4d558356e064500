"""The KL of a policy to its reference: estimators per token, and controllers of the penalty's coefficient.

Every estimator takes log-probabilities [...] of the sampled tokens, in nats, and returns [...].
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trimtab_common.reward_checks import require_finite

LOG_RATIO_CLAMP = 20.0  # exp(20) is already 5e8: beyond, k3 would only overflow
LEAST_FACTOR = 0.1  # of one update of the adaptive coefficient


def clamped(log_ratio: Tensor) -> Tensor:
    """Bounds the logarithm of a ratio, [...], to +-20."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log ref of the sampled token: unbiased for KL(pi, ref), may be negative (Schulman 2020, k1)."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log pi - log ref| of the sampled token; biased upwards."""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: biased, small variance, gradient of the reverse KL (Schulman 2020, k2)."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log r with r = ref / pi: unbiased for KL(pi, ref) and never negative (Schulman 2020, k3).

    log r is clamped to +-20.
    """
    log_ratio = clamped(ref_logprobs - logprobs)
    return torch.expm1(log_ratio) - log_ratio


def full(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) = sum p (log p - log q) over the vocabulary.

    A token with p = 0, also by underflow, adds 0 to the value and to the gradient. A token with q = 0 and p > 0 makes
    the KL infinite.

    Args:
        log_p: [..., V], normalised.
        log_q: [..., V], normalised.

    Returns:
        [...], in nats.
    """
    p = log_p.exp()
    return torch.linalg.vecdot(p, (log_p - log_q).masked_fill(p == 0, 0.0))


SAMPLED_KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "k3": k3,
}
"""The estimators that need only the sampled token, by their names in configurations; `full` needs the vocabulary."""


class FixedKLController:
    """A constant coefficient of the KL penalty."""

    def __init__(self, kl_coef: float) -> None:
        require_finite(type(self).__name__, kl_coef=kl_coef)
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Changes nothing; see `AdaptiveKLController.update` for the arguments and errors."""
        require_finite(type(self).__name__, current=current, n_steps=n_steps)

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned; ValueError if it is not finite."""
        require_finite(type(self).__name__, **state)
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """Moves the coefficient until the KL meets its target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    The rule multiplies the coefficient by 1 + error * n_steps / horizon. This is 0 or negative when one update spans
    five horizons or more, and a negative coefficient would reward KL. The factor is therefore at least 0.1, which
    changes only updates of more than 4.5 horizons.

    The KL follows the coefficient some steps later. The rule sums the errors of these steps, so that the coefficient
    overshoots and the KL swings around its target. With a gain the coefficient is

        integral * exp(gain * clip(KL / target - 1, -1, 1))

    where the rule moves the integral (PI control; Astrom & Hagglund 1995). The second factor answers to the KL of this
    step alone. The integral may therefore be slow: give it a horizon of many steps.

    Args:
        target: KL in nats per response.
        horizon: episodes over which an error of 20% or more multiplies or divides the coefficient by about e^0.2.
        max_kl_coef: the largest coefficient. Without a bound the coefficient winds up while no penalty can lower the
            KL, such as where the noise of the updates alone exceeds the target, and stays high long after.
        gain: the second factor at twice the target is e^gain, and without any KL e^-gain.
    """

    def __init__(
        self, init_kl_coef: float, target: float, horizon: float, max_kl_coef: float = math.inf, *, gain: float = 0.0
    ) -> None:
        super().__init__(init_kl_coef)
        require_finite(type(self).__name__, target=target, horizon=horizon, gain=gain)
        if not (target > 0 and horizon > 0 and max_kl_coef > 0 and gain >= 0):
            raise ValueError(
                f"AdaptiveKLController got target={target}, horizon={horizon}, max_kl_coef={max_kl_coef} and "
                f"gain={gain}. The first three must be above 0, and the gain 0 or more."
            )
        self.target, self.horizon, self.max_kl_coef, self.gain = target, horizon, max_kl_coef, gain
        self.integral = init_kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Moves the coefficient.

        Args:
            current: KL in nats per response, mean over all processes.
            n_steps: responses since the last update, of all processes.

        Raises:
            ValueError: an argument is NaN or infinite. The coefficient did not change.
        """
        require_finite(type(self).__name__, current=current, n_steps=n_steps)
        error = current / self.target - 1
        factor = max(1 + min(max(error, -0.2), 0.2) * n_steps / self.horizon, LEAST_FACTOR)
        integral = self.integral if self.gain else self.value  # which a caller may have assigned
        self.integral = min(integral * factor, self.max_kl_coef)
        self.value = min(self.integral * math.exp(self.gain * min(max(error, -1.0), 1.0)), self.max_kl_coef)

    def state_dict(self) -> dict[str, float]:
        """The coefficient and its integral."""
        return {"value": self.value, "integral": self.integral}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned; without an integral the coefficient is one."""
        super().load_state_dict(state)
        self.integral = state.get("integral", self.value)


def kl_controller(
    init_kl_coef: float,
    *,
    target: float | None,
    horizon: float | None,
    max_kl_coef: float | None = None,
    gain: float = 0.0,
) -> FixedKLController:
    """Returns the controller that moves a coefficient towards a target; without target and horizon, a constant one.

    See `AdaptiveKLController`.
    """
    if target is None or horizon is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, target, horizon, max_kl_coef or math.inf, gain=gain)
