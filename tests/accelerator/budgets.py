"""Measures what the second step of each trainer needs on the pretend accelerator; budgets.json says what it may need.

`PYTHONPATH=tests/pretend python -m tests.accelerator.budgets` prints the rows, and why the host waits; `--record`
writes them to budgets.json. The figures are counts, not timings.
"""

import argparse
import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tests.accelerator.runs import forget_accelerator
from tests.accelerator.test_pipelines import trainer as ddpo_trainer
from tests.lm import tiny
from tests.test_every_trainer import length
from tools.bench.models import EOS, SPECIAL, text, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback

from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

TABLE = Path(__file__).with_suffix(".json")
RECORD = "PYTHONPATH=tests/pretend python -m tests.accelerator.budgets --record"
MORE = {"operators": 1.03, "waits": 1.0, "copies": 1.0, "bytes": 1.03}
LESS = 0.9  # below this part of its budget a figure is better than the table says
ROWS, LENGTH, NEW = 8, 64, 16  # rows of a step, tokens of a row, tokens of a completion
VOCABULARY = 2000


class Need(NamedTuple):
    """What a row needs; `reasons` are those of its waits."""

    figures: dict[str, float]
    reasons: dict[str, int]


class Meter:
    """Measures what lies between `begin`, at the end of the first step, and `end`.

    Attributes:
        need: what was measured, its bytes beyond those in use when the meter was made.
    """

    def __init__(self) -> None:
        self.device: Any = import_module("torch_musa")
        self.held = self.device.memory_allocated()

    def begin(self) -> None:
        gc.collect()
        self.device.clear()

    def end(self) -> None:
        operators, reasons = sum(self.device.counts().values()), self.device.waits()
        size, waits = self.device.peak() - self.held, sum(reasons.values())
        figures = {"operators": operators, "waits": waits, "copies": self.device.copies(), "bytes": size}
        self.need = Need(figures, reasons)


# Small inputs -------------------------------------------------------------------------------------------------------


def llama(kind: Any = LlamaForCausalLM, **settings: Any) -> Any:
    """A model that never samples its end token, so that all completions are of the same length."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **SPECIAL,
        **settings,
    )
    model = tiny.seeded(kind, config)
    if kind is LlamaForCausalLM:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 1.0
            model.lm_head.weight[EOS] = 0.0
            model.lm_head.weight[EOS, 0] = -20.0
    return model


def prompt(words: int, seed: int) -> str:
    """Returns a text of so many tokens."""
    return text(torch.randint(3, VOCABULARY, (words,), generator=torch.Generator().manual_seed(seed)).tolist())


def texts(count: int, words: int, seed: int) -> list[str]:
    return [prompt(words, 1000 * seed + i) for i in range(count)]


def pairs() -> Dataset:
    quarter = LENGTH // 4
    columns = {"prompt": (3 * quarter, 0), "chosen": (quarter, 1), "rejected": (quarter, 2)}
    return Dataset.from_dict({name: texts(3 * ROWS // 2, *column) for name, column in columns.items()})


# Steps --------------------------------------------------------------------------------------------------------------


class SecondStep(TrainerCallback):
    """Measures from the end of the first step to the end of the second."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.meter.begin()
        else:
            self.meter.end()
            control.should_training_stop = True


