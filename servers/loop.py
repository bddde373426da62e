"""The server's loop: events from the transport, through the state machines, to an executor.

It owns the executor, the reply frames and the history; it decides nothing about consistency
(psdist.servers.protocol.state) nor about who has come to a collective
(psdist.servers.protocol.registrar).

    loop = ServerLoop(transport, core, options, make_executor=TensorShard)
    loop.run(waiting)                                     # on a real network
    network.spawn(server_id(0), loop.actor())             # in a virtual one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from psdist.codecs.checks import Checks, stamped, verify
from psdist.codecs.raw import RAW, Raw
from psdist.codecs.wire import RAW_WIRE, Wire, payload_rule
from psdist.history.writers import EventCount, EventKind, ServerHistory
from psdist.protocol.control import Control, Finish, Finished
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Sent
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import REGISTRAR, worker_of
from psdist.protocol.optimizers import check_mode, traits, unpack_hyperparameters
from psdist.protocol.partition import DTYPE_CODES, Partition
from psdist.servers.protocol.actions import (
    Accept,
    Action,
    Build,
    Built,
    EmptyStep,
    Fail,
    Fold,
    Load,
    MembershipEvent,
    Reply,
    ReplySent,
    ReplyToken,
    SendControl,
    StartSum,
    Step,
)
from psdist.servers.protocol.registrar import Complete, Registrar, RegistrarAction
from psdist.servers.protocol.state import ServerCore
from psdist.servers.shard.executor import Executor, MakeExecutor, ShardSpec
from psdist.transport.base import Transport
from psdist.transport.waiting import Waiting


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server's loop needs to know beside its state machine."""

    server: int
    shard_weights: tuple[float, ...]
    """What part of the model each server holds (Partition.shard)."""
    mode: str
    receive_buffers: int
    extra_optimizers: tuple[str, ...] = ()
    checksum_every: int = 16
    wire: Wire = RAW_WIRE


class _ReplyFrame(Frame):
    """A frame whose payload is one parameter buffer of one chunk; reused for reply after reply."""

    __slots__ = ("dtype", "free_list", "token")

    def __init__(
        self,
        payload: memoryview | None,
        *,
        capacity: int,
        dtype: int,
        free_list: list[_ReplyFrame],
    ) -> None:
        super().__init__(payload, capacity=capacity)
        self.dtype = dtype
        self.free_list = free_list
        self.token: ReplyToken | None = None


_REPLY = int(Kind.REPLY)


