"""How many receive slots and credits `auto` chooses: by groups and shard, never beyond memory."""

from __future__ import annotations

import pytest

from psdist.config.settings import RunConfig
from psdist.protocol.flow import auto_credits, auto_receive_buffers
from psdist.ranks.wire import credits_of

MIB = 2**20


@pytest.mark.parametrize(
    ("chunks", "groups", "slots", "why"),
    [
        (1, 1, 4, "all pushes of an iteration fit"),
        (0, 4, 3, "all pushes of an iteration fit"),
        (1, 4, 7, "all pushes of an iteration fit"),
        (4, 1, 7, "all pushes of an iteration fit"),
        (40, 1, 8, "4 chunks of each group, 1 of them, and 3 to spare"),
        (8, 4, 35, "all pushes of an iteration fit"),
        (40, 4, 19, "4 chunks of each group, 4 of them, and 3 to spare"),
        (40, 31, 127, "4 chunks of each group, 31 of them, and 3 to spare"),
        (40, 32, 128, "the memory of 2 shards, or 128 MiB"),
        (80, 1000, 160, "the memory of 2 shards, or 128 MiB"),
        (1, 1000, 128, "the memory of 2 shards, or 128 MiB"),
    ],
)
def test_all_pushes_have_slots_where_memory_allows_or_some_chunks_ahead(
    chunks: int, groups: int, slots: int, why: str
) -> None:
    assert auto_receive_buffers([MIB] * chunks, num_groups=groups, slot_bytes=MIB) == (slots, why)


def test_slots_larger_than_this_servers_chunks_count_as_what_they_are() -> None:
    # float16 on the wire, float32 in the slot; or the model's largest chunk is another server's.
    assert auto_receive_buffers([MIB] * 160, num_groups=80, slot_bytes=2 * MIB).number == 160
    assert auto_receive_buffers([MIB] * 160, num_groups=80, slot_bytes=64 * MIB).number == 8


@pytest.mark.parametrize("chunks", [0, 1, 3, 17, 100])
@pytest.mark.parametrize("groups", [1, 2, 5, 64, 3000])
def test_there_are_as_many_slots_as_pushing_needs_and_no_more_than_pushes(
    chunks: int, groups: int
) -> None:
    slots = auto_receive_buffers([4 * MIB] * chunks, num_groups=groups, slot_bytes=4 * MIB).number
    assert 3 <= slots <= groups * chunks + 3
    assert slots <= max(32, 2 * chunks)


@pytest.mark.parametrize(
    ("groups", "credits"), [(1, 8), (128, 8), (129, 7), (256, 4), (512, 2), (100_000, 2)]
)
def test_credits_are_fewer_where_many_groups_offer_pushes(groups: int, credits: int) -> None:
    assert auto_credits(num_groups=groups).number == credits
    assert credits_of(RunConfig(), groups) == credits
    assert credits_of(RunConfig(credits=5), groups) == 5
