"""Whether a run that was played kept the rules: its end, its recorded history, its values.

prove(play(Schedule.from_seed(7)))
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import eq, ge
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psdist.codecs.wire import RAW_WIRE
from psdist.commands.check import check_sets_of
from psdist.errors import CollectiveError, HyperparameterError, PeerLostError
from psdist.history import EventKind, History, ServerLog
from psdist.protocol.ids import describe_peer, is_worker, server_id, worker_id
from psdist.servers.protocol.coordinator import Complete, EndJob, WriteMetrics
from psdist.servers.shard.regions import starts_of
from tests.support.history.summaries import summary_of
from tests.support.virtual.job import SetOfJob, VirtualJob
from tests.support.virtual.numbers import initial_values
from tests.support.virtual.reference import TOLERANCE, Reference, Versions


def prove(job: VirtualJob) -> None:
    """The job has ended as it must; its history keeps the mode's rules, workers and servers count
    as the history does; and every value is what arithmetic says."""
    if not job.schedule.has_model:
        prove_the_end(job)
        return
    histories = [each.history() for each in job.sets]
    is_whole = job.dead is None and not job.schedule.mistake
    report = check_sets_of(histories, summary_of(job) if is_whole else None)
    assert not report.violations, report.violations[:5]
    if job.dead is not None:
        prove_that_all_name_the_dead(job)
    elif job.schedule.mistake:
        prove_that_the_mistake_is_told(job)
    else:
        assert report.proved
        seen = [
            staleness
            for each in job.sets
            for worker in each.workers
            for staleness in worker.staleness_seen
        ]
        assert max(seen, default=0) == report.max_staleness, "client and check disagree"
        prove_the_end(job)
    if job.wire is RAW_WIRE:
        for each, history in zip(job.sets, histories, strict=True):
            prove_values(each, history)


def prove_the_end(job: VirtualJob) -> None:
    """Nothing is owed, and everything was reported once."""
    if job.watch is not None:
        job.watch.check_end()
    completed = [each for each in job.reported if isinstance(each, Complete)]
    assert len(completed) == 1
    lines = sum(isinstance(each, WriteMetrics) for each in job.reported)
    assert lines == sum(worker.num_lines for worker in job.workers)


def prove_that_all_name_the_dead(job: VirtualJob) -> None:
    assert job.dead is not None
    assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
    for peer, error in job.errors.items():
        assert isinstance(error, PeerLostError), f"{describe_peer(peer)}: {error!r}"
        assert str(error).startswith(f"{describe_peer(job.dead)} has failed; ")


def prove_that_the_mistake_is_told(job: VirtualJob) -> None:
    """By the first error, which ends a job; here, where it does not, by every worker's that comes
    to the collective. A worker that did not come waits for the end, and so do servers."""
    mistake, last = job.schedule.mistake, {worker_id(worker) for worker in job.groups[-1]}
    assert job.errors
    if mistake == "other lr":
        for peer, error in job.errors.items():
            assert not is_worker(peer)
            assert isinstance(error, HyperparameterError)
            assert f" and {len(job.groups) - 1} disagree on hyperparameters: lr" in str(error)
        return
    others = {worker_id(worker.worker) for worker in job.workers} - last
    told = others if mistake == "absent" else others | last
    assert set(job.errors) == told
    assert {peer for peer in job.network.unfinished if is_worker(peer)} == last - told
    words = {"absent": "absent: worker", "other name": "made different calls"}
    for error in job.errors.values():
        assert isinstance(error, CollectiveError)
        assert words[mistake] in str(error) or "although both iterate" in str(error)
    failures = [each for each in job.reported if isinstance(each, EndJob)]
    assert sorted(each.failure.heading for each in failures) == sorted(map(describe_peer, told))


# -- values ----------------------------------------------------------------------------------------


def prove_values(job: SetOfJob, history: History) -> Reference:
    """The parameters of every chunk after its last step, those that every forward pass found in
    memory and those that were saved are what plain arithmetic makes of the workers' draws."""
    partition = job.partition
    reference = Reference(
        is_gathered=job.is_gathered,
        partition=partition,
        groups=job.groups,
        initial=[
            initial_values(index + job.set_index, torch.empty(piece.shape)).numpy()
            for index, piece in enumerate(partition.pieces)
        ],
        draws=[worker.draws for worker in job.workers],
        pushed=job.workers[0].pushed,
        used=_used(history) if job.schedule.is_stale_aware else None,
        has_stale_lr=job.schedule.stale_lr != "off",
        compensation=job.schedule.compensation,
        tables=_of_set(job, job.tables),
        given_up={key[1:] for key in job.given_up if key[0] == job.set_index},
        max_norm=job.schedule.max_norm(job.set_index),
    )
    versions: dict[int, Versions] = {}
    for log in history.servers:
        mine = [chunk for chunk, owner in enumerate(job.owners) if owner == log.server]
        versions.update(reference.replay(log, mine))
    _compare_uses(job, history, reference, versions)
    _compare_copies(job, history, reference, versions)
    _compare_snapshots(job, history, versions)
    for index, server in enumerate(job.owners):
        loop = job.set_loop(server)
        chunk = loop and loop.core.chunk_states.get(index)
        if not chunk or not chunk.is_loaded or server_id(server) == job.dead:
            continue  # it may have failed between a step and its record
        last = versions[index].positions[-1:]
        seen = job.parameters_of(index).numpy()[np.newaxis]
        reference.compare(versions[index], last, seen, f"chunk {index} at its server")
    return reference


