"""Scores from a reward model."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from trimtab_common.compat.noise import expecting_new_head
from trimtab_common.sharding import placed
from trimtab_lm.data.formats import Text
from trimtab_lm.data.tokenization import encode_scored, ends_in_sep
from trimtab_lm.data.truncation import truncate_row
from trimtab_lm.interface import base_of, learns_prompt, refuse_eos_as_padding, refuse_virtual_tokens, scores_last_token
from trimtab_lm.models.loading import labels_of_head, load_model
from trimtab_lm.tokens.layout import pad
from trimtab_lm.tokens.positions import Positions


class RewardModel:
    """A sequence classifier as a reward function: the score of query + response, one float per response.

    It reads a text as `RewardTrainer` trains on it: with an EOS at its end, where a decoder's score is taken.

    Args:
        model: hub id or folder, of a model or of the adapters that RewardTrainer saved; or a module. It is frozen and
            put into evaluation mode.
        tokenizer: the model's own; None loads the one beside a model that is given by name.
        label: the label whose logit is the score, of a model with several.
        max_length: in tokens; longer texts lose their beginning, except BOS or CLS, with a warning. None: the positions
            of the model.
        batch_size: texts of a forward pass.
        device: where the model runs, unless it is quantized or a device_map has placed it.
        ends_in_eos: False for a model that was trained on texts without EOS at their end.

    Raises:
        ValueError: a module without a tokenizer, a model of several labels without `label`, a label that it has not, a
            max_length beyond its positions, no EOS, padding that the model cannot tell from EOS, or a decoder with
            virtual tokens before the text.
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
        ends_in_eos: bool = True,
    ):
        if isinstance(model, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = _loaded(model)
        if tokenizer is None:
            raise ValueError(
                "A reward model that is given as a module needs its tokenizer: RewardModel(model, tokenizer)."
            )
        if ends_in_eos and tokenizer.eos_token_id is None and not ends_in_sep(tokenizer):
            raise ValueError(
                "The reward model's tokenizer has no EOS, where the score of a text is read. "
                "RewardModel(model, tokenizer, ends_in_eos=False) reads the last token instead."
            )
        if label is None and model.config.num_labels != 1:
            raise ValueError(
                f"The reward model has {model.config.num_labels} labels ({model.config.id2label}): "
                "say which one is the reward, RewardModel(..., label=1)."
            )
        positions, labels = Positions.of(model).decoder, model.config.num_labels
        if label is not None and not 0 <= label < labels:
            raise ValueError(
                f"label={label}, and the reward model has {labels} labels. Give one from 0 to {labels - 1}."
            )
        if max_length is not None and not 1 <= max_length <= (positions or max_length):
            raise ValueError(
                f"max_length={max_length}, and the reward model has {positions or 'any number of'} positions. Give a "
                "number from 1 up to them, or leave it out."
            )
        base = base_of(model)
        refuse_eos_as_padding(tokenizer, base)
        if scores_last_token(base):
            refuse_virtual_tokens(model)
        self.model: Any = placed(model.eval().requires_grad_(False), device)
        self.tokenizer, self.label, self.batch_size = tokenizer, label or 0, batch_size
        self.ends_in_eos, self._has_cut = ends_in_eos, False
        limits = (getattr(model.config.get_text_config(), "max_position_embeddings", None), positions)
        self.max_length = max_length or min((limit for limit in limits if limit is not None), default=None)

    def __call__(self, queries: Sequence[str], responses: Sequence[str], **_: object) -> list[float]:
        """The score of each query with its response, in their order."""
        return self.score([query + response for query, response in zip(queries, responses, strict=True)])

    @torch.no_grad()
    def score(self, texts: Sequence[Text]) -> list[float]:
        """The score of each text, or of each conversation as the chat template writes it, in their order.

        Raises:
            ValueError: a text has no token.
        """
        rows = [self._read(text) for text in texts]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = [0.0] * len(rows)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            for i, score in zip(chosen, self._scores([rows[i] for i in chosen]).tolist(), strict=True):
                scores[i] = score
        return scores

    def _read(self, text: Text) -> Tensor:
        ids = encode_scored(self.tokenizer, text, ends_in_eos=self.ends_in_eos)
        if not ids:
            raise ValueError("A text to score is empty, and the tokenizer adds no token. Set ends_in_eos=True.")
        first = ids[0] if ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id) else None
        row = truncate_row(ids, [1] * len(ids), max_length=self.max_length, mode="keep_end", bos_token_id=first)
        if row.tokens_cut and not self._has_cut:
            self._has_cut = True
            warnings.warn(
                f"A text to score has {len(ids)} tokens, and the reward model reads {self.max_length}: "
                f"{row.tokens_cut} tokens at its beginning are cut. So are those of all longer texts.",
                stacklevel=4,
            )
        return torch.tensor(row.input_ids)

    def _scores(self, rows: Sequence[Tensor]) -> Tensor:
        device = next(self.model.parameters()).device
        input_ids, mask = pad(rows, self.tokenizer.pad_token_id or 0)
        input_ids, mask = input_ids.to(device), mask.to(device)
        base: Any = base_of(self.model)
        if not scores_last_token(base):  # BERT and its kin read the first token
            return self.model(input_ids=input_ids, attention_mask=mask).logits[:, self.label].float()
        # transformers looks for the last token that is not padding by its id, and so before an EOS that doubles as
        # padding; the length of the row is what counts.
        hidden = base.base_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        ends = (mask.sum(1) - 1).to(hidden.device)  # a device_map may put layers on several devices
        last = hidden[torch.arange(len(rows), device=hidden.device), ends]
        return base.score(last)[:, self.label].float()


def _architecture(name: str) -> str:
    """The class of a saved model; empty if its configuration does not say."""
    return "".join((AutoConfig.from_pretrained(name).architectures or [])[:1])


def _loaded(name: str) -> Any:
    """The model of a hub id or folder. Adapters are merged into their base model, except virtual tokens.

    Raises:
        ValueError: it is a language model, whose score head would be new and random.
    """
    adapters = None if find_adapter_config_file(name) is None else PeftConfig.from_pretrained(name)
    came = _architecture(name) if adapters is None else adapters.task_type
    if came and any(kind in came for kind in ("_LM", "CausalLM", "LMHead", "ConditionalGeneration")):
        raise ValueError(
            f"{name} is no reward model: it is {came}{' adapters' if adapters else ''}. Name a sequence classifier, "
            "such as `trimtab reward` trains."
        )
    kind: Any = AutoModelForSequenceClassification
    if adapters is None:
        return kind.from_pretrained(name)
    labels = labels_of_head(name, adapters)
    with expecting_new_head() if labels else nullcontext():
        adapted: Any = load_model(kind, name, (), {"dtype": "auto", **labels}, is_trainable=False, hub={})
    return adapted if learns_prompt(adapted) else adapted.merge_and_unload()
