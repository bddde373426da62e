"""A worker's part in checkpoints: it writes its own file and reports it.

    part = WorkerCheckpoints(session, collect=script_state)
    part.make(collective, clocks)         # job.checkpoint(): "step-00000100"
    part.tell()                           # now and then: report a complete file
    part.finish()                         # before the worker ends
    part.restored()                       # this worker's file of the job's first checkpoint

The file has the result of ``collect()``, a tree of plain values and tensors
(psdist.checkpoint.tree). It is copied before the job continues, and a thread writes it; in one
process it is written at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psdist.checkpoint import tree
from psdist.checkpoint.tensors import write_tensors
from psdist.protocol.checkpoints import CHECKPOINT, pack_clocks
from psdist.protocol.collected import Brought
from psdist.protocol.ids import COORDINATOR, worker_of
from psdist.ranks.checkpointing.files import Writing, file_name
from psdist.ranks.session import JobSession


class WorkerCheckpoints:
    def __init__(self, session: JobSession, *, collect: Callable[[], dict[str, Any]]) -> None:
        self._session = session
        self._collect = collect
        self._writing: Writing | None = None

    def make(self, collective: Callable[[str, bytes], Brought], clocks: Sequence[int]) -> str:
        """Make a checkpoint and return its name. Collective over all workers, between iterations.
        ``clocks``: iterations of each parameter set. Raises :class:`UsageError` for values that
        no checkpoint can store."""
        self.finish()  # one at a time: the coordinator waits for it
        plain, tensors = tree.pack(self._collect(), path="the checkpoint")
        (name, *_) = collective(CHECKPOINT, pack_clocks(clocks)).payloads
        checkpoint = name.decode()
        name_of_file = file_name(self._session.rank.me, self._session.joined)
        path = self._session.folder.partial(checkpoint) / name_of_file
        self._writing = Writing(
            checkpoint,
            lambda: write_tensors(path, tensors, plain),
            is_behind=not self._session.rank.is_alone,
        )
        return checkpoint

    def tell(self, *, waits: bool = False) -> None:
        """Report a complete or failed file to the coordinator; ``waits``: wait for the file."""
        told = self._writing.outcome(waits=waits) if self._writing is not None else None
        if told is not None:
            self._writing = None
            self._session.transport.send_control(COORDINATOR, told)

    def finish(self) -> None:
        """Wait until no file is being written."""
        self.tell(waits=True)

    @property
    def is_moved(self) -> bool:
        """True if the job's first checkpoint has another number of workers."""
        restored = self._session.restored
        if restored is None:
            return False
        mine = list(range(self._session.roles.num_beginning))
        # The last workers of the job may have failed before the checkpoint.
        num_dealt = sum(map(len, restored.checkpoint.index.groups))
        return list(restored.checkpoint.workers) != mine or num_dealt != len(mine)

    def restored(self) -> dict[str, Any] | None:
        """Return this worker's tree in the job's first checkpoint, or the chief's if the number of
        workers differs; None without a checkpoint."""
        restored = self._session.restored
        if restored is None:
            return None
        checkpoint, worker = restored.checkpoint, worker_of(self._session.rank.me)
        known = checkpoint.workers
        if not known:
            return None
        found: dict[str, Any] = tree.unpack(
            *checkpoint.worker(known[0] if self.is_moved else worker)
        )
        return found
