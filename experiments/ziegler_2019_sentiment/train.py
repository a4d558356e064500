"""PPO towards positive continuations (Ziegler et al. 2019, arXiv:1909.08593). Claim, cost and numbers: README.md."""

import sys
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState

from trimtab_common.config import parse_config
from trimtab_lm import PPOConfig

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.reports import report_on
from experiments.runs import changed, run_folder
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, train
from experiments.ziegler_2019_sentiment.report import CLAIM, TITLE, judge

PAPER = "ziegler_2019_sentiment"


@dataclass
class SentimentPPOConfig(PPOConfig):
    """PPO with this experiment's defaults: a few minutes on two cores."""

    exp_name: str = changed(PPOConfig, "exp_name", PAPER)
    tracker_project_name: str = changed(PPOConfig, "tracker_project_name", PAPER)
    log_with: str | None = changed(PPOConfig, "log_with", "wandb")
    output_dir: str | None = run_folder(PAPER)
    steps: int = changed(PPOConfig, "steps", 50)
    batch_size: int = changed(PPOConfig, "batch_size", 32)
    mini_batch_size: int = changed(PPOConfig, "mini_batch_size", 16)
    gradient_accumulation_steps: int = changed(PPOConfig, "gradient_accumulation_steps", 2)
    ppo_epochs: int = changed(PPOConfig, "ppo_epochs", 2)
    learning_rate: float = changed(PPOConfig, "learning_rate", 2e-5)
    max_grad_norm: float | None = changed(PPOConfig, "max_grad_norm", 1.0)
    init_kl_coef: float | None = changed(PPOConfig, "init_kl_coef", 0.1)
    target: float | None = changed(PPOConfig, "target", 8.0)
    horizon: float | None = changed(PPOConfig, "horizon", 160.0)


def main(run: StoriesRun, ppo: PPOConfig) -> None:
    """Train, and write the report of this run into its folder."""
    folder = train(run, ppo, sentiment)
    if PartialState().is_main_process:
        report_on(TITLE, CLAIM, judge, [folder])
        print(f"figure: {folder / 'figure.png'}")


if __name__ == "__main__":
    main(*parse_config(StoriesRun, SentimentPPOConfig))
