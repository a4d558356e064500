"""A sampler that replaces an engine in another process: it has a copy of a GPT-2, and its own random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.lm import tiny
from torch import Tensor

from trimtab_lm.sampling.rollout import Rollout, SamplingSettings, require_version


class Elsewhere:
    """Samples token by token from the weights received last, and returns each token's log-probability.

    Args:
        limit: number of tokens per completion.
        before: function called with each rollout's number before sampling.
    """

    is_remote = True

    def __init__(self, limit: int = 4, before: Callable[[int], object] | None = None):
        self.settings, self.before = SamplingSettings(limit), before or (lambda number: None)
        self.versions: list[int] = []  # one per rollout
        self.policies: list[Any] = []  # one copy per change of the weights
        self.version: int | None = None
        self.is_sampling = False

    def sync(self, model: Any, version: int) -> None:
        assert not self.is_sampling, "the weights changed in the middle of a rollout"
        if self.version != version:
            policy = tiny.gpt2(dtype=model.dtype).eval()  # a deep copy would run the trainer's model
            policy.load_state_dict(model.state_dict())
            self.policies.append(policy)
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        self.is_sampling, policy = True, self.policies[-1]
        self.versions.append(version)
        self.before(len(self.versions) - 1)
        generator = torch.Generator().manual_seed(seed % 2**63)
        completions, logprobs = [], []
        for prompt in prompts:
            for _ in range(num_generations):
                row = prompt
                for _ in range(self.settings.max_completion_length):
                    probabilities = policy(input_ids=row[None]).logits[0, -1].softmax(-1)
                    row = torch.cat([row, probabilities.multinomial(1, generator=generator)])
                completions.append(row[len(prompt) :])
                logprobs.append(tiny.taken_of(policy, prompt, completions[-1]))
        self.is_sampling = False
        return Rollout(completions, [False] * len(completions), logprobs)
