"""GRPO on conversations trains only on the policy's tokens, with the sum of the environment's rewards."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.environments.conversations import Echo, Script, ids_of, rollout, sampler, tensor_of
from tests.lm.grpo.run_distributed import prompts, trainer, vowels
from transformers import TrainerCallback

from trimtab_lm.environments import EnvironmentRollout, Reply

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:step .* health/")
TURNS = {"x": ["ab", "d."], "xabab.": ["c."]}
ADVANTAGE = 0.5**0.5  # rewards 4 and 2: 1 over their deviation, sqrt(2)


class Partner(Echo):
    """Ends when it hears a full stop; a turn's reward is its number of tokens."""

    def step(self, text: str, ids: list[int]) -> Reply:
        return super().step(text, ids)._replace(done=text.endswith("."))


class Corrupting(EnvironmentRollout):
    """Returns nonsense as the log-probabilities of the environment's tokens."""

    def generate(self, prompts, **options):
        sampled = super().generate(prompts, **options)
        for logprobs, mask in zip(sampled.logprobs, sampled.episodes.masks, strict=True):
            logprobs[mask == 0] = float("nan")
        return sampled


@pytest.fixture
def make(tmp_path):
    return partial(trainer, str(tmp_path))


def learner(make, talk=None, **settings):
    """Returns a policy that has moved away from its reference, on the prompt of the two conversations."""
    talk = rollout(Script(TURNS), Partner) if talk is None else talk
    data = Dataset.from_dict({"prompt": ["x"]})
    options = {"num_generations": 2, "per_device_train_batch_size": 1, "train_dataset": data, "beta": 0.5, **settings}
    grpo = make(tiny.gpt2(dtype=torch.float64), None, rollout=talk, use_bias_correction_kl=False, **options)
    with torch.no_grad():
        grpo.model.transformer.h[0].mlp.c_fc.weight.mul_(1.2)
    return grpo


def rollout_of(grpo):
    return grpo.sampler.roll_out([{"prompt": "x", "prompt_ids": ids_of("x")}], draw=0, updates=1, size=1)


def gradients(grpo, loss):
    grpo.model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in grpo.model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", [EnvironmentRollout, Corrupting])
def test_loss_and_gradients_of_two_turns_are_those_worked_by_hand(make, kind):
    """6 policy tokens: "ab" and "c." with advantage a, "d." with -a; the environment's "ab." has no loss."""
    talk = kind(Script(TURNS), Partner, tiny.tokenizer(), max_completion_length=48)
    grpo = learner(make, talk)
    whole = rollout_of(grpo)
    assert whole.advantages.tolist() == pytest.approx([ADVANTAGE, -ADVANTAGE])
    loss = grpo.compute_loss(grpo.model, {**grpo.lay_out(whole.groups), "rollout": whole})
    actual = gradients(grpo, loss)

    terms = []
    for text, places, advantage in (("abab.c.", [0, 1, 5, 6], ADVANTAGE), ("d.", [0, 1], -ADVANTAGE)):
        ids = tensor_of("x" + text)
        logprobs, ref = (
            model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[places, 0]
            for model in (grpo.model.eval(), grpo.reference.model)
        )
        ratio, gap = (logprobs - logprobs.detach()).exp(), ref.detach() - logprobs
        terms.append(-ratio * advantage + 0.5 * (gap.exp() - gap - 1))
    expected = torch.cat(terms).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    wanted = gradients(grpo, expected)
    assert actual.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-6, atol=1e-9, msg=name)


def test_statistics_count_what_the_policy_wrote(make):
    for kind in (EnvironmentRollout, Corrupting):
        talk = kind(Script(TURNS), Partner, tiny.tokenizer(), max_completion_length=48)
        grpo = learner(make, talk, logging_steps=1, max_steps=1)
        grpo.train()
        logs = next(entry for entry in grpo.state.log_history if "reward" in entry)
        assert logs["reward"] == logs["rewards/environment/mean"] == 3
        assert (logs["completions/mean_length"], logs["completions/max_length"]) == (3, 4)
        assert logs["environment/turns"] == 1.5
        assert logs["environment/errors"] == logs["environment/cut"] == logs["completions/clipped_ratio"] == 0
        assert logs["num_tokens"] == (1 + 7) + (1 + 2)  # all tokens read
        scripted = torch.tensor([-1.0, -2, -1, -2, -1, -2])
        assert torch.equal(rollout_of(grpo).sampler_logprobs, scripted)
        assert logs["sampling/logp_difference/mean"] > 0  # not NaN


def test_the_reward_of_the_environment_stands_beside_others(make):
    def weighed(environment_rewards, **columns):
        return [10.0 * reward for reward in environment_rewards]

    talk = rollout(Script(TURNS), Partner)
    data = Dataset.from_dict({"prompt": ["x"]})
    sizes = {"num_generations": 2, "per_device_train_batch_size": 1, "train_dataset": data}
    grpo = make(tiny.gpt2(), [vowels, weighed], rollout=talk, reward_weights=[1.0, 0.0, 2.0], **sizes)
    assert grpo.sampler.rewards.names == ["vowels", "weighed", "environment"]
    rows = [{"prompt": "x", "prompt_ids": ids_of("x")}]
    sampled = grpo.sampler.sample(rows, seed=0)
    expected = torch.tensor([[2 + 0.7, 40, 4], [0.2, 20, 2]])  # "abab.c." has two vowels and 7 characters
    torch.testing.assert_close(sampled.scored.scores, expected)
    torch.testing.assert_close(sampled.scored.rewards, torch.tensor([2.7 + 8, 0.2 + 4]))
    with pytest.raises(TypeError, match="A reward function is a callable"):
        make(tiny.gpt2(), None, rollout=sampler())


def test_an_episode_that_was_cut_can_be_left_out(make):
    talk = rollout(Script({"x": ["ab", "d."], "xabab.": ["cd"]}), Partner, max_turns=2)
    whole = rollout_of(learner(make, talk, mask_truncated_completions=True))
    assert whole.is_counted.tolist() == [False, True]
    assert (whole.totals.sequences, whole.totals.tokens) == (1, 2)
    assert whole.groups[0].counts == [[0], [1, 1]]
    assert len(whole.sampler_logprobs) == len(whole.ref_logprobs) == 2


class Lottery:
    """Gives rewards that depend only on the episode's seed."""

    def reset(self, seed: int) -> None:
        self.seed, self.turns = seed, 0

    def step(self, text: str, ids: list[int]) -> Reply:
        self.turns += 1
        return Reply("ab", reward=self.seed * self.turns % 97 / 97, done=self.turns == 2 + self.seed % 2)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_training_stop or state.global_step == 3


def test_a_training_resumed_in_the_middle_of_a_rollout_ends_in_the_same_bits(tmp_path):
    def run(folder, **more):
        talk = rollout(sampler(), Lottery)
        settings = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6, "beta": 0.1, **more}
        saving = {"save_strategy": "steps", "save_steps": 3, "train_dataset": prompts(9)}
        return trainer(str(tmp_path / folder), tiny.gpt2(), None, rollout=talk, **settings, **saving)

    whole = run("whole")
    whole.train()
    run("cut", callbacks=[Stop()]).train()
    resumed = run("cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
