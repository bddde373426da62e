"""A worker's part in checkpoints: it comes to them, writes its own file, and says that it has.

    part = WorkerCheckpoints(context, collect=script_state)
    part.make(collective, clocks)         # job.checkpoint(): "step-00000100"
    part.tell()                           # now and then: whether its file is there
    part.finish()                         # before the worker is done
    part.restored()                       # what it kept, where the job goes on from a checkpoint

What a worker keeps is what ``collect()`` returns: a tree of plain values and tensors
(psdist.checkpoint.tree). It is copied before the job goes on, and written beside it; in one process
it is written at once.
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
from psdist.ranks.context import RankContext


class WorkerCheckpoints:
    def __init__(self, context: RankContext, *, collect: Callable[[], dict[str, Any]]) -> None:
        self._context = context
        self._collect = collect
        self._writing: Writing | None = None

    def make(self, collective: Callable[[str, bytes], Brought], clocks: Sequence[int]) -> str:
        """All workers do this together, between iterations, after so many of each parameter set;
        the checkpoint's name. Raises :class:`UsageError` for what no checkpoint can keep."""
        self.finish()  # one at a time: the coordinator waits for it
        plain, tensors = tree.pack(self._collect(), path="the checkpoint")
        (name, *_) = collective(CHECKPOINT, pack_clocks(clocks)).payloads
        checkpoint = name.decode()
        name_of_file = file_name(self._context.me, self._context.joined)
        path = self._context.folder.partial(checkpoint) / name_of_file
        self._writing = Writing(
            checkpoint,
            lambda: write_tensors(path, tensors, plain),
            is_behind=self._context.writes_behind,
        )
        return checkpoint

    def tell(self, *, waits: bool = False) -> None:
        """The coordinator is told of a file that is there, or cannot be; ``waits`` for that."""
        told = self._writing.outcome(waits=waits) if self._writing is not None else None
        if told is not None:
            self._writing = None
            self._context.transport.send_control(COORDINATOR, told)

    def finish(self) -> None:
        """No file is being written any more."""
        self.tell(waits=True)

    @property
    def is_moved(self) -> bool:
        """Whether the checkpoint that the job goes on from is of another number of workers."""
        restored = self._context.restored
        if restored is None:
            return False
        mine = list(range(self._context.roles.num_beginning))
        # Some of the job's workers, the last ones, may have died before it was made.
        num_dealt = sum(map(len, restored.checkpoint.index.groups))
        return list(restored.checkpoint.workers) != mine or num_dealt != len(mine)

    def restored(self) -> dict[str, Any] | None:
        """What this worker has kept in the checkpoint that the job goes on from; the chief's,
        where that was of another number of workers. None where there is none."""
        restored = self._context.restored
        if restored is None:
            return None
        checkpoint, worker = restored.checkpoint, worker_of(self._context.me)
        known = checkpoint.workers
        if not known:
            return None
        found: dict[str, Any] = tree.unpack(
            *checkpoint.worker(known[0] if self.is_moved else worker)
        )
        return found
