"""Which run a checkpoint belongs to, and how two runs differ."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trimtab_common.run_record import RunRecord, layout_fingerprint, result_settings, rows_fingerprint
from trimtab_common.sealing import CheckpointError, seal


@dataclass
class Config:
    learning_rate: float = 1e-3
    save_steps: int = 5
    folder: str = "a"
    extra: dict[str, object] = field(default_factory=dict)


@dataclass
class Settings:
    flag: bool | None = False
    auto: bool | None = True
    count: int | None = None
    factor: float = 1.0
    options: dict[str, object] | None = None


def checkpoint(root: Path, step: int, record: RunRecord | None) -> None:
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights").write_text("w")
    seal(folder, {"step": step} | ({"run": record.as_dict()} if record else {}))


def test_a_run_saves_beside_its_own_checkpoints_alone(tmp_path):
    first, second = RunRecord("1", {}), RunRecord("2", {})
    first.check_folder(tmp_path / "nowhere")
    checkpoint(tmp_path, 1, first)
    first.check_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 of another run.*choose another folder"):
        second.check_folder(tmp_path)


def test_checkpoints_that_name_no_run_belong_to_the_run_that_resumes_them(tmp_path):
    checkpoint(tmp_path, 1, None)
    with pytest.raises(CheckpointError, match="of another run"):
        RunRecord("1", {}).check_folder(tmp_path)
    RunRecord("1", {"lr": 1}).continued(tmp_path, None, accepts_changes=False).check_folder(tmp_path)


def test_a_folder_without_a_seal_is_nobodys(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    RunRecord("1", {}).check_folder(tmp_path)


def test_every_difference_is_listed_with_both_values(tmp_path):
    saved = RunRecord("1", {"lr": 0.1, "seed": 0, "same": [1]}, data="x", model="m")
    current = RunRecord("2", {"lr": 0.2, "new": True, "same": [1]}, data="y", model="m")
    with pytest.raises(CheckpointError) as caught:
        current.continued(tmp_path, saved, accepts_changes=False)
    for part in ("lr was 0.1, is 0.2", "seed was 0, is None", "new was None, is True", "training data was 'x', is 'y'"):
        assert part in str(caught.value)
    assert "same" not in str(caught.value)
    with pytest.warns(UserWarning, match=r"with changes: lr was 0\.1, is 0\.2.* state holds lr: its values stay"):
        record = current.continued(tmp_path, saved, accepts_changes=True, held=("l*",))
    assert (record.id, record.settings) == ("1", current.settings)


def test_data_that_an_earlier_release_did_not_record_are_no_difference(tmp_path):
    saved, current = RunRecord("1", {}), RunRecord("2", {}, data="y", model="m")
    assert current.continued(tmp_path, saved, accepts_changes=False).id == "1"
    with pytest.raises(CheckpointError, match="training data was 'y', is None"):
        saved.continued(tmp_path, current, accepts_changes=False)


@pytest.mark.parametrize(
    ("saved", "unset", "config"),
    [
        ({}, (), {}),  # every setting is new; the default of `factor` is not empty
        ({"flag": None, "factor": 1.0}, (), {}),  # the old default is None, the new one False
        ({"flag": False, "options": []}, (), {"flag": None, "options": {}}),
        ({"count": 0}, ("count",), {}),  # the old default is 0, the new one None
        ({"removed": False, "table.a": None}, (), {}),
        ({"removed": "auto"}, ("removed",), {}),
        ({"free_of_effect": True}, (), {}),
    ],
)
def test_what_a_release_adds_removes_or_leaves_unset_is_no_difference(saved, unset, config, tmp_path):
    record = RunRecord("1", {"factor": 1.0, **saved}, unset=unset)
    current = RunRecord.of(Settings(**config), without=("free_*",))
    assert current.continued(tmp_path, record, accepts_changes=False).id == "1"
    again = RunRecord(**current.as_dict())
    assert current.continued(tmp_path, again, accepts_changes=False).id == again.id


@pytest.mark.parametrize(
    ("saved", "unset", "config", "line"),
    [
        ({}, (), {"flag": True}, "flag was None, is True"),
        ({"flag": True}, (), {}, "flag was True, is False"),
        ({"auto": None}, (), {"auto": False}, "auto was None, is False"),
        ({"count": 0}, (), {}, "count was 0, is None"),
        ({"count": None}, (), {"count": 0}, "count was None, is 0"),
        ({"factor": 2.0}, ("factor",), {}, r"factor was 2.0, is 1.0"),
        ({"removed": "auto"}, (), {}, "removed was 'auto', is None"),
        ({}, (), {"options": {"a": 1}}, "options.a was None, is 1"),
    ],
)
def test_a_setting_that_the_user_chose_is_a_difference(saved, unset, config, line, tmp_path):
    record = RunRecord("1", {"factor": 1.0, "auto": True, **saved}, unset=unset)
    with pytest.raises(CheckpointError, match=f"differs: {line}. Resume"):
        RunRecord.of(Settings(**config), without=()).continued(tmp_path, record, accepts_changes=False)


def test_settings_without_effect_are_left_out_and_addresses_are_not_compared(tmp_path):
    settings = result_settings(Config(extra={"a": 1}), without=("save_*", "folder"), processes=2)
    assert settings == {"learning_rate": 1e-3, "extra.a": 1, "processes": 2}
    one, other = (RunRecord("1", {"f": f"<function f at 0x{i}>"}) for i in (1, 2))
    assert one.continued(tmp_path, other, accepts_changes=False).id == "1"


def test_the_fingerprint_of_rows_sees_order_length_first_and_last():
    rows = [{"ids": [i]} for i in range(1000)]
    kept = rows_fingerprint(rows)
    assert kept == rows_fingerprint([dict(row) for row in rows])
    others = [rows[:-1], rows[::-1], [{"ids": [-1]}, *rows[1:]], [*rows[:-1], {"ids": [-1]}], []]
    assert len({kept, *map(rows_fingerprint, others)}) == 6
    assert rows_fingerprint([{"x": torch.ones(2)}]) == rows_fingerprint([{"x": [1.0, 1.0]}])


@pytest.mark.parametrize(
    ("one", "other"),
    [(np.array([1, 2]), np.array([1, 3])), (b"one", b"other"), (datetime(2026, 1, 1), datetime(2026, 1, 2))],
)
def test_the_fingerprint_of_rows_sees_values_that_json_has_not(one, other):
    assert rows_fingerprint([{"x": one}]) == rows_fingerprint([{"x": one}])
    assert rows_fingerprint([{"x": one}]) != rows_fingerprint([{"x": other}])


def test_the_fingerprint_of_a_model_sees_shapes_and_what_trains_and_not_values():
    kept = layout_fingerprint(nn.Linear(2, 3))
    assert kept == layout_fingerprint(nn.Linear(2, 3))
    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad_(False)
    assert len({kept, layout_fingerprint(nn.Linear(3, 2)), layout_fingerprint(frozen)}) == 3
