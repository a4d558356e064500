"""Arguments of scripts: private names of argparse (Python 3.10 to 3.13) and of transformers 5.17 to 5.24."""

from argparse import Action, ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TextClassificationPipeline, Trainer, TrainingArguments


def actions_of(parser: ArgumentParser) -> dict[str, Action]:
    """The flags of a parser by the name under which each puts its value; what is changed in them counts."""
    return {action.dest: action for action in parser._actions}


def set_gpus(args: TrainingArguments, count: int) -> None:
    """Says how many GPUs of this process transformers wraps in DataParallel; `n_gpu` has no setter."""
    args._n_gpu = count


def count_tokens(trainer: Trainer, batch: Mapping[str, Any]) -> None:
    """Adds a batch's tokens to the trainer's state, if `include_num_input_tokens_seen` asks for it. Collective."""
    trainer._track_num_input_tokens(batch)


def wrap_parameters(kind: type[TextClassificationPipeline], wrap: Callable[[Any], Any]) -> None:
    """Wraps the method by which a pipeline sorts its keyword arguments into the parameters of its stages."""
    kind._sanitize_parameters = wrap(kind._sanitize_parameters)  # type: ignore[method-assign]
