"""The tokens with a loss decode to the answers' text, for several kinds of tokenizer and chat template."""

import json
import warnings

import pytest
from datasets import Dataset, IterableDataset, load_from_disk
from datasets.fingerprint import Hasher
from tests.lm import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trimtab_lm.data.formats import RowFormat, as_messages, preference_parts, prepare_dataset, row_format
from trimtab_lm.data.tokenization import (
    encode_messages,
    encode_preference,
    encode_preference_seq2seq,
    encode_prompt,
    encode_prompt_completion,
    encode_seq2seq,
    encode_text,
    require_eos,
    stop_token_ids,
)
from trimtab_lm.data.truncation import report_truncation, truncate_answers, truncate_columns, truncate_row

SENTENCES = [
    "Question: which animals sleep at noon? Answer: the cats sleep, the dogs do not.",
    "Question: who sings at night?\n\nAnswer: the birds and the frogs.",
]
MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHATML_MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
LLAMA3 = """<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}\
{{ ' ' + m.content }}</s>{% endif %}{% endfor %}"""
THINKING = """{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < last.user %}{{ m.content.split('</think>')[-1] | trim }}\
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
PLAIN = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

USER = {"role": "user", "content": "Who sings?"}
DIALOGUE = [
    USER,
    {"role": "assistant", "content": "The birds."},
    {"role": "user", "content": "Who sleeps?"},
    {"role": "assistant", "content": "The cats."},
]
THOUGHTFUL = [
    {**m, "content": f"<think>\nhm\n</think>\n\n{m['content']}"} if i % 2 else m for i, m in enumerate(DIALOGUE)
]


class WithoutOffsets(PreTrainedTokenizerFast):
    """Returns no offsets, like tokenizers written in Python."""

    is_fast = property(lambda self: False)


def dressed(core: Tokenizer, template: str | None = None, kind=PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return kind(tokenizer_object=core, chat_template=template, **names)


def byte_level(template=None, *, merges=80, trim_offsets=False, kind=PreTrainedTokenizerFast):
    """Like GPT-2 and Llama 3: a space belongs to the following word; adds no BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(SENTENCES * 5, trainer)
    return dressed(core, template, kind)


