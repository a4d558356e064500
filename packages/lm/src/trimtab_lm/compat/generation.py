"""Generation of transformers 5.17 to 5.24, and of PEFT 0.18 to 0.21 on top of it."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, cast

from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trimtab_lm.interface import Model, base_of, learns_prompt

OLD = "past_key_values"
"""The name of the cache before transformers 5.24, and still in PEFT 0.21 and in remote code."""


def cache_argument(function: Callable[..., Any]) -> str | None:
    """Returns the name of a function's argument for the cache of keys and values; None if it has none.

    Args:
        function: the forward of a model, or `prepare_inputs_for_generation`. If a release renames the
            argument, its annotation (transformers' `Cache`) still identifies it. XLM's `cache` is another kind of dict.
    """
    types = {name: str(parameter.annotation) for name, parameter in inspect.signature(function).parameters.items()}
    names = ("cache", OLD, *(name for name in types if "Cache" in types[name]))
    return next((name for name in names if name in types and "dict" not in types[name]), None)


CACHE = cache_argument(GenerationMixin.prepare_inputs_for_generation) or OLD
"""The name of the cache among the arguments of `generate` and its steps, and in the output of a model."""


def has_selectable_cache(model: Model) -> bool:
    """Whether the forward takes a cache whose rows can be repeated and selected.

    Layers of linear attention keep a state that cannot.
    """
    base = base_of(model)
    has_arguments = cache_argument(base.forward) and "logits_to_keep" in inspect.signature(base.forward).parameters
    if base.config.is_encoder_decoder or not has_arguments:
        return False
    cache = DynamicCache(config=base.config)
    return bool(cache.layers) and can_select(cache)


def can_select(cache: DynamicCache) -> bool:
    """Whether the rows of every layer can be repeated and selected."""
    return set(map(type, cache.layers)) <= {DynamicLayer, DynamicSlidingWindowLayer}


def decoding(model: Any) -> AbstractContextManager[None]:
    """Around decoding steps: transformers chooses what suits forward passes of few tokens."""
    return cast(AbstractContextManager[None], model._optimize_model_for_decode())


def next_inputs(model: Any, outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `prepare_inputs_for_generation` for the next step: cache, longer masks and positions."""
    is_encoder_decoder = model.config.is_encoder_decoder
    updated = model._update_model_kwargs_for_generation(outputs, inputs, is_encoder_decoder=is_encoder_decoder)
    return cast(dict[str, Any], updated)


def cache_names(model: Model) -> tuple[str, str]:
    """The names under which `prepare_inputs_for_generation` takes the cache, and under which the forward reads it."""
    base: Any = base_of(model)
    return cache_argument(base.prepare_inputs_for_generation) or CACHE, cache_argument(base.forward) or CACHE


@contextmanager
def cache_found(model: Model, takes: str, reads: str) -> Iterator[None]:
    """Makes every generation step inside the block find its cache, under whatever name it looks for it.

    `generate` of transformers 5.24 calls the cache `cache`; remote code and PEFT's learned prompts know
    `past_key_values` alone. Without its cache a step would read the last token only, and sample wrong tokens.

    Args:
        takes, reads: see `cache_names`.
    """
    is_peft = learns_prompt(model)
    if {takes, reads} == {CACHE} and (CACHE == OLD or not is_peft):
        yield
        return
    owner: Any = model if is_peft else base_of(model)
    prepare: Any = owner.prepare_inputs_for_generation
    prepare_base: Any = getattr(model, PEFT_BASE, None)

    def prepare_for_peft(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare_base(*args, **kwargs), OLD: kwargs.get(takes)}

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` asks the signature what it may pass
    def prepare_for_forward(*args: Any, **kwargs: Any) -> dict[str, Any]:
        cache = kwargs.pop(CACHE, None)
        with replaced(model, PEFT_BASE, prepare_for_peft) if is_peft else nullcontext():
            inputs = prepare(*args, **kwargs, **({} if cache is None else {takes: cache}))
        held = [inputs.pop(name) for name in {CACHE, OLD, takes, reads} if name in inputs]
        # In the first step of prefix tuning, PEFT replaces the empty cache by one with the prefix.
        if held:
            inputs[reads] = next((found for found in held if found is not cache), cache)
        return inputs

    with replaced(owner, "prepare_inputs_for_generation", prepare_for_forward):
        yield


PEFT_BASE = "base_model_prepare_inputs_for_generation"
"""The attribute by which a PeftModel calls the method of the model inside."""


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Gives an object another attribute inside the block."""
    held = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if held is not None:
            setattr(owner, name, held)
