"""The collator that finds answers by the text before them, and labels only the answers."""

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Row
from trimtab_lm.data.tokenization import stop_token_ids
from trimtab_lm.interface import Batch


class DataCollatorForCompletionOnlyLM:
    """Pads rows to a batch, and sets labels to `ignore_index` everywhere except on the answers.

    An answer starts after a response template. It ends with its first EOS, or, where it has no EOS, with its first
    other stop token, such as <|im_end|>. Without a stop token it ends before the next template of either kind or at the
    end of the row. Without an instruction template the text between two response templates is an answer and the next
    question. If no stop token ends that answer, its labels are ignored, with a warning.

    Padding goes to the tokenizer's side. It is recognized by length, never by id, so pad_token may be EOS.

    Args:
        response_template: what comes right before each answer, such as "### Response:". A text is searched in the row's
            decoded text, so that it does not matter how its surroundings tokenize. Ids are searched in the ids.
        instruction_template: what comes right before each turn of the user, in the same forms.
        tokenizer: the model's tokenizer, with a pad token.
        mlm: must be False.
        ignore_index: the label of tokens that do not count.
        pad_to_multiple_of: rounds the width of a batch up to a multiple of this.

    Raises:
        ValueError: there is no tokenizer or pad token, mlm is set, or a template is empty.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        mlm: bool = False,
        ignore_index: int = -100,
        pad_to_multiple_of: int | None = None,
    ):
        if tokenizer is None:
            raise ValueError("The collator needs a tokenizer to read rows. Pass tokenizer=.")
        if mlm:
            raise ValueError("Masked language modeling has no completions. Leave mlm=False.")
        if tokenizer.pad_token_id is None:
            raise ValueError(
                "The tokenizer has no pad token. Set one, for instance tokenizer.pad_token = tokenizer.eos_token."
            )
        for name, template in (("response", response_template), ("instruction", instruction_template)):
            if template is not None and len(template) == 0:
                raise ValueError(f"{name}_template is empty. Pass the text before each {name}.")
        self.response_template, self.instruction_template = response_template, instruction_template
        self.tokenizer = tokenizer
        self.ignore_index = ignore_index
        self.pad_to_multiple_of = pad_to_multiple_of
        self._stops = stop_token_ids(tokenizer)
        self._warned: set[str] = set()

    def __call__(self, rows: Sequence[Row | Sequence[int]]) -> Batch:
        """Returns `input_ids`, `attention_mask` and `labels`, each [B, T].

        Warns once if a row has no answer. All labels of such a row are ignored.

        Args:
            rows: mappings with `input_ids`, or the ids themselves. Positions where a row's `attention_mask` is 0 are
                padding and are removed.
        """
        batch = [_unpadded(row) for row in rows]
        masks = [self.answer_mask(ids) for ids in batch]
        silent = [ids for ids, mask in zip(batch, masks, strict=True) if not any(mask)]
        if silent:
            begins = repr(str(self.tokenizer.decode(silent[0]))[:200])
            self._warn_once(
                "no answer",
                f"A row has no answer after response_template={self.response_template!r}, so none of its tokens "
                f"counts. It begins with {begins}. If many rows are like this, pass the template as the rows have it, "
                "or raise the maximum length that cut the answers off.",
            )
        labels = [
            [token if counts else self.ignore_index for token, counts in zip(ids, mask, strict=True)]
            for ids, mask in zip(batch, masks, strict=True)
        ]
        return {
            "input_ids": self._padded(batch, int(self.tokenizer.pad_token_id)),
            "attention_mask": self._padded([[1] * len(ids) for ids in batch], 0),
            "labels": self._padded(labels, self.ignore_index),
        }

    def answer_mask(self, ids: Sequence[int]) -> list[int]:
        """Returns 1 for each token of an answer, with its stop token, and 0 for all others.

        Args:
            ids: the ids of one row, without padding.
        """
        reader = _Reader(self.tokenizer, ids)
        responses = reader.places(self.response_template)
        instructions = reader.places(self.instruction_template) if self.instruction_template is not None else []
        starts = sorted(first for first, _ in [*responses, *instructions])
        mask = [0] * len(ids)
        for _, start in responses:
            until = next((place for place in starts if place >= start), len(ids))
            end = self._answer_end(ids[start:until])
            if end is None and self.instruction_template is None and until < len(ids):
                self._warn_once(
                    "no end",
                    "A row has several answers, and no stop token ends one that another follows, so the start of the "
                    "next question is unknown. The labels of such answers are ignored. Pass instruction_template=, the "
                    "text before each question.",
                )
                continue
            length = until - start if end is None else end
            mask[start : start + length] = [1] * length
        return mask

    def _answer_end(self, answer: Sequence[int]) -> int | None:
        """Returns how many tokens an answer has up to and with its stop token; None without one."""
        for stops in ({self.tokenizer.eos_token_id}, self._stops):
            for i, token in enumerate(answer):
                if token in stops:
                    return i + 1
        return None

    def _padded(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        """Returns rows [B, T], padded with `value` on the tokenizer's padding side."""
        side, tensors = self.tokenizer.padding_side, [torch.tensor(ids, dtype=torch.long) for ids in rows]
        batch = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
        gap = -batch.shape[1] % (self.pad_to_multiple_of or 1)
        return F.pad(batch, (gap, 0) if side == "left" else (0, gap), value=value)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=3)


