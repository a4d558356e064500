"""A policy's weights for an engine: with a checkpoint's names and merged adapters."""

from collections.abc import Iterator

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from trimtab_lm.interface import Model, base_of


@torch.no_grad()
def checkpoint_weights(model: Model, *, repeat_ties: bool = False) -> dict[str, Tensor]:
    """The policy's weights under the names that `save_pretrained` gives them, adapters merged in.

    Merged weights are copies, all others are the policy's own tensors. The policy does not change, bit by bit.

    Args:
        model: the policy, not wrapped, with whole weights (`trimtab_common.sharding.whole_weights`).
        repeat_ties: give weights that the model ties under each of their names; a checkpoint has them once.

    Raises:
        ValueError: an adapter changes one of two weights that the model ties.
    """
    base = base_of(model)
    weights = dict(merged_weights(base))
    for copied, original in base.all_tied_weights_keys.items():
        twin = weights.get(copied) if repeat_ties else weights.pop(copied, None)
        if twin is not None and not torch.equal(twin, weights[original]):
            raise ValueError(
                f"The model ties {copied} to {original}, but the adapter changes one of them alone: an engine ties "
                "them again and would sample from another policy. Take it out of the adapter's target_modules and "
                "modules_to_save, or untie them (tie_word_embeddings=False)."
            )
    return dict(revert_weight_conversion(base, weights))


def merged_weights(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Names, free of PEFT's own parts, and weights of all parameters below a module, adapters merged in."""
    if isinstance(module, ModulesToSaveWrapper):
        copies = module.modules_to_save
        module = module.original_module if module.disable_adapters else copies[module.active_adapters[0]]
    elif isinstance(module, AuxiliaryTrainingWrapper):
        module = module.token_adapter  # trainable tokens: an adapter layer in turn
    if isinstance(module, BaseTunerLayer):
        yield from ((prefix + name, weight) for name, weight in merged_layer(module).items())
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter.detach()
    for name, child in module.named_children():
        yield from merged_weights(child, f"{prefix}{name}.")


def merged_layer(layer: BaseTunerLayer) -> dict[str, Tensor]:
    """Copies of the weights of an adapted layer with its adapters in them, once."""
    inner = layer.get_base_layer()

    def copies() -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}

    original = copies()
    if layer.merged or layer.disable_adapters:
        return original
    layer.merge()
    merged = copies()
    layer.unmerge()
    for name, parameter in inner.named_parameters():
        parameter.data.copy_(original[name])  # unmerging subtracts, which rounds
    return merged