class ServerLoop:
    def __init__(
        self,
        transport: Transport,
        core: ServerCore,
        options: ServerOptions,
        *,
        make_executor: MakeExecutor,
        history: ServerHistory | None = None,
        registrar: Registrar | None = None,
        on_registrar: Callable[[RegistrarAction], None] = lambda _action: None,
        on_built: Callable[[Partition, tuple[int, ...]], None] = lambda _partition, _owners: None,
    ) -> None:
        """``make_executor`` is called when the chief has described the model, and then
        ``on_built(partition, owners)``. ``registrar`` on server 0 only; ``on_registrar`` gets its
        actions that concern files and people (everything but SendControl)."""
        self.transport = transport
        self.core = core
        self.executor: Executor | None = None
        self.registrar = registrar
        self.is_finished = False
        self._is_asked_to_finish = False
        self._holds_nothing = False
        self._options = options
        self._checks = options.wire.checks
        self._recorded = Checks("sampled", options.checksum_every)
        self._codec = options.wire.reply.code
        self._is_encoding = not isinstance(options.wire.reply, Raw)
        self._make_executor = make_executor
        self._history = history
        self._log = history or EventCount()
        self._on_registrar = on_registrar
        self._on_built = on_built
        self._partition: Partition | None = None
        self._reply_frames: dict[tuple[int, int], list[_ReplyFrame]] = {}  # not under way
        self._num_reply_frames = 0
        self._execute: dict[type, Callable[[Any], None]] = {
            Build: self._build,
            Load: self._load,
            Accept: self._accept,
            StartSum: self._start_sum,
            Fold: self._fold,
            Step: self._step,
            EmptyStep: self._empty_step,
            Reply: self._reply,
            SendControl: self._send_control,
            MembershipEvent: self._record_membership,
            Fail: self._fail,
        }

    def run(self, waiting: Waiting, *, on_idle: Callable[[], None] = lambda: None) -> None:
        """Serve until the registrar says that the job is complete; nothing that this loop has sent
        is under way then. ``on_idle`` is called between events; a server waits as long as its
        workers need, so waiting never times out here."""
        while not self.is_finished:
            if self.turn():
                waiting.reset()
                if self._holds_nothing:
                    waiting.relax()
            else:
                waiting.idle("messages")
                on_idle()

    def actor(
        self, *, on_idle: Callable[[], None] = lambda: None
    ) -> Generator[float | None, None, None]:
        """As ``run``, for a virtual network: wakes for every message, and sleeps for what an
        action costs before it executes the next, so that replies leave when the work is done."""
        while True:
            event = self.transport.poll()
            if event is not None:
                for action in self._decide(event):
                    self._execute[type(action)](action)
                    cost_s = self.executor.take_cost_s() if self.executor else 0.0
                    if cost_s:
                        yield cost_s
                continue
            if self._is_asked_to_finish:
                self._finish_if_all_is_over()
            if self.is_finished:  # nothing more will arrive and wake it
                return
            on_idle()
            yield None

    def turn(self) -> bool:
        """Handle everything that is here; False if there was nothing."""
        event = self.transport.poll()
        if event is None:
            return False
        while event is not None:
            self._handle(event)
            event = self.transport.poll()
        if self._is_asked_to_finish:
            self._finish_if_all_is_over()
        return True

    def _handle(self, event: Event) -> None:
        self._do(self._decide(event))

    def _decide(self, event: Event) -> Iterable[Action]:
        """What follows from ``event``, after telling whoever it is for."""
        if isinstance(event, Sent):
            return self._take_back(event.frame)
        if isinstance(event, ControlArrived) and self._handle_outside_core(
            event.peer, event.message
        ):
            return ()
        if isinstance(event, Arrived) and event.header.flags & Flag.CHECKSUMMED:
            who = f"server {self._options.server}"
            verify(event.header, event.frame, receiver=who)
        return self.core.handle(event)

    def _take_back(self, frame: Frame) -> Iterable[Action]:
        if not isinstance(frame, _ReplyFrame) or frame.token is None:
            return ()
        token, frame.token = frame.token, None
        frame.free_list.append(frame)
        return () if token.is_sent else self.core.handle(ReplySent(token))

    def _finish_if_all_is_over(self) -> None:
        # Finish comes from the registrar: it may overtake the Leave of a worker, whose message
        # would stay unreceived and whose leave would be missing in the history. And the network
        # may tell of a reply long after its worker has gone on: whoever uses the transport after
        # this loop would be told of a frame that is not theirs.
        if self.core.has_members or self._has_open_replies:
            return
        self._is_asked_to_finish = False
        answer = Finished(server=self._options.server, statistics=self.statistics())
        self.transport.send_control(REGISTRAR, answer)
        if self.registrar is None:
            self._close_history()
            self.is_finished = True

    def _handle_outside_core(self, peer: int, message: Control) -> bool:
        """Handle what is the loop's or the registrar's; False for what is the core's."""
        if isinstance(message, Finish) and peer == REGISTRAR:
            self._is_asked_to_finish = True
            return True
        if self.registrar is not None and isinstance(message, Registrar.TAKES):
            for action in self.registrar.handle(peer, message):
                if isinstance(action, SendControl):
                    self._send_control(action)
                else:
                    self._on_registrar(action)
                if isinstance(action, Complete):
                    self._close_history()
                    self.is_finished = True
            return True
        return False

    @property
    def _has_open_replies(self) -> bool:
        """Whether the network still has a frame of this loop's."""
        return sum(map(len, self._reply_frames.values())) < self._num_reply_frames

    def _close_history(self) -> None:
        if self._history is not None:
            self._history.close()

    def _do(self, actions: Iterable[Action]) -> None:
        execute = self._execute
        for action in actions:
            execute[type(action)](action)

    # -- one method per action ----------------------------------------------------------------

    def _build(self, action: Build) -> None:
        options, setup = self._options, action.setup
        marks = traits(setup.optimizer, extra=options.extra_optimizers)
        check_mode(marks, options.mode)
        partition = self._partition = Partition.decode(setup.partition)
        owners = partition.shard(options.shard_weights)
        mine = [chunk for chunk, owner in enumerate(owners) if owner == options.server]
        self._holds_nothing = not mine
        spec = ShardSpec(
            partition=partition,
            chunks=tuple(mine),
            optimizer=setup.optimizer,
            traits=marks,
            hyper=setup.hyper,
            wire=options.wire,
            extra_optimizers=options.extra_optimizers,
        )
        self.executor = self._make_executor(spec)
        self._on_built(partition, owners)
        slots = self.executor.make_slots(options.receive_buffers)
        built = Built(
            mine,
            slots,
            initials=payload_rule(RAW, partition),
            pushes=payload_rule(options.wire.push, partition),
            num_pieces=len(partition.pieces),
            num_optimizer_groups=len(unpack_hyperparameters(setup.hyper)),
        )
        self._do(self.core.handle(built))

    def _load(self, action: Load) -> None:
        self._built.load(action)

    def _accept(self, action: Accept) -> None:
        self.transport.accept(action.ticket, action.slot)

    def _start_sum(self, action: StartSum) -> None:
        self._built.start_sum(action)

    def _fold(self, action: Fold) -> None:
        self._built.fold(action)

    def _step(self, action: Step) -> None:
        self._built.step(action)
        self._log.step(action.chunk, action.contributions, action.lr_scale)

    def _empty_step(self, action: EmptyStep) -> None:
        self._log.step(action.chunk, action.contributions)

    def _reply(self, action: Reply) -> None:
        token = action.token
        key = (token.chunk, token.buffer)
        free = self._reply_frames.get(key)
        if free is None:
            free = self._reply_frames[key] = []
        frame = free.pop() if free else self._new_reply_frame(key, free)
        frame.token = token
        length = frame.capacity
        encoded = None
        if self._is_encoding:
            length = self._built.encode(*key, clock=action.clock, into=frame.payload)
            encoded = frame.payload[:length] if frame.payload is not None else None
        header = Header(
            kind=_REPLY,
            sender=self.transport.me,
            chunk=token.chunk,
            clock=action.clock,
            pull_number=action.pull_number,
            length=length,
            position=self._log.position,
            min_done=action.min_done,
            flags=action.flags,
            dtype=frame.dtype,
            codec=self._codec,
        )
        if self._checks.carries(token.chunk, action.clock):
            # Of raw parameters the executor keeps it: it is computed once per step.
            crc = None if self._is_encoding else self._built.checksum(*key, encoded=None)
            header = stamped(header, frame.payload, crc=crc)
        if self._history is not None and self._recorded.carries(token.chunk, action.clock):
            crc = self._built.checksum(*key, encoded=encoded)
            if crc is not None:
                header = header._replace(flags=header.flags | Flag.RECORDED)
                worker = worker_of(token.peer)
                self._history.checksum(token.chunk, crc, worker=worker, clock=action.clock)
        header.pack_into(frame.header)
        self.transport.send(token.peer, frame)

    def _new_reply_frame(self, key: tuple[int, int], free: list[_ReplyFrame]) -> _ReplyFrame:
        assert self._partition is not None
        self._num_reply_frames += 1
        chunk = self._partition.chunks[key[0]]
        return _ReplyFrame(
            self._built.payload(*key),
            capacity=self._options.wire.reply.sizes(chunk)[1],
            dtype=int(DTYPE_CODES[chunk.dtype]),
            free_list=free,
        )

    def _send_control(self, action: SendControl) -> None:
        self.transport.send_control(action.peer, action.message)

    def _record_membership(self, action: MembershipEvent) -> None:
        kind = EventKind[action.kind.upper()]
        self._log.member(kind, action.group, action.clock, float(action.workers))

    def _fail(self, action: Fail) -> None:
        raise action.error

    @property
    def _built(self) -> Executor:
        assert self.executor is not None
        return self.executor

    def statistics(self) -> dict[str, Any]:
        """For summary.json: counts of the state machine and bytes of the shard."""
        counts = dataclasses.asdict(self.core.statistics())
        counts |= {"position": self._log.position, "checksums": self._log.num_checksums}
        if self.executor is not None:
            counts.update(dataclasses.asdict(self.executor.statistics()))
        return counts