class _Reader:
    """A row's ids and its decoded text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]):
        self.tokenizer, self.ids = tokenizer, list(ids)
        self.text = self._decode(self.ids)

    def places(self, template: str | Sequence[int]) -> list[tuple[int, int]]:
        """Returns the span of tokens [start, end) of each occurrence.

        A token that spans a border of the template belongs to the template if the rest of the token is space.
        """
        if not isinstance(template, str):
            return self._matches(template)
        occurrences, place = [], self.text.find(template)
        while place >= 0:
            occurrences.append(place)
            place = self.text.find(template, place + len(template))
        # Decoding is slow. Most occurrences have the ids of the first one, at the row's start, or of the last one,
        # inside the row. If these ids match as often as the text occurs, without overlap, they are the occurrences.
        spans = [self._span(place, len(template)) for place in {*occurrences[:1], *occurrences[-1:]}]
        patterns = {tuple(self.ids[start:end]) for start, end in spans}
        matches = sorted(match for ids in patterns if template in self._decode(ids) for match in self._matches(ids))
        is_disjoint = all(end <= start for (_, end), (start, _) in pairwise(matches))
        if is_disjoint and len(matches) == len(occurrences):
            return matches
        return [self._span(place, len(template)) for place in occurrences]

    def _matches(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the spans of tokens with these ids."""
        wanted, size = list(wanted), len(wanted)
        return [(i, i + size) for i in range(len(self.ids) - size + 1) if self.ids[i : i + size] == wanted]

    def _span(self, place: int, length: int) -> tuple[int, int]:
        """Returns the token span of a template, given its place in the text and its length in characters."""
        return self._first_token(place), self._first_token_after(place + length)

    def _first_token(self, place: int) -> int:
        """Returns the token in which the template's text begins."""
        count = self._tokens_up_to(place)
        if len(self._decode(self.ids[:count])) == place:
            return count
        return count if self.text[len(self._decode(self.ids[: count - 1])) : place].strip() else count - 1

    def _first_token_after(self, place: int) -> int:
        """Returns the first token that belongs to the text from a place on."""
        count = self._tokens_up_to(place)
        return count - 1 if self._decode(self.ids[:count])[place:].strip() else count

    def _tokens_up_to(self, place: int) -> int:
        """Returns the smallest number of tokens whose decoded text contains the first `place` characters."""
        before = self.text[:place]

        def is_contained(count: int) -> bool:
            return self._decode(self.ids[:count]).startswith(before)

        count = bisect_left(range(len(self.ids) + 1), True, key=is_contained)
        # A run of SentencePiece's byte tokens that ends inside a character (of 4 bytes at most) decodes to nothing, so
        # the bisection may have missed an earlier place in the run.
        while earlier := [fewer for fewer in range(max(count - 4, 0), count) if is_contained(fewer)]:
            count = earlier[0]
        return count

    def _decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, spaces unchanged."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _unpadded(row: Row | Sequence[int]) -> list[int]:
    """Returns a row's ids without its padding."""
    ids = torch.as_tensor(row["input_ids"] if isinstance(row, Mapping) else row)
    if isinstance(row, Mapping) and "attention_mask" in row:
        ids = ids[torch.as_tensor(row["attention_mask"]).bool()]
    return ids.tolist()
