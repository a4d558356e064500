"""Records the errors that users meet, to be read: each says what came, what is needed and how to fix it.

After an intended change, `python -m tests.generated.test_errors` writes errors.txt again; read its diff.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm import tiny
from tests.lm.data.test_tokenization import CHATML, byte_level

from trimtab_common.health import check_finite, check_rows
from trimtab_common.reward_checks import checked_scores
from trimtab_diffusion import DDPOConfig
from trimtab_diffusion.training.sampling import rewards_of
from trimtab_lm import PPOConfig
from trimtab_lm.data.formats import RowFormat, preference_parts, row_format
from trimtab_lm.data.tokenization import encode_messages, encode_prompt_completion, encode_text
from trimtab_lm.dpo.loss import check_losses
from trimtab_lm.rewards.functions import RewardSet
from trimtab_lm.sampling.generate import LengthSampler
from trimtab_lm.sampling.rollout import SamplingSettings

FILE = Path(__file__).with_name("errors.txt")


def rewarded(value: Any) -> Any:
    return RewardSet(lambda completions: value, names=["f"])(["p"] * 2, ["a", "b"], [[5], [6]])


def stepped(**changed: Any) -> Any:
    queries, responses, scores = tiny.batch()
    return tiny.ppo().step(**{"queries": queries, "responses": responses, "scores": scores, **changed})


def encoded(row: Any) -> Any:
    return encode_messages(byte_level(CHATML), row, assistant_only=True)


CALLS: dict[str, Callable[[], Any]] = {
    "RewardSet: f returns None": lambda: rewarded(None),
    "RewardSet: f returns 'ab'": lambda: rewarded("ab"),
    "RewardSet: f returns {'a': 1, 'b': 2}": lambda: rewarded({"a": 1, "b": 2}),
    "RewardSet: f returns [1.0]": lambda: rewarded([1.0]),
    "RewardSet: f returns [[1.0], [2.0]]": lambda: rewarded([[1.0], [2.0]]),
    "RewardSet: f returns [1.0, 2j]": lambda: rewarded([1.0, 2j]),
    "RewardSet: f returns [1.0, nan]": lambda: rewarded([1.0, float("nan")]),
    "RewardSet: f returns torch.zeros(2, 3)": lambda: rewarded(torch.zeros(2, 3)),
    "RewardSet: f returns [1.0, None]": lambda: rewarded([1.0, None]),
    "PPOTrainer.step(scores=['1', 2, 3, 4])": lambda: stepped(scores=["1", 2, 3, 4]),
    "PPOTrainer.step(scores=[0, inf, 0, nan])": lambda: stepped(scores=[0, float("inf"), 0, float("nan")]),
    "PPOTrainer.step(scores=torch.zeros(4))": lambda: stepped(scores=torch.zeros(4)),
    "PPOTrainer.step(responses=['a', 'b', 'c', 'd'])": lambda: stepped(responses=list("abcd")),
    "PPOTrainer.step(response_masks=[[1], [1], [1], [1]])": lambda: stepped(response_masks=[[1]] * 4),
    "DDPO: reward_function returns torch.zeros(3)": lambda: rewards_of(torch.zeros(3), ["a", "b"], "reward_function"),
    "DDPO: reward_function returns None": lambda: rewards_of(None, ["a", "b"], "reward_function"),
    "DDPO: reward_function returns [0.5, nan]": lambda: rewards_of([0.5, float("nan")], ["a", "b"], "reward_function"),
    "checked_scores of a generator without end": lambda: checked_scores(iter(int, 1), ["a"], source="What f returned"),
    "PPOConfig(batch_size='3')": lambda: PPOConfig(batch_size="3"),  # type: ignore[arg-type]
    "PPOConfig(batch_size=6, mini_batch_size=4)": lambda: PPOConfig(batch_size=6, mini_batch_size=4),
    "PPOConfig(learning_rate=nan)": lambda: PPOConfig(learning_rate=float("nan")),
    "DDPOConfig(estimator='reinforce')": lambda: DDPOConfig(estimator="reinforce"),
    "DDPOConfig(train_timestep_fraction=0.0)": lambda: DDPOConfig(train_timestep_fraction=0.0),
    "SamplingSettings(temperature=nan)": lambda: SamplingSettings(temperature=float("nan")),
    "SamplingSettings(top_p=0)": lambda: SamplingSettings(top_p=0),
    "LengthSampler(5, 5)": lambda: LengthSampler(5, 5),
    "check_losses('sigmoid', beta=0)": lambda: check_losses("sigmoid", beta=0, label_smoothing=0),
    "encode_text(None)": lambda: encode_text(byte_level(), None),  # type: ignore[arg-type]
    "encode_messages('Hello')": lambda: encoded("Hello"),
    "encode_messages([{'content': 'Hello'}])": lambda: encoded([{"content": "Hello"}]),
    "encode_messages of a user alone": lambda: encoded([{"role": "user", "content": "Hello"}]),
    "encode_prompt_completion('a', '')": lambda: encode_prompt_completion(byte_level(), "a", ""),
    "encode_prompt_completion('a', 5)": lambda: encode_prompt_completion(byte_level(), "a", 5),  # type: ignore[arg-type]
    "preference_parts of equal answers": lambda: preference_parts({"chosen": "a", "rejected": "a"}),
    "preference_parts of a text and a list": lambda: preference_parts({"chosen": "a", "rejected": []}),
    "row_format(['question'])": lambda: row_format(["question"], [RowFormat.PROMPT], needed_for="GRPO"),
    "a statistic that is NaN": lambda: check_finite({"loss": float("nan"), "kl": 1.0}),
    "a row that is NaN": lambda: check_rows({"logprobs": torch.tensor([[0.0], [torch.nan]])}, what="response"),
}


def message(name: str) -> str:
    """Returns the type and text of the error that a call raises."""
    with pytest.raises((ValueError, TypeError, ArithmeticError)) as caught:
        CALLS[name]()
    text = re.sub(r"0x[0-9a-f]+", "0x...", str(caught.value))
    return f"{caught.type.__name__}: {text}"


def record() -> str:
    """Returns all calls with their messages."""
    return "\n\n".join(f"{name}\n    {message(name)}" for name in CALLS) + "\n"


@pytest.mark.parametrize("name", CALLS)
def test_the_error_is_the_one_of_the_file(name: str) -> None:
    recorded = dict(entry.split("\n    ", 1) for entry in FILE.read_text(encoding="utf-8").strip().split("\n\n"))
    assert message(name) == recorded[name]
    assert recorded.keys() == CALLS.keys()


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
