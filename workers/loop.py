"""The worker's loop: executes what the worker's state machine decides, and waits.

Two layers of calls: ``begin_*``, ``finish`` and ``turn`` never block (an actor in a virtual network
uses these), the others wait with back-off, warnings that name who is missing and a deadline.

    loop = make_loop(transport, seat, waiting=Waiting(...))       # psdist.workers.assembly
    loop.take_slice(partition, owners=owners, credits=4, frames=memory)
    loop.push(clock=0, hyper=packed, absent=(), weight=1.0, empty=())

An iteration may also leave chunk by chunk (``begin_iteration``, ``push_chunk``, ``finish_push``),
and single chunks may be waited for (``wait_for_chunk``).

It owns the frames in which replies about this worker's chunks land (those of its pushes, encoded or
not, are psdist.workers.pushes's) and moves bytes into parameter memory only while a push or pull is
under way. It decides nothing: that is psdist.workers.protocol.core.

Longer than other modules: it has a method for each action, and calls that wait and that do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from psdist.codecs.checks import verify
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.controller.steps import Term
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.collected import Brought
from psdist.protocol.control import (
    Absent,
    JoinAccepted,
    Metrics,
    Missing,
    Moved,
    Setup,
    StateValues,
)
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import Flag
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.protocol.partition import Chunk, Partition
from psdist.tracing import Span
from psdist.transport import Transport
from psdist.transport.waiting import Waiting
from psdist.workers.group.channel import Pending, T
from psdist.workers.model.optimizer_state import OwnState, StateSink
from psdist.workers.protocol.actions import (
    AcceptReply,
    Action,
    DecodeReply,
    DiscardReply,
    InitialSent,
    KeepState,
    MovePeer,
    RestoreHeld,
    SendControl,
    SendInitial,
    SendPull,
    SendPush,
    SendState,
    SendValues,
    Warn,
)
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.push_transforms import ChunkFrames, DeviceGradients, transforms_of
from psdist.workers.pushes import Pushes
from psdist.workers.replies import Replies

logger = logging.getLogger("psdist")

_REST_S = 0.02
"""How long a wait for the group blocks at a time: it returns at once when the group has come, and
turns of the loop between are for warnings."""


def _nothing() -> None: ...


class Wait(NamedTuple):
    """An awaited condition, for the loop or for an actor in a virtual network."""

    is_done: Callable[[], bool]
    what: Callable[[], str]
    """In words, for warnings and errors; after "still waiting for"."""
    ask: Callable[[], None] = _nothing
    """Asks who is missing; the answer is a warning."""
    rest: Callable[[], None] = _nothing
    """Blocks for a while, or until it is done: for what does not come through the transport."""
    span: Span = Span.WAIT_REPLIES
    """The kind of this wait in traces."""


def wait_for_group(pending: Pending[Any], what: str) -> Wait:
    """``what``: the call in which this worker waits for the others of its group."""
    return Wait(
        pending.is_done,
        lambda: f"the other workers of this worker's group in {what}",
        rest=lambda: pending.wait(_REST_S),
        span=Span.WAIT_GROUP,
    )


@dataclass(frozen=True, slots=True)
class _InitialValues:
    """Owner of a frame with the initial values of a chunk."""

    loop: WorkerLoop
    chunk: int


_CHECKSUMMED = Flag.CHECKSUMMED
_RETRANSMIT = Flag.RETRANSMIT
_DISCARDED: Final = object()
"""Owner of the memory of a message that is discarded."""


def _never() -> bool:
    return False


def _is_answer(event: Event) -> bool:
    return isinstance(event, ControlArrived) and isinstance(event.message, Missing | Absent)


class WorkerLoop:
    """The loop of one parameter set. The loops of a worker share its transport, and each handles
    the events of all sets in its turn."""

    def __init__(
        self,
        transport: Transport,
        core: WorkerCore,
        *,
        waiting: Waiting,
        now_s: Callable[[], float] = time.monotonic,
        sets: list[WorkerLoop] | None = None,
    ) -> None:
        """``now_s()``: the job's clock; ``sets``: the loops of the earlier sets."""
        self.transport = transport
        self.core = core
        self.sets = [] if sets is None else sets
        """The loops of all sets of this worker, by index."""
        self.sets.append(self)
        self.now_s = now_s
        """Clock that measures this worker's iterations, in seconds."""
        self._waiting = waiting
        self.pushes: Pushes
        """The pipeline of this worker's pushes, once there is a slice."""
        self.replies: Replies
        """The frames of this worker's replies, once there is a slice."""
        self._frames: ChunkFrames | None = None
        self._chunks: Sequence[Chunk] = ()
        self._pulls: dict[int, Frame] = {}
        self._state_source: OwnState | None = None
        self._state_sink: StateSink | None = None
        self.on_turn: Callable[[], None] = _nothing
        """Called after every turn, of the first set's loop: this worker's group works while the
        script runs."""
        self._execute: dict[type, Callable[[Any], None]] = {
            SendPush: self._send_push,
            SendPull: self._send_pull,
            SendInitial: self._send_initial,
            SendValues: self._send_values,
            MovePeer: self._move_peer,
            SendState: self._send_state,
            KeepState: self._keep_state,
            SendControl: self._send_control,
            AcceptReply: self._accept_reply,
            DecodeReply: self._decode_reply,
            RestoreHeld: self._restore_held,
            DiscardReply: self._discard_reply,
            Warn: self._warn,
        }

    def next_set(self) -> WorkerLoop:
        """Return the loop of another parameter set of this worker."""
        core = self.core.next_set()
        return WorkerLoop(
            self.transport, core, waiting=self._waiting, now_s=self.now_s, sets=self.sets
        )

    def take_slice(
        self,
        partition: Partition,
        *,
        owners: Sequence[int],
        credits: int,
        frames: ChunkFrames,
        wire: Wire = RAW_WIRE,
        order: Sequence[int] = (),
        first_clock: int = 0,
        on_device: DeviceGradients | None = None,
    ) -> None:
        """The model is cut and lies behind ``frames``; see :meth:`WorkerCore.take_slice`. Coded
        messages on the ``wire`` have frames of their own. ``on_device``: see
        :func:`psdist.workers.push_transforms.transforms_of`."""
        wire = wire.of_set()
        self.replies = Replies(wire, partition)
        self.core.take_slice(
            partition,
            owners=owners,
            credits=credits,
            replies=self.replies.rule,
            order=order,
            first_clock=first_clock,
            turns=wire.turns,
            num_levels=1 + len(wire.later),
        )
        self._frames, self._chunks = frames, partition.chunks
        stages = transforms_of(self.core, partition, frames, wire=wire, on_device=on_device)
        self.pushes = Pushes(partition.chunks, self.core.mine, *stages)
        self.receive_into(frames.parameter_frame)

    def take_over(self, mine: Sequence[int]) -> None:
        """The slice is ``mine`` from now on, see :meth:`WorkerCore.take_over_chunks`; raw pushes
        and replies."""
        assert self._frames is not None
        for index in mine:
            if index not in self.replies:
                self.pushes.add(index)
                chunk = self._chunks[index]
                self.replies.receive_into(chunk, self._frames.parameter_frame(chunk))
        self._do(self.core.take_over_chunks(mine))

    def push_for_the_dead(self) -> None:
        """See :meth:`WorkerCore.push_for_the_dead`."""
        self.replies.take_in_place()
        self._do(self.core.push_for_the_dead())

    def tell_group(self, standing: bytes) -> None:
        """Tell the remaining workers of the group where this one stands (:class:`Regroup`)."""
        self._do(self.core.regrouping.tell(standing))

    def receive_into(self, parameter_frame: Callable[[Chunk], Frame]) -> None:
        """From now on replies land in these frames; nothing is awaited now."""
        if not self.core.is_idle:
            raise InvariantError("memory for replies was exchanged while some were awaited")
        for index in self.core.mine:
            chunk = self._chunks[index]
            self.replies.receive_into(chunk, parameter_frame(chunk))

    # -- one turn ------------------------------------------------------------------------------

    def turn(self, until: Callable[[], bool] = _never) -> bool:
        """Handle all events that are here, or those before ``until()``. Return False if there was
        no event, or only an answer about missing ranks, which this worker requests in a wait."""
        poll = self.transport.poll
        event = poll()
        has_come = False
        while event is not None:
            has_come = has_come or not _is_answer(event)
            self._take(event)
            if until():
                break
            event = poll()
        self.sets[0].on_turn()
        return has_come

    def hear(self, event: Event) -> None:
        """Handle an event that came before this loop existed."""
        self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Offered):
            index = event.set_index
        elif isinstance(event, Arrived):
            header, frame = event.header, event.frame
            if frame is not None and frame.owner is _DISCARDED:
                return
            index = header.set_index
            if header.flags & _CHECKSUMMED:
                verify(header, frame, receiver=f"worker {self.core.seat.worker}")
        elif isinstance(event, Sent):
            self._on_sent(event.frame)
            return
        elif isinstance(event, PeerLost) or isinstance(event.message, Moved):
            for each in self.sets:  # each has something under way
                each._do(each.core.handle(event))
            return
        else:
            index = event.set_index
        if index >= len(self.sets):
            raise ProtocolError(
                f"worker {self.core.seat.worker}: {describe_peer(event.peer)} sent a message about "
                f"parameter set {index}; this worker has {len(self.sets)}"
            )
        each = self.sets[index]
        each._do(each.core.handlers[type(event)](event))  # most events: without another call

    def _on_sent(self, frame: Frame) -> None:
        # The answer to a push or a pull has the same meaning (transport.base). A loop before this
        # one may have used the same transport; its frames are not ours.
        owner = frame.owner
        if isinstance(owner, _InitialValues) and owner.loop in self.sets:
            owner.loop._do(owner.loop.core.handle(InitialSent(owner.chunk)))

    def _do(self, actions: Iterable[Action]) -> None:
        execute = self._execute
        for action in actions:
            execute[type(action)](action)

    # -- one method per action -----------------------------------------------------------------

    def _send_push(self, action: SendPush) -> None:
        self.transport.send(action.peer, self.pushes.frame(action.header))

    def _send_pull(self, action: SendPull) -> None:
        chunk = action.header.chunk
        frame = self._pulls.get(chunk)
        if frame is None or action.header.flags & _RETRANSMIT:
            frame = self._pulls[chunk] = Frame()
        action.header.pack_into(frame.header)
        self.transport.send(action.peer, frame)

    def _send_initial(self, action: SendInitial) -> None:
        frame = self._values(action.header.chunk)
        frame.owner = _InitialValues(self, action.header.chunk)
        self.transport.send(action.peer, self.pushes.value_frame(action.header, frame))

    def _send_values(self, action: SendValues) -> None:
        frame = self._values(action.header.chunk)
        self.transport.send(action.peer, self.pushes.value_frame(action.header, frame))

    def _values(self, chunk: int) -> Frame:
        """A new frame, of the chunk's parameters in memory."""
        assert self._frames is not None
        return self._frames.parameter_frame(self._chunks[chunk])

    def _move_peer(self, action: MovePeer) -> None:
        self.transport.move(action.peer, action.host)

    def _send_state(self, action: SendState) -> None:
        assert self._state_source is not None
        values = self._state_source.part(action.chunk, action.start)
        message = StateValues(chunk=action.chunk, start=action.start, values=values)
        self.transport.send_control(action.peer, message, self.core.set_index)

    def _keep_state(self, action: KeepState) -> None:
        assert self._state_sink is not None
        self._state_sink.keep(action.message, sender=describe_peer(action.peer))

    def _send_control(self, action: SendControl) -> None:
        self.transport.send_control(action.peer, action.message, action.set_index)

    def _accept_reply(self, action: AcceptReply) -> None:
        self.transport.accept(action.ticket, self.replies.landing[action.chunk])

    def _decode_reply(self, action: DecodeReply) -> None:
        if not self.replies.decode(action.chunk, clock=action.clock):
            self.core.transfers.held.drop([action.chunk])

    def _restore_held(self, action: RestoreHeld) -> None:
        self.replies.restore(action.chunk)

    def _discard_reply(self, action: DiscardReply) -> None:
        frame = Frame(memoryview(bytearray(action.num_bytes)))
        frame.owner = _DISCARDED
        self.transport.accept(action.ticket, frame)

    def _warn(self, action: Warn) -> None:
        logger.warning("%s", action.text)

    # -- calls that do not wait ----------------------------------------------------------------

    def begin_setup(self, setup: Setup) -> None:
        self._do(self.core.begin_setup(setup))

    def begin_register(self) -> None:
        self._do(self.core.begin_register())

    def begin_join(self) -> None:
        """A substitute has prepared all sets, and joins the job."""
        self._do(self.core.membership.begin_join(num_sets=len(self.core.sets)))

    def begin_push(
        self,
        *,
        clock: int,
        hyper: bytes,
        absent: Sequence[int],
        weight: float,
        empty: Collection[int],
    ) -> None:
        """Push iteration ``clock`` at once, see :meth:`WorkerCore.begin_iteration`; chunks in
        ``empty`` are pushed without bytes."""
        self.begin_iteration(clock=clock, hyper=hyper, absent=absent, weight=weight)
        self.finish_push(empty=empty)

    def begin_iteration(
        self, *, clock: int, hyper: bytes, absent: Sequence[int], weight: float
    ) -> None:
        """See :meth:`WorkerCore.begin_iteration`."""
        self.replies.take_in_place()
        self._do(self.core.begin_iteration(clock=clock, hyper=hyper, absent=absent, weight=weight))

    def push_chunk(self, chunk: int, *, is_empty: bool) -> None:
        """See :meth:`WorkerCore.push_chunk`. The chunk's gradient stays as it is until
        :meth:`wait_for_chunk` has ended."""
        self._do(self.core.transfers.push_chunk(chunk, is_empty=is_empty))

    def finish_push(self, *, empty: Collection[int], absent: Sequence[int] | None = None) -> None:
        """See :meth:`WorkerCore.finish_push`."""
        self._do(self.core.finish_push(empty=empty, absent=absent))

    def begin_pull(self, *, clock: int, chunks: Collection[int], is_fresh: bool) -> None:
        """See :meth:`WorkerCore.begin_pull`."""
        self.replies.take_in_place()
        self._do(self.core.transfers.begin_pull(clock=clock, chunks=chunks, is_fresh=is_fresh))

    def begin_copy(self, frames: Sequence[Frame], *, clock: int) -> None:
        """Fill a frame for every chunk of the model with the newest there is; the parameter memory
        stays as it is."""
        self.replies.take_copy(self._chunks, frames)
        self._do(self.core.transfers.begin_copy(clock=clock, chunks=range(len(frames))))

    def begin_load(self, *, clock: int) -> None:
        """See :meth:`WorkerCore.begin_load`."""
        self._do(self.core.begin_load(clock=clock))

    def begin_collective(self, name: str, payload: bytes = b"", *, values: bytes = b"") -> None:
        """See :meth:`WorkerCore.begin_collective`."""
        self._do(self.core.begin_collective(name, payload, values=values))

    def finish(self, statistics: dict[str, Any]) -> None:
        """This worker's script has finished, and with its leader's the group's."""
        self._do(self.core.begin_leave())
        self._do(self.core.begin_done(statistics))

    def log(self, line: dict[str, Any]) -> None:
        """One line for metrics.jsonl."""
        self.transport.send_control(COORDINATOR, Metrics(line=line))

    # -- calls that wait -----------------------------------------------------------------------

    def join(self, setup: Setup | None = None) -> None:
        """Come into the job: the chief describes the model (``setup``), a group's leader registers
        it; returns when all servers have answered."""
        if setup is not None:
            self.begin_setup(setup)
        if self.core.seat.is_leader:
            self.begin_register()
        self.carry_on(
            self._wait_until(lambda: not self.core.membership.is_joining, Span.WAIT_SERVERS)
        )

    def join_running(self, waiting: Waiting) -> JoinAccepted | None:
        """Join the running job as a substitute. Return the place, or None if the job has ended."""
        membership = self.core.membership
        self.turn()
        if not membership.is_stopped:
            self.begin_join()
            wait = self._wait_until(lambda: membership.welcome is not None or membership.is_stopped)
            self.carry_on(wait, waiting)
        return membership.welcome

    def push(
        self,
        *,
        clock: int,
        hyper: bytes,
        absent: Sequence[int],
        weight: float,
        empty: Collection[int],
    ) -> None:
        """Push iteration ``clock``; returns with the parameters for the next one in place."""
        self.begin_push(clock=clock, hyper=hyper, absent=absent, weight=weight, empty=empty)
        self.carry_on(self.wait_for_replies())

    def pull(self, *, clock: int, chunks: Collection[int], is_fresh: bool = True) -> None:
        """Bring ``chunks`` of this worker's slice into the parameter memory."""
        self.begin_pull(clock=clock, chunks=chunks, is_fresh=is_fresh)
        self.carry_on(self.wait_for_replies())

    def copy(self, frames: Sequence[Frame], *, clock: int) -> None:
        """See :meth:`begin_copy`; returns when the frames are filled."""
        try:
            self.begin_copy(frames, clock=clock)
            self.carry_on(self.wait_for_replies())
        finally:
            self.replies.take_in_place()

    def send_state(self, parts: Iterable[tuple[int, int]], source: OwnState) -> None:
        """See :meth:`WorkerCore.begin_sending_state`; returns when servers have taken all."""
        try:
            self._state_source = source
            self._do(self.core.begin_sending_state(parts))
            self.carry_on(self._wait_until(lambda: self.core.state.is_idle))
        finally:
            self._state_source = None

    def fetch_state(self, parts: Iterable[tuple[int, int]], sink: StateSink) -> None:
        """See :meth:`WorkerCore.begin_fetching_state`; returns when ``sink`` has all."""
        try:
            self._state_sink = sink
            self._do(self.core.begin_fetching_state(parts))
            self.carry_on(self._wait_until(lambda: self.core.state.is_idle))
        finally:
            self._state_sink = None

    def collective(self, name: str, payload: bytes = b"", *, values: bytes = b"") -> Brought:
        """Return the contributions of every worker to this collective, when all have come. Raises
        :class:`CollectiveError`."""
        self.begin_collective(name, payload, values=values)
        self.carry_on(
            self._wait_until(lambda: self.core.collectives.is_answered, Span.WAIT_COLLECTIVE)
        )
        return self.core.collectives.take()

    def hold(self, what: str, clocks: Sequence[int]) -> str | None:
        """Wait at a boundary of iterations until all workers hold. Return what they hold for; None
        if this worker continues to its next boundary."""
        meetings = self.core.meetings
        self._do(meetings.hold(what, clocks=clocks))
        self.carry_on(self._wait_until(lambda: not meetings.is_held))
        return meetings.take()

    def steps_of(self, term: Term) -> Generator[Wait, None, tuple[int, ...]]:
        """Return the local steps of each group in a term. It is the first request for this term."""
        steps = self.core.steps
        self._do([steps.ask(term)])
        who = describe_peer(COORDINATOR)
        what = f"{who} to say how many local steps groups make"
        yield Wait(lambda: steps.is_known(term), lambda: what)
        return steps.take(term)

    def begin_waiting(self, clock: int) -> None:
        """A step after ``clock`` iterations begins, or what else may wait for other workers."""
        self._do(self.core.meetings.begin(self.core.set_index, clock))

    def wait_until_stopped(self, waiting: Waiting) -> None:
        """Wait until the scripts of all workers have finished; ``waiting`` has its own limits."""
        wait = self._wait_until(lambda: self.core.membership.is_stopped, Span.WAIT_END)
        self.carry_on(wait, waiting)

    def wait_for(self, pending: Pending[T], what: str) -> T:
        """The result of an operation of this worker's group, when it has come."""
        self.carry_on(wait_for_group(pending, what))
        return pending.result()

    def wait_for_replies(self) -> Wait:
        """Until everything that was pushed and asked for is answered."""
        self.core.transfers.require_handed_over()
        return self._wait_until(self._is_answered)

    def _is_answered(self) -> bool:
        """Return True if all replies are here, and no server holds other values than this worker
        has decoded. Such chunks are asked for again."""
        transfers = self.core.transfers
        if transfers.awaited or transfers.is_pushing:
            return False
        if not self.replies.differing:
            return True
        chunks = sorted(self.replies.differing)
        logger.warning(
            "worker %d: chunks %s are not what their servers have sent, by the checksum of what "
            "the replies so far make of them; asking for all of their values",
            self.core.seat.worker,
            chunks,
        )
        self.replies.differing.clear()
        self.begin_pull(clock=self.core.clock, chunks=chunks, is_fresh=False)
        return False

    def wait_for_chunk(self, chunk: int) -> Wait:
        """Until what was pushed or asked for of ``chunk`` is answered, and lies in place."""
        self.core.transfers.require_handed_over(chunk)
        return self._wait_until(lambda: self.core.transfers.is_done(chunk))

    def _wait_until(self, is_done: Callable[[], bool], span: Span = Span.WAIT_REPLIES) -> Wait:
        """For what the machine waits for now."""
        return Wait(is_done, self.core.awaits, ask=self._ask_who_is_missing, span=span)

    def _ask_who_is_missing(self) -> None:
        self._do(self.core.ask_who_is_missing())

    def carry_on(self, wait: Wait, waiting: Waiting | None = None) -> None:
        """Take turns until ``wait`` is done; after ``warn_s`` warn and ask who is missing."""
        waiting = waiting or self._waiting
        waiting.reset()
        is_done, what = wait.is_done, ""
        while not is_done():
            wait.rest()
            if self.turn(is_done):
                waiting.reset()
                continue
            what = what or wait.what()
            if waiting.idle(what):
                logger.warning("still waiting for %s", what)
                wait.ask()
