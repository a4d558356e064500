import math
from dataclasses import replace

import pytest

from trimtab_common.health import HealthMonitor, TrainingDivergedError, Vitals

HEALTHY = Vitals(
    kl=3.0,
    entropy=40.0,
    clip_fraction=0.1,
    explained_variance=0.4,
    reward_std=1.0,
    response_length=20.0,
)


def names(alerts):
    return [alert.name.removeprefix("health/") for alert in alerts]


def test_a_healthy_run_is_left_alone():
    monitor = HealthMonitor(kl_target=6.0, patience=2)
    assert [monitor.check(HEALTHY) for _ in range(9)] == [[]] * 9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_training_by_name(value):
    with pytest.raises(TrainingDivergedError, match=f"loss/policy={value}"):
        HealthMonitor().check(HEALTHY, {"loss/policy": value})
    with pytest.raises(TrainingDivergedError, match=f"entropy={value}"):
        HealthMonitor().check(replace(HEALTHY, entropy=value))


@pytest.mark.parametrize(
    ("key", "value", "name", "words"),
    [
        ("kl", 31.0, "runaway_kl", ["31", "30", "KL coefficient"]),
        ("kl", -2.0, "negative_kl", ["-2", "-1", "top_k", "temperature", "min_length", "padding"]),
        ("entropy", 3.9, "entropy_collapse", ["3.9", "below 4 ", "learning rate"]),
        ("clip_fraction", 0.31, "clipping", ["31.0%", "30.0%", "learning rate"]),
        ("response_length", 61.0, "growing_responses", ["61", "60", "EOS"]),
    ],
)
def test_each_condition_says_number_threshold_and_remedy(key, value, name, words):
    monitor = HealthMonitor(kl_target=6.0)
    monitor.check(HEALTHY)
    (alert,) = monitor.check(replace(HEALTHY, **{key: value}))
    assert names([alert]) == [name]
    assert alert.value == value
    assert "\n" not in str(alert)
    for word in words:
        assert word in str(alert)
    assert monitor.metrics([alert]) == {"health/alerts": 1.0, f"health/{name}": value}


@pytest.mark.parametrize(
    ("key", "bad", "name"),
    [("explained_variance", -2.0, "bad_value_function"), ("reward_std", 0.0, "constant_rewards")],
)
def test_slow_conditions_wait_until_they_have_lasted(key, bad, name):
    monitor = HealthMonitor(patience=3)
    values = [bad, bad, getattr(HEALTHY, key), bad, bad, bad]
    assert [names(monitor.check(Vitals(**{key: value}))) for value in values] == [[], [], [], [], [], [name]]


def test_an_alert_repeats_only_after_a_while_and_across_a_resume():
    sick, monitor = Vitals(clip_fraction=0.9), HealthMonitor(repeat_after=3)
    assert [len(monitor.check(sick)) for _ in range(5)] == [1, 0, 0, 1, 0]
    resumed = HealthMonitor(repeat_after=3)
    resumed.load_state_dict(monitor.state_dict())
    assert [len(resumed.check(sick)) for _ in range(3)] == [0, 1, 0]


def test_the_first_lengths_and_windows_survive_a_resume():
    monitor = HealthMonitor(patience=2)
    monitor.check(Vitals(response_length=10.0, reward_std=0.0))
    resumed = HealthMonitor(patience=2)
    resumed.load_state_dict(monitor.state_dict())
    alerts = resumed.check(Vitals(response_length=31.0, reward_std=0.0))
    assert names(alerts) == ["constant_rewards", "growing_responses"]
