"""Looking at a policy from outside: what it writes, and how far it is from the model it started as."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from experiments.runs import sampled
from trimtab_lm.sampling.generate import pad, response_texts
from trimtab_lm.tokens.logprobs import score_logits


def continued(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_new_tokens: int, seed: int
) -> tuple[list[torch.Tensor], list[str]]:
    """Continuations as token ids, and as texts with the space that stands before them."""
    rows = sampled(model, tokenizer, prompts, max_new_tokens=max_new_tokens, seed=seed)
    queries = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    return rows, response_texts(tokenizer, queries, rows)


@torch.no_grad()
def kl_of_samples(
    policy: Any, reference: Any, prompts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], *, batch_size: int = 32
) -> float:
    """Mean over sampled answers of log pi(answer) - log ref(answer): an estimate of the KL, in nats per response.

    policy, reference: causal models; prompts, rows: token ids [T_i], `rows` as `continued` gives them for `policy`.
    """
    was_training, _ = policy.training, policy.eval()
    gaps = []
    for start in range(0, len(rows), batch_size):
        pairs = list(zip(prompts[start : start + batch_size], rows[start : start + batch_size], strict=True))
        whole = [torch.cat([prompt.to(policy.device), row.to(policy.device)]) for prompt, row in pairs]
        ids, mask = pad(whole, 0)
        answer = mask[:, 1:].bool()
        for i, (prompt, _) in enumerate(pairs):
            answer[i, : len(prompt) - 1] = False
        policy_sum, reference_sum = (
            score_logits(model(input_ids=ids, attention_mask=mask).logits[:, :-1][answer], ids[:, 1:][answer])
            .logprobs.double()
            .sum()
            for model in (policy, reference)
        )
        gaps.append(float(policy_sum - reference_sum))
    policy.train(was_training)
    return sum(gaps) / len(rows)
