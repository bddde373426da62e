"""The state of a server's part of a parameter set on its replica, and the effect of records; pure.

``apply(record)`` is the only dispatcher over the changes of a shard: it checks the record, changes
the state and returns the actions that make the same change of the replica's values and log. The
state suffices to continue as the primary: by chunk its version and the updates that it contains, by
group its membership. It lacks the messages that the primary had received and not applied. Workers
send these again.

A replica that is made during training begins with :class:`SnapshotBegin`. One
:class:`ChunkRecord` for each chunk follows, between the changes of chunks that it already has.

    state = ShardState(chunks=(0, 2), num_groups=2, num_state_parts=0)
    state.apply(StepRecord(chunk=0, groups=[0, 1], clocks=[0, 0], ...), gradient)   # [Step(...)]
    state.clocks[0]                       # [1, 1]

Longer than other modules: it has one method for each record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import (
    Action,
    ChangeCodecs,
    ChangeMode,
    EmptyStep,
    Inherit,
    Load,
    LoadState,
    MembershipEvent,
    SlotContent,
    Step,
    TakeSnapshot,
)
from psdist.servers.protocol.membership import GroupState
from psdist.servers.protocol.replication.records import (
    LOSSES,
    ChunkRecord,
    EvictRecord,
    HeldRoundsRecord,
    LevelRecord,
    MemberRecord,
    ModeRecord,
    Record,
    ResumedRecord,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRecord,
    StateRecord,
    StepRecord,
    ValuesRecord,
)

_STANDINGS = {
    "join": ((GroupState.UNREGISTERED, GroupState.WAITING), GroupState.ACTIVE),
    "suspend": ((GroupState.ACTIVE,), GroupState.SUSPENDED),
    "resume": ((GroupState.SUSPENDED,), GroupState.ACTIVE),
    "leave": ((GroupState.ACTIVE,), GroupState.LEFT),
}
"""Kind of a membership event -> standings of the group before it, and the one after it."""

_NOTHING: Final = Frame()


@dataclass(slots=True)
class CompareValues:
    """Raise if the checksum of the values that workers have is not ``crc``."""

    chunk: int
    crc: int


@dataclass(slots=True)
class RestoreChunk:
    """The chunk gets the values and the optimizer state that the record describes."""

    record: ChunkRecord
    carried: Frame


@dataclass(slots=True)
class BeginLog:
    """The replica's log begins at ``position`` of the shard's log."""

    keeper: int
    position: int


Change: TypeAlias = Action | CompareValues | RestoreChunk | BeginLog
"""An action that a replica executes for a record."""


class ShardState:
    def __init__(
        self,
        *,
        chunks: Sequence[int],
        num_groups: int,
        num_state_parts: int,
        first: Sequence[int] = (),
        is_restored: bool = False,
        num_substitutes: int = 0,
    ) -> None:
        """``first``: the clock at which each group begins, nothing for 0; ``num_state_parts``: the
        number of parts of optimizer state that the chief sends the server; ``is_restored``: values
        and state come from a checkpoint; ``num_substitutes``: the last groups, which may join
        after others have failed."""
        self.first = list(first or [0] * num_groups)
        self.clocks = {chunk: list(self.first) for chunk in chunks}
        """Chunk -> by group: the number of its updates that the chunk contains."""
        self.versions = dict.fromkeys(chunks, 1)
        self.loaded = set(chunks) if is_restored else set[int]()
        """Chunks that have values."""
        self.newest_loads = dict.fromkeys(chunks, 0)
        """Chunk -> number of the values that the chief set last."""
        self.standings = [GroupState.UNREGISTERED] * (num_groups - num_substitutes)
        self.standings += [GroupState.WAITING] * num_substitutes
        self.stops = list(self.first)
        """By group: the iterations after which it stopped, if it does not count."""
        self.num_updates = self.num_steps = 0
        """Updates in all chunks, and steps with a gradient."""
        self.resumed_up_to = 0
        self.is_kept = False
        """True if chunks were copied for the checkpoint of a collective that has not ended."""
        self.generation = 0
        """The view number."""
        self.dead: tuple[int, ...] = ()
        """Workers that have failed."""
        self.chief = 0
        """The worker with the chief's duties."""
        self.modes: list[ChangeMode] = []
        """Changes of the mode, in order."""
        self.levels: list[ChangeCodecs] = []
        """Changes of the codecs, in order."""
        self.held_above: int | None = None
        """While a change is proposed, no parameters are sent for rounds above this one."""
        self.is_partial = False
        """True while a replica that was made during training lacks a part of the set."""
        self._missing = set[int]()
        """Chunks that have not arrived."""
        self._has_begun = False
        """True if the collectives that ended before the set began are known."""
        self._num_state_parts = num_state_parts
        self._apply: dict[type, Callable[[Any, Frame], list[Change]]] = {
            StepRecord: self._on_step,
            ValuesRecord: self._on_values,
            StateRecord: self._on_state,
            MemberRecord: self._on_member,
            EvictRecord: self._on_evict,
            ResumedRecord: self._on_resumed,
            SnapshotRecord: self._on_snapshot,
            ModeRecord: self._on_mode,
            LevelRecord: self._on_level,
            HeldRoundsRecord: self._on_held_rounds,
            SnapshotBegin: self._on_snapshot_begin,
            ChunkRecord: self._on_chunk,
            SnapshotEnd: self._on_snapshot_end,
        }

    @property
    def is_complete(self) -> bool:
        """True if values and state are here, and all groups have joined."""
        if self.is_partial:
            return False
        has_groups = self._has_begun and GroupState.UNREGISTERED not in self.standings
        return has_groups and not self._num_state_parts and len(self.loaded) == len(self.clocks)

    @property
    def has_members(self) -> bool:
        """True if a group has not joined yet, or not left. Substitutes need not join."""
        return not {GroupState.LEFT, GroupState.DEAD, GroupState.WAITING}.issuperset(self.standings)

    def apply(self, record: Record, carried: Frame = _NOTHING) -> list[Change]:
        """Return the actions that make the record's change, in order.

        ``carried``: the bytes of the record, ``num_received`` of them. Raises
        :class:`ProtocolError` for a record that cannot follow those before it: a chunk contains
        every update exactly once, in the order of its group."""
        return self._apply[type(record)](record, carried)

    def _on_step(self, record: StepRecord, carried: Frame) -> list[Change]:
        self._require(record.chunk)
        clocks, groups = self.clocks[record.chunk], record.groups
        if record.chunk not in self.loaded or groups != sorted(set(groups)):
            self._refuse(f"a step of groups {groups} on chunk {record.chunk}")
        for group, clock in zip(groups, record.clocks, strict=True):
            if not 0 <= group < len(clocks) or clocks[group] != clock:
                at = clocks[group] if 0 <= group < len(clocks) else None
                self._refuse(
                    f"iteration {clock} of group {group} in chunk {record.chunk}, which contains "
                    f"{at} of it"
                )
            clocks[group] = clock + 1
            self.num_updates += 1
        if not record.hyper:
            if carried.num_received:
                self._refuse(f"a step without a gradient on chunk {record.chunk}, with bytes")
            return [EmptyStep(record.chunk, record.contributions)]
        self.num_steps += 1
        self.versions[record.chunk] += 1
        step = Step(
            chunk=record.chunk,
            gradient=carried,
            content=SlotContent.SUM if record.is_sum else SlotContent.GRADIENT,
            gradient_scale=record.gradient_scale,
            lr_scale=record.lr_scale,
            hyper=record.hyper,
            absent=frozenset(record.absent),
            source=0,
            target=0,
            contributions=record.contributions,
        )
        return [step] if record.held < 0 else [CompareValues(record.chunk, record.held), step]

    def _on_values(self, record: ValuesRecord, carried: Frame) -> list[Change]:
        chunk, number = record.chunk, record.number
        self._require(chunk)
        is_first = chunk not in self.loaded
        if is_first == bool(number) or number < self.newest_loads[chunk]:
            self._refuse(f"values number {number} of chunk {chunk}")
        self.loaded.add(chunk)
        if number:
            self.newest_loads[chunk] = number
            self.versions[chunk] += 1
        return [Load(chunk, carried, 0, record.group, record.clock, number)]

    def _on_state(self, record: StateRecord, carried: Frame) -> list[Change]:
        self._require(record.chunk)
        self._num_state_parts -= 1
        if self._num_state_parts < 0:
            self._refuse(f"more optimizer state than was announced, of chunk {record.chunk}")
        payload = carried.payload or b""
        return [LoadState(record.chunk, record.start, bytes(payload[: carried.num_received]))]

    def _on_member(self, record: MemberRecord, _carried: Frame) -> list[Change]:
        group = record.group
        before, after = _STANDINGS.get(record.kind, ((), GroupState.DEAD))
        if not 0 <= group < len(self.standings) or self.standings[group] not in before:
            self._refuse(f"a membership event {record.kind!r:.80} of group {group}")
        if record.kind == "join":
            self._begin(group, record.clock)
        self.standings[group] = after
        if record.kind in ("suspend", "leave"):
            self.stops[group] = record.clock
        return [MembershipEvent(record.kind, group, record.clock, record.workers)]

    def _begin(self, group: int, clock: int) -> None:
        is_late = self.standings[group] is GroupState.WAITING
        if clock < 0 or (clock != self.first[group] and not is_late):
            self._refuse(f"group {group}, which joins at clock {clock}")
        self.first[group] = self.stops[group] = clock
        for clocks in self.clocks.values():
            clocks[group] = clock

    def _on_evict(self, record: EvictRecord, _carried: Frame) -> list[Change]:
        if record.generation <= self.generation or not set(self.dead) <= set(record.dead):
            self._refuse(f"generation {record.generation} after {self.generation}")
        self.generation, self.dead = record.generation, tuple(record.dead)
        for group, goes_on, fewest in zip(
            record.groups, record.goes_on, record.fewest, strict=True
        ):
            if not self._may_die(group, fewest):
                self._refuse(f"a failure in group {group} after {fewest} iterations")
            if not goes_on:
                self.standings[group] = GroupState.DEAD
        expected: dict[tuple[int, int], int] = {}
        for chunk, group, clock in zip(record.chunks, record.heirs, record.clocks, strict=True):
            self._require(chunk)
            if group not in record.groups or clock != expected.get(
                (chunk, group), self.clocks[chunk][group]
            ):
                self._refuse(f"iteration {clock} of group {group}, contained in chunk {chunk}")
            expected[chunk, group] = clock + 1
        if record.chief != self.chief:  # who counts what it sets by pulls of its own
            self.chief = record.chief
            self.newest_loads = dict.fromkeys(self.newest_loads, 0)
        return _events_of(record)

    def _on_resumed(self, record: ResumedRecord, _carried: Frame) -> list[Change]:
        if self._has_begun and record.seq != self.resumed_up_to + 1:
            self._refuse(f"collective {record.seq} after collective {self.resumed_up_to}")
        self._has_begun, self.resumed_up_to, self.is_kept = True, record.seq, False
        return []

    def _on_snapshot(self, record: SnapshotRecord, _carried: Frame) -> list[Change]:
        for chunk in record.chunks:
            self._require(chunk)
        self.is_kept = True
        return [TakeSnapshot(record.number, tuple(record.chunks))]

    def _on_level(self, record: LevelRecord, _carried: Frame) -> list[Change]:
        if record.number != len(self.levels) + 1:
            self._refuse(f"change {record.number} of the codecs after {len(self.levels)}")
        change = ChangeCodecs(record.number, record.round, record.level)
        self.levels.append(change)
        self.held_above = None
        return [change]

    def _on_held_rounds(self, record: HeldRoundsRecord, _carried: Frame) -> list[Change]:
        if record.highest < -1 or self.held_above is not None:
            self._refuse(f"a hold of rounds above {record.highest}, or a second hold")
        self.held_above = record.highest
        return []

    def _on_mode(self, record: ModeRecord, _carried: Frame) -> list[Change]:
        is_next = not record.number or all(each.number < record.number for each in self.modes)
        if not is_next or record.round < 0 or record.staleness < 0:
            self._refuse(f"the mode of round {record.round} in change {record.number}")
        change = ChangeMode(record.round, record.mode, record.staleness, record.number)
        self.modes.append(change)
        self.held_above = None
        return [change]

    @property
    def highest_sent(self) -> int:
        """The highest round for which the server may have sent parameters. Without pipeline the
        round is at most the number of updates of any group in any chunk."""
        if self.held_above is not None:
            return self.held_above
        return max(map(max, self.clocks.values()), default=-1)

    def _on_snapshot_begin(self, record: SnapshotBegin, _carried: Frame) -> list[Change]:
        num_groups = len(self.standings)
        names = GroupState.__members__
        is_whole = len(record.standings) == len(record.stops) == len(record.first) == num_groups
        if not is_whole or not names.keys() >= set(record.standings):
            self._refuse(f"{len(record.standings)} groups of {num_groups}, or an unknown standing")
        if self._has_begun or self.loaded or self.is_partial:
            self._refuse("a second beginning of a snapshot")
        self.standings = [names[each] for each in record.standings]
        self.stops, self.first = list(record.stops), list(record.first)
        self.generation, self.dead, self.chief = record.generation, tuple(record.dead), record.chief
        self.resumed_up_to, self.is_kept = record.resumed_up_to, record.is_kept
        self._has_begun = self.is_partial = True
        self._num_state_parts = 0  # each comes with its chunk
        self._missing = set(self.clocks)
        return []

    def _on_chunk(self, record: ChunkRecord, carried: Frame) -> list[Change]:
        chunk = record.chunk
        is_new = chunk in self._missing
        if not is_new or len(record.clocks) != len(self.first) or record.version < 1:
            self._refuse(f"chunk {chunk}, which is not of its shard, is known, or is damaged")
        self._missing.remove(chunk)
        self.clocks[chunk], self.versions[chunk] = list(record.clocks), record.version
        self.newest_loads[chunk] = record.newest_load
        self.loaded.add(chunk)
        return [RestoreChunk(record, carried)]

    def _on_snapshot_end(self, record: SnapshotEnd, _carried: Frame) -> list[Change]:
        contained = sum(map(sum, self.clocks.values())) - len(self.clocks) * sum(self.first)
        if not self.is_partial or self._missing or contained != record.num_updates:
            self._refuse(
                f"the end of a snapshot with {record.num_updates} updates; {contained} updates "
                f"arrived, and {len(self._missing)} chunks did not"
            )
        self.num_updates, self.num_steps = record.num_updates, record.num_steps
        self.is_partial = False
        return [BeginLog(record.keeper, record.position)]

    def _may_die(self, group: int, fewest: int) -> bool:
        if not 0 <= group < len(self.standings):
            return False
        known = (each for each in self.clocks if each not in self._missing)
        contained = min((self.clocks[each][group] for each in known), default=fewest)
        is_here = self.standings[group] not in (GroupState.LEFT, GroupState.DEAD)
        return is_here and (fewest == contained or (fewest < contained and bool(self._missing)))

    def _require(self, chunk: int) -> None:
        if chunk not in self.clocks:
            self._refuse(f"a change of chunk {chunk}, which is not of its shard")
        if chunk in self._missing:
            self._refuse(f"a change of chunk {chunk} before the chunk itself")

    def _refuse(self, what: str) -> NoReturn:
        raise ProtocolError(f"the records of a shard contain {what}")


def _events_of(record: EvictRecord) -> list[Change]:
    """Return the log events of an eviction: the updates that a group leaves go before its event."""
    inherited = [
        Inherit(*update) for update in zip(record.chunks, record.heirs, record.clocks, strict=True)
    ]
    reform, death = LOSSES
    events = list[Change]()
    groups = set[int]()
    for group, goes_on, fewest, workers in zip(
        record.groups, record.goes_on, record.fewest, record.workers, strict=True
    ):
        if group not in groups:
            events += [each for each in inherited if each.group == group]
        groups.add(group)
        events.append(MembershipEvent(reform if goes_on else death, group, fewest, workers))
    return events
