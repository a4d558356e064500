"""What the trainers on `transformers.Trainer` share: models by name, adapters, statistics between logs, tables."""

import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets
import torch
from peft import PeftConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Mean, gather_stats, merge_stats
from trimtab_common.tracking import MAX_CELL_CHARACTERS, MAX_TABLE_ROWS
from trimtab_lm.tokens.forward import base_of
from trimtab_lm.tokens.layout import from_labels
from trimtab_lm.tokens.logprobs import score_logits

# Settings ------------------------------------------------------------------------------------------------------------

# transformers 5.23 renamed gradient_checkpointing, in arguments and in methods. This is the name that Trainer reads.
_FIELDS = TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"


def checkpointing_of(args: TrainingArguments) -> tuple[bool, dict[str, Any] | None]:
    """Whether the model recomputes activations in backward, and its arguments of `torch.utils.checkpoint`."""
    return bool(getattr(args, CHECKPOINTING)), getattr(args, f"{CHECKPOINTING}_kwargs")


def own_arguments(args: Any, train_dataset: Any) -> Any:
    """A copy of the arguments for trainers whose collators make the model's inputs; the caller's are left alone.

    Columns are not dropped by the names of the model's inputs, and each process reads its own rows of a stream: their
    batches differ in shape, and cannot be sent round.
    """
    args = copy.copy(args)
    args.remove_unused_columns = False
    if isinstance(train_dataset, torch.utils.data.IterableDataset | datasets.IterableDataset):
        args.accelerator_config = copy.copy(args.accelerator_config)
        args.accelerator_config.dispatch_batches = False
    if args.use_liger_kernel:
        # Liger's loss would take the place of the model's forward, where our trainers score tokens.
        off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        args.liger_kernel_config = off | (args.liger_kernel_config or {})
    return args


# Models --------------------------------------------------------------------------------------------------------------


def load_language_model(model: Any, init_kwargs: Mapping[str, Any] | None = None) -> Any:
    """A causal or encoder-decoder model by hub id or folder; a model that is one already is returned as it is.

    init_kwargs: arguments of `from_pretrained`, for a name only; 2024's `torch_dtype` is taken as `dtype`. Raises
    ValueError where they come with a model that is loaded already.
    """
    if not isinstance(model, str):
        if init_kwargs:
            raise ValueError(
                f"model_init_kwargs={dict(init_kwargs)} say how to load a model, and the model given is loaded. Pass "
                "its name, or leave model_init_kwargs out."
            )
        return model
    kwargs = pretrained_kwargs(init_kwargs)
    shared = {name: kwargs[name] for name in ("revision", "trust_remote_code", "token", "cache_dir") if name in kwargs}
    is_encoder_decoder = AutoConfig.from_pretrained(model, **shared).is_encoder_decoder
    kind: Any = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    return kind.from_pretrained(model, **kwargs)


def pretrained_kwargs(init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """`init_kwargs` in transformers' words of today."""
    kwargs = dict(init_kwargs or {})
    if "torch_dtype" in kwargs:
        kwargs["dtype"] = kwargs.pop("torch_dtype")
    return kwargs


def load_processing_class(processing_class: Any, model: Any) -> Any:
    """The tokenizer given, or the one that lies beside the model (its name, or the name it was loaded from)."""
    if processing_class is not None:
        return processing_class
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "name_or_path", "")
    if not name:
        what = "model_init was given" if model is None else f"The {type(model).__name__} was not loaded by name"
        raise ValueError(f"{what}, so its tokenizer cannot be found. Pass processing_class=tokenizer.")
    try:
        return AutoProcessor.from_pretrained(name)
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(name)


def with_adapters(model: Any, peft_config: PeftConfig | None, args: TrainingArguments) -> Any:
    """The model as it is trained: quantized weights prepared, adapters added, inputs made to need gradients.

    Raises ValueError where there are adapters already: training them needs no peft_config.
    """
    if peft_config is not None and isinstance(model, PeftModel):
        raise ValueError(
            "The model has adapters already, and peft_config would put new ones around them. Leave peft_config out to "
            "train these, or pass model.merge_and_unload() to start new ones from them."
        )
    is_checkpointing, checkpointing_kwargs = checkpointing_of(args)
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=is_checkpointing,
            gradient_checkpointing_kwargs=checkpointing_kwargs,
        )
    if peft_config is not None:
        model = get_peft_model(model, peft_config)
    if is_checkpointing and isinstance(model, PeftModel):
        # Frozen embeddings give outputs without gradients, and a checkpointed block over them would have none.
        model.enable_input_require_grads()
    return model


# Statistics ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Statistics of micro-batches until they are logged, apart for training and evaluation.

    Weighted means (`trimtab_common.stats.Mean`) come out as those of everything that was recorded, over all processes.
    """

    def __init__(self) -> None:
        self._parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}

    def add(self, stats: Mapping[str, Any], *, training: bool) -> None:
        """stats: Mean, Variance or Deviation, or numbers that are averaged over the calls that gave them."""
        parts = self._parts[training]
        parts.append(dict(stats))
        if len(parts) == 64:
            parts[:] = [merge_stats(parts)]

    def flush(self, *, training: bool, prefix: str = "") -> dict[str, float]:
        """What was recorded since the last flush, each name behind `prefix`. Collective."""
        parts, self._parts[training] = self._parts[training], []
        gathered = gather_stats(merge_stats(parts))
        return {f"{prefix}{name}": value for name, value in gathered.items()}


def window_total(trainer: Trainer, counts: Iterable[int | Tensor]) -> Tensor:
    """The sum of `counts` over the micro-batches of an optimizer step and, as Trainer does, over all processes.

    It is what a loss divides by; `device_share` undoes the averaging of gradients over processes.
    """
    device = trainer.args.device
    total = sum((torch.as_tensor(count, device=device) for count in counts), start=torch.zeros((), device=device))
    if trainer.args.average_tokens_across_devices:
        total = trainer.accelerator.reduce(total, reduction="sum")
    return total


def device_share(trainer: Trainer) -> int:
    """By how much to multiply a loss that was divided by `window_total`: gradients are averaged over processes."""
    return trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1


def with_decoder_inputs(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with what the decoder reads, made of the labels as the model would where a collator leaves it to it."""
    base: Any = base_of(model)
    if not base.config.is_encoder_decoder or "decoder_input_ids" in batch:
        return batch
    return {**batch, "decoder_input_ids": base.prepare_decoder_input_ids_from_labels(batch["labels"])}


