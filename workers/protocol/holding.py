"""What this worker holds of a shard whose server has died, for whoever makes it anew; pure.

    transfers = HoldingTransfers(seat, owners=owners, ...)
    transfers.held(1)                     # columns, by chunk of server 1 in this worker's slice

Of each chunk of the slice the newest reply that has come whole is kept, as its bytes were
(``KeepReply``): in place the script may have written, or half of the next one lie. What is told is
true from the moment on in which the network has told of the death: nothing of that server's comes
any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from psdist.protocol.events import Arrived
from psdist.protocol.header import Flag, Kind
from psdist.protocol.held import Sent
from psdist.workers.protocol.actions import Action, KeepReply
from psdist.workers.protocol.resending import ResendingTransfers

_REPLY = int(Kind.REPLY)


class Kept(NamedTuple):
    """What the newest reply about a chunk said, and what has been since."""

    position: int
    min_done: int
    version: int
    num_pauses: int
    """How often the group had been suspended before it."""


class HeldChunks(NamedTuple):
    """Of a dead server's chunks in the slice, column by column (HeldVersions)."""

    chunks: list[int]
    positions: list[int]
    min_dones: list[int]
    versions: list[int]
    rounds: list[int]
    sent: list[int]
    paused: list[bool]


class HoldingTransfers(ResendingTransfers):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._kept: dict[int, Kept] = {}
        self._num_pauses = 0

    def pause(self) -> None:
        """The group is suspended: nobody waits for it until it counts again."""
        self._num_pauses += 1

    def on_arrived(self, event: Arrived) -> list[Action]:
        header = event.header
        chunk = header.chunk
        is_awaited = self.awaited.get(chunk) == (header.clock, header.pull_number)
        is_kept = header.kind == _REPLY and is_awaited and not self._is_copying
        actions = super().on_arrived(event)
        if not is_kept:
            return actions
        self._kept[chunk] = Kept(
            header.position, header.min_done, header.chunk_version, self._num_pauses
        )
        if header.flags & Flag.UNCHANGED:
            return actions
        return [KeepReply(chunk), *actions]

    def version_kept(self, chunk: int) -> int:
        """0 where no reply about it has come."""
        return self._kept[chunk].version if chunk in self._kept else 0

    def held(self, server: int) -> HeldChunks:
        """What is held of the chunks of ``server``, which has died."""
        chunks = [chunk for chunk in self.mine if self.owners[chunk] == server]
        kept = [self._kept.get(chunk, Kept(0, 0, 0, 0)) for chunk in chunks]
        under_way = [self._under_way(chunk) for chunk in chunks]
        return HeldChunks(
            chunks=chunks,
            positions=[each.position for each in kept],
            min_dones=[each.min_done for each in kept],
            versions=[each.version for each in kept],
            rounds=[number for number, _ in under_way],
            sent=[int(sent) for _, sent in under_way],
            paused=[each.num_pauses < self._num_pauses for each in kept],
        )

    def _under_way(self, chunk: int) -> tuple[int, Sent]:
        """How many pushes of it have been answered, and how far the next one has come."""
        awaited = self.awaited.get(chunk)
        if awaited is None or awaited[1]:
            return self._num_pushed(chunk), Sent.NOTHING
        clock, _ = awaited
        # One that is to be sent again has left before.
        is_new = any(
            each.chunk == chunk and not each.flags & Flag.AGAIN
            for each in self._queues[self.owners[chunk]]
        )
        if is_new:
            return clock, Sent.NOTHING
        return clock, Sent.GRADIENT if self._sent[chunk].length else Sent.EMPTY
