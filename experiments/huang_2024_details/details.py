"""The details as settings, and a trainer that can change any of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from trimtab_common.config import read_settings
from trimtab_common.formulas.kl import k3
from trimtab_common.formulas.masking import masked_mean
from trimtab_common.stats import Stats
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

UNCLIPPED = 1000.0  # a range that no value leaves


@dataclass
class DetailsPPOConfig(PPOConfig):
    """PPO with the details that PPOConfig does not have, each at the recipe's choice."""

    adam_epsilon: float = field(default=1e-5, metadata={"help": "Adam's epsilon; PyTorch's default is 1e-8."})
    whiten_advantages: bool = field(default=True, metadata={"help": "Advantages with mean 0 and variance 1."})
    logprob_temperature: float | None = field(
        default=None,
        metadata={"help": "Take log-probabilities at this temperature, whatever responses were sampled at: a mistake."},
    )
    random_value_head: bool = field(
        default=False,
        metadata={"help": "Value head from N(0, 1 / (width + 1)), whose values are of size 1; else from 0."},
    )
    kl_in_loss: bool = field(
        default=False,
        metadata={"help": "Add init_kl_coef * k3 to the loss of each token, as GRPO does, not to rewards."},
    )
    anneal_learning_rate: bool = field(default=False, metadata={"help": "Learning rates fall to 0 in a line."})
    dropout: float = field(
        default=0.0, metadata={"help": "Dropout after attention and MLP of each layer, in the updates' passes."}
    )
    reference_decay: float | None = field(
        default=None,
        metadata={"help": "After each step the reference becomes this times itself plus the rest of the policy."},
    )


NAMES = (
    "whiten_advantages",
    "whiten_rewards",
    "random_value_head",
    "cliprange_value",
    "value_learning_rate",
    "kl_in_loss",
    "kl_penalty",
    "adam_epsilon",
    "anneal_learning_rate",
    "logprob_temperature",
    "missing_eos_penalty",
    "ppo_epochs",
    "batch_size",
    "dropout",
    "reference_decay",
)
RECIPE = Path(__file__).with_name("recipe.yaml")
DETAILS = {name: read_settings(RECIPE)[name] for name in NAMES}


class DetailsTrainer(PPOTrainer):
    """PPO that can leave advantages as they are, take a wrong temperature, and move its reference."""

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

    def step(self, *args: Any, **kwargs: Any) -> Stats:
        stats = super().step(*args, **kwargs)
        if (decay := self.config.reference_decay) is not None:
            policy, reference = self.model.pretrained_model, self.reference.model
            with torch.no_grad():
                for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
                    old.lerp_(new, 1 - decay)
        return stats


class KLInLossTrainer(DetailsTrainer):
    """PPO whose rewards are the scores, and whose loss has the KL penalty."""

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor, kl: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        rewards, penalty, kl = super().compute_rewards(scores, logprobs, ref_logprobs, masks, kl)
        return rewards - penalty, torch.zeros_like(penalty), kl

    def batched_forward_pass(self, model: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
        scores = super().batched_forward_pass(model, *args, **kwargs)
        if torch.is_grad_enabled():  # of an update, whose loss comes next
            with torch.no_grad():
                self.ref_logprobs = super().batched_forward_pass(self.reference_policy, *args, **kwargs)[0]
        return scores

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, Stats]:
        columns = (old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)
        policy_loss, value_loss, stats = super().loss(*columns)
        penalty = masked_mean(k3(logprobs, self.ref_logprobs), mask)
        return policy_loss + self.kl_ctl.value * penalty, value_loss, stats


def make_trainer(config: DetailsPPOConfig, model: AutoModelForCausalLMWithValueHead, **others: Any) -> DetailsTrainer:
    """A trainer with the details of the config; it changes the value head and adds the dropout of `model`."""
    if config.random_value_head:
        width = model.v_head.summary.in_features
        model.v_head.init_weights("normal", (width + 1) ** -0.5)
    trainer = (KLInLossTrainer if config.kl_in_loss else DetailsTrainer)(config, model, **others)
    for group in trainer.optimizer.param_groups:
        group["eps"] = config.adam_epsilon
    if config.anneal_learning_rate:
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: 1 - step / config.steps)
    if config.dropout:
        for layer in model.pretrained_model.model.layers:  # the reference is a copy without these hooks
            for module in (layer.self_attn, layer.mlp):
                module.register_forward_hook(dropping(config.dropout))
    return trainer


def dropping(rate: float) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that drops outputs where gradients are taken, in eval mode too, in which the trainer trains."""

    def drop(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, tuple):
            return functional.dropout(output[0], rate), *output[1:]
        return functional.dropout(output, rate)

    return drop
