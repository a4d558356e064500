"""The policy that samples: a moving average of the trained weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class OldPolicy:
    """The old weights of a denoiser (DiffusionNFT, arXiv:2509.16117, section 3.3).

    Args:
        denoiser: as it was prepared, unwrapped; those of its weights that train are averaged.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self.trained = {name: weight for name, weight in denoiser.named_parameters() if weight.requires_grad}
        self.weights = {name: weight.detach().clone() for name, weight in self.trained.items()}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Gives the denoiser the old weights inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self.trained.items():
            kept = weight.detach().clone()
            weight.copy_(self.weights[name])
            self.weights[name].copy_(kept)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Moves the old weights: decay x old + (1 - decay) x trained."""
        for name, weight in self.trained.items():
            self.weights[name].mul_(decay).add_(weight, alpha=1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The old weights by name."""
        return dict(self.weights)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])
