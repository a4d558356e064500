"""From texts and conversations to token ids: pure functions of one row and a tokenizer.

Three rules hold everywhere.
- A prompt and its answer are tokenized together and then split by character offsets. A token that spans the border
  belongs to the answer.
- The tokenizer adds BOS to plain text by its own rule. It adds nothing to text that a chat template wrote, nor to text
  that begins with BOS.
- An answer ends in its stop token, which counts.

Masks are 1 where a token counts. All functions take the two settings of the chat template:

    tools: the tools that the template describes to the model.
    chat_template_kwargs: more arguments of `tokenizer.apply_chat_template`.
"""

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Conversation, Row, TemplateSettings, Text, Tools, common_length, preference_parts
from trimtab_lm.data.kinds import check_texts, require_template

Columns: TypeAlias = dict[str, list[int]]
"""Token ids and masks of one row, by the names of their columns."""

Render: TypeAlias = Callable[..., str]
"""Writes messages as text by the chat template: render(messages, add_generation_prompt=False)."""

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PROBE = "\ue000"
"""A character for private use. In a message it shows where the template writes that message."""


def require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id of EOS; raises a ValueError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token, and without one no model learns to stop. Set it to a token of the "
            "vocabulary, for instance tokenizer.eos_token = '</s>'."
        )
    return int(tokenizer.eos_token_id)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids that can end an answer: EOS and special tokens such as <|im_end|>, but not BOS, UNK and PAD."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    never = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    return frozenset((special | set(tokenizer.all_special_ids)) - never | {require_eos(tokenizer)})


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Returns whether a text begins with BOS, as one that a chat template wrote, so that none may be added."""
    return bool(tokenizer.bos_token) and text.startswith(cast(str, tokenizer.bos_token))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, add_eos: bool = True) -> Columns:
    """Returns `input_ids` of plain text, with the tokenizer's special tokens and, if `add_eos`, one EOS at the end.

    Raises:
        ValueError: the tokenizer has no EOS and `add_eos` is set.
    """
    check_texts("text", text=text)
    ids = list(tokenizer(text, add_special_tokens=not begins_with_bos(tokenizer, text))["input_ids"])
    return {"input_ids": _ending_in(require_eos(tokenizer), ids) if add_eos else ids}


def ends_in_sep(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer is of BERT's kind: it ends a text in SEP, and has no EOS."""
    return tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None


def encode_scored(tokenizer: PreTrainedTokenizerBase, text: Text, *, ends_in_eos: bool = True) -> list[int]:
    """Returns the ids of a text or conversation whose score is read: those on which `RewardTrainer` trains it.

    Args:
        ends_in_eos: a text ends in EOS, and a conversation in its last stop token, or else in EOS. False: in what the
            tokenizer or the chat template writes last.

    Raises:
        ValueError: the tokenizer has neither EOS nor SEP and `ends_in_eos` is set, or it has no chat template.
    """
    ends_in_eos = ends_in_eos and not ends_in_sep(tokenizer)
    if isinstance(text, str):
        return encode_text(tokenizer, text, add_eos=ends_in_eos)["input_ids"]
    if ends_in_eos:
        return encode_messages(tokenizer, text, assistant_only=False)["input_ids"]
    return list(tokenizer(renderer(tokenizer, None, None)(text), add_special_tokens=False)["input_ids"])


def template_settings(row: Row, chat_template_kwargs: TemplateSettings | None = None) -> dict[str, Any]:
    """Returns a row's `tools` and `chat_template_kwargs`, which count before those of all rows."""
    own = {name: value for name, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    return {"tools": row.get("tools") or None, "chat_template_kwargs": {**(chat_template_kwargs or {}), **own}}


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Text,
    *,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> Columns:
    """Returns `input_ids` of a prompt that the model is to continue.

    An EOS that the tokenizer adds is removed. A conversation ends in the header of the next answer.

    Raises:
        ValueError: the prompt is neither a text nor a conversation, or the tokenizer has no chat template for one.
    """
    check_texts(prompt=prompt)
    if not isinstance(prompt, str):
        text = renderer(tokenizer, tools, chat_template_kwargs)(prompt, add_generation_prompt=True)
        return {"input_ids": list(tokenizer(text, add_special_tokens=False)["input_ids"])}
    ids = list(tokenizer(prompt, add_special_tokens=not begins_with_bos(tokenizer, prompt))["input_ids"])
    is_added = bool(ids) and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token)
    is_only_bos = len(ids) == 1 and ids[0] == tokenizer.bos_token_id
    return {"input_ids": ids[:-1] if is_added and not is_only_bos else ids}


