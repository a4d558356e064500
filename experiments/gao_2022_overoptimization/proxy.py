"""Proxy rewards, learnt from comparisons of the initial policy's samples that the gold score labels."""

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
    """A score with mean 0 and standard deviation 1 over `texts`."""

    def __init__(self, score: Score, texts: Sequence[str]):
        values = score(texts)
        self.score, self.mean, self.deviation = score, fmean(values), pstdev(values)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [(value - self.mean) / self.deviation for value in self.score(texts)]


class Proxy:
    """A linear score of the mean of a frozen language model's last hidden states.

    Args:
        trunk: The model without its language head.
        tokenizer: Its tokenizer.
        weight: [D].
    """

    def __init__(self, trunk: Any, tokenizer: Any, weight: Tensor):
        self.trunk, self.tokenizer, self.weight = trunk, tokenizer, weight

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return (text_states(self.trunk, self.tokenizer, texts) @ self.weight).tolist()


def text_states(trunk: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Returns the mean hidden state of each text with an end token, [N, D]. The end token makes no text empty."""
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
    """Minimizes sum -log s(score of the better - score of the worse) + penalty / 2 |weight|^2.

    Args:
        trunk: The model without its language head.
        tokenizer: Its tokenizer.
        pairs: Two lists of n texts, two answers to each prompt. The one with the higher gold score is the better.
        gold: The gold score.
        baseline: Unlabelled texts of the initial policy; inputs are scaled to variance 1 over them.
        penalty: The coefficient of the squared norm.
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
    """Returns gold and a proxy of `labels` comparisons, both normalised over `baseline` samples of `model`.

    An opening is repeated only if there are fewer openings than comparisons and samples.
    """
    shuffled = random.Random(seed).sample(list(openings), len(openings))
    prompts = [shuffled[i % len(shuffled)] for i in range(baseline + labels)]

    def answers(prompts: Sequence[str], offset: int) -> list[str]:
        return continued(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=3 * seed + offset)[1]

    initial = answers(prompts[:baseline], 0)
    pairs = (answers(prompts[baseline:], 1), answers(prompts[baseline:], 2))
    proxy = learn_proxy(model.base_model, tokenizer, pairs, gold, initial, penalty=penalty)
    print(
        f"proxy of {labels} comparisons: its correlation with gold over {baseline} other samples of the initial "
        f"policy is {correlation(proxy(initial), gold(initial)):.2f}",
        flush=True,
    )
    return Normalised(gold, initial), Normalised(proxy, initial)
