"""Pairs in every documented format become token ids, are shortened by rule, and form batches."""

import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.lm import tiny
from tests.lm.reward.run_distributed import config, pairs

from trimtab_lm.reward.collator import SIDES, PairCollator, RewardDataCollatorWithPadding, pair_rows, sequences
from trimtab_lm.reward.data import prepare_pairs

TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


def prepared(rows: list[dict[str, Any]], folder: Any, tokenizer: Any = None, keeps_columns: bool = False, **settings):
    tokenizer = tokenizer or tiny.tokenizer()
    return prepare_pairs(Dataset.from_list(rows), tokenizer, config(folder, **settings), keeps_columns=keeps_columns)


def texts(dataset: Any) -> list[tuple[str, str]]:
    """Returns chosen and rejected texts, decoded with their special tokens."""
    decode = tiny.tokenizer().decode
    return [(decode(row["input_ids_chosen"]), decode(row["input_ids_rejected"])) for row in dataset]


EXPECTED = [("how do fine</s>", "how do badly</s>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "how do ", "chosen": "fine", "rejected": "badly"},
        {"chosen": "how do fine", "rejected": "how do badly"},
        {
            f"{name}_{side}": value
            for side, text in (("chosen", "how do fine"), ("rejected", "how do badly"))
            for name, value in (
                ("input_ids", [*tiny.tokenizer()(text)["input_ids"], tiny.EOS, tiny.PAD]),
                ("attention_mask", [1] * (len(text) + 1) + [0]),
            )
        },
    ],
    ids=["explicit prompt", "implicit prompt", "tokenized"],
)
def test_formats_give_the_same_ids(row: dict[str, Any], tmp_path):
    dataset = prepared([row], tmp_path)
    assert texts(dataset) == EXPECTED
    assert dataset["attention_mask_chosen"] == [[1] * 12]


