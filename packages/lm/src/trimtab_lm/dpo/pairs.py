"""Batches of preference pairs: as tokens to score, their scores, and the statistics of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab_common.stats import Mean
from trimtab_lm.tokens.layout import from_labels, sum_per_sequence, token_columns
from trimtab_lm.tokens.scores import Scores, TokenScores, score_logits

from .collator import SIDES


class PairScores(NamedTuple):
    """Of the answers of B pairs, all [B]: log-probabilities and entropies in nats, summed over the tokens that count,
    and the number of those; and the loss of a mixture of experts' router, a scalar."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_entropy: Tensor
    rejected_entropy: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    router_loss: Tensor = torch.zeros(())

    @classmethod
    def of(cls, scores: Scores, tokens: Mapping[str, Tensor]) -> "PairScores":
        """From the scores of the tokens of `tokens_to_score`."""
        lengths = tokens["lengths"]
        sums = (sum_per_sequence(x, tokens["sequence"], len(lengths)) for x in scores[:2])
        sides = (side for x in (*sums, lengths) for side in x.view(-1, 2).unbind(1))
        pairs = cls(*sides)
        return pairs if isinstance(scores, TokenScores) else pairs._replace(router_loss=scores.router_loss)


class PairLogits(NamedTuple):
    """Of the answers of B pairs: log-probabilities [B], and logits [B, T, V] of their rows."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits: Tensor
    rejected_logits: Tensor


def is_laid_out(batch: Mapping[str, Tensor]) -> bool:
    """Whether a batch is of `PreferencePairCollator`, and not of padded columns."""
    return "sequence" in batch


def count_pairs(batch: Mapping[str, Tensor]) -> int:
    return len(batch["lengths"]) // 2 if is_laid_out(batch) else len(batch["chosen_labels"])


def concatenated_inputs(
    batch: Mapping[str, Tensor],
    is_encoder_decoder: bool = False,
    label_pad_token_id: int = -100,
    padding_value: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Padded columns of B pairs as rows of one batch: B chosen answers, then B rejected ones.

    Returns `concatenated_input_ids`, `concatenated_attention_mask` and `concatenated_labels`, each [2B, T] with a T of
    its own; of an encoder-decoder model the first two are those of the prompts, twice.
    """
    padding = {"labels": label_pad_token_id}
    joined = {}
    if is_encoder_decoder:
        for name in ("input_ids", "attention_mask"):
            joined[f"concatenated_{name}"] = batch[f"prompt_{name}"].repeat(2, 1).to(device)
    else:
        padding |= {"input_ids": padding_value, "attention_mask": 0}
    for name, value in padding.items():
        sides = [batch[f"{side}_{name}"] for side in SIDES]
        width = max(side.shape[1] for side in sides)
        rows = [F.pad(side, (0, width - side.shape[1]), value=value) for side in sides]
        joined[f"concatenated_{name}"] = torch.cat(rows).to(device)
    return joined


def tokens_to_score(
    batch: Mapping[str, Tensor],
    *,
    is_encoder_decoder: bool,
    label_pad_token_id: int,
    padding_value: int,
    decoder_start_token_id: int | None = None,
) -> dict[str, Tensor]:
    """A batch as `model(tokens=...)` takes it: sequence 2i is the chosen answer of pair i, 2i + 1 its rejected one."""
    if is_laid_out(batch):
        return token_columns(dict(batch))
    joined = concatenated_inputs(
        batch,
        is_encoder_decoder=is_encoder_decoder,
        label_pad_token_id=label_pad_token_id,
        padding_value=padding_value,
    )
    labels = joined["concatenated_labels"]
    labels = labels.masked_fill(labels == label_pad_token_id, -100)
    tokens = from_labels(labels, is_encoder_decoder=is_encoder_decoder)
    check_lengths(tokens["lengths"])
    count = len(labels) // 2
    tokens["sequence"] = tokens["sequence"] % count * 2 + tokens["sequence"] // count
    tokens["lengths"] = tokens["lengths"].view(2, count).T.flatten()
    tokens |= {name: joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
    if is_encoder_decoder:
        tokens |= decoder_inputs(labels, start=cast(int, decoder_start_token_id), padding_value=padding_value)
    return tokens


def check_lengths(lengths: Tensor) -> None:
    """Raise ValueError for an answer without a token that counts; lengths: all chosen answers', then all rejected."""
    if not bool(lengths.all()):
        raise ValueError(
            f"Answers of this batch have {lengths.tolist()} labels that count (all chosen, then all "
            "rejected), and each needs one. Drop such pairs, or fix data_collator."
        )


def decoder_inputs(labels: Tensor, *, start: int, padding_value: int) -> dict[str, Tensor]:
    """What a decoder reads for labels [B, T], -100 where there is none: the token before each."""
    read = F.pad(labels, (1, 0), value=start)[:, :-1]
    return {
        "decoder_input_ids": read.masked_fill(read == -100, padding_value),
        "decoder_attention_mask": F.pad((labels != -100).long(), (1, 0), value=1)[:, :-1],
    }


def get_batch_logps(
    logits: Tensor,
    labels: Tensor,
    average_log_prob: bool = False,
    label_pad_token_id: int = -100,
    is_encoder_decoder: bool = False,
) -> Tensor:
    """Log-probabilities of labels [B, T] under logits [B, T, V], summed over each row, or averaged: [B].

    A decoder's label is predicted by the position before it, an encoder-decoder's by its own.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {list(logits.shape)} and labels {list(labels.shape)} differ in rows or positions.")
    labels = labels.masked_fill(labels == label_pad_token_id, -100)
    tokens = from_labels(labels, is_encoder_decoder=is_encoder_decoder)
    logprobs = score_logits(logits.flatten(0, 1)[tokens["source"]], tokens["targets"]).logprobs
    sums = sum_per_sequence(logprobs, tokens["sequence"], len(labels))
    return sums / tokens["lengths"] if average_log_prob else sums


def pair_statistics(
    scores: Sequence[Tensor],
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    count: int | None = None,
) -> dict[str, Mean]:
    """The documented statistics of the first `count` of B pairs, by default of all, and their loss.

    Losses and rewards are [B]. A tie of rewards is no success. scores: `PairScores`, whose `entropy/*` are per token;
    or log-probabilities and logits, which give `logits/*`, the means of all logits, as in 2024.
    """
    per_pair = {
        "loss": losses,
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).to(losses.dtype),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": scores[0],
        "logps/rejected": scores[1],
    }
    means = {name: Mean.of(values[:count]) for name, values in per_pair.items()}
    if not isinstance(scores, PairScores):
        named = zip(SIDES, scores[2:4], strict=False)  # a replaced method may return nothing else
        return means | {f"logits/{side}": Mean.of(x[:count]) for side, x in named if isinstance(x, Tensor)}
    per_token = {
        "entropy/chosen": (scores.chosen_entropy, scores.chosen_length),
        "entropy/rejected": (scores.rejected_entropy, scores.rejected_length),
    }
    return means | {
        name: Mean(sums[:count].detach().sum(), counts[:count].sum()) for name, (sums, counts) in per_token.items()
    }
