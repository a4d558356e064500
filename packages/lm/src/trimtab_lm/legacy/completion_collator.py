"""Batches whose labels are the answers alone, found by the text that comes before them."""

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.tokenization import stop_token_ids


class DataCollatorForCompletionOnlyLM:
    """Pads rows to a batch with labels that are `ignore_index` everywhere but on the answers.

    response_template: what comes right before each answer, such as "### Response:": a text, found in the row's decoded
        text, so that it does not matter how its surroundings tokenize; or ids, found as they are.
    instruction_template: what comes right before each turn of the user, likewise.

    An answer runs from behind a response template to the next template of either kind or the end of the row, and no
    further than its first EOS (where it has none, than its first other stop token, such as <|im_end|>), which is
    learnt. Without an instruction template the text between two response templates is answer and next question: if no
    stop token ends the answer, it is not learnt, with a warning.

    Rows are mappings with `input_ids`, or the ids themselves; positions where a row's own `attention_mask` is 0 are
    padding. Padding goes to the tokenizer's side and is told by length, never by id: pad_token may be EOS.
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
            raise ValueError("The collator reads rows with a tokenizer. Pass tokenizer=.")
        if mlm:
            raise ValueError("Masked language modeling has no completions. Leave mlm=False.")
        if tokenizer.pad_token_id is None:
            raise ValueError(
                "The tokenizer has no pad token. Set one: tokenizer.pad_token = tokenizer.eos_token will do."
            )
        for name, template in (("response", response_template), ("instruction", instruction_template)):
            if template is not None and len(template) == 0:
                raise ValueError(f"{name}_template is empty. Give the text before each {name}.")
        self.response_template, self.instruction_template = response_template, instruction_template
        self.tokenizer = tokenizer
        self.ignore_index = ignore_index
        self.pad_to_multiple_of = pad_to_multiple_of
        self._stops = stop_token_ids(tokenizer)
        self._warned: set[str] = set()

    def __call__(self, rows: Sequence[Mapping[str, Any] | Sequence[int]]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `labels`, each [B, T].

        Warns once if a row has no answer: all its labels are ignored. The rows of a batch may all be such.
        """
        batch = [_unpadded(row) for row in rows]
        masks = [self.answer_mask(ids) for ids in batch]
        silent = [ids for ids, mask in zip(batch, masks, strict=True) if not any(mask)]
        if silent:
            begins = repr(str(self.tokenizer.decode(silent[0]))[:200])
            self._warn_once(
                "no answer",
                f"No answer after response_template={self.response_template!r} in a row. Nothing is learnt from such "
                f"rows; this one begins with {begins}. If they are many, give the template as the rows have it, or "
                "raise the maximum length that cut the answers away.",
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
        """1 on each token of an answer, its stop token included; `ids` without padding."""
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
                    "A row has several answers, no stop token ends the first of them, and where the next question "
                    "begins cannot be told: only its last answer is learnt. Pass instruction_template=, the text "
                    "before each question.",
                )
                continue
            length = until - start if end is None else end
            mask[start : start + length] = [1] * length
        return mask

    def _answer_end(self, answer: Sequence[int]) -> int | None:
        """How many tokens it has up to its stop token; None without one."""
        for stops in ({self.tokenizer.eos_token_id}, self._stops):
            for i, token in enumerate(answer):
                if token in stops:
                    return i + 1
        return None

    def _padded(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        length = max(map(len, rows))
        if self.pad_to_multiple_of:
            length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = torch.full((len(rows), length), value, dtype=torch.long)
        for row, ids in zip(batch, rows, strict=True):
            place = slice(length - len(ids), None) if self.tokenizer.padding_side == "left" else slice(len(ids))
            row[place] = torch.tensor(ids, dtype=torch.long)
        return batch

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=3)


class _Reader:
    """A row's ids beside its decoded text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]):
        self.tokenizer, self.ids = tokenizer, list(ids)
        self.text = self._decode(self.ids)

    def places(self, template: str | Sequence[int]) -> list[tuple[int, int]]:
        """The first token of each occurrence and the first one behind it.

        A token that spans a border of the template belongs to the template if all else in it is space.
        """
        if not isinstance(template, str):
            return self._matches(template)
        found, place = [], self.text.find(template)
        while place >= 0:
            found.append(place)
            place = self.text.find(template, place + len(template))
        # Decoding is slow. Most occurrences have the tokens of the first one, at the row's start, or of the last one,
        # inside it: if those ids, which spell the template out, match apart from each other as often, they are all.
        ends = [self._span(place, len(template)) for place in {*found[:1], *found[-1:]}]
        patterns = {tuple(self.ids[first:behind]) for first, behind in ends}
        matches = sorted(match for ids in patterns if template in self._decode(ids) for match in self._matches(ids))
        is_apart = all(behind <= first for (_, behind), (first, _) in pairwise(matches))
        if is_apart and len(matches) == len(found):
            return matches
        return [self._span(place, len(template)) for place in found]

    def _matches(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        wanted, size = list(wanted), len(wanted)
        return [(i, i + size) for i in range(len(self.ids) - size + 1) if self.ids[i : i + size] == wanted]

    def _span(self, place: int, length: int) -> tuple[int, int]:
        return self._first_token(place), self._first_token_behind(place + length)

    def _first_token(self, place: int) -> int:
        """The token where the template's text begins."""
        count = self._tokens_up_to(place)
        if len(self._decode(self.ids[:count])) == place:
            return count
        return count if self.text[len(self._decode(self.ids[: count - 1])) : place].strip() else count - 1

    def _first_token_behind(self, place: int) -> int:
        count = self._tokens_up_to(place)
        return count - 1 if self._decode(self.ids[:count])[place:].strip() else count

    def _tokens_up_to(self, place: int) -> int:
        """The least number of tokens whose text holds the first `place` characters, none of them half decoded."""
        before = self.text[:place]

        def is_held(count: int) -> bool:
            return self._decode(self.ids[:count]).startswith(before)

        count = bisect_left(range(len(self.ids) + 1), True, key=is_held)
        # A run of SentencePiece's byte tokens that ends inside a character (of 4 bytes at most) decodes to nothing, and
        # the bisection may have missed an earlier place in the run.
        while earlier := [fewer for fewer in range(max(count - 4, 0), count) if is_held(fewer)]:
            count = earlier[0]
        return count

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _unpadded(row: Mapping[str, Any] | Sequence[int]) -> list[int]:
    ids = torch.as_tensor(row["input_ids"] if isinstance(row, Mapping) else row)
    if isinstance(row, Mapping) and "attention_mask" in row:
        ids = ids[torch.as_tensor(row["attention_mask"]).bool()]
    return ids.tolist()
