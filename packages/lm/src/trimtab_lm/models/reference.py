"""The reference policy: a frozen copy, a copy that shares its first layers, or the policy with its adapters off."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab_lm.models.adapters import adapter_on, adapters_off
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.tokens.heads import lm_head_of

LAYER_PATTERNS = (
    "transformer.h.{layer}",
    "gpt_neox.layers.{layer}",
    "decoder.block.{layer}",
    "decoder.layers.{layer}",
    "language_model.layers.{layer}",
    "model.layers.{layer}",
)
"""Where well-known models keep their decoder layers."""

Model = TypeVar("Model", PreTrainedModel, PreTrainedModelWrapper)


def create_reference_model(model: Model, num_shared_layers: int | None = None, pattern: str | None = None) -> Model:
    """A frozen copy of `model` in eval mode, of the same type.

    num_shared_layers: k, from 0 to the number of decoder layers. The embeddings, the encoder of an encoder-decoder
        model and the first k layers are then not copied: both models hold the same tensors, kept frozen in both. A
        head tied to the embeddings is shared, and so frozen, with them. None: everything is copied and `model` is left
        as it is.
    pattern: where the layers are, such as "transformer.h.{layer}"; default: known places, else the decoder's longest
        ModuleList.

    Raises ValueError for a PEFT model, a k out of range and layers that cannot be found.
    """
    base = _unwrap(model)
    if isinstance(base, PeftModel):
        raise ValueError(
            "A PEFT model needs no copy: with its adapters off it is its own reference. Pass no reference model, and "
            "the trainer switches the adapters off; or use Reference.of(model)."
        )
    shared = {} if num_shared_layers is None else _tensors_below(base, num_shared_layers, pattern)
    for tensor in shared.values():
        tensor.grad = None  # an optimizer would go on applying what is left there
    reference = copy.deepcopy(model, dict(shared))
    reference.requires_grad_(False)  # the shared tensors with it, which the policy holds too
    return reference.eval()


class Reference:
    """The fixed policy that KL penalties and preference losses measure against; build it with `of`.

    model: the transformers model (or the PEFT policy) to run inside `active`; prepare it for a device or a strategy by
    assigning the prepared model. is_adapter_off: whether it is the policy itself, without its adapters. adapter: the
    adapter that makes the policy its own reference.
    """

    def __init__(self, model: Any, *, is_adapter_off: bool, adapter: str | None = None):
        self.model = model
        self.is_adapter_off = is_adapter_off
        self.adapter = adapter

    @classmethod
    def of_adapter(cls, model: Any, adapter: str) -> "Reference":
        """The reference that a PEFT policy is with another of its adapters, which must not train.

        Raises ValueError for a model without an adapter of that name.
        """
        known = list(model.peft_config) if isinstance(model, PeftModel) else []
        if adapter not in known:
            raise ValueError(
                f"ref_adapter_name={adapter!r}, but the model has the adapters {known}. Load it into the model first: "
                f"model.load_adapter(folder, adapter_name={adapter!r})."
            )
        return cls(model, is_adapter_off=False, adapter=adapter)

    @property
    def is_policy(self) -> bool:
        """Whether the reference is the policy itself, with its adapters off or others in their place."""
        return self.is_adapter_off or self.adapter is not None

    @classmethod
    def of(cls, model: Any, ref_model: Any = None, num_shared_layers: int | None = None) -> "Reference":
        """The reference of a policy, as it is now.

        model: the policy, a PreTrainedModelWrapper, PreTrainedModel or PeftModel.
        ref_model: the reference where the caller has one, of the same kinds. It is put into eval mode and its
            parameters stop requiring gradients, for good.
        num_shared_layers: layers that a copied reference shares, see `create_reference_model`.

        Without ref_model a PEFT policy is its own reference, adapters off: the base model under it, which is what the
        policy started from unless its adapter was trained before or its initialisation (PiSSA, OLoRA) changed the base.
        Any other policy is copied.
        """
        policy, given = _unwrap(model), _unwrap(ref_model)
        is_adapter_off = given is None and isinstance(policy, PeftModel)
        if num_shared_layers is not None and (given is not None or is_adapter_off):
            reason = "the adapters are switched off instead" if is_adapter_off else "ref_model was given"
            warnings.warn(f"num_shared_layers={num_shared_layers} has no effect: {reason}.", stacklevel=2)
        if is_adapter_off:
            _warn_of_trainable_base(policy)
            return cls(policy, is_adapter_off=True)
        if given is None:
            given = create_reference_model(policy, num_shared_layers)
        elif not set(policy.modules()).isdisjoint(given.modules()):
            raise ValueError(
                "ref_model is the policy itself, or the model inside a PEFT policy, which carries its adapters: it "
                "would move with the policy. Pass ref_model=None, or load the reference a second time."
            )
        given.requires_grad_(False)
        return cls(given.eval(), is_adapter_off=False)

    @contextmanager
    def active(self) -> Iterator[Any]:
        """The reference, in eval mode and without gradients, inside the block; the policy is as before afterwards."""
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            with torch.no_grad(), self._adapters():
                yield self.model
        finally:
            for module in training:
                module.training = True

    def _adapters(self) -> AbstractContextManager[None]:
        if self.adapter is not None:
            return adapter_on(self.model, self.adapter)
        return adapters_off(self.model) if self.is_adapter_off else nullcontext()


def _unwrap(model: Any) -> Any:
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def _warn_of_trainable_base(policy: PeftModel) -> None:
    with adapters_off(policy):  # PEFT freezes the adapters meanwhile, so what still trains is the base
        names = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    # Adapters that are no layers (prompt tuning) are not frozen, but they are not in the base model either.
    names = [name for name in names if not name.startswith("prompt_encoder.")]
    if names:
        warnings.warn(
            f"{len(names)} base weights of the PEFT policy train ({', '.join(names[:3])}, ...), so with its adapters "
            "off it is not the model it started from, and the KL to it means nothing. Freeze them (bias='none' in the "
            "PEFT config), or pass a ref_model.",
            stacklevel=3,
        )


def _tensors_below(model: PreTrainedModel, num_layers: int, pattern: str | None) -> dict[int, Tensor]:
    """Parameters and buffers, by id, of all that runs before decoder layer `num_layers`."""
    layers = _find_layers(model, pattern)
    if not 0 <= num_layers <= len(layers):
        raise ValueError(
            f"num_shared_layers={num_layers}, but {type(model).__name__} has {len(layers)} decoder layers; give 0 to "
            f"{len(layers)}, or None for a full copy."
        )
    modules: list[nn.Module] = list(layers[:num_layers])
    if model.config.is_encoder_decoder:
        modules.append(model.get_encoder())
    apart = {*layers.modules(), lm_head_of(model)}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        # "emb" finds norms of embeddings and rotary tables; project_in is OPT's step from embedding to hidden size.
        if module not in apart and (isinstance(module, nn.Embedding) or "emb" in leaf or leaf == "project_in"):
            modules.append(module)
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return {id(tensor): tensor for tensor in tensors}


def _find_layers(model: PreTrainedModel, pattern: str | None) -> nn.ModuleList:
    if pattern is not None and not pattern.endswith(".{layer}"):
        raise ValueError(f"pattern={pattern!r} does not end in '.{{layer}}'; write it like 'transformer.h.{{layer}}'.")
    lists = {f".{name}": module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for candidate in LAYER_PATTERNS if pattern is None else (pattern,):
        path = candidate.removesuffix(".{layer}").removeprefix("pretrained_model.")
        found = [module for name, module in lists.items() if name.endswith(f".{path}")]
        if len(found) == 1:
            return found[0]
    outermost = list(_outermost_lists(model.get_decoder())) if pattern is None else []
    if not outermost:
        looked_for = pattern or "the decoder's layers"
        raise ValueError(
            f"{looked_for} is not one ModuleList of {type(model).__name__}, which has "
            f"{sorted(name[1:] for name in lists) or 'none'}. Give pattern, like 'transformer.h.{{layer}}'."
        )
    return max(outermost, key=len)


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Module lists that are in no other: a layer's experts are no layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)
