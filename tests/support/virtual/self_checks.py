"""Machines that look at themselves whenever they have handled something."""

from __future__ import annotations

from psdist.protocol.events import Arrived, Offered
from psdist.protocol.header import NEVER
from psdist.servers.protocol.actions import Action as ServerAction
from psdist.servers.protocol.actions import Fail, ReplySent, ServerEvent
from psdist.servers.protocol.state import ServerCore
from psdist.workers.protocol.actions import Action
from psdist.workers.protocol.core import WorkerCore, WorkerEvent


def check_worker_after_every_event(core: WorkerCore) -> None:
    """From now on a worker's machine looks at itself whenever it has handled something."""
    handle = core.handle

    def handle_and_check(event: WorkerEvent) -> list[Action]:
        actions = handle(event)
        core.check_invariants()
        return actions

    core.handle = handle_and_check  # type: ignore[method-assign]


def check_server_after_every_event(core: ServerCore, *, is_large: bool) -> None:
    """From now on a server's machine is looked at whenever it has handled something: all of it, or
    where that is much, the chunk that the event was about."""
    handle = core.handle

    def handle_and_check(event: ServerEvent) -> list[ServerAction]:
        actions = handle(event)
        if not any(isinstance(action, Fail) for action in actions):
            index = _chunk_of(event) if is_large else None
            core.check_invariants(index)
            for chunk in (
                core.chunk_states.values() if index is None else [core.chunk_states.get(index)]
            ):
                if chunk is not None and chunk.parked:
                    # Not by what the chunk has last heard of groups that stopped.
                    least = min(chunk.clock.done_of_counting(), default=NEVER)
                    assert min(chunk.parked) > least, (
                        f"chunk {chunk.index} keeps replies that need {min(chunk.parked)}: "
                        f"all that count are at {least}"
                    )
        return actions

    core.handle = handle_and_check  # type: ignore[method-assign]


def _chunk_of(event: ServerEvent) -> int | None:
    if isinstance(event, Offered):
        return event.chunk
    if isinstance(event, Arrived):
        return event.header.chunk
    if isinstance(event, ReplySent):
        return event.token.chunk
    return None
