"""Settings, files and statistics of any value and type are accepted unchanged, or rejected with an error of ours."""

import dataclasses
import json
import math
import typing
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_common.conditions import Vitals
from trimtab_common.config import Range, check_ranges, parse_config, read_settings, to_flat_dict, without_secrets
from trimtab_common.health import HealthMonitor, TrainingDivergedError
from trimtab_common.images import to_pil
from trimtab_common.reward_checks import checked_scores
from trimtab_common.run_record import RunRecord
from trimtab_common.sealing import MANIFEST, CheckpointError, latest_checkpoint, verify
from trimtab_common.writers import markdown_table
from trimtab_diffusion import DDPOConfig
from trimtab_lm import PPOConfig
from trimtab_lm.dpo.loss import check_losses, mixed
from trimtab_lm.sampling.generate import LengthSampler
from trimtab_lm.sampling.rollout import SamplingSettings

from .inputs import any_float, anything, odd_text, result_or_our_error, scalar

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), odd_text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(odd_text, inner, max_size=3)),
    max_leaves=8,
)
numbers = st.one_of(st.integers(-3, 40), any_float, st.booleans(), st.none(), st.sampled_from(["3", "", "x", [1], {}]))


def fields_with_a_range(kind: Any) -> list[str]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        field.name
        for field in dataclasses.fields(kind)
        if "Deprecated" not in field.metadata.get("help", "")
        and any(
            isinstance(part, Range)
            for hint in (hints[field.name], *typing.get_args(hints[field.name]))
            for part in typing.get_args(hint)
        )
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [PPOConfig, DDPOConfig])
@given(st.data())
def test_a_config_holds_numbers_within_their_ranges_or_names_the_field(kind, data):
    names = data.draw(st.lists(st.sampled_from(fields_with_a_range(kind)), min_size=1, max_size=2, unique=True))
    values = {name: data.draw(numbers, label=name) for name in names}
    config = result_or_our_error(lambda: kind(**values))
    if isinstance(config, Exception):
        return
    check_ranges(config)
    assert all(math.isfinite(getattr(config, name) or 0.0) for name in names)
    assert json.dumps(to_flat_dict(config), default=str)


def test_a_number_that_is_a_text_is_refused_by_its_name():
    with pytest.raises(ValueError, match="batch_size='3' must be a whole number of at least 1"):
        PPOConfig(batch_size="3")


