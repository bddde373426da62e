"""The codec of each direction, and the seeds and states that encodings get."""

from __future__ import annotations

import pytest
import torch

from psdist.codecs.raw import RAW
from psdist.codecs.wire import RAW_WIRE, Encoder, Wire, payload_rule, seed_of
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.header import Dtype, Header, Kind
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece
from tests.support.cast import Cast, Dithered, Remembering

VALUES = torch.linspace(-3.0, 5.0, 64)


def decoded(codec: Cast, memory: memoryview) -> torch.Tensor:
    into = torch.empty(64)
    codec.decode(memory[:128], into)
    return into


def test_runs_are_raw_both_ways() -> None:
    assert RAW_WIRE.push is RAW_WIRE.reply is RAW
    assert RAW.code == Header(kind=Kind.PUSH, sender=0).codec


def test_a_rule_takes_a_codecs_own_sizes_and_says_what_is_expected() -> None:
    piece = Piece(name="p", shape=(100,), stride=(1,), dtype="float32", optimizer_group=0)
    partition = Partition.cut([piece], chunk_bytes=256)
    assert [chunk.length for chunk in partition.chunks] == [64, 64]
    header = Header(kind=Kind.PUSH, sender=0, chunk=1, length=128, codec=200, dtype=Dtype.FLOAT32)
    rule = payload_rule(Cast("float16"), partition)
    assert rule.takes(header)
    assert not rule.takes(header._replace(length=126))
    assert not rule.takes(header._replace(length=256, codec=0))
    assert not rule.takes(header._replace(dtype=Dtype.FLOAT64))
    assert payload_rule(RAW, partition).takes(header._replace(length=256, codec=0))
    assert rule.refusal(header._replace(codec=0)) == (
        "sent 128 bytes of chunk 1 by codec 0, dtype 1; 128 bytes by codec 200 (float16), dtype 1 "
        "are expected; do all ranks run the same version of psdist with the same settings?"
    )


def test_an_encoding_is_random_by_run_sender_chunk_and_clock_and_else_the_same() -> None:
    seeds = {seed_of(*place) for place in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)]}
    assert len(seeds | {seed_of(0, 0, 0, 1), seed_of(0, 0, 0, 0)}) == 5
    codec, memories = Dithered(), [allocate(128) for _ in range(3)]
    for memory, clock in zip(memories, (4, 4, 5), strict=True):
        encoder = Encoder(codec, seed=7, sender=2)
        assert encoder.encode(3, clock, VALUES, memory) == 128
    assert torch.equal(decoded(codec, memories[0]), codec.rounded(VALUES, seed_of(7, 2, 3, 4)))
    assert memories[0] == memories[1] != memories[2]


def test_the_state_of_each_chunk_is_handed_to_its_next_encoding() -> None:
    codec, memory = Remembering("bfloat16"), allocate(128)
    encoder, sent = Encoder(codec, seed=0, sender=0), torch.zeros(64)
    for clock in range(16):
        encoder.encode(0, clock, VALUES, memory)
        sent += decoded(codec, memory)
        encoder.encode(1, clock, -VALUES, memory)  # another chunk's remainder is none of this one's
    # Nothing is lost for good: what is missing in the sum is less than one rounding.
    one_rounding = (VALUES - codec.rounded(VALUES, 0)).abs().max()
    assert (sent - 16 * VALUES).abs().max() < 4 * one_rounding
    assert (16 * codec.rounded(VALUES, 0) - 16 * VALUES).abs().max() > 8 * one_rounding


def test_replies_cannot_depend_on_replies_before() -> None:
    with pytest.raises(InvariantError, match="replies by bfloat16: they go to several workers"):
        Wire(push=RAW, reply=Remembering("bfloat16"), seed=0)


def test_a_payload_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ProtocolError, match="100 bytes are not 64 values of float16"):
        Cast("float16").decode(allocate(100), torch.empty(64))
