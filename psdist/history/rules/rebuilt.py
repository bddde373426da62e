"""The rules on shards that were made anew, because their server had died and nobody had a copy.

Owns rule 12 of docs/history.md; that updates are applied once and in order, also beside what is
lost, is the matter of :mod:`psdist.history.rules.applies`. Pure: reads a replay and the uses of its
chunks, adds to the findings.

    num_lost = check_rebuilt(replay, uses, findings)
"""

from __future__ import annotations

from functools import partial

import numpy as np

from psdist.history.records import EventKind, Ints, Records
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.replay import ServerReplay
from psdist.history.rules.uses import Uses


def check_rebuilt(
    replay: ServerReplay, events: Records, uses: Uses, findings: Findings
) -> list[tuple[int, int, int]]:
    """Every REBUILT says of each chunk with which values it goes on, and which updates may be lost:
    at most one of each group and chunk, the last that counts. ``events``: the whole log; ``uses``:
    of this server's chunks, within it. What is lost: (chunk, group, clock) of each."""
    where = f"server {replay.server}, position"
    _check_blocks(replay, events, findings)
    for position, held in zip(replay.held_position.tolist(), replay.held, strict=True):
        chunk, at, version = int(held["chunk"]), int(held["weight"]), int(held["clock"])
        seen = 1 + int(replay.version_of(np.array([chunk]), np.array([at]))[0])
        if seen != version:
            findings.add(
                Rule.REBUILT,
                f"{where} {position}: chunk {chunk} goes on in version {version}, with values of "
                f"position {at}, where it was in version {seen}",
            )
        is_newer = (uses.chunk == chunk) & (uses.position > at) & (uses.position <= position)
        findings.add_each(
            Rule.REBUILT,
            np.flatnonzero(is_newer),
            partial(_say_newer, uses, at, position),
        )
    lost = events[replay.lost_position]
    for position, is_contained, each in zip(
        replay.lost_position.tolist(), replay.is_contained_after_all.tolist(), lost, strict=True
    ):
        chunk, group, clock = (int(each[name]) for name in ("chunk", "group", "clock"))
        rows = replay.rows_of_group[group]
        rows = rows[(replay.chunk[rows] == chunk) & (replay.position[rows] < position)]
        newest = int(replay.clock[rows[-1]]) if len(rows) else int(replay.first[group]) - 1
        if clock != (newest if is_contained else newest + 1):
            findings.add(
                Rule.REBUILT,
                f"{where} {position}: update {clock} of group {group} is said to be lost for chunk "
                f"{chunk}, which contains {newest + 1} of them then",
            )
    names = ("chunk", "group", "clock")
    gone = lost[~replay.is_contained_after_all]
    return list(zip(*(gone[name].tolist() for name in names), strict=True))


def _say_newer(uses: Uses, at: int, position: int, use: int) -> str:
    return (
        f"{uses.line(use)}: newer than position {at}, with whose values the chunk went on "
        f"at {position}: what it had contained is lost"
    )


def _check_blocks(replay: ServerReplay, events: Records, findings: Findings) -> None:
    """What stands behind REBUILT: JOIN of every group and LEAVE of those that had left, HELD of
    each of the server's chunks, LOST of each chunk and group at most once; nowhere else."""
    owned = np.flatnonzero(np.asarray(replay.run.owners, np.int64) == replay.server).tolist()
    is_accounted = ~np.isin(events["kind"], (EventKind.HELD, EventKind.LOST))
    for begin in replay.rebuilt_position.tolist():
        at = begin + 1
        while at < len(events) and events["kind"][at] in (EventKind.JOIN, EventKind.LEAVE):
            at += 1
        held, at = _run_of(events, at, EventKind.HELD)
        lost, until = _run_of(events, at, EventKind.LOST)
        is_accounted[begin:until] = True
        chunks = held["chunk"].tolist()
        is_cut = until == len(events) and not replay.is_complete
        if chunks != owned and not (is_cut and chunks == owned[: len(chunks)]):
            findings.add(
                Rule.REBUILT,
                f"server {replay.server}, position {begin}: the shard goes on with values of "
                f"chunks {chunks}, it has {owned}",
            )
        pairs = list(zip(lost["chunk"].tolist(), lost["group"].tolist(), strict=True))
        if pairs != sorted(set(pairs)):
            findings.add(
                Rule.REBUILT,
                f"server {replay.server}, position {begin}: updates of the same group and chunk "
                "are lost twice, or they stand in another order",
            )
    findings.add_each(
        Rule.REBUILT,
        np.flatnonzero(~is_accounted),
        lambda i: (
            f"server {replay.server}, position {i}: {EventKind(events['kind'][i]).name} of chunk "
            f"{events['chunk'][i]}, and no server had died"
        ),
    )


def _run_of(events: Records, at: int, kind: EventKind) -> tuple[Records, int]:
    """The events of this kind from ``at`` on, and where they end."""
    others: Ints = np.flatnonzero(events["kind"][at:] != kind)
    until = at + int(others[0]) if len(others) else len(events)
    return events[at:until], until
