"""Environments and a scripted sampler, for tests of conversations."""

from collections.abc import Sequence
from typing import Any

import torch
from tests.lm import tiny
from torch import Tensor

from trimtab_lm.environments import EnvironmentRollout, Reply
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import Rollout, SamplingSettings, require_version


def ids_of(text: str) -> list[int]:
    return tiny.tokenizer()(text)["input_ids"]


def tensor_of(text: str) -> Tensor:
    return torch.tensor(ids_of(text))


class Echo:
    """Repeats what it hears for a few turns; each turn's reward is its number of tokens."""

    def __init__(self, turns: int = 3):
        self.turns = turns

    def reset(self) -> None:
        self.heard: list[str] = []

    def step(self, text: str, ids: list[int]) -> Reply:
        self.heard.append(text)
        return Reply(f"{text}.", reward=len(ids), done=len(self.heard) == self.turns)


class Script:
    """A backend with scripted turns, chosen by the preceding text; "." ends a turn by itself."""

    def __init__(self, turns: dict[str, list[str]], limit: int = 4):
        self.turns, self.settings, self.version = turns, SamplingSettings(limit), None

    def sync(self, model: Any, version: int) -> None:
        self.version = version

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        texts = [text for prompt in prompts for text in self.turns[tiny.tokenizer().decode(prompt)][:num_generations]]
        completions = [tensor_of(text) for text in texts]
        logprobs = [-1.0 - torch.arange(float(len(ids))) for ids in completions]
        return Rollout(completions, [text.endswith(".") for text in texts], logprobs)


def sampler(limit: int = 4, temperature: float = 1.0, **settings: Any) -> TransformersRollout:
    return TransformersRollout(SamplingSettings(limit, temperature, **settings), tiny.tokenizer(), batch_size=64)


def rollout(backend: Any, environment: Any = Echo, **options: Any) -> EnvironmentRollout:
    return EnvironmentRollout(backend, environment, tiny.tokenizer(), **{"max_completion_length": 48, **options})