def arguments(folder: Path, rows: int = ROWS) -> dict[str, Any]:
    sizes = {"output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": rows}
    return {**sizes, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


def sft(folder: Path, meter: Meter) -> None:
    rows = Dataset.from_dict({"text": texts(3 * ROWS, LENGTH, 0)})
    args = SFTConfig(**arguments(folder), max_length=LENGTH)
    trainer = SFTTrainer(
        llama(), args, train_dataset=rows, processing_class=tokenizer(VOCABULARY), callbacks=[SecondStep(meter)]
    )
    trainer.train()


def iterative_sft(folder: Path, meter: Meter) -> None:
    trainer = IterativeSFTTrainer(
        llama(), IterativeSFTConfig(**arguments(folder)), processing_class=tokenizer(VOCABULARY)
    )
    trainer.step(texts=texts(ROWS, LENGTH, 0))
    meter.begin()
    trainer.step(texts=texts(ROWS, LENGTH, 1))
    meter.end()


def dpo(folder: Path, meter: Meter) -> None:
    args = DPOConfig(**arguments(folder, ROWS // 2))
    options: dict[str, Any] = {"train_dataset": pairs(), "processing_class": tokenizer(VOCABULARY)}
    DPOTrainer(llama(), args=args, callbacks=[SecondStep(meter)], **options).train()


def kto(folder: Path, meter: Meter) -> None:
    quarter, count = LENGTH // 4, 3 * ROWS
    columns = {"prompt": texts(count, 3 * quarter, 0), "completion": texts(count, quarter, 1)}
    rows = Dataset.from_dict({**columns, "label": [i % 2 == 0 for i in range(count)]})
    options: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer(VOCABULARY)}
    KTOTrainer(llama(), args=KTOConfig(**arguments(folder)), callbacks=[SecondStep(meter)], **options).train()


def reward(folder: Path, meter: Meter) -> None:
    args = RewardConfig(**arguments(folder, ROWS // 2))
    options: dict[str, Any] = {"train_dataset": pairs(), "processing_class": tokenizer(VOCABULARY)}
    scorer = llama(LlamaForSequenceClassification, num_labels=1)
    RewardTrainer(scorer, args, callbacks=[SecondStep(meter)], **options).train()


def grpo(folder: Path, meter: Meter) -> None:
    sizes = {"num_generations": 4, "max_completion_length": NEW}
    prompts = Dataset.from_dict({"prompt": texts(3 * ROWS, LENGTH - NEW, 0)})
    args = GRPOConfig(**arguments(folder, ROWS // 4), **sizes)
    options: dict[str, Any] = {"train_dataset": prompts, "processing_class": tokenizer(VOCABULARY)}
    GRPOTrainer(llama(), reward_funcs=length, args=args, callbacks=[SecondStep(meter)], **options).train()


def ppo_trainer(folder: Path) -> tuple[PPOTrainer, list[torch.Tensor]]:
    config = PPOConfig(output_dir=str(folder), steps=3, batch_size=ROWS, mini_batch_size=ROWS // 2, ppo_epochs=2)
    trainer = PPOTrainer(config, tiny.with_value_head(llama()), tokenizer=tokenizer(VOCABULARY))
    prompts = [
        tokenizer(VOCABULARY)(prompt, return_tensors="pt").input_ids[0] for prompt in texts(ROWS, LENGTH - NEW, 0)
    ]
    return trainer, [prompt.to(trainer.accelerator.device) for prompt in prompts]


def ppo(folder: Path, meter: Meter) -> None:
    trainer, queries = ppo_trainer(folder)
    scores = [torch.tensor(float(i)) for i in range(ROWS)]

    def step() -> None:
        trainer.step(queries, responses, scores)

    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=NEW)
    step()
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=NEW)
    meter.begin()
    step()
    meter.end()


def ppo_sampling(folder: Path, meter: Meter, tokens: int = NEW) -> None:
    trainer, queries = ppo_trainer(folder)
    trainer.generate(queries, return_prompt=False, max_new_tokens=tokens)
    meter.begin()
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=tokens)
    meter.end()
    assert {len(response) for response in responses} == {tokens}


def grpo_sampling(folder: Path, meter: Meter, tokens: int = NEW) -> None:
    sampler = TransformersRollout(SamplingSettings(max_completion_length=tokens), tokenizer(VOCABULARY))
    model = llama().to("musa")
    prompts = [
        tokenizer(VOCABULARY)(prompt, return_tensors="pt").input_ids[0] for prompt in texts(ROWS // 4, LENGTH - NEW, 0)
    ]
    for version in range(2):
        if version == 1:
            meter.begin()
        sampler.sync(model, version)
        rollout = sampler.generate(prompts, num_generations=4, version=version, seed=version)
    meter.end()
    assert {len(completion) for completion in rollout.completions} == {tokens}


def ddpo(folder: Path, meter: Meter) -> None:
    trainer = ddpo_trainer("sd", folder, use_lora=True, mixed_precision="no")
    steps = trainer.step(0, 0)
    meter.begin()
    trainer.step(1, steps)
    meter.end()


ROW: dict[str, Callable[..., None]] = {
    "sft step": sft,
    "iterative_sft step": iterative_sft,
    "dpo step": dpo,
    "kto step": kto,
    "reward step": reward,
    "grpo step with sampling": grpo,
    "grpo sampling": grpo_sampling,
    "ppo step": ppo,
    "ppo sampling": ppo_sampling,
    "ddpo epoch with lora": ddpo,
}
PER_TOKEN = {f"{name}, a token more": name for name in ("grpo sampling", "ppo sampling")}
NAMES = [*ROW, *PER_TOKEN]


# The table ----------------------------------------------------------------------------------------------------------


def measure(name: str) -> Need:
    """Runs a row of the table; what ran before it in this process changes nothing."""
    if name not in PER_TOKEN:
        return measure_row(ROW[name])
    row = ROW[PER_TOKEN[name]]
    few, many = measure_row(row), measure_row(row, tokens=2 * NEW)
    reasons = {key: many.reasons[key] - few.reasons.get(key, 0) for key in many.reasons}
    return Need({key: round((many.figures[key] - few.figures[key]) / NEW, 2) for key in MORE}, reasons)


def measure_row(row: Callable[..., None], **options: int) -> Need:
    forget_accelerator()
    with tempfile.TemporaryDirectory() as folder, quiet(), collected():
        meter = Meter()
        torch.manual_seed(0)
        row(Path(folder), meter, **options)
        return meter.need


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def collected() -> Iterator[None]:
    """Python's garbage is collected before and after the block, and not at times of Python's choice inside it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def judgement(name: str, need: Need, budget: dict[str, float]) -> str:
    """What is wrong with a row's budget, and the line that would be right; empty if nothing is."""
    faults = []
    for key, value in need.figures.items():
        if value > MORE[key] * budget[key]:
            faults.append(f"{key}: {value:,}, which is more than the budget of {budget[key]:,}")
        elif value < LESS * budget[key]:
            faults.append(
                f"{key}: {value:,}, which is less than the budget of {budget[key]:,}: the table is out of date"
            )
    if not faults:
        return ""
    reasons = ", ".join(f"{key} {count}" for key, count in sorted(need.reasons.items()) if count)
    return "\n".join(
        [name, *faults, f"reasons of the waits: {reasons}", f"the line would be: {line(name, need.figures)}", RECORD]
    )


def line(name: str, figures: dict[str, float]) -> str:
    return f"{json.dumps(name)}: {json.dumps(figures)}"


def read() -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = json.loads(TABLE.read_text())
    return table


def text_of(table: dict[str, dict[str, float]]) -> str:
    return "{\n" + ",\n".join(f"  {line(name, table[name])}" for name in NAMES) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write the rows to {TABLE.name}")
    parser.add_argument("--rows", nargs="+", default=NAMES, choices=NAMES, help="all by default")
    options = parser.parse_args()
    measured = {}
    for name in options.rows:
        need = measure(name)
        measured[name] = need.figures
        print(line(name, need.figures), {key: count for key, count in need.reasons.items() if count}, flush=True)
    if options.record:
        TABLE.write_text(text_of((read() if TABLE.exists() else {}) | measured))


if __name__ == "__main__":
    main()
