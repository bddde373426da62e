"""The checkpoint that is being written, and the ranks whose files are awaited; pure.

Servers copy their part of a checkpoint before the job continues. Files are written afterwards.
Every server and worker reports the outcome to the coordinator. After all reports the checkpoint is
complete, or it is dropped and the previous one stays the newest. One is written at a time.

    checkpoints = Checkpoints(num_workers=1, num_servers=1)
    checkpoints.begin([(12,)])             # BeginCheckpoint("step-00000012")
    checkpoints.on_told(server_id(0), Written(checkpoint="step-00000012", num_bytes=9, crc32=1))
    checkpoints.is_busy                    # until worker 0 has reported, too
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from psdist.controller.kept import TuningState
from psdist.controller.snapshots import Fields
from psdist.errors import InvariantError
from psdist.protocol.checkpoints import (
    CHECKPOINT,
    MOST_PROBLEM_CHARACTERS,
    WRITTEN,
    checkpoint_name,
    unpack_clocks,
)
from psdist.protocol.control import Control, WriteFailed, Written
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.collectives import Collective
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart, refuse

Clocks: TypeAlias = list[tuple[int, ...]]
"""By worker and parameter set: iterations of the worker's group in the checkpoint."""


@dataclass(slots=True)
class BeginCheckpoint:
    """Files of this checkpoint are about to be written."""

    checkpoint: str


@dataclass(slots=True)
class KeepTuningState:
    """Choices of psdist that are part of the checkpoint."""

    checkpoint: str
    fidelity: TuningState
    """The tuning state, under its older name in files."""


@dataclass(slots=True)
class CompleteCheckpoint:
    """All files are written: mark the checkpoint complete on the disk."""

    checkpoint: str
    clocks: Clocks
    files: dict[int, tuple[int, int]]
    """By peer: bytes and CRC-32 of its file."""


@dataclass(slots=True)
class DropCheckpoint:
    """A file is missing: the previous checkpoint stays the newest."""

    checkpoint: str
    problems: dict[int, str]
    """By peer: why."""


@dataclass(slots=True)
class _Writing:
    checkpoint: str
    clocks: Clocks
    awaited: set[int]
    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)


