"""Rows and settings of KTO: formats, errors in one line, truncation, and the balance of labels."""

import re
import warnings
from typing import Any

import pytest
from datasets import Dataset, IterableDataset, Value
from tests.lm import tiny
from tests.lm.kto import run_training as kto

from trimtab_lm import KTOConfig

PAIRS = {
    "prompt": ["ab ", "cd ", "ef "],
    "chosen": ["good", "fine", "well"],
    "rejected": ["bad", "poor", "ill"],
}
TEMPLATE = """\
{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}\
{% if add_generation_prompt %}assistant {% endif %}"""


def tokenized(rows: Any, folder: Any, **config: Any) -> list[dict[str, Any]]:
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    arguments = {"train_dataset": data, **config.pop("arguments", {})}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the paper.*")
        warnings.filterwarnings("ignore", message="All .* rows are")
        return list(kto.trainer(tiny.gpt2(), folder, arguments, **config).train_dataset)


def ids(text: str) -> list[int]:
    return tiny.tokenizer()(text)["input_ids"]


def test_a_row_is_prompt_completion_with_eos_and_label(tmp_path):
    (row, _) = tokenized([{"prompt": "ab ", "completion": "cd", "label": True, "note": 3}] * 2, tmp_path)
    expected = {"prompt_input_ids": ids("ab "), "completion_input_ids": [*ids("cd"), tiny.EOS], "label": True}
    assert row == expected


def test_pairs_become_rows_with_all_chosen_answers_first(tmp_path):
    rows = tokenized(Dataset.from_dict(PAIRS), tmp_path)
    words = [*PAIRS["chosen"], *PAIRS["rejected"]]
    assert [row["completion_input_ids"] for row in rows] == [[*ids(word), tiny.EOS] for word in words]
    assert [row["prompt_input_ids"] for row in rows] == [ids(prompt) for prompt in PAIRS["prompt"] * 2]
    assert [row["label"] for row in rows] == [True] * 3 + [False] * 3
    implicit = {
        side: [p + a for p, a in zip(PAIRS["prompt"], PAIRS[side], strict=True)] for side in ("chosen", "rejected")
    }
    assert [row["label"] for row in tokenized(Dataset.from_dict(implicit), tmp_path)] == [True] * 3 + [False] * 3


def test_pairs_of_equal_answers_are_dropped(tmp_path):
    """Their rows would be the same, with both labels. The second pair is equal once its answers are cut."""
    data = {"prompt": ["ab "] * 3, "chosen": ["good", "wxyzab", "cd"], "rejected": ["bad", "wxyzcd", "cd"]}
    limits = {"max_length": 8, "max_prompt_length": 3, "truncation_mode": "keep_start"}
    message = r"Dropped 2 of 3 pairs, .* of the same tokens \(max_length=8, max_prompt_length=3\)"
    with pytest.warns(UserWarning, match=message):
        rows = tokenized(Dataset.from_dict(data), tmp_path, **limits)
    assert [row["completion_input_ids"] for row in rows] == [[*ids("good"), tiny.EOS], [*ids("bad"), tiny.EOS]]
    assert [row["label"] for row in rows] == [True, False]


