"""The probability of each line with which a model may answer a sum, without sampling.

A completion has a few tokens, and its first line ends at a new line, an end token or the last token. Its likely
beginnings are extended token by token. What prompts have in common is read once, and so is a prompt for all of its
beginnings.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from experiments.shao_2024_grpo.answers import first_line
from trimtab_lm.compat.generation import CACHE, cache_argument

LEAST = 2e-2  # probability of a beginning, below which it is dropped
LEAST_RIGHT = 1e-5  # the same for a beginning of the right answer


class Beginning(NamedTuple):
    """The first tokens of a completion: the sum that it answers, their text, and their probability."""

    row: int
    text: str
    probability: float


@torch.no_grad()
def line_probabilities(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
    answers: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    end_ids: Sequence[int],
    batch_size: int = 8,
) -> list[dict[str, float]]:
    """The probability of each first line, for completions that are sampled from the whole vocabulary.

    Beginnings less likely than LEAST are dropped, so that the probabilities of rare lines are missing; those of the
    right answer are kept down to LEAST_RIGHT.

    Args:
        model: A causal model.
        tokenizer: Its tokenizer, which joins the texts of tokens without adding anything.
        prompts: Token ids of P prompts, each [Q].
        answers: The right numbers, [P].
        max_tokens: The longest completion, in tokens.
        temperature: The temperature of sampling.
        end_ids: The tokens that end a completion.
        batch_size: Prompts whose completions are extended together.

    Returns:
        For each prompt, line -> probability, lines without spaces at their ends.
    """
    was_training, _ = model.training, model.eval()
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], skip_special_tokens=True)
    is_number = torch.tensor([bool(re.match(r"[\s\d]*(\n|$)", text)) for text in texts])
    least = torch.where(is_number, LEAST_RIGHT, LEAST)
    lines: list[dict[str, float]] = [{} for _ in prompts]
    for rows in batches_of_one_length(prompts, batch_size):
        begun = [Beginning(row, "", 1.0) for row in rows]
        ids, cache = read_shared(model, torch.stack([prompts[row] for row in rows]))
        for length in range(1, max_tokens + 1):
            conditional = (read(model, ids, cache)[:, : len(texts)] / temperature).softmax(-1)
            shares = torch.tensor([beginning.probability for beginning in begun])[:, None] * conditional
            grown, parents, tokens = [], [], []
            for parent, token in torch.nonzero(shares >= least).tolist():
                share, row, text = float(shares[parent, token]), begun[parent].row, begun[parent].text + texts[token]
                if token in end_ids or length == max_tokens or "\n" in text:
                    line = first_line(text)
                    lines[row][line] = lines[row].get(line, 0.0) + share
                elif share >= LEAST or is_beginning(text, str(answers[row])):
                    grown.append(Beginning(row, text, share))
                    parents.append(parent)
                    tokens.append(token)
            if not grown:
                break
            begun, ids = grown, torch.tensor(tokens)[:, None]
            cache.batch_select_indices(torch.tensor(parents, device=model.device))
    model.train(was_training)
    return lines


def batches_of_one_length(prompts: Sequence[Tensor], size: int) -> Iterator[list[int]]:
    """The indices of the prompts, in batches of at most `size` whose prompts are equally long."""
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    for _, group in groupby(by_length, key=lambda row: len(prompts[row])):
        rows = list(group)
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


def read_shared(model: Any, ids: Tensor) -> tuple[Tensor, DynamicCache]:
    """Reads the first tokens that all rows of ids [B, Q] share, but no row's last. Returns the other tokens, [B, T]."""
    cache, shared = DynamicCache(), int((ids == ids[0]).all(0).cumprod(0)[:-1].sum())
    if shared:
        read(model, ids[:1, :shared], cache)
        cache.batch_repeat_interleave(len(ids))
    return ids[:, shared:], cache


def read(model: Any, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Reads more tokens [B, T] into the cache. Returns the logits after the last, [B, V]."""
    named = {cache_argument(model.forward) or CACHE: cache}
    return model(ids.to(model.device), **named, use_cache=True, logits_to_keep=1).logits[:, -1].float().cpu()


def is_beginning(text: str, answer: str) -> bool:
    """Whether a line that begins with `text` may be the answer with spaces around it."""
    begun = text.strip()
    return begun in ("", answer) or (answer.startswith(begun) and text == text.rstrip())
