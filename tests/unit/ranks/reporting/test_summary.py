"""Clocks in summary.json where spares may take workers' places."""

from __future__ import annotations

from dataclasses import replace

from psdist.protocol.control import Progress
from psdist.protocol.roles import Place, Roles
from psdist.ranks.reporting.rank_reports import RankReports
from psdist.ranks.reporting.summary import bytes_sent, counts_of_set, dropped_samples

ROLES = Roles(
    places=tuple(Place(rank=rank, host="n1", pid=rank, cores=(0,)) for rank in range(6)),
    server_ranks=(0,),
    worker_ranks=(1, 2, 3, 4, 5),
    groups=((0,), (1,), (2,), (3,), (4,)),
    num_substitutes=3,
)

OUT = frozenset({2, 3, 4})


def clocks(*not_joined: int) -> list[int]:
    progress = {worker: Progress(worker=worker, clock=9 - worker, samples=1) for worker in (0, 1)}
    told = RankReports(
        roles=ROLES,
        workers={},
        servers={},
        progress=progress,
        out=frozenset(not_joined),
        not_joined=frozenset(not_joined),
    )
    found: list[int] = counts_of_set(told, None, 0)["clocks"]
    return found


def test_clocks_are_of_groups_that_were_in_the_job() -> None:
    assert clocks(2, 3, 4) == [9, 8]
    assert clocks(3, 4) == [9, 8, 0]
    assert clocks(2, 4) == [9, 8, 0, 0]  # by their numbers
    assert clocks() == [9, 8, 0, 0, 0]


def test_the_clock_of_a_group_that_has_died_stays() -> None:
    told = RankReports(
        roles=ROLES,
        workers={},
        servers={},
        progress={4: Progress(worker=4, clock=7, samples=1)},
        out=frozenset({2, 3, 4}),
        not_joined=frozenset({2, 3}),
    )
    assert counts_of_set(told, None, 0)["clocks"] == [0, 0, 0, 0, 7]


def test_bytes_are_those_of_all_that_have_told() -> None:
    told = {0: {"bytes_sent": 3}, 1: {"bytes_sent": 4}, 2: {"bytes_sent": 5}}
    servers = {0: {"bytes_sent": 10}}

    def sent(workers: int, servers: dict[int, dict[str, int]]) -> int | None:
        of_workers = {worker: told[worker] for worker in range(workers)}
        parts = RankReports(roles=ROLES, workers=of_workers, servers=servers, progress={}, out=OUT)
        return bytes_sent(parts)

    assert sent(2, servers) == 17
    assert sent(3, servers) == 22  # who is out and has told it all the same
    assert sent(1, servers) is None
    assert sent(2, {}) is None


def test_who_has_not_joined_owes_no_counts() -> None:
    told = RankReports(
        roles=ROLES,
        workers={0: {"sets": []}, 1: {"sets": []}},
        servers={},
        progress={},
        out=frozenset({2, 3, 4}),
        not_joined=frozenset({2, 3, 4}),
    )
    assert told.all_workers


def test_dropped_samples_are_those_that_the_chief_has_counted() -> None:
    def dropped(workers: dict[int, int], num_substitutes: int = 0) -> int | None:
        roles = replace(ROLES, num_substitutes=num_substitutes)
        counts = {worker: {"dropped_samples": number} for worker, number in workers.items()}
        told = RankReports(
            roles=roles, workers=counts, servers={}, progress={}, out=frozenset({0, 3})
        )
        return dropped_samples(told)

    assert dropped({4: 7, 2: 8, 1: 9, 0: 1}) == 9
    assert dropped({4: 7, 1: 9}) is None  # worker 2 has not finished
    assert dropped({4: 7, 2: 8, 1: 9}, num_substitutes=1) is None