def test_conversations_are_written_by_the_chat_template(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompt, answer = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yes"}]
    rows = [{"prompt": prompt, "completion": answer, "label": label} for label in (True, False)]
    row, _ = tokenized(rows, tmp_path, arguments={"processing_class": tokenizer})
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert row["prompt_input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(row["completion_input_ids"]).startswith("yes")


def test_streams_are_read_row_by_row(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(kto.rows()))
    trainer, _ = kto.trained(tiny.gpt2(), tmp_path, {"train_dataset": stream})
    assert trainer.state.global_step == 1
    pairs = Dataset.from_dict(PAIRS).to_iterable_dataset()
    with pytest.raises(ValueError, match="This stream has pairs"):
        kto.trainer(tiny.gpt2(), tmp_path / "pairs", {"train_dataset": pairs})


def test_long_rows_lose_their_prompt_first(tmp_path):
    rows = [{"prompt": "abcdefgh", "completion": "xyz", "label": True}] * 2
    with pytest.warns(UserWarning, match="max_length=8: cut 8 tokens from 2 of 2 rows"):
        row, _ = tokenized(rows, tmp_path, max_length=8)
    assert row["prompt_input_ids"] == ids("efgh")
    assert row["completion_input_ids"] == [*ids("xyz"), tiny.EOS]
    with pytest.warns(UserWarning, match="max_length=8, max_prompt_length=2: cut 12 tokens from 2 of 2 rows"):
        row, _ = tokenized(rows, tmp_path, max_length=8, max_prompt_length=2, truncation_mode="keep_start")
    assert row["prompt_input_ids"] == ids("ab")
    with pytest.warns(UserWarning, match="cut"):
        row, _ = tokenized(
            [{"prompt": "ab", "completion": "x" * 20, "label": True}] * 2, tmp_path, max_length=8, max_prompt_length=4
        )
    assert len(row["completion_input_ids"]) == 6


ROW = {"prompt": "ab ", "completion": "cd", "label": True}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"label": 1}, r"The label is 1 \(int\): True, for a desirable completion, or False is needed"),
        (ROW | {"label": "true"}, r"The label is 'true' \(str\)"),
        (ROW | {"label": None}, r"The label is None \(NoneType\)"),
        (ROW | {"completion": ""}, "The (completion|answer) is empty"),
        (ROW | {"completion": None}, "The completion is None"),
        (ROW | {"prompt": ""}, "The prompt has no token"),
        (ROW | {"completion": "d" * 70}, "The row is too long: 74 tokens, and GPT2LMHeadModel has 64 positions"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_in_one_line(row, message, tmp_path):
    is_typed = isinstance(row["label"], bool | None)  # a column has one type
    rows = [ROW if is_typed else ROW | {"label": row["label"]}, row]
    with pytest.raises(ValueError, match=f"Row {int(is_typed)}: {message}") as error:
        tokenized(rows, tmp_path)
    assert "\n" not in str(error.value)


def test_a_completion_that_is_not_a_number_is_no_text(tmp_path):
    rows = Dataset.from_list([{"prompt": "ab ", "completion": float("nan"), "label": True}] * 2)
    with pytest.raises(ValueError, match=r"Row 0: The completion is nan \(float\): a text"):
        tokenized(rows, tmp_path)


def test_columns_that_do_not_fit_are_named(tmp_path):
    rows = Dataset.from_list([{"prompt": "ab ", "completion": "cd"}] * 2)
    columns = re.escape("It needs one of: prompt + completion + label; prompt + chosen + rejected")
    with pytest.raises(ValueError, match=f"KTO cannot read a dataset .*{columns}"):
        tokenized(rows, tmp_path)


def test_labels_of_zero_and_one_become_booleans_as_the_error_says(tmp_path):
    rows = Dataset.from_list([ROW | {"label": 1}, ROW | {"label": 0}]).cast_column("label", Value("bool"))
    assert [row["label"] for row in tokenized(rows, tmp_path)] == [True, False]


@pytest.mark.parametrize(
    ("labels", "weights", "message"),
    [
        ([1, 1, 0, 0], (1.0, 1.0), None),
        ([1, 1, 1, 0, 0, 0], (4 / 3, 1.0), None),
        ([1, 0, 0, 0], (3.0, 1.0), None),
        ([1, 0, 0, 0], (1.0, 0.25), None),  # 1 / 0.75 = 4/3
        ([1, 0, 0, 0], (1.0, 1.0), "1 desirable and 3 undesirable .* ratio 0.333; .* between 3 and 4,"),
        ([1, 1, 1, 0], (1.0, 2.0), "3 desirable and 1 undesirable .* ratio 1.5; .* between 0.667 and 0.889,"),
        ([1, 1], (1.0, 1.0), "All 2 rows are desirable"),
        ([0, 0, 0], (1.0, 1.0), "All 3 rows are undesirable"),
    ],
)
def test_a_warning_names_weights_that_the_paper_recommends(labels, weights, message, tmp_path, recwarn):
    rows = [row | {"label": bool(label)} for row, label in zip(kto.rows(), labels, strict=False)]
    named = dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
    data = {"train_dataset": Dataset.from_list(rows)}
    recwarn.clear()
    kto.trainer(tiny.gpt2(), tmp_path, data, **named)
    about = [str(one.message) for one in recwarn if "desirable" in str(one.message)]
    if message is None:
        assert about == []
    else:
        (line,) = about
        assert re.search(message, line)
        assert "\n" not in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size=1: KTO estimates the KL .* at least 2"),
        ({"per_device_eval_batch_size": 1}, "per_device_eval_batch_size=1: KTO estimates the KL"),
        ({"loss_type": "bco"}, "loss_type='bco' is unknown. Use one of kto, apo_zero_unpaired"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"desirable_weight": -1.0}, "desirable_weight=-1.0"),
        ({"undesirable_weight": 0.0}, "undesirable_weight=0.0"),
        ({"max_length": 1}, "max_length=1 leaves no room"),
        ({"max_length": 8, "max_prompt_length": 8}, "max_prompt_length=8 leaves nothing of max_length=8"),
        ({"truncation_mode": "middle"}, "truncation_mode='middle' is unknown"),
        ({"label_smoothing_factor": 0.1}, "smooths token labels"),
        ({"include_for_metrics": ["inputs"]}, "several answers share a row of the inputs of KTO"),
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True is not supported: leave it out"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        KTOConfig(str(tmp_path), **settings)


def test_a_search_for_a_batch_size_does_not_end_at_one_row(tmp_path, monkeypatch):
    trainer = kto.trainer(tiny.gpt2(), tmp_path, auto_find_batch_size=True, per_device_train_batch_size=2)

    def training_step(*arguments):
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(trainer, "training_step", training_step)
    with pytest.raises(ValueError, match="auto_find_batch_size has come to per_device_train_batch_size=1: KTO estim"):
        trainer.train()


def test_a_batch_of_one_row_is_fine_without_an_estimate(tmp_path):
    trainer, _ = kto.trained(tiny.gpt2(), tmp_path, loss_type="apo_zero_unpaired", per_device_train_batch_size=1)
    assert kto.logged(trainer, "kl") == [0]
