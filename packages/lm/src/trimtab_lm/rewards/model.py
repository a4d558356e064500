"""Scores from a reward model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from trimtab_lm.tokens.layout import pad
from trimtab_lm.tokens.positions import Positions


class RewardModel:
    """A sequence classifier as a reward function: the score of query + response, one float per response.

    Args:
        model: hub id, folder or module. It is frozen and put into evaluation mode.
        tokenizer: the model's own; None loads the one beside a model that is given by name.
        label: the label whose logit is the score, of a model with several.
        max_length: in tokens; longer texts lose their beginning. None: the positions of the model.
        batch_size: texts of a forward pass.

    Raises:
        ValueError: a module without a tokenizer, or a model of several labels without `label`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        label: int | None = None,
        max_length: int | None = None,
        batch_size: int = 16,
        device: torch.device | str = "cpu",
    ):
        if isinstance(model, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = AutoModelForSequenceClassification.from_pretrained(model)
        if tokenizer is None:
            raise ValueError(
                "A reward model that is given as a module needs its tokenizer: RewardModel(model, tokenizer)."
            )
        if label is None and model.config.num_labels != 1:
            raise ValueError(
                f"The reward model has {model.config.num_labels} labels ({model.config.id2label}): "
                "say which one is the reward, RewardModel(..., label=1)."
            )
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.tokenizer, self.label, self.batch_size = tokenizer, label or 0, batch_size
        limits = (getattr(model.config.get_text_config(), "max_position_embeddings", None), Positions.of(model).decoder)
        self.max_length = max_length or min((limit for limit in limits if limit is not None), default=None)

    @torch.no_grad()
    def __call__(self, queries: Sequence[str], responses: Sequence[str], **_: object) -> list[float]:
        """The score of each query with its response, in their order."""
        texts = [query + response for query, response in zip(queries, responses, strict=True)]
        rows = [
            torch.tensor(ids[-self.max_length :] if self.max_length else ids)
            for ids in self.tokenizer(texts)["input_ids"]
        ]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = [0.0] * len(rows)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            for i, score in zip(chosen, self._score([rows[i] for i in chosen]).tolist(), strict=True):
                scores[i] = score
        return scores

    def _score(self, rows: Sequence[Tensor]) -> Tensor:
        device = next(self.model.parameters()).device
        input_ids, mask = pad(rows, self.tokenizer.pad_token_id or 0)
        input_ids, mask = input_ids.to(device), mask.to(device)
        if not isinstance(getattr(self.model, "score", None), nn.Linear):  # BERT and its kin read their first token
            return self.model(input_ids=input_ids, attention_mask=mask).logits[:, self.label]
        # transformers looks for the last token that is not padding by its id, and so before an EOS that doubles as
        # padding; the length of the row is what counts.
        hidden = self.model.base_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(rows), device=device), mask.sum(1) - 1]
        return self.model.score(last)[:, self.label].float()
