"""Rows of widespread formats as the columns that trainers read, and chat templates for base models."""

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trimtab_lm.data.formats import Text, as_messages

ANSWERS = {("instruction", "output"): "alpaca", ("question", "answer"): "gsm8k"}
"""Columns of a question and its answer, and the data set that made them widespread."""
QUESTIONS = tuple(question for question, _ in ANSWERS)
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + 'END' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + 'END' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def columns_of_words(words: str) -> dict[str, str]:
    """The dict of `prompt=question,completion=answer`.

    Raises:
        ValueError: the words have another form.
    """
    pairs = [pair.strip().split("=") for pair in words.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ValueError(f"columns={words}: write new=old for each column, such as prompt=question,completion=answer.")
    return {new.strip(): old.strip() for new, old in pairs}


def with_columns(rows: Dataset, names: Mapping[str, str]) -> Dataset:
    """The rows with columns renamed; a column that has a new name already makes room.

    Args:
        names: from the new name to the present one.

    Raises:
        ValueError: there is no column of that name.
    """
    if absent := [old for old in names.values() if old not in rows.column_names]:
        raise ValueError(f"columns: there is no column {', '.join(absent)}. The dataset has {rows.column_names}.")
    replaced = [new for new in names if new in rows.column_names and new not in names.values()]
    return rows.remove_columns(replaced).rename_columns({old: new for new, old in names.items()})


def recognized(rows: Dataset, load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> Dataset:
    """Adds prompt and completion, or prompt, chosen and rejected, to rows of a widespread format; keeps other rows.

    The formats are alpaca's (instruction, input, output), gsm8k's (question, answer), both with chosen and rejected in
    place of the answer, and ShareGPT's pairs (conversations, chosen, rejected). A column `system` beside them becomes
    a system message. Rows with a column `text` are kept, except alpaca's, which repeat the other columns there.

    Args:
        load_tokenizer: called for alpaca's and gsm8k's rows. With a chat template, prompts and answers become
            conversations; without, texts, each prompt with a line break at its end.

    Raises:
        ValueError: a row has a system message, and the tokenizer no chat template.
    """
    present = set(rows.column_names)
    if {"conversations", "chosen", "rejected"} <= present and "prompt" not in present:
        return rows.map(_sharegpt_pair)
    question = next((name for name in QUESTIONS if name in present), None)
    is_alpaca = {"instruction", "output"} <= present
    if question is None or present & {"prompt", "messages", "conversations"} or ("text" in present and not is_alpaca):
        return rows
    answer = next((second for first, second in ANSWERS if first == question and second in present), None)
    is_chat = load_tokenizer().chat_template is not None

    def convert(row: Mapping[str, Any]) -> dict[str, Text]:
        asked = "\n\n".join(text for text in (row[question], row.get("input")) if text)
        if _system(row) and not is_chat:
            raise ValueError(
                f"A row has the system message {reprlib.repr(row['system'])}, and the tokenizer has no chat template. "
                "Set --chat_template, or rename the column to leave it out: --columns unused=system."
            )
        columns: dict[str, Text] = {"prompt": [*_system(row), *_turn("user", asked)] if is_chat else f"{asked}\n"}
        if answer is not None:
            columns["completion"] = _turn("assistant", row[answer]) if is_chat else row[answer]
        if is_chat:
            texts = {name: row[name] for name in ("chosen", "rejected") if isinstance(row.get(name), str)}
            columns |= {name: _turn("assistant", text) for name, text in texts.items()}
        return columns

    return rows.map(convert)


def _turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _system(row: Mapping[str, Any]) -> list[dict[str, str]]:
    return _turn("system", row["system"]) if row.get("system") else []


def _sharegpt_pair(row: Mapping[str, Any]) -> dict[str, Text]:
    answers = {name: as_messages({"messages": [row[name]]}) for name in ("chosen", "rejected")}
    return {"prompt": [*_system(row), *as_messages({"messages": row["conversations"]})], **answers}


def tokenizer_of(model: str, template: str | None, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with a chat template.

    Args:
        model: hub id or folder.
        template: a file of a template in Jinja; chatml; or the hub id or folder of a model that has one. None: the
            tokenizer's own.
        options: arguments of `from_pretrained` for the model's tokenizer.

    Raises:
        ValueError: the named model has no chat template.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, **options)
    if template is None:
        return tokenizer
    if template == "chatml":
        # A tokenizer without ChatML's tokens splits them; its end-of-sequence token ends an answer in one token.
        end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else str(tokenizer.eos_token)
        tokenizer.chat_template = CHATML.replace("END", end)
    elif Path(template).is_file():
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    else:
        tokenizer.chat_template = AutoTokenizer.from_pretrained(template).chat_template
        if tokenizer.chat_template is None:
            raise ValueError(f"chat_template={template}: that model has no chat template. Name a file, or chatml.")
    return tokenizer
