"""A rank that waits to take the place of a server or of a worker: its two ids, and how it becomes a
worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.commands import run_rank
from psdist.config.settings import RunConfig
from psdist.protocol.control import Ended, Moved, TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, is_spare, server_id, spare_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks import plain_script, server
from psdist.ranks.connecting import _core_share
from psdist.ranks.context import RankContext
from psdist.ranks.run_files import _rank_table
from psdist.ranks.seats.placing import _make_plan, refusal_of_substitutes, roles_of_plan
from psdist.report.run_directory import RunDirectory
from psdist.servers.spare import SpareSeat
from psdist.transport.virtual import VirtualNetwork
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.protocol.seat import Seat
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


def context_of(path: Path, peer: int = SPARE, **more: Any) -> RankContext:
    network = VirtualNetwork()
    network.share(SPARE, AS_WORKER)
    return RankContext(
        config=RunConfig(replication="buddy", max_deaths=1, spares=2),
        roles=ROLES,
        rank=ROLES.rank_of_peer[peer],
        run_directory=RunDirectory(path),
        transport=network.endpoint(peer),
        core_share=1.0,
        started_s=0.0,
        buddies=(1, 0),
        **more,
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
    context = context_of(tmp_path)
    assert (context.role, context.is_substitute) == ("spare", False)
    heard = (PeerLost(server_id(1), "server 1"),)
    context.go_on_as_worker(TakePlace(worker=1), heard)
    assert (context.me, context.role, context.is_substitute) == (AS_WORKER, "worker", True)
    assert (context.replace, context.heard) == (TakePlace(worker=1), heard)
    context.comm = object()  # type: ignore[assignment]
    assert context.who == "worker 3, a spare (rank 5 on n1)"


def test_the_death_of_a_server_beside_it_does_not_end_the_job_with_it(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    context.go_on_as_worker(TakePlace(worker=1), ())
    context.transport.lost[server_id(1)] = "server 1"  # type: ignore[index]
    assert context._may_end_alone
    context.buddies = ()
    assert not context._may_end_alone


def test_whoever_speaks_for_the_job_speaks_by_the_id_that_it_has(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    lost: Any = context.transport.lost
    dead = [server_id(0), server_id(1), worker_id(0), worker_id(1)]
    lost.update(dict.fromkeys(dead, "dead"))
    assert context._speaker() == spare_id(0)
    context.go_on_as_worker(TakePlace(worker=1), ())
    assert context._speaker() == AS_WORKER
    lost.pop(worker_id(1))
    assert context._speaker() == worker_id(1)


def test_the_end_of_the_job_is_told_to_every_rank_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, told = context_of(tmp_path, server_id(0)), []
    monkeypatch.setattr("psdist.ranks.context.survives_deaths", lambda _environment: True)
    monkeypatch.setattr(
        context._endpoint,
        "send_control",
        lambda peer, message: told.append((peer, message)),
    )
    context._tell_all(3)
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
    context, ends = context_of(tmp_path), []
    loop = Asked(replace)
    begun = iter([True, False])
    monkeypatch.setattr(server, "wait_for_job", lambda *_: next(begun))
    monkeypatch.setattr(server, "build_loop", lambda *_: (loop, server.Duty(context)))
    monkeypatch.setattr(server, "ignore_signals_of_scripts", lambda: None)
    monkeypatch.setattr(context, "end_job", lambda: ends.append("job"))
    monkeypatch.setattr(context, "close", lambda: ends.append("rank"))
    assert server.serve(context) == 0
    assert ends == ([] if replace else ["job", "rank"])
    assert context.replace == replace
    assert is_spare(context.me) == (replace is None)


@pytest.mark.parametrize("replace", [TakePlace(worker=1), None])
def test_the_script_runs_in_a_spare_that_is_asked(
    replace: TakePlace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, done = context_of(tmp_path), []

    def serve(its: RankContext) -> int:
        its.replace = replace
        return 0

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(run_rank, "run_or_fail", lambda *_: done.append("script"))
    monkeypatch.setattr("psdist.joining.the_job", lambda: "a job")
    monkeypatch.setattr("psdist.joining.finish", lambda: done.append("finish") or 7)
    assert run_rank._take_part(context, "a program") == (7 if replace else 0)  # type: ignore[arg-type]
    assert done == (["script", "finish"] if replace else [])


@pytest.mark.parametrize("replace", [TakePlace(worker=1), None])
def test_a_plain_script_goes_on_in_a_spare_that_is_asked(
    replace: TakePlace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path, comm=object())
    monkeypatch.setattr(plain_script, "connect", lambda _outcome: context)
    monkeypatch.setattr(
        plain_script, "run_or_fail", lambda its, _run: setattr(its, "replace", replace) or 0
    )
    monkeypatch.setattr(plain_script, "tell_errors", lambda: None)
    monkeypatch.setattr(plain_script.atexit, "register", lambda *_: None)
    if replace:
        assert plain_script.connect_or_serve(lambda: 0) is context
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
