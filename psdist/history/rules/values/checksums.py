"""The rules on bytes: which replies and uses carry a checksum, and that both ends agree.

Owns rule 4 of docs/reference/history.md. Pure.

    sums = Checksums.of(replay, log.checksums, findings)
    compared, unknown = check_uses(sums, uses, findings)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from psdist.history import EventFlag, Ints, Records
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.memberships import dead_groups
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.uses import Uses
from psdist.history.run_record import RunRecord


def is_sampled(run: RunRecord, chunk_plus_clock: Ints) -> Ints:
    """Return True where the reply of a chunk with this clock carries a checksum."""
    if not run.checksum_every:
        return np.zeros(len(chunk_plus_clock), np.bool_)
    sampled: Ints = chunk_plus_clock % run.checksum_every == 0
    return sampled


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """A server's checksums, in columns, in the order of its record."""

    replay: ServerReplay
    position: Ints
    clock: Ints
    worker: Ints
    chunk: Ints
    crc: Ints

    @classmethod
    def of(cls, replay: ServerReplay, records: Records, findings: Findings) -> Checksums:
        """Return the checksums within the log."""
        broken = findings[Rule.CHECKSUM]
        position = records["position"].astype(np.int64)
        is_known = position <= replay.num_events
        if replay.is_complete and not is_known.all():
            broken.add(
                f"server {replay.server}: {np.count_nonzero(~is_known)} checksums lie beyond the "
                f"end of its log at {replay.num_events}"
            )
        broken.add_each(
            1 + np.flatnonzero(position[1:] < position[:-1]),
            lambda i: (
                f"server {replay.server}: checksum {i} is of position {position[i]}, after one of "
                f"position {position[i - 1]}"
            ),
        )
        names = ("position", "clock", "worker", "chunk")
        columns = {name: records[name][is_known].astype(np.int64) for name in names}
        return cls(replay=replay, crc=records["crc"][is_known], **columns)

    def line(self, i: int) -> str:
        return (
            f"server {self.replay.server}, chunk {self.chunk[i]}, position {self.position[i]}: "
            f"checksum of the reply to worker {self.worker[i]}, clock {self.clock[i]}"
        )


def check_sampled_replies(sums: Checksums, findings: Findings) -> None:
    """Require exactly the checksums that checksum_every selects, of the server's own chunks. Bytes
    between two applies have one checksum, unless each reader has bytes of its own."""
    broken = findings[Rule.CHECKSUM]
    replay, run = sums.replay, sums.replay.run
    owners = replay.owners
    broken.add_where(
        owners[sums.chunk] != replay.server,
        lambda i: f"{sums.line(i)}: server {owners[sums.chunk[i]]} owns the chunk",
    )
    findings[Rule.SAMPLING].add_where(
        ~is_sampled(run, sums.chunk + sums.clock),
        lambda i: f"{sums.line(i)}: checksum_every {run.checksum_every} does not call for it",
    )
    if replay.is_complete:
        _check_replies_to_pushes(sums, findings)

    _check_loads(sums, findings)
    if run.has_copies:
        return
    version = replay.version_of(sums.chunk, sums.position)
    starts = np.asarray(run.pull_codec_rounds, np.int64)
    coded = np.searchsorted(starts, sums.clock, side="right")  # another codec makes other bytes
    order = np.lexsort((coded, version, sums.chunk))
    keys = np.stack([sums.chunk, version, coded])[:, order]
    is_same = (keys[:, 1:] == keys[:, :-1]).all(axis=0)
    broken.add_each(
        1 + np.flatnonzero(is_same & (sums.crc[order[1:]] != sums.crc[order[:-1]])),
        lambda i: (
            f"{sums.line(order[i])} is {sums.crc[order[i]]:08x}, at position "
            f"{sums.position[order[i - 1]]} {sums.crc[order[i - 1]]:08x}, and no gradient was "
            "applied between"
        ),
    )


def _check_loads(sums: Checksums, findings: Findings) -> None:
    """Require that values that were set have their recorded checksum until the next step."""
    replay = sums.replay
    if not len(replay.loads):
        return
    load = replay.load_of(sums.chunk, sums.position)
    at = np.maximum(load, 0)
    is_set = (load >= 0) & (replay.load_chunk[at] == sums.chunk)
    is_set &= replay.loads["flags"][at] & EventFlag.CRC != 0
    since = replay.version_of(sums.chunk, replay.load_position[at] + 1)
    is_set &= replay.version_of(sums.chunk, sums.position) == since
    crc = replay.loads["weight"][at]
    findings[Rule.CHECKSUM].add_where(
        is_set & (sums.crc != crc),
        lambda i: (
            f"{sums.line(i)} is {sums.crc[i]:08x}; the values that were set at position "
            f"{replay.load_position[at[i]]} have {int(crc[i]):08x}"
        ),
    )


