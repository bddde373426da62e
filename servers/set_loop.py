"""Executes the actions of the state machine of one parameter set, on one server.

It owns the set's executor, its reply frames and its history. It decides nothing
(psdist.servers.protocol.state). It sends but never polls: psdist.servers.loop passes on the events
of its set.

    each = SetLoop(transport, core, options, set_index=0, make_executor=TensorShard)
    for action in each.decide(event): each.execute(action)

Longer than other modules: one method for each action of the state machine.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from psdist.codecs import RAW
from psdist.codecs.checks import NO_CHECKS, Checks, stamped, verify
from psdist.codecs.wire import Wire, payload_rule
from psdist.errors import ProtocolError
from psdist.history.writers import EventKind, ServerHistory
from psdist.protocol.checkpoints import number_of
from psdist.protocol.control import StateHeld
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost
from psdist.protocol.flow import auto_receive_buffers
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import worker_of
from psdist.protocol.optimizer_state import pack_states
from psdist.protocol.optimizers import unpack_hyperparameters
from psdist.protocol.partition import DTYPE_CODES, Chunk, Partition
from psdist.protocol.send_order import forward_ranks
from psdist.servers.protocol.actions import (
    Accept,
    Action,
    Build,
    Built,
    ChangeCodecs,
    ChangeMode,
    EmptyStep,
    Fail,
    Fold,
    HeldBlocks,
    Hold,
    HoldRounds,
    Inherit,
    LeftOut,
    Load,
    LoadState,
    MembershipEvent,
    Missed,
    Receipt,
    Reply,
    ReplyFlow,
    ReplySent,
    ReplyToken,
    SendControl,
    SendState,
    StartSum,
    Step,
    SumMoved,
    TakeSnapshot,
    Unchanged,
    WriteSnapshots,
    num_blocks,
)
from psdist.servers.protocol.state import ServerCore
from psdist.servers.set_store import (
    BuiltSet,
    Contents,
    Log,
    ServerOptions,
    SetStore,
)
from psdist.servers.shard.executor import Executor, ShardSpec
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.transport import Sender

if TYPE_CHECKING:
    from psdist.codecs.chunks import ChunkCodings

logger = logging.getLogger("psdist")


class ReplyFrame(Frame):
    """A frame whose payload is one parameter buffer of one chunk, or nothing; reused for reply
    after reply."""

    __slots__ = ("dtype", "free_list", "set_loop", "token")

    def __init__(
        self,
        payload: memoryview | None,
        *,
        capacity: int,
        dtype: int,
        free_list: list[ReplyFrame],
        set_loop: SetLoop,
    ) -> None:
        super().__init__(payload, capacity=capacity)
        self.dtype = dtype
        self.free_list = free_list
        self.set_loop = set_loop
        self.token: ReplyToken | None = None


_REPLY = int(Kind.REPLY)
_CHECKSUMMED = Flag.CHECKSUMMED
_HEADERS = (-1, -1)
"""Key of frames without payload, instead of (chunk, buffer)."""
_NO_BUFFER = ReplyToken(peer=-1, chunk=-1, buffer=0, implied_by=0, is_sent=True)
"""Token of frames without payload: no buffer waits until they are sent."""


class ShardPart:
    """One server's part of a parameter set: its executor, its codecs and its log.

    A primary (:class:`SetLoop`) and a replica (psdist.servers.replication.shard_replica) carry out
    the changes of a shard with the methods of this class. Equal changes therefore give equal values
    and equal logs on both.
    """

    def __init__(self, server: int, store: SetStore, log: Log) -> None:
        """``server``: the server whose part it is."""
        self._server = server
        self._store = store
        self.executor: Executor | None = None
        """None until the chief has described the set."""
        self._built: Executor
        """The same executor. Only actions after Build read it."""
        self._contents: Contents
        self._wire = store.wire
        self._has_workers_values = True
        """True if a parameter buffer is bit by bit what workers compute on."""
        self._log = log
        self._execute: dict[type, Callable[[Any], None]] = {
            Load: self._load,
            LoadState: self._load_state,
            Step: self._step,
            EmptyStep: self._empty_step,
            MembershipEvent: self._record_membership,
            ChangeMode: self._record_mode,
            ChangeCodecs: self._begin_level,
            Missed: self._missed,
            Inherit: self._inherit,
        }

    @property
    def wire(self) -> Wire:
        """The codecs of the set, at the level that its changes have reached."""
        return self._wire

    @property
    def log(self) -> Log:
        return self._log

    def execute(self, action: Any) -> None:
        self._execute[type(action)](action)

    def close_history(self) -> None:
        self._log.close()

    def _value_checksum(self, chunk: int) -> int | None:
        """Return the checksum of the chunk's values; None without a history or without bytes."""
        return self._log.checksum_of(partial(self._built.value_checksum, chunk))

    def _log_snapshot(self, action: TakeSnapshot) -> None:
        for chunk in action.chunks:
            crc = self._value_checksum(chunk)
            self._log.kept(EventKind.SNAPSHOT, chunk, action.number, crc)

    def _make(self, options: ServerOptions, contents: Contents, built: BuiltSet) -> ShardSpec:
        """The chief has described the set. Return the description of this server's chunks."""
        self._contents, self._wire = contents, contents.wire
        wire, spec = self._wire, contents.spec(options, built)
        self._has_workers_values = wire.is_shared or wire.replies(built.partition) is None
        self.executor = self._built = contents.make_executor(spec)
        return spec

    def _restore_all(self, built: BuiltSet) -> None:
        """Begin with the values and the optimizer state of a checkpoint."""
        number = number_of(built.setup.restore)
        assert number is not None
        for chunk in built.chunks_of(self._server):
            self._contents.restore(self._built, self._store.keeper, built, chunk)
            self._log.kept(EventKind.RESTORE, chunk, number, self._value_checksum(chunk))

    def _load(self, action: Load) -> None:
        self._built.load(action)
        if action.clock >= 0:
            crc = self._log.checksum_of(partial(self._loaded_checksum, action))
            self._log.load(action.chunk, action.group, action.clock, crc)

    def _loaded_checksum(self, action: Load) -> int | None:
        """Return the checksum of what workers compute on; None if a codec changes it."""
        if not self._has_workers_values:
            return None
        return self._built.checksum(action.chunk, action.target, encoded=None)

    def _load_state(self, action: LoadState) -> None:
        self._built.load_state(action)

    def _step(self, action: Step) -> None:
        self._built.step(action)
        self._log.step(action.chunk, action.contributions, action.lr_scale)

    def _empty_step(self, action: EmptyStep) -> None:
        self._log.step(action.chunk, action.contributions)

    def _record_membership(self, action: MembershipEvent) -> None:
        kind = EventKind[action.kind.upper()]
        self._log.member(kind, action.group, action.clock, float(action.workers))

    def _record_mode(self, action: ChangeMode) -> None:
        self._log.mode(action.round, action.mode, action.staleness)

    def _begin_level(self, action: ChangeCodecs) -> None:
        turns, change = self._wire.turns, (action.number, action.round, action.level)
        is_known = 0 <= action.level <= len(self._wire.later)
        if turns is None or not is_known or not turns.begin(*change):
            raise ProtocolError(
                f"server {self._server}: a change to codec level {action.level} from round "
                f"{action.round} on: this run does not have the level, or the change before it is "
                "for a later round"
            )

    def _missed(self, action: Missed) -> None:
        self._log.missed(action.chunk, action.round, action.groups)

    def _inherit(self, action: Inherit) -> None:
        self._log.inherit(action.chunk, action.group, action.clock)


