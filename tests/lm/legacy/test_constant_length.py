"""Rows of constant length from every format, in a number that a Trainer can rely on."""

import math

import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.lm import tiny
from transformers import TrainerCallback

from trimtab_lm.sft import ConstantLengthDataset, SFTConfig, SFTTrainer

TEXTS = ["hello world.", "abc.", "a longer text than the others.", "x y z.", "no.", "some more words.", "tiny.", "end."]
WIDTH = 16
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ('</s>' if m['role'] == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
PAIRS = {"prompt": ["ab.", "cd."], "completion": ["xyz xyz xyz.", "uvw."]}
CONVERSATIONS = {
    "messages": [
        [{"role": "user", "content": "ab."}, {"role": "assistant", "content": "xyz xyz xyz."}],
        [{"role": "user", "content": "cd."}, {"role": "assistant", "content": "uvw."}],
    ]
}


def with_template():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def texts(seq_length: int = WIDTH, kind=ConstantLengthDataset, **settings) -> ConstantLengthDataset:
    rows = Dataset.from_dict({"text": TEXTS})
    return kind(tiny.tokenizer(), rows, "text", seq_length=seq_length, **settings)


def trainer(dataset, folder, tokenizer=None, **settings) -> SFTTrainer:
    args = SFTConfig(
        str(folder), use_cpu=True, save_strategy="no", disable_tqdm=True, report_to="none", logging_steps=1, **settings
    )
    return SFTTrainer(tiny.llama(), args, train_dataset=dataset, processing_class=tokenizer or with_template())


def packed(columns, folder, stream: bool = False, **settings) -> list[dict[str, list[int]]]:
    dataset = Dataset.from_dict(columns)
    options = {"packing": True, "max_length": WIDTH, "num_of_sequences": 7, "max_steps": 1}
    sft = trainer(dataset.to_iterable_dataset() if stream else dataset, folder, **options | settings)
    return [{name: torch.as_tensor(ids).tolist() for name, ids in row.items()} for row in sft.train_dataset]


def learnt(rows) -> str:
    """Returns the text with a loss, row by row, in an order that shuffling does not change."""
    tokenizer = tiny.tokenizer()
    return " | ".join(sorted(tokenizer.decode([one for one in row["labels"] if one != -100]) for row in rows))


@pytest.mark.parametrize("stream", [False, True])
def test_pairs_are_packed_with_their_completions_learnt(stream, tmp_path):
    rows = packed(PAIRS, tmp_path, stream)
    assert all(len(row["input_ids"]) == WIDTH for row in rows)
    # The first row is full after "ab.xyz xyz xyz.</s>", 16 tokens; the second one holds "cd.uvw.</s>".
    assert learnt(rows) == "uvw.</s> | xyz xyz xyz.</s>"
    whole = packed(PAIRS, tmp_path, stream, completion_only_loss=False)
    assert learnt(whole) == "b.xyz xyz xyz.</s> | d.uvw.</s>"  # nothing predicts a text's first token


@pytest.mark.parametrize("stream", [False, True])
def test_conversations_are_packed_as_their_template_writes_them(stream, tmp_path):
    rows = packed(CONVERSATIONS, tmp_path, stream, max_length=24, assistant_only_loss=True)
    # "u ab.a xyz xyz xyz.</s>" has 20 tokens, and 4 of the next conversation's "u cd.a uvw.</s>" go into the first row.
    assert learnt(rows) == "uvw.</s> | xyz xyz xyz.</s>"
    written = {"dataset_kwargs": {"add_special_tokens": False, "append_concat_token": False}}
    assert packed(CONVERSATIONS, tmp_path, stream, max_length=24, assistant_only_loss=True, **written) == rows


def test_tokenized_rows_are_packed_as_they_are(tmp_path):
    rows = packed({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100, 6, 7], [8, 9]]}, tmp_path, max_length=5)
    assert rows == [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9], "position_ids": [0, 1, 2, 0, 1]}]


def test_rows_without_texts_and_rows_of_one_token_are_refused():
    with pytest.raises(ValueError, match=r"\['story'\] and no input_ids.*dataset_text_field"):
        list(ConstantLengthDataset(tiny.tokenizer(), [{"story": "ab"}]))
    with pytest.raises(ValueError, match="Pass one of them"):
        ConstantLengthDataset(tiny.tokenizer(), [], "text", lambda row: row["text"])
    with pytest.raises(ValueError, match="seq_length=1: a row needs two tokens"):
        ConstantLengthDataset(tiny.tokenizer(), [], "text", seq_length=1)


@pytest.mark.parametrize("settings", [{}, {"num_of_sequences": 1}, {"append_concat_token": False}])
@pytest.mark.parametrize("width", [3, 8, 1000])
def test_the_length_is_the_number_of_rows(width, settings):
    rows = texts(width, **settings)
    tokens = sum(map(len, TEXTS)) + (0 if settings.get("append_concat_token") is False else len(TEXTS))
    assert len(rows) == math.ceil(tokens / width) == sum(1 for _ in rows)


def test_data_without_an_end_has_no_length():
    stream = IterableDataset.from_generator(lambda: iter([{"text": "ab"}]))
    for rows in (texts(infinite=True), ConstantLengthDataset(tiny.tokenizer(), stream, "text")):
        with pytest.raises(TypeError, match="max_steps"):
            len(rows)


class Seen(TrainerCallback):
    """Records the learning rate of each step."""

    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, **kwargs):
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_a_trainer_trains_whole_epochs_of_them(batch_size, tmp_path):
    rows, seen = texts(), Seen()
    sft = trainer(rows, tmp_path, num_train_epochs=3, per_device_train_batch_size=batch_size)
    sft.add_callback(seen)
    sft.train()
    assert sft.state.global_step == sft.state.max_steps == 3 * math.ceil(len(rows) / batch_size)
    assert sft.state.epoch == 3
    assert seen.rates[-1] == 0  # the linear schedule ends with the last step


class Overestimated(ConstantLengthDataset):
    """Has the documented length of 2024: the dataset's rows, which are more than the yielded ones."""

    def __len__(self):
        return 3 * super().__len__()


def test_a_length_that_is_too_great_does_not_break_a_run(tmp_path):
    rows = texts(kind=Overestimated)
    sft = trainer(rows, tmp_path, num_train_epochs=2, per_device_train_batch_size=2)
    sft.train()
    assert sft.state.global_step == 2 * math.ceil(len(rows) / 3 / 2)


@pytest.mark.parametrize("source", [{"dataset_text_field": "text"}, {"formatting_func": lambda row: row["text"]}])
def test_a_text_that_is_none_is_refused(source):
    rows = ConstantLengthDataset(tiny.tokenizer(), [{"text": "ab"}, {"text": None}], seq_length=4, **source)
    with pytest.raises(ValueError, match=r"The text is None \(NoneType\): a text is needed"):
        list(rows)
