"""An honest run in miniature: servers, groups and a network as seeded coin tosses.

Shares no code with psdist's servers and workers, on purpose: what it records is a history of a
run that kept the rules, by a second reading of them. ``Fault`` makes it break one, as a buggy
server or worker would.

    history = ToyRun(seed=1, mode="ssp", staleness=2).run()
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np

from psdist.history.writers import (
    EventKind,
    History,
    RunRecord,
    ServerHistory,
    WorkerHistory,
    collect,
    write_run,
)

NOBODY = 10**9


class Fault(Enum):
    BOUND_OFF_BY_ONE = "the servers enforce one more than the bound that the run promises"
    REPLY_BEFORE_STEP = "replies of sync go out one step too early"
    OWN_UPDATES_NOT_AWAITED = "replies do not wait for the reader's own update"
    UPDATE_LOST = "one update is counted but never applied"
    LAST_UPDATE_LOST = "the last update of a group is counted but never applied"
    UPDATE_TWICE = "one update is applied twice"
    HALF_STEP_SEEN = "a reply goes out between two contributions of a step"
    ARRIVAL_ORDER = "contributions are summed as they arrive"
    GROUP_LEFT_OUT = "a step is made without one of its groups"
    SUSPENDED_TOO_EARLY = "a suspension is stamped with clock 0"
    RESUME_FORGOTTEN = "a group never counts again after its first collective"


@dataclass(eq=False)
class _Server:
    history: ServerHistory
    chunks: list[int]
    inbox: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(kind, group, clock, chunk), to be handled in any order but per (group, chunk)."""


@dataclass(eq=False)
class _Group:
    index: int
    writers: list[WorkerHistory]
    iterations: int
    clock: int = 0
    replies: dict[int, tuple[int, int]] = field(default_factory=dict)  # chunk: position, version
    collectives: list[int] = field(default_factory=list)
    is_waiting: bool = False
    has_left: bool = False


