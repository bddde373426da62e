"""How many receive slots and credits `auto` chooses: by groups and shard, never beyond memory."""

from __future__ import annotations

import pytest

from psdist.config.settings import RunConfig
from psdist.protocol.flow import auto_credits, auto_receive_buffers
from psdist.protocol.partition import Partition, Piece
from psdist.ranks.wire import credits_of

MIB = 2**20
PIECE = Piece(name="p", shape=(MIB // 4,), stride=(1,), dtype="float32", optimizer_group=0)
CHUNKS = Partition.cut([PIECE] * 8, chunk_bytes=MIB)


@pytest.mark.parametrize(
    ("chunks", "groups", "slots", "why"),
    [
        (1, 1, 4, "all pushes of an iteration fit"),
        (0, 4, 3, "all pushes of an iteration fit"),
        (1, 4, 7, "all pushes of an iteration fit"),
        (8, 1, 11, "all pushes of an iteration fit"),
        (8, 4, 35, "all pushes of an iteration fit"),
        (40, 1, 11, "8 chunks of each group, 1 of them, and 3 to spare"),
        (40, 4, 35, "8 chunks of each group, 4 of them, and 3 to spare"),
        (8, 16, 64, "64 MiB, for memory"),
        (31, 1000, 64, "64 MiB, for memory"),
        (33, 1000, 66, "2 times the shard's bytes, for memory"),
        (40, 1000, 80, "2 times the shard's bytes, for memory"),
    ],
)
def test_slots_are_for_what_groups_send_ahead_but_not_for_more_than_memory(
    chunks: int, groups: int, slots: int, why: str
) -> None:
    assert auto_receive_buffers([MIB] * chunks, num_groups=groups, slot_bytes=MIB) == (slots, why)


def test_of_chunks_that_are_large_there_are_eight_slots_at_least() -> None:
    found = auto_receive_buffers([16 * MIB] * 3, num_groups=4, slot_bytes=16 * MIB)
    assert found == (8, "the fewest, for memory")
    assert auto_receive_buffers([16 * MIB] * 1, num_groups=4, slot_bytes=16 * MIB).number == 7


def test_slots_larger_than_this_servers_chunks_count_as_what_they_are() -> None:
    # float16 on the wire, float32 in the slot; or the model's largest chunk is another server's.
    assert auto_receive_buffers([MIB] * 40, num_groups=16, slot_bytes=2 * MIB).number == 40
    assert auto_receive_buffers([MIB] * 40, num_groups=16, slot_bytes=4 * MIB).number == 20
    assert auto_receive_buffers([MIB] * 16, num_groups=16, slot_bytes=4 * MIB).number == 16


@pytest.mark.parametrize("chunks", [0, 1, 3, 17, 100])
@pytest.mark.parametrize("groups", [1, 2, 5, 64, 3000])
def test_there_are_as_many_slots_as_pushing_needs_and_no_more_than_pushes(
    chunks: int, groups: int
) -> None:
    slots = auto_receive_buffers([MIB] * chunks, num_groups=groups, slot_bytes=MIB).number
    assert 3 <= slots <= groups * chunks + 3
    assert slots <= max(64, 2 * chunks)


@pytest.mark.parametrize(
    ("workers", "credits"), [(1, 8), (128, 8), (129, 7), (256, 4), (512, 2), (100_000, 2)]
)
def test_credits_are_fewer_where_many_workers_offer_pushes(workers: int, credits: int) -> None:
    limits = {"most_bytes": 64 * MIB, "fewest": 2}
    assert auto_credits(num_workers=workers, offer_bytes=64 << 10, **limits).number == credits
    assert credits_of(RunConfig(), workers, CHUNKS) == credits
    assert credits_of(RunConfig(credits=5), workers, CHUNKS) == 5


def test_credits_are_fewer_where_whole_pushes_lie_in_the_memory_of_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_MCA_btl_tcp_eager_limit", str(2 * MIB))
    assert credits_of(RunConfig(), 8, CHUNKS) == 8
    assert credits_of(RunConfig(), 16, CHUNKS) == 4
    assert credits_of(RunConfig(), 64, CHUNKS) == 2
