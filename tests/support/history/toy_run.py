"""An honest run in miniature: servers, groups and a network as seeded coin tosses.

Shares no code with psdist's servers and workers, on purpose: what it records is a history of a
run that kept the rules, by a second reading of them. ``Fault`` makes it break one, as a buggy
server or worker would.

    history = ToyRun(seed=1, mode="ssp", staleness=2).run()
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np

from psdist.history.writers import EventKind, History, RunRecord, slice_places, write_run
from tests.support.history.memory import ServerHistory, WorkerHistory, collect
from tests.support.history.summaries import summary_of_toy
from tests.support.history.toy_parts import NOBODY, Fault, Group, Reply, Server, crc_of, even_slices

__all__ = ["Fault", "ToyRun", "crc_of", "even_slices"]


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
        checksum_every: int = 1,
        empty_rate: float = 0.2,
        sets_values: bool = False,
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
                slices=slice_places(lambda size: even_slices(num_chunks, size), groups),
                num_servers=num_servers,
                num_chunks=num_chunks,
                owners=tuple(chunk % num_servers for chunk in range(num_chunks)),
                checksum_every=checksum_every,
            ).model_dump_json()
        )
        self.empty_rate = empty_rate
        """How often a group brings nothing for a chunk, and how often nothing at all."""
        self.sets_values = sets_values
        """Whether the chief sets all values in every collective."""
        self.bound = {"sync": 0, "ssp": staleness, "async": NOBODY}[mode]
        self.bound += fault == Fault.BOUND_OFF_BY_ONE
        self.servers = [
            Server(ServerHistory(path_dir, server), list(range(server, num_chunks, num_servers)))
            for server in range(num_servers)
        ]
        self.groups = [
            Group(
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
        self.active = [0] * num_servers
        """Workers in groups that have not left."""
        self.staleness: Counter[int] = Counter()
        """Staleness of uses by workers that push the chunk, with counts."""
        self.num_replies = [0] * num_servers
        self.num_steps = [0] * num_servers
        self.is_fault_made = False
        """Whether the coin tosses gave an occasion for the fault."""

    def run(self) -> History | None:
        """The history, or None where it went into files."""
        for server in self.servers:
            for group in self.groups:
                self._member(server, EventKind.JOIN, group, 0)
                self.active[server.history.server] += len(group.writers)
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
            text = summary_of_toy(self).model_dump_json()
            (self.path_dir.parent / "summary.json").write_text(text)
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
            owed = self._owed(group)
            if owed:
                acts += [
                    (group.index, self._reply, group, chunk)
                    for chunk in owed
                    if self._is_allowed(group, chunk)
                ]
            elif group.collectives and group.collectives[0] == group.clock:
                acts.append((group.index, self._enter, group))
            elif group.clock == group.iterations:
                acts.append((group.index, self._leave, group))
            else:
                acts.append((group.index, self._iterate, group))
        inside = [group for group in self.groups if group.is_waiting]
        if inside and all(group.is_waiting or group.has_left for group in self.groups):
            suspending = [m for server in self.servers for m in server.inbox if m[0] == "suspend"]
            if not suspending:
                acts.append((inside[0].index, self._resume, inside))
        return acts

    def _is_stopping(self, group: Group) -> bool:
        """Enters a collective or leaves: no reply may be outstanding then."""
        is_here = group.collectives[:1] == [group.clock]
        return is_here or group.clock == group.iterations

    def _owed(self, group: Group) -> list[int]:
        """Chunks that need a reply before the group continues."""
        outstanding = 0 if self._is_stopping(group) else self.record.pipeline
        return [
            chunk
            for chunk in range(len(self.done))
            if chunk not in group.replies
            or group.answered.get(chunk, 0) < group.clock - outstanding
        ]

    def _is_allowed(self, group: Group, chunk: int) -> bool:
        limit = self.limit[self.record.owners[chunk]]
        if self.fault == Fault.REPLY_BEFORE_STEP:
            return all(
                done >= min(group.clock - 1, most)
                for done, most in zip(self.done[chunk], limit, strict=True)
            )
        own_lag = 0 if self._is_stopping(group) else self.record.pipeline
        if self.fault == Fault.OWN_UPDATES_NOT_AWAITED:
            own_lag += 1
        return self.done[chunk][group.index] >= group.clock - own_lag and all(
            done >= min(group.clock - self.bound, limit[other])
            for other, done in enumerate(self.done[chunk])
            if other != group.index or own_lag <= self.record.pipeline
        )

    # -- what happens -----------------------------------------------------------------------------

    def _reply(self, group: Group, chunk: int) -> None:
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
        # One for every push that is contained and was not answered, else the last one again.
        before = group.answered.get(chunk, 0)
        is_early = self.fault in (Fault.OWN_UPDATES_NOT_AWAITED, Fault.REPLY_BEFORE_STEP)
        contained = group.clock if is_early else self.done[chunk][group.index]
        group.answered[chunk] = min(group.clock, contained)
        for clock in range(before, group.answered[chunk]) or [max(0, before - 1)]:
            group.replies[chunk] = self._reply_of(server, chunk, clock)
            self.num_replies[server.history.server] += 1
            if self._is_sampled(chunk, clock):
                worker = int(
                    self.record.slice_owner(np.asarray([group.index]), np.asarray([chunk]))[0]
                )
                crc = crc_of(chunk, self.version[chunk])
                server.history.checksum(chunk, crc, worker=worker, clock=clock)

    def _reply_of(self, server: Server, chunk: int, clock: int) -> Reply:
        limits = self.limit[server.history.server]
        waited_for = [
            done for done, limit in zip(self.done[chunk], limits, strict=True) if done < limit
        ]
        slowest = min(waited_for, default=NOBODY)
        return Reply(server.history.position, self.version[chunk], clock, slowest)

    def _is_sampled(self, chunk: int, clock: int) -> bool:
        return bool(self.record.checksum_every) and (
            (chunk + clock) % self.record.checksum_every == 0
        )

    def _iterate(self, group: Group) -> None:
        chunks = np.arange(len(self.done))
        replies = [group.replies[chunk] for chunk in chunks.tolist()]
        sampled = [self._is_sampled(chunk, reply.clock) for chunk, reply in enumerate(replies)]
        crcs = [
            crc_of(chunk, reply.version) if is_sampled else 0
            for chunk, (reply, is_sampled) in enumerate(zip(replies, sampled, strict=True))
        ]
        self.staleness.update(max(0, group.clock - reply.slowest) for reply in replies)
        for writer in group.writers:
            writer.uses(
                group.clock,
                chunks,
                np.asarray(self.record.owners),
                np.asarray([reply.position for reply in replies]),
                np.asarray([reply.clock for reply in replies]),
                sampled,
                crcs,
            )
        self._bring(group)
        for chunk in chunks.tolist():
            inbox = self.servers[self.record.owners[chunk]].inbox
            inbox.append(("push", group.index, group.clock, chunk))
        group.replies.clear()
        group.clock += 1

    def _bring(self, group: Group) -> None:
        """Make the pushes of the group's workers in this iteration."""
        chunks = range(len(self.done))
        own = [self.random.choice((1.0, 0.75, 0.5)) for _ in group.writers]
        weight = 0.0 if self.random.random() < self.empty_rate else sum(own)
        empty = {chunk for chunk in chunks if not weight or self.random.random() < self.empty_rate}
        places = self.record.slices[len(group.writers) - 1]
        for place, writer in enumerate(group.writers):
            mine = [chunk for chunk in chunks if places[chunk] == place]
            writer.push(group.clock, own[place], weight, empty & set(mine), len(mine))
        group.brought.append((weight, frozenset(empty)))

    def _enter(self, group: Group) -> None:
        group.collectives.pop(0)
        group.is_waiting = True
        self._tell(group, "suspend")

    def _leave(self, group: Group) -> None:
        group.has_left = True
        self._tell(group, "leave")

    def _tell(self, group: Group, what: str) -> None:
        for server in self.servers:
            server.inbox.append((what, group.index, group.clock, -1))

    def _set_values(self) -> None:
        """Every group gets what is new."""
        for chunk, owner in enumerate(self.record.owners):
            self.version[chunk] += 1
            crc = crc_of(chunk, self.version[chunk])
            self.servers[owner].history.load(chunk, 0, self.groups[0].clock, crc)
        for group in self.groups:
            group.replies.clear()

    def _resume(self, inside: list[Group]) -> None:
        if self.sets_values:
            self._set_values()
        for group in inside:
            group.is_waiting = False
            for index, server in enumerate(self.servers):
                if self.fault == Fault.RESUME_FORGOTTEN and group.index == 0:
                    self.is_fault_made = True
                    continue
                self.limit[index][group.index] = NOBODY
                self._member(server, EventKind.RESUME, group, 0)

    def _handle(self, server: Server, message: tuple[str, int, int, int]) -> None:
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
            self._member(server, kind, self.groups[group], clock)
            if kind == EventKind.LEAVE:
                self.active[server.history.server] -= len(self.groups[group].writers)
        if self.record.mode == "sync":
            for chunk in server.chunks:
                self._step_if_complete(server, chunk)

    def _member(self, server: Server, kind: EventKind, group: Group, clock: int) -> None:
        server.history.member(kind, group.index, clock, float(len(group.writers)))

    def _step_if_complete(self, server: Server, chunk: int) -> None:
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

    def _apply(self, server: Server, chunk: int, step: list[tuple[int, int]]) -> None:
        for index, (group, clock) in enumerate(step):
            self.done[chunk][group] += 1
            is_chosen = clock == 2 and not self.is_fault_made
            if self.fault == Fault.LAST_UPDATE_LOST:
                is_chosen = clock == self.groups[group].iterations - 1
            if self.fault in (Fault.UPDATE_LOST, Fault.LAST_UPDATE_LOST) and is_chosen:
                self.is_fault_made = True
                continue
            is_last = index == len(step) - 1
            weight, empty = self.groups[group].brought[clock]
            is_empty = chunk in empty
            is_scaled = self.record.mode != "sync" and not is_empty
            scale = weight / self.active[server.history.server] if is_scaled else 1.0
            for _ in range(1 + (self.fault == Fault.UPDATE_TWICE and is_chosen)):
                server.history.apply(
                    chunk, group, clock, weight, scale, is_last=is_last, is_empty=is_empty
                )
            self.is_fault_made |= self.fault == Fault.UPDATE_TWICE and is_chosen
            if self.fault == Fault.HALF_STEP_SEEN and not is_last:
                self._reply_inside_a_step(server, chunk, clock)
        if any(chunk not in self.groups[group].brought[clock][1] for group, clock in step):
            self.version[chunk] += 1
            self.num_steps[server.history.server] += 1

    def _reply_inside_a_step(self, server: Server, chunk: int, clock: int) -> None:
        """Groups that have pushed this step's iteration get their reply in the middle of it."""
        for group in self.groups:
            if group.clock == clock + 1 and not group.has_left and not group.is_waiting:
                self.is_fault_made = True
                group.replies[chunk] = self._reply_of(server, chunk, clock)
                group.answered[chunk] = group.clock
