import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trimtab_common.conditions import CONDITIONS, OTHER_REFERENCE, OTHER_SAMPLER, OTHER_START, Vitals
from trimtab_common.health import HealthMonitor, TrainingDivergedError, check_rows

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
    with pytest.raises(TrainingDivergedError, match=f"loss/policy={value}"):
        HealthMonitor().check(HEALTHY, {"loss/policy": np.float32(value)})
    with pytest.raises(TrainingDivergedError, match=f"entropy={value}"):
        HealthMonitor().check(replace(HEALTHY, entropy=value))


@pytest.mark.parametrize(
    ("key", "value", "name", "words"),
    [
        ("kl", 31.0, "runaway_kl", ["31", "30", "KL coefficient"]),
        ("kl", -2.0, "negative_kl", ["-2 nats per response", "-1", "top_k", "temperature", "min_length", "padding"]),
        ("entropy", 1.9, "entropy_collapse", ["1.9", "below 2 ", "learning rate"]),
        ("clip_fraction", 0.31, "clipping", ["0.31", "above 0.3:", "learning rate"]),
        ("response_length", 61.0, "growing_responses", ["61", "60", "EOS"]),
    ],
)
def test_each_condition_says_number_threshold_and_remedy(key, value, name, words):
    monitor = HealthMonitor(kl_target=6.0)
    monitor.check(HEALTHY)
    again = copy.deepcopy(monitor)
    (alert,) = monitor.check(replace(HEALTHY, **{key: value}))
    assert names([alert]) == [name]
    assert alert.value == value
    assert "\n" not in str(alert)
    for word in words:
        assert word in str(alert)
    logged = again.report(replace(HEALTHY, **{key: value}), when="step 2", warns=False)
    assert logged == {"health/alerts": 1.0, f"health/{name}": value}


def test_a_slow_condition_waits_until_it_has_lasted():
    monitor = HealthMonitor(patience=3)
    values = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    found = [names(monitor.check(Vitals(reward_std=value))) for value in values]
    assert found == [[], [], [], [], [], ["constant_rewards"]]
    assert names(monitor.check(Vitals())) == []  # a check without the number ends the streak
    assert names(HealthMonitor(patience=1).check(Vitals(reward_std=0.0))) == ["constant_rewards"]


def test_a_value_function_is_bad_only_if_it_does_not_learn():
    def found(errors, explained=-2.0):
        monitor = HealthMonitor(patience=2)  # the critic is judged over four checks
        steps = [Vitals(explained_variance=explained, value_error=error) for error in errors]
        return [name for step in steps for name in names(monitor.check(step))]

    assert found([8.0, 8.0, 7.0, 6.5]) == ["bad_value_function"]
    assert found([8.0, 8.0, 7.0, 5.5]) == []  # the critic removed a quarter of its error
    assert found([8.0, 8.0, 7.0, 6.5], explained=0.0) == []  # the critic predicts as well as the mean
    assert found([8.0, 8.0, 6.0]) == []


def test_a_value_function_that_its_updates_improve_is_not_bad():
    def found(gains):
        monitor = HealthMonitor(patience=2)  # the critic is judged over four checks; one is a quarter
        steps = [Vitals(explained_variance=-2.0, value_error=8.0, value_gain=gain) for gain in gains]
        return [alert for step in steps for alert in monitor.check(step)]

    assert not found([0.001] * 4)
    (alert,) = found([0.02, -0.01, 0.02, 0.02])
    assert names([alert]) == ["bad_value_function"]
    assert "error that updates remove is -0.01, below 0 at 1 of the last 4 checks" in str(alert)
    assert names(found([None] * 4)) == ["bad_value_function"]  # with one update per step the gain is unknown


def test_scores_that_follow_the_length_are_named_before_responses_triple():
    monitor = HealthMonitor(patience=3)
    steps = [Vitals(response_length=10.0, length_correlation=value) for value in (0.9, 0.6, 0.9, 0.8, 1.0, 1.0)]
    alerts = [monitor.check(step) for step in steps]
    assert [names(found) for found in alerts] == [[], [], [], [], ["growing_responses"], []]
    assert "correlation of 0.8, above 0.7 at each of the last 3 checks: the reward favours length" in str(alerts[4][0])


def test_a_condition_with_two_signs_says_both():
    monitor = HealthMonitor(kl_target=6.0)
    assert monitor.check(Vitals(kl=3.0, kl_coef=0.1)) == []
    assert monitor.check(Vitals(kl=7.0, kl_coef=1.1)) == []
    (alert,) = monitor.check(Vitals(kl=8.0, kl_coef=1.1))
    assert str(alert).startswith(
        "health/kl_coef_winds_up: the KL coefficient is 1.1, above 1 (10 times the first), and KL to the reference is "
        "8 nats per response, above 7.2 (1.2 times the target): the adaptive coefficient rises"
    )


def test_every_condition_has_its_limit_words_cause_and_remedy():
    every = [*CONDITIONS, OTHER_REFERENCE, OTHER_START, OTHER_SAMPLER]
    assert len({condition.name for condition in every}) == len(every)
    for condition in every:
        for sign in (*condition.signs, *condition.or_signs):
            assert (sign.above is None) != (sign.below is None)
            assert "{}" in Vitals.__dataclass_fields__[sign.statistic].metadata["words"]
        assert not condition.cause.endswith(".")
        assert condition.remedy.endswith((".", "?"))


def test_rows_that_are_not_finite_are_named_under_the_first_column():
    columns = {name: torch.zeros(12, 3) for name in ("logprobs", "values")}
    check_rows(columns, what="response")
    columns["values"][:, 0] = torch.nan
    columns["logprobs"][[3, 11], 1] = torch.inf
    with pytest.raises(
        TrainingDivergedError, match=r"^logprobs of response 3, 11 \(2 of 12\) are not finite. No update"
    ):
        check_rows(columns, what="response")
    with pytest.raises(TrainingDivergedError, match=r"^values of response 0, .* 7 \.\.\. \(12 of 12\)"):
        check_rows({"values": columns["values"]}, what="response")


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