@given(
    st.dictionaries(
        st.sampled_from(["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "do_sample", "seed"]),
        st.one_of(st.integers(-2, 50), any_float),
    )
)
def test_settings_of_the_sampling(arguments):
    chosen = result_or_our_error(lambda: SamplingSettings.of(arguments))
    if not isinstance(chosen, Exception):
        assert chosen.temperature > 0
        assert 0 < chosen.top_p <= 1
        assert chosen.top_k >= 0
        assert chosen.max_completion_length >= 1


@given(st.integers(-5, 10), st.integers(-5, 10))
def test_lengths_are_drawn_within_their_bounds(low, high):
    sampler = result_or_our_error(lambda: LengthSampler(low, high))
    if not isinstance(sampler, Exception):
        assert all(low <= sampler() < high for _ in range(5))


@given(
    st.lists(st.sampled_from(["sigmoid", "ipo", "robust", "no such"]), max_size=3),
    any_float,
    any_float,
    st.lists(any_float, max_size=3),
)
def test_losses_and_their_weights(names, beta, smoothing, weights):
    result_or_our_error(lambda: check_losses(names, beta=beta, label_smoothing=smoothing))
    result_or_our_error(lambda: mixed(names, weights))


@dataclasses.dataclass
class Settings:
    """A program's settings."""

    count: int = 1
    rate: float = 0.5
    name: str = "a"
    flag: bool = False
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


@given(
    st.lists(
        st.one_of(odd_text, st.sampled_from(["--count", "--rate=1", "--flag", "--more.a=2", "--no-such=1", "--"])),
        max_size=4,
    )
)
def test_a_command_line_is_read_or_ends_the_program_with_a_message(capsys, words):
    words = [word for word in words if word not in ("-h", "--help")]
    result = None
    with suppress(SystemExit):
        (result,) = parse_config(Settings, argv=words)
    if result is None:
        assert ": error: " in capsys.readouterr().err
        return
    assert isinstance(result.count, int)
    assert isinstance(result.name, str)


@given(
    st.one_of(
        json_values.map(lambda value: json.dumps(value).encode()), st.binary(max_size=60), odd_text.map(str.encode)
    )
)
def test_a_file_of_settings_is_read_or_refused(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "settings.yaml"
    file.write_bytes(content)
    result = result_or_our_error(lambda: read_settings(file))
    assert isinstance(result, Exception) or all(isinstance(name, str) for name in result)


@pytest.mark.parametrize("content", [b"when: 2001-99-99", b"\xff\xfe\x00", b"[" * 2000, b"a: &a [*a]"])
def test_files_that_yaml_cannot_hold_are_refused_by_their_name(tmp_path, content):
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    result = result_or_our_error(lambda: read_settings(file))
    assert isinstance(result, dict) or str(file) in str(result)


@given(anything)
def test_secrets_are_left_out_at_any_depth(value):
    hidden = {"token": value, "api_key": value, "inner": [{"password": value, "kept": value}], "url": "https://a:b@c/d"}
    clean = without_secrets(hidden)
    assert clean["url"] == "https://c/d"
    assert clean.keys() == {"inner", "url"}
    assert set(clean["inner"][0]) == {"kept"}


@settings(max_examples=15)
@given(st.one_of(json_values.map(lambda value: json.dumps(value).encode()), st.binary(max_size=80)), st.booleans())
def test_a_manifest_that_is_not_ours_is_refused(tmp_path_factory, content, has_format):
    folder = tmp_path_factory.mktemp("run") / "checkpoint-3"
    folder.mkdir()
    if has_format:
        content = json.dumps({"format": 1, "files": {}, "step": 3, "more": content.hex()}).encode()
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError):
        verify(folder)
    assert latest_checkpoint(folder.parent) is None


@given(st.dictionaries(odd_text, json_values, max_size=4))
def test_the_settings_of_a_run_are_compared_whatever_they_hold(values):
    record = RunRecord("1", values)
    saved = RunRecord(**json.loads(json.dumps(record.as_dict())))
    assert record.continued("checkpoint-1", saved, accepts_changes=False) == record
    changed = RunRecord("1", {**values, "more": "another"})
    with pytest.raises(CheckpointError, match=r"more was .*, is 'another'"):
        changed.continued("checkpoint-1", saved, accepts_changes=False)


names_of_vitals = [field.name for field in dataclasses.fields(Vitals)]
steps = st.lists(st.dictionaries(st.sampled_from(names_of_vitals), any_float, max_size=6), min_size=1, max_size=12)


@given(steps, st.integers(0, 12))
def test_the_health_report_takes_any_number_and_goes_on_after_a_resume(vitals, cut):
    one, whole = (HealthMonitor(kl_target=6.0, patience=2, repeat_after=3) for _ in range(2))
    for number, values in enumerate(vitals):
        if number == cut:
            state = json.loads(json.dumps(one.state_dict()))
            one = HealthMonitor(kl_target=6.0, patience=2, repeat_after=3)
            one.load_state_dict(state)
        try:
            alerts = one.check(Vitals(**values))
        except TrainingDivergedError:
            assert any(not math.isfinite(value) for value in values.values())
            with pytest.raises(TrainingDivergedError):
                whole.check(Vitals(**values))
            continue
        assert alerts == whole.check(Vitals(**values))
        assert all(math.isfinite(value) for value in values.values())
        assert all("\n" not in str(alert) and ": " in alert.message for alert in alerts)


@given(st.one_of(anything, st.lists(scalar, max_size=3)), st.integers(0, 3))
def test_scores_are_numbers_or_an_error_of_ours(value, count):
    items = [f"item {i}" for i in range(count)]
    result = result_or_our_error(lambda: checked_scores(value, items, source="What f returned", may_abstain=True))
    if isinstance(result, Exception):
        assert str(result).startswith("What f returned")
    else:
        assert len(result) == count
        assert all(isinstance(score, float) and (math.isnan(score) or abs(score) < 4e38) for score in result)


@given(st.lists(st.lists(scalar, min_size=2, max_size=2), max_size=3))
def test_a_table_has_a_line_for_each_row(rows):
    table = markdown_table(["a", "b"], rows)
    assert len(table.split("\n")) == 2 + len(rows)


@given(anything)
def test_a_picture_is_one_or_is_refused(value):
    result_or_our_error(lambda: to_pil(value))
