"""Whether backward passes are long enough to send gradients during them."""

from __future__ import annotations

from psdist.workers.early.group_overlap import BUCKET_S
from psdist.workers.early.overlap import Pace

LONG, SHORT = 4.1 * BUCKET_S, 3.9 * BUCKET_S


def pace() -> Pace:
    return Pace(4 * BUCKET_S)


def test_it_pays_where_the_shortest_pass_is_long_enough_for_the_buckets() -> None:
    long, short = pace(), pace()
    for _ in range(3):
        long.watch([LONG, 1.0])
        short.watch([1.0, SHORT])
    assert long.why_not() == ""
    assert short.why_not() == (
        "backward passes leave 11.7 ms to send gradients in, and sending them before step() "
        "pays from 12 ms on"
    )


def test_one_pass_that_is_out_of_line_decides_nothing() -> None:
    each = pace()
    for seconds in (1.0, SHORT, SHORT):
        each.watch([seconds])
    assert each.why_not() != ""
    each = pace()
    for seconds in (SHORT, LONG, LONG):
        each.watch([seconds])
    assert each.why_not() == ""


def test_the_first_passes_count_that_every_worker_has_watched() -> None:
    each = pace()
    each.watch([SHORT, 0.0])  # the other one has no data, or watches no more
    for _ in range(3):
        each.watch([LONG, LONG])
    for _ in range(9):
        each.watch([SHORT, SHORT])
    assert each.why_not() == ""


def test_where_nothing_was_watched_by_all_nothing_speaks_against_it() -> None:
    each = pace()
    each.watch([SHORT, 0.0])
    assert each.why_not() == ""
