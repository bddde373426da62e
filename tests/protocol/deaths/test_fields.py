"""Every field of a server survives the server, as docs/reference/server-fields.md says.

The table there is held against the code. Then servers are killed on the virtual network, each time
at the first moment at which a field that no record has holds something and was not tried before.
The others finish, every update is contained once, and in sync the bits are those of the job without
a failure.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import PsdistError, ServersLostError
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.takeovers import Takeovers
from tests.protocol.codecs.test_auto_codec import LADDER
from tests.protocol.deaths.test_coded_buddies import APART, wire_of
from tests.support.coordinators import part_of
from tests.support.virtual.fields import PAGE, class_of_server, fields_in_use, fields_of, rows
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.mode_buddies import (
    Telling,
    schedule_with_ladder_buddies,
    schedule_with_mode_buddies,
)
from tests.support.virtual.proof import prove
from tests.support.virtual.server_deaths import with_buddies
from tests.support.virtual.surviving import NOTICES_S, prove_survival

TABLE = rows()
KINDS = {"fixed", "logged", "reproduced", "volatile", "set-up", "refused"}
ALONE = "ends the job with one error"
NOT_TRIED_HERE = {
    ("ChunkClock", "draining"),  # tests/protocol/deaths/transcripts/kept_updates.txt
    ("ChunkState", "duplicate_offers"),  # below
}
TRIED = {
    (row.cls, field): ALONE in row.remedy
    for row in TABLE
    if row.kind in ("reproduced", "volatile")
    for field in row.fields
    if (row.cls, field) not in NOT_TRIED_HERE
}
"""Field to try -> True if the job may end with one error."""
CLASSES = {cls for cls, _ in TRIED}


@pytest.mark.parametrize("cls", sorted({row.cls for row in TABLE}))
def test_the_table_has_each_field_of_a_class_once(cls: str) -> None:
    listed = [field for row in TABLE if row.cls == cls for field in row.fields]
    missing, unknown = fields_of(cls) - {*listed}, {*listed} - fields_of(cls)
    where = class_of_server(cls).__module__
    assert not missing, f"add {sorted(missing)} of {where}.{cls} to the table in {PAGE}"
    assert not unknown, f"{where}.{cls} has no {sorted(unknown)}, which {PAGE} lists"
    assert len(listed) == len({*listed}), f"{PAGE} lists a field of {cls} twice"


def test_each_row_says_how_its_fields_survive() -> None:
    assert {row.kind for row in TABLE} == KINDS
    assert [row for row in TABLE if row.kind == "volatile" and not row.remedy] == []


class Scenario(NamedTuple):
    """A job, and a rank that fails before the server does."""

    schedule: Schedule
    wire: Wire = RAW_WIRE
    first_victim: str = ""

    def play(self) -> VirtualJob:
        max_deaths = 99 if self.first_victim == "worker" else 0
        return VirtualJob(
            self.schedule,
            is_watched=False,
            wire=self.wire,
            max_deaths=max_deaths,
            make_worker=Telling,
        )


def scenarios_of(seed: int) -> list[Scenario]:
    plain = with_buddies(seed)
    num_groups = len(plain.group_sizes)
    # Fills take long, and so do retransmitted pushes.
    slow = replace(plain, servers=4, payload_s=1e-2, num_chunks=16)
    apart = replace(slow, mode="async", later=(), num_chunks=6)
    # Values wait for a buffer, and checkpoints for copies of chunks.
    sets_values = replace(
        plain,
        push_rate=1.0,
        pull_rate=0.5,
        checkpoint_rate=1.0,
        sent_s=0.1,
        num_chunks=4,
        iterations=(5,) * num_groups,
        collectives=((1, 2, 3),) * num_groups,
    )
    # Offers for a round that is far ahead.
    far = replace(plain, mode="sync", later=(), receive_buffers=2, credits=4, num_chunks=12)
    found = [
        Scenario(plain),
        Scenario(plain, wire_of(plain, seed)),
        Scenario(replace(plain, servers=3), first_victim="server"),
        Scenario(slow, first_victim="server"),
        Scenario(apart, APART["pull_copies"], first_victim="server"),
        Scenario(schedule_with_mode_buddies(seed)),
        Scenario(schedule_with_ladder_buddies(seed), LADDER),
        Scenario(sets_values),
        Scenario(far),
    ]
    if num_groups > 1:
        found.append(Scenario(replace(plain, push_rate=0.0), first_victim="worker"))
    return found


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new standby gets the coordinator's state in many parts."""
    monkeypatch.setattr("psdist.servers.replication.standby._PART_BYTES", 64)


def kill_in_each(seeds: range) -> dict[tuple[str, str], bool]:
    """Return the fields that held nothing in any scenario of these seeds."""
    left = dict(TRIED)
    for seed in seeds:
        for number, scenario in enumerate(scenarios_of(seed) if left else ()):
            for each in kill_while_in_use(scenario, left, random.Random(f"{seed} {number}")):
                del left[each]
    return left


@pytest.mark.usefixtures("small_parts")
def test_a_server_is_killed_while_fields_hold_something() -> None:
    assert len(kill_in_each(range(1))) < len(TRIED) / 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("small_parts")
