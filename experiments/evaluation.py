"""Measures of a policy: what it writes, and its KL divergence from the model that training began with."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from experiments.run_folders import sampled
from trimtab_lm.sampling.generate import pad, response_texts
from trimtab_lm.tokens.logprobs import LanguageHead


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

    Args:
        policy: A causal model.
        reference: A causal model.
        prompts: Token ids, each [Q].
        rows: The policy's answers as token ids, each [R].
        batch_size: Answers per forward pass.

    Returns:
        The mean of log policy(answer) - log reference(answer) over the answers.
    """
    policy_sums, reference_sums = (
        answer_logprobs(model, prompts, rows, batch_size=batch_size) for model in (policy, reference)
    )
    return fmean(ours - theirs for ours, theirs in zip(policy_sums, reference_sums, strict=True))


@torch.no_grad()
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
    was_training, _ = model.training, model.eval()
    head, sums = LanguageHead(model), []
    for start in range(0, len(rows), batch_size):
        pairs = list(zip(prompts[start : start + batch_size], rows[start : start + batch_size], strict=True))
        whole = [torch.cat([prompt.to(model.device), row.to(model.device)]) for prompt, row in pairs]
        ids, mask = pad(whole, 0)
        answer = mask[:, 1:].bool()
        for i, (prompt, _) in enumerate(pairs):
            answer[i, : len(prompt) - 1] = False
        source = functional.pad(answer, (0, 1)).flatten().nonzero()[:, 0]  # the places that predict the answer's tokens
        scores = head.score({"source": source, "targets": ids[:, 1:][answer], "input_ids": ids, "attention_mask": mask})
        sums += [float(row.sum()) for row in scores.logprobs.double().split(answer.sum(1).tolist())]
    model.train(was_training)
    return sums
