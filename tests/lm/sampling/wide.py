"""What vLLM's tests share: models with heads of 64, because its attention cannot use the tiny models' heads."""

from pathlib import Path
from typing import Any

import torch
from tests.lm import tiny
from transformers import LlamaForCausalLM

from trimtab_lm.sampling.rollout import RolloutBackend

LENGTH = 64
PROMPTS = tiny.rows(3, 2, 6)
SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2, "initializer_range": 0.1}


def llama(seed: int = 0, **settings: Any) -> Any:
    return tiny.llama(seed, **{**SIZES, "max_position_embeddings": LENGTH, **settings}).eval()


def saved(folder: Path, **settings: Any) -> str:
    """Saves a policy and its tokenizer for an engine, and returns the folder."""
    llama(**settings).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def loaded(folder: str) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_samples_are_the_policys(rollouts: RolloutBackend, policy: Any, *, temperature: float) -> None:
    """Asserts three times that the sampler's probabilities equal the policy's, and changes the weights in between."""
    for version in range(3):
        rollouts.sync(policy, version)
        rollout = rollouts.generate(PROMPTS, num_generations=4, version=version, seed=version)
        each = ratios(policy, rollout, 4, temperature)
        torch.testing.assert_close(each, torch.ones_like(each), rtol=0, atol=1e-3)
        assert rollout.ended == [int(row[-1]) == tiny.EOS for row in rollout.completions]
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def assert_greedy_completions_follow_the_policy(rollouts: RolloutBackend, *, limit: int) -> None:
    """Asserts that a greedy sampler completes as the policy does, before and after a change of weights."""
    policy, answers = llama(seed=3), []
    for version in range(2):
        rollouts.sync(policy, version)
        rows = rollouts.generate(PROMPTS, num_generations=1, version=version, seed=0).completions
        answers.append([row.tolist() for row in rows])
        assert answers[-1] == greedy(policy, limit)
        policy.lm_head.weight.neg_()
    assert answers[0] != answers[1]


def ratios(model: Any, rollout: Any, generations: int, temperature: float) -> torch.Tensor:
    """Returns pi_trainer / pi_sampler for every sampled token."""
    gaps = []
    for i, (row, logprobs) in enumerate(zip(rollout.completions, rollout.logprobs, strict=True)):
        gaps.append(tiny.taken_of(model, PROMPTS[i // generations], row, temperature) - logprobs)
    return torch.cat(gaps).exp()


def greedy(model: Any, limit: int) -> list[list[int]]:
    """Returns the most likely completions of the prompts, from plain forward passes."""
    answers = []
    for prompt in PROMPTS:
        row = prompt
        while len(row) < len(prompt) + limit and (len(row) == len(prompt) or int(row[-1]) != tiny.EOS):
            row = torch.cat([row, model(input_ids=row[None]).logits[0, -1].argmax()[None]])
        answers.append(row[len(prompt) :].tolist())
    return answers
