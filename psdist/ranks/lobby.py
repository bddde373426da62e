"""Before a job: workers come to psdist.init with their settings, servers wait for all of them.

    begun = wait_for_job(context, lobby)        # on a server: takes part from now on
    join_job(context, {"mode": "ssp"})          # on a worker, in psdist.init(mode="ssp")

Who has come is decided by psdist.servers.protocol.lobby, on the registrar. One process without a
launcher waits for nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from psdist.config.sources import Resolved, script_settings, with_script
from psdist.errors import CollectiveError, PeerLostError, ProtocolError, UserError
from psdist.protocol.control import Absent, Begin, Begun, Control, Failure, WhoIsAbsent
from psdist.protocol.events import ControlArrived, Event, PeerLost, Sent
from psdist.protocol.ids import REGISTRAR, describe_peer, describe_workers, worker_of
from psdist.ranks.context import RankContext
from psdist.ranks.run_files import take_settings_of_script
from psdist.servers.protocol.lobby import Lobby, Open

logger = logging.getLogger("psdist")

_WHERE = "psdist.init"


def wait_for_job(context: RankContext, lobby: Lobby | None) -> None:
    """On a server: returns when a job has begun. ``lobby``: on the registrar only."""
    waiting = context.waiting(has_deadline=False)
    waiting.relax()
    while True:
        event = context.transport.poll()
        if event is None:
            waiting.idle("psdist.init on the workers")
            if lobby is not None:
                context.heed_parent()
            continue
        waiting.reset()
        arrived = _control(context, event)
        if arrived is None:
            continue
        message = arrived.message
        if isinstance(message, Failure) and lobby is not None:
            context.abort(message.heading, message.text, message.exit_status)
        if isinstance(message, Begun) and arrived.peer == REGISTRAR:
            return _begin(context, message)
        if lobby is None or not isinstance(message, Lobby.TAKES):
            raise _unexpected(context, arrived.peer, message)
        if begun := _take(context, lobby, arrived):
            return _begin(context, begun)


def _take(context: RankContext, lobby: Lobby, arrived: ControlArrived) -> Begun | None:
    """On the registrar: what its machine decides about a message; the job that begins."""
    begun: Begun | None = None
    for action in lobby.handle(arrived.peer, arrived.message):
        if isinstance(action, Open):
            # First: nobody writes into a run directory that is another run's.
            begun = action.begun
            open_files(context, begun)
        else:
            context.transport.send_control(action.peer, action.message)
    return begun


def join_job(context: RankContext, settings: Mapping[str, Any]) -> None:
    """On a worker: returns when every worker has passed these settings to psdist.init and the job
    has begun. Raises :class:`CollectiveError` where another one has passed others."""
    job = context.job + 1
    if context.comm is None:
        begun = Begun(job=job, settings=dict(settings))
        open_files(context, begun)
        return _begin(context, begun)
    worker = worker_of(context.me)
    transport = context.transport
    transport.send_control(REGISTRAR, Begin(worker=worker, job=job, settings=dict(settings)))
    waiting = context.waiting()
    waiting.reset()
    while True:
        event = transport.poll()
        if event is None:
            if waiting.idle(f"the other workers in {_WHERE}"):
                logger.warning("still waiting for the other workers in %s", _WHERE)
                transport.send_control(REGISTRAR, WhoIsAbsent(worker=worker, seq=job))
            continue
        arrived = _control(context, event)
        if arrived is None:
            continue
        message = arrived.message
        if isinstance(message, Begun) and arrived.peer == REGISTRAR:
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


def _control(context: RankContext, event: Event) -> ControlArrived | None:
    """``event`` if it is a control message; None where there is nothing to do about it."""
    if isinstance(event, ControlArrived):
        return event
    if isinstance(event, PeerLost):
        raise PeerLostError(event.who)
    if isinstance(event, Sent):
        return None
    raise _unexpected(context, event.peer, event)


def _unexpected(context: RankContext, peer: int, what: Control | Event) -> ProtocolError:
    return ProtocolError(
        f"{describe_peer(context.me)}: {describe_peer(peer)} sent {type(what).__name__} before a "
        "job had begun"
    )


def _begin(context: RankContext, begun: Begun) -> None:
    if begun.job != context.job + 1:
        raise ProtocolError(f"job {begun.job} began after job {context.job}")
    context.begin_job(begun.job, _resolved(context, begun).config)


def open_files(context: RankContext, begun: Begun) -> None:
    """On the registrar, or in one process: what people read of the job that begins."""
    take_settings_of_script(context.run_directory, _resolved(context, begun), context.roles)


def _resolved(context: RankContext, begun: Begun) -> Resolved:
    assert context.resolved is not None
    try:
        return with_script(context.resolved, script_settings(begun.settings))
    except UserError as error:  # whoever has sent them has checked them
        raise ProtocolError(f"settings that no psdist.init takes: {error}") from error
