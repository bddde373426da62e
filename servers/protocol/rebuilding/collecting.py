"""Out of whose values a dead server's shard is made anew, and what it contains then; pure.

Of each chunk every group's owner of the slice tells which reply it has received last, whole. Their
positions are all of one log, the dead server's: the highest is the newest, and contains all that
was ever acknowledged to anybody who lives. Left open is one update of a group at most, which was
sent and not answered. It is

- contained, where that reply says that every group's update of that round was, and the group
  counted then: it has not been suspended since its own last reply, which was before that one;
- not contained, where the reply is the group's own last one, or of the same version of the chunk;
- else nobody knows. It is taken to be contained, so that no update is ever applied twice, and
  recorded as *lost*: at most one of each group and chunk.

So in sync nothing is lost but in rare cases: a version contains all groups' updates of a round or
none.

    collecting = Collecting(server=1, groups=groups, num_bytes=[{0: 4096, 3: 4096}])
    collecting.on_held(worker_id(0), held)    # behind the last of all: [SendControl(HeldWanted)]
    collecting.on_values(worker_id(0), message)
    collecting.is_complete
    collecting.chunk(set_index, 3).clocks     # by group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import HeldValues, HeldVersions, HeldWanted
from psdist.protocol.held import Sent
from psdist.protocol.ids import describe_peer, worker_id
from psdist.servers.protocol.actions import SendControl


class Held(NamedTuple):
    """What the owner of a group's slice has told of a chunk."""

    worker: int
    position: int
    min_done: int
    version: int
    round: int
    """How many pushes of the group were answered."""
    sent: Sent
    """The next one."""
    has_paused: bool = False
    """Whether the group has been suspended since that reply."""


@dataclass(frozen=True, slots=True)
class RebuiltChunk:
    """As it goes on."""

    worker: int
    """Whose values it has."""
    group: int
    """Of that worker."""
    position: int
    """In the dead server's log, of the reply that had brought these."""
    version: int
    clocks: tuple[int, ...]
    """By group: how many of its updates count as contained."""
    lost: tuple[int, ...]
    """Groups whose last one of these may be lost."""


def rebuild(by_group: Sequence[Held]) -> RebuiltChunk:
    """What becomes of a chunk of which the groups' owners hold these."""
    newest = max(by_group, key=lambda each: each.position)
    clocks, lost = list[int](), list[int]()
    for group, each in enumerate(by_group):
        is_sent = each.sent is not Sent.NOTHING
        is_contained = newest.min_done > each.round and not each.has_paused
        same_version = each.version == newest.version and each.sent is not Sent.EMPTY
        is_before = each.position == newest.position or same_version
        counts = is_sent and not is_before
        clocks.append(each.round + counts)
        if counts and not is_contained:
            lost.append(group)
    return RebuiltChunk(
        worker=newest.worker,
        group=by_group.index(newest),
        position=newest.position,
        version=newest.version,
        clocks=tuple(clocks),
        lost=tuple(lost),
    )


