import json

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from tokenizers import processors

from trimtab_lm.data.prompts import PROMPT_IDS, ShuffledBatches, as_queries, open_dataset, tokenize_prompts

SIZES = {"batch_size": 3, "seed": 5, "world_size": 2}


def epochs(count: int, **changes) -> list[list[list[int]]]:
    batches = ShuffledBatches(20, **SIZES | {"rank": 0} | changes)
    return [list(batches) for _ in range(count)]


def test_an_epoch_is_a_permutation_shared_out_among_processes_without_a_remainder():
    ours, theirs = epochs(2, rank=0), epochs(2, rank=1)
    for mine, yours in zip(ours, theirs, strict=True):
        rows = [row for batch in mine + yours for row in batch]
        assert len(rows) == len(set(rows)) == 18
    assert ours[0] != ours[1]
    assert ours == epochs(2)
    assert ours != epochs(2, seed=6)


@pytest.mark.parametrize("taken", [0, 2, 3, 4])
def test_a_restart_goes_on_in_the_middle_of_an_epoch(taken):
    def stream(batches):
        while True:
            yield from batches

    first = ShuffledBatches(20, **SIZES, rank=1)
    running = stream(first)
    for _ in range(taken):
        next(running)
    second = ShuffledBatches(20, **SIZES, rank=1)
    second.load_state_dict(first.state_dict())
    resumed = stream(second)
    assert [next(running) for _ in range(7)] == [next(resumed) for _ in range(7)]


def test_a_batch_of_more_rows_than_there_are_goes_on_with_the_next_pass():
    """Two batches of 6, shared by two processes, take three passes over 4 rows."""
    ranks = [ShuffledBatches(4, **SIZES, rank=rank) for rank in (0, 1)]
    drawn = []
    for _ in range(2):
        (mine,), (yours,) = (list(one) for one in ranks)
        drawn += mine + yours
    passes = [drawn[i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    again = ShuffledBatches(4, **SIZES, rank=1)
    again.load_state_dict(ranks[1].state_dict())
    assert list(again) == []  # the epoch has ended
    assert list(again) == list(ranks[1])


def test_an_epoch_is_shuffled_once_whoever_looks_ahead(monkeypatch):
    batches = ShuffledBatches(20, **SIZES, rank=0)
    shuffled = []
    permutation = batches._permutation
    monkeypatch.setattr(batches, "_permutation", lambda number: shuffled.append(number) or permutation(number))
    for _ in range(3):
        for _ in batches:
            batches.upcoming()
    assert shuffled == [0, 1, 2, 3]


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="The dataset has no rows"):
        ShuffledBatches(0, **SIZES, rank=0)


def test_a_conversation_goes_through_the_template_and_special_tokens_are_added_once():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a {% endif %}"
    )
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hello"}]]})
    (row,) = as_queries(dataset, tokenizer, is_encoder_decoder=False)
    assert row["query"] == "<s>hello.a "
    assert row["input_ids"][0] == tiny.BOS
    assert tokenizer.decode(row["input_ids"][1:]) == "hello.a "


def test_tools_and_settings_of_a_row_reach_the_template_of_its_query():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for t in tools %}{{ t.name }}{% endfor %}{{ mood }}{{ end }}{{ messages[0].content }}"
    talk, tools = [{"role": "user", "content": "hello"}], [{"name": "add"}]
    settings = [{"mood": "sad"}, {"end": "end"}]
    dataset = Dataset.from_dict({"prompt": [talk] * 2, "tools": [tools] * 2, "chat_template_kwargs": settings})
    rows = as_queries(dataset, tokenizer, is_encoder_decoder=False)
    assert [row["query"] for row in rows] == ["addsadhello", "addendhello"]
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == ["addsadhello", "addendhello"]
    options = {"is_encoder_decoder": False, "needed_for": "GRPO", "chat_template_kwargs": {"mood": "glad"}}
    texts = [tokenizer.decode(row[PROMPT_IDS]) for row in tokenize_prompts(dataset, tokenizer, **options)]
    assert texts == ["addsadhello", "addgladendhello"]


