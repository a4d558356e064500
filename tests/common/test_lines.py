"""The line of a logged step."""

import pytest

from trimtab_common.lines import Lines, clock_time


def test_a_line_has_step_total_the_watched_numbers_in_their_order_and_the_time_left():
    lines = Lines("step", ("loss", "margin", "absent"), total=50, done=10)
    numbers = {"other": 1.0, "margin": 0.81234, "loss": 1e-7, "table": "text"}
    assert lines.line(20, numbers, seconds=60.0) == "step 20 of 50 | loss 1e-07 | margin 0.8123 | 0:03:00 left"
    assert lines.line(50, numbers, seconds=240.0) == "step 50 of 50 | loss 1e-07 | margin 0.8123"
    assert lines.line(10, {"eval_loss": 2, "eval_x": 1}, seconds=1.0, prefix="eval_") == "step 10 of 50 | eval_loss 2"


def test_without_a_watched_number_it_has_the_first_five():
    lines = Lines("epoch", ("loss",), total=0)
    numbers = {name: float(i) for i, name in enumerate("abcdefg")}
    assert lines.line(3, numbers, seconds=9.0) == "epoch 3 | a 0 | b 1 | c 2 | d 3 | e 4"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0:00:00"), (90, "0:01:30"), (3725, "1:02:05"), (360000, "100:00:00")]
)
def test_a_duration_in_hours_minutes_and_seconds(seconds: float, text: str):
    assert clock_time(seconds) == text


def test_a_line_reaches_a_file_at_once(capfd):
    Lines("step", ("loss",), total=2).show(1, {"loss": 0.5})
    assert capfd.readouterr().out.startswith("step 1 of 2 | loss 0.5 | 0:00:0")
