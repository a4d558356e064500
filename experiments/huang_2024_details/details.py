"""The details as settings: their recipe, and trainers that do without one of them."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from experiments.runs import changed, run_folder
from experiments.sentiment_ppo import StoriesRun
from torch import Tensor

from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

PAPER = "huang_2024_details"
UNCLIPPED = 1000.0  # a range that no value leaves


@dataclass(frozen=True)
class RunConfig(StoriesRun):
    """One sentence of at most twelve tokens: most responses end in time, some do not."""

    max_new_tokens: int = changed(StoriesRun, "max_new_tokens", 12)
    stops: tuple[str, ...] = changed(StoriesRun, "stops", (".", "!", "?"))
    sampling_temperature: float = changed(StoriesRun, "sampling_temperature", 0.7)


@dataclass
class DetailsPPOConfig(PPOConfig):
    """The recipe: every default is the paper's choice, where the size of the experiment leaves one."""

    exp_name: str = changed(PPOConfig, "exp_name", PAPER)
    tracker_project_name: str = changed(PPOConfig, "tracker_project_name", PAPER)
    log_with: str | None = changed(PPOConfig, "log_with", "wandb")
    output_dir: str | None = run_folder(PAPER)
    steps: int = changed(PPOConfig, "steps", 40)
    batch_size: int = changed(PPOConfig, "batch_size", 32)
    mini_batch_size: int = changed(PPOConfig, "mini_batch_size", 16)
    ppo_epochs: int = changed(PPOConfig, "ppo_epochs", 2)
    learning_rate: float = changed(PPOConfig, "learning_rate", 3e-5)
    adap_kl_ctrl: bool = changed(PPOConfig, "adap_kl_ctrl", False)
    init_kl_coef: float | None = changed(PPOConfig, "init_kl_coef", 0.05)
    missing_eos_penalty: float | None = changed(PPOConfig, "missing_eos_penalty", 1.0)
    adam_epsilon: float = field(default=1e-5, metadata={"help": "Adam's epsilon; PyTorch's own default is 1e-8."})
    whiten_advantages: bool = field(default=True, metadata={"help": "Advantages with mean 0 and variance 1."})
    logprob_temperature: float | None = field(
        default=None,
        metadata={"help": "Take log-probabilities at this temperature, whatever responses were sampled at: a mistake."},
    )


DETAILS = (
    "whiten_advantages", "whiten_rewards", "cliprange_value", "adam_epsilon", "missing_eos_penalty",
    "logprob_temperature", "use_score_scaling", "use_score_norm", "score_clip",
)  # fmt: skip
RECIPE = {known.name: known.default for known in fields(DetailsPPOConfig) if known.name in DETAILS}


class DetailsTrainer(PPOTrainer):
    """PPO that can leave advantages as they are, and take log-probabilities at a temperature that is not theirs."""

    config: DetailsPPOConfig

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, advantages, returns = super().compute_advantages(values, rewards, mask)
        return values, advantages if self.config.whiten_advantages else returns - values, returns

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # PPOConfig(temperature=...) cannot do this: the trainer refuses to sample at another temperature than that.
        responses = super().generate(*args, **kwargs)
        self.sampler.temperature = self.config.logprob_temperature or self.sampler.temperature
        return responses


def make_trainer(config: DetailsPPOConfig, model: AutoModelForCausalLMWithValueHead, **others: Any) -> DetailsTrainer:
    """A trainer with the Adam that the config asks for."""
    adam = torch.optim.Adam(model.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)
    return DetailsTrainer(config, model, optimizer=adam, **others)
