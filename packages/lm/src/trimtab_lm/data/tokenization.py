"""Texts and conversations to token ids: pure functions of one row and a tokenizer.

Three rules hold everywhere. A prompt and its answer are tokenized together, once, and split by character offsets; a
token that spans the border belongs to the answer. The tokenizer adds BOS by its own rule to plain text and nothing to
text that a chat template wrote. An answer ends in its stop token, which counts. Masks are 1 where a token counts.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Conversation, Row, common_length, preference_parts

Render = Callable[..., str]

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PROBE = "\ue000"
"""A character for private use, put into a message to see where the template writes it."""


def require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of EOS; ValueError for a tokenizer without one, whose models would never learn to stop."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token, and without one no model learns to stop. Set it, for instance "
            "tokenizer.eos_token = '</s>', to a token that the vocabulary has."
        )
    return int(tokenizer.eos_token_id)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that can end an answer: EOS and every special token, such as <|im_end|>, but BOS, UNK and PAD."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    never = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    return frozenset((special | set(tokenizer.all_special_ids)) - never | {require_eos(tokenizer)})


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, add_eos: bool = True) -> dict[str, list[int]]:
    """Plain text with the tokenizer's special tokens, and one EOS at its end."""
    ids = list(tokenizer(text)["input_ids"])
    return {"input_ids": _ending_in(require_eos(tokenizer), ids) if add_eos else ids}


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Conversation,
    *,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """A prompt to be continued: without an EOS that the tokenizer adds, and with the header of the answer to come."""
    if not isinstance(prompt, str):
        text = _renderer(tokenizer, tools, chat_template_kwargs)(prompt, add_generation_prompt=True)
        return {"input_ids": list(tokenizer(text, add_special_tokens=False)["input_ids"])}
    ids = list(tokenizer(prompt)["input_ids"])
    is_added = bool(ids) and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token)
    is_only_bos = len(ids) == 1 and ids[0] == tokenizer.bos_token_id
    return {"input_ids": ids[:-1] if is_added and not is_only_bos else ids}


def encode_prompt_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Conversation,
    completion: str | Conversation,
    *,
    add_eos: bool = True,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """`input_ids` of prompt and completion, and `completion_mask`.

    prompt, completion: both texts, joined as they are, or both conversations, written by the chat template. All of a
        completion counts but the header that add_generation_prompt writes before it.
    add_eos: end in EOS, unless the end is a stop token already (see `stop_token_ids`), with which a conversation ends:
        what space its template writes behind that is cut.

    Raises ValueError for an empty completion, two different kinds, and a template that writes the prompt differently
    once an answer follows it.
    """
    joined = _join(tokenizer, prompt, completion, tools, chat_template_kwargs)
    span = (joined.border, len(joined.text))
    ids, mask = _encode_spans(tokenizer, joined.text, [span], add_special_tokens=not joined.is_templated)
    if ids[-1] == tokenizer.eos_token_id:
        mask[-1] = 1  # one that the tokenizer adds has no characters
    if add_eos:
        ids, mask = _closed(tokenizer, ids, mask, is_templated=joined.is_templated)
    return {"input_ids": ids, "completion_mask": mask}


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Conversation,
    *,
    assistant_only: bool,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """`input_ids` of a conversation, and `assistant_masks`: 1 on every answer and its stop token, not on its header.

    assistant_only: False lets every token count. True goes by the template's generation marks, and where it has none
        by what the template writes up to each answer and up to its end. Space behind a stop token does not count.

    Raises ValueError where no token would count, and where an answer cannot be found in what the template wrote.
    """
    render = _renderer(tokenizer, tools, chat_template_kwargs)
    settings = dict(chat_template_kwargs or {})
    if not assistant_only:
        ids = list(tokenizer(render(messages), add_special_tokens=False)["input_ids"])
        mask = [1] * len(ids)
    elif GENERATION_MARK.search(tokenizer.get_chat_template(settings.get("chat_template"), tools)):
        write: Callable[..., Any] = tokenizer.apply_chat_template
        encoded = write(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **settings)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        _count_stops(ids, mask, stop_token_ids(tokenizer))
    else:
        text, stops = render(messages), _stop_strings(tokenizer)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_answer_span(render, messages, i, text, stops) for i in answers]
        ids, mask = _encode_spans(tokenizer, text, spans, add_special_tokens=False)
    if not any(mask):
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"No token of this conversation would count: its roles are {roles}, and only what the chat template marks "
            "as generated, or messages of role 'assistant', are learnt. Drop such rows, rename the roles, or move the "
            "template's generation marks."
        )
    ids, mask = _closed(tokenizer, ids, mask, is_templated=True)
    return {"input_ids": ids, "assistant_masks": mask}


