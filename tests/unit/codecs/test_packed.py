"""What Zstandard makes of a codec's payload: the same from fewer bytes, and what is refused."""

from __future__ import annotations

import pytest
import torch
import zstandard

from psdist.codecs import Codec
from psdist.codecs.schemes.packed import Packed
from psdist.codecs.schemes.plain import Cast
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sparse import TopK
from psdist.errors import ProtocolError

NUM_VALUES = 5000


def normal(num_values: int = NUM_VALUES) -> torch.Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (Cast("bf16"), 0.85),
        (Quantized("int8"), 0.97),
        (Quantized("int4"), 0.90),
        (Quantized("int2"), 0.90),
        (Quantized("int2", is_stochastic=True), 0.70),
        (TopK(0.1), 0.97),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_same_values_come_from_fewer_bytes(codec: Codec, most: float) -> None:
    """``most``: of the bytes that the codec alone takes."""
    values, packed = normal(), Packed(codec)
    payload, alone = packed.encode(values, seed=3), codec.encode(values, seed=3)
    assert len(payload) < most * len(alone)
    assert packed.num_bytes(NUM_VALUES) == len(alone) + 1
    expected = codec.decode(alone, NUM_VALUES)
    assert torch.equal(packed.decode(payload, NUM_VALUES), expected)


def test_what_would_not_become_smaller_stays_as_it_is() -> None:
    codec = Cast("fp16")
    values = normal(3)
    payload = Packed(codec).encode(values, seed=0)
    assert payload.tolist() == [*codec.encode(values, seed=0).tolist(), 0]
    assert torch.equal(Packed(codec).decode(payload, 3), values.half().float())


def frame(content: bytes, **options: bool) -> list[int]:
    return list(zstandard.ZstdCompressor(**options).compress(content))


SIXTEEN = bytes(2 * 16)
"""What fp16 takes for 16 values."""


@pytest.mark.parametrize(
    ("payload", "refused"),
    [
        ([*SIXTEEN, 2], "a payload of form 2"),
        ([*SIXTEEN[1:], 0], "31 bytes where 16 values have 32"),
        ([*frame(bytes(1 << 20)), 1], "a frame of 1048576 bytes where 32 belong"),
        ([*frame(SIXTEEN[1:]), 1], "a frame of 31 bytes where 32 belong"),
        ([*frame(SIXTEEN, write_content_size=False), 1], "a frame of -1 bytes where 32 belong"),
        ([*frame(SIXTEEN)[:-1], 1], "no frame of Zstandard's"),
        ([*frame(SIXTEEN), 0, 1], "no frame of Zstandard's"),
        ([*frame(SIXTEEN), *frame(SIXTEEN), 1], "no frame of Zstandard's"),
        ([7, 7, 7, 1], "no frame of Zstandard's"),
        ([1], "no frame of Zstandard's"),
    ],
    ids=[
        *("form", "short", "bomb", "less", "unsaid", "cut off", "more", "two", "other", "nothing"),
    ],
)
def test_what_no_sender_makes_is_refused(payload: list[int], refused: str) -> None:
    packed = Packed(Cast("fp16"))
    assert not packed.decode(torch.tensor([*frame(SIXTEEN), 1], dtype=torch.uint8), 16).any()
    with pytest.raises(ProtocolError, match=rf"codec fp16(\+zstd)?: {refused}"):
        packed.decode(torch.tensor(payload, dtype=torch.uint8), 16)
