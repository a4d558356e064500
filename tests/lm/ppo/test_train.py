"""`PPOTrainer.train`, its logs and files, and the page of a saved model."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.ppo.test_trainer import lora_policy, toy_data
from transformers import AutoTokenizer, GPT2LMHeadModel

from trimtab_common import hub
from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
)

# -------------------------------------------------------------- logging


class FakeTracker:
    run_id = "id"

    def __init__(self):
        self.logs, self.tables = [], []

    def log(self, stats, step):
        self.logs.append((step, dict(stats)))

    def table(self, name, columns, rows, step):
        self.tables.append((name, list(columns), [list(row) for row in rows], step))


def test_log_stats_sends_rewards_and_a_table_of_samples():
    trainer = tiny.ppo()
    tracker = trainer.run._tracker = FakeTracker()
    stats = trainer.step(*tiny.batch())
    batch = {"query": list("abcd"), "response": list("wxyz"), "label": [0, 1, 0, 1]}
    rewards = [torch.tensor(1.0), 2.0, 3.0, torch.tensor([6.0])]
    logs = trainer.log_stats(stats, batch, rewards)
    assert logs["env/reward_mean"] == pytest.approx(3.0)
    assert logs["env/reward_std"] == pytest.approx(3.5**0.5)
    assert logs["env/reward_dist"].tolist() == [1.0, 2.0, 3.0, 6.0]
    ((step, sent),) = tracker.logs
    assert step == 1
    assert sent["objective/kl"] == stats["objective/kl"]
    rows = [["a", "w", 1.0], ["b", "x", 2.0], ["c", "y", 3.0], ["d", "z", 6.0]]
    assert tracker.tables == [("game_log", ["query", "response", "reward"], rows, 1)]
    trainer.log_stats(stats, batch, rewards, columns_to_log=["label"])
    assert tracker.tables[1][1:3] == (["label", "reward"], [[0, 1.0], [1, 2.0], [0, 3.0], [1, 6.0]])
    assert "env/reward_mean" not in stats


def test_a_table_is_sent_every_so_many_steps():
    trainer = tiny.ppo(log_table_every=2)
    tracker = trainer.run._tracker = FakeTracker()
    for _ in range(4):
        trainer.log_stats(trainer.step(*tiny.batch()), {"query": list("abcd"), "response": list("wxyz")}, [1.0] * 4)
    assert [step for step, _ in tracker.logs] == [1, 2, 3, 4]
    assert [step for *_, step in tracker.tables] == [1, 3]


# -------------------------------------------------------------- saving


def test_save_pretrained_reloads_to_the_same_logits_and_values(tmp_path):
    trainer = tiny.ppo(learning_rate=1e-2)
    queries, responses, scores = tiny.batch()
    trainer.step(queries, responses, scores)
    trainer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path)).eval()
    trainer.model.eval()
    with torch.no_grad():
        (logits, _, values), (own_logits, _, own_values) = (
            model(input_ids=queries[0][None]) for model in (loaded, trainer.model)
        )
        alone = GPT2LMHeadModel.from_pretrained(tmp_path).eval()(input_ids=queries[0][None]).logits
    assert torch.equal(logits, own_logits)
    assert torch.equal(values, own_values)
    assert torch.equal(alone, own_logits)
    assert AutoTokenizer.from_pretrained(tmp_path)("ab")["input_ids"] == tiny.tokenizer()("ab")["input_ids"]
    assert "PPOTrainer" in (tmp_path / "README.md").read_text()


def test_create_model_card_names_model_trainer_and_settings(tmp_path):
    trainer = tiny.ppo(learning_rate=0.125)
    trainer.create_model_card(str(tmp_path / "new"), "My policy")
    text = (tmp_path / "new" / "README.md").read_text()
    assert "# My policy" in text
    assert "| learning_rate | 0.125 |" in text
    assert "1909.08593" in text
    trainer.create_model_card(str(tmp_path / "mine"))
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "# mine\n" in text
    assert "TRL" not in text.replace("tracker_project_name | trl", "")


def test_push_to_hub_uploads_what_save_pretrained_writes(monkeypatch):
    seen = {}

    class Repo:
        repo_id = "me/policy"

    def upload(*, repo_id, folder_path, **options):
        seen.update(options, repo_id=repo_id, files={path.name for path in folder_path.iterdir()})
        seen["card"] = (folder_path / "README.md").read_text()
        return "commit"

    monkeypatch.setattr(hub, "create_repo", lambda name, **options: seen.update(options, name=name) or Repo)
    monkeypatch.setattr(hub, "upload_folder", upload)
    assert tiny.ppo().push_to_hub("policy", private=True, commit_message="done") == "commit"
    assert (seen["name"], seen["repo_id"], seen["private"], seen["commit_message"]) == (
        "policy",
        "me/policy",
        True,
        "done",
    )
    assert {"model.safetensors", "value_head.safetensors", "tokenizer.json", "README.md"} <= seen["files"]
    assert 'from_pretrained("policy")' in seen["card"]


# -------------------------------------------------------------- train


def share_of_a(queries, responses, **_):
    return [text.count("a") / 8 for text in responses]


def test_train_learns_a_toy_reward():
    trainer = tiny.ppo(
        tiny.policy(initializer_range=0.05),
        arguments={"dataset": toy_data()},
        batch_size=8,
        mini_batch_size=8,
        ppo_epochs=4,
        learning_rate=1e-2,
        init_kl_coef=0.0,
        adap_kl_ctrl=False,
        max_grad_norm=1.0,
        steps=30,
        seed=3,
    )
    history = trainer.train(share_of_a, generation_kwargs={"max_new_tokens": 8})
    means = [stats["env/reward_mean"] for stats in history]
    assert np.mean(means[:3]) < 0.2
    assert np.mean(means[-3:]) > 0.6


def test_a_kl_penalty_holds_the_policy_back():
    def kl(init_kl_coef):
        trainer = tiny.ppo(
            tiny.policy(initializer_range=0.05),
            arguments={"dataset": toy_data()},
            batch_size=8,
            mini_batch_size=8,
            learning_rate=1e-2,
            init_kl_coef=init_kl_coef,
            adap_kl_ctrl=False,
            ppo_epochs=4,
            steps=12,
        )
        history = trainer.train(share_of_a, generation_kwargs={"max_new_tokens": 8})
        return np.mean([stats["objective/kl_k3"] for stats in history[-4:]])

    assert kl(2.0) < kl(0.0) / 2


def test_train_hands_texts_and_columns_to_the_reward_and_steps_to_on_step():
    received, steps = [], []

    def reward(queries, responses, label, **others):
        received.append((queries, responses, label))
        assert others == {}
        return [torch.tensor(float(x)) for x in label]

    data = toy_data(label=list(range(8)), note=["x"] * 8)
    trainer = tiny.ppo(arguments={"dataset": data}, steps=2)
    trainer.run._tracker = FakeTracker()
    history = trainer.train(
        reward,
        generation_kwargs={"max_new_tokens": 4},
        on_step=lambda step, stats, batch: steps.append((step, stats["env/reward_mean"], batch["response"])),
    )
    for queries, responses, label in received:
        assert queries == [letter * 3 for letter in np.array(list("abcdefgh"))[label]]
        assert all(isinstance(text, str) and len(text) <= 4 for text in responses)
    assert sorted(received[0][2] + received[1][2]) == list(range(8))
    assert [step for step, _, _ in steps] == [1, 2]
    assert [mean for _, mean, _ in steps] == [np.mean(label) for _, _, label in received]
    assert [responses for _, _, responses in steps] == [responses for _, responses, _ in received]
    assert [stats["env/reward_mean"] for stats in history] == [mean for _, mean, _ in steps]
    assert [step for step, _ in trainer.run._tracker.logs] == [1, 2]


def test_train_takes_a_reward_model():
    scorer = tiny.scorer()
    data = Dataset.from_dict({"input_ids": [[5, 6]] * 4})
    steps = []
    tiny.ppo(arguments={"dataset": data}).train(
        scorer, steps=1, generation_kwargs={"max_new_tokens": 3}, on_step=lambda *args: steps.append(args)
    )
    ((_, stats, batch),) = steps
    ids = tiny.tokenizer()(batch["query"][0] + batch["response"][0] + "</s>")["input_ids"]
    with torch.no_grad():
        hidden = scorer.eval().transformer(input_ids=torch.tensor([ids])).last_hidden_state
        expected = float(scorer.score(hidden)[0, -1, 0])
    assert float(stats["env/reward_dist"][0]) == pytest.approx(expected, abs=1e-5)


def interrupted(tmp_path, model=tiny.policy, kill_at=None, **arguments):
    """Returns weights and last statistics of five steps, killed and resumed after `kill_at` of them."""

    def trainer():
        policy = model()
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        ppo = tiny.ppo(
            policy,
            arguments={"dataset": toy_data(), "optimizer": optimizer, "lr_scheduler": scheduler, **arguments},
            output_dir=str(tmp_path),
            save_steps=1,
            steps=5,
            use_score_scaling=True,
            target=0.1,
            horizon=20,
            seed=4,
        )
        next(iter(ppo.prepare_dataloader(toy_data(4))))  # another loader is not part of the run
        return ppo

    options = {"reward": share_of_a, "generation_kwargs": {"max_new_tokens": 6}, "resume_from": "latest"}
    if kill_at:
        trainer().train(steps=kill_at, **options)
    last = trainer()
    history = last.train(**options)
    assert len(history) == 5 - (kill_at or 0)
    return tiny.weights(last.actor_critic), history[-1], last


@pytest.mark.parametrize("kind", ["plain", "adapter"])
def test_training_resumes_to_the_same_bits(kind, tmp_path):
    model = lora_policy if kind == "adapter" else tiny.policy
    torch.manual_seed(0)
    if kind == "adapter":
        start = lora_policy().state_dict()

        def model():
            policy = lora_policy()
            policy.load_state_dict(start)
            return policy

    weights, stats, whole = interrupted(tmp_path / "whole", model)
    resumed_weights, resumed_stats, resumed = interrupted(tmp_path / "parts", model, kill_at=3)
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
    assert resumed.kl_ctl.value == whole.kl_ctl.value != 0.2
    for name, value in stats.items():
        if not name.startswith("time/"):
            same = torch.equal(value, resumed_stats[name]) if torch.is_tensor(value) else value == resumed_stats[name]
            assert same, name


def test_resume_from_a_folder_and_from_nothing(tmp_path):
    trainer = tiny.ppo(arguments={"dataset": toy_data()}, steps=1)
    trainer.train(share_of_a, generation_kwargs={"max_new_tokens": 3})
    folder = trainer.save_checkpoint(tmp_path)
    assert folder == tmp_path / "checkpoint-1"
    second = tiny.ppo(tiny.policy(seed=5), arguments={"dataset": toy_data()}, steps=1)
    assert second.train(share_of_a, resume_from=folder) == []
    assert tiny.moved(tiny.weights(trainer.model), second.model) == {}
    fresh = tiny.ppo(arguments={"dataset": toy_data()}, steps=1, output_dir=str(tmp_path / "empty"))
    history = fresh.train(share_of_a, generation_kwargs={"max_new_tokens": 3}, resume_from="latest")
    assert len(history) == 1


def test_config_of_the_trainer_is_the_given_one_but_for_what_is_filled_in():
    config = PPOConfig(batch_size=4, mini_batch_size=2)
    trainer = PPOTrainer(config, tiny.policy(), tokenizer=tiny.tokenizer())
    filled = {"world_size", "is_encoder_decoder", "is_peft_model", "global_batch_size", "global_backward_batch_size"}
    differing = {name for name, value in vars(trainer.config).items() if getattr(config, name) != value}
    assert differing == filled
    assert trainer.current_device == trainer.accelerator.device
