"""What workers hold of a shard whose server has died, as they tell it (HeldVersions).

A worker's newest push of a chunk that was not answered may be contained in what another one holds,
or not; what is known of that is how far it has come:

    Sent.NOTHING    there is none, or it has not left
    Sent.GRADIENT   it has left
    Sent.EMPTY      it has left, and has no gradient: with it a chunk changes its clock alone
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

REGISTRAR_IS_NEEDED: Final = (
    "it is the registrar, without which no server's death is survived (replication = buddy "
    "survives its death, too): restart the job (psdist run --resume goes on from the last "
    "checkpoint)"
)

PART_BYTES: Final = 2**20
"""Of a chunk's values, in a message."""


class Sent(IntEnum):
    NOTHING = 0
    GRADIENT = 1
    EMPTY = 2
