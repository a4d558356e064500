"""Preference pairs as tokens: what is cut and in which order, which tokens count, and the two collators."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo

from trimtab_lm.dpo import DPOConfig, DPOTrainer
from trimtab_lm.dpo.chain2024 import get_batch_logps
from trimtab_lm.dpo.collator import DPODataCollatorWithPadding, PreferencePairCollator, tokens_of
from trimtab_lm.dpo.data import SETTINGS, PairTokenizer, tokenize_pairs

ROW = {"prompt": "abcdef ", "chosen": "ghijkl", "rejected": "mn"}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"  # noqa: E501


def tokenizer_of(*, seq2seq=False, special=None, **config):
    args = DPOConfig("out", report_to="none", use_cpu=True, **config)
    settings = {name: getattr(args, name) for name in SETTINGS}
    return PairTokenizer(tiny.tokenizer(**(special or {})), seq2seq, **settings)


def texts(row):
    """Returns prompt and answers as the model reads them, with </s> as !."""
    read = tiny.tokenizer()
    start = len(row["prompt_input_ids"])
    ids = (row["prompt_input_ids"], row["chosen_input_ids"][start:], row["rejected_input_ids"][start:])
    return [read.decode(part).replace("</s>", "!").replace("<s>", "^") for part in ids]


def test_columns_are_those_of_2024():
    row = tokenizer_of().row(ROW)
    assert texts(row) == ["abcdef ", "ghijkl!", "mn!"]
    for side in ("chosen", "rejected"):
        ids, labels = row[f"{side}_input_ids"], row[f"{side}_labels"]
        assert ids[:7] == row["prompt_input_ids"]
        assert labels == [-100] * 7 + ids[7:]
        assert row[f"{side}_attention_mask"] == [1] * len(ids)
    assert row["prompt_attention_mask"] == [1] * 7


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_prompt_length": 3}, ["ef ", "ghijkl!", "mn!"]),
        ({"max_prompt_length": 3, "truncation_mode": "keep_start"}, ["abc", "ghijkl!", "mn!"]),
        ({"max_length": 13}, ["bcdef ", "ghijkl!", "mn!"]),  # only the prompt is cut
        ({"max_length": 8}, ["def ", "jkl!", "mn!"]),  # the prompt to half, then the answers
        ({"max_length": 8, "truncation_mode": "keep_start"}, ["abcd", "ghi!", "mn!"]),  # EOS survives
        ({"max_length": 8, "max_prompt_length": 2}, ["f ", "hijkl!", "mn!"]),
        ({"max_target_length": 2}, ["abcdef ", "l!", "n!"]),
        ({"max_target_length": 2, "truncation_mode": "keep_start"}, ["abcdef ", "g!", "m!"]),
    ],
)
def test_what_is_cut_and_in_which_order(config, expected):
    row = tokenizer_of(**config).row(ROW)
    assert texts(row) == expected


def test_the_bos_of_a_prompt_that_is_cut_survives():
    row = {**ROW, "prompt": "<s>abcdef "}
    assert texts(tokenizer_of(max_prompt_length=3).row(row))[0] == "^f "


def test_encoder_decoder_pairs_have_a_limit_each():
    plain = tokenizer_of(seq2seq=True).row(ROW)
    read = tiny.tokenizer()
    assert read.decode(plain["prompt_input_ids"]) == "abcdef </s>"
    assert read.decode(plain["chosen_labels"]) == "ghijkl</s>"
    assert "chosen_input_ids" not in plain
    cut = tokenizer_of(seq2seq=True, max_prompt_length=4, max_target_length=3, truncation_mode="keep_start").row(ROW)
    assert read.decode(cut["prompt_input_ids"]) == "abc</s>"
    assert read.decode(cut["chosen_labels"]) == "gh</s>"
    both = tokenizer_of(seq2seq=True, max_length=3).row(ROW)
    assert (len(both["prompt_input_ids"]), len(both["chosen_labels"]), len(both["rejected_labels"])) == (3, 3, 3)
    model = tiny.t5()
    shifted = tokenizer_of(seq2seq=True).row(ROW, model)
    assert shifted["rejected_decoder_input_ids"] == [tiny.PAD, *plain["rejected_labels"][:-1]]


def test_conversations_and_implicit_prompts():
    special = {"chat_template": TEMPLATE}
    prompt = [{"role": "user", "content": "hi"}]
    sides = {side: [{"role": "assistant", "content": text}] for side, text in (("chosen", "yes"), ("rejected", "no"))}
    explicit = tokenizer_of(special=special).row({"prompt": prompt, **sides})
    implicit = tokenizer_of(special=special).row({side: prompt + answer for side, answer in sides.items()})
    assert explicit == implicit
    assert texts(explicit) == ["^user hi!^assistant ", "yes!", "no!"]
    plain = tokenizer_of().row({"chosen": "the cat sat", "rejected": "the cat ran"})
    assert texts(plain) == ["the cat", " sat!", " ran!"]


def test_an_answer_is_tokenized_behind_its_prompt():
    tokenizer = tokenizer_of()
    parts = tokenizer.split("ab ", "cd")
    assert parts["prompt_input_ids"] + parts["input_ids"] == tiny.tokenizer()("ab cd")["input_ids"]
    assert parts["input_ids"] == tiny.tokenizer()("cd")["input_ids"]
    assert parts["attention_mask"] == [1, 1]


def test_rows_that_were_tokenized_are_left_alone():
    tokenized = tokenize_pairs(dpo.dataset(), tokenizer_of(), num_proc=None)
    assert tokenize_pairs(tokenized, tokenizer_of(), num_proc=None) is tokenized
    assert set(tokenized.column_names) == set(tokenizer_of().row(ROW))


def test_a_stream_stays_a_stream_and_trains_as_the_rows_do(tmp_path):
    settings = {"train_sampling_strategy": "sequential", "max_steps": 2, "per_device_train_batch_size": 4}
    _, expected = dpo.trained(tiny.exact(tiny.gpt2()), tmp_path, **settings)
    arguments = {
        "train_dataset": dpo.dataset().to_iterable_dataset(),
        "eval_dataset": dpo.dataset().to_iterable_dataset(),
    }
    trainer, weights = dpo.trained(tiny.exact(tiny.gpt2()), tmp_path, arguments=arguments, **settings)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
    assert trainer.evaluate()["eval_loss"] > 0


def test_what_was_cut_is_said():
    with pytest.warns(UserWarning, match=r"max_length=8: cut \d+ tokens from 1 of 1 rows"):
        tokenize_pairs(Dataset.from_list([ROW]), tokenizer_of(max_length=8), num_proc=None)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_pairs_with_equal_answers_are_dropped(seq2seq: bool):
    """The second pair's are equal, the third's once they are cut."""
    rows = [
        {"prompt": "abc ", "chosen": chosen, "rejected": rejected}
        for chosen, rejected in (("x", "y"), ("x", "x"), ("xyz", "xyu"))
    ]
    tokenize = tokenizer_of(seq2seq=seq2seq, max_target_length=2, truncation_mode="keep_start")
    with pytest.warns(UserWarning, match=r"Dropped 2 of 3 pairs, .* same tokens \(max_target_length=2\)"):
        assert len(tokenize_pairs(Dataset.from_list(rows), tokenize, num_proc=None)) == 1
    stream = tokenize_pairs(Dataset.from_list(rows).to_iterable_dataset(), tokenize, num_proc=None)
    with pytest.warns(UserWarning, match="A pair of the stream has .* the same tokens"):
        assert len(list(stream)) == 1
    with pytest.raises(ValueError, match=r"Each of the 1 pairs has .* the same tokens"):
        tokenize_pairs(Dataset.from_list(rows[1:2]), tokenize, num_proc=None)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a", "chosen": "b"}], r"DPO cannot read a dataset with the columns \['prompt', 'chosen'\]"),
        ([ROW, {**ROW, "rejected": ""}], "Row 1: The completion is empty"),
        ([ROW, {**ROW, "prompt": None}], "Row 1: The prompt is None"),
        ([{"prompt": "", "chosen": "b", "rejected": "c"}], "Row 0: The prompt has no token"),
        ([{"chosen": "same", "rejected": "same"}], "Row 0: chosen and rejected are the same"),
        ([{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}], "Make both texts"),
    ],
)
def test_rows_that_cannot_be_used_are_named(rows, says, tmp_path):
    rows = {name: [row.get(name) for row in rows] for name in rows[0]}
    with pytest.raises(ValueError, match=says):
        dpo.trainer(tiny.gpt2(), tmp_path, arguments={"train_dataset": Dataset.from_dict(rows)})


def test_a_generator_of_rows_is_no_dataset(tmp_path):
    with pytest.raises(TypeError, match=r"datasets\.Dataset\.from_list"):
        dpo.trainer(tiny.gpt2(), tmp_path, arguments={"train_dataset": (row for row in [ROW])})


@pytest.mark.parametrize("special", [{}, {"pad_token": None}])
def test_a_tokenizer_without_eos_is_refused(tmp_path, special):
    arguments = {"processing_class": tiny.tokenizer(eos_token=None, **special)}
    with pytest.raises(ValueError, match="no EOS token"):
        dpo.trainer(tiny.gpt2(), tmp_path, arguments=arguments)


def tokenized(count=4, *, seq2seq=False):
    tokenizer = tokenizer_of(seq2seq=seq2seq)
    return [tokenizer.row(row) for row in dpo.pairs(count)]


@pytest.mark.parametrize("layout", ["padded", "tree", "packed"])
def test_an_answer_of_which_nothing_counts_is_refused(layout):
    rows = tokenized()
    rows[2]["rejected_labels"] = [-100] * len(rows[2]["rejected_labels"])
    with pytest.raises(ValueError, match="each needs one"):
        PreferencePairCollator(0, layout=layout)(rows)
    batch = DPODataCollatorWithPadding()(rows)
    config = DPOConfig("out", padding_value=0, use_cpu=True)
    with pytest.raises(ValueError, match="each needs one"):
        tokens_of(SimpleNamespace(config=config, is_encoder_decoder=False), batch)


def test_the_documented_collator_pads_each_column():
    short, long = {**ROW, "prompt": "a ", "chosen": "b"}, ROW
    rows = [{**tokenizer_of().row(row), "note": "x"} for row in (short, long)]
    batch = DPODataCollatorWithPadding(pad_token_id=9, label_pad_token_id=-5)(rows)
    assert batch["chosen_input_ids"].shape == batch["chosen_labels"].shape == (2, 14)
    assert batch["chosen_input_ids"][0, 4:].tolist() == [9] * 10
    assert batch["chosen_labels"][0, 4:].tolist() == [-5] * 10
    assert batch["chosen_attention_mask"].sum(1).tolist() == [4, 14]
    assert batch["prompt_input_ids"][0].tolist() == [9] * 5 + rows[0]["prompt_input_ids"]  # left padding for generation
    assert batch["prompt_attention_mask"][0].tolist() == [0] * 5 + [1] * 2
    assert batch["note"] == ["x", "x"]
    right = DPODataCollatorWithPadding(9, is_encoder_decoder=True)(
        [tokenizer_of(seq2seq=True).row(r) for r in (short, long)]
    )
    assert right["prompt_input_ids"][0, -1] == 9


def test_chosen_answers_come_before_rejected_ones():
    batch = DPODataCollatorWithPadding(label_pad_token_id=-7)(tokenized(3))
    joined = DPOTrainer.concatenated_inputs(batch, label_pad_token_id=-7, padding_value=8, device="cpu")
    width = max(batch[f"{side}_input_ids"].shape[1] for side in ("chosen", "rejected"))
    for name, fill in (("input_ids", 8), ("labels", -7), ("attention_mask", 0)):
        whole = joined[f"concatenated_{name}"]
        assert whole.shape == (6, width)
        for side, rows in (("chosen", whole[:3]), ("rejected", whole[3:])):
            columns = batch[f"{side}_{name}"]
            assert torch.equal(rows[:, : columns.shape[1]], columns)
            assert bool((rows[:, columns.shape[1] :] == fill).all())
    batch = DPODataCollatorWithPadding(is_encoder_decoder=True)(tokenized(3, seq2seq=True))
    joined = DPOTrainer.concatenated_inputs(batch, is_encoder_decoder=True)
    assert torch.equal(joined["concatenated_input_ids"], batch["prompt_input_ids"].repeat(2, 1))
    assert joined["concatenated_labels"].shape[0] == 6


def test_logps_of_labels_by_hand():
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]]))
    labels = torch.tensor([[-1, 1, 2]])
    decoder = get_batch_logps(logits, labels, label_pad_token_id=-1)
    torch.testing.assert_close(decoder.exp(), torch.tensor([0.25 * 0.7]))
    seq2seq = get_batch_logps(logits, labels, label_pad_token_id=-1, is_encoder_decoder=True)
    torch.testing.assert_close(seq2seq.exp(), torch.tensor([0.2 * 0.4]))
    torch.testing.assert_close(
        get_batch_logps(logits, labels, average_log_prob=True, label_pad_token_id=-1), decoder / 2
    )
    with pytest.raises(ValueError, match="differ in rows or positions"):
        get_batch_logps(logits, labels[:, :2])


def test_columns_stay_for_a_collator_that_reads_them(tmp_path):
    dropped = dpo.trainer(tiny.gpt2(), tmp_path)
    kept = dpo.trainer(tiny.gpt2(), tmp_path, remove_unused_columns=False)
    assert "chosen" not in dropped.train_dataset.column_names
    assert kept.train_dataset[0]["chosen"] == dpo.pairs()[0]["chosen"]
    kept.train()