def encode_preference(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    *,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """`prompt_input_ids`, and for each answer `*_input_ids` (prompt and answer) and `*_mask`.

    The prompt is what both rows begin with, up to the first token of either answer: if the prompt's last characters
    merge with one answer only, they count as answer in both, so that both measure the same text.
    """
    prompt, *answers = preference_parts(row)
    settings: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    chosen, rejected = (encode_prompt_completion(tokenizer, prompt, answer, **settings) for answer in answers)
    heads = [side["input_ids"][: side["completion_mask"].index(1)] for side in (chosen, rejected)]
    shared = common_length(*heads)
    if shared == 0:
        raise ValueError(
            "The prompt has no token, and the first token of an answer needs one before it to be scored. Give the row "
            "a prompt, or use a tokenizer that adds BOS."
        )
    encoded = {"prompt_input_ids": chosen["input_ids"][:shared]}
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        encoded[f"{name}_input_ids"] = side["input_ids"]
        encoded[f"{name}_mask"] = [0] * shared + [1] * (len(side["input_ids"]) - shared)
    return encoded


def encode_seq2seq(
    tokenizer: PreTrainedTokenizerBase,
    source: str | Conversation,
    target: str | Conversation,
    *,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """`input_ids` for the encoder and `labels` for the decoder, the target tokenized as one; EOS ends both."""
    joined = _join(tokenizer, source, target, tools, chat_template_kwargs)
    eos, special = require_eos(tokenizer), not joined.is_templated
    ids = tokenizer(joined.text[: joined.border], add_special_tokens=special)["input_ids"]
    labels = tokenizer(text_target=joined.text[joined.border :], add_special_tokens=special)["input_ids"]
    return {"input_ids": _ending_in(eos, list(ids)), "labels": _ending_in(eos, list(labels))}


def encode_preference_seq2seq(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    *,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """`prompt_input_ids` for the encoder, `chosen_input_ids` and `rejected_input_ids` for the decoder; EOS ends all."""
    prompt, *answers = preference_parts(row)
    settings: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    chosen, rejected = (encode_seq2seq(tokenizer, prompt, answer, **settings) for answer in answers)
    return {
        "prompt_input_ids": chosen["input_ids"],
        "chosen_input_ids": chosen["labels"],
        "rejected_input_ids": rejected["labels"],
    }


class _Joined(NamedTuple):
    text: str
    border: int  # the character at which the answer starts
    is_templated: bool


def _join(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Conversation,
    completion: str | Conversation,
    tools: list[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> _Joined:
    if not (completion if isinstance(completion, str) else any(map(_is_filled, completion))):
        raise ValueError("The completion is empty: there is nothing to learn from it. Drop the row or fill it.")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _Joined(prompt + completion, len(prompt), is_templated=False)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError(
            f"The prompt is a {type(prompt).__name__} and the completion a {type(completion).__name__}. Make both "
            "texts, or both lists of {'role', 'content'} messages."
        )
    render = _renderer(tokenizer, tools, chat_template_kwargs)
    text = render([*prompt, *completion])
    border = _prompt_end(render, prompt, text) if prompt else 0
    if border is None:
        kept = common_length(render(prompt), text)
        raise ValueError(
            "The chat template writes the prompt differently once an answer follows it, from "
            f"{text[max(kept - 20, 0) : kept + 20]!r} on, so the answer's start cannot be told. Use a template that "
            "only appends, or give the rows as texts."
        )
    return _Joined(text, border, is_templated=True)


def _is_filled(message: Mapping[str, Any]) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _renderer(
    tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None, chat_template_kwargs: Mapping[str, Any] | None
) -> Render:
    write: Callable[..., Any] = tokenizer.apply_chat_template
    settings = {"tools": tools, "tokenize": False, **(chat_template_kwargs or {})}

    def render(messages: Conversation, *, add_generation_prompt: bool = False) -> str:
        return write(list(messages), add_generation_prompt=add_generation_prompt, **settings)

    return render


def _prompt_end(render: Render, prompt: Conversation, text: str) -> int | None:
    """The character behind the prompt and the answer's header; None if `text` does not begin with the prompt."""
    with_header = render(prompt, add_generation_prompt=True)
    if text.startswith(with_header):
        return len(with_header)
    # The template opens an answer to come (with an empty thought, say) unlike one that it knows.
    return common_length(with_header, text) if text.startswith(render(prompt)) else None


def _answer_span(render: Render, messages: Conversation, i: int, text: str, stops: str) -> tuple[int, int]:
    """The characters of message i in `text`, its stop token included and the space behind that not."""
    start = _prompt_end(render, messages[:i], text) if i else None
    if start is None:
        start = _probe(render, messages, i, text, lambda content: PROBE + content)
    until = render(messages[: i + 1])
    if text.startswith(until):
        return start, len(re.sub(rf"({stops})\s+$", r"\1", until))
    # The template writes this answer differently when more follows it, such as without its thoughts.
    end = _probe(render, messages, i, text, lambda content: content + PROBE)
    stop = re.compile(rf"\s*({stops})").match(text, end)
    return start, stop.end() if stop else end


def _probe(render: Render, messages: Conversation, i: int, text: str, mark: Callable[[str], str]) -> int:
    """Where `text` changes if message i is marked: the start or the end of what the template keeps of it."""
    content = messages[i].get("content")
    probed = [*messages[:i], {**messages[i], "content": mark(content)}, *messages[i + 1 :]] if content else messages
    where = common_length(render(probed), text)
    if where == len(text):
        raise ValueError(
            f"Message {i} ({messages[i]['role']}) cannot be found in what the chat template writes: it rewrites the "
            "messages before it, and the message itself. Put {% generation %} marks into the template, or turn each "
            "answer into a row of prompt and completion."
        )
    return where


def _stop_strings(tokenizer: PreTrainedTokenizerBase) -> str:
    """A pattern of the tokens that can end an answer."""
    return "|".join(re.escape(token) for token in tokenizer.convert_ids_to_tokens(sorted(stop_token_ids(tokenizer))))


def _encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]], *, add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Ids of `text`, and 1 for each token with a character in one of the spans."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        # Some tokenizers trim spaces off the offsets: a token of spaces is empty then, and stands at its end. BOS and
        # EOS that the tokenizer adds are empty at 0.
        mask = [
            int(any(end > start and min(begin, end - 1) < stop for start, stop in spans))
            for begin, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), mask
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    lead = next(i for i in range(len(ids) - len(plain) + 1) if ids[i : i + len(plain)] == plain)
    mask = [0] * len(ids)
    for start, stop in spans:
        before, until = (tokenizer(text[:place], add_special_tokens=False)["input_ids"] for place in (start, stop))
        first, last = common_length(before, plain), common_length(until, plain)
        last += last < len(until)  # a token that goes on behind the span
        mask[lead + first : lead + last] = [1] * (last - first)
    return ids, mask


def _count_stops(ids: list[int], mask: list[int], stops: Collection[int]) -> None:
    """Lets a stop token right behind a marked answer count, where the template's marks leave it out."""
    for i in range(1, len(ids)):
        if mask[i - 1] and not mask[i] and ids[i] in stops and ids[i - 1] not in stops:
            mask[i] = 1


def _closed(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int], *, is_templated: bool
) -> tuple[list[int], list[int]]:
    """The row with a stop token at its end, which counts if the token before it does."""
    eos = require_eos(tokenizer)
    if is_templated:
        stops = stop_token_ids(tokenizer)
        behind = len(list(takewhile(lambda token: token not in stops, reversed(ids))))
        end = len(ids) - behind
        if end and not str(tokenizer.decode(ids[end:])).strip():
            return ids[:end], mask[:end]
    return (ids, mask) if ids[-1] == eos else ([*ids, eos], [*mask, mask[-1]])


def _ending_in(eos: int, ids: list[int]) -> list[int]:
    return ids if ids and ids[-1] == eos else [*ids, eos]
