"""Changes of the mode and deaths of workers in one job: the coordinator's machines of both."""

from __future__ import annotations

from typing import Any

from psdist.controller import WINDOW
from psdist.controller.mode import ModeControl
from psdist.controller.observed import GroupCame, GroupGone, ModeObserved
from psdist.protocol.collected import JOIN, PREPARED, SET_MODE, pack_join
from psdist.protocol.control import (
    Collected,
    CommitMode,
    Control,
    Done,
    Enter,
    Evict,
    EvictAck,
    Finish,
    MembershipChanged,
    ModeProposed,
    Progress,
    ProposeMode,
    Resume,
    Resumed,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import CoordinatorAction
from psdist.servers.protocol.joins import Joins
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.views import Death
from tests.support.coordinators import assemble, part_of

SKEWED = [[9000, 1000] * (WINDOW // 2), [1000, 9000] * (WINDOW // 2)]
"""Of each of two groups what its rounds have taken by themselves: by turns."""


class Job:
    """Workers that have prepared, each a group, or the first two together; two servers."""

    def __init__(
        self, num_workers: int = 3, *, pair: bool = False, num_substitutes: int = 0, **settings: Any
    ) -> None:
        self.num_workers, self.seq = num_workers, 0
        groups = [(0, 1)] if pair else [(0,), (1,)]
        groups += [(each,) for each in range(2, num_workers)]
        num_groups = len(groups) - num_substitutes
        self.control = ModeControl(num_groups=num_groups, staleness=3)
        self.coordinator = assemble(
            num_workers=num_workers,
            num_servers=2,
            groups=groups,
            max_deaths=2,
            takes_set_mode=True,
            control=self.control,
            num_substitutes=num_substitutes,
            **settings,
        )
        self.meet("prepare", PREPARED, num_workers - num_substitutes)

    def meet(self, name: str, payload: bytes, num: int) -> None:
        self.seq += 1
        for worker in range(num):
            self.enter(worker, name, payload)
        self.resumed()

    def enter(self, worker: int, name: str, payload: bytes = b"") -> list[CoordinatorAction]:
        message = Enter(worker=worker, seq=self.seq, name=name, payload=payload)
        return self.coordinator.handle(worker_id(worker), message)

    def resumed(self) -> list[CoordinatorAction]:
        return self.of_servers(lambda each: Resumed(seq=self.seq, server=each))

    def of_servers(self, message: Any) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for server in (0, 1):
            actions += self.coordinator.handle(server_id(server), message(server))
        return actions

    def answer(self, *rounds: int, number: int = 1) -> list[CoordinatorAction]:
        return self.of_servers(
            lambda each: ModeProposed(number=number, server=each, rounds=[*rounds])
        )

    def buried(self, generation: int = 1) -> list[CoordinatorAction]:
        return self.of_servers(lambda each: EvictAck(generation=generation, server=each))

    def die(self, worker: int) -> list[CoordinatorAction]:
        return self.coordinator.on_lost(worker_id(worker), f"worker {worker}")

    def tell(self, worker: int, own_us: list[int], first_round: int = 1) -> list[CoordinatorAction]:
        message = Progress(
            worker=worker,
            clock=first_round + len(own_us),
            samples=0,
            first_round=first_round,
            own_us=own_us,
            waits_us=[0] * len(own_us),
        )
        return self.coordinator.handle(worker_id(worker), message)


def told(actions: list[CoordinatorAction]) -> list[Control]:
    return [each.message for each in actions if isinstance(each, SendControl)]


def kinds(actions: list[CoordinatorAction]) -> list[type]:
    return [type(each) for each in told(actions)]


# -- a change, and a death within it ---------------------------------------------------------------


def propose_by_script(job: Job) -> list[CoordinatorAction]:
    job.seq += 1
    job.enter(0, SET_MODE, b"ssp:2")
    job.enter(1, SET_MODE, b"ssp:2")
    return job.enter(2, SET_MODE, b"ssp:2")


def test_a_death_between_the_phases_lets_the_change_be_as_servers_have_answered() -> None:
    job = Job()
    assert kinds(propose_by_script(job)) == [ProposeMode, ProposeMode]
    assert kinds(job.die(1)) == [Evict, Evict]
    changed = job.answer(7)
    assert kinds(changed) == [CommitMode, CommitMode, Resume, Resume]
    assert isinstance(changed[2], ModeChanged)
    assert changed[2].rounds == (8,)
    assert kinds(job.buried()) == [MembershipChanged] * 3
    ended = told(job.resumed())
    assert [type(each) for each in ended] == [Collected] * 2, "the dead one is told nothing"


def test_set_mode_waits_until_servers_know_who_is_dead() -> None:
    job = Job()
    job.seq += 1
    job.enter(0, SET_MODE, b"ssp:2")
    job.die(2)
    assert kinds(job.enter(1, SET_MODE, b"ssp:2")) == []
    assert kinds(job.buried()) == [*[MembershipChanged] * 3, ProposeMode, ProposeMode]


def test_what_the_dead_had_asked_for_is_dropped() -> None:
    job = Job()
    job.seq += 1
    job.enter(0, SET_MODE, b"ssp:2")
    job.enter(2, SET_MODE, b"sync")
    job.die(2)
    job.buried()
    assert kinds(job.enter(1, SET_MODE, b"ssp:2")) == [ProposeMode, ProposeMode]
    assert [each.mode for each in job.answer(4) if isinstance(each, ModeChanged)] == ["ssp"]


def test_a_change_whose_askers_live_in_one_group_is_not_waited_for_by_the_dead_ones() -> None:
    job = Job(pair=True)
    propose_by_script(job)
    death = job.die(1)
    assert [each.left for each in death if isinstance(each, Death)] == [(0,)]
    assert [each for each in death if isinstance(each, GroupGone)] == [GroupGone(0)]
    job.buried()
    job.answer(3)
    (collected,) = told(job.resumed())
    assert isinstance(collected, Collected)


# -- whose rounds are looked at --------------------------------------------------------------------


def test_psdist_decides_by_those_who_live() -> None:
    job = Job()
    job.tell(0, SKEWED[0])
    assert kinds(job.tell(1, SKEWED[1])) == [], "worker 2 has told nothing"
    assert GroupGone(2) in job.die(2)
    actions = job.tell(0, [1000], WINDOW + 1)
    assert isinstance(actions[0], ModeObserved)
    assert kinds(actions) == [ProposeMode, ProposeMode]
    (changed,) = (each for each in job.answer(30) if isinstance(each, ModeChanged))
    assert (changed.mode, changed.staleness, changed.rounds) == ("ssp", 3, (31,))
    assert job.control.mode == "ssp"


def test_nothing_that_a_dead_group_says_late_is_observed() -> None:
    job = Job()
    job.die(2)
    assert job.tell(2, [1] * WINDOW) == []
    job.tell(0, SKEWED[0])
    assert kinds(job.tell(1, SKEWED[1])) == [ProposeMode, ProposeMode]


def test_a_group_dies_once() -> None:
    job = Job(num_workers=4, pair=True)
    assert GroupGone(0) in job.die(0)
    assert not [each for each in job.die(1) if isinstance(each, GroupGone)]
    assert job.control.groups == {1, 2}


def test_where_the_mode_is_nobodys_to_choose_nothing_is_said() -> None:
    coordinator = assemble(num_workers=2, num_servers=1, groups=[(0,), (1,)], max_deaths=1)
    coordinator.is_ready = True
    actions = coordinator.on_lost(worker_id(1), "worker 1")
    assert [type(each) for each in actions] == [Death, SendControl]


def test_a_substitute_is_looked_at_from_where_it_joins() -> None:
    job = Job(num_workers=4, num_substitutes=1)
    assert job.control.groups == {0, 1, 2}
    job.die(2)
    job.buried()
    part_of(job.coordinator, Joins)._asked[3] = 2
    part_of(job.coordinator, Joins)._ready[3] = 1
    job.seq += 1
    job.enter(0, JOIN, pack_join([6], "state"))
    actions = job.enter(1, JOIN, pack_join([6], ""))
    assert GroupCame(3, 6) in actions
    job.resumed()
    assert job.control.groups == {0, 1, 3}
    job.tell(0, [1] * 6 + SKEWED[0])
    assert kinds(job.tell(1, [1] * 6 + SKEWED[1])) == []
    assert kinds(job.tell(3, [1000] * WINDOW, 7)) == [ProposeMode, ProposeMode]


def test_the_jobs_end_waits_for_a_change_that_a_death_has_come_into() -> None:
    job = Job()
    job.tell(0, SKEWED[0])
    job.tell(1, SKEWED[1])
    job.die(2)
    job.tell(0, [1000], WINDOW + 1)
    for worker in (0, 1):
        done = Done(worker=worker, statistics={})
        assert kinds(job.coordinator.handle(worker_id(worker), done)) == []
    assert kinds(job.buried()) == [MembershipChanged] * 3
    assert kinds(job.answer(30)) == [CommitMode, CommitMode, Finish, Finish]
