"""What rows become: ids, labels, packed rows, and rows of constant length."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.lm import tiny
from tokenizers import processors

from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.legacy.constant_length import ConstantLengthDataset
from trimtab_lm.sft.config import SFTConfig
from trimtab_lm.sft.data import PackedDataset, pack, tokenize_rows

ids_of = tiny.VOCABULARY


def encode(text: str) -> list[int]:
    return [ids_of[character] for character in text]


def config(**settings) -> SFTConfig:
    return SFTConfig("unused", use_cpu=True, **settings)


def tokenized(columns, tokenizer=None, formatting_func=None, is_encoder_decoder=False, **settings):
    dataset = columns if isinstance(columns, IterableDataset) else Dataset.from_dict(columns)
    return tokenize_rows(
        dataset,
        tokenizer or tiny.tokenizer(),
        config(**settings),
        formatting_func=formatting_func,
        is_encoder_decoder=is_encoder_decoder,
    )


def test_a_text_is_learnt_whole_with_its_end():
    row = tokenized({"text": ["abc"], "other": [1]})[0]
    assert row == {"input_ids": [*encode("abc"), tiny.EOS], "labels": [*encode("abc"), tiny.EOS]}


def test_another_text_column():
    assert tokenized({"story": ["ab"]}, dataset_text_field="story")[0]["input_ids"] == [*encode("ab"), tiny.EOS]


PAIR = {"prompt": ["ab "], "completion": ["cd"]}


@pytest.mark.parametrize(("only", "counted"), [(None, "cd"), (True, "cd"), (False, "ab cd")])
def test_completions_are_learnt_alone_unless_told_otherwise(only, counted: str):
    row = tokenized(PAIR, completion_only_loss=only)[0]
    assert row["input_ids"] == [*encode("ab cd"), tiny.EOS]
    assert [label for label in row["labels"] if label != -100] == [*encode(counted), tiny.EOS]


def test_ids_may_come_with_labels_or_padding():
    row = {"input_ids": [[5, 6, 7, 0]], "attention_mask": [[1, 1, 1, 0]], "labels": [[-100, 6, 7, -100]]}
    assert tokenized(row)[0] == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    assert tokenized({"input_ids": [[5, 6]]})[0] == {"input_ids": [5, 6], "labels": [5, 6]}


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}.{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
)
TALK = [{"role": "user", "content": "xy"}, {"role": "assistant", "content": "bc"}]


@pytest.mark.parametrize(("only", "counted"), [(False, "u.xy$a.bc$"), (True, "bc$")])
def test_conversations_and_the_assistants_part_of_them(only: bool, counted: str):
    tokenizer = tiny.tokenizer(chat_template=TEMPLATE)
    row = tokenized({"messages": [TALK]}, tokenizer, assistant_only_loss=only)[0]
    names = {index: character for character, index in ids_of.items()} | {tiny.EOS: "$"}
    assert "".join(names[token] for token in row["input_ids"]) == "u.xy$a.bc$"
    assert "".join(names[label] for label in row["labels"] if label != -100) == counted


def test_a_rows_own_settings_of_the_template_come_before_those_of_the_config():
    tokenizer = tiny.tokenizer(chat_template=TEMPLATE.replace("{{ m.role[0] }}", "{{ mark }}{{ m.role[0] }}"))
    columns = {"messages": [TALK[:1]] * 3, "chat_template_kwargs": [{"mark": "b"}, {"other": 1}, None]}
    rows = tokenized(columns, tokenizer, chat_template_kwargs={"mark": "c"})
    assert [row["input_ids"] for row in rows] == [[*encode(f"{mark}u.xy"), tiny.EOS] for mark in "bcc"]
    pairs = {"prompt": [TALK[:1]], "completion": [TALK[1:]], "chat_template_kwargs": [{"mark": "b"}]}
    assert tokenized(pairs, tokenizer)[0]["input_ids"][0] == encode("b")[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda row: row["q"] + "." + row["a"],
        lambda rows: [q + "." + a for q, a in zip(rows["q"], rows["a"], strict=True)],
    ],
    ids=["of a row", "of columns, as in 2024"],
)
def test_formatting_functions_of_both_kinds(function):
    rows = tokenized({"q": ["ab", "c"], "a": ["x", "yz"]}, formatting_func=function)
    assert [row["input_ids"] for row in rows] == [[*encode("ab.x"), tiny.EOS], [*encode("c.yz"), tiny.EOS]]


def test_encoder_decoder_rows_are_prompts_and_completions():
    row = tokenized(PAIR, is_encoder_decoder=True)[0]
    assert row == {"input_ids": [*encode("ab "), tiny.EOS], "labels": [*encode("cd"), tiny.EOS]}
    with pytest.raises(ValueError, match="prompt and completion"):
        tokenized({"text": ["ab"]}, is_encoder_decoder=True)


def test_a_cut_target_does_not_end_in_eos_and_a_cut_source_does():
    with pytest.warns(UserWarning, match=r"max_length=3: cut 4 tokens from 1 of 1 rows"):
        rows = tokenized({"prompt": ["abcd"], "completion": ["efgh"]}, is_encoder_decoder=True, max_length=3)
    assert rows[0] == {"input_ids": [*encode("ab"), tiny.EOS], "labels": encode("efg")}


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", "abc"), ("keep_end", "de$")])
def test_long_rows_are_cut_and_it_is_said_how_much(mode: str, kept: str):
    with pytest.warns(UserWarning, match=r"max_length=3: cut 3 tokens from 1 of 2 rows"):
        rows = tokenized({"text": ["abcde", "a"]}, max_length=3, truncation_mode=mode)
    assert rows[0]["input_ids"] == [tiny.EOS if c == "$" else ids_of[c] for c in kept]


def test_rows_whose_completion_is_cut_away_are_dropped():
    with pytest.warns(UserWarning, match="dropped 1 that had nothing left"):
        rows = tokenized({"prompt": ["abcd", "a"], "completion": ["x", "y"]}, max_length=3)
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({"texts": ["a"]}, {}, r"columns \['texts'\]"),
        ({"text": [""]}, {}, "Row 0: The text is empty"),
        ({"prompt": ["a", "b"], "completion": ["c", ""]}, {}, "Row 1: The completion is empty"),
        ({"messages": [None, TALK]}, {}, "Row 0: The messages is None"),
        ({"input_ids": [[5, 6]], "labels": [[-100, -100]]}, {}, "Row 0: None of its tokens counts"),
        ({"input_ids": [[5, 6, 7]], "labels": [[-100, 8, 9]]}, {}, r"Row 0: labels\[1\] is 8 and input_ids\[1\] is 6"),
        ({"input_ids": [[5, 6, 7]], "labels": [[6, 7]]}, {}, "Row 0: labels has 2 tokens and input_ids has 3"),
        ({"text": ["a"]}, {"assistant_only_loss": True}, "messages"),
        ({"text": ["a"]}, {"completion_only_loss": True}, "prompt and completion"),
        ({"prompt": ["abc"], "completion": ["d"]}, {"max_length": 2}, "no token to learn from in any of 1 rows"),
    ],
)
def test_rows_with_nothing_to_learn_are_refused(columns, settings, message: str):
    with pytest.raises(ValueError, match=message):
        tokenized(columns, **settings)


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(ValueError, match="no EOS"):
        tokenized({"text": ["a"]}, tiny.tokenizer(eos_token=None))


def test_special_tokens_of_the_text_may_be_all_there_are():
    row = tokenized({"text": ["ab"]}, dataset_kwargs={"add_special_tokens": False})[0]
    assert row["input_ids"] == encode("ab")
    tokenizer = bos_adding()
    for completion, special in (("cd", None), ("cd</s>", {"add_special_tokens": False})):
        columns = {"prompt": ["ab "], "completion": [completion]}
        row = tokenized(columns, tokenizer, dataset_kwargs=special)[0]
        assert row["input_ids"] == [*([tiny.BOS] if special is None else []), *encode("ab cd"), tiny.EOS]
        assert [label for label in row["labels"] if label != -100] == [*encode("cd"), tiny.EOS]
    with pytest.raises(ValueError, match="is for causal models"):
        tokenized(PAIR, is_encoder_decoder=True, dataset_kwargs={"add_special_tokens": False})
    ids = {"input_ids": [[5, tiny.EOS]], "labels": [[6, tiny.EOS]]}
    (row,) = tokenized(ids, is_encoder_decoder=True, dataset_kwargs={"add_special_tokens": False})
    assert row["labels"] == ids["labels"][0]


def bos_adding():
    """Returns a tokenizer that adds BOS."""
    tokenizer = tiny.tokenizer()
    process = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tiny.BOS)])
    tokenizer.backend_tokenizer.post_processor = process
    return tokenizer


def test_packed_texts_that_begin_with_bos_get_no_second_one():
    texts = ["ab", "<s>cd", "<s>ef", "g"]
    rows = ConstantLengthDataset(bos_adding(), [{"text": text} for text in texts], "text", seq_length=32, shuffle=False)
    ids = [token for text in ("ab", "cd", "ef", "g") for token in (tiny.BOS, *encode(text), tiny.EOS)]
    assert next(iter(rows))["input_ids"][: len(ids)].tolist() == ids


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation_mode": "middle"},
        {"packing_strategy": "worst_fit"},
        {"infinite": True},
        {"chars_per_token": 2.0},
        {"packing": True, "infinite": True},
        {"packing": True, "max_length": None},
        {"eval_packing": True, "max_length": None},
        {"max_length": 1},
        {"max_length": -1},
        {"dataset_kwargs": {"x": 1}},
        {"assistant_only_loss": True, "completion_only_loss": True},
    ],
)
def test_settings_that_contradict_are_refused(settings):
    with pytest.raises(ValueError, match="|".join([*settings, "max_steps"])):
        config(**settings)


# Packing ---------------------------------------------------------------------------------------------------------


def test_packed_rows_hold_whole_documents():
    rows = tokenized({"text": ["abcde", "ab", "abc"]})  # 6, 3 and 4 tokens
    packed = PackedDataset(rows, 10)
    assert [packed[i]["seq_lengths"] for i in range(len(packed))] == [[6, 4], [3]]
    assert packed[0]["input_ids"] == rows[0]["input_ids"] + rows[2]["input_ids"]


def test_a_stream_is_packed_as_it_is_read():
    def texts():
        for text in ("abcde", "ab", "abc", "abcd"):
            yield {"text": text}

    rows = tokenized(IterableDataset.from_generator(texts))
    packed = list(pack(rows, config(packing=True, max_length=10, dataset_batch_size=3)))
    assert [row["seq_lengths"] for row in packed] == [[6, 4], [3], [5]]


def test_the_collator_keeps_documents_apart():
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, -100, 8], "seq_lengths": [2, 2]}, {"input_ids": [9, 4, 4]}]
    batch = DocumentCollator(0, layout="packed")(rows)
    # The longest document is 3: the others share a second row.
    assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 0], [9, 4, 4]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 8, -100], [-100, 4, 4]]
    assert "attention_mask" not in batch


def test_what_pads_may_be_the_end_token():
    rows = [{"input_ids": [5, tiny.EOS]}, {"input_ids": [5, 6, tiny.EOS]}]
    batch = DocumentCollator(tiny.EOS, layout="padded")(rows)
    assert batch["labels"].tolist() == [[-100, tiny.EOS, -100], [-100, 6, tiny.EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_documents_without_a_label_are_left_out():
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "seq_lengths": [2, 2]}
    assert DocumentCollator(0, layout="packed")([row])["input_ids"].tolist() == [[7, 8]]


@pytest.mark.parametrize("layout", ["row", "packed", "padded"])
def test_the_collator_drops_padding_of_its_rows(layout):
    plain = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 4, 5], "labels": [-100, 9, 4, 5], "seq_lengths": [2, 2]}]
    padded = [
        {"input_ids": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1], "position_ids": [0, 0, 0, 1, 2]},
        {"input_ids": [8, 9, 4, 5, 0], "labels": [-100, 9, 4, 5, 0], "attention_mask": torch.tensor([1, 1, 1, 1, 0])},
    ]
    padded[1]["seq_lengths"] = [2, 3]
    expected, batch = (DocumentCollator(0, layout=layout)(rows) for rows in (plain, padded))
    assert expected.keys() == batch.keys()
    assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_the_collator_drops_padding_of_an_encoder_decoders_rows():
    collator = DocumentCollator(0, layout="encoder-decoder", decoder_start_token_id=0)
    row = {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": [7, 8, -100, -100]}
    expected, batch = collator([{"input_ids": [5, 6], "labels": [7, 8]}]), collator([row])
    assert all(torch.equal(expected[name], batch[name]) for name in expected)


TEXTS = ["abc", "defgh", "i", "jk", "lmnopq"]


def constant(**settings) -> ConstantLengthDataset:
    rows = Dataset.from_dict({"text": TEXTS})
    return ConstantLengthDataset(tiny.tokenizer(), rows, "text", seq_length=8, **settings)


@pytest.mark.parametrize("characters", [0.01, 3.6])
def test_no_token_is_dropped_whatever_the_buffer(characters: float):
    rows = list(constant(shuffle=False, num_of_sequences=1, chars_per_token=characters))
    stream = [token for text in TEXTS for token in [*encode(text), tiny.EOS]]
    read = torch.cat([row["input_ids"] for row in rows]).tolist()
    assert read[: len(stream)] == stream
    assert {len(row["input_ids"]) for row in rows} == {8}
    # Every token has a loss except a document's first one in each row (nothing predicts it) and the padding at the end.
    learnt = sum(int((row["labels"] != -100).sum()) for row in rows)
    starts = sum(int((row["position_ids"] == 0).sum()) for row in rows)
    assert learnt + starts == len(read)
    assert all((row["labels"] == row["input_ids"])[row["position_ids"] > 0].all() for row in rows)


def test_position_ids_start_again_with_every_text():
    first = next(iter(constant(shuffle=False)))
    assert first["input_ids"].tolist() == [*encode("abc"), tiny.EOS, *encode("defg")]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_rows_are_shuffled_with_random_numbers_of_their_own():
    state = torch.get_rng_state()
    one, other = ([row["input_ids"].tolist() for row in constant(seed=seed)] for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert one == [row["input_ids"].tolist() for row in constant(seed=0)]
    assert sorted(one) == sorted(other) or one != other
    plain = [row["input_ids"].tolist() for row in constant(shuffle=False)]
    assert sorted(one) == sorted(plain)


def test_without_an_end_it_begins_again():
    rows = iter(constant(infinite=True, shuffle=False, num_of_sequences=1, chars_per_token=0.01))
    read = torch.cat([next(rows)["input_ids"] for _ in range(6)]).tolist()
    stream = [token for text in TEXTS for token in [*encode(text), tiny.EOS]]
    assert read == (stream * 3)[:48]


def test_the_end_token_between_texts_is_a_choice():
    rows = list(constant(shuffle=False, append_concat_token=False))
    assert torch.cat([row["input_ids"] for row in rows])[:17].tolist() == encode("".join(TEXTS))


def test_an_id_of_zero_is_an_id():
    tokenizer = tiny.tokenizer(eos_token="<pad>")  # its id is 0
    rows = ConstantLengthDataset(tokenizer, [{"text": "ab"}, {"text": "c"}], "text", seq_length=5, eos_token_id=9)
    assert next(iter(rows))["input_ids"].tolist() == [*encode("ab"), 0, *encode("c"), 0]


def test_data_workers_share_the_rows():
    loader = torch.utils.data.DataLoader(constant(shuffle=False), batch_size=None, num_workers=2)
    assert sorted(row["input_ids"].tolist() for row in loader) == sorted(
        row["input_ids"].tolist() for row in constant(shuffle=False)
    )