def _check_replies_to_pushes(sums: Checksums, findings: Findings) -> None:
    """Require a reply to the worker for each push, once the chunk contains the update."""
    replay, run = sums.replay, sums.replay.run
    is_alive = np.ones(len(run.groups), np.bool_)
    is_alive[list(dead_groups(replay))] = False  # whose replies may never have been made
    is_due = is_sampled(run, replay.chunk + replay.clock) & is_alive[replay.group]
    is_due &= ~replay.is_missed  # whose replies bring nothing
    is_due &= ~np.isin(
        replay.pusher, [each for one in replay.pushers.lost.values() for each in one]
    )
    due = np.flatnonzero(is_due & (replay.position > replay.unwritten_until))
    worker = replay.pusher[due]
    taken, wanted = _numbered(
        (sums.worker, sums.chunk, sums.clock), (worker, replay.chunk[due], replay.clock[due])
    )
    # The last such reply: a pull of the same clock was answered before the push.
    last = np.zeros(len(taken) + len(wanted), np.int64)
    np.maximum.at(last, taken, sums.position)
    is_there = last[wanted] > replay.position[due]
    findings[Rule.SAMPLING].add_each(
        due[~is_there],
        lambda row: (
            f"{replay.line(row)}: the server took no checksum of the reply; checksum_every "
            f"{run.checksum_every} calls for one"
        ),
    )


def check_uses(sums: Checksums, uses: Uses, findings: Findings) -> tuple[int, int]:
    """A use carries a checksum where its reply did, and it is that of the server's bytes.

    ``uses``: of this server's chunks, within its log. Returns how many were compared, and how many
    had no checksum of a log that ends early.
    """
    broken = findings[Rule.SAMPLING]
    replay, run = sums.replay, sums.replay.run
    oldest = np.maximum(uses.iteration - 1 - run.most_behind, replay.first[uses.group])
    broken.add_where(
        (uses.reply < oldest) | (uses.reply > uses.iteration),
        lambda use: (
            f"{uses.line(use)}: of the reply to clock {uses.reply[use]}; the last one is to one "
            f"of {oldest[use]} to {uses.iteration[use]}"
        ),
    )
    is_due = is_sampled(run, uses.chunk + uses.reply)
    broken.add_where(
        is_due != uses.has_crc,
        lambda use: (
            f"{uses.line(use)}: carries {'a' if uses.has_crc[use] else 'no'} checksum; with "
            f"checksum_every {run.checksum_every} the reply to clock {uses.reply[use]} has "
            f"{'one' if is_due[use] else 'none'}"
        ),
    )
    sampled = uses.take(np.flatnonzero(uses.has_crc))
    worker = run.slice_owner(sampled.group, sampled.chunk)
    expected, is_known = _sent_to(sums, worker, sampled)
    for group in replay.pushers.lost:  # whose chunks had several workers, one after the other
        for owners in replay.pushers.ever(group)[1:]:
            mine = np.flatnonzero((sampled.group == group) & ~is_known)
            others = owners[sampled.chunk[mine]]
            found, is_found = _sent_to(sums, others, sampled.take(mine))
            expected[mine], is_known[mine] = found, is_found
            worker[mine] = others
    findings[Rule.CHECKSUM].add_where(
        is_known & (expected != sampled.crc),
        lambda use: (
            f"{sampled.line(use)}: used bytes with checksum {sampled.crc[use]:08x}, the server "
            f"sent worker {worker[use]} {expected[use]:08x}"
        ),
    )
    if replay.is_complete:
        findings[Rule.CHECKSUM].add_where(
            ~is_known & (sampled.position > replay.unwritten_until),
            lambda use: (
                f"{sampled.line(use)}: was sampled, but the server recorded no checksum of its "
                f"reply to clock {sampled.reply[use]} of worker {worker[use]}"
            ),
        )
    num_known = int(np.count_nonzero(is_known))
    return num_known, len(worker) - num_known


def _sent_to(sums: Checksums, workers: Ints, uses: Uses) -> tuple[Ints, Ints]:
    """Return, for each use, the checksum of the bytes that the server sent these ``workers``, and
    True if there is one."""
    taken, wanted = _numbered(
        (sums.worker, sums.chunk, sums.clock, sums.position),
        (workers, uses.chunk, uses.reply, uses.position),
    )
    crcs = np.zeros(len(taken) + len(wanted), np.uint32)
    crcs[taken] = sums.crc
    return crcs[wanted], np.isin(wanted, taken)


def _numbered(columns: tuple[Ints, ...], queries: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """Return a number for each row of ``columns`` and of ``queries``: equal where all columns are,
    and below the number of rows of both."""
    both = tuple(np.concatenate(pair) for pair in zip(columns, queries, strict=True))
    order = np.lexsort(both)
    is_new = np.zeros(len(order), np.bool_)
    is_new[1:] = np.any(tuple(each[order[1:]] != each[order[:-1]] for each in both), axis=0)
    number = np.zeros(len(order), np.int64)
    number[order] = np.cumsum(is_new)
    first, *_ = columns
    return number[: len(first)], number[len(first) :]
