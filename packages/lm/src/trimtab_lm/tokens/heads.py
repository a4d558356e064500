"""What the heads of a language model read: the LM head's input, and the decoder's last hidden state for other heads."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from trimtab_lm.models.interface import Forward, Model, decoder_config


def lm_head_of(model: Model) -> nn.Module | None:
    """Returns the module that turns hidden states into logits; None for a model without one.

    It is `model.get_output_embeddings()`. Where that is an embedding table (FSMT), it is the linear layer of the
    table's shape.

    Raises:
        ValueError: the output embeddings are a table, and none or several of the linear layers have its shape.
    """
    head: nn.Module | None = model.get_output_embeddings()
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


def is_linear(head: nn.Module, forward: Forward) -> bool:
    """Whether `forward`, the head's own, is its weight times its input, plus a bias, and nothing else."""
    # A subclass of Linear or Parameter (quantized, LoRA) computes something else, and so does accelerate's hook, which
    # loads offloaded weights. The class that FSDP derives from Linear has the forward of Linear.
    is_plain = inspect.ismethod(forward) and forward.__func__ is nn.Linear.forward
    return is_plain and type(head.weight) is nn.Parameter


def last_hidden_state(model: Model, output: ModelOutput) -> Tensor:
    """Returns the decoder's last hidden state [B, T, hidden], which value heads and reward heads read.

    The LM head may read something else: T5 scales the state by d_model^-0.5 before a tied LM head, and BERT transforms
    it.

    Args:
        model: the model that gave the output.
        output: of a forward pass with `output_hidden_states=True`.

    Raises:
        RuntimeError: the model returned no hidden states.
    """
    states = output.get("decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states")
    if states is None:
        raise RuntimeError(
            f"{type(model).__name__} returned no hidden states, although output_hidden_states=True was passed, so a "
            "value head or reward head has nothing to read. Use a model that returns them."
        )
    return states[-1]


@contextmanager
def forward_replaced(
    module: nn.Module, forward: Callable[[Forward, Tensor], tuple[Tensor, ...]]
) -> Iterator[list[Tensor]]:
    """Replaces a module's forward inside the block by one that returns further tensors beside the module's output.

    The further tensors pass through the module's forward hooks. Those of FSDP and DeepSpeed look at all outputs of a
    call, and so see the gradients that come back through any of them.

    Args:
        module: takes one tensor and returns one, such as an LM head.
        forward: takes the module's own forward and its input; returns the module's output, and the further tensors.

    Yields:
        The further tensors of the calls inside the block.
    """
    further: list[Tensor] = []
    run = module.forward
    is_own = "forward" in vars(module)  # of the instance, as accelerate's hooks set it

    def keep(_: nn.Module, __: object, outputs: tuple[Tensor, ...]) -> Tensor:
        further.extend(outputs[1:])
        return outputs[0]

    handle = module.register_forward_hook(keep)  # after those of FSDP and DeepSpeed
    module.forward = partial(forward, run)
    try:
        yield further
    finally:
        handle.remove()
        del module.forward
        if is_own:
            module.forward = run


@contextmanager
def without_logits(model: Model) -> Iterator[None]:
    """Makes the LM head read no positions inside the block, so that the model's logits are [B, 0, V] and cost nothing.

    A model without an LM head runs unchanged.
    """
    head = lm_head_of(model)
    with nullcontext() if head is None else forward_replaced(head, lambda run, states: (run(states[:, :0]),)):
        yield


def state_width(model: Model) -> int:
    """Returns the width of `last_hidden_state`."""
    config = decoder_config(model)
    # OPT projects its states to another width. BLT's configuration names no width.
    widths = (getattr(config, name, None) for name in ("word_embed_proj_dim", "hidden_size"))
    return next((width for width in widths if width), None) or cast(nn.Linear, lm_head_of(model)).in_features


def linear_in_own_dtype(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns `layer(hidden)`, computed in the layer's dtype and on its device, under autocast too.

    Args:
        layer: [out, in].
        hidden: [..., in], of any dtype and device.
    """
    with torch.autocast(layer.weight.device.type, enabled=False):
        return layer(hidden.to(layer.weight))
