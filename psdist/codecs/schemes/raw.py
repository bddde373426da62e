"""No codec: the payload is the values' own memory, in the workers' dtype. Nothing is copied."""

from __future__ import annotations

from psdist.protocol.header import CodecCode
from psdist.protocol.partition import Chunk


class Raw:
    code = int(CodecCode.RAW)
    name = "raw"

    def sizes(self, chunk: Chunk) -> tuple[int, int]:
        """The smallest and the largest payload, in bytes: both the chunk's own."""
        return chunk.num_bytes, chunk.num_bytes


RAW = Raw()
