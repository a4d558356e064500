"""What RAFT and PPO are compared by besides the reward, as in the paper's table: fluency and diversity."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from experiments.evaluation import answer_logprobs
from experiments.run_folders import close_folder, finished_run, write_per_prompt

NATS, DISTINCT = "nats_per_token", "distinct_2"


def nats_per_token(
    reference: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], rows: Sequence[torch.Tensor]
) -> list[float]:
    """The mean of -log reference(token) over the tokens of each answer; its exponential is the perplexity."""
    ids = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    return [-total / len(row) for total, row in zip(answer_logprobs(reference, ids, rows), rows, strict=True)]


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct-n (Li et al. 2016, arXiv:1510.03055): distinct n-grams of words over all n-grams, in all texts together.

    It falls with the number of texts. Compare numbers of equally many texts only.
    """
    words = [text.lower().split() for text in texts]
    grams = [tuple(row[i : i + n]) for row in words for i in range(len(row) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def add_results(folder: Path, *, per_prompt: Mapping[str, Sequence[float]], summary: Mapping[str, float]) -> None:
    """Adds per-prompt numbers and results to a finished run's."""
    run = finished_run(folder)
    write_per_prompt(folder, {**run.per_prompt, **per_prompt})
    close_folder(folder, {**run.summary, **summary})
