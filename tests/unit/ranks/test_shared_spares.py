"""A rank that waits to take the place of a server or of a worker: its two ids, and how it becomes a
worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from psdist.commands import run_rank
from psdist.config.settings import RunConfig
from psdist.protocol.control import Ended, Moved, TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, is_spare, server_id, spare_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks import plain_script, server
from psdist.ranks.connecting import _core_share
from psdist.ranks.rank import Rank
from psdist.ranks.run_files import _rank_table
from psdist.ranks.seats.placing import _make_plan, refusal_of_substitutes, roles_of_plan
from psdist.servers.spare import SpareSeat
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.protocol import Seat
from tests.support.ranks import make_rank
from tests.support.virtual.network import VirtualNetwork
from tests.unit.ranks.test_spares import five_ranks

PLACES = tuple(Place(rank=rank, host="n1", pid=rank, cores=(0, 1)) for rank in range(6))
ROLES = Roles(
    places=PLACES,
    server_ranks=(0, 1),
    worker_ranks=(2, 3, 4, 5),
    groups=((0,), (1,), (2,), (3,)),
    spare_ranks=(4, 5),
    num_substitutes=2,
)
SPARE, AS_WORKER = spare_id(1), worker_id(3)


def rank_of(
    path: Path, peer: int = SPARE, *, comm: Any = None, buddies: tuple[int, ...] = (1, 0)
) -> Rank:
    network = VirtualNetwork()
    network.share(SPARE, AS_WORKER)
    return make_rank(
        ROLES,
        network.endpoint(peer),
        path,
        comm=comm,
        bootstrap={"buddies": buddies},
        replication="buddy",
        max_deaths=1,
        spares=2,
    )


def test_a_plan_s_spares_are_both() -> None:
    cluster, places = five_ranks()
    config = RunConfig(replication="buddy", max_deaths=1, servers=2, spares=1, group="rank")
    roles = roles_of_plan(places, _make_plan(cluster, places, config), has_substitutes=True)
    assert roles.has_shared_spares
    assert (roles.spare_ranks, roles.worker_ranks) == ((4,), (1, 3, 4))
    assert (roles.num_beginning, roles.num_spares, roles.num_substitutes) == (2, 1, 1)
    assert not roles_of_plan(places, _make_plan(cluster, places, config)).has_shared_spares


def test_such_a_rank_has_two_ids_and_is_a_spare_at_the_start() -> None:
    assert ROLES.peers_of_rank[5] == (SPARE, AS_WORKER)
    assert ROLES.peer_of_rank[5] == SPARE
    assert ROLES.peers_of_rank[3] == (worker_id(1),)
    assert [ROLES.rank_of_peer[each] for each in (SPARE, AS_WORKER)] == [5, 5]
    assert ROLES.worker_of_spare(1) == 3
    assert ROLES.describe_rank(5) == "spare 1 (rank 5 on n1)"
    assert ROLES.describe(AS_WORKER) == "worker 3, a spare (rank 5 on n1)"
    assert ROLES.waiting_ranks == {4, 5}
    assert [each["role"] for each in _rank_table(ROLES)][4:] == ["spare", "spare"]
    assert _core_share(ROLES, 0) == 0.5


def test_groups_of_several_are_told_what_else_to_set() -> None:
    of_two = Roles(
        places=PLACES,
        server_ranks=(0, 1),
        worker_ranks=(2, 3, 4),
        groups=((0, 1), (2,)),
        spare_ranks=(4,),
        num_substitutes=1,
    )
    for sees_run_dir in (True, False):
        error = refusal_of_substitutes(of_two, sees_run_dir=sees_run_dir)
        assert str(error).endswith("or set failures.max_deaths = 0")


def test_it_becomes_a_worker_for_itself_and_for_others(tmp_path: Path) -> None:
    rank = rank_of(tmp_path, comm=object())
    assert (rank.role, rank.is_substitute) == ("spare", False)
    heard = (PeerLost(server_id(1), "server 1"),)
    rank.become_worker(TakePlace(worker=1), heard)
    assert (rank.me, rank.role, rank.is_substitute) == (AS_WORKER, "worker", True)
    assert (rank.session.replace, rank.session.heard) == (TakePlace(worker=1), heard)
    assert rank.who == "worker 3, a spare (rank 5 on n1)"


def test_the_death_of_a_server_beside_it_does_not_end_the_job_with_it(tmp_path: Path) -> None:
    for buddies in ((1, 0), ()):
        rank = rank_of(tmp_path, buddies=buddies)
        rank.become_worker(TakePlace(worker=1), ())
        rank.endpoint.lost[server_id(1)] = "server 1"  # type: ignore[index]
        assert rank.exit.may_end_alone == bool(buddies)


def test_whoever_speaks_for_the_job_speaks_by_the_id_that_it_has(tmp_path: Path) -> None:
    rank = rank_of(tmp_path)
    lost: Any = rank.endpoint.lost
    dead = [server_id(0), server_id(1), worker_id(0), worker_id(1)]
    lost.update(dict.fromkeys(dead, "dead"))
    assert rank.exit.printing_peer() == spare_id(0)
    rank.become_worker(TakePlace(worker=1), ())
    assert rank.exit.printing_peer() == AS_WORKER
    lost.pop(worker_id(1))
    assert rank.exit.printing_peer() == worker_id(1)


def test_the_end_of_the_job_is_told_to_every_rank_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_comm: object, *_said: object, tell: Callable[[], None]) -> NoReturn:
        tell()
        raise SystemExit

    rank, told = rank_of(tmp_path, server_id(0)), []
    monkeypatch.setattr("psdist.ranks.exit.survives_deaths", lambda _environment: True)
    monkeypatch.setattr("psdist.ranks.exit.ignore_interrupts", lambda: None)
    monkeypatch.setattr("psdist.ranks.exit.end_all", end)
    monkeypatch.setattr(
        rank.endpoint,
        "send_control",
        lambda peer, message: told.append((peer, message)),
    )
    with pytest.raises(SystemExit):
        rank.exit.abort("psdist: server 0", "error: no", 3)
    peers = [server_id(1), worker_id(0), worker_id(1), spare_id(0), SPARE]
    assert sorted(told, key=lambda each: each[0]) == sorted(
        [(peer, Ended(exit_status=3)) for peer in peers], key=lambda each: each[0]
    )


class Asked:
    """In place of a spare's loop: it ends at once, asked or not."""

    def __init__(self, replace: TakePlace | None) -> None:
        self.served = object.__new__(SpareSeat)
        self.served.replace = replace
        self.served.heard = [PeerLost(server_id(1), "server 1")]

    def run(self, *_waiting: Any, **_more: Any) -> None: ...


