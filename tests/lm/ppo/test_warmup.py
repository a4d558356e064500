"""The learning rates of policy and value function, and their warm-up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny

from trimtab_lm import PPOTrainer


def critic_of(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """Returns the weights that only the values use."""
    return tiny.weights(trainer.actor_critic.value_function)


def rates(trainer: PPOTrainer, steps: int) -> list[float]:
    return [trainer.step(*tiny.batch())["ppo/learning_rate"] for _ in range(steps)]


@pytest.mark.parametrize("has_critic", [False, True])
def test_only_the_value_function_has_the_second_rate(has_critic: bool):
    policy = tiny.policy()
    arguments = {"value_model": tiny.policy(1)} if has_critic else {}
    rates = {"learning_rate": 1e-30, "value_learning_rate": 1e-2}
    trainer = tiny.ppo(policy, arguments=arguments, **rates)
    before, critic_before = tiny.weights(policy.pretrained_model), critic_of(trainer)
    trainer.step(*tiny.batch())
    assert max(tiny.moved(before, policy.pretrained_model).values(), default=0.0) < 1e-29
    assert len(tiny.moved(critic_before, trainer.actor_critic.value_function)) == len(critic_before)


def test_the_policy_warms_up_in_equal_steps_and_the_value_function_does_not():
    trainer = tiny.ppo(learning_rate=1e-4, lr_warmup_steps=4, value_learning_rate=3e-4)
    assert trainer.optimizer.param_groups[1]["lr"] == 3e-4
    assert rates(trainer, 5) == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4])
    assert trainer.optimizer.param_groups[1]["lr"] == 3e-4


def test_the_first_update_of_adam_moves_each_weight_by_its_learning_rate():
    # Kingma & Ba 2015, section 2.1: the bias-corrected first step equals the rate, whatever the gradient's size.
    policy = tiny.policy(dtype=torch.float64)
    one_update = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1}
    trainer = tiny.ppo(policy, learning_rate=1e-4, value_learning_rate=1e-2, **one_update)
    before = tiny.weights(policy)
    trainer.step(*tiny.batch())
    moved = tiny.moved(before, policy)
    assert moved["v_head.summary.bias"] == pytest.approx(1e-2, rel=1e-4)
    assert max(size for name, size in moved.items() if "v_head" not in name) == pytest.approx(1e-4, rel=1e-4)


def test_a_resumed_warm_up_equals_one_that_was_not_interrupted(tmp_path: Path):
    def trained(folder: Path, *stops: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        for steps in stops:
            data = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(8, 2, 6)]})
            warmup = {"lr_warmup_steps": 4, "value_learning_rate": 3e-3, "kl_gain": 2.0}
            saving = {"output_dir": str(folder), "save_steps": 1, "steps": 5, "seed": 4, "target": 0.1, "horizon": 20}
            trainer = tiny.ppo(tiny.policy(), arguments={"dataset": data}, learning_rate=1e-2, **warmup, **saving)
            options = {"generation_kwargs": {"max_new_tokens": 6}, "resume_from": "latest"}
            history = trainer.train(
                lambda queries, responses, **_: [float(len(r)) for r in responses], steps=steps, **options
            )
        return tiny.weights(trainer.actor_critic), history

    (weights, history), (resumed, rest) = trained(tmp_path / "whole", 5), trained(tmp_path / "parts", 2, 5)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    same = ("ppo/learning_rate", "objective/kl", "objective/kl_coef", "ppo/val/var_explained")
    assert [[row[name] for name in same] for row in history[2:]] == [[row[name] for name in same] for row in rest]
    assert len({row["ppo/learning_rate"] for row in history}) == 4


@pytest.mark.parametrize("name", ["value_learning_rate", "lr_warmup_steps"])
def test_settings_of_adam_are_refused_beside_another_optimizer(name: str):
    model = tiny.policy()
    with pytest.raises(ValueError, match="leave the optimizer out"):
        tiny.ppo(model, arguments={"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, **{name: 1})


def test_a_warm_up_is_refused_beside_a_scheduler():
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), lambda step: 1.0)
    with pytest.raises(ValueError, match=r"lr_warmup_steps=3 .*one of them out"):
        tiny.ppo(arguments={"lr_scheduler": scheduler}, lr_warmup_steps=3)