def test_a_dataset_without_prompts_is_refused():
    with pytest.raises(ValueError, match=r"columns \['text'\], and none of input_ids, query or prompt"):
        as_queries(Dataset.from_dict({"text": ["a"]}), tiny.tokenizer(), is_encoder_decoder=False)


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_an_eos_that_the_tokenizer_appends_ends_an_encoders_query_alone(is_encoder_decoder):
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tiny.BOS), ("</s>", tiny.EOS)]
    )
    assert tokenizer("ab")["input_ids"][-1] == tiny.EOS
    text = [tiny.BOS, tiny.VOCABULARY["a"], tiny.VOCABULARY["b"]]
    expected = [*text, tiny.EOS] if is_encoder_decoder else text
    for column in ("query", "prompt"):
        dataset = Dataset.from_dict({column: ["ab"], "label": [7]})
        (row,) = as_queries(dataset, tokenizer, is_encoder_decoder=is_encoder_decoder)
        assert row == {"query": "ab", "label": 7, "input_ids": expected}


def test_no_progress_bar_fills_a_log_file(capsys):
    as_queries(Dataset.from_dict({"prompt": ["a", "b"]}), tiny.tokenizer(), is_encoder_decoder=False)
    assert capsys.readouterr().err == ""


def test_an_empty_query_is_refused_by_its_row():
    with pytest.raises(ValueError, match="Row 1: The prompt is empty"):
        as_queries(Dataset.from_dict({"query": ["a", ""]}), tiny.tokenizer(), is_encoder_decoder=False)


@pytest.mark.parametrize("value", [None, 3])
def test_a_query_that_is_no_text_is_refused_by_its_row(value):
    rows = Dataset.from_dict({"query": ["a", None] if value is None else [value, value]})
    with pytest.raises(ValueError, match=rf"Row \d: The prompt is {value} \((NoneType|int)\): a text"):
        as_queries(rows, tiny.tokenizer(), is_encoder_decoder=False)


def test_datasets_open_from_files_and_saved_folders(tmp_path):
    rows = [{"query": "a"}, {"query": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "rows.csv").write_text("query\na\nb\n")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.jsonl", "rows.csv", "saved"):
        assert open_dataset(str(tmp_path / name)).to_list() == rows


def test_blank_lines_of_a_text_are_no_rows(tmp_path):
    (tmp_path / "rows.txt").write_text("a\n\n  \nb\n")
    assert open_dataset(str(tmp_path / "rows.txt"))["text"] == ["a", "b"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("rows.jsonl", '{"query": "a"}\n{"query": "b"}\n{"query: "c"}\n', r"rows.jsonl, line 3: .*one JSON object"),
        ("rows.tsv", "query\na\n", r"rows.tsv ends in '.tsv': files of data end in .jsonl, .json, .csv"),
    ],
)
def test_files_that_cannot_be_read_are_named(file, text, message, tmp_path):
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path / file))


def test_a_dataset_with_several_configurations_needs_the_name_of_one(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: main.jsonl\n"
        "- config_name: other\n  data_files: other.jsonl\n---\n"
    )
    for name in ("main", "other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"query": name}))
        assert open_dataset(str(tmp_path), config=name)["query"] == [name]
    with pytest.raises(ValueError, match=r"has the configurations \['main', 'other'\]. Name one: --dataset_config"):
        open_dataset(str(tmp_path))
    with pytest.raises(ValueError, match="has no configurations, and 'main' came"):
        open_dataset(str(tmp_path / "main.jsonl"), config="main")


def test_ids_become_tensors_of_their_own_lengths():
    from trimtab_lm.data.prompts import collate_columns

    columns = collate_columns([{"input_ids": [1, 2], "query": "a"}, {"input_ids": torch.tensor([3]), "query": "b"}])
    assert [row.tolist() for row in columns["input_ids"]] == [[1, 2], [3]]
    assert columns["query"] == ["a", "b"]


def test_tuples_are_collated_as_torch_does_by_default():
    pairs = [(torch.tensor([i, i + 1]), f"text {i}", float(i)) for i in range(4)]
    trainer = tiny.ppo(arguments={"dataset": pairs})
    (batch,) = trainer.dataloader
    ids, texts, numbers = batch
    order = [int(row[0]) for row in ids]
    assert sorted(order) == [0, 1, 2, 3]
    assert ids.tolist() == [[i, i + 1] for i in order]
    assert list(texts) == [f"text {i}" for i in order]
    assert numbers.tolist() == order


def test_ppo_trains_on_fewer_prompts_than_a_batch():
    seen = []

    def reward(queries, responses):
        seen.extend(queries)
        return [float(i) for i in range(len(queries))]

    dataset = Dataset.from_dict({"query": ["a", "b", "c"]})
    trainer = tiny.ppo(arguments={"dataset": dataset})
    trainer.train(reward, steps=3, generation_kwargs={"max_new_tokens": 3})
    assert sorted(seen) == sorted("abc" * 4)
