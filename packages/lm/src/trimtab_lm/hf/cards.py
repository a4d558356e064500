"""The model card of a trainer on `transformers.Trainer`: how its model is loaded, and on what it was trained."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase, TrainingArguments

from trimtab_common.cards import facts_of, write_model_card
from trimtab_common.config import to_flat_dict
from trimtab_lm.interface import Model, Processor, base_of

FULL = """from transformers import {kind}, {reader}

model = {kind}.from_pretrained("{{repo_id}}")
{name} = {reader}.from_pretrained("{{repo_id}}")"""
ADAPTERS = """from peft import {kind}
from transformers import {reader}

model = {kind}.from_pretrained("{{repo_id}}"{more})  # the base model with these adapters
{name} = {reader}.from_pretrained("{{repo_id}}")"""
EVERYDAY = {
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("lr_scheduler_type", "optim", "seed"),
}
"""Settings of transformers that a card shows at their defaults, too."""
OF_THE_MACHINE = (
    *("output_dir", "logging", "report_to", "run_name", "disable_tqdm", "hub_", "push_to_hub", "dataloader", "save_"),
    *("accelerator_config", "remove_unused_columns", "resume_", "on_save_error", "overwrite_output_dir"),
)
"""How settings begin that say where files go and how a run is shown, which a card leaves out."""


def write_card(
    trainer: Any, folder: str | Path, *, repo_id: str | None = None, about: Mapping[str, Any] | None = None, **more: Any
) -> None:
    """Writes the card of a trainer's model into a folder.

    Args:
        trainer: a TrainerAdapter.
        repo_id: the repository of the model; None: the folder.
        about: more facts on what the model was trained on.
        more: arguments of `write_model_card`, in place of those that the trainer knows.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    known = {
        "trainer": type(trainer).__name__,
        "method": trainer.method,
        "paper": trainer.paper,
        "usage": usage_of(model, trainer.processing_class),
        "library": "peft" if isinstance(model, PeftModel) else "transformers",
        "base_model": base_of(model).config.name_or_path or None,
        "settings": settings_of(trainer.args),
        "facts": {**facts_of(trainer.about, data=trainer.rows), **(about or {})},
    }
    write_model_card(folder, repo_id=repo_id, **known | more)


def usage_of(model: Model, processing_class: Processor) -> str:
    """Python that loads a model from {repo_id}, for `write_model_card`."""
    base, is_adapter = base_of(model), isinstance(model, PeftModel)
    is_scorer = "Classification" in type(base).__name__
    task = "SequenceClassification" if is_scorer else "Seq2SeqLM" if base.config.is_encoder_decoder else "CausalLM"
    is_text = isinstance(processing_class, PreTrainedTokenizerBase)
    reader, name = ("AutoTokenizer", "tokenizer") if is_text else ("AutoProcessor", "processor")
    kind = f"AutoPeftModelFor{task}" if is_adapter else f"AutoModelFor{task}"
    more = ", num_labels=1" if is_scorer else ""
    return (ADAPTERS if is_adapter else FULL).format(kind=kind, reader=reader, name=name, more=more)


def settings_of(args: TrainingArguments) -> dict[str, object]:
    """The settings of trimtab, those of transformers that differ from their defaults, and the everyday ones."""
    inherited = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    values = {name: value for name, value in to_flat_dict(args).items() if not name.startswith(OF_THE_MACHINE)}

    def is_shown(name: str, value: object) -> bool:
        field = name.partition(".")[0]
        is_changed = field in inherited and value != inherited[field] and bool(value or inherited[field])
        return name in EVERYDAY or field not in inherited or is_changed

    return {name: value for name, value in values.items() if is_shown(name, value)}
