"""How the job stands, out of what workers report: how far, and which group is the slowest."""

from __future__ import annotations

import pytest

from psdist.protocol.control import Progress
from psdist.ranks.reporting.progress import GroupPaces, short


def report(worker: int, clock: int, **more: float) -> Progress:
    return Progress(worker=worker, clock=clock, samples=10 * clock, **more)  # type: ignore[arg-type]


def test_the_group_that_others_wait_for_is_the_slowest() -> None:
    paces = GroupPaces((0, 0, 1))
    for second in range(6):
        progress = {
            0: report(0, second, waited_s=0.5 * second),
            1: report(1, second, waited_s=0.3 * second),
            2: report(2, second, waited_s=0.1 * second),
        }
        told = paces.training(float(second), mode="sync", progress=progress, last={})
    assert told.slowest == 1
    assert told.others_wait == pytest.approx(0.3)
    assert (told.behind, told.ahead, told.samples) == (5, 5, 150)


def test_groups_that_wait_alike_have_no_slowest() -> None:
    paces = GroupPaces((0, 1))
    for second in range(6):
        # Reports are a moment apart: group 1's is not in yet.
        progress = {
            0: report(0, 10 * second, waited_s=0.40 * second),
            1: report(1, max(0, 10 * second - 5), waited_s=0.35 * second),
        }
        told = paces.training(float(second), mode="sync", progress=progress, last={})
    assert (told.slowest, told.others_wait) == (None, 0.0)


def test_a_group_that_is_left_behind_is_the_slowest_though_nobody_waits() -> None:
    paces = GroupPaces((0, 1))
    for second in range(6):
        progress = {0: report(0, 10 * second), 1: report(1, 2 * second)}
        told = paces.training(float(second), mode="sync", progress=progress, last={})
    assert (told.slowest, told.others_wait) == (1, 0.0)
    assert (told.behind, told.ahead) == (10, 50)


def test_a_group_that_goes_on_without_its_dead_is_in_the_job() -> None:
    paces = GroupPaces((0, 0, 1, 1))
    for second in range(6):
        progress = {0: report(0, 2 * second), 2: report(2, 10 * second), 3: report(3, 10 * second)}
        told = paces.training(float(second), mode="sync", progress=progress, last={}, out={1})
    assert (told.slowest, told.behind, told.ahead) == (0, 10, 50)
    assert paces.behind(progress, {1}) == 10
    assert paces.behind(progress, {0, 1}) == 50


def test_how_far_the_job_is_its_slowest_worker_says() -> None:
    paces = GroupPaces((0, 1, 2))
    progress = {
        0: report(0, 9, epoch=2, epochs=3, batch=1, batches=8, staleness=0),
        1: report(1, 7, epoch=1, epochs=3, batch=7, batches=8, staleness=4),
    }
    told = paces.training(1.0, mode="sync", progress=progress, last={})
    assert (told.epoch, told.epochs, told.batch, told.batches) == (1, 3, 7, 8)
    assert told.staleness == 4
    assert told.behind == 0  # group 2 has not reported yet


def test_logged_values_are_cut_to_what_a_packet_and_a_line_can_hold() -> None:
    last = {"x" * 100: 1.23456789, **{f"v{number}": number for number in range(20)}}
    told = GroupPaces((0,)).training(1.0, mode="sync", progress={}, last=last)
    assert len(told.last) == 8
    assert told.last["x" * 64] == "1.235"
    assert short("two\nlines \x1b[31m") == "two lines ?[31m"


def test_workers_that_have_not_begun_an_epoch_say_nothing_of_it() -> None:
    paces = GroupPaces((0, 1))
    progress = {0: report(0, 9, epoch=2, batch=1, batches=8), 1: report(1, 0)}
    assert paces.training(1.0, mode="sync", progress=progress, last={}).epoch == 2


def test_a_group_that_has_died_is_neither_behind_nor_waited_for() -> None:
    paces = GroupPaces((0, 1, 2))
    for second in range(6):
        progress = {
            0: report(0, 10 * second, waited_s=0.5 * second),
            1: report(1, 10 * second, waited_s=0.1 * second),
            2: report(2, 3),
        }
        told = paces.training(float(second), mode="sync", progress=progress, last={}, out={2})
    assert (told.slowest, told.behind, told.ahead, told.samples) == (1, 50, 50, 1000)
    assert told.others_wait == pytest.approx(0.4)
