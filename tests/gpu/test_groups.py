"""Groups over NCCL, of processes that share one GPU (each says that it is on another host, so
NCCL's sockets join them): every operation's bits, and going on without the dead.

python -m pytest -n 0 -rs tests/gpu
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.reductions import ReducingChannel
from psdist.workers.group.tier import Tier
from tests.support.group_operations import expected, finish, operations
from tests.support.process_groups import run_in_group
from tests.unit.workers.group.test_rebuilding import OPERATIONS, outlive
from tests.unit.workers.group.test_reductions import exact

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GPU = "cuda:0"
LONG = 1 << 24
"""Elements: more than NCCL takes of a worker before another one has come."""


def all_operations(channel: GroupChannel, *, hosts: Sequence[int], reduces: bool) -> bool:
    beside = channel.duplicate()
    kind = ReducingChannel if reduces else ProcessGroupChannel
    assert hosts or type(channel) is type(beside) is kind
    if not reduces:  # the bits of sums in worker order
        found = finish(operations(channel, beside, GPU))
        return bool(found == expected(channel.place, channel.size, hosts))
    with mock.patch("tests.support.group_operations.flats_of", exact):
        found = finish(operations(channel, beside, GPU))
        return bool(found == expected(channel.place, channel.size, hosts))


@pytest.mark.parametrize(
    ("tier", "size", "hosts"),
    [
        ("auto", 2, []),
        ("auto", 3, []),
        ("torch", 3, [0, 0, 1]),
        ("nccl", 2, []),
        ("nccl", 3, []),
    ],
)
def test_every_operation_brings_what_it_must(tier: Tier, size: int, hosts: Sequence[int]) -> None:
    script = partial(all_operations, hosts=hosts, reduces=tier == "nccl")
    assert run_in_group(size, script, tier=tier, hosts=hosts, device=GPU) == [True] * size


@pytest.mark.parametrize("hosts", [[], [0, 0, 1, 2]])
def test_a_death_in_every_operation_is_outlived(hosts: Sequence[int], tmp_path: Path) -> None:
    """NCCL's communicator is aborted, and another one made."""
    dead = [3, 0]
    for names in (OPERATIONS[:2], OPERATIONS[2:]):
        folder = tmp_path / names[0]
        folder.mkdir()
        dies = list(zip(names, dead, strict=True))
        script = partial(outlive, folder=folder, dies=dies, hosts=hosts, length=LONG, device=GPU)
        results = run_in_group(4, script, hosts=hosts, device=GPU, reforms=True)
        kind = "TwoLevelChannel" if hosts else "ProcessGroupChannel"
        assert results == ["exit 3", kind, kind, "exit 3"]
