"""The reference policy: a frozen copy, a copy that shares the first layers, or the policy with its adapters off."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TypeVar, cast

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab_common.sharding import prepared_for_inference, whole_weights
from trimtab_lm.interface import Model, base_of
from trimtab_lm.models.adapters import adapter_on, adapters_off
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.logprobs import lm_head_of

LAYER_PATTERNS = (
    "transformer.h.{layer}",
    "gpt_neox.layers.{layer}",
    "decoder.block.{layer}",
    "decoder.layers.{layer}",
    "language_model.layers.{layer}",
    "model.layers.{layer}",
)
"""The places where well-known models keep their decoder layers."""

Policy = TypeVar("Policy", PreTrainedModel, PeftModel, PreTrainedModelWrapper)


def create_reference_model(model: Policy, num_shared_layers: int | None = None, pattern: str | None = None) -> Policy:
    """Returns a frozen copy of a model, of the same type and in eval mode.

    Args:
        model: with or without a value head. A PEFT model is copied with its adapters as they are now. Its base model
            alone is the reference of a trainer that gets none, and takes no memory.
        num_shared_layers: k, from 0 to the number of decoder layers. Both models then hold the same tensors for the
            embeddings, the encoder if there is one, and the first k layers, and these are frozen in both. An LM head
            that is tied to the embeddings is shared and frozen with them. None: everything is copied, and `model` is
            not changed.
        pattern: the place of the layers, such as "transformer.h.{layer}". Default: known places, else the longest
            ModuleList of the decoder.

    Raises:
        ValueError: k is out of range, or the layers cannot be found.
    """
    base = base_of(_without_value_head(model))
    shared = {} if num_shared_layers is None else _tensors_below(base, num_shared_layers, pattern)
    for tensor in shared.values():
        tensor.grad = None  # clear the gradient, or the optimizer would apply it
    with whole_weights(base):  # DeepSpeed divides weights as they are loaded
        reference = copy.deepcopy(model, dict(shared))
    reference.requires_grad_(False)  # the policy holds the shared tensors too, so this freezes them there
    return reference.eval()


class Reference:
    """The fixed policy of KL penalties and preference losses; build it with `of` or `of_adapter`.

    Args:
        model: the transformers model, or the PEFT policy, that runs inside `active`.
        is_adapter_off: whether the reference is the policy itself without its adapters.
        adapter: the adapter with which the policy is its own reference, if there is one.

    Attributes:
        is_policy: whether the reference is the policy itself, with its adapters off or with another adapter.
    """

    def __init__(self, model: Model, *, is_adapter_off: bool, adapter: str | None = None):
        self.model, self.is_prepared = model, False
        self.is_adapter_off, self.adapter = is_adapter_off, adapter
        self.is_policy = is_adapter_off or adapter is not None

    @classmethod
    def of_adapter(cls, model: Model, adapter: str) -> "Reference":
        """Returns the reference that a PEFT policy is with another of its adapters.

        Args:
            model: the policy.
            adapter: the name of the adapter, which must not train.

        Raises:
            ValueError: the model has no adapter of that name.
        """
        known = list(model.peft_config) if isinstance(model, PeftModel) else []
        if adapter not in known:
            raise ValueError(
                f"ref_adapter_name={adapter!r}, but the model has the adapters {known}. Load it into the model first: "
                f"model.load_adapter(folder, adapter_name={adapter!r})."
            )
        return cls(model, is_adapter_off=False, adapter=adapter)

    @classmethod
    def of(
        cls,
        model: Model | PreTrainedModelWrapper,
        ref_model: Model | PreTrainedModelWrapper | None = None,
        num_shared_layers: int | None = None,
    ) -> "Reference":
        """Returns the reference of a policy with its present weights.

        Without ref_model a PEFT policy is its own reference with its adapters off. That is the base model, from which
        the policy started unless its adapter was trained before or its initialisation (PiSSA, OLoRA) changed the base.
        Any other policy is copied.

        Args:
            model: the policy, with or without a value head.
            ref_model: the reference, where the caller has one. It is put into eval mode and frozen for good.
            num_shared_layers: the layers that a copy shares, see `create_reference_model`.

        Raises:
            ValueError: ref_model is the policy, or `create_reference_model` cannot copy it.
        """
        policy = _without_value_head(model)
        is_adapter_off = ref_model is None and isinstance(policy, PeftModel)
        if num_shared_layers is not None and (ref_model is not None or is_adapter_off):
            reason = "the adapters are switched off instead" if is_adapter_off else "ref_model was given"
            warnings.warn(f"num_shared_layers={num_shared_layers} has no effect: {reason}.", stacklevel=2)
        if ref_model is None and isinstance(policy, PeftModel):
            _warn_of_trainable_base(policy)
            return cls(policy, is_adapter_off=True)
        if ref_model is None:
            return cls(create_reference_model(cast(PreTrainedModel, policy), num_shared_layers), is_adapter_off=False)
        reference = _without_value_head(ref_model)
        if not set(policy.modules()).isdisjoint(reference.modules()):
            raise ValueError(
                "ref_model is the policy itself, or the model inside a PEFT policy, which carries its adapters: it "
                "would move with the policy. Pass ref_model=None, or load the reference a second time."
            )
        reference.requires_grad_(False)
        return cls(reference.eval(), is_adapter_off=False)

    def prepare(self, accelerator: Accelerator) -> None:
        """Puts a reference that is a model of its own where it runs, see `prepared_for_inference`; once is enough."""
        if not (self.is_policy or self.is_prepared):
            self.model, self.is_prepared = prepared_for_inference(self.model, accelerator), True

    @contextmanager
    def active(self) -> Iterator[Model]:
        """Yields the reference in eval mode and without gradients; restores the policy afterwards."""
        with torch.no_grad(), without_dropout(self.model):
            if self.adapter is not None:
                adapters: AbstractContextManager[None] = adapter_on(cast(PeftModel, self.model), self.adapter)
            else:
                adapters = adapters_off(cast(PeftModel, self.model)) if self.is_adapter_off else nullcontext()
            with adapters:
                yield self.model


def _without_value_head(model: Model | PreTrainedModelWrapper) -> Model:
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def _warn_of_trainable_base(policy: PeftModel) -> None:
    """Warns where weights of the base model train, so that the policy without adapters moves too."""
    with adapters_off(policy), policy.disable_adapter():  # which freezes the adapters: what still trains is the base
        names = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    # PEFT does not freeze adapters that are no layers (prompt tuning), and they are not in the base model.
    names = [name for name in names if not name.startswith("prompt_encoder.")]
    if names:
        warnings.warn(
            f"{len(names)} base weights of the PEFT policy train ({', '.join(names[:3])}, ...), so with its adapters "
            "off it is not the model it started from, and the KL to it means nothing. Freeze them (bias='none' in the "
            "PEFT config), or pass a ref_model.",
            stacklevel=3,
        )


def _tensors_below(model: PreTrainedModel, num_layers: int, pattern: str | None) -> dict[int, Tensor]:
    """Returns the parameters and buffers, by id, of everything that runs before decoder layer `num_layers`."""
    layers = _find_layers(model, pattern)
    if not 0 <= num_layers <= len(layers):
        raise ValueError(
            f"num_shared_layers={num_layers}, but {type(model).__name__} has {len(layers)} decoder layers; give 0 to "
            f"{len(layers)}, or None for a full copy."
        )
    modules: list[nn.Module] = list(layers[:num_layers])
    if model.config.is_encoder_decoder:
        modules.append(model.get_encoder())
    excluded = {*layers.modules(), lm_head_of(model)}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        # "emb" finds norms of embeddings and rotary tables; project_in is OPT's step from embedding to hidden size.
        if module not in excluded and (isinstance(module, nn.Embedding) or "emb" in leaf or leaf == "project_in"):
            modules.append(module)
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return {id(tensor): tensor for tensor in tensors}


def _find_layers(model: PreTrainedModel, pattern: str | None) -> nn.ModuleList:
    """Returns the decoder's layers: see `create_reference_model`."""
    if pattern is not None and not pattern.endswith(".{layer}"):
        raise ValueError(f"pattern={pattern!r} does not end in '.{{layer}}'; write it like 'transformer.h.{{layer}}'.")
    lists = {f".{name}": module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for candidate in LAYER_PATTERNS if pattern is None else (pattern,):
        path = candidate.removesuffix(".{layer}").removeprefix("pretrained_model.")
        matches = [module for name, module in lists.items() if name.endswith(f".{path}")]
        if len(matches) == 1:
            return matches[0]
    outermost = list(_outermost_lists(model.get_decoder())) if pattern is None else []
    if not outermost:
        raise ValueError(
            f"{pattern or 'The place of the decoder layers'} is not one ModuleList of {type(model).__name__}. It has "
            f"{sorted(name[1:] for name in lists) or 'none'}. Pass pattern, like 'transformer.h.{{layer}}'."
        )
    return max(outermost, key=len)


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields the module lists that are in no other; those inside a layer hold its experts."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)
