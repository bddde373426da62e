"""Lines of the summary and the report about codecs."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.ranks.reporting.coding import coding_line, coding_of, coding_together


def worker(
    before: tuple[int, int],
    missed: tuple[float, ...] = (),
    wanted: Any = (),
    skipped: int = 0,
    *,
    copied: int = 0,
    on_device: bool = False,
) -> Any:
    return {
        "bytes_to_host": copied,
        "encodes_there": on_device,
        "bytes_before_coding": before,
        "coding_missed": missed,
        "coding_wanted": wanted,
        "pushes_skipped": skipped,
    }


def test_without_codecs_there_is_nothing_to_say() -> None:
    assert coding_of({0: worker((0, 0)), 1: worker((0, 0))}) is None
    assert coding_together([None, None]) is None
    assert coding_line({"coding": None}) == []


def test_errors_are_of_all_workers_together_in_all_and_by_quarter() -> None:
    first = worker((400, 800), (1.0,) * 4, (4.0,) * 4)
    second = worker((100, 0), (0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0), (0.0,) * 4 + (12.0,) * 4)
    coding = coding_of({0: first, 1: second})
    assert coding is not None
    assert (coding["bytes_pushed_before"], coding["bytes_pulled_before"]) == (500, 800)
    assert coding["missed"] == [2.0, 5.0, 0.0, 0.0]
    assert coding["wanted"] == [8.0, 8.0, 24.0, 24.0]
    assert coding["error"] == pytest.approx((7 / 64) ** 0.5)
    assert coding["errors"] == pytest.approx([0.5, (5 / 8) ** 0.5, 0.0, 0.0])
    assert coding_together([coding, None]) == coding
    both = coding_together([coding, coding])
    assert both is not None
    assert both["bytes_pushed_before"] == 1000
    assert both["errors"] == pytest.approx(coding["errors"])


def test_pushes_that_were_left_for_later_are_counted() -> None:
    workers = {0: worker((400, 0), skipped=3), 1: worker((400, 0), skipped=4)}
    coding = coding_of(workers)
    assert coding is not None
    assert coding["pushes_skipped"] == 7
    both = coding_together([coding, coding])
    assert both is not None
    assert both["pushes_skipped"] == 14
    summary = {"coding": coding, "bytes_pushed": 80, "bytes_pulled": 5}
    assert coding_line(summary) == [
        "  codecs         pushed 10.0 x fewer bytes; 7 pushes of chunks left for later"
    ]


def test_the_report_says_where_pushes_are_encoded_that_a_device_has() -> None:
    on_device = coding_of({0: worker((400, 0), copied=100, on_device=True), 1: worker((400, 0))})
    assert on_device is not None
    assert (on_device["bytes_to_host"], on_device["encodes_on_device"]) == (100, 1)
    both = coding_together([on_device, on_device])
    assert both is not None
    assert (both["bytes_to_host"], both["encodes_on_device"]) == (200, 1)
    (line,) = coding_line({"coding": on_device, "bytes_pushed": 80, "bytes_pulled": 5})
    assert line.endswith("; encoded on the device, 8.0 x fewer bytes copied to the host")
    on_host = coding_of({0: worker((400, 0), copied=400)})
    (line,) = coding_line({"coding": on_host, "bytes_pushed": 80, "bytes_pulled": 5})
    assert line.endswith("; encoded on the host; every gradient was copied there whole")


def test_the_report_says_how_much_less_was_sent_and_what_was_left_out() -> None:
    coding = coding_of({0: worker((700, 0), (1.0,), (4.0,))})
    summary = {"coding": coding, "bytes_pushed": 100, "bytes_pulled": 5}
    assert coding_line(summary) == [
        "  codecs         pushed 7.0 x fewer bytes; left out of a push 0.50 (by quarter 0.50)"
    ]
