"""What a worker tells the coordinator of its rounds."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from psdist.protocol.control import LossReported, Progress
from psdist.workers.data.position import Position
from psdist.workers.progress_reports import Losses, ProgressReports


class Network:
    def __init__(self) -> None:
        self.sent: list[Progress] = []

    def send_control(self, _peer: int, message: Progress) -> None:
        self.sent.append(message)


def test_a_wait_of_any_set_is_no_time_of_the_worker_s_own() -> None:
    """A GAN's two optimizers: each round of the first waits 2 s, and then 3 s for the second."""
    network: Any = Network()
    now_s = mock.Mock(return_value=0.0)
    standing = ProgressReports(0, network, now_s=now_s, tells_rounds=True)
    first, second = (
        mock.Mock(clock=0, num_samples=0, staleness=0, waited_s=0.0, coding_error=0.0) for _ in "12"
    )
    for clock in range(1, 4):
        now_s.return_value += 1.0 + 2.0  # computes, waits
        first.clock, first.waited_s = clock, first.waited_s + 2.0
        standing.end_iteration([first, second], 0)
        now_s.return_value += 0.5 + 3.0
        second.clock, second.waited_s = clock, second.waited_s + 3.0
        standing.end_iteration([first, second], 1)
    standing.send([first, second])
    own_us = [each for message in network.sent for each in message.own_us]
    waits_us = [each for message in network.sent for each in message.waits_us]
    assert own_us == [1_500_000] * 2
    assert waits_us == [5_000_000] * 2
    assert [each.first_round for each in network.sent if each.own_us] == [1, 2]
    assert [each.errors_ppm for each in network.sent if each.own_us] == [[], []]


def test_who_does_not_lead_its_group_tells_of_no_round_and_later_of_those_behind_the_first() -> (
    None
):
    network: Any = Network()
    now_s, leads = mock.Mock(return_value=0.0), mock.Mock(return_value=False)
    standing = ProgressReports(1, network, now_s=now_s, tells_rounds=True, leads=leads)
    trainer = mock.Mock(clock=0, num_samples=0, staleness=0, waited_s=0.0, coding_error=0.0)
    for clock in range(1, 9):
        now_s.return_value += 0.1
        trainer.clock = clock
        standing.end_iteration([trainer], 0)
        leads.return_value = clock >= 4  # from round 4 on, whose beginning is not its own to tell
    standing.send([trainer])
    told = [(each.first_round, each.own_us) for each in network.sent if each.own_us]
    rounds = [first + at for first, own_us in told for at in range(len(own_us))]
    assert rounds == [5, 6, 7]
    assert all(own_us == [100_000] * len(own_us) for _, own_us in told)


def test_what_codecs_have_left_out_is_told_of_each_round_where_that_is_wanted() -> None:
    network: Any = Network()
    now_s = mock.Mock(return_value=0.0)
    standing = ProgressReports(0, network, now_s=now_s, tells_rounds=True, tells_errors=True)
    trainer = mock.Mock(clock=0, num_samples=0, staleness=0, waited_s=0.0)
    for clock in range(1, 5):
        now_s.return_value += 0.1
        trainer.clock, trainer.coding_error = clock, clock / 1000
        standing.end_iteration([trainer], 0)
    standing.send([trainer])
    errors = [each for message in network.sent for each in message.errors_ppm]
    assert errors == [2000, 3000, 4000]  # of rounds 1 to 3; what round 0 has taken nobody knows


@pytest.mark.parametrize(("is_of_equal_passes", "told"), [(True, (12, 2)), (False, (0, 0))])
def test_only_passes_that_are_as_long_on_all_workers_are_told_as_such(
    is_of_equal_passes: bool, told: tuple[int, int]
) -> None:
    """Who had more batches than others would be said to have missed a call."""
    network: Any = Network()
    standing = ProgressReports(0, network, now_s=lambda: 0.0)
    trainer = mock.Mock(clock=0, num_samples=0, staleness=0, waited_s=0.0, coding_error=0.0)
    position = Position()
    position.start_pass(epoch=0, num_batches=12)
    for _ in "12":
        position.use_batch()
        standing.on_batch(position, is_of_equal_passes=is_of_equal_passes)
        standing.end_iteration([trainer], 0)
    standing.send([trainer])
    last = network.sent[-1]
    assert (last.loader_batches, last.loader_until) == told
    assert (last.batch, last.batches) == (2, 12)


def test_losses_are_told_before_what_rounds_have_taken() -> None:
    network: Any = Network()
    losses = Losses(skips_nonfinite=False, may_be_negative=True)
    standing = ProgressReports(3, network, now_s=lambda: 0.0, losses=losses)
    losses.add(1.0)
    losses.add(-4.0)
    standing.send([])
    standing.send([])
    assert network.sent[0] == LossReported(worker=3, round=0, count=2, total=-3.0)
    assert [type(each) for each in network.sent[1:]] == [Progress, Progress]


def test_progress_is_told_when_an_iteration_has_ended_four_times_a_second_at_most() -> None:
    network: Any = Network()
    now_s = mock.Mock(return_value=-7.0)  # whatever the job's clock begins with
    standing = ProgressReports(0, network, now_s=now_s)
    trainer = mock.Mock(clock=0, num_samples=0, staleness=0, waited_s=0.0)
    for clock in range(1, 18):
        trainer.clock = clock
        standing.end_iteration([trainer], 0)
        now_s.return_value += 0.0625
    assert [each.clock for each in network.sent] == [1, 5, 9, 13, 17]
