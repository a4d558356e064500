"""What the heads of a language model read: the LM head, and the decoder's last hidden state for every other head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def lm_head_of(model: Any) -> Any:
    """The module that turns hidden states into logits; None for a model without one.

    It is `model.get_output_embeddings()`, except where that is an embedding table (FSMT): then it is the linear layer
    of the table's shape.

    Raises:
        ValueError: the output embeddings are a table, and not exactly one linear layer has its shape.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Embedding):
        return head
    shape = head.weight.shape
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.shape == shape]
    if len(layers) != 1:
        raise ValueError(
            f"The output embeddings of {type(model).__name__} are a table of shape {list(shape)}, and {len(layers)} of "
            "its linear layers have that shape, so its LM head is unknown. Return the linear layer that gives the "
            "logits from get_output_embeddings()."
        )
    return layers[0]


def last_hidden_state(model: Any, output: Any) -> Tensor:
    """The decoder's last hidden state [B, T, hidden], of a forward pass with `output_hidden_states=True`.

    This is what a value head and a reward head read. The LM head may read something else: T5 scales the state by
    d_model^-0.5 before a tied LM head, and BERT transforms it.

    Raises:
        RuntimeError: the model returned no hidden states.
    """
    states = output.decoder_hidden_states if model.config.is_encoder_decoder else output.hidden_states
    if states is None:
        raise RuntimeError(
            f"{type(model).__name__} returned no hidden states, although output_hidden_states=True was passed, so a "
            "value head or reward head has nothing to read. Use a model that returns them."
        )
    return states[-1]


@contextmanager
def without_logits(model: Any) -> Iterator[None]:
    """Inside the block the LM head reads no positions, so the model's logits are [B, 0, V] and cost nothing.

    A model without LM head runs as it is.
    """
    head = lm_head_of(model)
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, args: (args[0][:, :0], *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def state_width(model: Any) -> int:
    """The width of `last_hidden_state`."""
    config = model.config.get_text_config(decoder=True)
    # OPT projects its states to another width; BLT's configuration names none.
    widths = (getattr(config, name, None) for name in ("word_embed_proj_dim", "hidden_size"))
    return next((width for width in widths if width), None) or lm_head_of(model).in_features


def linear_in_own_dtype(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """`layer(hidden)` in the layer's dtype and on its device, under autocast too."""
    with torch.autocast(layer.weight.device.type, enabled=False):
        return layer(hidden.to(layer.weight))