def _of_set(
    job: SetOfJob, tables: Mapping[tuple[int, int, int], list[tuple[int, ...]]]
) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """By group and iteration."""
    return {key[1:]: each for key, each in tables.items() if key[0] == job.set_index}


def _used(history: History) -> dict[tuple[int, int, int], int]:
    """(chunk, group, iteration) -> position of what the chunk's worker had used last when it ended
    the iteration."""
    group_of, used = history.run.group_of_worker(), {}
    for log in history.workers:
        group = int(group_of[log.worker])
        for use in log.uses:
            chunk = int(use["chunk"])
            (owner,) = history.run.slice_owner(np.array([group]), np.array([chunk]))
            if owner == log.worker:
                used[chunk, group, int(use["iteration"])] = int(use["position"])
    return used


def _compare_uses(
    job: SetOfJob, history: History, reference: Reference, versions: dict[int, Versions]
) -> None:
    num_chunks = len(job.owners)
    positions: list[npt.NDArray[Any]] = []
    found: list[npt.NDArray[Any]] = []
    for worker, log in zip(job.workers, history.workers, strict=True):
        count = len(log.uses) // num_chunks
        by_use = log.uses.reshape(count, num_chunks)
        assert (by_use["chunk"] == np.arange(num_chunks)).all()
        assert len(worker.used) - count in (0, 1), "a use that was begun and not recorded"
        positions.append(by_use["position"])
        found += worker.used[:count]
    if not found:
        return
    all_positions, all_found = np.concatenate(positions), np.stack(found)
    starts = np.cumsum([0, *(buffer.num_elements for buffer in job.partition.buffers)])
    for index, chunk in enumerate(job.partition.chunks):
        start = starts[chunk.buffer] + chunk.start
        reference.compare(
            versions[index],
            all_positions[:, index],
            all_found[:, start : start + chunk.length],
            f"chunk {index} in a worker's memory",
        )


def _compare_copies(
    job: SetOfJob, history: History, reference: Reference, versions: dict[int, Versions]
) -> None:
    """A save has every update from before it, and no other: no worker trains meanwhile."""
    for clocks, (num_pushed, copy) in zip(job.clocks_at_save, job.copies, strict=False):
        if len(clocks) < len(job.groups):
            continue  # a death came between
        for index, seen in enumerate(copy):
            position = _position_of(history.servers[job.owners[index]], index, clocks)
            if num_pushed:
                position = max(position, versions[index].positions_of_loads[num_pushed - 1])
            reference.compare(
                versions[index], [position], seen[np.newaxis], f"chunk {index} in a save"
            )


def _compare_snapshots(job: SetOfJob, history: History, versions: dict[int, Versions]) -> None:
    """A snapshot of a chunk contains exactly the updates that every group had made when it came to
    the checkpoint, and its values are those that these make."""
    leaders = [job.workers[members[0]] for members in job.groups]
    for index, chunk in enumerate(job.partition.chunks):
        log, keeper = history.servers[job.owners[index]], job.keepers[job.owners[index]]
        events = log.events
        is_kept = (events["kind"] == EventKind.SNAPSHOT) & (events["chunk"] == index)
        (positions,) = np.nonzero(is_kept)
        whole = keeper.checkpoints[: len(positions)]  # a death may have come before the writing
        for number, (position, kept) in enumerate(zip(positions, whole, strict=False)):
            before = events[:position]
            is_update = np.isin(before["kind"], (EventKind.APPLY, EventKind.MISSED))
            applies = before[is_update & (before["chunk"] == index)]
            counts = np.bincount(applies["group"], minlength=len(job.groups)).tolist()
            living = [
                group
                for group, each in enumerate(leaders)
                if number < len(each.in_first.kept) and each.in_first.kept[number]
            ]
            contained = [counts[group] + int(history.first[group]) for group in living]
            cut = [leaders[group].in_first.kept[number][job.set_index] for group in living]
            # Groups may not know of rounds that they have missed.
            fits = map(ge if job.schedule.backup else eq, contained, cut)
            assert all(fits), f"{kept.name} of chunk {index} contains {contained}, not {cut}"
            starts = starts_of(job.partition, chunk)
            for segment, start in zip(chunk.segments, starts, strict=True):
                region = kept.parts[job.set_index, segment.piece, start]
                part = slice(segment.offset, segment.offset + segment.length)
                wanted = versions[index].at(int(position))[part]
                assert np.abs(region.values.numpy() - wanted).max() <= TOLERANCE * max(
                    1.0, versions[index].largest[versions[index].index_at(int(position))]
                ), f"{kept.name} of chunk {index}"


def _position_of(log: ServerLog, chunk: int, clocks: dict[int, int]) -> int:
    """Behind the last of the updates that groups had made by these clocks."""
    events = log.events
    limits = np.array([clocks[group] for group in range(len(clocks))])
    is_before = (events["kind"] == EventKind.APPLY) & (events["chunk"] == chunk)
    is_before &= events["clock"] < limits[events["group"]]
    (positions,) = np.nonzero(is_before)
    return int(positions[-1]) + 1 if len(positions) else 0
