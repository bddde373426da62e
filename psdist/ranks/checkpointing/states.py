"""The optimizer's state of a shard that is made anew, out of the run's newest checkpoint.

found = newest_state(context.folder)
name, regions = found                      # None where no checkpoint is whole
regions(set_index, partition, chunk)       # nothing of a set that it does not have
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from psdist.checkpoint.folder import Folder
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.servers.shard.regions import Region

logger = logging.getLogger("psdist")


def newest_state(
    folder: Folder,
) -> tuple[str, Callable[[int, Partition, int], Sequence[Region]]] | None:
    """Every file of it is read, to know that it is whole."""
    checkpoint = folder.newest_good(lambda line: logger.warning("%s", line))
    if checkpoint is None:
        return None
    keeper = FileKeeper(folder, 0, restored=checkpoint, is_behind=False)
    num_sets = len(checkpoint.index.sets)

    def regions(set_index: int, partition: Partition, chunk: int) -> Sequence[Region]:
        return keeper.regions(set_index, partition, chunk) if set_index < num_sets else ()

    return checkpoint.name, regions
