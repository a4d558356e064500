"""Supervised fine-tuning: a small model of children's stories learns the style of the Python manual.

The text is the language reference that every Python ships as `pydoc_data.topics`. Rows are packed: each holds
max_length tokens of consecutive sections.

    python examples/sft.py             # a few minutes on two cores; --help lists every setting
    python examples/sft.py --smoke     # four small steps
    python examples/sft.py --model gpt2 --dataset stanfordnlp/imdb --max_length 512

You see the loss on held-out text fall, in nats per token, and what the model writes after it.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset, load_dataset

from trimtab_common.config import parse_config
from trimtab_lm import SFTConfig, SFTTrainer

SETTINGS = {"output_dir": "runs/examples/sft", "report_to": "none", "save_strategy": "no", "logging_steps": 10}
SETTINGS |= {"max_steps": 200, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "packing": True}
SETTINGS |= {"max_length": 128, "disable_tqdm": True}
SMOKE = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2}


@dataclass(frozen=True)
class RunConfig:
    """The settings that SFTConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    dataset: str | None = field(
        default=None, metadata={"help": "Folder or hub id with a column text. None: the Python manual."}
    )
    eval_rows: int = field(default=16, metadata={"help": "Texts held out for the evaluation."})
    smoke: bool = field(default=False, metadata={"help": "Four small steps, to see that it runs."})


def main(run: RunConfig, config: SFTConfig) -> None:
    """Fine-tunes, and evaluates before and after."""
    if run.dataset is None:
        data = Dataset.from_dict({"text": [topics[name].strip() for name in sorted(topics)]})
    else:
        data = load_dataset(run.dataset, split="train")
    data = data.train_test_split(test_size=run.eval_rows, seed=0)
    trainer = SFTTrainer(run.model, args=config, train_dataset=data["train"], eval_dataset=data["test"])
    before = trainer.evaluate()["eval_loss"]
    trainer.train(config.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]

    prompt = torch.tensor([trainer.tokenizer("The statement")["input_ids"]], device=trainer.model.device)
    with torch.no_grad():
        text = trainer.model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32)
    print(trainer.tokenizer.decode(text[0], skip_special_tokens=True))
    print(f"loss on held-out text: {before:.3f} -> {after:.3f} nats per token")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, SFTConfig, description=__doc__, recipe=recipe))