def test_conversations_go_through_the_template(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompt = [{"role": "user", "content": "hi"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    explicit = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    implicit = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    for row in (explicit, implicit):
        assert texts(prepared([row], tmp_path, tokenizer)) == [("hi</s>yes</s>", "hi</s>no</s>")]


def test_answers_need_no_prompt(tmp_path):
    assert texts(prepared([{"chosen": "yes", "rejected": "no"}], tmp_path)) == [("yes</s>", "no</s>")]


def test_padding_of_tokenized_rows_goes_wherever_it_is(tmp_path):
    row = {
        "input_ids_chosen": [tiny.PAD, 5, tiny.PAD, 6],
        "attention_mask_chosen": [0, 1, 1, 1],
        "input_ids_rejected": [7, tiny.EOS, tiny.EOS],
        "attention_mask_rejected": [1, 1, 0],
    }
    dataset = prepared([row], tmp_path)
    assert dataset[0]["input_ids_chosen"] == [5, tiny.PAD, 6]  # a padding token with mask 1 is text
    assert dataset[0]["input_ids_rejected"] == [7, tiny.EOS]


def test_tokenizers_that_end_in_sep_need_no_eos(tmp_path):
    bert = tiny.tokenizer(eos_token=None, bos_token=None, cls_token="<s>", sep_token="</s>")
    row = {"prompt": "how ", "chosen": "abcdef", "rejected": "abcdeg"}
    assert texts(prepared([row], tmp_path, bert)) == [("how abcdef", "how abcdeg")]


# Length ------------------------------------------------------------------------------------------------------------

LONG = [
    {"prompt": "ab ", "chosen": "cd", "rejected": "e"},
    {"prompt": "ab ", "chosen": "cdefghij", "rejected": "e"},
]


def test_filter_drops_a_pair_of_which_either_text_is_too_long(tmp_path):
    with pytest.warns(UserWarning, match=r"Dropped 1 of 2 pairs, .* max_length=6"):
        dataset = prepared(LONG, tmp_path, max_length=6)
    assert texts(dataset) == [("ab cd</s>", "ab e</s>")]
    assert set(dataset.column_names) == {
        f"{name}_{side}" for name in ("input_ids", "attention_mask") for side in ("chosen", "rejected")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(prepared(LONG, tmp_path, max_length=12)) == 2


def test_filter_drops_pairs_of_a_stream_as_it_is_read(tmp_path):
    stream = Dataset.from_list(LONG).to_iterable_dataset()
    dataset = prepare_pairs(stream, tiny.tokenizer(), config(tmp_path, max_length=6))
    assert isinstance(dataset, IterableDataset)
    with pytest.warns(UserWarning, match="max_length=6 tokens: it is dropped"):
        assert texts(dataset) == [("ab cd</s>", "ab e</s>")]


@pytest.mark.parametrize("is_tokenized", [False, True])
def test_keep_start_and_keep_end_cut_by_their_rule(is_tokenized: bool, tmp_path):
    """The limit is six tokens: three for the prompt, three for an answer, where keep_start preserves EOS."""
    tokenizer = tiny.tokenizer()
    rows = [{"prompt": "<s>abcd ", "chosen": "efghij", "rejected": "xy"}]
    if is_tokenized:
        rows = [
            {
                f"input_ids_{side}": tokenizer("<s>abcd " + rows[0][side] + "</s>")["input_ids"]
                for side in ("chosen", "rejected")
            }
        ]
    with pytest.warns(UserWarning, match="max_length=6: cut"):
        start = prepared(rows, tmp_path, max_length=6, truncation_mode="keep_start")
    assert texts(start) == [("<s>abef</s>", "<s>abxy</s>")]
    with pytest.warns(UserWarning, match="max_length=6: cut"):
        end = prepared(rows, tmp_path, max_length=6, truncation_mode="keep_end")
    assert texts(end) == [("<s>d ij</s>", "<s>d xy</s>")]


def test_a_pair_whose_answers_are_cut_to_the_same_is_dropped(tmp_path):
    row = {"prompt": "a ", "chosen": "bcdefg", "rejected": "bcdefh"}
    with pytest.warns(UserWarning, match=r"Dropped 1 of 2 pairs, .* same tokens \(max_length=5\)"):
        dataset = prepared([row, LONG[0]], tmp_path, max_length=5, truncation_mode="keep_start")
    assert len(dataset) == 1


@pytest.mark.parametrize("settings", [{}, {"max_length": 9}, {"max_length": 9, "truncation_mode": "keep_end"}])
@pytest.mark.parametrize("is_tokenized", [False, True])
def test_pairs_with_equal_answers_are_dropped(is_tokenized: bool, settings, tmp_path):
    rows = [LONG[0], {**LONG[0], "rejected": LONG[0]["chosen"]}]
    if is_tokenized:
        ids = [[tiny.tokenizer()(row["prompt"] + row[side])["input_ids"] for side in SIDES] for row in rows]
        rows = [{f"input_ids_{side}": one for side, one in zip(SIDES, pair, strict=True)} for pair in ids]
    with pytest.warns(UserWarning, match="Dropped 1 of 2 pairs, each of which has .* the same tokens"):
        assert len(prepared(rows, tmp_path, **settings)) == 1
    stream = prepare_pairs(
        Dataset.from_list(rows).to_iterable_dataset(), tiny.tokenizer(), config(tmp_path, **settings)
    )
    with pytest.warns(UserWarning, match="A pair of the stream has .* the same tokens"):
        assert len(list(stream)) == 1
    with pytest.raises(ValueError, match=r"Each of the 1 pairs has .* the same tokens"):
        prepared(rows[1:], tmp_path, **settings)


@pytest.mark.parametrize("mode", ["filter", "keep_start"])
def test_pairs_that_are_all_cut_are_an_error(mode: str, tmp_path):
    row = {"prompt": "a ", "chosen": "bcdefg", "rejected": "bcdefh"}
    with pytest.raises(ValueError, match="max_length=5"):
        prepared([row] * 2, tmp_path, max_length=5, truncation_mode=mode)


def test_a_list_of_rows_is_a_dataset(tmp_path):
    rows = list(pairs(2))
    from_list = prepare_pairs(rows, tiny.tokenizer(), config(tmp_path))
    assert list(from_list) == list(prepared(rows, tmp_path))


def test_columns_stay_where_they_are_asked_for(tmp_path):
    row = {"prompt": "ab ", "chosen": "cd", "rejected": "e", "source": "web"}
    kept = prepared([row], tmp_path, keeps_columns=True)
    assert {"source", "prompt", "input_ids_chosen"} <= set(kept.column_names)
    assert "source" not in prepared([row], tmp_path).column_names


# Margins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [2, 2.0, [2.0], [[2.0]]])
def test_a_margin_is_one_number_whatever_holds_it(margin: Any, tmp_path):
    row = {"prompt": "ab ", "chosen": "cd", "rejected": "e", "margin": margin}
    dataset = prepared([row, row], tmp_path)
    assert dataset["margin"] == [2.0, 2.0]
    for collate in (PairCollator(tiny.PAD), RewardDataCollatorWithPadding(tiny.tokenizer())):
        batch = collate([*dataset, {**dataset[0], "margin": torch.tensor([1.0])}])
        assert batch["margin"].tolist() == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("margin", [None, float("nan"), [1.0, 2.0], []])
def test_other_margins_are_errors_that_name_the_row(margin: Any, tmp_path):
    rows = [{"prompt": "ab ", "chosen": "cd", "rejected": "e", "margin": m} for m in (margin, margin)]
    with pytest.raises(ValueError, match=r"Row 0: margin=.* one finite number"):
        prepared(rows, tmp_path)


# Bad rows ----------------------------------------------------------------------------------------------------------


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"columns \['prompt', 'answer'\].*input_ids_chosen \+ input_ids_rejected"):
        prepared([{"prompt": "a", "answer": "b"}], tmp_path)


def test_an_empty_answer_is_an_error(tmp_path):
    rows = [{"prompt": "a ", "chosen": "b", "rejected": text} for text in ("c", "")]
    with pytest.raises(ValueError, match="Row 1: The completion is empty"):
        prepared(rows, tmp_path)


def test_a_tokenizer_without_eos_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no EOS token"):
        prepared(LONG, tmp_path, tiny.tokenizer(eos_token=None))


@pytest.mark.parametrize(
    ("mask", "message"), [([0, 0], "Row 0: input_ids_chosen holds no token"), ([1], "has 2 tokens .* 1")]
)
def test_masks_that_leave_nothing_or_do_not_fit(mask: list[int], message: str, tmp_path):
    row = {"input_ids_chosen": [5, 6], "attention_mask_chosen": mask, "input_ids_rejected": [7]}
    with pytest.raises(ValueError, match=message):
        prepared([row], tmp_path)


# Batches -----------------------------------------------------------------------------------------------------------


def test_the_documented_collator_pads_each_side():
    rows = [
        {"input_ids_chosen": [5], "input_ids_rejected": [6, 7, 8]},
        {"input_ids_chosen": [9, 4], "attention_mask_chosen": [1, 0], "input_ids_rejected": [6]},
    ]
    batch = RewardDataCollatorWithPadding(tiny.tokenizer())(rows)
    assert batch["input_ids_chosen"].tolist() == [[5], [9]]
    assert batch["input_ids_rejected"].tolist() == [[6, 7, 8], [6, 0, 0]]
    assert batch["attention_mask_rejected"].tolist() == [[1, 1, 1], [1, 0, 0]]
    left = RewardDataCollatorWithPadding(tiny.tokenizer(padding_side="left"))(rows)
    assert left["input_ids_rejected"].tolist() == [[6, 7, 8], [0, 0, 6]]
    wide = RewardDataCollatorWithPadding(tiny.tokenizer(), padding="max_length", max_length=5)(rows)
    assert wide["input_ids_chosen"].shape == (2, 5)
    even = RewardDataCollatorWithPadding(tiny.tokenizer(), pad_to_multiple_of=4)(rows)
    assert even["input_ids_rejected"].shape == (2, 4)
    arrays = RewardDataCollatorWithPadding(tiny.tokenizer(), return_tensors="np")(rows)
    assert not isinstance(arrays["input_ids_chosen"], torch.Tensor)


def test_a_collator_that_cannot_pad_says_so():
    with pytest.raises(ValueError, match="no pad token"):
        RewardDataCollatorWithPadding(tiny.tokenizer(pad_token=None))
    with pytest.raises(ValueError, match="max_length, which is None"):
        RewardDataCollatorWithPadding(tiny.tokenizer(), padding="max_length")


@pytest.mark.parametrize("layout", ["tree", "packed", "padded", "right", "left"])
def test_batches_hold_the_texts_of_the_pairs_in_turn(layout: str):
    data = pairs(3)
    expected = [row[f"input_ids_{side}"] for row in data for side in ("chosen", "rejected")]
    if layout in ("right", "left"):
        collate = RewardDataCollatorWithPadding(tiny.tokenizer(padding_side=layout))
        rows = pair_rows(collate(list(data)), pad_token_id=tiny.PAD, padding_side=layout)
    else:
        rows = PairCollator(tiny.PAD, layout)(list(data))
    assert sequences(rows, 6) == expected
    assert sequences(rows, 2) == expected[:2]
    assert rows["input_ids"].flatten()[rows["ends"]].tolist() == [ids[-1] for ids in expected]


def test_a_batch_without_the_columns_names_them():
    with pytest.raises(ValueError, match=r"gave \['labels'\].*attention_mask_rejected"):
        pair_rows({"labels": torch.zeros(2)}, pad_token_id=0)
