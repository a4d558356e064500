"""Replaced methods of transformers.Trainer with the parameters that they had in 2024."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import Trainer

Method = Callable[..., Any]


def _training_step(trainer: Any, method: Method, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
    trainer.items_of_step = num_items_in_batch
    try:
        return method(model, inputs)
    finally:
        trainer.items_of_step = None


def _compute_loss(
    trainer: Any,
    method: Method,
    model: nn.Module,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """The method returns a mean over the micro-batch; training takes its share of the optimizer step."""
    if num_items_in_batch is None or not model.training:
        return method(model, inputs, return_outputs)
    part, whole = trainer.part_of_step(inputs, num_items_in_batch)  # first: the method may take columns out
    result = method(model, inputs, return_outputs)
    return (result[0] * part / whole, *result[1:]) if return_outputs else result * part / whole


def _get_batch_samples(trainer: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
    """The method samples from a model; Trainer has a hook with this name, for the batches of an optimizer step."""
    if kwargs or isinstance(args[0], nn.Module):
        return method(*args, **kwargs)
    inherited = (vars(kind).get("get_batch_samples") for kind in type(trainer).__mro__)
    return next(hook for hook in inherited if hook is not None and not hasattr(hook, "of_2024"))(trainer, *args)


FITTED: dict[str, tuple[int, Callable[..., Any]]] = {
    "compute_loss": (3, _compute_loss),
    "log": (1, lambda trainer, method, logs, start_time=None: method(logs)),
    "training_step": (2, _training_step),
    "get_batch_samples": (2, _get_batch_samples),
}
"""The hooks that have more parameters now: how many they had in 2024, and how a method with so few is called."""


class HooksOf2024(Trainer):
    """Calls a replaced hook with the arguments that it has parameters for."""

    items_of_step: Any = None
    """What the loss of the optimizer step divides by, where a replaced `training_step` does not hand it on."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, (count, _) in FITTED.items():
            method = getattr(cls, name)  # its own, or that of a class beside the trainer
            if (fitted := _fitted(name, method, parameters=count + 1)) is not method:
                setattr(cls, name, fitted)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FITTED and callable(method := value):
            options = {"parameters": FITTED[name][0], "shown": method}
            fitted = _fitted(name, lambda _, *args, **kwargs: method(*args, **kwargs), **options)
            value = method if fitted is method else MethodType(fitted, self)
        super().__setattr__(name, value)


def predictions_of(outputs: Any, *, are_needed: bool) -> tuple[Any, Any]:
    """The `predictions` and `labels` of a batch for `compute_metrics`, from the outputs of `compute_loss`.

    Raises:
        ValueError: a replaced method returns none, and they are needed.
    """
    known = outputs if isinstance(outputs, Mapping) else {}
    if "predictions" not in known and {"rewards_chosen", "rewards_rejected"} <= set(known):  # a reward model's, of 2024
        sides = [known[f"rewards_{side}"].detach() for side in ("chosen", "rejected")]
        scores = torch.stack([side.reshape(len(side), -1).mean(1) for side in sides], dim=1)
        return scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    if are_needed and known.get("predictions") is None:
        raise ValueError(
            "compute_metrics needs the predictions and labels of each batch, and a replaced method gives none. Let "
            "compute_loss return them with return_outputs=True, or replace prediction_step as well."
        )
    return known.get("predictions"), known.get("labels")


def _fitted(name: str, method: Method, *, parameters: int, shown: Method | None = None) -> Method:
    """Returns a method that takes today's arguments; `shown`, or the method itself, if it takes them already.

    Args:
        method: takes the trainer first.
        parameters: how many `shown` had in 2024.
        shown: whose parameters are counted; None: the method's.
    """
    original = method if shown is None else shown
    kinds = [parameter.kind for parameter in inspect.signature(original).parameters.values()]
    takes_all = inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds
    if takes_all or len(kinds) > parameters or hasattr(original, "of_2024"):
        return original

    @wraps(original)
    def fitted(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return FITTED[name][1](trainer, MethodType(method, trainer), *args, **kwargs)

    vars(fitted)["of_2024"] = original
    return fitted