def stats_of_logits(logits: Any, labels: Tensor, *, is_encoder_decoder: bool) -> dict[str, Mean]:
    """Loss and entropy per token that counts, of logits [B, T, V] (or a tuple that begins with them), in nats."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    found = from_labels(labels, is_encoder_decoder=is_encoder_decoder)
    scores = score_logits(logits.flatten(0, 1).index_select(0, found["source"]), found["targets"])
    return {"entropy": Mean.of(scores.entropy), "loss": Mean.of(-scores.logprobs)}


def numbered_rows(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
    """A collator of `input_ids` and `labels` that also says which of its rows each position comes from: `row`."""

    def collated(rows: list[Any]) -> dict[str, Any]:
        numbers = [
            {**row, "input_ids": [i] * len(row["input_ids"]), "labels": row.get("labels", row["input_ids"])}
            for i, row in enumerate(rows)
        ]
        return {**collate(rows), "row": collate(numbers)["input_ids"]}

    return collated


def without_repetitions(trainer: Trainer, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of an evaluation in which rows do not count that only fill up the last batches of the processes.

    Of its rows by `row`, which is taken out, or else one by one. A stream's length is not known, and nothing changes.
    """
    kept = {name: value for name, value in batch.items() if name != "row"}
    state = trainer.accelerator.gradient_state
    if trainer.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return kept
    real = state.remainder - trainer.accelerator.process_index * trainer.args.eval_batch_size
    labels = batch["labels"]
    row = batch.get("row", torch.arange(len(labels), device=labels.device)[:, None])
    row = row if row.shape == labels.shape else row[:, :1]  # of an encoder: the decoder's rows are the same
    return {**kept, "labels": labels.masked_fill(row >= real, -100)}


def require_finite(loss: Tensor, trainer: Trainer) -> Tensor:
    """The loss of a micro-batch, before the optimizer has seen its gradient; TrainingDivergedError if not finite."""
    if not bool(torch.isfinite(loss)):
        raise TrainingDivergedError(
            f"The loss is {float(loss)} in step {trainer.state.global_step + 1}; no weight has moved since the step "
            "before. Resume from the last checkpoint with a lower learning rate, clip gradients (max_grad_norm), use "
            "bf16 instead of fp16, and look for rows of the data that are all padding or truncated."
        )
    return loss


def refuse_label_smoothing(args: TrainingArguments, trainer: str) -> None:
    """Raise ValueError where transformers' label smoothing is asked of a trainer whose loss has no labels to smooth."""
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} smooths token labels, which the loss of {trainer} "
            "does not have. Set it to 0."
        )


# Trackers ------------------------------------------------------------------------------------------------------------


def prepare_trackers(args: TrainingArguments) -> None:
    """Let W&B run offline where it is asked for and there is no key, instead of asking for one at the terminal."""
    if "wandb" not in (args.report_to or []) or os.environ.get("WANDB_MODE") or args.process_index != 0:
        return
    import wandb

    if wandb.run is None and not wandb.login(prompt=False, verify=False):
        os.environ["WANDB_MODE"] = "offline"
        wandb.teardown()  # asking for a key has read the environment, once and for all
        print("W&B has no API key: the run is offline in ./wandb; upload it later with: wandb sync", file=sys.stderr)


class Tables:
    """Tables of samples that grow over a run, in the trackers that `report_to` names (wandb, tensorboard)."""

    def __init__(self) -> None:
        self._tables: dict[str, Any] = {}
        self._waiting: list[tuple[str, list[str], list[list[Any]]]] = []  # for a W&B run to go to

    def add(self, trainer: Trainer, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add rows under the current step; does nothing on processes other than the main one."""
        if not trainer.is_world_process_zero():
            return
        step = trainer.state.global_step
        kept = [[step, *map(_cell, row)] for _, row in zip(range(MAX_TABLE_ROWS), rows, strict=False)]
        columns = ["step", *columns]
        if "wandb" in (trainer.args.report_to or []):
            self._to_wandb(name, columns, kept, step)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                lines = [columns, ["---"] * len(columns), *kept]
                text = "\n".join(
                    "| " + " | ".join(str(cell).replace("\n", "<br>") for cell in row) + " |" for row in lines
                )
                callback.tb_writer.add_text(name, text, step)

    def _to_wandb(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        import wandb

        self._waiting.append((name, columns, rows))
        if wandb.run is None:  # evaluate() before train(): transformers starts its run with the first log
            return
        for name, columns, rows in self._waiting:
            table = self._tables.setdefault(name, wandb.Table(columns=[*columns], log_mode="INCREMENTAL"))
            for row in rows:
                table.add_data(*row)
            wandb.log({name: table, "train/global_step": step})
        self._waiting.clear()


def _cell(value: Any) -> Any:
    return value[:MAX_CELL_CHARACTERS] if isinstance(value, str) else value