class Collecting:
    def __init__(
        self,
        *,
        server: int,
        groups: Sequence[Sequence[int]],
        num_bytes: Sequence[Mapping[int, int]],
    ) -> None:
        """``server``: whose shard it is; ``groups``: the workers of each; ``num_bytes``: by
        parameter set, of each chunk of the shard, its values'."""
        self._server = server
        self._groups = groups
        self._group_of = {worker: group for group, each in enumerate(groups) for worker in each}
        self._num_bytes = num_bytes
        self._told: list[set[int]] = [set() for _ in num_bytes]
        """By set, the workers that have told what they hold."""
        self._held: list[dict[int, dict[int, Held]]] = [
            {chunk: {} for chunk in chunks} for chunks in num_bytes
        ]
        """By set, chunk and group."""
        self.left: dict[tuple[int, int], int] = {}
        """By (set, group), of groups that have left: after how many iterations."""
        self._chunks: list[dict[int, RebuiltChunk]] = [{} for _ in num_bytes]
        """By set, once all have told."""
        self._received: list[dict[int, int]] = [dict.fromkeys(chunks, 0) for chunks in num_bytes]
        """By set and chunk, bytes of its values that have come."""

    def on_held(self, peer: int, message: HeldVersions) -> list[SendControl]:
        """With the last one: whose values are wanted."""
        index, worker = message.set_index, message.worker
        group = self._group_of.get(worker)
        if group is None or peer != worker_id(worker) or not 0 <= index < len(self._told):
            self._refuse(peer, f"told what worker {worker} holds of parameter set {index}")
        if worker in self._told[index]:
            self._refuse(peer, f"told twice what it holds of parameter set {index}")
        if message.is_setting:
            raise PeerLostError(
                describe_peer(self._server),
                "in the middle of a job.push, whose values nobody but the chief has: restart the "
                "job (psdist run --resume goes on from the last checkpoint)",
            )
        self._told[index].add(worker)
        self._note(peer, group, message)
        if message.left >= 0:
            if worker != self._groups[group][0]:
                self._refuse(peer, f"told that group {group} has left, for which it does not speak")
            self.left[index, group] = message.left
        if any(len(told) < len(self._group_of) for told in self._told):
            return []
        return self._choose()

    def _note(self, peer: int, group: int, message: HeldVersions) -> None:
        columns = (
            *(message.positions, message.min_dones, message.versions),
            *(message.rounds, message.sent, message.paused),
        )
        held = self._held[message.set_index]
        if any(len(column) != len(message.chunks) for column in columns):
            self._refuse(peer, "told what it holds, and not all of it")
        for chunk, position, min_done, version, number, sent, paused in zip(
            message.chunks, *columns, strict=True
        ):
            is_known = sent in list(Sent)
            if chunk not in held or group in held[chunk] or min(position, version, number) < 0:
                self._refuse(peer, f"told what it holds of chunk {chunk}, which makes no sense")
            if not is_known or version < 1:
                self._refuse(peer, f"told that it holds version {version} of chunk {chunk}")
            held[chunk][group] = Held(
                message.worker, position, min_done, version, number, Sent(sent), paused
            )

    def _choose(self) -> list[SendControl]:
        wanted: dict[tuple[int, int], list[int]] = {}
        for index, held in enumerate(self._held):
            for chunk, by_group in held.items():
                missing = set(range(len(self._groups))) - by_group.keys()
                if missing:
                    raise ProtocolError(
                        f"server {self._server}: nobody of groups {sorted(missing)} has told what "
                        f"it holds of chunk {chunk} of parameter set {index}"
                    )
                found = rebuild([by_group[group] for group in sorted(by_group)])
                self._chunks[index][chunk] = found
                wanted.setdefault((found.worker, index), []).append(chunk)
        return [
            SendControl(
                worker_id(worker), HeldWanted(server=self._server, set_index=index, chunks=chunks)
            )
            for (worker, index), chunks in sorted(wanted.items())
        ]

    def on_values(self, peer: int, message: HeldValues) -> None:
        """A part of the values that were asked for; the parts of a chunk come in order."""
        index, chunk = message.set_index, message.chunk
        found = self._chunks[index].get(chunk) if 0 <= index < len(self._chunks) else None
        if found is None or peer != worker_id(found.worker):
            self._refuse(peer, f"sent values of chunk {chunk} of parameter set {index}")
        received, whole = self._received[index][chunk], self._num_bytes[index][chunk]
        if message.start != received or not 0 < len(message.values) <= whole - received:
            self._refuse(
                peer,
                f"sent {len(message.values)} bytes of chunk {chunk} from byte {message.start} on; "
                f"{received} of {whole} were here",
            )
        self._received[index][chunk] += len(message.values)

    @property
    def is_complete(self) -> bool:
        """Whether all has come that was asked for."""
        is_chosen = all(len(told) == len(self._group_of) for told in self._told)
        return is_chosen and all(map(self._has_all, range(len(self._chunks))))

    def _has_all(self, index: int) -> bool:
        return self._received[index] == self._num_bytes[index]

    def chunk(self, set_index: int, chunk: int) -> RebuiltChunk:
        return self._chunks[set_index][chunk]

    def position(self, set_index: int) -> int:
        """The highest in the dead server's log that anybody knows: there the new one begins."""
        return max((each.position for each in self._chunks[set_index].values()), default=0)

    @property
    def num_lost(self) -> int:
        """Updates that may be lost, each for a chunk."""
        return sum(len(each.lost) for chunks in self._chunks for each in chunks.values())

    def _refuse(self, peer: int, what: str) -> NoReturn:
        raise ProtocolError(f"the shard of server {self._server}: {describe_peer(peer)} {what}")
