"""Behaviour of transformers 4 that scripts of 2024 expect and transformers 5 has changed.

`restore` changes attributes of transformers. Only `trimtab_lm.legacy.trl` calls it.
"""

import functools
import sys
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, CLIPModel, PreTrainedModel, TextClassificationPipeline

from trimtab_lm.compat.arguments import wrap_parameters
from trimtab_lm.legacy.arguments import takes_arguments_of_2024
from trimtab_lm.legacy.scripts import ParserOfSharedFields
from trimtab_lm.models.loading import with_quantization_config


@dataclass
@takes_arguments_of_2024()
class TrainingArguments(transformers.TrainingArguments):
    """transformers.TrainingArguments, which also accepts the arguments that transformers 5 has dropped."""


def restore() -> None:
    """Lets scripts write transformers 4.

    - `TrainingArguments` accepts the dropped arguments, with a FutureWarning.
    - `HfArgumentParser` takes a config and a ModelConfig that have a field in common.
    - `from_pretrained` of models and of their Auto classes takes `use_auth_token` as `token`, and `load_in_8bit` and
      `load_in_4bit` as a quantization_config.
    - A text classifier's `return_all_scores=True` returns the scores of all labels, in the order of the labels.
    - `get_image_features` and `get_text_features` of a CLIPModel return a tensor; its attribute `pooler_output` is
      the tensor itself, for code of transformers 5.
    """
    # transformers' first import may replace the module, so that `transformers` above is another one.
    replaced = {"TrainingArguments": TrainingArguments, "HfArgumentParser": ParserOfSharedFields}
    vars(sys.modules["transformers"]).update(replaced)
    auto_model: Any = AutoModelForCausalLM.__mro__[1]
    kinds: list[Any] = [PreTrainedModel, *auto_model.__subclasses__()]  # each has a copy of the method
    for kind in kinds:
        kind.from_pretrained = classmethod(_with_old_options(kind.from_pretrained.__func__))
    clip = CLIPModel
    wrap_parameters(TextClassificationPipeline, _with_all_scores)
    clip.get_image_features = _as_tensor(clip.get_image_features)  # type: ignore[method-assign]
    clip.get_text_features = _as_tensor(clip.get_text_features)  # type: ignore[method-assign]


def _with_old_options(from_pretrained: Any) -> Any:
    @functools.wraps(from_pretrained)
    def wrapped(cls: type, *args: object, **kwargs: object) -> object:
        if "use_auth_token" in kwargs:
            kwargs["token"] = kwargs.pop("use_auth_token")
        return from_pretrained(cls, *args, **with_quantization_config(kwargs))

    return wrapped


def _with_all_scores(sanitize: Any) -> Any:
    @functools.wraps(sanitize)
    def wrapped(self: object, *, return_all_scores: bool = False, **kwargs: object) -> object:
        if return_all_scores:
            kwargs["top_k"] = None
        return sanitize(self, **kwargs)

    return wrapped


def _as_tensor(features: Any) -> Any:
    @functools.wraps(features)
    def wrapped(self: object, *args: object, **kwargs: object) -> Tensor:
        tensor = features(self, *args, **kwargs).pooler_output
        tensor.pooler_output = tensor
        return tensor

    return wrapped
