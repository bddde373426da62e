"""Chunks that nothing has changed: answered without payload, and what a worker keeps is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.commands.check import check
from psdist.protocol.events import Offered
from psdist.servers.protocol.chunks import ChunkState, PendingReply
from psdist.servers.protocol.chunks.replies import Replies
from psdist.workers.protocol.actions import Action, DiscardReply
from psdist.workers.protocol.versions import HeldVersions
from tests.protocol.codecs.test_codecs import BOTH_WAYS
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.virtual_worker import VirtualWorker

SCHEDULE = Schedule(
    seed=5,
    group_sizes=(2, 1, 1),
    num_chunks=5,
    servers=2,
    iterations=(8, 8, 8),
    collectives=((4,), (4,), (4,)),
    compute_s=(1e-4, 2e-4, 3e-4),
    frozen_rate=0.7,
    weight_decay=0.125,
    momentum=0.5,
)
MODES = ("sync", "ssp", "async")


def bytes_pulled(job: VirtualJob) -> int:
    return sum(worker.core.counts().bytes_pulled for worker in job.workers)


def model_bytes(job: VirtualJob) -> int:
    return sum(chunk.num_bytes for chunk in job.partition.chunks)


@pytest.mark.parametrize("mode", MODES)
def test_while_everything_is_frozen_no_payload_moves(mode: str) -> None:
    """Weight decay and momentum change nothing of what is frozen, either."""
    job = play(replace(SCHEDULE, mode=mode, frozen_rate=1.0, pull_rate=0.5, repeat_rate=0.5))
    prove(job)
    assert bytes_pulled(job) == (len(job.groups) + 1) * model_bytes(job)  # at the start; a save
    assert all(worker.core.counts().bytes_pushed == 0 for worker in job.workers)


class FreezesAllButOne(VirtualWorker):
    """All pieces but those of chunk 0, in every iteration but the third and the sixth."""

    def is_frozen(self, index: int) -> bool:
        pieces = [segment.piece for segment in self.job.partition.chunks[0].segments]
        return index not in pieces and self.clock % 3 != 2


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_in_sync_what_is_stepped_is_sent_and_nothing_else(group_size: int, num_groups: int) -> None:
    schedule = replace(
        SCHEDULE,
        group_sizes=(group_size,) * num_groups,
        iterations=(6,) * num_groups,
        collectives=((),) * num_groups,
        frozen_rate=0.0,
    )
    job = play(schedule, make_worker=FreezesAllButOne)
    prove(job)
    first, *others = (chunk.num_bytes for chunk in job.partition.chunks)
    assert bytes_pulled(job) == num_groups * (7 * first + 3 * sum(others))


@pytest.mark.parametrize("rates", [{}, {"repeat_rate": 0.5, "duplicate_rate": 0.5}])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_is_proved_in_every_mode(mode: str, rates: dict[str, float]) -> None:
    for seed in range(5):
        schedule = replace(
            SCHEDULE, seed=seed, mode=mode, staleness=seed % 3, payload_s=1e-3, pull_rate=0.3
        )
        job = play(replace(schedule, **rates))
        prove(job)
        assert job.watch is not None
        assert job.watch.num_unchanged > 50


def test_decoded_parameters_are_sent_again_in_every_reply() -> None:
    job = play(replace(SCHEDULE, frozen_rate=1.0), wire=BOTH_WAYS)
    prove(job)
    assert job.watch is not None
    assert job.watch.num_unchanged == 0


# -- what would go wrong ---------------------------------------------------------------------------


class WritesToItsParameters(VirtualWorker):
    """As a script may, between two iterations; its own forward pass has ended."""

    def iterate(self) -> Iterator[float | None]:
        if self.clock in (3, 5):
            with torch.no_grad():
                for parameter in self.model:
                    parameter.add_(1.0)
        yield from super().iterate()


@pytest.mark.parametrize("mode", MODES)
def test_what_a_script_has_written_is_replaced_though_nothing_has_changed(mode: str) -> None:
    schedule = replace(SCHEDULE, mode=mode, frozen_rate=1.0)
    job = play(schedule, make_worker=WritesToItsParameters)
    prove(job)
    assert bytes_pulled(job) == (len(job.groups) * 3 + 1) * model_bytes(job)


def test_a_worker_that_would_not_look_for_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldVersions, "forget", lambda _self, _chunks: None)
    job = play(replace(SCHEDULE, frozen_rate=1.0), make_worker=WritesToItsParameters)
    report = check(job.history())
    assert "used bytes with checksum" in report.violations[0]
    with pytest.raises(AssertionError):
        prove(job)


def test_a_server_that_calls_unchanged_what_is_not_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Replies._reply

    def lie(self: Replies, chunk: ChunkState, pending: PendingReply) -> Any:
        is_now = self.num_made > 30 and 0 < pending.version == chunk.version - 1
        if not is_now:
            return honest(self, chunk, pending)
        chunk.version -= 1
        try:
            return honest(self, chunk, pending)
        finally:
            chunk.version += 1

    monkeypatch.setattr(Replies, "_reply", lie)
    schedule = replace(SCHEDULE, mode="async", frozen_rate=0.3)
    with pytest.raises(AssertionError, match="which holds version"):
        play(schedule)
    report = check(play(schedule, is_watched=False).history())
    assert "used bytes with checksum" in report.violations[0]


class LetsOldRepliesLand(VirtualWorker):
    """Takes what comes a second time into memory, some iterations later."""

    def take_slice(self) -> None:
        super().take_slice()
        self.old: list[Offered] = []

        def on_offered(event: Offered) -> list[Action]:
            actions = self.core.transfers.on_offered(event)
            if not isinstance(actions[0], DiscardReply):
                return actions
            self.old.append(event)
            return []

        self.core.handlers[Offered] = on_offered

    def iterate(self) -> Iterator[float | None]:
        for event in self.old:
            if event.clock == self.clock - 3:
                self.loop.transport.accept(event.ticket, self.loop.replies.landing[event.chunk])
        yield from super().iterate()


def test_a_worker_that_lets_an_old_reply_land_is_found() -> None:
    schedule = replace(
        SCHEDULE, mode="async", collectives=((), (), ()), frozen_rate=0.5, duplicate_rate=0.5
    )
    prove(play(schedule))
    with pytest.raises(AssertionError, match="used bytes with checksum"):
        prove(play(schedule, make_worker=LetsOldRepliesLand))
