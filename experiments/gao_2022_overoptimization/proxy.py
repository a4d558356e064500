"""Proxy rewards: learnt from comparisons of the initial policy's samples, of which the gold score says the better."""

import random
from collections.abc import Callable, Sequence
from statistics import correlation, fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from experiments.evaluation import continued
from experiments.gao_2022_overoptimization.gold import logistic_regression, mean_states

Score = Callable[[Sequence[str]], list[float]]


class Normalised:
    """A score in units of its deviation over `texts`, where its mean is 0."""

    def __init__(self, score: Score, texts: Sequence[str]):
        values = score(texts)
        self.score, self.mean, self.deviation = score, fmean(values), pstdev(values)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [(value - self.mean) / self.deviation for value in self.score(texts)]


class Proxy:
    """A linear score of the mean of a frozen language model's last hidden states.

    trunk: the model without its language head. weight: [D].
    """

    def __init__(self, trunk: Any, tokenizer: Any, weight: Tensor):
        self.trunk, self.tokenizer, self.weight = trunk, tokenizer, weight

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return (text_states(self.trunk, self.tokenizer, texts) @ self.weight).tolist()


def text_states(trunk: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The mean hidden state of each text followed by an end token, which makes no text empty; [N, D]."""
    rows = tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"]
    return mean_states(trunk, [torch.tensor(ids) for ids in rows])


def learn_proxy(
    trunk: Any,
    tokenizer: Any,
    pairs: tuple[Sequence[str], Sequence[str]],
    gold: Score,
    baseline: Sequence[str],
    *,
    penalty: float,
) -> Proxy:
    """The head at the minimum of sum -log s(score of the better - score of the worse) + penalty / 2 |weight|^2.

    pairs: [n] and [n] texts, two answers to each prompt, of which gold's higher one counts as better, without noise.
    The penalty is on inputs of variance 1, over `baseline`, texts of the initial policy that nobody labels.
    """
    first, second = (text_states(trunk, tokenizer, texts) for texts in pairs)
    better = torch.tensor(gold(pairs[0])) > torch.tensor(gold(pairs[1]))
    deviation = text_states(trunk, tokenizer, baseline).std(0)
    weight, _ = logistic_regression((first - second) / deviation, better, penalty=penalty, bias=False)
    return Proxy(trunk, tokenizer, weight / deviation)


def gold_and_proxy(
    model: Any,
    tokenizer: Any,
    gold: Score,
    openings: Sequence[str],
    *,
    labels: int,
    baseline: int,
    penalty: float,
    max_new_tokens: int,
    seed: int,
) -> tuple[Normalised, Normalised]:
    """Gold, and a proxy of `labels` comparisons, both in units of their deviation over `baseline` samples of `model`.

    openings: each is used again only where there are fewer than comparisons and samples.
    """
    shuffled = random.Random(seed).sample(list(openings), len(openings))
    prompts = [shuffled[i % len(shuffled)] for i in range(baseline + labels)]

    def written(prompts: Sequence[str], offset: int) -> list[str]:
        return continued(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=3 * seed + offset)[1]

    initial = written(prompts[:baseline], 0)
    pairs = (written(prompts[baseline:], 1), written(prompts[baseline:], 2))
    proxy = learn_proxy(model.base_model, tokenizer, pairs, gold, initial, penalty=penalty)
    print(
        f"proxy of {labels} comparisons: its correlation with gold over {baseline} other samples of the initial "
        f"policy is {correlation(proxy(initial), gold(initial)):.2f}",
        flush=True,
    )
    return Normalised(gold, initial), Normalised(proxy, initial)
