"""Between jobs: workers come to psdist.init with their settings, servers wait for all of them.

    while wait_for_job(context, lobby): ...     # on a server: in a job, until workers are gone
    join_job(context, {"mode": "ssp"})          # on a worker, in psdist.init(mode="ssp")
    leave(context)                              # on a worker, when its process ends

Who has come is decided by psdist.servers.protocol.lobby, on the coordinator. One process without a
launcher waits for nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from psdist.config.derived import without_substitutes
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
from psdist.ranks.context import RankContext
from psdist.ranks.reporting.status import StatusFile
from psdist.ranks.run_files import create_next_run_directory, take_settings_of_script
from psdist.servers.protocol.lobby import AllGone, Lobby, LobbyAction, Open

logger = logging.getLogger("psdist")

_WHERE = "psdist.init"


def wait_for_job(context: RankContext, lobby: Lobby | None) -> bool:
    """On a server: returns when a job has begun; False when no worker is left to begin one.
    ``lobby``: on the coordinator only."""
    waiting = context.waiting(has_deadline=False)
    waiting.relax()
    known: set[int] = set()
    status = StatusFile(context.run_directory)
    while True:
        if context.has_lost_coordinator:
            return False  # who would begin another job, and who would say that nobody does
        if lobby is not None and context.survives_workers:
            for peer in context.transport.lost.keys() - known:
                known.add(peer)
                if is_worker(peer) and _tell(context, lobby.lose(worker_of(peer))) is not None:
                    return False
        event = context.transport.poll()
        if event is None:
            waiting.idle("psdist.init on the workers")
            if lobby is not None:
                context.heed_parent()
                context.heed_hosts()
                if status.is_due and lobby.job == 1:
                    mode, called = describe_now(context.config, 0), lobby.called
                    status.write_start(context.roles, mode=mode, called=called, job=1)
            continue
        waiting.reset()
        arrived = _control(context, event)
        if arrived is None:
            continue
        message = arrived.message
        if isinstance(message, Failure) and lobby is not None:
            context.abort(message.heading, message.text, message.exit_status)
        if isinstance(message, Begun) and arrived.peer == COORDINATOR:
            _begin(context, message)
            return True
        if isinstance(message, End) and arrived.peer == COORDINATOR:
            return False
        if lobby is None or not isinstance(message, Lobby.TAKES):
            raise _unexpected(context, arrived.peer, message)
        last = _take(context, lobby, arrived)
        if isinstance(last, AllGone):
            return False
        if last is not None:
            _begin(context, last)
            return True


def _take(context: RankContext, lobby: Lobby, arrived: ControlArrived) -> Begun | AllGone | None:
    """On the coordinator: what its machine decides about a message; the job that begins, or the
    end."""
    return _tell(context, lobby.handle(arrived.peer, arrived.message))


def _tell(context: RankContext, actions: Iterable[LobbyAction]) -> Begun | AllGone | None:
    last: Begun | AllGone | None = None
    for action in actions:
        if isinstance(action, Open):
            # First: nobody writes into a run directory that is another run's.
            last = action.begun
            open_files(context, last)
        elif isinstance(action, AllGone):
            last = action
        else:
            context.transport.send_control(action.peer, action.message)
    return last


def join_job(context: RankContext, settings: Mapping[str, Any]) -> None:
    """On a worker: returns when every worker has passed these settings to psdist.init and the job
    has begun. Raises :class:`CollectiveError` where another one has passed others."""
    if context.replace is not None:
        if not context.is_in_job:
            raise PeerLostError(f"worker {context.replace.worker}")
        return None  # which has begun, with what the others have passed
    if context.job and context.roles.num_substitutes:
        raise UsageError(
            "psdist.init() for a second job, with spares for workers' places: the script of a "
            "spare would begin with the first one's part; train in one job, or "
            f"{without_substitutes(context.config)}"
        )
    job = context.job + 1
    if context.comm is None:
        begun = Begun(job=job, settings=dict(settings))
        open_files(context, begun)
        return _begin(context, begun)
    worker = worker_of(context.me)
    transport = context.transport
    _require_coordinator(context)
    transport.send_control(COORDINATOR, Begin(worker=worker, job=job, settings=dict(settings)))
    waiting = context.waiting()
    waiting.reset()
    while True:
        event = transport.poll()
        _require_coordinator(context)
        if event is None:
            if waiting.idle(f"the other workers in {_WHERE}"):
                logger.warning("still waiting for the other workers in %s", _WHERE)
                transport.send_control(COORDINATOR, WhoIsAbsent(worker=worker, seq=job))
            continue
        arrived = _control(context, event)
        if arrived is None:
            continue
        message = arrived.message
        if isinstance(message, Begun) and arrived.peer == COORDINATOR:
            if message.error:
                raise CollectiveError(message.error)
            return _begin(context, message)
        if not isinstance(message, Absent):
            raise _unexpected(context, arrived.peer, message)
        more = message.num_absent - len(message.workers)
        logger.warning(
            "%s has not been called by %s%s",
            _WHERE,
            describe_workers(message.workers),
            f" and {more} more" if more > 0 else "",
        )


def leave(context: RankContext) -> None:
    """On a worker, outside of any job: its process ends."""
    me = worker_of(context.me)
    if context.comm is not None and (not context.is_substitute or me in context.joined):
        context.transport.send_control(COORDINATOR, Gone(worker=me))
    context.close()


def _require_coordinator(context: RankContext) -> None:
    """Raises :class:`PeerLostError` where it has died, in the job before or behind it."""
    if context.has_lost_coordinator:
        lost, moved = context.transport.lost, context.transport.moved
        raise PeerLostError(lost.get(COORDINATOR) or moved[COORDINATOR])


def _control(context: RankContext, event: Event) -> ControlArrived | None:
    """``event`` if it is a control message; None where there is nothing to do about it."""
    if isinstance(event, ControlArrived):
        return event
    if isinstance(event, PeerLost):
        if is_spare(event.peer):
            return None  # a job begins without it
        if context.survives_workers and is_worker(event.peer):
            return None  # the coordinator's lobby knows (transport.lost)
        is_server = not is_worker(event.peer)
        if context.survives_servers and context.job and is_server:
            return None  # the job is over; another one would not begin
        raise PeerLostError(event.who)
    if isinstance(event, Sent):
        return None
    raise _unexpected(context, event.peer, event)


def _unexpected(context: RankContext, peer: int, what: Control | Event) -> ProtocolError:
    return ProtocolError(
        f"{describe_peer(context.me)}: {describe_peer(peer)} sent {type(what).__name__} while "
        "no job was going on"
    )


def _begin(context: RankContext, begun: Begun) -> None:
    if begun.job != context.job + 1:
        raise ProtocolError(f"job {begun.job} began after job {context.job}")
    lost = [
        who
        for peer, who in context.transport.lost.items()
        if not is_spare(peer) and not context.roles.is_substitute(peer)
    ]
    for who in (*lost, *context.transport.moved.values()):
        raise PeerLostError(who)  # the job before has survived it
    context.begin_job(begun.job, _resolved(context, begun).config)


def open_files(context: RankContext, begun: Begun) -> None:
    """On the coordinator, or in one process: what people read of the job that begins."""
    resolved, roles, path = _resolved(context, begun), context.roles, context.path_of(begun.job)
    if begun.job == 1:
        take_settings_of_script(context.run_directory, resolved, roles)
    else:
        create_next_run_directory(path, resolved, roles, first=context.path_of(1))
        if context.resolved is not None and context.resolved.config.rollback is not None:
            logger.warning(
                "training.rollback = %g is left out in job %d: it starts afresh whenever the "
                "processes do, and so has no checkpoint to go back to",
                context.resolved.config.rollback,
                begun.job,
            )


def _resolved(context: RankContext, begun: Begun) -> Resolved:
    """What the job that begins is run with: jobs behind the first do without rollback."""
    assert context.resolved is not None
    try:
        resolved = with_script(context.resolved, script_settings(begun.settings))
    except UserError as error:  # whoever has sent them has checked them
        raise ProtocolError(f"settings that no psdist.init takes: {error}") from error
    if begun.job == 1 or resolved.config.run_dir is None:
        return resolved
    changed = {"run_dir": str(context.path_of(begun.job)), "rollback": None}
    return replace(resolved, config=resolved.config.model_copy(update=changed))
