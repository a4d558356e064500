import json

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny

from trimtab_lm.data import ShuffledBatches, open_dataset, tokenize_prompts

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


def test_too_small_a_dataset_is_refused():
    with pytest.raises(ValueError, match="5 rows, fewer than one batch of 3 on each of 2"):
        ShuffledBatches(5, **SIZES, rank=0)


def test_a_conversation_goes_through_the_template_and_special_tokens_are_added_once():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a {% endif %}"
    )
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hello"}]]})
    (row,) = tokenize_prompts(dataset, tokenizer)
    assert row["query"] == "<s>hello.a "
    assert row["input_ids"][0] == tiny.BOS
    assert tokenizer.decode(row["input_ids"][1:]) == "hello.a "


def test_a_dataset_without_prompts_is_refused():
    with pytest.raises(ValueError, match=r"columns \['text'\], and none of input_ids, query or prompt"):
        tokenize_prompts(Dataset.from_dict({"text": ["a"]}), tiny.tokenizer())


def test_datasets_open_from_files_and_saved_folders(tmp_path):
    rows = [{"query": "a"}, {"query": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "rows.csv").write_text("query\na\nb\n")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.jsonl", "rows.csv", "saved"):
        assert open_dataset(str(tmp_path / name)).to_list() == rows


def test_ids_become_tensors_of_their_own_lengths():
    from trimtab_lm.data import collate_columns

    columns = collate_columns([{"input_ids": [1, 2], "query": "a"}, {"input_ids": torch.tensor([3]), "query": "b"}])
    assert [row.tolist() for row in columns["input_ids"]] == [[1, 2], [3]]
    assert columns["query"] == ["a", "b"]
