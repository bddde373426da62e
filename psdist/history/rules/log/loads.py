"""The rules on values that the chief has set during a run (job.set_parameters).

Owns the loads of rule 1 of docs/reference/history.md; ``checksums`` compares the bytes. Pure.

    clocks = check_loads(replay, findings)                   # of one server
    check_same_loads({0: (3, 5), 1: (3, 5)}, findings)       # of all chunks of the run
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from psdist.history import Ints
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.replay import ServerReplay


def check_loads(replay: ServerReplay, findings: Findings) -> dict[int, tuple[int, ...]]:
    """Require that the chunk's server sets values for the chief, when the chunk contains all pushes
    of its group. Return the clocks of the loads, by chunk of the server."""
    broken = findings[Rule.LOADS]
    loads = replay.loads
    chunk, position, clock = replay.load_chunk, replay.load_position, loads["clock"]
    owners = replay.owners

    def line(i: int) -> str:
        return (
            f"server {replay.server}, position {position[i]}, chunk {chunk[i]}: values that were "
            f"set at iteration {clock[i]} of group {loads['group'][i]}"
        )

    broken.add_where(
        owners[chunk] != replay.server,
        lambda i: f"{line(i)}: server {owners[chunk[i]]} owns the chunk",
    )
    chief = _chiefs(replay, position)
    broken.add_where(
        (loads["group"] != chief) | (loads["lr_scale"] != 1),
        lambda i: f"{line(i)}: set by the chief, of group {chief[i]}, and scaled by nothing",
    )
    contained, missed = np.zeros((2, len(chunk)), np.int64)
    for group in np.unique(chief).tolist():
        for counts, rows in ((contained, replay.group == group), (missed, replay.is_missed)):
            so_far = np.concatenate([[0], np.cumsum(rows & (replay.group == group))])
            here = so_far[replay.row_of(chunk, position)] - so_far[replay.first_row[chunk]]
            counts[chief == group] = here[chief == group]
    contained += replay.first[chief]
    # The chief may not know yet of rounds that it has missed.
    is_wrong = (contained < clock) | (contained - missed > clock)
    broken.add_where(
        is_wrong,
        lambda i: f"{line(i)}: the chunk contains {contained[i]} updates of the group then",
    )
    # The next chief repeats a load that its predecessor did not complete.
    is_whole = ~np.isin(loads["group"], [group for _, group in replay.deaths])
    return {
        mine: tuple(clock[(chunk == mine) & is_whole].tolist()) for mine in replay.owned.tolist()
    }


def _chiefs(replay: ServerReplay, positions: Ints) -> Ints:
    """Return the group of the first worker that is in the job at each position."""
    run = replay.run
    group_of = run.group_of_worker()
    epochs = replay.epoch_of(positions)
    chiefs: Ints = np.full(len(positions), group_of[0])
    begins = [0] * run.first_substitute + replay.joined_at
    is_gone = positions[:, None] < np.asarray(begins)
    for epoch, group in replay.deaths:
        is_gone[:, group] |= epochs >= epoch
    for row in np.flatnonzero(is_gone[:, group_of[0]]):
        living = [each for each in group_of.tolist() if not is_gone[row, each]]
        chiefs[row] = living[0] if living else -1
    return chiefs


def check_same_loads(clocks: Mapping[int, tuple[int, ...]], findings: Findings) -> None:
    """Require equal clocks of the loads of all chunks."""
    first, *others = sorted(clocks) or [0]
    for chunk in others:
        if clocks[chunk] != clocks[first]:
            findings[Rule.LOADS].add(
                f"values of chunk {chunk} were set at iterations {list(clocks[chunk])}, of chunk "
                f"{first} at {list(clocks[first])}"
            )