def encode_prompt_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Text,
    completion: Text,
    *,
    add_eos: bool = True,
    add_special_tokens: bool = True,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> Columns:
    """Returns `input_ids` of prompt and completion, and `completion_mask`.

    All of a completion counts, except the header that the template writes before an answer.

    Args:
        prompt, completion: two texts, which are concatenated, or two conversations, which the chat template writes.
        add_eos: whether the row must end in a stop token (see `stop_token_ids`). EOS is appended to a row that does not
            end in one. A conversation is cut after its last stop token, if only space follows.
        add_special_tokens: whether the tokenizer adds its special tokens to texts; conversations have the template's.

    Raises:
        ValueError: the completion is empty or holds the prompt's messages, one of the two is a text and the other a
            conversation, the template writes the prompt differently before an answer, or the tokenizer has no EOS.
    """
    joined = _join(tokenizer, prompt, completion, tools, chat_template_kwargs)
    span = (joined.border, len(joined.text))
    special = add_special_tokens and not (joined.is_templated or begins_with_bos(tokenizer, joined.text))
    ids, mask = _encode_spans(tokenizer, joined.text, [span], add_special_tokens=special)
    if ids[-1] == tokenizer.eos_token_id:
        mask[-1] = 1  # one that the tokenizer adds has no characters
    if add_eos:
        ids, mask = closed(tokenizer, ids, mask, is_templated=joined.is_templated)
    return {"input_ids": ids, "completion_mask": mask}


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Conversation,
    *,
    assistant_only: bool,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> Columns:
    """Returns `input_ids` of a conversation, and `assistant_masks`.

    Args:
        assistant_only: whether only the answers count, each with its stop token and without its header. The answers
            are where the template has its generation marks, or between what the template writes up to the start and up
            to the end of each answer. Space after a stop token does not count. False: every token counts.

    Raises:
        ValueError: no token would count, or an answer cannot be located in the template's text.
    """
    render = renderer(tokenizer, tools, chat_template_kwargs)
    settings = dict(chat_template_kwargs or {})
    if not assistant_only:
        ids = list(tokenizer(render(messages), add_special_tokens=False)["input_ids"])
        mask = [1] * len(ids)
    elif GENERATION_MARK.search(tokenizer.get_chat_template(settings.get("chat_template"), tools)):
        check_texts("messages", conversation=messages)
        write = cast(Callable[..., Columns], tokenizer.apply_chat_template)
        encoded = write(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **settings)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        _count_stops(ids, mask, stop_token_ids(tokenizer))
    else:
        text, stops = render(messages), stop_strings(tokenizer)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_answer_span(render, messages, i, text, stops) for i in answers]
        ids, mask = _encode_spans(tokenizer, text, spans, add_special_tokens=False)
    if not any(mask):
        raise ValueError(
            f"No token of this conversation would count: its roles are {[message['role'] for message in messages]}, "
            "and training covers only what the chat template marks as generated, or messages of role 'assistant'. Drop "
            "such rows, rename the roles, or move the template's generation marks."
        )
    ids, mask = closed(tokenizer, ids, mask, is_templated=True)
    return {"input_ids": ids, "assistant_masks": mask}


