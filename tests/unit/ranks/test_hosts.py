"""Which rank calls which between hosts, and which rank ends. begin() of several ranks runs in
threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks import hosts
from psdist.ranks.hosts import HostWatch
from psdist.workers.group.addresses import Address, Offer

SOON_S = 20.0


class World:
    """Ranks on hosts; the first two are servers."""

    def __init__(self, on: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = len(on)
        self.roles = Roles(
            places=tuple(
                Place(rank=rank, host=host, pid=1, cores=(0,)) for rank, host in enumerate(on)
            ),
            server_ranks=(0, 1),
            worker_ranks=tuple(range(2, self.size)),
            groups=tuple((each,) for each in range(self.size - 2)),
        )
        self.ended: queue.Queue[tuple[int, str, bool]] = queue.Queue()
        self.dead: set[int] = set()
        self.coordinator = 0
        self.brought: dict[int, bytes] = {}
        self._brought = threading.Barrier(self.size)
        monkeypatch.setattr(hosts, "allgather", self._allgather)
        monkeypatch.setattr(hosts, "_addresses", lambda _host: ["127.0.0.1"])

    def _allgather(self, comm: Any, data: bytes) -> list[bytes]:
        self.brought[comm.Get_rank()] = data
        self._brought.wait(SOON_S)
        return [self.brought[rank] for rank in range(self.size)]

    def begin(self, *, hubs: Sequence[int], timeout_s: float = 0.5) -> list[HostWatch]:
        def one(rank: int) -> HostWatch:
            def end(text: str, *, is_told: bool) -> Any:
                self.ended.put((rank, text, is_told))

            comm: Any = type("Comm", (), {"Get_rank": lambda _: rank})()
            return HostWatch.begin(
                comm,
                self.roles,
                hubs=hubs,
                timeout_s=timeout_s,
                dead=lambda: self.dead,
                decides=lambda: rank == self.coordinator,
                end=end,
            )

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def open_lines(watch: HostWatch) -> set[int]:
    assert watch._hub is not None
    return {rank for _, rank in list(watch._hub._lines.values())}


def test_ranks_of_other_hosts_have_a_line_to_the_coordinator_and_to_its_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(["h1", "h2", "h1", "h2", "h3"], monkeypatch)
    watches = world.begin(hubs=[server_id(0), server_id(1)])
    wait_until(lambda: open_lines(watches[0]) == {1, 3, 4})
    wait_until(lambda: open_lines(watches[1]) == {0, 2, 4})
    assert all(each._hub is None for each in watches[2:])
    for each in watches:
        each.close()
    assert [each.verdict for each in watches] == [None] * 5
    assert world.ended.empty()
    assert world.brought[2] == b""


def test_who_shares_the_coordinators_host_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(["h1", "h2", "h1"], monkeypatch)
    watches = world.begin(hubs=[server_id(0)])
    wait_until(lambda: open_lines(watches[0]) == {1})
    assert watches[2]._member is None
    assert watches[0]._member is None
    for each in watches:
        each.close()


def line_of(watch: HostWatch, rank: int) -> Any:
    assert watch._hub is not None
    return next(line for line, of in watch._hub._lines.values() if of == rank)


def test_a_rank_that_has_lost_the_coordinator_ends_and_the_first_of_its_host_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(["h1", "h2", "h2"], monkeypatch)
    watches = world.begin(hubs=[server_id(0)])
    wait_until(lambda: open_lines(watches[0]) == {1, 2})
    for rank in (1, 2):
        line_of(watches[0], rank).shutdown(2)
    ended = sorted(world.ended.get(timeout=SOON_S) for _ in range(2))
    assert [(rank, is_told) for rank, _, is_told in ended] == [(1, True), (2, False)]
    assert all("server 0 (rank 0 on h1) ended without a word" in text for _, text, _ in ended)
    wait_until(lambda: watches[0].verdict is not None)
    for each in watches:
        each.close()


def test_a_standby_decides_when_it_is_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(["h1", "h2", "h3"], monkeypatch)
    watches = world.begin(hubs=[server_id(0), server_id(1)])
    wait_until(lambda: open_lines(watches[1]) == {0, 2})
    line_of(watches[1], 2).shutdown(2)
    time.sleep(1.0)
    assert watches[1].verdict is None
    world.coordinator = 1
    wait_until(lambda: watches[1].verdict is not None)
    for each in watches:
        each.close()


def test_a_death_that_the_job_survives_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(["h1", "h2", "h2"], monkeypatch)
    watches = world.begin(hubs=[server_id(0)])
    wait_until(lambda: open_lines(watches[0]) == {1, 2})
    world.dead = {worker_id(0)}
    line_of(watches[0], 2).shutdown(2)
    world.ended.get(timeout=SOON_S)
    time.sleep(0.8)
    assert watches[0].verdict is None
    for each in watches:
        each.close()


def test_a_verdict_that_the_coordinator_does_not_heed_ends_it_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psdist.reach.hub.GRACE_S", 0.1)
    world = World(["h1", "h1", "h2"], monkeypatch)
    watches = world.begin(hubs=[server_id(0)], timeout_s=0.2)
    wait_until(lambda: open_lines(watches[0]) == {2})
    line_of(watches[0], 2).shutdown(2)
    ended = {}
    for _ in range(2):
        rank, _, is_told = world.ended.get(timeout=SOON_S)
        ended[rank] = is_told
    assert ended == {0: True, 2: True}
    for each in watches:
        each.close()


def test_where_no_port_can_be_listened_at_hosts_are_not_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(hosts, "Hub", refuse)
    world = World(["h1", "h2", "h2"], monkeypatch)
    watches = world.begin(hubs=[server_id(0)])
    assert [each.verdict for each in watches] == [None] * 3
    assert all(each._member is None for each in watches)
    assert "host monitoring disabled" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", ["10.0.0.1", "192.168.0.1"]), ("eth1", ["192.168.0.1"]), ("eth9", ["h1"])],
)
def test_the_fastest_address_is_tried_first_and_one_that_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, wanted: str, found: list[str]
) -> None:
    addresses = [
        Address("eth1", "192.168.0.1", "192.168.0.0/24", -1_000),
        Address("ib0", "10.0.0.1", "10.0.0.0/24", -100_000),
    ]

    def offered(*, host: str, wanted: str, preferred: list[str]) -> Offer:
        assert preferred == ["mlx5_0"]
        return Offer(host, wanted, addresses)

    monkeypatch.setattr(hosts, "offer", offered)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", wanted)
    for name in hosts.HINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0")
    assert hosts._addresses("h1") == found
