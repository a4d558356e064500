"""PPO on conversations: rewards per turn, and only the policy's tokens in losses and statistics."""

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.environments.conversations import Echo, Script, rollout, sampler, tensor_of
from tests.lm.environments.test_grpo import TURNS, Lottery, Partner

from trimtab_lm import PPOTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:step .* health/", "ignore:Before"
)
MASK = torch.tensor([[1, 1, 0, 0, 0, 1, 1]])


class Watching(PPOTrainer):
    """Records the rewards per token, and puts nonsense at the environment's tokens."""

    noise = 0.0

    def compute_advantages(self, values, rewards, mask):
        self.seen = rewards.clone(), mask.clone()
        return super().compute_advantages(values, rewards, mask)

    def batched_forward_pass(self, *args, **kwargs):
        logprobs, logits, values, masks = super().batched_forward_pass(*args, **kwargs)
        outside = (masks == 0) * self.noise
        return logprobs + outside, logits, None if values is None else values + outside, masks


def data():
    return Dataset.from_dict({"query": ["x"] * 4, "answer": [0, 1, 2, 3]})


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(one, other):
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_advantages_of_two_turns_are_those_worked_by_hand():
    """With gamma and lambda 1/2, from the policy's last token back to its first.

    7: 5 - 4 = 1. 6: 0 + 4/2 - 3 = -1, and 1/4 of 1. 2: 2 + 3/2 - 2 = 3/2, and 1/4 of -3/4. 1: 0 + 2/2 - 1 = 0, and 1/4.
    """
    trainer = tiny.ppo(gamma=0.5, lam=0.5)
    values = torch.tensor([[1.0, 2, 9, 9, 9, 3, 4]])
    rewards = torch.tensor([[0.0, 2, 0, 0, 0, 0, 5]])
    kept, whitened, returns = trainer.compute_advantages(values, rewards, MASK)
    advantages = torch.tensor([[0.328125, 1.3125, 0, 0, 0, -0.75, 1.0]])
    torch.testing.assert_close(returns, advantages + values * MASK)
    assert torch.equal(kept, values * MASK)
    written = advantages[MASK == 1]
    torch.testing.assert_close(whitened[MASK == 1], (written - written.mean()) / written.std(correction=0))


