"""The variance of the policy gradient at fixed weights, with and without the baseline of a group."""

from collections.abc import Sequence

import torch

from trimtab_lm.data.formats import Row
from trimtab_lm.grpo import GRPOTrainer
from trimtab_lm.grpo.loss import advantages

LAYERS = 6  # the last layers, whose parameters' gradients are measured


class Variance:
    """The variance of vectors [D], summed over their components, without keeping the vectors."""

    def __init__(self) -> None:
        self.total: torch.Tensor | float = 0.0
        self.squares, self.count = 0.0, 0

    def add(self, vector: torch.Tensor) -> None:
        """Counts one more vector."""
        self.total = self.total + vector
        self.squares += float(vector.square().sum())
        self.count += 1

    @property
    def value(self) -> float:
        """The unbiased estimate; it needs two vectors."""
        norm = float(torch.as_tensor(self.total).square().sum())
        return (self.squares - norm / self.count) / (self.count - 1)


def gradient_variances(trainer: GRPOTrainer, rows: Sequence[Row], *, seed: int) -> dict[str, float]:
    """Samples a group of G answers for each row, and measures the variance over groups of the policy gradient.

    Both estimates have the same expectation: the group's mean contains the answer's own reward, for which
    G / (G - 1) corrects. The gradient is that of the parameters of the last LAYERS layers.

    Returns:
        variance/raw, of the rewards themselves, and variance/centred, of the rewards less the group's mean.
    """
    model, size = trainer.accelerator.unwrap_model(trainer.model), trainer.config.num_generations
    sampled = trainer.sampler.sample(rows, seed=seed)
    parameters = [parameter for layer in model.base_model.layers[-LAYERS:] for parameter in layer.parameters()]
    scales = {"raw": ("raw", 1.0), "centred": ("none", size / (size - 1))}
    variances = {name: Variance() for name in scales}
    for group, rewards in zip(sampled.rollout.groups, sampled.scored.rewards.view(len(rows), size), strict=True):
        batch = trainer.lay_out([group])
        logprobs = model(tokens=batch, temperature=trainer.config.temperature).logprobs
        for name, (scale, factor) in scales.items():
            weights = factor * advantages(rewards[None], scale=scale)[0].to(logprobs)[batch["sequence"]]
            gradients = torch.autograd.grad((weights * logprobs).sum() / size, parameters, retain_graph=True)
            variances[name].add(torch.cat([gradient.flatten() for gradient in gradients]))
    return {f"variance/{name}": variance.value for name, variance in variances.items()}
