"""DPO on sentiment (Rafailov et al. 2023, arXiv:2305.18290, section 6.1). What you should see: README.md."""

import sys
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from trimtab_common.config import parse_config
from trimtab_lm.dpo import DPOConfig, DPOTrainer

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.rafailov_2023_dpo_frontier.pairs import PAPER, Pair, RunConfig, follow, learnt, load, pairs_of
from experiments.runs import begin, changed, run_folder
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation

PANELS = {
    "reward (VADER, -1 to 1)": ["eval_reward"],
    "KL to the reference (nats per response)": ["eval_kl"],
    "accuracy of the implicit reward": ["rewards/accuracies"],
    "loss": ["loss"],
}


@dataclass
class SentimentDPOConfig(DPOConfig):
    """DPO with this experiment's defaults: a few minutes on two cores."""

    output_dir: str | None = run_folder(PAPER)
    report_to: None | str | list[str] = changed(DPOConfig, "report_to", "wandb")  # noqa: RUF036
    run_name: str | None = changed(DPOConfig, "run_name", "dpo")
    save_strategy: str = changed(DPOConfig, "save_strategy", "no")
    logging_steps: float = changed(DPOConfig, "logging_steps", 4)
    num_train_epochs: float = changed(DPOConfig, "num_train_epochs", 2)
    per_device_train_batch_size: int = changed(DPOConfig, "per_device_train_batch_size", 16)
    learning_rate: float = changed(DPOConfig, "learning_rate", 5e-5)
    warmup_steps: float = changed(DPOConfig, "warmup_steps", 8)
    beta: float = changed(DPOConfig, "beta", 0.1)


def columns(pair: Pair, *, ignored: int) -> dict[str, list[int]]:
    """A tokenized row of DPOTrainer."""
    sides = {side: learnt(pair["prompt"], pair[side], ignored=ignored) for side in ("chosen", "rejected")}
    prompt = {"prompt_input_ids": pair["prompt"], "prompt_attention_mask": [1] * len(pair["prompt"])}
    return prompt | {f"{side}_{name}": ids for side, row in sides.items() for name, ids in row.items()}


def main(run: RunConfig, dpo: DPOConfig) -> None:
    """Sample pairs, learn from them, and follow reward and KL of other prompts."""
    history = begin(PAPER, run, dpo)
    model, tokenizer = load(run.model)
    evaluation = Evaluation(model.to(dpo.device), tokenizer, sentiment, run, seed=dpo.seed)
    pairs = pairs_of(model, tokenizer, run, seed=dpo.seed)
    train = Dataset.from_list([columns(pair, ignored=dpo.label_pad_token_id) for pair in pairs])
    trainer = DPOTrainer(model, None, dpo, train_dataset=train, processing_class=tokenizer, callbacks=[history])
    if trainer.is_world_process_zero():
        print(f"{len(train)} pairs out of {run.prompts * run.per_prompt} continuations")
    follow(trainer, evaluation, run, title=f"{dpo.loss_type}: {run.model}, beta = {dpo.beta:g}", panels=PANELS)


if __name__ == "__main__":
    main(*parse_config(RunConfig, SentimentDPOConfig))
