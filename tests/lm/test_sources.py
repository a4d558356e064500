"""torch datasets, and images in place of texts, in every trainer that takes data."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from PIL import Image as Pictures
from tests.lm import tiny
from tests.lm.test_late_failures import COLUMNS, KINDS, SETTINGS, make

from trimtab_lm.data.media import check_row
from trimtab_lm.ppo import PPOConfig, PPOTrainer

IDS = [[4, 5, 6, 7, 2], [8, 9, 2], [10, 11, 12, 2], [5, 4, 2]]
PAIRS = [{"input_ids_chosen": ids, "input_ids_rejected": [*ids[:-1], 9, 2]} for ids in IDS]
TEXTS: dict[str, list[dict[str, Any]]] = {
    kind: [{name: i < 2 if name == "label" else f"{name} {'abcd'[i]}" for name in names} for i in range(4)]
    for kind, names in COLUMNS.items()
}
ROWS: list[tuple[str, list[dict[str, Any]]]] = [
    *TEXTS.items(),
    ("sft", [{"input_ids": torch.tensor(ids), "labels": np.array([-100, *ids[1:]])} for ids in IDS]),
    ("iterative_sft", [{"input_ids": ids} for ids in IDS]),
    ("reward", PAIRS),
    ("reward", [{name: torch.tensor(ids) for name, ids in row.items()} | {"margin": 0.5} for row in PAIRS]),
]


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def trained(kind: str, folder: Any, dataset: Any, **settings: Any) -> list[float]:
    trainer = make(kind, folder, dataset, logging_steps=1, **SETTINGS.get(kind, {}), **settings)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(("kind", "rows"), ROWS)
def test_a_torch_dataset_trains_as_one_of_datasets_does(kind, rows, tmp_path):
    plain = [
        {name: value if isinstance(value, str | float | bool) else list(map(int, value)) for name, value in row.items()}
        for row in rows
    ]
    assert trained(kind, tmp_path, Rows(rows)) == trained(kind, tmp_path, Dataset.from_list(plain))
    if kind == "grpo":
        with pytest.raises(TypeError, match=r"not from a Stream: .*Dataset\.from_list"):
            make(kind, tmp_path, Stream(rows), **SETTINGS[kind])
    else:
        streamed = IterableDataset.from_generator(lambda: iter(plain))
        assert trained(kind, tmp_path, Stream(rows)) == trained(kind, tmp_path, streamed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Rows([("a", "b")]), "is a tuple, and a dict"), (iter([]), "is a list_iterator; a datasets.Dataset")],
)
def test_rows_that_are_no_rows_are_one_clear_line(kind, dataset, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        make(kind, tmp_path, dataset, **SETTINGS.get(kind, {}))


@pytest.mark.parametrize("of", [Rows, Stream])
def test_torch_rows_are_cut_counted_and_packed(of, tmp_path):
    with pytest.warns(UserWarning, match="max_length=6"):
        rows = list(
            make("sft", tmp_path, of([{"text": "a"}, {"text": "abcdefgh"}]), max_length=6, packing=True).train_dataset
        )
    assert sorted(length for row in rows for length in row["seq_lengths"]) == [2, 6]
    with pytest.raises(ValueError, match="Row 1: The text is empty"):
        list(make("sft", tmp_path, of([{"text": "a"}, {"text": ""}])).train_dataset)


def test_a_collator_of_the_callers_gets_torch_rows_as_they_are(tmp_path):
    seen: list[Any] = []

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        seen.extend(rows)
        ids = torch.tensor([[4, 5, 6]] * len(rows))
        if "words" in rows[0]:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        both = {f"{name}_{side}": ids for name in ("input_ids",) for side in ("chosen", "rejected")}
        return both | {f"attention_mask_{side}": torch.ones_like(ids) for side in ("chosen", "rejected")}

    for kind, row in (("sft", {"words": object()}), ("reward", {"pair": object()})):
        make(kind, tmp_path, Rows([row] * 4), data_collator=collate).train()
        assert row in seen


# Images ---------------------------------------------------------------------------------------------------------------

PICTURE = Pictures.new("RGB", (2, 2), "red")
FILE = {"bytes": b"\x89PNG", "path": None}
MEDIA: dict[str, Any] = {
    "picture": {"picture": PICTURE},
    "image": {"image": b"\x89PNG"},
    "images": {"images": [PICTURE]},
    "image_urls": {"image_urls": [FILE]},
    "pixel_values": {"pixel_values": [[0.1, 0.2]]},
    "videos": {"videos": [[0.1]]},
    "audio": {"audio": {"array": [0.1], "sampling_rate": 8}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_images_are_refused(kind, tmp_path):
    rows = [{**row, "shown": PICTURE} for row in TEXTS[kind]]
    with pytest.raises(ValueError, match=r"column 'shown' holds images.*learn from text alone"):
        make(kind, tmp_path, Dataset.from_list(rows), **SETTINGS.get(kind, {}))
    rows = [{**row, "pixel_values": [[0.5, 0.1]]} for row in TEXTS[kind]]
    with pytest.raises(ValueError, match="Row 0: The column 'pixel_values' holds an image"):
        make(kind, tmp_path, Dataset.from_list(rows), **SETTINGS.get(kind, {}))
    if kind != "grpo":
        stream = make(kind, tmp_path, Stream([*TEXTS[kind], {**TEXTS[kind][0], "shown": PICTURE}])).train_dataset
        with pytest.raises(ValueError, match="Row 4: The column 'shown' holds an image"):
            list(stream)


@pytest.mark.parametrize("name", MEDIA)
def test_every_value_of_an_image_a_video_or_a_sound_is_refused(name):
    with pytest.raises(ValueError, match=f"The column '{name}' holds an image, a video or a sound"):
        check_row({"text": "a", **MEDIA[name]})


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_only_sound_like_images_are_taken(kind, tmp_path):
    harmless = {"image": "a caption", "images": ["one.png"], "video": None, "audio": 3, "name": b"raw"}
    rows = Dataset.from_list([{**row, **harmless} for row in TEXTS[kind]])
    make(kind, tmp_path, rows, **SETTINGS.get(kind, {})).train()
    rows = rows.map(lambda row: {name: "<image> " + row[name] for name in COLUMNS[kind] if name != "label"})
    with pytest.raises(ValueError, match="The column 'image' holds an image"):  # a path, at a place in the text
        make(kind, tmp_path, rows, **SETTINGS.get(kind, {}))


def test_ppo_refuses_a_column_of_images():
    features = Features({"query": Value("string"), "shown": List(Image())})
    rows = Dataset.from_dict({"query": ["ab"], "shown": [[FILE]]}, features=features)
    with pytest.raises(ValueError, match="'shown' holds images"):
        PPOTrainer(PPOConfig(), tiny.policy(), tokenizer=tiny.tokenizer(), dataset=rows)


@pytest.mark.parametrize("come_with", [1, 3])
def test_a_collators_pixels_are_refused_when_they_come(come_with, tmp_path):
    ids, calls = torch.tensor([[4, 5], [6, 7]]), []

    def collate(rows):
        calls.append(rows)
        pixels = {"pixel_values": torch.zeros(2, 3)} if len(calls) >= come_with else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **pixels}

    sft = make("sft", tmp_path, Rows([{"a": 1}] * 8), data_collator=collate)
    sft.args.max_steps = 4
    with pytest.raises(ValueError, match="'pixel_values' holds"):
        sft.train()