@pytest.mark.parametrize("replace", [TakePlace(worker=1), None])
def test_serving_ends_in_the_job_where_a_worker_is_wanted(
    replace: TakePlace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, ends = rank_of(tmp_path), []
    loop = Asked(replace)
    begun = iter([True, False])
    monkeypatch.setattr(server, "wait_for_job", lambda *_: next(begun))
    monkeypatch.setattr(server, "build_loop", lambda *_: (loop, server.Duty(rank.session)))
    monkeypatch.setattr(server, "ignore_signals_of_scripts", lambda: None)
    monkeypatch.setattr(rank.session, "end", lambda: ends.append("job"))
    monkeypatch.setattr(rank.exit, "close", lambda: ends.append("rank"))
    assert server.serve(rank) == 0
    assert ends == ([] if replace else ["job", "rank"])
    assert rank.session.replace == replace
    assert is_spare(rank.me) == (replace is None)


@pytest.mark.parametrize("replace", [TakePlace(worker=1), None])
def test_the_script_runs_in_a_spare_that_is_asked(
    replace: TakePlace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, done = rank_of(tmp_path), []

    def serve(its: Rank) -> int:
        if replace is not None:
            its.session.take_place(replace)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(rank.exit, "run", lambda _part: done.append("script"))
    monkeypatch.setattr("psdist.joining.the_job", lambda: "a job")
    monkeypatch.setattr("psdist.joining.finish", lambda: done.append("finish") or 7)
    assert run_rank._take_part(rank, "a program") == (7 if replace else 0)  # type: ignore[arg-type]
    assert done == (["script", "finish"] if replace else [])


@pytest.mark.parametrize("replace", [TakePlace(worker=1), None])
def test_a_plain_script_goes_on_in_a_spare_that_is_asked(
    replace: TakePlace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*_: object) -> int:
        if replace is not None:
            rank.session.take_place(replace)
        return 0

    rank = rank_of(tmp_path, comm=object())
    monkeypatch.setattr(plain_script, "connect", lambda _outcome: rank)
    monkeypatch.setattr(rank.exit, "run", serve)
    monkeypatch.setattr(plain_script, "tell_errors", lambda: None)
    monkeypatch.setattr(plain_script.atexit, "register", lambda *_: None)
    if replace:
        assert plain_script.connect_or_serve(lambda: 0) is rank
        return
    with pytest.raises(SystemExit) as ended:
        plain_script.connect_or_serve(lambda: 0)
    assert ended.value.code == 0


def test_the_worker_knows_where_shards_are_before_it_says_anything() -> None:
    network = VirtualNetwork()
    endpoint = network.endpoint(worker_id(1))
    heard = [
        PeerLost(server_id(1), "server 1"),
        ControlArrived(COORDINATOR, Moved(server=1, host=0)),
    ]
    seat = Seat(
        worker=1,
        group=1,
        members=(1,),
        num_servers=2,
        servers_have_buddies=True,
        is_substitute=True,
    )
    loop = make_loop(
        endpoint,
        seat,
        waiting=Waiting(is_spinning=False),
        survives_workers=True,
        replace=TakePlace(worker=0),
        heard=heard,
    )
    assert endpoint.moved.keys() == {server_id(1)}
    assert loop.core.membership.place == 0
