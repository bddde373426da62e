"""Progress in words: how fast, how far, how long still; and when a line is due."""

from __future__ import annotations

import io
import os

import pytest

from psdist.report import Training
from psdist.report.meter import Meter, Pace, format_duration
from psdist.report.progress import ProgressDisplay, Style, say_phase

# -- pace --------------------------------------------------------------------------------------


def test_a_pace_needs_a_second_to_be_told() -> None:
    pace = Pace()
    assert pace.per_s is None
    pace.add(at_s=10.0, done=0)
    pace.add(at_s=10.9, done=90)
    assert pace.per_s is None
    assert pace.remaining_s(total=100) is None
    pace.add(at_s=11.0, done=100)
    assert pace.per_s == 100.0
    assert pace.remaining_s(total=400) == 3.0
    assert pace.remaining_s(total=50) == 0.0


def test_a_pace_forgets_a_slow_start() -> None:
    pace = Pace()
    for second in range(61):  # one a second for 30 s, then ten
        pace.add(at_s=second, done=min(second, 30) + 10 * max(0, second - 30))
    assert pace.per_s == pytest.approx(10.0)


def test_reports_that_come_more_rarely_than_the_window_is_long_still_have_a_pace() -> None:
    pace = Pace()
    for minute in range(4):
        pace.add(at_s=60.0 * minute, done=6 * minute)
    assert pace.per_s == pytest.approx(0.1)


def test_what_stands_still_has_no_end() -> None:
    pace = Pace()
    for second in range(30):
        pace.add(at_s=second, done=5)
    assert pace.per_s == 0.0
    assert pace.remaining_s(total=10) is None


def test_a_count_that_goes_back_begins_anew() -> None:
    pace = Pace()
    pace.add(at_s=0.0, done=100)
    pace.add(at_s=2.0, done=200)
    pace.add(at_s=3.0, done=0)
    assert pace.per_s is None
    pace.add(at_s=5.0, done=10)
    assert pace.per_s == 5.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (11105, "3:05:05"), (187_300, "2 d 4 h")],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# -- the meter ---------------------------------------------------------------------------------


def training(at_s: float, iteration: int, **more: object) -> Training:
    facts = {"mode": "sync", "behind": iteration, "ahead": iteration, "samples": 64 * iteration}
    return Training.model_validate({"at_s": at_s, **facts, **more})


def test_with_epochs_known_the_whole_run_has_a_total_and_an_end() -> None:
    meter = Meter()
    known = {"epochs": 5, "batches": 20, "last": {"loss": "0.25", "epoch": "1"}}
    meter.update(training(10.0, 20, epoch=2, batch=0, **known))
    words = meter.update(training(15.0, 30, epoch=2, batch=10, **known))
    assert words.all() == [
        "sync",
        "epoch 2 of 5",
        "iteration 30 of 100",
        "30 %",
        "ETA 0:35",
        "128 samples/s",
        "loss 0.25",
    ]


def test_without_a_number_of_epochs_the_epoch_has_an_end() -> None:
    meter = Meter()
    meter.update(training(10.0, 20, epoch=2, batch=0, batches=20))
    words = meter.update(training(15.0, 30, epoch=2, batch=10, batches=20))
    assert words.all() == [
        "sync",
        "epoch 2",
        "batch 10 of 20",
        "iteration 30",
        "50 %",
        "epoch ends in 0:05",
        "128 samples/s",
    ]


def test_accumulated_gradients_are_not_taken_for_iterations() -> None:
    words = Meter().update(training(1.0, 5, epoch=1, epochs=2, batch=20, batches=40))
    assert words.position == ("epoch 1 of 2", "batch 20 of 40", "iteration 5")
    assert words.fraction == 0.25


def test_a_script_without_a_loader_of_ours_has_iterations_only() -> None:
    meter = Meter()
    meter.update(training(1.0, 7, samples=0))
    words = meter.update(training(3.0, 12, samples=0))
    assert words.all() == ["sync", "iteration 12", "2.5 iterations/s"]
    words = Meter().update(training(1.0, 7, epoch=3))
    assert words.all() == ["sync", "epoch 3", "iteration 7"]
    assert words.fraction is None


def test_a_stop_is_no_slowness() -> None:
    meter = Meter()
    meter.update(training(0.0, 0))
    meter.update(training(10.0, 100))
    meter.restart()
    assert meter.update(training(3600.0, 100)).speed == ""
    assert meter.update(training(3601.0, 110)).speed == "640 samples/s"


def test_the_slowest_group_is_named_with_what_it_costs() -> None:
    ssp = {"mode": "ssp (staleness 3)", "staleness": 2, "slowest": 1}
    words = Meter().update(training(1.0, 7, others_wait=0.24, **ssp))
    assert words.notes == ("staleness 2", "slowest: group 1 (others wait 24 %)")
    words = Meter().update(training(1.0, 9, **{**ssp, "mode": "async", "behind": 4}))
    assert words.notes == ("staleness 2", "slowest: group 1 (5 behind)")
    assert words.position == ("iteration 4..9",)


# -- lines -------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def display(style: Style) -> tuple[ProgressDisplay, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return ProgressDisplay(style=style, stream=stream, clock=clock), stream, clock


def test_lines_come_ever_more_rarely_and_at_last_every_half_minute() -> None:
    progress, stream, clock = display("lines")
    shown_s = []
    for quarter in range(4 * 240):
        clock.now_s = 100.0 + quarter / 4
        before = len(stream.getvalue())
        progress.update(training(clock.now_s, quarter))
        if len(stream.getvalue()) > before:
            shown_s.append(clock.now_s - 100.0)
    gaps = [after - before for before, after in zip([0.0, *shown_s], shown_s, strict=False)]
    assert gaps[:3] == pytest.approx([3.0, 4.5, 6.75])
    assert gaps[-2:] == [30.0, 30.0]
    assert gaps == sorted(gaps)
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("psdist: sync | iteration ")
    assert line.endswith(" | 256 samples/s")


def test_a_line_on_a_terminal_of_its_own_rewrites_itself_and_is_ended_once() -> None:
    progress, stream, clock = display("live")
    clock.now_s += 1.0
    progress.update(training(1.0, 1, last={"note": "x" * 64, "other": "y" * 64}))
    progress.update(training(2.0, 2))
    first, second = stream.getvalue().split("\r")[1:]
    assert len(first) == len(second)  # the shorter line covers the longer one
    progress.close()
    progress.close()
    assert stream.getvalue().endswith(f"{second}\n")


def test_a_display_that_is_off_shows_nothing() -> None:
    off, stream, clock = display("off")
    clock.now_s += 1e6
    off.update(training(1.0, 1))
    off.say("something")
    off.close()
    assert stream.getvalue() == ""


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    full = os.write(writing, b"x" * (1 << 20))  # as much as it takes
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stream:
        ProgressDisplay(style="lines", stream=stream).say("left out")
        assert os.read(reading, full) == b"x" * full
        ProgressDisplay(style="lines", stream=stream).say("shown")
    assert os.read(reading, 100) == b"psdist: shown\n"
    os.close(reading)


def test_the_phases_of_a_start_have_a_line_where_no_parent_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_phase("importing", num_ranks=4, elapsed_s=1.25)
    say_phase("preparing", num_ranks=4, elapsed_s=9.0)
    assert capsys.readouterr().err == (
        "psdist: 4 ranks are connected after 1.2 s; importing torch\n"
    )