def test_the_reward_of_a_turn_is_at_its_last_token_and_the_score_at_the_last():
    trainer = tiny.ppo(kind=Watching, batch_size=2, mini_batch_size=1)
    responses, masks = [tensor_of("abab.c."), tensor_of("d.")], [MASK[0], torch.ones(2)]
    rewards = [torch.tensor([0.0, 2, 0, 0, 0, 0, 5]), torch.tensor([0.0, 7.0])]
    stats = trainer.step([tensor_of("x")] * 2, responses, [0.5, -0.5], masks, response_rewards=rewards)
    seen, mask = trainer.seen
    assert torch.equal(mask, torch.tensor([[1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]))
    expected = torch.tensor([[0.0, 2, 0, 0, 0, 0, 5.5], [0, 6.5, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(seen, expected, atol=1e-6, rtol=0)  # the reference is the policy: no KL
    assert stats["ppo/mean_scores"] == pytest.approx((7.5 + 6.5) / 2)


def test_a_reward_at_the_last_token_is_a_score():
    queries, responses, scores = tiny.batch()
    one, other = tiny.ppo(), tiny.ppo()
    stats = one.step(queries, responses, scores)
    rewards = [
        torch.cat([torch.zeros(len(row) - 1), score[None]]) for row, score in zip(responses, scores, strict=True)
    ]
    again = other.step(queries, responses, [torch.tensor(0.0)] * 4, response_rewards=rewards)
    assert_same(weights_of(one), weights_of(other))
    assert stats["ppo/mean_scores"] == pytest.approx(again["ppo/mean_scores"])


def test_rewards_lose_the_place_of_a_start_token():
    class Seeing(PPOTrainer):
        def compute_advantages(self, values, rewards, mask):
            self.seen = rewards
            return super().compute_advantages(values, rewards, mask)

    trainer = tiny.ppo(tiny.with_value_head(tiny.t5()), Seeing, batch_size=2, mini_batch_size=1)
    rewards = [torch.tensor([0.0, 1, 2]), torch.tensor([0.0, 3])]
    responses = [torch.tensor([0, 5, 6]), torch.tensor([0, 7])]
    trainer.step([tensor_of("x")] * 2, responses, [0.0] * 2, response_rewards=rewards)
    torch.testing.assert_close(trainer.seen, torch.tensor([[1.0, 2], [3, 0]]))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.zeros(3), r"response_rewards\[1\] has shape \[3\], its response has \[2\]"),
        (torch.tensor([float("inf"), 0]), r"response_rewards\[1\] must be finite"),
    ],
)
def test_rewards_that_fit_no_response_are_refused(rewards, message):
    trainer = tiny.ppo(batch_size=2, mini_batch_size=1)
    responses, masks = [tensor_of("abab.c."), tensor_of("d.")], [MASK[0], torch.ones(2)]
    with pytest.raises(ValueError, match=message):
        trainer.step([tensor_of("x")] * 2, responses, [0.0, 0.0], masks, response_rewards=[torch.zeros(7), rewards])
    lost = [torch.tensor([0.0, 0, 1, 0, 0, 0, 0]), torch.zeros(2)]
    with pytest.raises(ValueError, match=r"response_rewards\[0\] must be finite, and 0 at tokens that response_masks"):
        trainer.step([tensor_of("x")] * 2, responses, [0.0, 0.0], masks, response_rewards=lost)


def conversation(kind=PPOTrainer, environment=Partner, **config):
    talk = rollout(Script(TURNS), environment)
    arguments = {"dataset": data(), "rollout": talk}
    return tiny.ppo(kind=kind, arguments=arguments, remove_unused_columns=False, **config)


def test_train_is_the_rollout_and_a_step_with_its_masks_and_rewards():
    trained, stepped = conversation(), tiny.ppo()
    (logs,) = trained.train(steps=1)
    talk = rollout(Script(TURNS), Partner)
    talk.sync(stepped.model.pretrained_model, 1)
    queries = [tensor_of("x")] * 4
    sampled = talk.generate(queries, num_generations=1, version=1, seed=0)
    masks, rewards, _ = sampled.episodes
    stepped.step(queries, sampled.completions, [0.0] * 4, masks, response_rewards=rewards)
    assert_same(weights_of(trained), weights_of(stepped))
    assert logs["env/reward_mean"] == logs["ppo/mean_scores"] == 4
    assert trained.run.about["reward"] == "environment"
    assert (logs["environment/turns"], logs["environment/errors"], logs["environment/cut"]) == (2, 0, 0)


def test_what_the_environment_wrote_does_not_matter():
    """Log-probabilities and values of its tokens may be anything: weights and statistics are the same."""
    runs = []
    for noise in (0.0, 50.0):
        trainer = conversation(Watching, init_kl_coef=0.3)
        with torch.no_grad():
            trainer.model.pretrained_model.transformer.h[0].mlp.c_fc.weight.mul_(1.2)  # away from the reference
        trainer.noise = noise
        history = trainer.train(lambda completions, **_: [len(text) / 10 for text in completions], steps=2)
        runs.append((weights_of(trainer), history))
    assert_same(runs[0][0], runs[1][0])
    for one, other in zip(runs[0][1], runs[1][1], strict=True):
        assert {k: v for k, v in one.items() if "time/" not in k} == {
            k: v for k, v in other.items() if "time/" not in k
        }
        assert one["objective/kl"] != 0


def test_an_environment_gets_the_columns_of_its_row():
    seen = []

    class Asking(Partner):
        def reset(self, answer, prompt):
            super().reset()
            seen.append((prompt, answer))

    conversation(environment=Asking).train(steps=1)
    assert sorted(seen) == [("x", 0), ("x", 1), ("x", 2), ("x", 3)]


def test_generate_leaves_no_masks_behind_and_is_refused():
    with pytest.raises(ValueError, match="generate returns responses without their masks"):
        conversation().generate([tensor_of("x")])
    with pytest.raises(ValueError, match=r"samples by its own settings.*max_new_tokens"):
        conversation().train(steps=1, generation_kwargs={"max_new_tokens": 3})
    with pytest.raises(ValueError, match="needs a reward"):
        tiny.ppo(arguments={"dataset": data(), "rollout": sampler()}).train(steps=1)


def test_a_run_that_is_resumed_ends_in_the_same_bits(tmp_path):
    def run(folder):
        arguments = {"dataset": Dataset.from_dict({"query": list("abcdefgh")}), "rollout": rollout(sampler(), Lottery)}
        return tiny.ppo(arguments=arguments, output_dir=str(tmp_path / folder), save_steps=2, ppo_epochs=2)

    whole, cut, resumed = run("whole"), run("cut"), run("cut")
    whole.train(steps=4)
    cut.train(steps=2)
    history = resumed.train(steps=4, resume_from="latest")
    assert len(history) == 2
    assert_same(weights_of(whole), weights_of(resumed))


@pytest.mark.slow
def test_rewards_per_turn_are_learnt():
    """Each turn is rewarded for its letters "a"; the environment's tokens get no credit."""

    class Likes(Echo):
        def step(self, text, ids):
            return super().step(text, ids)._replace(observation="bc", reward=text.count("a") / len(ids))

    sizes = {"batch_size": 16, "mini_batch_size": 16, "ppo_epochs": 2, "learning_rate": 1e-2, "init_kl_coef": 0.0}
    arguments = {"dataset": Dataset.from_dict({"query": list("abcdefgh") * 2}), "rollout": rollout(sampler(), Likes)}
    history = tiny.ppo(arguments=arguments, seed=1, **sizes).train(steps=15)
    scores = [step["ppo/mean_scores"] for step in history]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.5
