"""The workers' records of their own pushes: the weight of each iteration, and the empty chunks.

Owns the rule that every worker records each iteration once, consistently with its group.
:mod:`psdist.history.rules.values.weights` compares them with the servers' applies. Pure.

    claims = Claims.of(history, findings)
    entries, is_said = claims.index_of(workers, iterations)     # into claims.weight
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psdist.history import NO_CHUNK, History, Ints, WorkerLog
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.reformed import Pushers, lost_workers, stamps_of

_ROUNDING = 1e-9
"""Relative: a group adds its workers' weights, in whatever order."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Claims:
    """One entry for each worker and iteration, worker after worker."""

    num_chunks: int
    first: Ints
    """First entry of each worker, then the number of entries."""
    begin: Ints
    """First iteration of each worker."""
    weight: Floats
    own: Floats
    is_empty: Ints
    """True if no chunk of the worker's slice had a gradient."""
    empty_chunks: Ints
    """entry * num_chunks + chunk of each single chunk without a gradient."""

    @classmethod
    def of(cls, history: History, findings: Findings) -> Claims:
        """Return the claims. A worker's records count up to the first contradiction."""
        num_chunks = history.run.num_chunks
        group_of = history.run.group_of_worker()
        begin = history.first[group_of]
        first, columns = [0], []
        empty_chunks: list[int] = []
        for log in history.workers:
            is_whole = log.pushes["chunk"] == NO_CHUNK
            whole = log.pushes[is_whole]
            num = _check_order(log, whole["iteration"], int(begin[log.worker]), findings)
            if not log.is_complete:
                num = max(0, num - 1)  # its last iteration may lack chunks that were empty
            whole = whole[:num]
            columns.append(whole)
            _check_each(log, whole, findings)
            entry = np.cumsum(is_whole) - 1
            parts = np.flatnonzero(~is_whole & (entry < num))
            is_mine = _ever_has(history, log.worker, int(group_of[log.worker]))
            parts = _check_parts(log, is_mine, parts, findings)
            chunks = log.pushes["chunk"][parts].astype(np.int64)
            empty_chunks.extend(((first[-1] + entry[parts]) * num_chunks + chunks).tolist())
            first.append(first[-1] + num)
        claims = cls(
            num_chunks=num_chunks,
            first=np.asarray(first),
            begin=begin,
            weight=np.concatenate([each["weight"] for each in columns]),
            own=np.concatenate([each["own"] for each in columns]),
            is_empty=np.concatenate([each["is_empty"] for each in columns]) != 0,
            empty_chunks=np.asarray(empty_chunks, np.int64),
        )
        lost, stamps = lost_workers(history), stamps_of(history)
        for group, members in enumerate(history.run.groups):
            gone: set[int] = set().union(*lost.get(group, ()))
            if gone and not num_chunks:
                continue  # nothing that any weight would be of
            told = stamps.get(group, {})
            died_in = {worker: told.get(worker, set()) for worker in gone}
            _check_group(group, members, claims, findings, died_in=died_in)
        return claims

    def num_iterations(self, worker: int) -> int:
        return int(self.first[worker + 1] - self.first[worker])

    def index_of(self, workers: Ints, iterations: Ints) -> tuple[Ints, Ints]:
        """Return the entry of each (worker, iteration), and True where it exists."""
        iterations = np.maximum(iterations - self.begin[workers], 0)
        entries: Ints = self.first[workers] + iterations
        return entries, entries < self.first[workers + 1]

    def is_chunk_empty(self, entries: Ints, chunks: Ints) -> Ints:
        """Return True where the worker pushed the chunk without a gradient."""
        is_alone_empty = np.isin(entries * self.num_chunks + chunks, self.empty_chunks)
        is_empty: Ints = self.is_empty[entries] | is_alone_empty
        return is_empty


def _check_order(log: WorkerLog, iterations: Ints, begin: int, findings: Findings) -> int:
    """Return the number of iterations that follow each other from ``begin`` on."""
    is_wrong = iterations != np.arange(begin, begin + len(iterations))
    num = int(np.argmax(is_wrong)) if is_wrong.any() else len(iterations)
    if num < len(iterations):
        findings[Rule.PUSHES].add(
            f"worker {log.worker}: pushed iteration {iterations[num]} where {begin + num} is the "
            "next"
        )
    return num


def _check_each(log: WorkerLog, whole: Ints, findings: Findings) -> None:
    broken = findings[Rule.PUSHES]
    weight, own = whole["weight"], whole["own"]
    is_good = np.isfinite(weight) & (weight >= 0) & np.isfinite(own) & (own >= 0)
    broken.add_where(
        ~is_good,
        lambda i: (
            f"worker {log.worker}, iteration {whole['iteration'][i]}: brought weight {own[i]}, its "
            f"group {weight[i]}; weights are finite and not negative"
        ),
    )
    broken.add_where(
        (weight == 0) & (whole["is_empty"] == 0),
        lambda i: (
            f"worker {log.worker}, iteration {whole['iteration'][i]}: pushed gradients of weight 0"
        ),
    )


