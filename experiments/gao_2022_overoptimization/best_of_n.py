"""Best-of-n sampling with many proxies, on one bank of scored samples and without training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.best_of import expected_best_of, kl_of_best, powers
from experiments.proxy import Samples, learn_weight

FILE = "best_of_n.json"


@dataclass(frozen=True)
class Curve:
    """Best-of-n with the proxy of one number of labels.

    Attributes:
        labels: The comparisons that the proxy was learnt from.
        correlation: Of proxy and gold over the bank, the prompts' means taken out.
        ns: The values of n, ascending from 1.
        gold: For each prompt and n, how much gold the best of n gains on the mean sample, in deviations. [P, len(ns)]
        proxy: The same for the proxy.
    """

    labels: int
    correlation: float
    ns: Sequence[int]
    gold: Sequence[Sequence[float]]
    proxy: Sequence[Sequence[float]]

    @property
    def distances(self) -> list[float]:
        """The root of the KL in nats for each n."""
        return [kl_of_best(n) ** 0.5 for n in self.ns]

    def mean(self, name: str) -> list[float]:
        """The mean of gold or proxy over the prompts for each n."""
        rows: Sequence[Sequence[float]] = getattr(self, name)
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def best_of_n(bank: Samples, pairs: Samples, labels: Sequence[int], *, penalty: float) -> list[Curve]:
    """Computes for each number of labels the gains of the best of 1, 2, 4, ... by the proxy.

    Args:
        bank: Many samples of each of P prompts.
        pairs: Comparisons. A proxy of fewer labels learns from the first of them.
        labels: Numbers of labels.
        penalty: See `learn_weight`.
    """
    ns = powers(bank.golds.shape[1])
    curves = []
    for number in labels:
        weight = learn_weight(pairs, number, penalty=penalty)
        golds = centred(bank.golds) / pairs.golds.std()
        proxies = centred(bank.states @ weight)  # already in deviations of the pairs' scores
        ranked = proxies.argsort(1, descending=True)
        gains = [
            [[expected_best_of(row, n) for n in ns] for row in scores.gather(1, ranked).tolist()]
            for scores in (golds, proxies)
        ]
        correlation = torch.corrcoef(torch.stack([golds.flatten(), proxies.flatten()]))[0, 1]
        curves.append(Curve(number, float(correlation), ns, *gains))
    return curves


def centred(scores: torch.Tensor) -> torch.Tensor:
    """Subtracts each prompt's mean, [P, N]."""
    return scores - scores.mean(1, keepdim=True)


def write(folder: Path, curves: Sequence[Curve]) -> None:
    """Writes the curves into a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps([asdict(curve) for curve in curves]) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Curve]:
    """Reads the curves from a run's folder."""
    rows: list[Mapping[str, Any]] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return [Curve(**row) for row in rows]
