"""The probability that a model answers a sum rightly, without sampling.

A completion of a few tokens is right in few ways: the answer's digits, spaces around them, and then a new line, an end
token or the last token. All prefixes of such completions are scored, level by level.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from experiments.evaluation import next_logprobs
from experiments.shao_2024_grpo.answers import right

LEAST = 1e-5  # probability of a prefix, below which it is dropped


class Prefix(NamedTuple):
    """The beginning of a completion: the sum that it answers, its tokens, their text, and its probability."""

    row: int
    ids: tuple[int, ...]
    text: str
    probability: float


def probability_of_right(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
    answers: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    end_ids: Sequence[int],
    batch_size: int = 64,
) -> list[float]:
    """The probability of each answer under `answers.right`, for completions that are sampled from the whole vocabulary.

    Prefixes less likely than LEAST are dropped, so that a result may be too small by LEAST for each of them.

    Args:
        model: A causal model.
        tokenizer: Its tokenizer, which joins the texts of tokens without adding anything.
        prompts: Token ids of P prompts, each [Q].
        answers: The right numbers, [P].
        max_tokens: The longest completion, in tokens.
        temperature: The temperature of sampling.
        end_ids: The tokens that end a completion.
        batch_size: Prefixes per forward pass.
    """
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], skip_special_tokens=True)
    pieces = {i: text for i, text in enumerate(texts) if i in end_ids or re.match(r"[\s\d]*(\n|$)", text)}
    rights, prefixes = [0.0] * len(prompts), [Prefix(row, (), "", 1.0) for row in range(len(prompts))]
    candidates = torch.tensor(list(pieces))
    for length in range(1, max_tokens + 1):
        grown: list[Prefix] = []
        for start in range(0, len(prefixes), batch_size):
            batch = prefixes[start : start + batch_size]
            rows = [torch.cat([prompts[prefix.row], torch.tensor(prefix.ids, dtype=torch.long)]) for prefix in batch]
            shares = next_logprobs(model, rows, temperature=temperature)[:, candidates].double().exp()
            for prefix, of_tokens in zip(batch, shares.tolist(), strict=True):
                for token, conditional in zip(pieces, of_tokens, strict=True):
                    share = prefix.probability * conditional
                    text, answer = prefix.text + pieces[token], answers[prefix.row]
                    if token in end_ids or length == max_tokens or "\n" in text:
                        rights[prefix.row] += share * right([text], [answer])[0]
                    elif share >= LEAST and is_beginning(text, str(answer)):
                        grown.append(Prefix(prefix.row, (*prefix.ids, token), text, share))
        prefixes = grown
    return rights


def is_beginning(text: str, answer: str) -> bool:
    """Whether a line that begins with `text` may be the answer with spaces around it."""
    begun = text.strip()
    return begun in ("", answer) or (answer.startswith(begun) and text == text.rstrip())
