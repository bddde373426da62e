"""The rules on applied updates: the factor on the learning rate, the weight, EMPTY, the codec.

Owns rules 5 and 10 of docs/reference/history.md. Pure.

    num_unknown = check_weights(replay, claims, whole_workers, findings)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from psdist.history import Ints
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.reformed import is_in_place_of_the_dead
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.pushes import Claims
from psdist.history.rules.values.uses import Uses


def check_scales(replay: ServerReplay, uses: Uses, findings: Findings) -> None:
    """lr_scale is weight / active workers in ssp and async, times the factor of how stale the
    update was where the run has one; 1 in sync and where the update is empty. ``uses``: of this
    server's chunks."""
    expected = np.ones(replay.num_rows, np.float32)
    active = replay.num_active_workers[replay.epoch_of(replay.position)]
    if len(replay.inherited):
        lost = replay.pushers.lost
        sizes = np.array(
            [len(each) - len(lost.get(at, ())) for at, each in enumerate(replay.run.groups)]
        )
        is_alone = replay.is_inherited & (active == 0)
        active = np.where(is_alone, sizes[replay.group], active)
    is_gathered = replay.rules.is_gathered(replay.clock)
    with np.errstate(all="ignore"):  # a weight may be anything
        share = replay.weight / active
        in_log = share.astype(np.float32)
    is_known = np.ones(replay.num_rows, np.bool_)
    if replay.run.stale_lr != "off":
        factors = factors_of(replay, uses)
        # A record that ends early may lack pushes.
        is_known = ~np.isnan(factors)
        with np.errstate(all="ignore"):
            in_log = (share * factors).astype(np.float32)
    expected = np.where(replay.is_empty | is_gathered, expected, in_log)
    findings[Rule.SCALES].add_where(
        (expected != replay.lr_scale) & (is_known | replay.is_empty),
        lambda row: (
            f"{replay.line(row)}: lr_scale {replay.lr_scale[row]:g} where {expected[row]:g} "
            f"belongs (weight {replay.weight[row]:g}, {active[row]:g} active workers)"
        ),
    )


def check_weights(replay: ServerReplay, claims: Claims, is_whole: Ints, findings: Findings) -> int:
    """Require weights that are finite, not negative, and positive with a gradient. Weight and EMPTY
    are those that the worker recorded. Return the number of updates that are missing in a record
    that ends early; ``is_whole`` [workers]: False if it does."""
    broken = findings[Rule.WEIGHTS]
    weight, is_empty = replay.weight, replay.is_empty
    is_good = np.isfinite(weight) & ((weight > 0) | (is_empty & (weight == 0)))
    is_good &= ~replay.is_missed | (weight == 0)
    broken.add_where(
        ~is_good,
        lambda row: f"{replay.line(row)}: weight {weight[row]:g}{_or_empty(is_empty[row])}",
    )
    worker = replay.pusher
    entry, is_said = claims.index_of(worker, replay.clock)
    said = np.flatnonzero(is_said & ~replay.is_missed & ~is_in_place_of_the_dead(replay))
    brought = claims.weight[entry[said]]
    broken.add_each(
        said[brought != weight[said]],
        lambda row: (
            f"{replay.line(row)}: applied with weight {weight[row]:g}, worker {worker[row]} "
            f"pushed it with {claims.weight[entry[row]]:g}"
        ),
    )
    is_said_empty = np.zeros(replay.num_rows, np.bool_)
    is_said_empty[said] = claims.is_chunk_empty(entry[said], replay.chunk[said])
    broken.add_each(
        said[is_said_empty[said] != is_empty[said]],
        lambda row: (
            f"{replay.line(row)}: applied with{'out' * int(is_empty[row])} a gradient, worker "
            f"{worker[row]} pushed it with{'out' * int(is_said_empty[row])} one"
        ),
    )
    broken.add_where(
        ~is_said & is_whole[worker] & ~replay.is_missed,
        lambda row: f"{replay.line(row)}: worker {worker[row]} says that it never pushed it",
    )
    return int(np.count_nonzero(~is_said & ~is_whole[worker] & ~replay.is_missed))


def _or_empty(is_empty: bool) -> str:
    return "" if is_empty else " with a gradient; that needs a weight above 0"


def factors_of(replay: ServerReplay, uses: Uses) -> npt.NDArray[np.float64]:
    """Return 1 / max(1, tau) of each row, [rows]; NaN where nothing records what was used.

    tau is the number of steps that each of the others has made of the chunk between the parameters
    that the gradient was computed on and the update
    (docs/guides/stale-updates.md). The worker's record, not the server's, says which parameters
    were used. ``uses``: those that cover this server's log.
    """
    found, used = _used(replay, uses)
    factors = np.full(replay.num_rows, np.nan)
    rows = np.flatnonzero(found)
    chunk, at = replay.chunk[rows], replay.position[rows]
    behind = replay.version_of(chunk, at) - replay.version_of(chunk, used[rows])
    groups = replay.num_active_groups[replay.epoch_of(at)]
    factors[rows] = 1.0 / np.maximum(1.0, behind / np.maximum(1, groups - 1))
    return factors


def _used(replay: ServerReplay, uses: Uses) -> tuple[Ints, Ints]:
    """Return, for each row, True if it is known, and the position that the worker that pushed the
    chunk used last in that iteration."""
    mine = np.flatnonzero(uses.worker == replay.run.slice_owner(uses.group, uses.chunk))
    key = replay.update_of(uses.chunk[mine], uses.group[mine], uses.iteration[mine])
    position = uses.position[mine]
    order = np.lexsort((position, key))
    key, position = key[order], position[order]
    wanted = replay.update_of(replay.chunk, replay.group, replay.clock)
    at = np.searchsorted(key, wanted, side="right") - 1
    found = np.zeros(replay.num_rows, np.bool_)
    if len(key):
        found = (at >= 0) & (key[at] == wanted)
        return found, np.where(found, position[at], 0)
    return found, np.zeros(replay.num_rows, np.int64)


def check_codecs(replay: ServerReplay, findings: Findings) -> None:
    """Require that each update came by the codec of run.json; an empty update has none."""
    parts = replay.run.codecs
    if not parts:
        promised = np.zeros(replay.num_rows, np.int64)
    else:
        starts = np.asarray([each.round for each in parts], np.int64)
        codes = np.asarray([each.push_code for each in parts], np.int64)
        part = np.searchsorted(starts, replay.clock, side="right") - 1
        promised = codes[part]
        for number, each in enumerate(parts):
            if each.burst:
                number_of_round = replay.clock.astype(np.int64) + 1
                is_burst = (part == number) & (number_of_round % each.burst == 0)
                promised[is_burst] = each.burst_code
    promised[replay.is_empty] = 0
    findings[Rule.CODECS].add_where(
        replay.codec != promised,
        lambda row: (
            f"{replay.line(row)}: came by codec {replay.codec[row]}; run.json says {promised[row]} "
            "of its round"
        ),
    )
