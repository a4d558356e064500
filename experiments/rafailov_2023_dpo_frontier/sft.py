"""SFT on the chosen answers of DPO's pairs, the baseline of its frontier ("Preferred-FT"). See README.md."""

import sys
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from trimtab_common.config import parse_config
from trimtab_lm.sft import SFTConfig, SFTTrainer

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.rafailov_2023_dpo_frontier.pairs import PAPER, RunConfig, follow, learnt, load, pairs_of
from experiments.runs import begin, changed, run_folder
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation

PANELS = {
    "reward (VADER, -1 to 1)": ["eval_reward"],
    "KL to the reference (nats per response)": ["eval_kl"],
    "loss (nats per token)": ["loss"],
}


@dataclass
class ChosenSFTConfig(SFTConfig):
    """SFT with this experiment's defaults: a few minutes on two cores."""

    output_dir: str | None = run_folder(PAPER)
    report_to: None | str | list[str] = changed(SFTConfig, "report_to", "wandb")  # noqa: RUF036
    run_name: str | None = changed(SFTConfig, "run_name", "sft")
    save_strategy: str = changed(SFTConfig, "save_strategy", "no")
    logging_steps: float = changed(SFTConfig, "logging_steps", 4)
    num_train_epochs: float = changed(SFTConfig, "num_train_epochs", 2)
    per_device_train_batch_size: int = changed(SFTConfig, "per_device_train_batch_size", 16)
    learning_rate: float = changed(SFTConfig, "learning_rate", 5e-5)
    warmup_steps: float = changed(SFTConfig, "warmup_steps", 8)


def main(run: RunConfig, sft: SFTConfig) -> None:
    """Sample pairs, learn the chosen answers, and follow reward and KL of other prompts."""
    history = begin(PAPER, run, sft)
    model, tokenizer = load(run.model)
    evaluation = Evaluation(model.to(sft.device), tokenizer, sentiment, run, seed=sft.seed)
    pairs = pairs_of(model, tokenizer, run, seed=sft.seed)
    train = Dataset.from_list([learnt(pair["prompt"], pair["chosen"]) for pair in pairs])
    trainer = SFTTrainer(model, args=sft, train_dataset=train, processing_class=tokenizer, callbacks=[history])
    if trainer.is_world_process_zero():
        print(f"{len(train)} answers out of {run.prompts * run.per_prompt} continuations")
    follow(trainer, evaluation, run, title=f"SFT on the chosen: {run.model}", panels=PANELS)


if __name__ == "__main__":
    main(*parse_config(RunConfig, ChosenSFTConfig))