def test_a_server_is_killed_while_each_field_holds_something() -> None:
    left = kill_in_each(range(12))
    assert not left, f"no scenario has a moment at which {sorted(left)} holds something"


def fails_as_replies_leave(seed: int, *, num_times: int) -> VirtualJob:
    """Return a job whose server 1 has failed when held replies left for the ``num_times``-th time:
    its replica contains pushes whose replies workers do not get."""
    schedule = Schedule(
        seed=seed,
        servers=3,
        group_sizes=(1, 1),
        iterations=(4, 4),
        collectives=((),) * 2,
        compute_s=(1e-5, 1e-5),
        num_chunks=6,
        receive_buffers=12,
        payload_s=1e-2,
        has_buddies=True,
    )
    job = VirtualJob(schedule, is_watched=False)

    def is_holding() -> bool:
        return ("Primary", "_outputs") in fields_in_use(job.servers[1], {"Primary"})

    for _ in range(num_times):
        job.network.run(until=is_holding)
        job.network.run(until=lambda: not is_holding())
    job.network.crash(server_id(1))
    return job


def meets_duplicate_offer(job: VirtualJob) -> bool:
    """Run until the successor of server 1 is offered a push that it contains; False if the job ends
    before."""
    host = job.servers[job.schedule.buddies[1]]

    def is_offered() -> bool:
        return ("ChunkState", "duplicate_offers") in fields_in_use(host, {"ChunkState"})

    job.network.run(until=is_offered)
    return is_offered()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_push_that_the_replica_contains_is_offered_again(is_killed: bool) -> None:
    jobs = (fails_as_replies_leave(seed, num_times=6) for seed in range(40))
    job = next(filter(meets_duplicate_offer, jobs))
    if is_killed:
        host = job.schedule.buddies[1]
        job.network.crash(server_id(host))
        job.dead = server_id(host)
    job.run()
    if is_killed:
        assert any(isinstance(each, ServersLostError) for each in job.errors.values()), job.errors
    else:
        prove(job)


def kill_while_in_use(
    scenario: Scenario, left: dict[tuple[str, str], bool], pick: random.Random
) -> set[tuple[str, str]]:
    """Kill a server at a moment at which one of these fields holds something; return those that do.

    Raises AssertionError if the job then does not end as it must."""
    job = scenario.play()
    wait = pick.choice([int(10 ** pick.uniform(0.0, 3.0)), pick.randrange(1500)])
    tried = set[tuple[str, str]]()
    is_first, every = bool(scenario.first_victim), 5
    while not tried and job.network.step():
        wait -= 1
        if wait > 0 or wait % every or not job.coordinator.is_ready:
            continue
        if is_first:
            kill_first(job, scenario.first_victim, pick)
            is_first, wait = False, pick.choice([0, 0, 30, 300])
            every = 1  # what is retransmitted does not stay for long
            continue
        for server in range(1, len(job.servers)):
            tried = kill_if_in_use(job, server, left, pick)
            if tried:
                break
    if not tried:
        return tried
    job.run()
    try:
        prove_end(job, scenario)
    except (AssertionError, PsdistError) as error:
        raise AssertionError(f"{scenario}, {sorted(tried)}: {error}") from error
    return tried


def kill_if_in_use(
    job: VirtualJob, server: int, left: dict[tuple[str, str], bool], pick: random.Random
) -> set[tuple[str, str]]:
    victim = server_id(server)
    if victim not in job.network.unfinished:
        return set()
    used = fields_in_use(job.servers[server], CLASSES) & left.keys()
    gone = {*job.network.dead, victim}
    shards = part_of(job.coordinator, Takeovers).shards
    if any({each.host, each.keeper} - {None} <= gone for each in shards):
        used = {each for each in used if left[each]}
        if used:
            job.dead = victim  # the job ends with an error
    if used:
        job.network.crash(victim, notice_s=pick.choice(NOTICES_S))
    return used


def kill_first(job: VirtualJob, victim: str, pick: random.Random) -> None:
    if victim == "worker":
        peer = worker_id(pick.choice(pick.choice([*[job.groups[0]] * 2, job.groups[-1]])))
    else:
        standby = job.standby if job.standby is not None else 1
        peer = pick.choice([standby, server_id(pick.randrange(1, len(job.servers)))])
    if peer in job.network.unfinished:
        job.network.crash(peer, notice_s=pick.choice(NOTICES_S))


def prove_end(job: VirtualJob, scenario: Scenario) -> None:
    if job.errors:
        assert job.dead is not None, job.errors
        assert any(isinstance(each, ServersLostError) for each in job.errors.values()), job.errors
        return
    assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
    job.dead = None
    has_lost_worker = scenario.first_victim == "worker"
    if has_lost_worker or job.schedule.mode_by != "run":
        prove_survival(job)
    else:
        prove(job)
    if job.schedule.modes == ("sync",) and not has_lost_worker:
        whole = scenario.play()
        whole.run()
        for mine, other in zip(job.sets, whole.sets, strict=True):
            assert torch.equal(mine.parameters(), other.parameters())
