"""Samples of the initial policy with gold scores, and the proxies that are learnt from comparisons of them."""

import hashlib
import json
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
from experiments.frozen import logistic_regression, mean_states

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
        name = f"gao-samples-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

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


def learn_weight(pairs: Samples, labels: int, *, penalty: float) -> Tensor:
    """Learns the weight of a proxy from the first `labels` comparisons.

    It minimizes sum -log s(score of the better - score of the worse) + penalty / 2 |w|^2, where w is the weight on
    states that are scaled to variance 1. The better answer is the one with the higher gold score.

    Args:
        pairs: Two samples of each prompt. All of their states scale the inputs; gold labels the first `labels` alone.
        labels: The number of comparisons, at most the number of prompts.
        penalty: The coefficient of the squared norm.

    Returns:
        [D], with which the scores of all samples in `pairs` have variance 1.

    Raises:
        ValueError: There are fewer than `labels` comparisons.
    """
    if not 1 <= labels <= len(pairs.golds):
        raise ValueError(
            f"a proxy of {labels} comparisons was asked for, of the {len(pairs.golds)} that exist. Raise "
            "`comparisons`, or lower `labels` and `bank_labels`."
        )
    deviation = pairs.states.flatten(0, 1).std(0)
    better = pairs.golds[:labels, 0] > pairs.golds[:labels, 1]
    gaps = (pairs.states[:labels, 0] - pairs.states[:labels, 1]) / deviation
    scaled, _ = logistic_regression(gaps, better, penalty=penalty, bias=False)
    weight = scaled / deviation
    return weight / (pairs.states @ weight).std()


class Normalised:
    """A score in deviations of `values`, with 0 at their mean."""

    def __init__(self, score: Score, values: Sequence[float]):
        self.score, self.mean, self.deviation = score, fmean(values), pstdev(values)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [(value - self.mean) / self.deviation for value in self.score(texts)]
