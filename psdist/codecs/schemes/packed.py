"""The payload of a codec, compressed without loss by Zstandard (RFC 8878): ``int4+zstd``.

    codec = Packed(Quantized("int4"))

Small multiples are frequent among quantised values, and some exponents among 16-bit floats: they
need fewer bits than their codec gives each. A payload that would not become smaller stays as it is.
The last byte tells both forms apart, so that the rest lies where the codec expects it.
"""

from __future__ import annotations

import torch
import zstandard

from psdist.codecs import Codec, Varying
from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode
from psdist.protocol.memory import as_bytes

_LEVEL = 1
"""Slower ones find nothing more in payloads: no stretch of them comes twice."""
_AS_IT_IS, _PACKED = 0, 1


class Packed(Varying):
    code = int(CodecCode.PACKED)

    def __init__(self, codec: Codec) -> None:
        """``codec``: one whose payloads of as many values are of one size."""
        self._codec = codec
        self.name = f"{codec.name}+zstd"

    def num_bytes(self, num_values: int) -> int:
        return self._codec.num_bytes(num_values) + 1

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        coded = self._codec.encode(values, seed=seed)
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(as_bytes(coded))
        is_smaller = len(packed) < len(coded)
        form, size = (_PACKED, len(packed)) if is_smaller else (_AS_IT_IS, len(coded))
        payload = torch.empty(size + 1, dtype=torch.uint8)
        as_bytes(payload)[:size] = packed if is_smaller else as_bytes(coded)
        payload[size] = form
        return payload

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        form = int(payload[-1])
        if form == _PACKED:
            coded = self._unpacked(payload[:-1], self._codec.num_bytes(num_values))
        elif form == _AS_IT_IS:
            coded = payload[:-1]
        else:
            raise ProtocolError(f"codec {self.name}: a payload of form {form}, which is not known")
        return self._codec.decode(coded, num_values)

    def _unpacked(self, packed: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """The frame's own size field decides how much room is made."""
        frame = as_bytes(packed)
        try:
            told = zstandard.frame_content_size(frame)
            if told != num_bytes:
                raise ProtocolError(
                    f"codec {self.name}: a frame of {told} bytes where {num_bytes} belong"
                )
            decompressor = zstandard.ZstdDecompressor()
            coded = bytearray(decompressor.decompress(frame, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise ProtocolError(f"codec {self.name}: no frame of Zstandard's: {error}") from None
        return torch.frombuffer(coded, dtype=torch.uint8)
