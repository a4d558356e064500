"""The next batch is sampled during training on this one, by the policy before the update, and is corrected for it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.grpo.run_distributed import Scripted, prompts, vowels
from tests.lm.grpo.run_distributed import trainer as grpo_trainer
from tests.lm.sampling.elsewhere import Elsewhere
from transformers import TrainerCallback

from trimtab_lm.grpo.batches import PromptBatches
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending

pytestmark = pytest.mark.filterwarnings("ignore:step .* health/", "ignore:.*torch.jit.*:DeprecationWarning")
FORMS = {"one step": {}, "several steps": {"steps_per_generation": 2, "num_iterations": 2}}


def grpo(folder: Path, backend: Any, **settings: Any) -> Any:
    options = {"asynchronous_rollouts": True, "max_steps": 8, "train_dataset": prompts(9), **settings}
    return grpo_trainer(str(folder), tiny.gpt2(), rollout=backend, **options)


def ppo(backend: Any, **config: Any) -> Any:
    data = Dataset.from_dict({"query": [letter * 3 for letter in "abcdefghi"]})
    arguments = {"dataset": data, "rollout": backend}
    options = {"steps": 6, "learning_rate": 1e-2, "asynchronous_rollouts": True, **config}
    return tiny.ppo(arguments=arguments, **options)


def count_a(completions: list[str]) -> list[float]:
    return [0.1 * len(set(text)) for text in completions]


class Recorded(AsynchronousRollout):
    """Records what the trainer receives."""

    def __init__(self, backend: Any, pending: Pending):
        super().__init__(backend, pending)
        self.rollouts: list[Any] = []
        self.prompts: list[Any] = []

    def generate(self, prompts: Any, **options: Any) -> Any:
        self.rollouts.append(super().generate(prompts, **options))
        self.prompts.append(prompts)
        return self.rollouts[-1]


def recorded(trainer: Any, name: str) -> Recorded:
    """Replaces the trainer's asynchronous rollout by a recorder."""
    rollout = getattr(trainer, name)
    assert isinstance(rollout, AsynchronousRollout)
    setattr(trainer, name, Recorded(rollout.backend, rollout.pending))
    return getattr(trainer, name)


