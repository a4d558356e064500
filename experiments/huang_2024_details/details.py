"""The details as settings, and a trainer that can leave out any of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab_common.config import read_settings
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

UNCLIPPED = 1000.0  # a range that no value leaves


@dataclass
class DetailsPPOConfig(PPOConfig):
    """PPO with the details that PPOConfig does not have, each at the paper's choice."""

    adam_epsilon: float = field(default=1e-5, metadata={"help": "Adam's epsilon; PyTorch's default is 1e-8."})
    whiten_advantages: bool = field(default=True, metadata={"help": "Advantages with mean 0 and variance 1."})
    logprob_temperature: float | None = field(
        default=None,
        metadata={"help": "Take log-probabilities at this temperature, whatever responses were sampled at: a mistake."},
    )


NAMES = (
    "whiten_advantages",
    "whiten_rewards",
    "cliprange_value",
    "adam_epsilon",
    "missing_eos_penalty",
    "logprob_temperature",
    "use_score_scaling",
    "use_score_norm",
    "score_clip",
)
RECIPE = Path(__file__).with_name("recipe.yaml")
DETAILS = {name: read_settings(RECIPE)[name] for name in NAMES}


class DetailsTrainer(PPOTrainer):
    """PPO that can keep advantages unwhitened, and take log-probabilities at the wrong temperature."""

    config: DetailsPPOConfig

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, advantages, returns = super().compute_advantages(values, rewards, mask)
        return values, advantages if self.config.whiten_advantages else returns - values, returns

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # PPOConfig(temperature=...) cannot do this: the trainer refuses to sample at a different temperature.
        responses = super().generate(*args, **kwargs)
        sampler = self.sampler
        sampler.temperature = self.config.logprob_temperature or sampler.temperature
        return responses


def make_trainer(config: DetailsPPOConfig, model: AutoModelForCausalLMWithValueHead, **others: Any) -> DetailsTrainer:
    """A trainer whose Adam has the epsilon of the config."""
    trainer = DetailsTrainer(config, model, **others)
    for group in trainer.optimizer.param_groups:
        group["eps"] = config.adam_epsilon
    return trainer
