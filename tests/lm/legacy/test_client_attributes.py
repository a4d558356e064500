"""What scripts of 2024 read and set on a PPOTrainer, besides its documented arguments and methods."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny

from trimtab_lm import create_reference_model


def tuned():
    """Returns a policy whose adapter is already trained, so it differs from its base model."""
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.with_value_head(get_peft_model(tiny.gpt2(dtype=torch.float64), config))


@pytest.mark.filterwarnings("ignore:step .* health/")
def test_a_copy_of_a_tuned_policy_is_its_reference():
    policy = tuned()
    copied = tiny.ppo(policy, arguments={"ref_model": create_reference_model(policy)})
    assert abs(copied.step(*tiny.batch())["objective/kl"]) < 1e-9
    assert abs(copied.step(*tiny.batch())["objective/kl"]) > 1e-4  # the copy stays while the policy moves
    assert abs(tiny.ppo(tuned()).step(*tiny.batch())["objective/kl"]) > 1e-2  # from the base model, adapters off


@pytest.mark.filterwarnings("ignore:step .* health/")
def test_attributes_that_client_loops_read(tmp_path):
    trainer = tiny.ppo(tracker_kwargs={"wandb": {"name": "a run"}}, log_with=None)
    assert (trainer.current_step, trainer.is_distributed, trainer.is_peft_model) == (0, False, False)
    assert float(trainer.highest_reward) == -float("inf")
    settings = trainer.config.to_dict()
    assert settings["learning_rate"] == 1e-3
    assert settings["tracker_kwargs/wandb/name"] == "a run"
    with trainer.optional_peft_ctx():
        trainer.step(*tiny.batch())
    assert trainer.current_step == trainer.compare_step == 1
    trainer.current_step = 7
    assert trainer.steps_done == 7
    trainer._save_pretrained(str(tmp_path))
    assert (tmp_path / "value_head.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()
    assert trainer.model.current_device == trainer.model.device


def test_without_its_adapters_a_policy_is_its_base_model():
    policy = tuned()
    trainer = tiny.ppo(policy)
    assert trainer.is_peft_model
    policy.eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), trainer.optional_peft_ctx():
        alone = policy(ids)[0]
    with policy.pretrained_model.disable_adapter(), torch.no_grad():
        assert torch.equal(alone, policy(ids)[0])
    with torch.no_grad():
        assert not torch.equal(alone, policy(ids)[0])


@pytest.mark.parametrize("deviation", ["std", "var"])
@pytest.mark.parametrize("order", ["mean deviation count", "count deviation mean"])
def test_moments_that_are_set_go_on_as_if_their_numbers_had_been_seen(deviation, order):
    earlier, later = torch.tensor([1.0, 4.0, 5.0, 9.0]), torch.tensor([2.0, 7.0])
    trainer = tiny.ppo()
    known = {
        "mean": earlier.mean(),
        "count": 4,
        "deviation": earlier.std() if deviation == "std" else earlier.var(correction=0),
    }
    for name in order.split():
        setattr(trainer.running, deviation if name == "deviation" else name, known[name])
    assert getattr(trainer.running, deviation) == pytest.approx(float(known["deviation"]))
    assert trainer.running.update(later) == pytest.approx((4.5, float(later.std())))
    whole = torch.cat([earlier, later])
    running = trainer.running
    assert (running.mean, running.std, running.count) == pytest.approx((float(whole.mean()), float(whole.std()), 6))
    assert running.var == pytest.approx(float(whole.var(correction=0)))


def test_a_subclass_saves_in_its_own_way(tmp_path):
    class Own(type(tiny.ppo())):
        def _save_pretrained(self, save_directory):
            (tmp_path / "own").write_text(save_directory)

    tiny.ppo(kind=Own).save_pretrained("anywhere")
    assert (tmp_path / "own").read_text() == "anywhere"


@pytest.mark.filterwarnings("ignore:step .* health/")
def test_logs_through_the_accelerator_reach_the_tracker(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = tiny.ppo(log_with="tensorboard", project_kwargs={"logging_dir": str(tmp_path)})
    trainer.accelerator.log({"eval/reward": 0.5}, step=1)
    queries, responses, scores = tiny.batch()
    stats = trainer.step(queries, responses, scores)
    trainer.log_stats(stats, {"query": queries, "response": responses}, scores)
    assert trainer.accelerator.get_tracker("tensorboard") is trainer.accelerator.trackers[0]
    trainer.accelerator.end_training()
    (folder,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/reward")] == [(1, 0.5)]
    assert [event.step for event in events.Scalars("objective/kl")] == [1]
    assert tiny.ppo().accelerator.trackers == []