class Checkpoints(CoordinatorPart):
    NAME = "checkpoints"
    TAKES = (Written, WriteFailed)
    COMPLETES = (CHECKPOINT, WRITTEN)
    STATE = Fields(
        {
            set[int]: "_everybody",
            _Writing | None: "_writing",
            int | None: "_waiting",
        }
    )

    def __init__(
        self,
        *,
        num_workers: int,
        num_servers: int,
        substitutes: Collection[int] = (),
    ) -> None:
        """``substitutes``: workers that have still to join."""
        self._everybody = {
            *map(server_id, range(num_servers)),
            *map(worker_id, set(range(num_workers)) - set(substitutes)),
        }
        self._writing: _Writing | None = None
        self._waiting: int | None = None
        """Number of a collective that all workers have entered; it waits until the files of the
        previous checkpoint are written."""

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        assert isinstance(message, Written | WriteFailed)
        return [*self.on_told(peer, message), *self._go_on(job)]

    def accepts(self, name: str, payload: bytes) -> bool:
        return name == WRITTEN or unpack_clocks(payload) is not None

    def complete(self, seq: int, collective: Collective, job: Coordinator) -> Actions:
        if collective.name == CHECKPOINT:
            return self._begin(seq, collective, job)
        if self.is_busy:
            self._waiting = seq
            return []
        return job.resume(seq)

    def _begin(self, seq: int, collective: Collective, job: Coordinator) -> Actions:
        of_worker = {
            worker: unpack_clocks(collective.entered[worker].payload) or ()
            for worker in job.membership.live
        }
        clocks = list(of_worker.values())
        if fault := collective.fault_of_sets(clocks):
            return job.fail(seq, fault)
        if self.is_busy:
            self._waiting = seq
            return []
        for part in job.parts:
            of_worker = part.resume_at(of_worker)
        # A job that resumes from here has the failed workers again, at the clocks of the others.
        lowest = tuple(map(min, zip(*clocks, strict=True)))
        begun = self.begin([of_worker.get(worker, lowest) for worker in range(job.num_workers)])
        collective.answer_all(begun.checkpoint.encode())
        kept = job.kept(lowest[0])
        choices = [] if kept == TuningState() else [KeepTuningState(begun.checkpoint, kept)]
        return [begun, *choices, *job.resume(seq, begun.checkpoint)]

    def _go_on(self, job: Coordinator) -> Actions:
        """Complete the waiting collective, if no file is awaited any more."""
        if self._waiting is None or self.is_busy:
            return []
        seq, self._waiting = self._waiting, None
        return job.retry(seq)

    def on_joined(self, worker: int, clocks: Sequence[int]) -> Actions:
        self._everybody.add(worker_id(worker))
        return []

    def on_membership_changed(self, job: Coordinator) -> Actions:
        out = [worker_id(worker) for worker in sorted(job.membership.out)]
        return [*self.on_lost(out), *self._go_on(job)]

    def ask_again(self, server: int, job: Coordinator) -> Actions:
        is_told_again = any(
            each.told is not None and server not in each.answered
            for each in job.collectives.values()
        )
        dropped = self.lose_server(server_id(server), is_asked_again=is_told_again)
        return [*dropped, *self._go_on(job)]

    @property
    def is_busy(self) -> bool:
        """True while files of a checkpoint are awaited."""
        return self._writing is not None

    def begin(self, clocks: Clocks) -> BeginCheckpoint:
        """Begin a checkpoint. All workers wait at these clocks."""
        if self._writing is not None:
            raise InvariantError("a checkpoint began before the last one was over")
        name = checkpoint_name(min(first for first, *_ in clocks))
        self._writing = _Writing(name, clocks, set(self._everybody))
        return BeginCheckpoint(name)

    def on_told(
        self, peer: int, message: Written | WriteFailed
    ) -> list[CompleteCheckpoint | DropCheckpoint]:
        """A rank has written its file, or cannot write it."""
        writing = self._writing
        if writing is None or message.checkpoint != writing.checkpoint:
            now = "none" if writing is None else writing.checkpoint
            refuse(
                peer,
                f"told of its file of checkpoint {message.checkpoint[:80]!r}; {now} is being "
                "written",
            )
        if peer not in writing.awaited:
            refuse(peer, "told of its file twice, or writes none")
        if isinstance(message, Written):
            if message.num_bytes < 0 or not 0 <= message.crc32 < 2**32:
                refuse(
                    peer,
                    f"told of a file of {message.num_bytes} bytes with the CRC-32 {message.crc32}",
                )
            writing.files[peer] = message.num_bytes, message.crc32
        else:
            problem = message.problem
            if len(problem) > MOST_PROBLEM_CHARACTERS or not problem.isprintable():
                refuse(peer, "told of a file that it cannot write in no printable words")
            writing.problems[peer] = problem
        writing.awaited.remove(peer)
        return self._end_if_all_told(writing)

    def _end_if_all_told(self, writing: _Writing) -> list[CompleteCheckpoint | DropCheckpoint]:
        if writing.awaited:
            return []
        self._writing = None
        if writing.problems:
            return [DropCheckpoint(writing.checkpoint, writing.problems)]
        return [CompleteCheckpoint(writing.checkpoint, writing.clocks, writing.files)]

    def on_lost(self, peers: Collection[int]) -> list[CompleteCheckpoint | DropCheckpoint]:
        """These ranks have left the job, so their files are not awaited any more. If one of them
        was, the checkpoint is dropped when all other ranks have reported."""
        self._everybody -= set(peers)
        writing = self._writing
        if writing is None:
            return []
        for peer in sorted(writing.awaited & set(peers)):
            writing.problems[peer] = "has failed"
        writing.awaited -= set(peers)
        return self._end_if_all_told(writing)

    def lose_server(
        self, peer: int, *, is_asked_again: bool
    ) -> list[CompleteCheckpoint | DropCheckpoint]:
        """A server failed, and another one has replaced it. An awaited file of the failed server is
        lost, unless its successor will be asked to write it (``is_asked_again``)."""
        writing = self._writing
        if writing is None or peer not in writing.awaited or is_asked_again:
            return []
        problem = "the server failed before its file was written"
        return self.on_told(peer, WriteFailed(checkpoint=writing.checkpoint, problem=problem))

    def require_finished(self, peer: int) -> None:
        if self._writing is not None and peer in self._writing.awaited:
            refuse(peer, f"is done, and has not told of its file of {self._writing.checkpoint}")
