"""The worker's loop of the set of tables: its messages carry rows, of varying number.

    loop = TableLoop.after(first_loop)
    loop.take_tables(specs, wire, owners=owners, credits=4, first_clock=0)
    yield from loop.push_rows(clock=0, hyper=packed, weight=1.0, rows=rows, wanted=wanted)
    loop.carry_on(loop.wait_for_replies())
    rows = loop.take_rows()                   # of the ids that were wanted, or pulled

A chunk of the set is a part: its rows of every table (psdist.tables.specs). Which message leaves
when is decided by the state machine of any set; this class fills in payloads.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence, Sized
from typing import NamedTuple, Self

import numpy as np

from psdist.codecs.checks import NO_CHECKS
from psdist.codecs.wire import Wire
from psdist.errors import ProtocolError
from psdist.protocol.events import Arrived, Frame
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import describe_peer, server_id, worker_id
from psdist.protocol.partition import Chunk, Partition
from psdist.tables.payloads import pack_ids, pack_push, read_rows, reply_bytes
from psdist.tables.specs import Ids, Rows, TableSpecs
from psdist.tables.store import first_rows
from psdist.tables.wire import RowWire
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.protocol.actions import Action, SendPull
from psdist.workers.push_transforms import ChecksumPush, PushTransform, RawPush
from psdist.workers.pushes import Pushes
from psdist.workers.replies import Replies


class _Memory:
    """Stands for the parameters of the set: an element of each part, which nothing reads."""

    def parameter_frame(self, chunk: Chunk) -> Frame:
        return Frame(memoryview(bytearray(chunk.num_bytes)))

    gradient_frame = parameter_frame


class RowReplies(Replies):
    """Replies land in memory of their own, as large as the rows that were asked for."""

    def __init__(self, wire: Wire, partition: Partition) -> None:
        super().__init__(wire, partition)
        self._codings = None

    def expect(self, chunk: int, num_bytes: int) -> None:
        """The next reply about ``chunk`` has at most this many bytes."""
        self._in_place[chunk] = Frame(np.empty(num_bytes, np.uint8).data)

    def payload(self, chunk: int) -> memoryview:
        frame = self._in_place[chunk]
        assert frame.payload is not None
        return frame.payload[: frame.num_received]

    def decode(self, chunk: int, *, clock: int) -> bool:
        del chunk, clock  # the rows of all parts are read together
        return True


class RowPush(RawPush):
    """The payloads of pushes are made beforehand."""

    def __init__(self, loop: TableLoop, codec: int) -> None:
        super().__init__(_Memory())
        self._loop = loop
        self._codec = codec

    def apply(self, header: Header, frame: Frame) -> Header:
        if not header.length:
            return header
        payload = self._loop.outgoing[header.chunk]
        frame.payload, frame.capacity = payload, len(payload)
        self._loop.core.transfers.count_coded(len(payload) - header.length)
        return header._replace(codec=self._codec, length=len(payload))


class Split(NamedTuple):
    """Ids, by table, and where the rows of each part belong."""

    ids: Sequence[Ids]
    at: Sequence[Sequence[np.ndarray[tuple[int], np.dtype[np.intp]]]]
    """By table and part: positions in ``ids``."""

    @classmethod
    def of(cls, specs: TableSpecs, ids: Sequence[Ids]) -> Split:
        return cls(ids, [specs.split(table, each) for table, each in enumerate(ids)])

    def of_part(self, part: int) -> list[Ids]:
        """Return, by table, the ids of the part."""
        return [ids[at[part]] for ids, at in zip(self.ids, self.at, strict=True)]


class TableLoop(WorkerLoop):
    outgoing: dict[int, memoryview]
    """Part -> the payload of its next push or pull."""

    @classmethod
    def after(cls, first: WorkerLoop) -> Self:
        """Return the loop of the next set of this worker."""
        core = first.core.next_set()
        return cls(
            first.transport, core, waiting=first._waiting, now_s=first.now_s, sets=first.sets
        )

    def take_tables(
        self,
        specs: TableSpecs,
        wire: Wire,
        *,
        owners: Sequence[int],
        credits: int,
        first_clock: int,
    ) -> None:
        """The tables are divided among the servers. ``wire``: of the run's parameters; ``owners``:
        by part: its server; the rest as for :meth:`take_slice`."""
        partition, of_rows = specs.partition(), RowWire.of(wire.of_set(), specs)
        self.specs, self._first = specs, first_rows(specs)
        self.outgoing = {}
        self._wanted: Split
        """Ids whose rows the outstanding replies are to bring."""
        self.awaited: Collection[int] = ()
        """The parts that they are about."""
        self._unreceived: set[tuple[int, int, int]] = set()
        """Part, clock and number of rows that were sent before a push."""
        self.replies: RowReplies = RowReplies(of_rows, partition)
        self.core.take_slice(
            partition,
            owners=owners,
            credits=credits,
            replies=self.replies.rule,
            first_clock=first_clock,
        )
        self._frames, self._chunks = _Memory(), partition.chunks
        self.core.handlers[Arrived] = self._on_arrived
        self._codec = int(of_rows.pushes(partition).codec.code)
        encoding = RowPush(self, self._codec)
        transforms: list[PushTransform] = [encoding]
        if of_rows.checks != NO_CHECKS:
            transforms.append(ChecksumPush(of_rows.checks))
        self.pushes = Pushes(self._chunks, self.core.mine, encoding, transforms)

    # -- what leaves ---------------------------------------------------------------------------

    def push_rows(
        self,
        *,
        clock: int,
        hyper: bytes,
        weight: float,
        rows: Sequence[tuple[Ids, Rows]] | None,
        wanted: Sequence[Ids],
    ) -> Generator[Wait, None, None]:
        """Push the gradients of ``rows``, by table, and ask for the rows of the ``wanted`` ids.
        None: the iteration is skipped, and the replies bring no rows. Rows above ``max_rows`` leave
        before, and are awaited: payloads may overtake one another."""
        mine, empty = self.core.mine, set[int]()
        if rows is None:
            empty, wanted = set(mine), [each[:0] for each in wanted]
        split = Split.of(self.specs, wanted)
        if rows is not None:
            pushed, longer = Split.of(self.specs, [ids for ids, _ in rows]), {}
            for part in mine:
                own = [
                    (ids[at[part]], values[at[part]])
                    for (ids, values), at in zip(rows, pushed.at, strict=True)
                ]
                longer[part] = self._pack(part, own, split.of_part(part))
            for number in range(1, 1 + max(map(len, longer.values()), default=0)):
                for part, payloads in longer.items():
                    if number <= len(payloads):
                        self._send_part(part, clock, number, payloads[number - 1])
                yield self._wait_until(lambda: not self._unreceived)
        self._expect(split, mine)
        self.begin_push(clock=clock, hyper=hyper, absent=(), weight=weight, empty=empty)

    def _pack(
        self, part: int, rows: Sequence[tuple[Ids, Rows]], wanted: Sequence[Ids]
    ) -> list[memoryview]:
        """Make the payload of a push. Return those of messages before it, with the rows above
        ``max_rows``."""
        before, nothing = list[memoryview](), [each[:0] for each in wanted]
        while sum(len(ids) for ids, _ in rows) > self.specs.max_rows:
            counts = counts_within([ids for ids, _ in rows], self.specs.max_rows)
            first, rows = (
                [(ids[of], values[of]) for (ids, values), of in zip(rows, these, strict=True)]
                for these in ([slice(n) for n in counts], [slice(n, None) for n in counts])
            )
            before.append(pack_push(self.specs, first, nothing))
        self.outgoing[part] = pack_push(self.specs, rows, wanted, num_before=len(before))
        return before

    def _send_part(self, part: int, clock: int, number: int, payload: memoryview) -> None:
        core, frame = self.core, Frame(payload)
        server = core.transfers.owners[part]
        Header(
            kind=int(Kind.PUSH_ROWS),
            sender=worker_id(core.seat.worker),
            group=core.seat.group,
            chunk=part,
            clock=clock,
            length=len(payload),
            dtype=core.transfers.dtypes[part],
            codec=self._codec,
            generation=core.transfers.generation,
            map_version=number,
            set_index=core.set_index,
        ).pack_into(frame.header)
        self._unreceived.add((part, clock, number))
        self.transport.send(server_id(server), frame)

    def _on_arrived(self, event: Arrived) -> list[Action]:
        """Take the receipts of messages before a push; all else is the state machine's."""
        header, peer = event.header, event.peer
        if header.kind != Kind.RECEIPT or not header.map_version:
            return self.core.transfers.on_arrived(event)
        receipt = header.chunk, header.clock, header.map_version
        owners = self.core.transfers.owners
        if receipt not in self._unreceived or peer != server_id(owners[header.chunk]):
            raise ProtocolError(
                f"worker {self.core.seat.worker}: {describe_peer(peer)} sent a receipt of rows of "
                f"part {header.chunk}, iteration {header.clock}, number {header.map_version}, "
                "which were not sent to it"
            )
        self._unreceived.discard(receipt)
        return []

    def begin_pull_of_rows(self, ids: Sequence[Ids], *, is_fresh: bool) -> None:
        """Ask for the rows of ``ids``, by table, at most ``max_rows`` of a part: the newest there
        are, or those that the mode allows for the next push."""
        split = Split.of(self.specs, ids)
        chosen = [
            part for part in range(self.specs.num_parts) if any(map(len, split.of_part(part)))
        ]
        for part in chosen:
            self.outgoing[part] = pack_ids(self.specs, split.of_part(part))
        self._expect(split, chosen)
        self.begin_pull(clock=self.core.clock, chunks=chosen, is_fresh=is_fresh)

    def _send_pull(self, action: SendPull) -> None:
        payload = self.outgoing[action.header.chunk]
        header = action.header._replace(
            kind=int(Kind.PULL_ROWS),
            length=len(payload),
            dtype=self.core.transfers.dtypes[action.header.chunk],
            codec=self._codec,
        )
        frame = Frame(payload)
        header.pack_into(frame.header)
        self.transport.send(action.peer, frame)

    @property
    def num_awaited(self) -> list[int]:
        """By part: the rows that the outstanding replies are to bring."""
        parts = range(self.specs.num_parts)
        return [sum(map(len, self._wanted.of_part(part))) for part in parts]

    # -- what comes ----------------------------------------------------------------------------

    def _expect(self, split: Split, parts: Collection[int]) -> None:
        self._wanted, self.awaited = split, parts
        for part in parts:
            counts = list(map(len, split.of_part(part)))
            self.replies.expect(part, reply_bytes(self.specs, counts))

    def take_rows(self) -> list[tuple[Ids, Rows]]:
        """Return the ids and rows, by table, that the replies have brought; all have come."""
        split = self._wanted
        found = [
            np.empty((len(ids), table.dim), np.float32)
            for ids, table in zip(split.ids, self.specs.tables, strict=True)
        ]
        for part in self.awaited:
            ids = split.of_part(part)
            try:
                rows = read_rows(self.specs, self.replies.payload(part), ids, self._first)
            except ProtocolError as error:
                server = self.core.transfers.owners[part]
                raise ProtocolError(f"server {server} sent {error}") from None
            for into, at, values in zip(found, split.at, rows, strict=True):
                into[at[part]] = values
        return list(zip(split.ids, found, strict=True))


def counts_within(blocks: Sequence[Sized], most: int) -> list[int]:
    """Return how many of each block, by table, are among the first ``most`` of all."""
    counts = list[int]()
    for block in blocks:
        counts.append(min(len(block), most - sum(counts)))
    return counts