class SetLoop(ShardPart):
    def __init__(
        self,
        transport: Sender,
        core: ServerCore,
        options: ServerOptions,
        *,
        set_index: int,
        held: list[int],
        store: SetStore,
        on_built: Callable[[BuiltSet], None],
    ) -> None:
        """``held``: by server, bytes of the sets described so far; this set adds its own.
        ``on_built`` is called when the chief has described the set, and its executor exists."""
        super().__init__(options.server, store, store.make_log(0))
        self.core = core
        self.set_index = set_index
        self.holds_nothing = False
        """True if the set was described and this server has none of its chunks."""
        self._held = held
        self._transport = transport
        self._me = transport.me
        self._options = options
        self._keeper = store.keeper
        self._checks = self._wire.checks
        is_recorded = isinstance(self._log, ServerHistory)
        self._recorded = Checks("sampled", options.checksum_every) if is_recorded else NO_CHECKS
        self._replies: ChunkCodings | None = None
        """None for raw replies."""
        self._has_checksums = {self._checks, self._recorded} != {NO_CHECKS}
        """True if replies may have checksums, in the message or in the history."""
        self._on_built = on_built
        self._partition: Partition | None = None
        self._reply_frames: dict[tuple[int, int], list[ReplyFrame]] = {}  # not under way
        self._num_reply_frames = 0
        self._happened: deque[SumMoved] = deque()
        self._unreserved: list[int] = []
        """Chunks without memory for their first snapshot."""
        self._execute |= {
            Build: self._build,
            SendState: self._send_state,
            Accept: self._accept,
            StartSum: self._start_sum,
            Fold: self._fold,
            Hold: self._hold,
            Reply: self._reply,
            Unchanged: self._unchanged,
            LeftOut: self._left_out,
            Receipt: self._receipt,
            SendControl: self._send_control,
            TakeSnapshot: self._take_snapshot,
            WriteSnapshots: self._write_snapshots,
            Fail: self._fail,
        }

    def decide(self, event: Offered | Arrived | ControlArrived | PeerLost) -> Iterable[Action]:
        if isinstance(event, Arrived) and event.header.flags & _CHECKSUMMED:
            who = f"server {self._options.server}"
            verify(event.header, event.frame, receiver=who)
        return self.core.handle(event)

    def hold_rounds(self) -> Iterable[Action]:
        """A change is proposed: see :class:`HoldRounds`."""
        return self.core.handle(HoldRounds())

    def take_back(self, frame: ReplyFrame) -> Iterable[Action]:
        """Take back a reply's frame that the transport needs no more."""
        token, frame.token = frame.token, None
        frame.free_list.append(frame)
        return () if token is None or token.is_sent else self.core.handle(ReplySent(token))

    def do(self, actions: Iterable[Action]) -> None:
        execute = self._execute
        for action in actions:
            execute[type(action)](action)
        if self._happened:
            self.do(self.follow_up())

    def follow_up(self) -> Iterator[Action]:
        """Yield the actions that follow from executed ones, for execution one by one after them."""
        while self._happened:
            yield from self.core.handle(self._happened.popleft())

    def take_cost_s(self) -> float:
        """Return the executor's cost since the last call, in seconds of a virtual network."""
        return self.executor.take_cost_s() if self.executor else 0.0

    @property
    def has_open_replies(self) -> bool:
        """True if the transport still has a frame of this loop."""
        return sum(map(len, self._reply_frames.values())) < self._num_reply_frames

    # -- one method per action ----------------------------------------------------------------

    def _build(self, action: Build) -> None:
        options, setup = self._options, action.setup
        contents = self._store.choose(setup, self._wire, self._store.make_executor)
        described = contents.describe(self.set_index, setup, options.shard_weights, self._held)
        partition = self._partition = described.partition
        spec = self._make(options, contents, described)
        mine = spec.chunks
        self.holds_nothing = not mine
        self._unreserved = list(reversed(mine))
        self._replies, self._is_relative = self._wire.replies(partition), self._wire.is_relative
        self._on_built(described)
        count = options.receive_buffers
        if count is None:
            count, why = auto_receive_buffers(
                [partition.chunks[chunk].num_bytes for chunk in mine],
                num_groups=self.core.num_groups,
                slot_bytes=spec.slot_bytes,
            )
            logger.info(
                "parameter set %d: transfer.receive_buffers = %d of %d bytes (auto): %s",
                *(self.set_index, count, spec.slot_bytes, why),
            )
        for setting, num_bytes, what in spec.kept_per_group():
            num_groups = self.core.num_groups
            logger.info(
                "parameter set %d: %s: %d bytes, of what each of %d groups %s",
                *(self.set_index, setting, num_groups * num_bytes, num_groups, what),
            )
        if setup.restore and not self.core.has_taken_over:
            self._restore_all(described)
        slots = self._built.make_slots(count)
        built = Built(
            mine,
            slots,
            initials=payload_rule(None, partition),
            pushes=payload_rule(self._wire.pushes(partition), partition),
            num_pieces=len(partition.pieces),
            num_optimizer_groups=len(unpack_hyperparameters(setup.hyper)),
            blocks=HeldBlocks(
                described.owners, [num_blocks(chunk.length) for chunk in partition.chunks]
            ),
            lengths=contents.state_lengths(described),
            replies=(
                ReplyFlow(
                    sizes=[self._reply_bytes(chunk) for chunk in partition.chunks],
                    rank=forward_ranks(partition),
                    most_bytes=options.reply_window,
                )
                if options.reply_window is not None
                else None
            ),
            are_replies_apart=self._wire.has_copies,
            state=spec.state_parts,
        )
        self.do(self.core.handle(built))

    def _take_snapshot(self, action: TakeSnapshot) -> None:
        keeper = self._keeper
        memory, regions = keeper.memory, list[Region]()
        for chunk in action.chunks:
            regions += self._built.snapshot(chunk, memory, set_index=self.set_index, is_later=True)
        if not action.is_again:
            self._log_snapshot(action)
        keeper.keep(self.set_index, regions, misses=action.misses)
        self._log.flush()  # `psdist check` of a resumed run needs this log

    def reserve_snapshot(self, memory: SnapshotMemory) -> bool:
        """Reserve snapshot memory for one more chunk. Return False if none can be reserved now."""
        if not self._unreserved:
            return False
        chunk = self._unreserved[-1]
        is_done = self._built.reserve_snapshot(chunk, memory, set_index=self.set_index)
        if is_done:
            self._unreserved.pop()
        return is_done

    def _write_snapshots(self, action: WriteSnapshots) -> None:
        self._keeper.write(action.checkpoint)

    def _send_state(self, action: SendState) -> None:
        states, values = self._built.state(action.chunk, action.start)
        answer = StateHeld(
            number=action.number,
            chunk=action.chunk,
            start=action.start,
            described=pack_states(states),
            values=values,
        )
        self._transport.send_control(action.peer, answer, self.set_index)

    def _accept(self, action: Accept) -> None:
        self._built.settle(action.slot)
        self._transport.accept(action.ticket, action.slot)

    def _start_sum(self, action: StartSum) -> None:
        self._built.start_sum(action)

    def _fold(self, action: Fold) -> None:
        self._built.fold(action)

    def _hold(self, action: Hold) -> None:
        # The state machine gets SumMoved after all its earlier actions: the next ones may step a
        # chunk, and a reply is stamped with the log's position when it leaves.
        self._happened.append(SumMoved(action.chunk, self._built.hold(action)))

    def _reply(self, action: Reply) -> None:
        token = action.token
        key = (token.chunk, token.buffer)
        frame = self._reply_frame(key)
        frame.token = token
        length = frame.capacity
        codec, encoded = RAW.code, None
        self._built.begin_reply(action)
        if self._replies is not None:
            codec = self._replies.at(action.clock).codec.code
            length = self._built.encode(action, into=frame.payload)
            if not self._is_relative and frame.payload is not None:
                encoded = frame.payload[:length]
        header = Header(
            kind=_REPLY,
            sender=self._me,
            chunk=token.chunk,
            clock=action.clock,
            pull_number=action.pull_number,
            length=length,
            position=self._log.position,
            min_done=action.min_done,
            flags=action.flags,
            dtype=frame.dtype,
            codec=codec,
            generation=self.core.generation,
            set_index=self.set_index,
            chunk_version=action.version,
        )
        if self._has_checksums:
            header = self._with_checksums(header, key, token.peer, frame.payload, encoded)
        header.pack_into(frame.header)
        self._transport.send(token.peer, frame)

    def _with_checksums(
        self,
        header: Header,
        key: tuple[int, int],
        peer: int,
        payload: memoryview | None,
        encoded: memoryview | None,
    ) -> Header:
        """Add the checksums that are due for this reply, in the message and in the history."""
        if self._checks.carries(header.chunk, header.clock):
            # For raw parameters the executor keeps the checksum: it is computed once per step.
            is_raw = self._replies is None
            crc = self._built.checksum(*key, encoded=None) if is_raw else None
            header = stamped(header, payload, crc=crc)
        if self._replies is not None and header.flags & Flag.FRESH:  # no codec was applied
            return header
        return self._with_record(header, key, peer, encoded)

    def _send_header(self, peer: int, header: Header) -> None:
        """Send a message without payload."""
        frame = self._reply_frame(_HEADERS)
        frame.token = _NO_BUFFER
        header.pack_into(frame.header)
        self._transport.send(peer, frame)

    def _unchanged(self, action: Unchanged) -> None:
        header = Header(
            kind=_REPLY,
            sender=self._me,
            chunk=action.chunk,
            clock=action.clock,
            pull_number=action.pull_number,
            position=self._log.position,
            min_done=action.min_done,
            flags=action.flags | Flag.UNCHANGED,
            generation=self.core.generation,
            set_index=self.set_index,
            chunk_version=action.version,
        )
        key = (action.chunk, action.buffer)
        self._send_header(action.peer, self._with_record(header, key, action.peer, encoded=None))

    def _with_record(
        self, header: Header, key: tuple[int, int], peer: int, encoded: memoryview | None
    ) -> Header:
        """Record the checksum of the values that ``peer`` will compute on, if one is due."""
        if not self._recorded.carries(header.chunk, header.clock):
            return header
        crc = self._built.checksum(*key, encoded=encoded, clock=header.clock, reader=peer)
        if crc is None:
            return header
        worker = worker_of(peer)
        self._log.checksum(header.chunk, crc, worker=worker, clock=header.clock)
        return header._replace(flags=header.flags | Flag.RECORDED)

    def _reply_frame(self, key: tuple[int, int]) -> ReplyFrame:
        free = self._reply_frames.get(key)
        if free is None:
            free = self._reply_frames[key] = []
        return free.pop() if free else self._new_reply_frame(key, free)

    def _left_out(self, action: LeftOut) -> None:
        header = Header(
            kind=Kind.MISSED,
            sender=self._me,
            chunk=action.chunk,
            clock=action.clock,
            min_done=action.joins_at,
            generation=self.core.generation,
            set_index=self.set_index,
        )
        self._send_header(action.peer, header)

    def _receipt(self, action: Receipt) -> None:
        header = Header(
            kind=Kind.RECEIPT,
            sender=self._me,
            chunk=action.chunk,
            clock=action.clock,
            pull_number=action.pull_number,
            set_index=self.set_index,
        )
        self._send_header(action.peer, header)

    def _reply_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of the largest reply about ``chunk``."""
        return chunk.num_bytes if self._replies is None else self._replies.largest(chunk.index)

    def _new_reply_frame(self, key: tuple[int, int], free: list[ReplyFrame]) -> ReplyFrame:
        assert self._partition is not None
        self._num_reply_frames += 1
        if key == _HEADERS:
            return ReplyFrame(None, capacity=0, dtype=0, free_list=free, set_loop=self)
        chunk = self._partition.chunks[key[0]]
        return ReplyFrame(
            self._built.payload(*key),
            capacity=self._reply_bytes(chunk),
            dtype=int(DTYPE_CODES[chunk.dtype]),
            free_list=free,
            set_loop=self,
        )

    def _send_control(self, action: SendControl) -> None:
        self._transport.send_control(action.peer, action.message, self.set_index)

    def _fail(self, action: Fail) -> None:
        raise action.error

    def statistics(self) -> dict[str, Any]:
        """Return counts of the state machine and bytes of the shard, for summary.json."""
        counts: dict[str, Any] = dataclasses.asdict(self.core.statistics())
        counts |= {"position": self._log.position, "checksums": self._log.num_checksums}
        if self.executor is not None:
            counts.update(dataclasses.asdict(self.executor.statistics()))
        return counts | self._keeper.statistics(self.set_index)
