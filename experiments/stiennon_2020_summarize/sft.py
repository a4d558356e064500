"""The first stage of Stiennon et al. 2020 (arXiv:2009.01325), fine-tuning on text. What you should see: README.md."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset

from experiments.assets import model_folder, state_of_the_union
from experiments.run_folders import begin, finish, from_recipe, show, texts
from trimtab_lm.hf.tracking import Tables
from trimtab_lm.sft import SFTConfig, SFTTrainer

PAPER = "stiennon_2020_summarize"
RECIPE = Path(__file__).with_name("recipe_sft.yaml")
PANELS = {"loss (nats per token)": ["loss", "eval_loss"], "entropy (nats per token)": ["entropy"]}


@dataclass(frozen=True)
class RunConfig:
    """The model and the texts."""

    model: str = field(
        default="stories15m",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "Hub id with splits train and test, and a column text. None: State of the Union addresses."},
    )
    held_out: tuple[str, ...] = field(
        default=("George Washington", "Abraham Lincoln", "John F Kennedy"),
        metadata={"help": "Presidents whose addresses are for evaluation alone."},
    )
    words: int = field(default=150, metadata={"help": "Words of a document at most: an address is cut into such."})
    eval_documents: int | None = field(default=64, metadata={"help": "Documents of the evaluation. None: all."})
    samples: int = field(default=4, metadata={"help": "Continuations shown before and after training."})
    max_new_tokens: int = field(default=40, metadata={"help": "Tokens of such a continuation at most."})


def documents(text: str, words: int) -> Iterator[str]:
    """Yields consecutive whole sentences of at most `words` words together; a longer sentence is one document."""
    held: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        if held and len(" ".join([*held, sentence]).split()) > words:
            yield " ".join(held)
            held = []
        held.append(sentence)
    if any(held):  # a few addresses have no text
        yield " ".join(held)


def speeches(addresses: Iterable[dict[str, str]], run: RunConfig) -> tuple[Dataset, Dataset]:
    """Returns the training documents, and the held-out presidents' documents."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    for address in addresses:
        parts[address["president"] in run.held_out] += documents(address["text"], run.words)
    return Dataset.from_dict({"text": parts[False]}), Dataset.from_dict({"text": parts[True]})


def main(run: RunConfig, sft: SFTConfig) -> None:
    """Fine-tunes, and prints held-out loss and continuations before and after."""
    history = begin(PAPER, run, sft)
    name = model_folder(run.model)
    if run.dataset is None:
        train, test = speeches(state_of_the_union(), run)
    else:
        train, test = (load_dataset(run.dataset, split=split) for split in ("train", "test"))
    test = test.shuffle(seed=0).select(range(min(run.eval_documents or len(test), len(test))))
    trainer = SFTTrainer(name, args=sft, train_dataset=train, eval_dataset=test, callbacks=[history])

    prompts = [" ".join(text.split()[:8]) for text in test["text"][: run.samples]]
    losses, settings = [], {"max_new_tokens": run.max_new_tokens, "seed": sft.seed}
    tables = Tables()
    for stage in ("before", "after"):
        if stage == "after":
            trainer.train(resume_from_checkpoint=sft.resume_from_checkpoint)
        losses.append(trainer.evaluate()["eval_loss"])
        answers = texts(trainer.model, trainer.tokenizer, prompts, **settings)
        tables.add(trainer, "samples", ["prompt", "answer"], zip(prompts, answers, strict=True))
        if trainer.is_world_process_zero():
            show(f"{stage} training", prompts, answers)
    first, last = losses
    if trainer.is_world_process_zero():
        print(f"held-out loss, nats per token: {first:.3f} -> {last:.3f}   ", end="")
        print(f"perplexity: {math.exp(first):.1f} -> {math.exp(last):.1f}   lower: {'yes' if last < first else 'NO'}")
    finish(trainer, f"SFT: {run.model}", PANELS, {"loss_before": first, "perplexity": math.exp(last)})


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, SFTConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, SFTConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
