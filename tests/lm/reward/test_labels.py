"""Reward models with several labels, AutoModelForSequenceClassification's default: the reward is their mean."""

import pytest
import torch
import torch.nn.functional as F
from tests.lm.reward.run_distributed import D, good_and_bad, pairs, scorer, trainer

TWO = "2 labels.*mean over labels.*num_labels=1"


def own_scores(model, dataset) -> torch.Tensor:
    """Returns the scores of chosen and rejected, [2, B, 2 labels]; each text runs alone through the model's forward."""
    return torch.stack(
        [
            torch.cat([model(input_ids=torch.tensor([row[f"input_ids_{side}"]])).logits for row in dataset])
            for side in ("chosen", "rejected")
        ]
    )


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_loss_is_the_mean_over_pairs_and_labels(kind, tmp_path):
    data, model = pairs(5, with_margin=True), scorer(kind, dtype=D, num_labels=2)
    chosen, rejected = own_scores(model, data)
    margins = torch.tensor(data["margin"], dtype=D)[:, None]
    expected = (-F.logsigmoid(chosen - rejected - margins) + 0.1 * (chosen + rejected) ** 2).mean()
    gradients = torch.autograd.grad(expected, model.score.weight if kind == "gpt2" else model.classifier.weight)
    with pytest.warns(UserWarning, match=TWO):
        reward_trainer = trainer(model, tmp_path, center_rewards_coefficient=0.1)
    loss, outputs = reward_trainer.compute_loss(model, reward_trainer.data_collator(list(data)), return_outputs=True)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0, check_dtype=False)
    loss.backward()
    head = model.score if kind == "gpt2" else model.classifier
    torch.testing.assert_close(head.weight.grad, gradients[0], rtol=1e-8, atol=1e-12)
    scores = torch.stack([chosen, rejected], 1).mean(2)
    torch.testing.assert_close(outputs["scores"], scores, rtol=1e-9, atol=1e-12, check_dtype=False)


def test_equal_labels_are_one_score(tmp_path):
    data = pairs(4)
    one, two = scorer(dtype=D), scorer(dtype=D, num_labels=2)
    two.load_state_dict({**one.state_dict(), "score.weight": one.score.weight.detach().repeat(2, 1)})
    with pytest.warns(UserWarning, match=TWO):
        other = trainer(two, tmp_path)
    losses = [
        reward_trainer.compute_loss(reward_trainer.model, reward_trainer.data_collator(list(data)))
        for reward_trainer in (trainer(one, tmp_path), other)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)


def test_every_label_learns_to_tell_the_answers_apart(tmp_path):
    data = good_and_bad(32, seed=0)
    with pytest.warns(UserWarning, match=TWO):
        reward_trainer = trainer(
            scorer(num_labels=2),
            tmp_path,
            {"train_dataset": data, "eval_dataset": data},
            max_steps=30,
            learning_rate=1e-2,
            init_reward_head=True,
        )
    reward_trainer.train()
    assert reward_trainer.evaluate()["eval_accuracy"] == 1.0
    tokenized = reward_trainer.train_dataset
    chosen, rejected = own_scores(reward_trainer.model.eval(), tokenized)
    assert (chosen > rejected).float().mean(0).tolist() == [1.0, 1.0]
