"""A tensor that is left on the CPU is seen in every trainer: on a CPU no test can see it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.accelerator.runs import Case, build, ppo
from tests.accelerator.test_pipelines import by_gradient, by_pairs
from tests.accelerator.test_pipelines import trainer as ddpo
from tests.test_every_trainer import WORDS, length

import trimtab_diffusion.alignprop.trainer
import trimtab_diffusion.diffusion_dpo.algorithm
import trimtab_lm.dpo.trainer
import trimtab_lm.grpo.trainer
from trimtab_lm import PPOTrainer

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]
REFUSED = "on the same device|on cpu|two different devices"


def left_behind(trainer: Any, name: str) -> None:
    """Moves a tensor of each batch to the CPU before the loss is computed."""
    whole = trainer.batch_loss
    trainer.batch_loss = lambda model, batch, items: whole(model, {**batch, name: batch[name].cpu()}, items)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("sft", "labels"),
        ("sft", "input_ids"),
        ("iterative_sft", "labels"),
        ("reward", "ends"),
        ("reward", "branch"),
        ("reward", "position_ids"),
        ("grpo", "targets"),
        ("grpo", "source"),
    ],
)
def test_part_of_a_batch(name: str, tensor: str, tmp_path: Path):
    trainer = build(Case(name, "causal", "full", "float32"), tmp_path, save_strategy="no")
    left_behind(trainer, tensor)
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.step(texts=WORDS[:4]) if name == "iterative_sft" else trainer.train()


@pytest.mark.parametrize("name", ["input_ids", "targets", "document"])
def test_dpos_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A batch is moved to the device when its tokens are taken from it, so the fault is put after that."""

    def tokens_of(*arguments: Any) -> Any:
        tokens = whole(*arguments)
        return {**tokens, name: tokens[name].cpu()}

    whole = trimtab_lm.dpo.trainer.tokens_of
    monkeypatch.setattr(trimtab_lm.dpo.trainer, "tokens_of", tokens_of)
    trainer = build(Case("dpo", "causal", "full", "float32"), tmp_path, save_strategy="no")
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train()


def test_grpos_log_probabilities_under_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = trimtab_lm.grpo.trainer.policy_loss

    def policy_loss(logprobs: Any, rollout: Any, *rest: Any) -> Any:
        return whole(logprobs, replace(rollout, ref_logprobs=rollout.ref_logprobs.cpu()), *rest)

    monkeypatch.setattr(trimtab_lm.grpo.trainer, "policy_loss", policy_loss)
    trainer = build(Case("grpo", "causal", "full", "float32"), tmp_path, save_strategy="no")
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ppos_values_advantages_and_returns(place: int, tmp_path: Path):
    class Forgetful(PPOTrainer):
        def compute_advantages(self, *tensors: Any) -> Any:
            three = list(super().compute_advantages(*tensors))
            three[place] = three[place].cpu()
            return tuple(three)

    trainer = ppo(Case("ppo", "causal", "full", "float32"), tmp_path, Forgetful)
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train(lambda queries, responses, **_: length(responses), generation_kwargs={"max_new_tokens": 6})


@pytest.mark.parametrize("name", ["advantages", "log_probs"])
def test_ddpos_advantages_and_log_probabilities(name: str, tmp_path: Path):
    trainer = ddpo("sd", tmp_path, use_lora=True, mixed_precision="no")
    whole = trainer.calculate_loss

    def calculate_loss(latents: Any, timesteps: Any, next_latents: Any, log_probs: Any, advantages: Any, embeds: Any):
        tensors = {"log_probs": log_probs, "advantages": advantages}
        return whole(latents, timesteps, next_latents, embeds=embeds, **tensors | {name: tensors[name].cpu()})

    trainer.calculate_loss = calculate_loss
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train(1)


def test_alignprops_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = trimtab_diffusion.alignprop.trainer
    whole = module.latents_with_gradient
    monkeypatch.setattr(module, "latents_with_gradient", lambda *args, **kwargs: whole(*args, **kwargs).cpu())
    trainer = by_gradient("sd", tmp_path, use_lora=True, mixed_precision="no")
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train(1)


def test_diffusion_dpos_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = trimtab_diffusion.diffusion_dpo.algorithm
    whole = module.noised

    def left(*args: Any) -> Any:
        batch = whole(*args)
        return batch._replace(latents=batch.latents.cpu())

    monkeypatch.setattr(module, "noised", left)
    trainer = by_pairs("sd", tmp_path, use_lora=True, mixed_precision="no")
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train(1)