def assert_one_behind(rollouts: Recorded, backend: Elsewhere, steps_per_rollout: int = 1) -> None:
    """Asserts that each rollout comes from the policy before the last update, with its log-probabilities."""
    first, second, *others = [rollout.policy_step for rollout in rollouts.rollouts]
    assert first == second == 0
    assert others == [number * steps_per_rollout for number in range(1, len(others) + 1)]
    for number, (batch, rollout) in enumerate(zip(rollouts.prompts, rollouts.rollouts, strict=True)):
        repeated = [prompt for prompt in batch for _ in range(len(rollout.completions) // len(batch))]
        policy = backend.policies[max(number - 1, 0)]
        for prompt, completion, logprobs in zip(repeated, rollout.completions, rollout.logprobs, strict=True):
            torch.testing.assert_close(tiny.taken_of(policy, prompt, completion), logprobs)
    first, last = (tiny.weights(backend.policies[number]) for number in (0, -1))
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("form", FORMS)
def test_grpo_learns_from_the_policy_before_the_last_update(tmp_path: Path, form: str):
    backend = Elsewhere()
    trainer = grpo(tmp_path, backend, **FORMS[form])
    rollouts, steps = recorded(trainer, "backend"), 4 if form == "several steps" else 1
    trainer.train()
    assert len(rollouts.rollouts) == 8 // steps == len(backend.versions)
    if steps == 1:
        assert_one_behind(rollouts, backend)
    behind = [log["sampling/steps_behind"] for log in trainer.state.log_history if "sampling/steps_behind" in log]
    assert behind == [0] + [steps] * (8 // steps - 1)
    assert "eval_sampling/steps_behind" not in trainer.evaluate(prompts(2))


def test_ppo_learns_from_the_policy_before_the_last_update():
    backend = Elsewhere()
    trainer = ppo(backend)
    rollouts = recorded(trainer, "rollout")
    history = trainer.train(count_a)
    assert len(rollouts.rollouts) == 6 == len(backend.versions)
    assert_one_behind(rollouts, backend)
    assert [entry["ppo/sampling/steps_behind"] for entry in history] == [0, 1, 1, 1, 1, 1]


@pytest.mark.slow
def test_the_prompts_are_those_of_rollouts_in_turn(tmp_path: Path):
    """Nine prompts in calls of two: epochs end in the middle, and skip a prompt."""
    for name, trainers in {
        "backend": [grpo(tmp_path / str(flag), Elsewhere(), asynchronous_rollouts=flag) for flag in (True, False)],
        "rollout": [ppo(Elsewhere(), asynchronous_rollouts=flag) for flag in (True, False)],
    }.items():
        seen: list[list[list[list[int]]]] = []
        for trainer in trainers:
            rollouts, asked = getattr(trainer, name), []
            generate = rollouts.generate
            rollouts.generate = lambda batch, generate=generate, asked=asked, **options: (
                asked.append([prompt.tolist() for prompt in batch]) or generate(batch, **options)
            )
            trainer.train(*([count_a] if name == "rollout" else []))
            seen.append(asked)
        assert seen[0] == seen[1]
        assert len({str(batch) for batch in seen[0]}) > 4


def test_the_batch_after_the_last_of_an_epoch_is_the_first_of_the_next():
    shape = {"prompts_per_step": 2, "steps": 2, "repeats": 3, "seed": 5}
    for rank in range(2):
        ahead = PromptBatches(23, **shape, rank=rank, world_size=2, looks_ahead=True)
        plain = PromptBatches(23, **shape, rank=rank, world_size=2)
        pairs: list[list[int]] = []
        calls: list[list[int]] = []
        for epoch in range(3):
            ahead.set_epoch(epoch), plain.set_epoch(epoch)
            pairs += list(ahead)
            calls += list(plain)
        assert pairs[: len(calls) - 3] == [a + b for a, b in zip(calls, calls[3:], strict=False)]


class Meeting:
    """Samples the second rollout only while the first is scored, and scores the first only during that sampling."""

    def __init__(self) -> None:
        self.sampling, self.scoring = threading.Event(), threading.Event()

    def sample(self, number: int) -> None:
        if number == 1:
            self.sampling.set()
            assert self.scoring.wait(30), "nothing else happened while the rollout was sampled"

    def score(self, completions: list[str], **_: Any) -> list[float]:
        assert self.sampling.wait(30), "nothing was sampled while the trainer worked"
        self.scoring.set()
        return vowels(completions)


def test_sampling_and_training_overlap(tmp_path: Path):
    meeting = Meeting()
    grpo_trainer(
        str(tmp_path),
        tiny.gpt2(),
        meeting.score,
        rollout=Elsewhere(before=meeting.sample),
        asynchronous_rollouts=True,
        max_steps=2,
    ).train()
    meeting = Meeting()
    ppo(Elsewhere(before=meeting.sample), steps=2).train(lambda completions: meeting.score(completions))


class Stop(TrainerCallback):
    """Stops a training after a step, as if it was killed."""

    def __init__(self, at: int):
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.at


@pytest.mark.parametrize(
    ("form", "at"),
    [
        pytest.param("one step", 3, marks=pytest.mark.slow),
        ("several steps", 2),
        pytest.param("several steps", 4, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_grpo_ends_in_the_same_bits(tmp_path: Path, form: str, at: int):
    settings = {"save_strategy": "steps", "save_steps": 1, **FORMS[form]}
    whole = grpo(tmp_path / "whole", Elsewhere(), **settings)
    whole.train()
    grpo(tmp_path / "cut", Elsewhere(), callbacks=[Stop(at)], **settings).train()
    backend = Elsewhere()
    resumed = grpo(tmp_path / "cut", backend, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    torch.testing.assert_close(tiny.weights(resumed.model), tiny.weights(whole.model), rtol=0, atol=0)


def test_a_resumed_ppo_ends_in_the_same_bits(tmp_path: Path):
    whole = ppo(Elsewhere())
    whole.train(count_a)

    class Killed(Exception):
        pass

    def die(step: int, *_: Any) -> None:
        if step == 4:
            raise Killed

    saving = {"output_dir": str(tmp_path), "save_steps": 3}
    with pytest.raises(Killed):
        ppo(Elsewhere(), **saving).train(count_a, on_step=die)
    backend = Elsewhere()
    resumed = ppo(backend, **saving)
    resumed.train(count_a, resume_from="latest")
    assert len(backend.versions) == 2  # the checkpoint has the first of the three rollouts
    torch.testing.assert_close(tiny.weights(resumed.model), tiny.weights(whole.model), rtol=0, atol=0)


def test_the_ratio_is_to_the_policy_that_sampled():
    """At learning rate 0 the sampler's probabilities equal the policy's, and shifted ones change the ratio."""
    model, queries = tiny.policy(dtype=torch.float64), tiny.rows(4, 2, 5)
    responses = [torch.tensor([5, 6, 7])] * 4
    logprobs = [tiny.taken_of(tiny.gpt2(0, torch.float64), *pair) for pair in zip(queries, responses, strict=True)]
    shifted = [row - 0.1 for row in logprobs]
    ratios = {}
    for cap in (None, 2.0):
        trainer = tiny.ppo(model, asynchronous_rollouts=True, importance_sampling_cap=cap, learning_rate=1e-9)
        stats = trainer.step(queries, responses, [0.0, 1.0, 2.0, 3.0], sampler_logprobs=shifted)
        ratios[cap] = stats["ppo/policy/ratio"]
        assert stats["ppo/sampling/token_ratio/mean"] == pytest.approx(1.1051709)
        assert stats["objective/kl"] == pytest.approx(-0.3, abs=1e-6)  # three tokens, relative to the sampling policy
    assert ratios == {None: pytest.approx(1.1051709, rel=1e-6), 2.0: pytest.approx(1, rel=1e-6)}
    with pytest.raises(ValueError, match=r"asynchronous_rollouts=True needs .* give step sampler_logprobs"):
        tiny.ppo(model, asynchronous_rollouts=True).step(queries, responses, [0.0, 1.0, 2.0, 3.0])


class Shifted(Elsewhere):
    """Returns log-probabilities that are a tenth of a nat too low."""

    def generate(self, *args: Any, **options: Any) -> Any:
        rollout = super().generate(*args, **options)
        return rollout._replace(logprobs=[row - 0.1 for row in rollout.logprobs])


@pytest.mark.parametrize(("cap", "ratio"), [(None, 1.1051709), (2.0, 1.0)])
def test_the_ratio_of_grpo_is_to_the_policy_that_sampled(tmp_path: Path, cap: float | None, ratio: float):
    """At epsilon 0.05 a ratio of 1.105 is clipped for completions that are better than the mean."""
    settings = {"importance_sampling_cap": cap, "epsilon": 0.05, "max_steps": 1}
    trainer = grpo(tmp_path, Shifted(), **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["clip_ratio/high_mean"] > 0) == (ratio > 1.05)
    assert log["sampling/token_ratio/mean"] == pytest.approx(1.1051709, rel=1e-4)


def test_an_evaluation_waits_for_the_rollout_and_leaves_it(tmp_path: Path):
    logs = []
    for name, more in {
        "plain": {},
        "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(3)},
    }.items():
        backend = Elsewhere()
        trainer = grpo(tmp_path / name, backend, max_steps=4, **more)
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert logs[0] == logs[1]


def test_an_error_of_the_sampler_ends_the_training_and_the_next_try_samples_anew():
    fails = {2}

    def fail(number: int) -> None:
        if number in fails:
            fails.clear()
            raise ConnectionError("the engine is gone")

    trainer = ppo(Elsewhere(before=fail))
    with pytest.raises(ConnectionError, match="the engine is gone"):
        trainer.train(count_a)
    assert trainer.steps_done == 2
    trainer.rollout.backend.is_sampling = False
    assert len(trainer.train(count_a)) == 4


def test_samplers_in_this_process_and_silent_ones_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="needs a sampler in another process, and TransformersRollout samples in this"):
        grpo(tmp_path, None)
    with pytest.raises(ValueError, match="needs a sampler in another process, and Scripted"):
        ppo(Scripted())
    with pytest.raises(ValueError, match="needs a sampler in another process: rollout_backend='vllm_server'"):
        ppo(None).train(count_a)

    class Silent(Elsewhere):
        def generate(self, *args: Any, **options: Any) -> Any:
            return super().generate(*args, **options)._replace(logprobs=None)

    with pytest.raises(ValueError, match="needs the log-probabilities of the sampler, and Silent tells none"):
        ppo(Silent()).train(count_a)


def test_a_rollout_for_other_prompts_is_left():
    pending = Pending()
    pending.load_state_dict({"request": [[[1, 2]], 1, 7], "rollout": [[torch.tensor([3])], [True], None, None, 0]})
    assert pending.take(([[1, 3]], 1, 7)) is None
    rollout = pending.take(([[1, 2]], 1, 7))
    assert rollout is not None
    assert rollout.completions[0].tolist() == [3]
    assert pending.take(([[1, 2]], 1, 7)) is None
