"""`trimtab merge ADAPTER FOLDER`: an adapter and its base model as one model."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from trimtab_common.compat.noise import expecting_new_head
from trimtab_lm.models.loading import labels_of_head, load_model

from .places import refuse_missing_path
from .subcommands import errors_in_one_line, keep_pipes_quiet

PROGRAM = "trimtab merge"
ABOUT = """Adds an adapter's weights to those of its base model, and saves the whole model with the tokenizer.

  trimtab merge runs/lora runs/whole"""
KINDS: dict[str | None, Any] = {
    "SEQ_2_SEQ_LM": AutoModelForSeq2SeqLM,
    "SEQ_CLS": AutoModelForSequenceClassification,
}


def main(argv: Sequence[str]) -> int:
    """Merge the adapter that the words name; the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="hub id or folder of an adapter")
    parser.add_argument("folder", metavar="FOLDER", help="where the model goes; a folder that is new or empty")
    flags = parser.parse_args(argv)
    keep_pipes_quiet()
    with errors_in_one_line("merge"):
        merge(flags.adapter, Path(flags.folder))
    print(f"The model is in {flags.folder}.")
    return 0


def merge(adapter: str, folder: Path) -> None:
    """Writes the model that an adapter and its base model make together, and the adapter's or the base's tokenizer.

    Args:
        adapter: hub id or folder.
        folder: new or empty.

    Raises:
        ValueError: the folder has files, or `adapter` is no adapter, or one of virtual tokens, which do not merge.
    """
    refuse_missing_path(adapter)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has files. Name a folder that is new or empty.")
    config = PeftConfig.from_pretrained(adapter)
    if config.is_prompt_learning:
        raise ValueError(
            f"{adapter} learns virtual tokens ({config.peft_type.value}), which cannot be added to weights. Load it "
            "with PEFT, such as AutoPeftModelForCausalLM.from_pretrained, in place of merging it."
        )
    task = config.task_type
    kwargs: dict[str, Any] = {"dtype": "auto", **(labels_of_head(adapter, config) if task == "SEQ_CLS" else {})}
    with expecting_new_head():
        model = load_model(KINDS.get(task, AutoModelForCausalLM), adapter, (), kwargs, is_trainable=False, hub={})
    try:
        tokenizer = AutoTokenizer.from_pretrained(adapter)
    except (OSError, ValueError):  # PEFT saves none
        tokenizer = AutoTokenizer.from_pretrained(config.base_model_name_or_path)
    model.merge_and_unload().save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
