"""The rules that uses must keep: the mode's bound, order, coverage.

Owns rules 2 and 3 of docs/reference/history.md. Pure.

    uses = Uses.of(history)
    staleness = check_bound(replay, uses.of_server(replay, findings), findings)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from psdist.history import History, Ints, WorkerLog
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.replay import NEVER, Counts, ServerReplay
from psdist.history.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Uses of several workers, in columns [uses]."""

    worker: Ints
    group: Ints
    iteration: Ints
    chunk: Ints
    server: Ints
    position: Ints
    reply: Ints
    """The clock of the reply."""
    has_crc: Ints
    crc: Ints

    @classmethod
    def of(cls, history: History) -> Uses:
        logs = [log.uses for log in history.workers]
        if history.run.is_of_rows:  # the others used no rows of the part
            logs = [uses[uses["crc"] > 0] for uses in logs]
        worker = np.repeat(np.arange(len(logs)), [len(log) for log in logs])

        def column(name: str, dtype: type) -> Ints:
            return np.concatenate([log[name].astype(dtype) for log in logs])

        return cls(
            worker=worker,
            group=history.run.group_of_worker()[worker],
            iteration=column("iteration", np.int64),
            chunk=column("chunk", np.int64),
            server=column("server", np.uint32),
            position=column("position", np.int64),
            reply=column("reply", np.int64),
            has_crc=column("has_crc", np.bool_),
            crc=column("crc", np.uint32),
        )

    def take(self, which: Ints) -> Uses:
        return Uses(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def line(self, use: int) -> str:
        return (
            f"worker {self.worker[use]} (group {self.group[use]}), iteration "
            f"{self.iteration[use]}, chunk {self.chunk[use]}, server {self.server[use]}, position "
            f"{self.position[use]}"
        )

    def of_server(self, replay: ServerReplay, findings: Findings) -> tuple[Uses, int]:
        """Return the uses that a server's log covers, in the order of their rows; and the number of
        uses beyond the end of a log that ends early, which are neither proved nor wrong."""
        broken = findings[Rule.KNOWN_VERSION]
        mine = self.take(np.flatnonzero(self.server == replay.server))
        owners = replay.owners
        is_foreign = owners[mine.chunk] != replay.server
        broken.add_where(
            is_foreign,
            lambda use: f"{mine.line(use)}: server {owners[mine.chunk[use]]} owns the chunk",
        )
        is_beyond = ~is_foreign & (mine.position > replay.num_events)
        if replay.is_complete:
            broken.add_where(
                is_beyond,
                lambda use: f"{mine.line(use)}: the server's log ends at {replay.num_events}",
            )
        known = np.flatnonzero(~is_foreign & ~is_beyond)
        key = replay.key_of(mine.chunk[known], mine.position[known])
        return mine.take(known[np.argsort(key, kind="stable")]), int(np.count_nonzero(is_beyond))


def check_bound(replay: ServerReplay, uses: Uses, findings: Findings) -> Ints:
    """Every use contains what the mode of its iteration requires; returns the staleness of each.

    At iteration c a chunk must hold all updates stamped below c - bound of every active group
    (of one that stopped after n iterations: of its first n), and of the reader's own all below
    c - pipeline. Rows that workers keep may lack ``row_staleness`` more of each.
    """
    run = replay.run
    rows = replay.row_of(uses.chunk, uses.position)
    if replay.rules.may_gather:
        findings[Rule.WHOLE_STEPS].add_where(
            replay.is_inside_a_step(uses.chunk, rows),
            lambda use: f"{uses.line(use)}: inside an optimizer step",
        )
    epochs = replay.epoch_of(uses.position)
    staleness = np.zeros(len(rows), np.int64)
    for part, counts in replay.counts(uses.chunk, rows):
        limits = replay.limits_at(epochs[part], uses.chunk[part])
        iteration = uses.iteration[part].astype(np.int32)
        bounds = replay.rules.bounds(iteration) + (run.row_staleness or 0)
        from_all = np.maximum(iteration - bounds, 0).astype(np.int32)
        _find_missing(part.start, uses, np.minimum(from_all[:, None], limits), counts, findings)
        own = counts[np.arange(len(counts)), uses.group[part]]

        def own_line(i: int, start: int = part.start, own: Counts = own) -> str:
            needed = uses.iteration[start + i] - run.most_behind
            return f"{uses.line(start + i)}: needs {needed} own updates, contains {own[i]}"

        findings[Rule.OWN].add_where(own < iteration - run.most_behind, own_line)

        # A group that stopped at n counts until the chunk holds its first n.
        slowest = np.where(counts < limits, counts, NEVER).min(axis=1)
        staleness[part] = np.maximum(iteration - slowest, 0)
    return staleness


def _find_missing(
    start: int, uses: Uses, needed: Counts, counts: Counts, findings: Findings
) -> None:
    is_missing = counts < needed

    def line(i: int) -> str:
        group = int(np.argmax(is_missing[i]))
        return (
            f"{uses.line(start + i)}: needs {needed[i, group]} updates of group {group}, "
            f"contains {counts[i, group]}"
        )

    findings[Rule.BOUND].add_each(np.flatnonzero(is_missing.any(axis=1)), line)


# ---------------------------------------------------------------------------------------------
# The rules on a worker's own record


def check_worker(
    run: RunRecord,
    log: WorkerLog,
    leave_clocks: dict[int, int],
    findings: Findings,
    *,
    begin: int,
    missed: Collection[int] = (),
) -> None:
    """Require that every iteration used every chunk, that versions never went back (of rows, which
    are others in each iteration, they may), and that the number of iterations is that of each
    server's LEAVE (``leave_clocks``). ``begin``: the group's first clock; ``missed``: rounds that
    need no uses."""
    broken = findings[Rule.BACKWARDS]
    uses, who = log.uses, f"worker {log.worker}"
    iteration = uses["iteration"].astype(np.int64)
    broken.add_each(
        1 + np.flatnonzero(iteration[1:] < iteration[:-1]),
        lambda i: f"{who}: iteration {iteration[i]} recorded after iteration {iteration[i - 1]}",
    )
    if not run.is_of_rows:
        _check_versions(log, findings)
    num = int(iteration.max(initial=begin - 1)) + 1
    is_new = np.append(True, iteration[1:] != iteration[:-1])[: len(iteration)]
    used = np.unique(iteration[is_new])  # few: repetitions first
    left_out = np.setdiff1d(np.asarray(sorted(missed), np.int64), used)
    num = _with_missed(num, left_out, leave_clocks)
    used = np.union1d(used, left_out[left_out < num])
    if len(used) < num - begin:
        expected = np.arange(begin, begin + len(used) + 1)
        missing = int(expected[np.flatnonzero(np.append(used, num) != expected)[0]])
        findings[Rule.COVERAGE].add(
            f"{who}: iteration {missing} used no parameters; there are "
            f"{num - begin - len(used)} such"
        )
    findings[Rule.COVERAGE].add_where(
        used < begin,
        lambda i: f"{who}: iteration {used[i]} is before {begin}, with which its group begins",
    )
    _check_passes(log, run.num_chunks, findings)
    for server, clock in leave_clocks.items():
        if num > clock or (log.is_complete and num < clock):
            findings[Rule.COVERAGE].add(
                f"{who}: used parameters in {num} iterations, its group left server {server} "
                f"after {clock}"
            )


def _check_versions(log: WorkerLog, findings: Findings) -> None:
    """Require that neither positions nor clocks of replies of a chunk decrease."""
    broken, uses, who = findings[Rule.BACKWARDS], log.uses, f"worker {log.worker}"
    iteration, chunk = uses["iteration"], uses["chunk"].astype(np.int64)
    order = np.argsort(chunk, kind="stable")
    ordered, position = chunk[order], uses["position"][order].astype(np.int64)
    broken.add_each(
        1 + np.flatnonzero((ordered[1:] == ordered[:-1]) & (position[1:] < position[:-1])),
        lambda i: (
            f"{who}, iteration {iteration[order[i]]}, chunk {ordered[i]}: uses position "
            f"{position[i]} after position {position[i - 1]}"
        ),
    )
    reply = uses["reply"][order]
    broken.add_each(
        1 + np.flatnonzero((ordered[1:] == ordered[:-1]) & (reply[1:] < reply[:-1])),
        lambda i: (
            f"{who}, iteration {iteration[order[i]]}, chunk {ordered[i]}: uses the reply to clock "
            f"{reply[i]} after that to clock {reply[i - 1]}"
        ),
    )


def _with_missed(num: int, left_out: Ints, leave_clocks: dict[int, int]) -> int:
    """Return ``num`` plus the following rounds that the group missed before it left."""
    behind, until = set(left_out.tolist()), max(leave_clocks.values(), default=num)
    while num < until and num in behind:
        num += 1
    return num


def _check_passes(log: WorkerLog, num_chunks: int, findings: Findings) -> None:
    """Require that the uses of a forward pass stand together: one of every chunk, ascending."""
    broken = findings[Rule.COVERAGE]
    chunk, iteration = log.uses["chunk"], log.uses["iteration"]
    if not len(chunk):
        return
    expected = np.arange(len(chunk)) % num_chunks
    is_torn = (expected > 0) & (iteration != np.roll(iteration, 1))
    is_wrong = (chunk != expected) | is_torn
    if is_wrong.any():
        use = int(np.argmax(is_wrong))
        broken.add(
            f"worker {log.worker}: record {use} of its uses, of chunk {chunk[use]} in iteration "
            f"{iteration[use]}, stands where chunk {expected[use]} of a forward pass belongs"
        )
    elif log.is_complete and len(chunk) % num_chunks:
        broken.add(
            f"worker {log.worker}: its last forward pass used {len(chunk) % num_chunks} of "
            f"{num_chunks} chunks"
        )


def check_same_versions(history: History, findings: Findings) -> None:
    """Require that the last use of a chunk in an iteration is of one version, and of one reply, for
    all workers of a group. Each worker brings its own rows."""
    if history.run.is_of_rows:
        return

    @lru_cache(maxsize=2)
    def last_uses(worker: int) -> _LastUses:
        return _LastUses.of(history, worker)

    for group, (first, *others) in enumerate(history.run.groups):
        for worker in others:
            _compare_versions(f"group {group}", last_uses(first), last_uses(worker), findings)


@dataclass(frozen=True, kw_only=True)
class _LastUses:
    """The last use of every chunk in every iteration of a worker."""

    worker: int
    num_chunks: int
    key: Ints
    """Sorted: iteration * chunks + chunk."""
    position: Ints
    reply: Ints

    @classmethod
    def of(cls, history: History, worker: int) -> _LastUses:
        uses, num_chunks = history.workers[worker].uses[::-1], history.run.num_chunks
        keys = uses["iteration"].astype(np.int64) * num_chunks + uses["chunk"]
        key, first = np.unique(keys, return_index=True)  # of the latest to the earliest use
        return cls(
            worker=worker,
            num_chunks=num_chunks,
            key=key,
            position=uses["position"][first],
            reply=uses["reply"][first],
        )


def _compare_versions(group: str, mine: _LastUses, theirs: _LastUses, findings: Findings) -> None:
    keys = mine.key[np.isin(mine.key, theirs.key)]
    i, j = np.searchsorted(mine.key, keys), np.searchsorted(theirs.key, keys)
    is_other_version = mine.position[i] != theirs.position[j]
    is_different = is_other_version | (mine.reply[i] != theirs.reply[j])
    findings[Rule.SAME_VERSION].add_where(
        is_different,
        lambda n: (
            f"{group}, iteration {keys[n] // mine.num_chunks}, chunk {keys[n] % mine.num_chunks}: "
            f"worker {mine.worker} used position {mine.position[i[n]]} (reply to clock "
            f"{mine.reply[i[n]]}), worker {theirs.worker} position {theirs.position[j[n]]} (reply "
            f"to clock {theirs.reply[j[n]]})"
        ),
    )
