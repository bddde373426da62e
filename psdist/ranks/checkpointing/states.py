"""The optimizer's state of a shard that is made anew, out of the run's newest checkpoint: read in a
thread, while the server that makes it goes on.

    search = StateSearch(context.folder, {0: (partition, [3, 5])})     # of set 0 these chunks
    search.is_over
    search.found                    # None where no checkpoint is whole
    search.found.regions[0, 3]      # nothing of a set that the checkpoint does not have
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.reading import Checkpoint, Elements
from psdist.errors import CheckpointError
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.servers.rebuilding import FoundState, WantedChunks
from psdist.servers.shard.regions import starts_of

logger = logging.getLogger("psdist")


class StateSearch:
    """See :class:`psdist.servers.rebuilding.StateSearch`."""

    def __init__(self, folder: Folder, wanted: WantedChunks) -> None:
        self._folder = folder
        self._wanted = wanted
        self._found: FoundState | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="psdist state", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def found(self) -> FoundState | None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._search()
        except Exception as error:  # whatever it is: it is the server's to raise
            self._error = error

    def _search(self) -> FoundState | None:
        try:
            found = self._read_newest()
        except CheckpointError:
            found = None
        # A newer one may have been made meanwhile, and the one that was looked at removed.
        return self._read_newest() if found is None else found

    def _read_newest(self) -> FoundState | None:
        checkpoint = self._folder.newest_good(
            lambda line: logger.warning("%s", line), wanted=list(self._elements())
        )
        return None if checkpoint is None else self._read(checkpoint)

    def _elements(self) -> Iterator[Elements]:
        for set_index, (partition, chunks) in self._wanted.items():
            for chunk in (partition.chunks[each] for each in chunks):
                for segment, start in zip(chunk.segments, starts_of(partition, chunk), strict=True):
                    yield set_index, segment.piece, start, segment.length

    def _read(self, checkpoint: Checkpoint) -> FoundState:
        keeper = FileKeeper(self._folder, 0, restored=checkpoint, is_behind=False)
        return FoundState(
            checkpoint.name,
            {
                (set_index, chunk): keeper.regions(set_index, partition, chunk)
                for set_index, (partition, chunks) in self._wanted.items()
                if set_index < len(checkpoint.index.sets)
                for chunk in chunks
            },
        )
