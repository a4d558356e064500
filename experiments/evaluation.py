"""Measures of a policy: what it writes, and its KL divergence from the model that training began with."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from experiments.run_folders import sampled
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.tokens.layout import pad
from trimtab_lm.tokens.logprobs import LanguageHead, exact_kl
from trimtab_lm.tokens.scores import TokenScores


def continued(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_new_tokens: int, seed: int
) -> tuple[list[torch.Tensor], list[str]]:
    """Samples a continuation of each prompt: token ids, and texts that keep their leading space."""
    rows = sampled(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=seed)
    queries = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    return rows, response_texts(tokenizer, queries, rows)


def kl_of_samples(
    policy: Any, reference: Any, prompts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], *, batch_size: int = 32
) -> float:
    """Estimates the KL divergence KL(policy | reference) from samples of the policy, in nats per response.

    It is the mean over answers of the sum over steps of KL(policy(. | prefix) | reference(. | prefix)), each exact over
    the vocabulary: the Rao-Blackwellised estimator of Amini et al. 2025, arXiv:2504.10637. Its expectation is that of
    the mean log-ratio of the sampled tokens; its variance is never larger, and it is never negative.

    Args:
        policy: A causal model.
        reference: A causal model with the same vocabulary.
        prompts: Token ids, each [Q].
        rows: The policy's answers as token ids, each [R].
        batch_size: Answers per forward pass.
    """
    sums: list[float] = []
    sides = (_scores(model, prompts, rows, batch_size, needs_read=True) for model in (policy, reference))
    for (head, ours, lengths), (ref_head, theirs, _) in zip(*sides, strict=True):
        kls = exact_kl(head.logits, ours.read, ref_head.logits, theirs.read, vocab_size=head.config.vocab_size)
        sums += [float(row.sum()) for row in kls.double().split(lengths)]
    return fmean(sums)


def answer_logprobs(
    model: Any, prompts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], *, batch_size: int = 32
) -> list[float]:
    """The log-probability of each answer under a model, in nats.

    Args:
        model: A causal model.
        prompts: Token ids, each [Q].
        rows: The answers as token ids, each [R].
        batch_size: Answers per forward pass.
    """
    sums: list[float] = []
    for _, scores, lengths in _scores(model, prompts, rows, batch_size):
        sums += [float(row.sum()) for row in scores.logprobs.double().split(lengths)]
    return sums


def _scores(
    model: Any,
    prompts: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    batch_size: int,
    *,
    needs_read: bool = False,
) -> Iterator[tuple[LanguageHead, TokenScores, list[int]]]:
    """For each batch of answers: the head, the scores of their tokens in a row, and the answers' lengths."""
    was_training, _ = model.training, model.eval()
    head = LanguageHead(model)
    for start in range(0, len(rows), batch_size):
        pairs = list(zip(prompts[start : start + batch_size], rows[start : start + batch_size], strict=True))
        whole = [torch.cat([prompt.to(model.device), row.to(model.device)]) for prompt, row in pairs]
        ids, mask = pad(whole, 0)
        answer = mask[:, 1:].bool()
        for i, (prompt, _) in enumerate(pairs):
            answer[i, : len(prompt) - 1] = False
        source = functional.pad(answer, (0, 1)).flatten().nonzero()[:, 0]  # the places that predict the answer's tokens
        tokens = {"source": source, "targets": ids[:, 1:][answer], "input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            scores = head.score(tokens, needs_read=needs_read)
        yield head, scores, answer.sum(1).tolist()
    model.train(was_training)
