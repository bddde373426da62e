"""The coordinator changes codecs by what groups tell of their rounds."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.controller import WINDOW
from psdist.controller.codec import FIRST, CodecControl
from psdist.controller.observed import LevelsSized, ModeObserved
from psdist.errors import ProtocolError
from psdist.protocol.control import CommitMode, ModeProposed, Progress, ProposeMode
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import CoordinatorAction
from psdist.servers.protocol.modes import ModeChanged
from tests.support.coordinators import assemble

TIMES: dict[str, Any] = {"own_us": [1000] * WINDOW, "waits_us": [9000] * WINDOW}


class Job:
    """Two groups of one worker, two servers, and a link that makes them wait."""

    def __init__(self, **settings: Any) -> None:
        self.control = CodecControl(num_groups=2, names=["none", "int8"])
        self.coordinator = assemble(
            num_workers=2, num_servers=2, groups=[(0,), (1,)], control=self.control, **settings
        )
        self.coordinator.is_ready = True

    def tell(self, worker: int, first_round: int = FIRST, **told: Any) -> list[CoordinatorAction]:
        clock = first_round + WINDOW
        given = {"errors_ppm": [5] * WINDOW, **TIMES, **told}
        message = Progress(worker=worker, clock=clock, samples=0, first_round=first_round, **given)
        return self.coordinator.handle(worker_id(worker), message)


def test_a_level_is_proposed_committed_and_told_to_the_controller() -> None:
    job = Job()
    assert job.coordinator.know_sizes([1000, 250]) == [LevelsSized([1000, 250])]
    assert job.tell(0) == [ModeObserved(0, FIRST, *TIMES.values(), True, [5] * WINDOW)]
    observed, *asked = job.tell(1)
    assert isinstance(observed, ModeObserved)
    assert asked == [SendControl(server_id(each), ProposeMode(number=1)) for each in (0, 1)]
    assert job.control.level == 0
    answers = [ModeProposed(number=1, server=each, rounds=[30 + each]) for each in (0, 1)]
    assert job.coordinator.handle(server_id(0), answers[0]) == []
    *commits, changed = job.coordinator.handle(server_id(1), answers[1])
    commit = CommitMode(number=1, rounds=[32], mode="sync", staleness=0, level=1)
    assert commits == [SendControl(server_id(each), commit) for each in (0, 1)]
    assert isinstance(changed, ModeChanged)
    assert (changed.rounds, changed.level) == ((32,), 1)
    assert changed.why.endswith("9.00 ms of them waiting; 3.25 ms expected with int8")
    assert job.control.level == 1


def test_while_nothing_may_change_it_is_observed_and_said_so() -> None:
    job = Job()
    job.coordinator.know_sizes([1000, 250])
    job.coordinator.is_ready = False
    (seen,) = job.tell(0)
    assert isinstance(seen, ModeObserved)
    assert not seen.is_judged
    assert [type(each) for each in job.tell(1)] == [ModeObserved]


@pytest.mark.parametrize(
    "wrong",
    [{"errors_ppm": [5] * (WINDOW - 1)}, {"errors_ppm": [-5] * WINDOW}, {"own_us": [1000] * 3}],
)
def test_what_is_damaged_names_the_worker(wrong: dict[str, list[int]]) -> None:
    with pytest.raises(ProtocolError, match="worker 1 told what rounds took, unasked or damaged"):
        Job().tell(1, **wrong)


def test_without_a_controller_bytes_are_nobodys() -> None:
    assert assemble(num_workers=1, num_servers=1).know_sizes([5]) == []
