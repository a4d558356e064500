"""Samples of the initial policy with gold scores, and rewards learnt from choices among them."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.assets.registry import build_once, cache_dir
from experiments.evaluation import continued
from experiments.frozen import choice_regression, mean_states

Score = Callable[[Sequence[str]], list[float]]
FILE = "samples.safetensors"


class Samples(NamedTuple):
    """N samples of the initial policy for each of P prompts: gold scores [P, N], and mean states [P, N, D]."""

    golds: Tensor
    states: Tensor


@dataclass(frozen=True)
class Sampler:
    """Samples the initial policy and scores the samples by gold.

    Attributes:
        model: The initial policy, a causal model with hidden states of D dimensions.
        tokenizer: Its tokenizer.
        gold: The gold score of a text.
        max_new_tokens: Tokens of a sample at most.
        names: The names of the policy and of gold's encoder. They tell cached samples apart.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    gold: Score
    max_new_tokens: int
    names: tuple[str, str]

    def __call__(self, prompts: Sequence[str], count: int, *, seed: int) -> Samples:
        """Returns `count` samples of each prompt. They are cached, so that runs of one seed share them."""
        key = json.dumps([self.names, self.max_new_tokens, list(prompts), count, seed])
        name = f"scored-samples-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

        def build(folder: Path) -> None:
            save_file(self.sample(prompts, count, seed=seed)._asdict(), folder / FILE)

        doing = f"sampling {len(prompts)} x {count} continuations and scoring them"
        return Samples(**load_file(build_once(cache_dir() / "data" / name, build, doing) / FILE))

    def sample(self, prompts: Sequence[str], count: int, *, seed: int) -> Samples:
        """Samples anew."""
        repeated = [prompt for prompt in prompts for _ in range(count)]
        settings = {"max_new_tokens": self.max_new_tokens, "seed": seed}
        _, texts = continued(self.model, self.tokenizer, repeated, **settings)
        states = text_states(self.model.base_model, self.tokenizer, texts)
        shape = (len(prompts), count)
        return Samples(torch.tensor(self.gold(texts)).view(*shape), states.view(*shape, -1))


def shuffled(prompts: Sequence[str], seed: int, count: int) -> list[str]:
    """Returns `count` prompts in an order of the seed; repeats them only if there are fewer."""
    order = random.Random(seed).sample(list(prompts), len(prompts))
    return [order[i % len(order)] for i in range(count)]


class Proxy:
    """A linear score of the mean of a frozen language model's last hidden states.

    Args:
        trunk: The model without its language head.
        tokenizer: Its tokenizer.
        weight: [D].
        offset: Is subtracted from the score.
    """

    def __init__(self, trunk: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weight: Tensor, offset: float = 0.0):
        self.trunk, self.tokenizer, self.weight, self.offset = trunk, tokenizer, weight, offset

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return self.of_states(text_states(self.trunk, self.tokenizer, texts)).tolist()

    def of_states(self, states: Tensor) -> Tensor:
        """The scores of texts with these mean states, [..., D] -> [...]."""
        return states @ self.weight - self.offset


def text_states(trunk: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tensor:
    """Returns the mean hidden state of each text with an end token, [N, D]. The end token makes no text empty."""
    rows = tokenizer([text + str(tokenizer.eos_token) for text in texts])["input_ids"]
    return mean_states(trunk, [torch.tensor(ids) for ids in rows])


def learn_weight(samples: Samples, labels: int, *, penalty: float) -> Tensor:
    """Learns the weight of a proxy from the first `labels` choices, by `choice_regression`.

    A choice is the sample with the highest gold score of its prompt. The penalty is on the weight of states that are
    scaled to variance 1.

    Args:
        samples: N samples of each of P prompts. All of their states scale the inputs; gold labels the first `labels`
            prompts alone.
        labels: The number of choices, 1 to P.
        penalty: The coefficient of the squared norm.

    Returns:
        [D], with which the scores of all samples have variance 1.
    """
    golds, states = samples.golds[:labels], samples.states[:labels]
    is_chosen = golds.argmax(1, keepdim=True) == torch.arange(golds.shape[1])
    others = states[~is_chosen].view(labels, -1, states.shape[2])
    deviation = samples.states.flatten(0, 1).std(0)
    weight = choice_regression((states[is_chosen][:, None] - others) / deviation, penalty=penalty) / deviation
    return weight / (samples.states @ weight).std()


def learn_proxy(sampler: Sampler, samples: Samples, labels: int, *, penalty: float) -> Proxy:
    """The proxy that `learn_weight` learns from the sampler's samples; over them its mean is 0 and its deviation 1."""
    weight = learn_weight(samples, labels, penalty=penalty)
    return Proxy(sampler.model.base_model, sampler.tokenizer, weight, float((samples.states @ weight).mean()))


class Normalised:
    """A score in deviations of `values`, with 0 at their mean."""

    def __init__(self, score: Score, values: Sequence[float]):
        self.score, self.mean, self.deviation = score, fmean(values), pstdev(values)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [(value - self.mean) / self.deviation for value in self.score(texts)]
