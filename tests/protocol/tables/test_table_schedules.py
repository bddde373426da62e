"""Tables under seeded schedules: real loops on both sides of the virtual network, several sets,
collectives, different ends, changes of the mode, and workers that fail in the middle of a push.

The rows of replies, of servers at the end and of checkpoints are compared with the
same updates on one store, bit by bit. The last part breaks servers on purpose.

    python -m pytest tests/protocol/tables --schedules 8000        # 1,000 schedules of each kind
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.header import Flag
from psdist.servers.protocol.actions import Contribution, Reply, Step
from psdist.servers.tables.service import RowService
from psdist.tables.payloads import RowPush
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.proof import prove_the_end
from tests.support.virtual.surviving import deaths_of, play_with_deaths
from tests.support.virtual.table_worker import (
    RecordedShard,
    TableSchedule,
    TableWorker,
    check_sets,
    play_with_tables,
    prove_rows,
    recorded,
    shards_of,
)

_SHARE = 8
"""One schedule of tables for this many others."""
_BLOCK = 25


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        num: int = -(-metafunc.config.getoption("--schedules") // _SHARE)
        blocks = [range(first, min(first + _BLOCK, num)) for first in range(0, num, _BLOCK)]
        metafunc.parametrize("seeds", blocks, ids=str)


@pytest.mark.timeout(600)
def test_rows_are_those_of_one_store_under_any_schedule(seeds: Sequence[int]) -> None:
    num_rows = num_early = num_kept = 0
    for seed in seeds:
        job = play_with_tables(TableSchedule.drawn(seed))
        num_rows += prove_rows(job)
        check_sets(job)
        prove_the_end(job)
        for shard in shards_of(job):
            num_early += shard.num_early
            num_kept += sum(map(len, shard.kept.values()))
    assert num_rows > 10 * len(seeds)
    assert num_early > len(seeds), "some pushes come in several messages"
    assert num_kept, "some jobs make checkpoints"


@pytest.mark.timeout(600)
def test_nothing_of_a_push_is_half_applied_when_its_worker_fails(seeds: Sequence[int]) -> None:
    num_rows = num_deaths = 0
    for seed in seeds:
        job = play_with_deaths(
            seed,
            schedule=TableSchedule.drawn(seed, has_deaths=True),
            make_worker=TableWorker,
            choose=recorded,
        )
        assert not job.errors, job.errors
        assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
        num_deaths += len(deaths_of(job))
        num_rows += prove_rows(job)
        check_sets(job)
    assert num_rows > 10 * len(seeds)
    assert num_deaths > len(seeds) // 2


# -- servers that are broken on purpose ------------------------------------------------------------


class ForgetsMessages(RecordedShard):
    """Applies the last message of a push alone."""

    def _whole(self, part: Any, contribution: Contribution, push: Any) -> list[RowPush]:
        return super()._whole(part, contribution, push)[-1:]


class SendsLate(RecordedShard):
    """Replies with the rows of an hour ago."""

    def encode(self, reply: Reply, *, into: memoryview | None) -> int:
        assert into is not None
        num_bytes = super().encode(reply, into=into)
        before = self.__dict__.setdefault("sent", {})
        payload = before.setdefault((reply.token.chunk, num_bytes), bytes(into[:num_bytes]))
        into[:num_bytes] = payload
        return num_bytes


class StepsTwice(RecordedShard):
    """Applies a push that comes alone as two."""

    def step(self, action: Step) -> None:
        super().step(action)
        if action.peer is not None:
            super().step(action)
            self.steps[action.chunk].pop()


def first_that_fails(seeds: range, play: Callable[[TableSchedule], VirtualJob]) -> bool:
    for seed in seeds:
        try:
            job = play(TableSchedule.drawn(seed))
            prove_rows(job)
            check_sets(job)
        except (AssertionError, ProtocolError):
            return True
    return False


@pytest.mark.parametrize("broken", [ForgetsMessages, SendsLate, StepsTwice])
def test_a_broken_shard_is_caught(broken: type[RecordedShard]) -> None:
    play = partial(play_with_tables, choose=partial(recorded, make_shard=broken))
    assert first_that_fails(range(25), play)


def test_a_server_that_does_not_wait_for_the_mode_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = RowService._answer

    def answers_at_once(self: RowService, key: Any) -> None:
        header, ids = self._waiting[key]
        self._waiting[key] = header._replace(flags=header.flags | Flag.FRESH), ids
        answer(self, key)

    monkeypatch.setattr(RowService, "_answer", answers_at_once)
    assert first_that_fails(range(60), play_with_tables)
