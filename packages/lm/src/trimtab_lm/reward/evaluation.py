"""What is logged of scored pairs: documented statistics, and a table of an evaluation's first pairs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedTokenizerBase, Trainer

from trimtab_lm.hf.tracking import Tables

from .collator import sequences
from .loss import accuracy, calibration


def pair_statistics(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """The documented statistics of pairs, from the columns `chosen`, `rejected` and `loss`; none without pairs."""
    if not columns:
        return {}
    chosen, rejected = columns["chosen"], columns["rejected"]
    means = {
        "accuracy": accuracy(chosen, rejected),
        "scores/margin": chosen - rejected,
        "scores/chosen": chosen,
        "scores/rejected": rejected,
        "loss": columns["loss"],
    }
    statistics = {name: float(values.double().mean()) for name, values in means.items()}
    return statistics | {"calibration_error": float(calibration(chosen, rejected))}


class PairTable:
    """The first pairs of an evaluation with their scores, until a table of the trackers shows them."""

    def __init__(self, most: int) -> None:
        self.most, self.name = most, "eval_pairs"
        self.rows: list[list[object]] = []

    def add(self, rows: Mapping[str, Tensor], scores: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep the pairs of a batch of `pair_rows`, with their scores [B, 2], as far as there is room."""
        missing = self.most - len(self.rows)
        if missing <= 0:
            return
        texts = [tokenizer.decode(ids) for ids in sequences(rows, 2 * missing)]
        pairs = zip(texts[::2], texts[1::2], scores.tolist(), strict=False)
        self.rows += [[chosen, rejected, *values] for chosen, rejected, values in pairs]

    def show(self, trainer: Trainer, tables: Tables, most: int) -> None:
        """Put the first `most` pairs into a table."""
        tables.add(trainer, self.name, ("chosen", "rejected", "score of chosen", "score of rejected"), self.rows[:most])

    @contextmanager
    def at_most(self, most: int) -> Iterator[None]:
        """Keep so many pairs inside the block, and none after it."""
        before, self.most = self.most, most
        try:
            yield
        finally:
            self.most, self.rows = before, []