class ToyRun:
    def __init__(
        self,
        *,
        seed: int,
        mode: str = "ssp",
        staleness: int = 2,
        pipeline: int = 0,
        groups: tuple[tuple[int, ...], ...] = ((0, 1), (2,), (3,)),
        num_servers: int = 2,
        num_chunks: int = 3,
        iterations: tuple[int, ...] = (8, 8, 6),
        collectives: tuple[int, ...] = (3,),
        pace: tuple[float, ...] | None = None,
        path_dir: Path | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.pace = pace or [self.random.choice((0.1, 1.0)) for _ in groups]
        """How likely each group's turn comes."""
        self.fault = fault
        self.path_dir = path_dir
        self.record = RunRecord.model_validate_json(
            RunRecord(
                psdist="0",
                mode=mode,  # type: ignore[arg-type] # a name from the test's parameters
                staleness=staleness if mode == "ssp" else None,
                pipeline=pipeline,
                groups=groups,
                num_servers=num_servers,
                num_chunks=num_chunks,
                owners=tuple(chunk % num_servers for chunk in range(num_chunks)),
                checksum_every=1,
            ).model_dump_json()
        )
        self.bound = {"sync": 0, "ssp": staleness, "async": NOBODY}[mode]
        self.bound += fault == Fault.BOUND_OFF_BY_ONE
        self.servers = [
            _Server(ServerHistory(path_dir, server), list(range(server, num_chunks, num_servers)))
            for server in range(num_servers)
        ]
        self.groups = [
            _Group(
                index,
                [WorkerHistory(path_dir, worker) for worker in workers],
                iterations[index],
                collectives=[clock for clock in collectives if clock <= iterations[index]],
            )
            for index, workers in enumerate(groups)
        ]
        self.done = [[0] * len(groups) for _ in range(num_chunks)]
        self.version = [0] * num_chunks
        self.gathered: list[dict[int, int]] = [{} for _ in range(num_chunks)]  # group: clock
        self.limit = [[NOBODY] * len(groups) for _ in range(num_servers)]
        self.suspended = [0] * num_servers
        self.is_fault_made = False
        """Whether the coin tosses gave an occasion for the fault."""

    def run(self) -> History | None:
        """The history, or None where it went into files."""
        for server in self.servers:
            for group in self.groups:
                server.history.member(EventKind.JOIN, group.index, 0, float(len(group.writers)))
        while acts := self._possible():
            weights = [self.pace[group] for group, *_ in acts]
            _, act, *arguments = self.random.choices(acts, weights)[0]
            act(*arguments)
        assert all(group.has_left for group in self.groups), "the toy run came to a standstill"
        workers = [writer for group in self.groups for writer in group.writers]
        workers.sort(key=lambda writer: writer.worker)
        for writer in [*workers, *(server.history for server in self.servers)]:
            writer.close()
        if self.path_dir is not None:
            write_run(self.path_dir, self.record)
            return None
        return collect(self.record, [server.history for server in self.servers], workers)

    # -- what may happen next -------------------------------------------------------------------

    def _possible(self) -> list[tuple]:
        acts: list[tuple] = []
        for server in self.servers:
            seen: set[tuple[int, int]] = set()
            for message in server.inbox:
                # In order from one group for one chunk, in any order otherwise.
                is_in_turn = message[0] != "push" or message[1] not in self.gathered[message[3]]
                if is_in_turn and (message[1], message[3]) not in seen:
                    acts.append((message[1], self._handle, server, message))
                seen.add((message[1], message[3]))
        for group in self.groups:
            if group.has_left or group.is_waiting:
                continue
            if group.collectives and group.collectives[0] == group.clock:
                acts.append((group.index, self._enter, group))
            elif group.clock == group.iterations:
                acts.append((group.index, self._leave, group))
            elif len(group.replies) == len(self.done):
                acts.append((group.index, self._iterate, group))
            else:
                acts += [
                    (group.index, self._reply, group, chunk)
                    for chunk in range(len(self.done))
                    if chunk not in group.replies and self._is_allowed(group, chunk)
                ]
        inside = [group for group in self.groups if group.is_waiting]
        if inside and all(group.is_waiting or group.has_left for group in self.groups):
            suspending = [m for server in self.servers for m in server.inbox if m[0] == "suspend"]
            if not suspending:
                acts.append((inside[0].index, self._resume, inside))
        return acts

    def _is_allowed(self, group: _Group, chunk: int) -> bool:
        if self.fault == Fault.REPLY_BEFORE_STEP:
            return min(self.done[chunk]) >= group.clock - 1
        limit = self.limit[self.record.owners[chunk]]
        own_lag = self.record.pipeline
        if self.fault == Fault.OWN_UPDATES_NOT_AWAITED:
            own_lag += 1
        return self.done[chunk][group.index] >= group.clock - own_lag and all(
            done >= min(group.clock - self.bound, limit[other])
            for other, done in enumerate(self.done[chunk])
            if other != group.index or own_lag == self.record.pipeline
        )

    # -- what happens -----------------------------------------------------------------------------

    def _reply(self, group: _Group, chunk: int) -> None:
        server = self.servers[self.record.owners[chunk]]
        if self.fault == Fault.BOUND_OFF_BY_ONE:
            slowest = min(
                done
                for done, limit in zip(
                    self.done[chunk], self.limit[server.history.server], strict=True
                )
                if done < limit
            )
            self.is_fault_made |= group.clock - slowest == self.bound
        if self.fault in (Fault.OWN_UPDATES_NOT_AWAITED, Fault.REPLY_BEFORE_STEP):
            self.is_fault_made |= self.done[chunk][group.index] < group.clock
        group.replies[chunk] = (server.history.position, self.version[chunk])
        server.history.checksum(chunk, crc_of(chunk, self.version[chunk]))

    def _iterate(self, group: _Group) -> None:
        chunks = np.arange(len(self.done))
        versions = [group.replies[chunk] for chunk in chunks.tolist()]
        for writer in group.writers:
            writer.uses(
                group.clock,
                chunks,
                np.asarray(self.record.owners),
                np.asarray([position for position, _ in versions]),
                True,
                np.asarray([crc_of(chunk, version) for chunk, (_, version) in enumerate(versions)]),
            )
        for chunk in chunks.tolist():
            inbox = self.servers[self.record.owners[chunk]].inbox
            inbox.append(("push", group.index, group.clock, chunk))
        group.replies.clear()
        group.clock += 1

    def _enter(self, group: _Group) -> None:
        group.collectives.pop(0)
        group.is_waiting = True
        self._tell(group, "suspend")

    def _leave(self, group: _Group) -> None:
        group.has_left = True
        self._tell(group, "leave")

    def _tell(self, group: _Group, what: str) -> None:
        for server in self.servers:
            server.inbox.append((what, group.index, group.clock, -1))

    def _resume(self, inside: list[_Group]) -> None:
        for group in inside:
            group.is_waiting = False
            for index, server in enumerate(self.servers):
                if self.fault == Fault.RESUME_FORGOTTEN and group.index == 0:
                    self.is_fault_made = True
                    continue
                self.limit[index][group.index] = NOBODY
                server.history.member(EventKind.RESUME, group.index, group.clock)

    def _handle(self, server: _Server, message: tuple[str, int, int, int]) -> None:
        what, group, clock, chunk = message
        server.inbox.remove(message)
        if what == "push":
            if self.record.mode == "sync":
                self.gathered[chunk][group] = clock
            else:
                self._apply(server, chunk, [(group, clock)])
        else:
            kind = EventKind.SUSPEND if what == "suspend" else EventKind.LEAVE
            if kind == EventKind.SUSPEND and self.fault == Fault.SUSPENDED_TOO_EARLY:
                self.is_fault_made = True
                clock = 0
            self.limit[server.history.server][group] = clock
            server.history.member(kind, group, clock)
        if self.record.mode == "sync":
            for chunk in server.chunks:
                self._step_if_complete(server, chunk)

    def _step_if_complete(self, server: _Server, chunk: int) -> None:
        """One optimizer step when all groups that the slowest iteration waits for are here."""
        limit = self.limit[server.history.server]
        while True:
            clocks = [done for group, done in enumerate(self.done[chunk]) if done < limit[group]]
            if not clocks:
                return
            due = [
                group
                for group, done in enumerate(self.done[chunk])
                if done < limit[group] and done == min(clocks)
            ]
            if any(group not in self.gathered[chunk] for group in due):
                return
            here = self.gathered[chunk]
            order = list(here) if self.fault == Fault.ARRIVAL_ORDER else sorted(here)
            if len(due) > 1:
                self._make_step_faults(due)
            step = [(group, here.pop(group)) for group in order if group in due]
            self.is_fault_made |= self.fault == Fault.ARRIVAL_ORDER and step != sorted(step)
            self._apply(server, chunk, step)

    def _make_step_faults(self, due: list[int]) -> None:
        if self.fault == Fault.GROUP_LEFT_OUT and not self.is_fault_made:
            self.is_fault_made = True
            due.pop()

    def _apply(self, server: _Server, chunk: int, step: list[tuple[int, int]]) -> None:
        for index, (group, clock) in enumerate(step):
            self.done[chunk][group] += 1
            is_chosen = clock == 2 and not self.is_fault_made
            if self.fault == Fault.LAST_UPDATE_LOST:
                is_chosen = clock == self.groups[group].iterations - 1
            if self.fault in (Fault.UPDATE_LOST, Fault.LAST_UPDATE_LOST) and is_chosen:
                self.is_fault_made = True
                continue
            is_last = index == len(step) - 1
            server.history.apply(chunk, group, clock, 1.0, 1.0, is_last=is_last)
            if self.fault == Fault.UPDATE_TWICE and is_chosen:
                self.is_fault_made = True
                server.history.apply(chunk, group, clock, 1.0, 1.0, is_last=is_last)
            if self.fault == Fault.HALF_STEP_SEEN and not is_last:
                self._reply_inside_a_step(server, chunk, clock)
        self.version[chunk] += 1

    def _reply_inside_a_step(self, server: _Server, chunk: int, clock: int) -> None:
        """Groups that have pushed this step's iteration get their reply in the middle of it."""
        for group in self.groups:
            if group.clock == clock + 1 and not group.has_left and not group.is_waiting:
                self.is_fault_made = True
                group.replies[chunk] = (server.history.position, self.version[chunk])


def crc_of(chunk: int, version: int) -> int:
    """Stands for the checksum of the chunk's bytes after that many steps."""
    return zlib.crc32(f"{chunk} {version}".encode())