def encode_preference(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    *,
    encode: Callable[[Text, Text], Columns] | None = None,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> Columns:
    """Returns `prompt_input_ids`, and for each answer `*_input_ids` (prompt and answer).

    The prompt is what both rows begin with, up to the first token of either answer. If the prompt's last characters
    merge with one answer only, they belong to the answer in both rows, so that both measure the same text.

    Args:
        row: in a preference format, see `preference_parts`.
        encode: tokenizes a prompt and an answer; None: `encode_prompt_completion`.

    Raises:
        ValueError: the prompt has no token, or see `encode_prompt_completion`.
    """
    prompt, *answers = preference_parts(row)
    if encode is None:
        encode = partial(encode_prompt_completion, tokenizer, tools=tools, chat_template_kwargs=chat_template_kwargs)
    chosen, rejected = (encode(prompt, answer) for answer in answers)
    heads = [side["input_ids"][: side["completion_mask"].index(1)] for side in (chosen, rejected)]
    shared = common_length(*heads)
    if shared == 0:
        raise ValueError(
            "The prompt has no token, and the first token of an answer needs one before it to be scored. Give the row "
            "a prompt, or use a tokenizer that adds BOS."
        )
    answers_of = {"chosen_input_ids": chosen["input_ids"], "rejected_input_ids": rejected["input_ids"]}
    return {"prompt_input_ids": chosen["input_ids"][:shared], **answers_of}


def encode_seq2seq(
    tokenizer: PreTrainedTokenizerBase,
    source: Text,
    target: Text,
    *,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> Columns:
    """Returns `input_ids` for the encoder and `labels` for the decoder; both end in EOS.

    Args:
        source: what the encoder reads.
        target: what the decoder writes; tokenized as a target, where the tokenizer distinguishes the two.

    Raises:
        ValueError: see `encode_prompt_completion`.
    """
    joined = _join(tokenizer, source, target, tools, chat_template_kwargs)
    eos, read, written = require_eos(tokenizer), joined.text[: joined.border], joined.text[joined.border :]
    special = [not (joined.is_templated or begins_with_bos(tokenizer, text)) for text in (read, written)]
    ids = tokenizer(read, add_special_tokens=special[0])["input_ids"]
    labels = tokenizer(text_target=written, add_special_tokens=special[1])["input_ids"]
    return {"input_ids": _ending_in(eos, list(ids)), "labels": _ending_in(eos, list(labels))}


def encode_preference_seq2seq(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    *,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> Columns:
    """Returns `prompt_input_ids` for the encoder, `chosen_input_ids` and `rejected_input_ids` for the decoder.

    All three end in EOS. The arguments and errors are those of `encode_preference`.
    """
    prompt, *answers = preference_parts(row)
    chosen, rejected = (
        encode_seq2seq(tokenizer, prompt, answer, tools=tools, chat_template_kwargs=chat_template_kwargs)
        for answer in answers
    )
    answers_of = {"chosen_input_ids": chosen["labels"], "rejected_input_ids": rejected["labels"]}
    return {"prompt_input_ids": chosen["input_ids"], **answers_of}


class _Joined(NamedTuple):
    """The text of a prompt and its answer."""

    text: str
    border: int  # the character at which the answer starts
    is_templated: bool


def _join(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Text,
    completion: Text,
    tools: Tools | None,
    chat_template_kwargs: TemplateSettings | None,
) -> _Joined:
    """Joins a prompt and an answer: see `encode_prompt_completion`."""
    check_texts(prompt=prompt, completion=completion)
    if not (completion if isinstance(completion, str) else any(map(_is_filled, completion))):
        raise ValueError("The completion is empty: there is nothing to learn from it. Drop the row or fill it.")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _Joined(prompt + completion, len(prompt), is_templated=False)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError(
            f"The prompt is a {type(prompt).__name__} and the completion a {type(completion).__name__}. Make both "
            "texts, or both lists of {'role', 'content'} messages."
        )
    if prompt and list(completion[: len(prompt)]) == list(prompt):
        raise ValueError(
            "The answer begins with the messages of its prompt, which the model would read twice, and learn to write. "
            "Take them out of the answer. Where chosen and rejected both begin with them, remove the prompt's column."
        )
    render = renderer(tokenizer, tools, chat_template_kwargs)
    text = render([*prompt, *completion])
    border = _prompt_end(render, prompt, text) if prompt else 0
    if border is None:
        kept = common_length(render(prompt), text)
        raise ValueError(
            "The chat template writes the prompt differently once an answer follows it, from "
            f"{text[max(kept - 20, 0) : kept + 20]!r} on, so the start of the answer is unknown. Use a template that "
            "only appends, or pass the rows as texts."
        )
    return _Joined(text, border, is_templated=True)


def _is_filled(message: Row) -> bool:
    """Whether a message says something or calls a tool."""
    return bool(message.get("content") or message.get("tool_calls"))


def renderer(
    tokenizer: PreTrainedTokenizerBase, tools: Tools | None, chat_template_kwargs: TemplateSettings | None
) -> Render:
    """Returns the function that writes messages by the tokenizer's chat template."""
    settings = {"tools": tools, "tokenize": False, **(chat_template_kwargs or {})}
    require_template(settings.get("chat_template") or tokenizer.chat_template)

    def render(messages: Conversation, *, add_generation_prompt: bool = False) -> str:
        check_texts("messages", conversation=messages)
        write = cast(Callable[..., str], tokenizer.apply_chat_template)
        return write(list(messages), add_generation_prompt=add_generation_prompt, **settings)

    return render


def _prompt_end(render: Render, prompt: Conversation, text: str) -> int | None:
    """Returns where the answer starts, after the prompt and its header; None if `text` begins differently."""
    with_header = render(prompt, add_generation_prompt=True)
    if text.startswith(with_header):
        return len(with_header)
    # Some templates open a future answer differently from a given one, for instance with an empty thought.
    return common_length(with_header, text) if text.startswith(render(prompt)) else None


def _answer_span(render: Render, messages: Conversation, i: int, text: str, stops: str) -> tuple[int, int]:
    """Returns the span of message i in `text`, with its stop token and without the space after that."""
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
    """Returns the place where `text` changes if message i is marked: the start or the end of its kept content."""
    content = messages[i].get("content")
    probed = [*messages[:i], {**messages[i], "content": mark(content)}, *messages[i + 1 :]] if content else messages
    where = common_length(render(probed), text)
    if where == len(text):
        raise ValueError(
            f"Message {i} ({messages[i]['role']}) cannot be located in the chat template's text: the template changes "
            "the message and the messages before it. Put {% generation %} marks into the template, or turn each answer "
            "into a row of prompt and completion."
        )
    return where


def stop_strings(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a regular expression that matches the tokens that can end an answer."""
    return "|".join(re.escape(token) for token in tokenizer.convert_ids_to_tokens(sorted(stop_token_ids(tokenizer))))


def _encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]], *, add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Returns the ids of `text`, and 1 for each token with a character in one of the spans."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        # Some tokenizers trim spaces off the offsets. A token of spaces is then empty, at the end of its spaces. An
        # added BOS or EOS is empty, at 0.
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
        last += last < len(until)  # a token that continues after the span
        mask[lead + first : lead + last] = [1] * (last - first)
    return ids, mask


def _count_stops(ids: list[int], mask: list[int], stops: Collection[int]) -> None:
    """Sets the mask of a stop token right after a marked answer to 1, where the template's marks leave it out."""
    for i in range(1, len(ids)):
        if mask[i - 1] and not mask[i] and ids[i] in stops and ids[i - 1] not in stops:
            mask[i] = 1


def closed(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int], *, is_templated: bool
) -> tuple[list[int], list[int]]:
    """Returns the row with a stop token at its end, which counts if the token before it does."""
    eos = require_eos(tokenizer)
    if is_templated:
        stops = stop_token_ids(tokenizer)
        end = len(ids) - len(list(takewhile(lambda token: token not in stops, reversed(ids))))
        if end and not str(tokenizer.decode(ids[end:])).strip():
            return ids[:end], mask[:end]
    return (ids, mask) if ids[-1] == eos else ([*ids, eos], [*mask, mask[-1]])


def _ending_in(eos: int, ids: list[int]) -> list[int]:
    """Returns the ids with EOS at their end, once."""
    return ids if ids and ids[-1] == eos else [*ids, eos]