def sentencepiece(template=None, *, prepend=True, kind=PreTrainedTokenizerFast):
    """Like Llama 2: puts a space before the text, splits unseen text into bytes, and adds BOS."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = [normalizers.Prepend("▁")] if prepend else []
    core.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    words = [word for text in SENTENCES * 5 for word in text.replace("\n", " ").split()]
    core.train_from_iterator([f"▁{word}" for word in words], trainer)
    state = json.loads(core.to_str())  # make bytes ordinary tokens: training needs them as special ones
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(state))
    ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return dressed(core, template, kind)


def letters(template=None, **special):
    """One token per character, or per byte of it."""
    return byte_level(template, merges=0, **special)


def counted(tokenizer, ids, mask):
    return tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts])


TOKENIZERS = {
    "bytes": letters,
    "byte-level": byte_level,
    "trimmed offsets": lambda: byte_level(trim_offsets=True),
    "sentencepiece": sentencepiece,
    "without offsets": lambda: byte_level(kind=WithoutOffsets),
    "without offsets, BOS": lambda: sentencepiece(kind=WithoutOffsets),
}


def test_text_ends_in_one_eos():
    tokenizer = tiny.tokenizer()
    assert encode_text(tokenizer, "ab") == {"input_ids": [4, 5, tiny.EOS]}
    assert encode_text(tokenizer, "ab</s>") == {"input_ids": [4, 5, tiny.EOS]}
    assert encode_text(tokenizer, "ab", add_eos=False) == {"input_ids": [4, 5]}


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, WithoutOffsets])
def test_a_text_that_begins_with_bos_gets_no_second_one(kind):
    tokenizer = sentencepiece(kind=kind)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = tokenizer("<s>who sings?", add_special_tokens=False)["input_ids"]
    assert ids.count(bos) == 1
    assert encode_text(tokenizer, "<s>who sings?")["input_ids"] == [*ids, eos]
    assert encode_prompt(tokenizer, "<s>who sings?")["input_ids"] == ids
    assert encode_prompt(tokenizer, "<s><s>who")["input_ids"].count(bos) == 2  # the health report finds it
    row = encode_prompt_completion(tokenizer, "<s>who", " sings?")
    assert (row["input_ids"], row["completion_mask"][0]) == ([*ids, eos], 0)
    pair = encode_preference(tokenizer, {"prompt": "<s>who", "chosen": " sings?", "rejected": " sleeps"})
    assert (pair["chosen_input_ids"], pair["rejected_input_ids"].count(bos)) == ([*ids, eos], 1)
    assert encode_seq2seq(tokenizer, "<s>who", "<s>sings")["input_ids"].count(bos) == 1
    assert encode_seq2seq(tokenizer, "<s>who", "<s>sings")["labels"].count(bos) == 1


def test_a_tokenizer_without_eos_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"no EOS token.*tokenizer\.eos_token"):
        require_eos(tiny.tokenizer(eos_token=None))


def test_stop_tokens_are_eos_and_special_marks_but_not_bos_unk_and_pad():
    assert stop_token_ids(tiny.tokenizer()) == {tiny.EOS}
    tokenizer = letters()  # its pad token is EOS
    names = set(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)))
    assert names == {"</s>", *MARKS}


def test_prompt_and_completion_by_hand():
    row = encode_prompt_completion(tiny.tokenizer(), "ab", " cd")
    assert row == {"input_ids": [4, 5, 30, 6, 7, tiny.EOS], "completion_mask": [0, 0, 1, 1, 1, 1]}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Question: who sings? Answer:", " the birds"),
        ("Question: who sings? Answer: ", "the birds"),
        ("Question: who sings?\n\nAnswer:\n", "\n the birds ö 🐦"),
        ("Question: who sings? Answer: the ca", "ts"),
    ],
)
def test_prompt_and_completion_are_tokenized_together_and_all_of_the_completion_counts(name, prompt, completion):
    tokenizer = TOKENIZERS[name]()
    row = encode_prompt_completion(tokenizer, prompt, completion)
    ids, mask = row["input_ids"], row["completion_mask"]
    assert ids == [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
    first = mask.index(1)
    assert mask == [0] * first + [1] * (len(ids) - first)
    assert counted(tokenizer, ids, mask).endswith(completion.lstrip() + "</s>")
    head = tokenizer.decode(ids[:first], skip_special_tokens=True)
    assert (prompt + completion).startswith(head)
    assert len(head) <= len(prompt)
    # The first token with a loss, unless it is part of a character, reaches into the completion.
    reaches = tokenizer.decode(ids[: first + 1], skip_special_tokens=True)
    assert len(reaches) > len(prompt)


def test_every_split_of_a_text_counts_the_same_characters_with_and_without_offsets():
    text = SENTENCES[1]
    tokenizer, without = letters(), letters(kind=WithoutOffsets)
    for place in range(len(text)):
        row = encode_prompt_completion(tokenizer, text[:place], text[place:])
        assert row["completion_mask"] == [0] * place + [1] * (len(text) - place + 1)
        assert row == encode_prompt_completion(without, text[:place], text[place:])


def test_a_token_that_spans_the_border_belongs_to_the_completion():
    tokenizer = byte_level()
    whole = tokenizer.tokenize(" Answer:")
    assert len(whole) < len(" Answer:")
    for kind in (PreTrainedTokenizerFast, WithoutOffsets):
        row = encode_prompt_completion(byte_level(kind=kind), " Ans", "wer:")
        first = row["completion_mask"].index(1)
        assert len("".join(whole[:first])) <= len(" Ans") < len("".join(whole[: first + 1]))


def test_an_eos_that_the_tokenizer_adds_itself_counts_and_is_not_doubled():
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tiny.BOS), ("</s>", tiny.EOS)]
    )
    row = encode_prompt_completion(tokenizer, "a", "b")
    assert row == {"input_ids": [tiny.BOS, 4, 5, tiny.EOS], "completion_mask": [0, 0, 1, 1]}
    assert encode_prompt(tokenizer, "a") == {"input_ids": [tiny.BOS, 4]}
    assert encode_text(tokenizer, "a") == {"input_ids": [tiny.BOS, 4, tiny.EOS]}


@pytest.mark.parametrize("completion", ["", [], [{"role": "assistant", "content": ""}]])
def test_an_empty_completion_is_an_error(completion):
    prompt = "a" if isinstance(completion, str) else [USER]
    with pytest.raises(ValueError, match="completion is empty"):
        encode_prompt_completion(letters(CHATML), prompt, completion)


def test_an_answer_that_begins_with_its_prompt_is_an_error():
    answers = {side: [USER, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    with pytest.raises(ValueError, match=r"begins with the messages of its prompt, .* remove the prompt's column"):
        encode_preference(letters(CHATML), {"prompt": [USER], **answers})


def test_a_text_prompt_with_a_conversation_for_answer_is_an_error():
    with pytest.raises(ValueError, match="prompt is a str and the completion a list"):
        encode_prompt_completion(letters(CHATML), "a", DIALOGUE[1:2])


@pytest.mark.parametrize(
    ("template", "prompt", "answer"),
    [
        (CHATML, "<|im_start|>user\nWho sings?<|im_end|>\n<|im_start|>assistant\n", "The birds.<|im_end|>"),
        (
            LLAMA3,
            "<s><|start_header_id|>user<|end_header_id|>\n\nWho sings?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "The birds.<|eot_id|>",
        ),
        (MISTRAL, "<s>[INST] Who sings? [/INST]", " The birds.</s>"),
        (PLAIN, "user: Who sings?\nassistant: ", "The birds.\n</s>"),
        # The header begins a thought, which this answer lacks.
        (THINKING, "<|im_start|>user\nWho sings?<|im_end|>\n<|im_start|>assistant\n", "The birds.<|im_end|>"),
    ],
)
def test_a_conversation_counts_the_answer_with_its_stop_token(template, prompt, answer):
    for tokenizer in (letters(template), byte_level(template), letters(template, kind=WithoutOffsets)):
        row = encode_prompt_completion(tokenizer, DIALOGUE[:1], DIALOGUE[1:2])
        assert tokenizer.decode(row["input_ids"]) == prompt + answer
        assert counted(tokenizer, row["input_ids"], row["completion_mask"]) == answer


def test_templated_text_gets_no_second_bos():
    tokenizer = sentencepiece(LLAMA3, prepend=False)
    bos = tokenizer.bos_token_id
    assert encode_prompt_completion(tokenizer, "a", "b")["input_ids"].count(bos) == 1
    assert encode_prompt_completion(tokenizer, [USER], DIALOGUE[1:2])["input_ids"].count(bos) == 1
    assert encode_messages(tokenizer, DIALOGUE, assistant_only=True)["input_ids"].count(bos) == 1
    assert encode_prompt(tokenizer, [USER])["input_ids"].count(bos) == 1


def test_a_template_that_rewrites_the_prompt_is_named():
    tokenizer = letters("{{ messages | length }} {% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="writes the prompt differently once an answer follows"):
        encode_prompt_completion(tokenizer, [USER], DIALOGUE[1:2])


@pytest.mark.parametrize(
    ("template", "messages", "learnt"),
    [
        (CHATML, DIALOGUE, "The birds.<|im_end|>The cats.<|im_end|>"),
        (CHATML_MARKED, DIALOGUE, "The birds.<|im_end|>The cats.<|im_end|>"),
        (LLAMA3, DIALOGUE, "The birds.<|eot_id|>The cats.<|eot_id|>"),
        (MISTRAL, DIALOGUE, " The birds.</s> The cats.</s>"),
        (PLAIN, DIALOGUE, "The birds.\nThe cats.\n</s>"),
        (THINKING, THOUGHTFUL, "The birds.<|im_end|>hm\n</think>\n\nThe cats.<|im_end|>"),
        (CHATML, DIALOGUE[1:], "The birds.<|im_end|>The cats.<|im_end|>"),
        (CHATML, DIALOGUE[:3], "The birds.<|im_end|>"),
    ],
    ids=["chatml", "marks", "llama3", "mistral", "plain", "thinking", "answer first", "question last"],
)
def test_every_answer_counts_with_its_stop_token_and_no_header_does(template, messages, learnt):
    for tokenizer in (letters(template), byte_level(template), byte_level(template, trim_offsets=True)):
        row = encode_messages(tokenizer, messages, assistant_only=True)
        assert counted(tokenizer, row["input_ids"], row["assistant_masks"]) == learnt
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert (
            tokenizer.decode(row["input_ids"]).removesuffix("</s>").startswith(rendered.rstrip().removesuffix("</s>"))
        )


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, WithoutOffsets])
def test_a_token_that_an_answer_shares_with_the_next_turn_counts(kind):
    tokenizer = byte_level("{% for m in messages %}{{ m.content }}{% endfor %}", kind=kind)
    turns = [("user", "who"), ("assistant", " Ans"), ("user", "wer: the birds")]
    row = encode_messages(tokenizer, [{"role": r, "content": c} for r, c in turns], assistant_only=True)
    learnt = counted(tokenizer, row["input_ids"], row["assistant_masks"])
    assert " Answer".startswith(learnt)
    assert len(learnt) > len(" Ans")


def test_all_of_a_conversation_counts_unless_only_answers_do():
    row = encode_messages(letters(CHATML), DIALOGUE, assistant_only=False)
    assert row["assistant_masks"] == [1] * len(row["input_ids"])
    assert letters().decode(row["input_ids"][-1]) == "<|im_end|>"


def test_a_conversation_without_an_answer_says_which_roles_it_has():
    messages = [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]
    with pytest.raises(ValueError, match=r"No token.*\['human', 'bot'\]"):
        encode_messages(letters(CHATML), messages, assistant_only=True)


def test_sharegpt_names_are_mapped():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert as_messages(row) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert as_messages({"messages": [USER]}) == [USER]


def test_the_implicit_prompt_of_texts_ends_before_a_word():
    row = {"chosen": "Q: who? A: the cats sleep", "rejected": "Q: who? A: the caterpillar"}
    assert preference_parts(row) == ("Q: who? A: the", " cats sleep", " caterpillar")
    row = {"chosen": "Q: who?\n\nA: yes", "rejected": "Q: who?\n\nA: yes, both"}
    assert preference_parts(row) == ("Q: who?\n\nA:", " yes", " yes, both")
    row = {"chosen": "Q: who? A: ", "rejected": "Q: who? A: I"}
    assert preference_parts(row) == ("Q: who? A:", " ", " I")
    row = {"chosen": "Q: who?\n\nyes", "rejected": "Q: who?\n\nno"}
    assert preference_parts(row) == ("Q: who?", "\n\nyes", "\n\nno")
    assert preference_parts({"chosen": "yes", "rejected": "yesno"}) == ("", "yes", "yesno")


def test_the_implicit_prompt_of_conversations_is_their_common_messages():
    other = {"role": "assistant", "content": "Nobody."}
    row = {"chosen": DIALOGUE, "rejected": [*DIALOGUE[:3], other]}
    expected = (DIALOGUE[:3], DIALOGUE[3:], [other])
    assert preference_parts(row) == expected
    assert preference_parts({**row, "prompt": "Who sings?"}) == expected
    assert preference_parts({"prompt": DIALOGUE[:3], "chosen": DIALOGUE[3:], "rejected": [other]}) == expected
    with pytest.raises(ValueError, match="the same"):
        preference_parts({"chosen": DIALOGUE, "rejected": DIALOGUE})


def test_a_prompt_of_another_kind_than_the_answers_is_not_lost():
    texts = {"prompt": [USER], "chosen": "the birds", "rejected": "the cats"}
    with pytest.raises(ValueError, match=r"a list of messages and the answers are texts\. Make the answers messages"):
        preference_parts(texts)
    good, bad = ([{"role": "assistant", "content": texts[side]}] for side in ("chosen", "rejected"))
    system = {"role": "system", "content": "Be brief."}
    for start in ([], [system], [good[0]]):
        with pytest.raises(ValueError, match=r"'Who sings\?', and the answers are messages that do not begin with it"):
            preference_parts({"prompt": "Who sings?", "chosen": [*start, *good], "rejected": [*start, *bad]})
    for content in ("Who sings?", " Who sings?\n", [{"type": "text", "text": "Who sings?"}]):
        asked = [system, {"role": "user", "content": content}]
        row = {"prompt": "Who sings? ", "chosen": asked + good, "rejected": asked + bad}
        assert preference_parts(row) == (asked, good, bad)
    assert preference_parts({"prompt": "", "chosen": good, "rejected": bad}) == ([], good, bad)


def test_a_preference_by_hand():
    row = encode_preference(tiny.tokenizer(), {"prompt": "ab", "chosen": "c", "rejected": "de"})
    assert row == {
        "prompt_input_ids": [4, 5],
        "chosen_input_ids": [4, 5, 6, tiny.EOS],
        "rejected_input_ids": [4, 5, 7, 8, tiny.EOS],
    }


def test_both_answers_of_a_preference_count_from_where_either_begins():
    tokenizer = byte_level()
    row = encode_preference(tokenizer, {"prompt": "who? the b", "chosen": "irds sing", "rejected": "ees"})
    prompt = row["prompt_input_ids"]
    assert tokenizer.decode(prompt) != "who? the b"  # "b" merges with "irds"
    for name, answer in (("chosen", "birds sing</s>"), ("rejected", "bees</s>")):
        ids = row[f"{name}_input_ids"]
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(ids[len(prompt) :]).strip() == answer


def test_a_preference_without_a_prompt_to_score_from_is_an_error():
    row = {"prompt": "", "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match="prompt has no token"):
        encode_preference(byte_level(), row)
    tokenizer = sentencepiece()
    assert encode_preference(tokenizer, row)["prompt_input_ids"] == [tokenizer.bos_token_id]


def test_encoder_decoder_rows_end_in_eos_on_both_sides():
    tokenizer = tiny.tokenizer()
    assert encode_seq2seq(tokenizer, "ab", "c") == {"input_ids": [4, 5, tiny.EOS], "labels": [6, tiny.EOS]}
    assert encode_preference_seq2seq(tokenizer, {"prompt": "a", "chosen": "b", "rejected": "cd"}) == {
        "prompt_input_ids": [4, tiny.EOS],
        "chosen_input_ids": [5, tiny.EOS],
        "rejected_input_ids": [6, 7, tiny.EOS],
    }
    templated = encode_seq2seq(letters(MISTRAL), [USER], DIALOGUE[1:2])
    assert letters().decode(templated["labels"]) == " The birds.</s>"


class TwoAlphabets(PreTrainedTokenizerFast):
    """Like translation models: tokenizes a target differently from a source."""

    def __call__(self, text=None, *, text_target=None, **settings):
        return super().__call__(text if text_target is None else text_target.upper(), **settings)


def test_a_target_is_tokenized_as_one():
    tokenizer = letters(kind=TwoAlphabets)
    row = encode_seq2seq(tokenizer, "ab", "cd")
    assert [tokenizer.decode(row[name]) for name in ("input_ids", "labels")] == ["ab</s>", "CD</s>"]


def test_formats_are_told_by_their_columns_in_the_order_asked():
    accepted = [RowFormat.TOKENIZED, RowFormat.MESSAGES, RowFormat.PROMPT_COMPLETION, RowFormat.TEXT]
    assert row_format(["text", "input_ids"], accepted, needed_for="SFT") is RowFormat.TOKENIZED
    assert row_format(["conversations"], accepted, needed_for="SFT") is RowFormat.MESSAGES
    assert row_format(["body"], accepted, needed_for="SFT", text_field="body") is RowFormat.TEXT
    pairs = [RowFormat.PREFERENCE, RowFormat.IMPLICIT_PREFERENCE]
    assert row_format(["chosen", "rejected", "prompt"], pairs, needed_for="DPO") is RowFormat.PREFERENCE
    assert row_format(["chosen", "rejected"], pairs, needed_for="DPO") is RowFormat.IMPLICIT_PREFERENCE
    with pytest.raises(ValueError, match=r"DPO.*\['answer'\].*prompt \+ chosen \+ rejected; chosen \+ rejected"):
        row_format(["answer"], pairs, needed_for="DPO")


def test_truncation_of_a_row_by_hand():
    ids, mask = [1, 10, 11, 12, 2], [0, 0, 1, 1, 1]
    cut = truncate_row(ids, mask, max_length=3)
    assert (cut.input_ids, cut.mask, cut.tokens_cut, cut.is_emptied) == ([1, 10, 11], [0, 0, 1], 2, False)
    assert truncate_row(ids, mask, max_length=3, stop_ids={2}).input_ids == [1, 10, 2]
    assert truncate_row(ids, mask, max_length=3, mode="keep_end").input_ids == [11, 12, 2]
    assert truncate_row(ids, mask, max_length=3, mode="keep_end", bos_token_id=1).input_ids == [1, 12, 2]
    assert truncate_row(ids, mask, max_length=2).is_emptied
    for max_length in (5, None):
        assert truncate_row(ids, mask, max_length=max_length)[:3] == (ids, mask, 0)


def pair(prompt: int, chosen: int, rejected: int):
    """Returns a row of these lengths: BOS is 1, EOS 2; the prompt counts from 100, the answers from 200 and 300."""
    head = [1, *range(100, 99 + prompt)]
    sides = {"chosen": [*range(200, 199 + chosen), 2], "rejected": [*range(300, 299 + rejected), 2]}
    row = {"prompt_input_ids": head}
    for name, answer in sides.items():
        row[f"{name}_input_ids"] = head + answer
    return row


def lengths(row):
    prompt = len(row["prompt_input_ids"])
    return prompt, *(len(row[f"{name}_input_ids"]) - prompt for name in ("chosen", "rejected"))


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize(
    ("before", "max_length", "max_prompt_length", "after"),
    [
        ((10, 5, 5), 20, None, (10, 5, 5)),
        ((10, 5, 5), None, 4, (4, 5, 5)),
        ((10, 5, 5), 20, 4, (4, 5, 5)),
        ((10, 8, 3), 15, None, (7, 8, 3)),  # the prompt is cut for the longer answer
        ((12, 18, 3), 20, None, (10, 10, 3)),  # the prompt to half of max_length, and then the answer
        ((3, 50, 30), 20, 8, (3, 17, 17)),  # the answers may use what a short prompt leaves
        ((28, 50, 30), 40, 8, (8, 32, 30)),
    ],
)
def test_a_pair_is_cut_at_its_prompt_first_and_keeps_bos_and_eos(mode, before, max_length, max_prompt_length, after):
    row = pair(*before)
    settings = {"max_length": max_length, "max_prompt_length": max_prompt_length, "mode": mode}
    cut = truncate_answers(row, bos_token_id=1, stop_ids={2}, **settings)
    assert lengths(cut) == after
    assert cut["tokens_cut"] == sum(before) - sum(after)
    prompt = cut["prompt_input_ids"]
    assert prompt[0] == 1
    if mode == "keep_end":
        assert prompt[1:] == row["prompt_input_ids"][len(row["prompt_input_ids"]) - len(prompt) + 1 :]
    else:
        assert prompt == row["prompt_input_ids"][: len(prompt)]
    for name, first in (("chosen", 200), ("rejected", 300)):
        ids = cut[f"{name}_input_ids"]
        answer = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt
        assert answer[-1] == 2
        if mode == "keep_start":
            assert answer[:-1] == list(range(first, first + len(answer) - 1))
        else:
            assert answer == row[f"{name}_input_ids"][-len(answer) :]


def test_no_length_empties_an_answer_of_a_pair():
    for max_length in range(2, 30):
        cut = truncate_answers(pair(13, 9, 4), max_length=max_length, max_prompt_length=None, stop_ids={2})
        assert min(lengths(cut)) >= 1
        assert max(len(cut["chosen_input_ids"]), len(cut["rejected_input_ids"])) <= max_length


def test_encoder_decoder_columns_are_cut_to_their_own_limits_and_keep_eos():
    row = {"prompt_input_ids": [5, 6, 7, 2], "chosen_input_ids": [8, 9, 10, 2], "rejected_input_ids": [8, 2]}
    limits = {"prompt_input_ids": 2, "chosen_input_ids": 3, "rejected_input_ids": 3}
    cut = truncate_columns(row, limits, mode="keep_start", stop_ids={2})
    assert cut["prompt_input_ids"] == [5, 2]
    assert cut["chosen_input_ids"] == [8, 9, 2]
    assert cut["rejected_input_ids"] == [8, 2]
    assert cut["tokens_cut"] == 3
    assert truncate_columns(row, limits, mode="keep_end")["prompt_input_ids"] == [7, 2]


def encoded_rows(max_length):
    """Rows of lengths 3, 5 and 7 with prompts of 1, 1 and 5; the trainer needs `score` but not `prompt`."""
    tokenizer = tiny.tokenizer()

    def encode(row):
        ids = encode_prompt_completion(tokenizer, row["prompt"], row["completion"])
        cut = truncate_row(ids["input_ids"], ids["completion_mask"], max_length=max_length)
        return {"input_ids": cut.input_ids, "completion_mask": cut.mask, **cut.counts}

    return encode


ROWS = {"prompt": ["a", "a", "aaaaa"], "completion": ["b", "bcd", "b"], "score": [1, 2, 3]}


def as_stream(rows):
    columns = list(rows)
    return IterableDataset.from_generator(
        lambda: (dict(zip(columns, values, strict=True)) for values in zip(*rows.values(), strict=True))
    )


@pytest.mark.parametrize("kind", [Dataset.from_dict, as_stream])
def test_a_dataset_is_encoded_and_what_was_cut_is_said_once(kind):
    dataset = prepare_dataset(kind(ROWS), encoded_rows(4), keep=["score"], batch_size=2)
    with pytest.warns(UserWarning, match="max_length=4: cut") as caught:
        rows = list(report_truncation(dataset, limit="max_length=4"))
    assert len(caught) == 1
    if kind is not as_stream:
        assert "cut 4 tokens from 2 of 3 rows, and dropped 1 that had nothing left to learn" in str(caught[0].message)
    assert rows == [
        {"input_ids": [4, 5, 2], "completion_mask": [0, 1, 1], "score": 1},
        {"input_ids": [4, 5, 6, 7], "completion_mask": [0, 1, 1, 1], "score": 2},
    ]


def test_nothing_is_said_where_nothing_is_cut_and_a_dataset_that_loses_every_row_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = prepare_dataset(Dataset.from_dict(ROWS), encoded_rows(None))
        assert report_truncation(dataset, limit="max_length=None").column_names == ["input_ids", "completion_mask"]
    dataset = prepare_dataset(Dataset.from_dict(ROWS), encoded_rows(1))
    with pytest.raises(ValueError, match="max_length=1 leaves no token to learn from"):
        report_truncation(dataset, limit="max_length=1")


def test_pre_tokenized_columns_may_keep_their_names():
    dataset = prepare_dataset(Dataset.from_dict({"input_ids": [[1, 2]], "x": [0]}), lambda row: {"input_ids": [7]})
    assert list(dataset) == [{"input_ids": [7]}]


def test_only_rows_on_disk_are_encoded_under_the_hash_of_the_function(tmp_path, monkeypatch):
    """A file may hold the result; of rows in memory there is none, and the hash of SFT's function takes a second."""
    rows = Dataset.from_dict({"x": [1, 2]})
    rows.save_to_disk(tmp_path)
    once, again = (prepare_dataset(load_from_disk(tmp_path), lambda row: {"y": row["x"]}) for _ in range(2))
    assert once.cache_files == again.cache_files != []
    hashed: list[object] = []
    hash_of = Hasher.hash
    monkeypatch.setattr(Hasher, "hash", staticmethod(lambda value: hashed.append(value) or hash_of(value)))
    assert list(prepare_dataset(rows, lambda row: {"y": row["x"]})) == [{"y": 1}, {"y": 2}]
    assert not any(map(callable, hashed))


@pytest.mark.parametrize("kind", [Dataset.from_dict, as_stream])
def test_an_empty_completion_names_its_row(kind):
    rows = {**ROWS, "completion": ["b", "b", ""]}
    with pytest.raises(ValueError, match="Row 2: The completion is empty"):
        list(prepare_dataset(kind(rows), encoded_rows(None), batch_size=2))
