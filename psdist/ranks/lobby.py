"""Between jobs: workers call psdist.init with their settings, servers wait for all workers.

    while wait_for_job(rank, lobby): ...     # on a server: until no worker is left
    join_job(rank, {"mode": "ssp"})          # on a worker, in psdist.init(mode="ssp")
    leave(rank)                              # on a worker, when its process ends
    if not take_place(rank): ...             # on a spare: no job can begin any more
    rank.session.replace.worker              # the failed worker whose place it has

The coordinator decides when a job begins (psdist.servers.protocol.lobby), and selects a spare for
the place of a failed worker (psdist.servers.protocol.joins). One process without a launcher does
not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from psdist.config.compatibility import without_substitutes
from psdist.config.modes import describe_now
from psdist.config.sources import Resolved, script_settings, with_script
from psdist.errors import CollectiveError, PeerLostError, ProtocolError, UsageError, UserError
from psdist.protocol.control import (
    Absent,
    Begin,
    Begun,
    Control,
    End,
    Failure,
    Gone,
    Stop,
    TakePlace,
    WhoIsAbsent,
)
from psdist.protocol.events import ControlArrived, Event, PeerLost, Sent
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    describe_workers,
    is_spare,
    is_worker,
    worker_of,
)
from psdist.ranks.rank import Rank
from psdist.ranks.reporting.status import StatusFile
from psdist.ranks.run_files import create_next_run_directory, take_settings_of_script
from psdist.servers.protocol.lobby import AllGone, Lobby, LobbyAction, Open

logger = logging.getLogger("psdist")

_WHERE = "psdist.init"
_WAITS = "to a rank that waits for a worker's place"


def wait_for_job(rank: Rank, lobby: Lobby | None) -> bool:
    """On a server: return True when a job has begun, False when no worker is left to begin one.
    ``lobby``: on the coordinator only."""
    waiting = rank.waiting(has_deadline=False)
    waiting.relax()
    known: set[int] = set()
    status = StatusFile(rank.session.run_directory)
    while True:
        if rank.session.has_lost_coordinator:
            return False  # only the coordinator can begin another job, or end the wait
        if lobby is not None and rank.session.survives_workers:
            for peer in rank.endpoint.lost.keys() - known:
                known.add(peer)
                if is_worker(peer) and _do(rank, lobby.lose(worker_of(peer))) is not None:
                    return False
        event = rank.endpoint.poll()
        if event is None:
            waiting.idle("psdist.init on the workers")
            if lobby is not None:
                rank.exit.check()
                if status.is_due and lobby.job == 1:
                    mode, called = describe_now(rank.session.config, 0), lobby.called
                    status.write_start(rank.roles, mode=mode, called=called, job=1)
            continue
        waiting.reset()
        arrived = _control(rank, event)
        if arrived is None:
            continue
        message = arrived.message
        if isinstance(message, Failure) and lobby is not None:
            rank.exit.abort(message.heading, message.text, message.exit_status)
        if isinstance(message, Begun) and arrived.peer == COORDINATOR:
            _begin(rank, message)
            return True
        if isinstance(message, End) and arrived.peer == COORDINATOR:
            return False
        if lobby is None or not isinstance(message, Lobby.TAKES):
            raise _unexpected(rank, arrived.peer, message)
        last = _do(rank, lobby.handle(arrived.peer, message))
        if isinstance(last, AllGone):
            return False
        if last is not None:
            _begin(rank, last)
            return True


def _do(rank: Rank, actions: Iterable[LobbyAction]) -> Begun | AllGone | None:
    """On the coordinator: carry out actions. Return the job that begins, or the end."""
    last: Begun | AllGone | None = None
    for action in actions:
        if isinstance(action, Open):
            # First: it refuses a run directory of another run.
            last = action.begun
            open_files(rank, last)
        elif isinstance(action, AllGone):
            last = action
        else:
            rank.endpoint.send_control(action.peer, action.message)
    return last


def join_job(rank: Rank, settings: Mapping[str, Any]) -> None:
    """On a worker: return when every worker has passed these settings to psdist.init and the job
    has begun. Raises :class:`CollectiveError` if another worker has passed other settings."""
    if rank.session.replace is not None:
        if not rank.session.is_open:
            raise PeerLostError(f"worker {rank.session.replace.worker}")
        return None  # the job has begun, with the settings of the other workers
    if rank.session.number and rank.roles.num_substitutes:
        raise UsageError(
            "psdist.init() for a second job, with spares for workers' places: the script of a "
            "spare would begin with the first one's part; train in one job, or "
            f"{without_substitutes(rank.session.config)}"
        )
    job = rank.session.number + 1
    if rank.is_alone:
        begun = Begun(job=job, settings=dict(settings))
        open_files(rank, begun)
        return _begin(rank, begun)
    worker = worker_of(rank.me)
    transport = rank.endpoint
    _require_coordinator(rank)
    transport.send_control(COORDINATOR, Begin(worker=worker, job=job, settings=dict(settings)))
    waiting = rank.waiting()
    waiting.reset()
    while True:
        event = transport.poll()
        _require_coordinator(rank)
        if event is None:
            if waiting.idle(f"the other workers in {_WHERE}"):
                logger.warning("still waiting for the other workers in %s", _WHERE)
                transport.send_control(COORDINATOR, WhoIsAbsent(worker=worker, seq=job))
            continue
        arrived = _control(rank, event)
        if arrived is None:
            continue
        message = arrived.message
        if isinstance(message, Begun) and arrived.peer == COORDINATOR:
            if message.error:
                raise CollectiveError(message.error)
            return _begin(rank, message)
        if not isinstance(message, Absent):
            raise _unexpected(rank, arrived.peer, message)
        more = message.num_absent - len(message.workers)
        logger.warning(
            "%s has not been called by %s%s",
            _WHERE,
            describe_workers(message.workers),
            f" and {more} more" if more > 0 else "",
        )


def leave(rank: Rank) -> None:
    """On a worker, outside of any job: its process ends."""
    me = worker_of(rank.me)
    if not rank.is_alone and (not rank.is_substitute or me in rank.session.joined):
        rank.endpoint.send_control(COORDINATOR, Gone(worker=me))
    rank.exit.close()


def _require_coordinator(rank: Rank) -> None:
    """Raises :class:`PeerLostError` if the coordinator failed in the last job or after it."""
    if rank.session.has_lost_coordinator:
        lost, moved = rank.endpoint.lost, rank.endpoint.moved
        raise PeerLostError(lost.get(COORDINATOR) or moved[COORDINATOR])


def _control(rank: Rank, event: Event) -> ControlArrived | None:
    """Return ``event`` if it is a control message; None if it needs no reaction."""
    if isinstance(event, ControlArrived):
        return event
    if isinstance(event, PeerLost):
        if is_spare(event.peer):
            return None  # a job can begin without it
        if rank.session.survives_workers and is_worker(event.peer):
            return None  # the coordinator reads transport.lost
        is_server = not is_worker(event.peer)
        if rank.session.survives_servers and rank.session.number and is_server:
            return None  # the job has ended, and no other one begins
        raise PeerLostError(event.who)
    if isinstance(event, Sent):
        return None
    raise _unexpected(rank, event.peer, event)


def _unexpected(
    rank: Rank, peer: int, what: Control | Event, when: str = "while no job was running"
) -> ProtocolError:
    return ProtocolError(
        f"{describe_peer(rank.me)}: {describe_peer(peer)} sent {type(what).__name__} {when}"
    )


def _begin(rank: Rank, begun: Begun) -> None:
    if begun.job != rank.session.number + 1:
        raise ProtocolError(f"job {begun.job} began after job {rank.session.number}")
    lost = [
        who
        for peer, who in rank.endpoint.lost.items()
        if not is_spare(peer) and not rank.roles.is_substitute(peer)
    ]
    for who in (*lost, *rank.endpoint.moved.values()):
        raise PeerLostError(who)  # only the last job has survived it
    rank.begin_job(begun.job, _resolved(rank, begun).config)


def open_files(rank: Rank, begun: Begun) -> None:
    """On the coordinator, or in one process: write the first files of the job that begins."""
    resolved, roles, path = _resolved(rank, begun), rank.roles, rank.bootstrap.path_of(begun.job)
    if begun.job == 1:
        take_settings_of_script(rank.session.run_directory, resolved, roles)
    else:
        create_next_run_directory(path, resolved, roles, first=rank.bootstrap.path_of(1))
        if rank.bootstrap.config.rollback is not None:
            logger.warning(
                "training.rollback = %g is left out in job %d: it starts afresh whenever the "
                "processes do, and so has no checkpoint to go back to",
                rank.bootstrap.config.rollback,
                begun.job,
            )


def _resolved(rank: Rank, begun: Begun) -> Resolved:
    """Return the settings of the job that begins; only the first job can have rollback."""
    try:
        resolved = with_script(rank.bootstrap.resolved, script_settings(begun.settings))
    except UserError as error:  # the sender has checked them
        raise ProtocolError(f"settings that no psdist.init takes: {error}") from error
    if begun.job == 1 or resolved.config.run_dir is None:
        return resolved
    changed = {"run_dir": str(rank.bootstrap.path_of(begun.job)), "rollback": None}
    return replace(resolved, config=resolved.config.model_copy(update=changed))


# -- a spare ---------------------------------------------------------------------------------------


def take_place(rank: Rank) -> bool:
    """Wait until this rank receives a worker's place in a running job. Return False if no job can
    begin any more."""
    while wait_for_job(rank, None):
        if _is_asked(rank):
            return True
        rank.session.end()
    rank.exit.close()
    return False


def _is_asked(rank: Rank) -> bool:
    """True if this rank receives a place before the job ends."""
    waiting = rank.waiting(has_deadline=False)
    waiting.relax()
    while True:
        event = rank.session.transport.poll()
        if event is None:
            waiting.idle("a worker's place")
        elif isinstance(event, PeerLost):
            if not is_worker(event.peer):
                raise PeerLostError(event.who)
        elif isinstance(event, ControlArrived) and event.peer == COORDINATOR:
            if isinstance(event.message, Stop):
                return False
            if not isinstance(event.message, TakePlace):
                raise _unexpected(rank, event.peer, event.message, _WAITS)
            rank.session.take_place(event.message)
            return True
        elif not isinstance(event, Sent):
            raise _unexpected(rank, event.peer, event, _WAITS)
