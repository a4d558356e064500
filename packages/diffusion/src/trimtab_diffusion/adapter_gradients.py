"""Gradients of each sample's log-probability with respect to adapters, computed while the sample is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trimtab_diffusion.fused_lora import FusedLoraLinear


class AdapterGradients:
    """Sums over the steps of a sample of the gradient of log p(x_{t-1} | x_t), one for each sample and adapter.

    The policy gradient of the policy that sampled is linear in the advantages: a sum over samples of A times this. So
    the pass that samples is the only forward pass that the first update of an epoch needs, although A is known later.

    The sums are in the host's memory, one number for each sample and trained weight, in the weight's precision.

    Args:
        denoiser: `has_only_adapters` holds for it.
        scale: what log-probabilities are multiplied by for the backward pass, whose small numbers fp16 would round to
            0. `weighted` divides by it.

    Attributes:
        weights: those that train, in the order of `weighted`.
    """

    def __init__(self, denoiser: nn.Module, *, scale: float = 1.0) -> None:
        self.denoiser, self.scale, self._layers = denoiser, scale, _adapted(denoiser)
        self.weights = [weight for matrices in self._layers.values() for weight in matrices]
        self._batches: list[tuple[int, list[Tensor | None]]] = []  # samples, and the sums of each weight
        self._sums: list[Tensor | None] = []
        self._samples, self._copies = 0, 1

    def __len__(self) -> int:
        return sum(samples for samples, _ in self._batches)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block a batch is sampled. The denoiser computes with gradients, also where its caller does not."""
        self._samples, self._sums = 0, [None] * len(self.weights)
        hooks = [
            self.denoiser.register_forward_pre_hook(lambda *_: _set_gradients(True)),
            self.denoiser.register_forward_hook(lambda *_: _set_gradients(False), always_call=True),
        ]
        for i, layer in enumerate(self._layers):
            layer.collect = partial(self._collect, 2 * i)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in self._layers:
                del layer.collect
        self._batches.append((self._samples, [None if each is None else each.cpu() for each in self._sums]))

    def add(self, logprobs: Tensor, *, copies: int) -> None:
        """Adds the gradients of a step's log-probabilities, and frees what their backward pass needed.

        Args:
            logprobs: [b].
            copies: how often a call of the denoiser read each sample: 2 where one call serves guidance.
        """
        self._samples, self._copies = len(logprobs), copies
        logprobs.backward(torch.full_like(logprobs, self.scale))

    def weighted(self, weights: Tensor) -> list[Tensor | None]:
        """The sum over all samples of a weight times the sample's gradient.

        Args:
            weights: [B], in the order in which the samples were drawn.

        Returns:
            The gradient of each trained weight, on its device; None where no call used it.
        """
        parts = (weights.cpu().double() / self.scale).split([samples for samples, _ in self._batches])
        gradients: list[Tensor | None] = []
        for i, weight in enumerate(self.weights):
            sums = [(part, sums[i]) for part, (_, sums) in zip(parts, self._batches, strict=True)]
            terms = [torch.tensordot(part.to(each.dtype), each, 1) for part, each in sums if each is not None]
            gradients.append(torch.stack(terms).sum(0).to(weight.device) if terms else None)
        return gradients

    def give(self, weights: Tensor, accelerator: Accelerator) -> None:
        """Sets the `.grad` of each trained weight to the mean over processes of `weighted`. Collective.

        In fp16 the loss scale multiplies it, by which the optimizer divides.
        """
        for weight, gradient in zip(self.weights, self.weighted(weights), strict=True):
            if gradient is not None:
                mean = accelerator.reduce(gradient, "mean")
                weight.grad = mean if accelerator.scaler is None else accelerator.scaler.scale(mean)

    def _collect(self, index: int, *by_row: Tensor) -> None:
        """Adds the gradients of a layer's two matrices by row, [copies b n, ...]: a layer may read n frames apart."""
        for i, gradient in enumerate(by_row, start=index):
            by_sample = gradient.unflatten(0, (self._copies, self._samples, -1))
            of_samples = by_sample.sum((0, 2), dtype=self.weights[i].dtype)
            total = self._sums[i]
            self._sums[i] = of_samples if total is None else total.add_(of_samples)


def has_only_adapters(denoiser: nn.Module) -> bool:
    """Whether all that trains in a denoiser belongs to adapted linear layers that compute as one operation."""
    known = {id(weight) for matrices in _adapted(denoiser).values() for weight in matrices}
    return bool(known) and known == {id(weight) for weight in denoiser.parameters() if weight.requires_grad}


def _adapted(denoiser: nn.Module) -> dict[FusedLoraLinear, tuple[nn.Parameter, nn.Parameter]]:
    layers = [module for module in denoiser.modules() if isinstance(module, FusedLoraLinear)]
    return {layer: layer.matrices(layer.fused_adapter) for layer in layers if layer.fused_adapter is not None}


def _set_gradients(on: bool) -> None:
    torch.set_grad_enabled(on)
