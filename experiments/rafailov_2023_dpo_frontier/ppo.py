"""PPO on the reward that DPO's pairs are labelled by, the other side of its frontier. See README.md."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from trimtab_common.config import parse_config
from trimtab_lm import PPOConfig

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.rafailov_2023_dpo_frontier.pairs import PAPER
from experiments.runs import changed, run_folder
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation, StoriesRun, train


@dataclass(frozen=True)
class RunConfig(StoriesRun):
    """What samples, and how often the policy is looked at."""

    look_every: int = field(default=4, metadata={"help": "PPO steps from one look at reward and KL to the next."})


@dataclass
class SentimentPPOConfig(PPOConfig):
    """PPO with this experiment's defaults: a few minutes on two cores."""

    exp_name: str = changed(PPOConfig, "exp_name", "ppo")
    tracker_project_name: str = changed(PPOConfig, "tracker_project_name", PAPER)
    log_with: str | None = changed(PPOConfig, "log_with", "wandb")
    output_dir: str | None = run_folder(PAPER)
    steps: int = changed(PPOConfig, "steps", 32)
    batch_size: int = changed(PPOConfig, "batch_size", 64)
    mini_batch_size: int = changed(PPOConfig, "mini_batch_size", 32)
    ppo_epochs: int = changed(PPOConfig, "ppo_epochs", 2)
    learning_rate: float = changed(PPOConfig, "learning_rate", 2e-5)
    max_grad_norm: float | None = changed(PPOConfig, "max_grad_norm", 1.0)
    init_kl_coef: float | None = changed(PPOConfig, "init_kl_coef", 0.1)
    target: float | None = changed(PPOConfig, "target", 8.0)
    horizon: float | None = changed(PPOConfig, "horizon", 160.0)


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Train, and follow reward and KL of other prompts."""

    def on_step(step: int, row: dict[str, float], evaluation: Evaluation) -> None:
        if step % run.look_every == 0 and step < ppo.steps:
            numbers, _ = evaluation.look()
            row |= {f"eval_{name}": value for name, value in numbers.items()}

    train(run, ppo, sentiment, on_step=on_step)


if __name__ == "__main__":
    main(*parse_config(RunConfig, SentimentPPOConfig))
