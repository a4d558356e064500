"""The auxiliary loss of a mixture of experts, which models with `output_router_logits=True` add to their own loss."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trimtab_lm.interface import Model, base_of, decoder_config

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def has_router_loss(model: Model) -> bool:
    """Whether the model's configuration asks for its router's loss, by `output_router_logits=True`."""
    return bool(getattr(decoder_config(model), "output_router_logits", False))


def refuse_router_loss(model: Model, user: str, remedy: str) -> None:
    """Raises an error if a model asks for a router's loss that `user` does not add.

    Raises:
        ValueError: it asks for one.
    """
    if has_router_loss(model):
        raise ValueError(
            f"{type(base_of(model)).__name__} has output_router_logits=True, and {user} does not add its router's "
            f"auxiliary loss. Set model.config.output_router_logits = False{remedy}."
        )


@torch.no_grad()
def router_coefficient(model: Model) -> float:
    """Returns the coefficient of a causal model's router loss: the ratio of its own loss, without labels, to that loss.

    Returns:
        0.0 for a model that does not ask for a router's loss, or has none.

    Raises:
        ValueError: the model is an encoder-decoder, which returns no such loss without labels.
    """
    if not has_router_loss(model):
        return 0.0
    base: Any = base_of(model)
    if base.config.is_encoder_decoder:
        refuse_router_loss(model, "a trainer of an encoder-decoder", "")
    ids = torch.arange(1, 4, device=base.device)[None] % decoder_config(model).vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    output = base(**inputs, num_items_in_batch=1, output_router_logits=True, use_cache=False, return_dict=True)
    aux_loss = output.get("aux_loss")
    return 0.0 if aux_loss is None else float(output.loss / aux_loss)


def classifier_router_loss(
    model: Model, router_logits: Sequence[Tensor] | None, mask: Tensor | None, states: Tensor
) -> Tensor | float:
    """Returns the router's loss of a sequence classifier, times its coefficient; 0.0 if the model does not ask for it.

    In transformers only causal models return it.

    Args:
        router_logits: one for each layer, [B * T, experts]; None for a model without them.
        mask: [B, T], 1 where a token counts; None: everywhere.
        states: that the same forward pass gave to the head.

    Raises:
        ValueError: the model's configuration names no coefficient, or its routers choose experts in an unknown way.
    """
    if not has_router_loss(model):
        return 0.0
    config = decoder_config(model)
    coefficients = [getattr(config, name) for name in COEFFICIENTS if hasattr(config, name)]
    top_k = getattr(config, "num_experts_per_tok", None)
    if not router_logits or not coefficients or top_k is None or config.model_type == "doge":
        refuse_router_loss(model, "a trainer of a sequence classifier", "")
        return 0.0
    experts = router_logits[0].shape[-1]
    loss: Tensor = cast(Any, load_balancing_loss_func)(tuple(router_logits), experts, top_k, mask)
    check_reaches(loss, states, model)
    return coefficients[0] * loss


def check_reaches(loss: Tensor, states: Tensor, model: Model) -> None:
    """Checks that a router's loss has a gradient, which reentrant checkpointing of layers removes.

    Raises:
        ValueError: it has none, although the states do.
    """
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if recomputes and states.requires_grad and not loss.requires_grad:
        raise ValueError(
            "Activation checkpointing with use_reentrant=True gives the router's loss (output_router_logits=True) no "
            "gradient. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
