import math

import numpy as np
import pytest
import torch

from trimtab_common.stats import (
    Correlation,
    Deviation,
    Mean,
    Recorder,
    RunningMoments,
    Surprise,
    Variance,
    gather_stats,
    merge_stats,
    on_host,
)


def test_means_and_variances_of_parts_are_those_of_the_whole():
    whole = torch.randn(10, dtype=torch.float64)
    parts = [{"m": Mean.of(x), "v": Variance.of(x), "s": Deviation.of(x), "d": x} for x in whole.split([1, 6, 3])]
    merged = gather_stats(merge_stats(parts))
    assert merged["m"] == pytest.approx(float(whole.mean()))
    assert merged["v"] == pytest.approx(float(whole.var(correction=0)))
    assert merged["s"] == pytest.approx(float(whole.std(correction=0)))
    torch.testing.assert_close(merged["d"], whole)


def test_masks_reach_the_statistics():
    x, mask = torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0])
    assert (Mean.of(x, mask).value, Variance.of(x, mask).value) == (2.0, 1.0)


def test_numbers_of_means_are_read_without_rounding():
    third = torch.tensor(1 / 3)
    means: dict[str, Mean] = {
        "float32": Mean(third, torch.tensor(7)),
        "bfloat16": Mean(third.bfloat16(), 3.0),
        "float64": Mean(third.double() + 1e-12, third),
        "one number": Mean(torch.tensor([2.5]), 1),
        "nothing": Mean(torch.tensor(0.0), torch.tensor(0)),
        "surprise": Surprise(third * 100, torch.tensor(2), third),
    }
    read = on_host({**means, "number": 1.5, "variance": Variance.of(torch.arange(4.0))})
    assert list(read) == [*means, "number", "variance"]
    for name, mean in means.items():
        assert type(read[name]) is type(mean)
        assert [*vars(read[name]).values()] == [float(number) for number in vars(mean).values()]
        assert not any(isinstance(number, torch.Tensor) for number in vars(read[name]).values())
        assert read[name].value == mean.value or name == "nothing"


def test_a_part_without_a_statistic_does_not_count():
    assert gather_stats(merge_stats([{"a": 1.0}, {"a": 3.0, "b": 5.0}])) == {"a": 2.0, "b": 5.0}


def test_plain_numbers_are_averaged_over_all_calls():
    recorder = Recorder()
    for i in range(65):
        recorder.add({"x": float(i == 64)}, training=True)
    assert recorder.flush(training=True)["x"] == pytest.approx(1 / 65)


def test_running_moments_equal_those_of_everything_seen():
    moments, seen = RunningMoments(), torch.randn(7, dtype=torch.float64) * 3 + 100
    for part in seen.split([1, 4, 2]):
        moments.update(part)
    assert moments.mean == pytest.approx(float(seen.mean()), rel=1e-12)
    assert moments.std == pytest.approx(float(seen.std()), rel=1e-12)


def test_running_moments_can_divide_before_they_know_anything():
    moments = RunningMoments()
    moments.update(torch.tensor([4.0]))
    assert moments.std == 1.0


def test_running_moments_go_on_after_a_restart():
    moments, other = RunningMoments(), RunningMoments()
    moments.update(torch.tensor([1.0, 2.0]))
    other.load_state_dict(moments.state_dict())
    for each in (moments, other):
        each.update(torch.tensor([5.0]))
    assert (other.mean, other.std) == (moments.mean, moments.std)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_running_moments_keep_nothing_that_is_not_finite(broken):
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 2.0]))
    before = moments.state_dict()
    for call in (
        lambda: moments.update(torch.tensor([3.0, broken])),
        lambda: moments.load_state_dict({"count": 2, "mean": broken, "squares": 0.5}),
    ):
        with pytest.raises(ValueError, match=r"RunningMoments: mean=.* The state did not change"):
            call()
        assert moments.state_dict() == before


NUMBER, COLUMN, MEAN, VARIANCE = 1.0, torch.ones(2), Mean(2.0, 1), Variance(1, 1.0, 0.0)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ([NUMBER, MEAN], "Mean and a number"),
        ([MEAN, torch.tensor(1.0)], "Mean and a number"),
        ([NUMBER, COLUMN], "a 1-D tensor and a number"),
        ([COLUMN, MEAN], "Mean and a 1-D tensor"),
        ([MEAN, VARIANCE], "Mean and Variance"),
        ([VARIANCE, Deviation(1, 1.0, 0.0)], "Deviation and Variance"),
        ([torch.ones(2, 2)], "a 2-D tensor"),
        (["1.0"], "str"),
        ([None], "NoneType"),
    ],
)
def test_a_statistic_of_two_kinds_is_named(values, kinds):
    for order in (values, values[::-1]):
        with pytest.raises(TypeError, match=f"statistic 'loss' is {kinds}: in every part it must be of one kind"):
            merge_stats([{"loss": value, "other": 1.0} for value in order])


def test_correlation_by_hand_and_of_what_does_not_vary():
    x, y = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert Correlation.of(x, 5 - 2 * x).value == pytest.approx(-1)
    assert Correlation.of(x, y).value == pytest.approx(2 / 5**0.5)  # 2 over sqrt(5 * 1)
    for nothing in (
        Correlation.of(x, torch.full((4,), 0.7)),
        Correlation.of(x[:3], y[:3]),
        Correlation.of(x[:0], y[:0]),
    ):
        assert math.isnan(nothing.value)


def test_correlations_of_unequal_parts_add_up_to_that_of_the_whole():
    x, y = torch.randn(2, 12)
    parts = [
        {"r": Correlation.of(x[part], y[part])} for part in (slice(0, 0), slice(0, 2), slice(2, 11), slice(11, 12))
    ]
    assert merge_stats(parts)["r"].value == pytest.approx(torch.corrcoef(torch.stack([x, y]).double())[0, 1].item())


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32, lambda value: Mean(value, 1.0)])
def test_a_recorder_averages_numbers_over_all_its_parts(kind):
    recorder = Recorder()
    for value in [*[0.0] * 64, 65.0]:
        recorder.add({"a": kind(value)}, training=True)
    recorder.add({"a": 0.0}, training=True)
    assert recorder.flush(training=True) == {"a": pytest.approx(65 / 66)}


def test_numbers_of_any_type_are_averaged():
    numbers = [1, 2.0, True, torch.tensor(3.0), np.float32(4), np.array(7.0)]
    assert merge_stats([{"a": number} for number in numbers]) == {"a": 3.0}
