"""The worker's loop: executes what the client's state machine decides, and waits.

Two layers of calls: ``begin_*`` and ``turn`` never block (an actor in a virtual network uses
these), ``push``, ``pull`` and ``collective`` wait with back-off, warnings that name who is missing
and a deadline.

    loop = WorkerLoop(transport, worker=0, num_servers=2, waiting=Waiting(...))
    loop.attach(core, gradients=frames, parameters=frames)
    loop.push(clock=0, settings=loop.settings(hyper, absent), weight=1.0, empty=())

It moves bytes into parameter memory only inside ``push`` and ``pull``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.errors import CollectiveError, InvariantError, PeerLostError
from psdist.protocol.control import (
    Absent,
    Collected,
    Control,
    Done,
    Enter,
    Leave,
    Metrics,
    Missing,
    Register,
    Registered,
    Settings,
    Setup,
    Stop,
    Suspend,
    WhoIsAbsent,
    WhoIsMissing,
)
from psdist.protocol.events import ControlArrived, Event, Frame, PeerLost, Sent
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import REGISTRAR, server_id
from psdist.transport.base import Transport
from psdist.transport.waiting import Waiting
from psdist.workers.group.channel import Pending, T
from psdist.workers.protocol.client import (
    AcceptReply,
    ClientAction,
    ClientCore,
    DiscardReply,
    SendPull,
    SendPush,
)

logger = logging.getLogger("psdist")

_REST_S = 0.02
"""How long a wait for the group blocks at a time: it returns at once when the group has come, and
turns of the loop between are for warnings."""


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Wait:
    """What to wait for, for whoever waits: the loop, or an actor in a virtual network."""

    is_done: Callable[[], bool]
    what: str
    """In words, for warnings and errors."""
    ask: Callable[[], None] = _nothing
    """Asks who is missing; the answer is a warning."""
    rest: Callable[[], None] = _nothing
    """Blocks for a while, or until it is done: for what does not come through the transport."""


def wait_for_group(pending: Pending[Any], what: str) -> Wait:
    """``what``: the call in which this worker waits for the others of its group."""
    return Wait(
        pending.is_done,
        f"the other workers of this worker's group in {what}",
        rest=lambda: pending.wait(_REST_S),
    )


class WorkerLoop:
    def __init__(
        self,
        transport: Transport,
        *,
        worker: int,
        num_servers: int,
        waiting: Waiting,
        describe_group: Callable[[int], str] = lambda group: f"group {group}",
    ) -> None:
        self.transport = transport
        self._worker = worker
        self._servers = [server_id(server) for server in range(num_servers)]
        self._waiting = waiting
        self._describe_group = describe_group
        self._core: ClientCore | None = None
        self._gradients: Sequence[Frame | None] = ()
        self._parameters: Sequence[Frame | None] = ()
        self._setup_sends = 0
        self._pull_frames: dict[int, Frame] = {}
        self._registered: set[int] = set()
        self._collected: dict[int, Collected] = {}
        self._seq = 0
        self._settings: tuple[bytes, tuple[int, ...]] | None = None
        self._settings_version = 0
        self.is_stopped = False

    def attach(
        self,
        core: ClientCore,
        *,
        gradients: Sequence[Frame | None],
        parameters: Sequence[Frame | None],
    ) -> None:
        """From now on pushes read ``gradients[chunk]``, replies land in ``parameters[chunk]``."""
        self._core = core
        self._gradients = gradients
        self._parameters = parameters

    # -- one turn ------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Handle everything that is here; False if there was nothing."""
        event = self.transport.poll()
        if event is None:
            return False
        while event is not None:
            self._handle(event)
            event = self.transport.poll()
        return True

    def _handle(self, event: Event) -> None:
        if isinstance(event, ControlArrived):
            self._on_control(event.message)
        elif isinstance(event, Sent):
            # Of a push or a pull the answer says the same (transport.base).
            if event.frame.owner is self:
                self._setup_sends -= 1
        elif isinstance(event, PeerLost):
            raise PeerLostError(event.who)
        else:
            self._do(self.core.handle(event))

    @property
    def core(self) -> ClientCore:
        if self._core is None:
            raise InvariantError("a data message came before the client was attached")
        return self._core

    def _do(self, actions: Iterable[ClientAction]) -> None:
        for action in actions:
            if isinstance(action, SendPush):
                frame = self._gradients[action.header.chunk]
                if frame is None:
                    raise InvariantError(f"no gradient memory for chunk {action.header.chunk}")
                action.header.pack_into(frame.header)
                self.transport.send(server_id(action.server), frame)
            elif isinstance(action, AcceptReply):
                frame = self._parameters[action.chunk]
                if frame is None:
                    raise InvariantError(f"no parameter memory for chunk {action.chunk}")
                self.transport.accept(action.ticket, frame)
            elif isinstance(action, SendPull):
                frame = self._pull_frames.setdefault(action.header.chunk, Frame())
                action.header.pack_into(frame.header)
                self.transport.send(server_id(action.server), frame)
            elif isinstance(action, DiscardReply):
                self.transport.accept(action.ticket, Frame(memoryview(bytearray(action.num_bytes))))

    def _on_control(self, message: Control) -> None:
        if isinstance(message, Collected):
            self._collected[message.seq] = message
        elif isinstance(message, Registered):
            self._registered.add(message.server)
        elif isinstance(message, Stop):
            self.is_stopped = True
        elif isinstance(message, Missing):
            told = "; ".join(
                f"{self._describe_group(group)} at iteration {clock}"
                for group, clock in zip(message.groups, message.clocks, strict=True)
            )
            logger.warning("chunk %d waits for %s", message.chunk, told or "no group")
        elif isinstance(message, Absent):
            workers = ", ".join(str(worker) for worker in message.workers)
            logger.warning("the collective waits for worker %s", workers or "none")

    # -- set-up --------------------------------------------------------------------------------

    def send_setup(self, setup: Setup, initial: Iterable[tuple[int, int, Frame]]) -> None:
        """The chief: describe the model to every server and send (chunk, server, values)."""
        for server in self._servers:
            self.transport.send_control(server, setup)
        for chunk, server, frame in initial:
            frame.owner = self
            Header(
                kind=Kind.INIT, sender=self.transport.me, chunk=chunk, length=frame.capacity
            ).pack_into(frame.header)
            self._setup_sends += 1
            self.transport.send(server_id(server), frame)

    @property
    def is_set_up(self) -> bool:
        return not self._setup_sends

    def register(self, group: int, workers: Sequence[int]) -> None:
        """A group's leader: tell every server; :attr:`is_registered` when all have answered."""
        for server in self._servers:
            self.transport.send_control(
                server, Register(group=group, workers=list(workers), clock=0)
            )

    @property
    def is_registered(self) -> bool:
        return len(self._registered) == len(self._servers)

    # -- push and pull -------------------------------------------------------------------------

    def settings(self, hyper: bytes, absent: Sequence[int], servers: Iterable[int]) -> int:
        """The version of these settings; ``servers`` are told first if it is a new one."""
        settings = (hyper, tuple(absent))
        if settings != self._settings:
            self._settings = settings
            self._settings_version += 1
            message = Settings(version=self._settings_version, hyper=hyper, absent=list(absent))
            for server in servers:
                self.transport.send_control(server_id(server), message)
        return self._settings_version

    def begin_push(
        self, *, clock: int, settings: int, weight: float, empty: Collection[int]
    ) -> None:
        self._do(self.core.begin_push(clock=clock, settings=settings, weight=weight, empty=empty))

    def begin_pull(self, *, clock: int, chunks: Collection[int], is_fresh: bool) -> None:
        self._do(self.core.begin_pull(clock=clock, chunks=chunks, is_fresh=is_fresh))

    def push(self, *, clock: int, settings: int, weight: float, empty: Collection[int]) -> None:
        """Push iteration ``clock``; returns with the parameters for the next one in place."""
        self.begin_push(clock=clock, settings=settings, weight=weight, empty=empty)
        self.carry_on(self.wait_for_replies(f"the replies to iteration {clock}"))

    def pull(
        self,
        *,
        clock: int,
        chunks: Collection[int],
        is_fresh: bool = True,
        into: Sequence[Frame | None] | None = None,
    ) -> None:
        """Bring ``chunks`` into the parameter memory, or into other frames."""
        kept = self._parameters
        if into is not None:
            self._parameters = into
        try:
            self.begin_pull(clock=clock, chunks=chunks, is_fresh=is_fresh)
            self.carry_on(self.wait_for_replies("parameters"))
        finally:
            self._parameters = kept

    def wait_for_replies(self, what: str) -> Wait:
        """Until everything that was pushed and asked for is answered."""
        return Wait(lambda: self.core.is_idle, what, ask=self._ask_who_is_missing)

    def _ask_who_is_missing(self) -> None:
        for chunk, server in self.core.awaited()[:1]:
            logger.warning("waiting for chunk %d from server %d", chunk, server)
            self.transport.send_control(server_id(server), WhoIsMissing(chunk=chunk))

    # -- collectives and the end ---------------------------------------------------------------

    def begin_collective(self, name: str, payload: bytes, *, clock: int, group: int | None) -> int:
        """Enter; ``group`` (its leader only) is suspended until all have come. Returns its number,
        for :meth:`collected`."""
        self._seq += 1
        if group is not None:
            for server in self._servers:
                self.transport.send_control(
                    server, Suspend(group=group, clock=clock, seq=self._seq)
                )
        enter = Enter(worker=self._worker, seq=self._seq, name=name, payload=payload)
        self.transport.send_control(REGISTRAR, enter)
        return self._seq

    def collected(self, seq: int) -> list[bytes] | None:
        """What every worker brought, in worker order; None until all have come. Raises
        :class:`CollectiveError`."""
        if seq not in self._collected:
            return None
        answer = self._collected.pop(seq)
        if answer.error:
            raise CollectiveError(answer.error)
        return answer.payloads

    def collective(
        self, name: str, payload: bytes = b"", *, clock: int = 0, group: int | None = None
    ) -> list[bytes]:
        seq = self.begin_collective(name, payload, clock=clock, group=group)
        self.wait_until(
            lambda: seq in self._collected,
            f"the other workers in {name}",
            ask=lambda: self.transport.send_control(
                REGISTRAR, WhoIsAbsent(worker=self._worker, seq=seq)
            ),
        )
        payloads = self.collected(seq)
        assert payloads is not None
        return payloads

    def leave(self, group: int, clock: int) -> None:
        """A group's leader: nobody waits for this group's iterations from ``clock`` on."""
        for server in self._servers:
            self.transport.send_control(server, Leave(group=group, clock=clock))

    def done(self, statistics: dict[str, Any]) -> None:
        """This worker's script has finished; :attr:`is_stopped` when everybody's has."""
        self.transport.send_control(REGISTRAR, Done(worker=self._worker, statistics=statistics))

    def log(self, line: dict[str, Any]) -> None:
        """One line for metrics.jsonl."""
        self.transport.send_control(REGISTRAR, Metrics(line=line))

    def wait_until_stopped(self, waiting: Waiting) -> None:
        """Until everybody's script has finished; that may take as long as it takes."""
        while not self.is_stopped:
            if self.turn():
                waiting.reset()
            else:
                waiting.idle("the other workers to finish")

    def wait_for(self, pending: Pending[T], what: str) -> T:
        """The result of an operation of this worker's group, when it has come."""
        self.carry_on(wait_for_group(pending, what))
        return pending.result()

    def carry_on(self, wait: Wait) -> None:
        """Wait as ``wait`` says."""
        self.wait_until(wait.is_done, wait.what, ask=wait.ask, rest=wait.rest)

    def wait_until(
        self,
        is_done: Callable[[], bool],
        what: str,
        *,
        ask: Callable[[], None] = _nothing,
        rest: Callable[[], None] = _nothing,
    ) -> None:
        """Take turns until ``is_done``; after ``warn_s`` warn and ``ask`` who is missing. See
        :class:`Wait`."""
        waiting = self._waiting
        waiting.reset()
        while not is_done():
            rest()
            if self.turn():
                waiting.reset()
            elif waiting.idle(what):
                logger.warning("still waiting for %s", what)
                ask()
