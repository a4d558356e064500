"""The gold score: how much a text sounds like a positive film review that a person wrote.

It is learnt from reviews with people's labels and from garbled copies of them, which count as negative. Without the
copies a sentence encoder scores a list of positive words as high as a positive text, and a policy could not exploit a
proxy by writing such lists.
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
from experiments.frozen import logistic_regression, mean_states

WORDS = 24  # words read of each review; a continuation has about as many
TRAIN, TEST = 1200, 300  # reviews for training and for evaluation


class Gold:
    """Logistic regression on the vectors of a frozen sentence encoder. A text's score is its logit.

    Args:
        encoder: A model with hidden states of D dimensions.
        tokenizer: The encoder's tokenizer.
        weight: [D].
        bias: A scalar.
    """

    def __init__(self, encoder: Any, tokenizer: Any, weight: Tensor, bias: Tensor):
        self.encoder, self.tokenizer, self.weight, self.bias = encoder, tokenizer, weight, bias

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return (sentence_vectors(self.encoder, self.tokenizer, texts) @ self.weight + self.bias).tolist()


def load_gold(name: str, device: torch.device | str) -> Gold:
    """Loads the gold score.

    Args:
        name: The encoder: minilm, whose head is learnt once and cached, or a hub id or folder.
        device: Where the encoder runs.
    """
    folder = str(sentence_encoder()) if name == "minilm" else name
    encoder, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    encoder = encoder.eval().requires_grad_(False).to(device)
    if name != "minilm":
        head = learn_head(encoder, tokenizer, imdb_reviews())
    else:

        def build(folder: Path) -> None:
            save_file(dict(learn_head(encoder, tokenizer, imdb_reviews())), folder / "head.safetensors")

        folder_of_head = build_once(cache_dir() / "data" / "gao-gold-1", build, "learning the gold score from reviews")
        head = load_file(folder_of_head / "head.safetensors")
    print(
        f"gold, on other reviews: {head['liked']:.0%} of pairs have the positive review above the negative one; "
        f"{head['whole']:.0%} of reviews score above their garbled copy",
        flush=True,
    )
    return Gold(encoder, tokenizer, head["weight"], head["bias"])


def learn_head(encoder: Any, tokenizer: Any, reviews: Dataset) -> Mapping[str, Tensor]:
    """Learns the head from reviews, and evaluates it on other reviews.

    Args:
        encoder: A frozen sentence encoder with D dimensions.
        tokenizer: The encoder's tokenizer.
        reviews: Columns text and label; label is 1 where the reviewer liked the film, else 0.

    Returns:
        weight [D] and bias; liked, the share of pairs whose positive review scores above the negative one; and whole,
        the share of reviews that score above their garbled copy.
    """
    reviews = reviews.select(range(min(TRAIN + TEST, len(reviews))))
    texts = [" ".join(text.split()[-WORDS:]) for text in reviews["text"]]  # reviewers put their verdict at the end
    rng = random.Random(0)
    labels, train = torch.tensor(reviews["label"]), round(len(texts) * TRAIN / (TRAIN + TEST))
    whole = sentence_vectors(encoder, tokenizer, texts)
    scrambled = sentence_vectors(encoder, tokenizer, [garbled(text, rng) for text in texts])
    targets = torch.cat([labels[:train], torch.zeros(train, dtype=labels.dtype)])
    weight, bias = logistic_regression(torch.cat([whole[:train], scrambled[:train]]), targets, penalty=1.0)
    scores, others, liking = whole[train:] @ weight, scrambled[train:] @ weight, labels[train:].bool()
    above = scores[liking][:, None] > scores[~liking]
    return {"weight": weight, "bias": bias, "liked": above.float().mean(), "whole": (scores > others).float().mean()}


def garbled(text: str, rng: random.Random) -> str:
    """Samples as many words of the text with replacement, which repeats some and loses the order."""
    words = text.split()
    return " ".join(rng.choices(words, k=len(words)))


def sentence_vectors(encoder: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Returns sentence vectors of unit length, [N, D]."""
    rows = [torch.tensor(ids) for ids in tokenizer(list(texts), truncation=True)["input_ids"]]
    return F.normalize(mean_states(encoder, rows), dim=-1)