def _ever_has(history: History, worker: int, group: int) -> Ints:
    """[chunks]: True if the worker's slice has it, or had it after another worker's failure."""
    run, found = history.run, np.zeros(history.run.num_chunks, np.bool_)
    for log in history.servers or ():
        for owners in Pushers.of(run, log.events).ever(group):
            found |= owners == worker
    return found


def _check_parts(log: WorkerLog, is_mine: Ints, parts: Ints, findings: Findings) -> Ints:
    """Return the ``parts`` (records on one chunk) in the format: after their iteration's record,
    ascending, in the worker's slice (``is_mine``, by chunk), of an iteration that is not empty."""
    pushes = log.pushes
    chunk, before = pushes["chunk"][parts].astype(np.int64), pushes["chunk"][parts - 1]
    # The record of its iteration. A part before all of them gets itself, and is refused: of the
    # two records, one must be empty and the other not.
    whole = np.maximum.accumulate(np.arange(len(pushes)) * (pushes["chunk"] == NO_CHUNK))[parts]
    is_good = (
        (pushes["is_empty"][parts] == 1)
        & (pushes["is_empty"][whole] == 0)
        & ((before == NO_CHUNK) | (before < chunk))
        & is_mine[chunk]
        & (pushes["iteration"][parts] == pushes["iteration"][whole])
        & (pushes["weight"][parts] == pushes["weight"][whole])
        & (pushes["own"][parts] == pushes["own"][whole])
    )
    findings[Rule.PUSHES].add_where(
        ~is_good,
        lambda i: (
            f"worker {log.worker}: record {parts[i]} of its pushes, about chunk {chunk[i]} of "
            f"iteration {pushes['iteration'][parts[i]]}, does not belong where it stands"
        ),
    )
    good: Ints = parts[is_good]
    return good


def _check_group(
    group: int,
    members: Sequence[int],
    claims: Claims,
    findings: Findings,
    *,
    died_in: Mapping[int, set[int]],
) -> None:
    """Require that the workers of a group push with one weight: the sum of their own weights, or 0
    if they skip the iteration. Only iterations in the records of all survivors are compared.

    ``died_in``: the clocks of each failed worker's REFORM events: iterations in which workers may
    have pushed nothing, with weight 0. The worker takes part in no later iteration. In earlier
    iterations that its record lacks, the others push at most that weight."""
    broken = findings[Rule.PUSHES]
    begin = int(claims.begin[members[0]])
    left = [worker for worker in members if worker not in died_in] or members
    num = min(claims.num_iterations(worker) for worker in left)
    iterations = begin + np.arange(num)
    is_said = np.zeros((len(members), num), np.bool_)
    is_in_doubt = np.zeros(num, np.bool_)
    weight, own = np.zeros((2, len(members), num))
    for row, worker in enumerate(members):
        start, known = int(claims.first[worker]), min(num, claims.num_iterations(worker))
        is_said[row, :known] = True
        weight[row, :known] = claims.weight[start : start + known]
        own[row, :known] = claims.own[start : start + known]
        if worker in died_in:
            # If no chunk records the iteration of its failure, the group had left before that.
            last = max(died_in[worker], default=begin + num)
            is_in_doubt |= ~is_said[row] & (iterations <= last)
            _check_none_behind(
                worker, np.flatnonzero(is_said[row] & (iterations > last)) + begin, last, findings
            )
    least = np.where(is_said, weight, np.inf).min(axis=0)
    most = np.where(is_said, weight, -np.inf).max(axis=0)
    if died_in:
        may_be_nothing = np.isin(iterations, sorted(set().union(*died_in.values())))
        is_all_or_nothing = ((weight == 0) | (weight == most)).all(axis=0)
        least = np.where(may_be_nothing & is_all_or_nothing, most, least)
    is_different = least != most
    broken.add_where(
        is_different,
        lambda i: (
            f"group {group}, iteration {begin + i}: its workers "
            f"{[each for each, said in zip(members, is_said[:, i], strict=True) if said]} pushed "
            f"with weights {weight[is_said[:, i], i].tolist()}"
        ),
    )
    total = own.sum(axis=0)
    is_sum = np.isclose(least, total, rtol=_ROUNDING, atol=0.0) | (least == 0)
    is_sum |= is_in_doubt & (total <= least)
    broken.add_where(
        ~is_different & ~is_sum,
        lambda i: (
            f"group {group}, iteration {begin + i}: pushed with weight {least[i]}, its workers "
            f"brought {own[is_said[:, i], i].tolist()}"
        ),
    )


def _check_none_behind(worker: int, iterations: Ints, last: int, findings: Findings) -> None:
    findings[Rule.PUSHES].add_each(
        np.arange(len(iterations)),
        lambda i: (
            f"worker {worker}: pushed iteration {iterations[i]}, but it had failed in iteration "
            f"{last}"
        ),
    )


def check_num_iterations(
    log: WorkerLog, leave_clocks: dict[int, int], claims: Claims, findings: Findings
) -> None:
    """Require that a whole record has the iterations of each server's LEAVE (``leave_clocks``)."""
    num = claims.num_iterations(log.worker) + int(claims.begin[log.worker])
    for server, finished in leave_clocks.items():
        if log.is_complete and num != finished:
            findings[Rule.PUSHES].add(
                f"worker {log.worker}: says that it pushed {num} iterations, its group left "
                f"server {server} after {finished}"
            )
