"""The gold score: how much a text sounds like a review that likes its film, in the words of a person.

Reviews with people's labels, and the same reviews garbled, which nobody likes: without those a sentence encoder takes
a list of lovely words for a lovely text, and no proxy could be exploited by writing one.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from experiments.assets import imdb_reviews, sentence_encoder
from experiments.assets.registry import build_once, cache_dir
from trimtab_lm.sampling.generate import pad

WORDS = 24  # of a review that are read: a continuation is about as long
TRAIN, TEST = 1200, 300  # reviews to learn from, and others


class Gold:
    """Logistic regression on a frozen sentence encoder's vectors; a text's score is its logit, without bounds.

    weight: [D]; bias: a scalar.
    """

    def __init__(self, encoder: Any, tokenizer: Any, weight: Tensor, bias: Tensor):
        self.encoder, self.tokenizer, self.weight, self.bias = encoder, tokenizer, weight, bias

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return (sentence_vectors(self.encoder, self.tokenizer, texts) @ self.weight + self.bias).tolist()


def load_gold(name: str, device: torch.device | str) -> Gold:
    """The gold score on the encoder `name`: minilm, whose head is learnt once and kept, or a hub id or folder."""
    folder = str(sentence_encoder()) if name == "minilm" else name
    encoder, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    encoder = encoder.eval().requires_grad_(False).to(device)
    if name != "minilm":
        head = learn_head(encoder, tokenizer, imdb_reviews())
    else:

        def build(folder: Path) -> None:
            save_file(dict(learn_head(encoder, tokenizer, imdb_reviews())), folder / "head.safetensors")

        kept = build_once(cache_dir() / "data" / "gao-gold-1", build, "learning the gold score from reviews")
        head = load_file(kept / "head.safetensors")
    print(
        f"gold: of other reviews, {head['liked']:.0%} of those that like their film score above those that do not, and "
        f"{head['whole']:.0%} above themselves garbled",
        flush=True,
    )
    return Gold(encoder, tokenizer, head["weight"], head["bias"])


def learn_head(encoder: Any, tokenizer: Any, reviews: Dataset) -> Mapping[str, Tensor]:
    """weight [D] and bias; of other reviews liked, the share of pairs whose liking review scores above the other.

    And whole, the share that score above themselves garbled. reviews: text and label, 1 where the reviewer liked it.
    """
    reviews = reviews.select(range(min(TRAIN + TEST, len(reviews))))
    texts = [" ".join(text.split()[-WORDS:]) for text in reviews["text"]]  # the verdict is at the end
    rng = random.Random(0)
    labels, train = torch.tensor(reviews["label"]), round(len(texts) * TRAIN / (TRAIN + TEST))
    whole = sentence_vectors(encoder, tokenizer, texts)
    torn = sentence_vectors(encoder, tokenizer, [garbled(text, rng) for text in texts])
    targets = torch.cat([labels[:train], torch.zeros(train, dtype=labels.dtype)])
    weight, bias = logistic_regression(torch.cat([whole[:train], torn[:train]]), targets, penalty=1.0)
    scores, others, liking = whole[train:] @ weight, torn[train:] @ weight, labels[train:].bool()
    above = scores[liking][:, None] > scores[~liking]
    return {"weight": weight, "bias": bias, "liked": above.float().mean(), "whole": (scores > others).float().mean()}


def garbled(text: str, rng: random.Random) -> str:
    """As many words, drawn from the text's own: some come twice, and the order is lost."""
    words = text.split()
    return " ".join(rng.choices(words, k=len(words)))


def sentence_vectors(encoder: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """[N, D], each of length 1."""
    rows = [torch.tensor(ids) for ids in tokenizer(list(texts), truncation=True)["input_ids"]]
    return F.normalize(mean_states(encoder, rows), dim=-1)


@torch.no_grad()
def mean_states(model: Any, rows: Sequence[Tensor], *, batch_size: int = 32) -> Tensor:
    """The mean of the last hidden states over the tokens of each row, on the CPU: token ids [T_i] -> [N, D]."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    means = torch.zeros(len(rows), model.config.hidden_size)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids, mask = (part.to(model.device) for part in pad([rows[i] for i in chosen], 0))
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means[chosen] = ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).float().cpu()
    return means


def logistic_regression(x: Tensor, labels: Tensor, *, penalty: float, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Weight [D] and bias at the minimum of sum -log p(label) + penalty / 2 |weight|^2.

    x: [N, D]; labels: [N], 0 or 1. Without `bias` it stays 0.
    """
    inputs, targets = x.double(), labels.double()
    weight = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, offset] if bias else [weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(inputs @ weight + offset, targets, reduction="sum")
        loss = loss + penalty / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach().float(), offset.detach().float()
