"""Servers with buddies whose pushes and replies go through codecs: under seeded schedules, on the
virtual network, with real tensors.

A buddy decodes what its server decodes, and encodes in sync what its server encodes: what workers
hold is the same bits there. Messages are repeated as they were encoded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.schemes.plain import Cast, Exact
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import RandK, TopK
from psdist.codecs.wire import Wire, WireFrom
from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import server_id
from psdist.servers.shard.tensors import TensorShard
from tests.protocol.codecs.test_relative import SCHEDULE, in_workers
from tests.protocol.deaths.test_buddies import SETTING_UP, assert_copies_are_the_shards, copy_of
from tests.support.virtual.job import Schedule, VirtualJob, play, replication_of
from tests.support.virtual.proof import prove, prove_values
from tests.support.virtual.refills import play_and_prove, play_refills, schedule_with_refills
from tests.support.virtual.server_deaths import play_with_server_death, with_buddies

SEEDS: Final = (2, 3, 6, 7, 8)
MORE: Final = range(20)
RELATIVE: Final = Wire(
    push=Quantized("int4"), reply=Sign(), seed=5, is_relative=True, compare_every=2
)
IN_SYNC: Final = {
    "int4/sign": RELATIVE,
    "topk/int8": replace(RELATIVE, push=TopK(0.1), reply=Quantized("int8")),
    "by chance": replace(
        RELATIVE,
        push=Quantized("int2", is_stochastic=True),
        reply=RandK(0.5, is_scaled=False),
        exact_in_replies=("*1",),
    ),
    "changing": replace(
        RELATIVE,
        later=(
            WireFrom(round=2, push=TopK(0.1), reply=Quantized("int8")),
            WireFrom(round=4, push=Exact(), reply=Exact()),
            WireFrom(round=5, push=Sign(), reply=Sign(), exact_in_replies=("*1",)),
        ),
    ),
    "casts": Wire(push=Cast("bf16"), reply=Cast("fp16"), seed=5),
}
APART: Final = {
    "int8": replace(RELATIVE, push=Quantized("int8"), reply=RAW, is_relative=False),
    "topk/fp16": replace(RELATIVE, push=TopK(0.1), reply=Cast("fp16"), is_relative=False),
    "pull_copies": replace(RELATIVE, reply=Quantized("int4"), has_copies=True),
}
"""In ssp and async, where groups hold different versions."""
EXACT_HERE: Final = Wire(push=Exact(), reply=Exact(), seed=5)
"""The decoded values are exactly what arithmetic says."""
WITH_REFILLS: Final = (3, 36)
MORE_REFILLS: Final = (10, 69, 92)
"""A worker's parameters from a failed server counted as unchanged, but no server stored them
(92)."""


def each(wires: dict[str, Wire], *first: str) -> list[Any]:
    """``first`` are played in every run of the tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(wire, id=name, marks=() if name in first else slow)
        for name, wire in wires.items()
    ]


def wire_of(schedule: Schedule, seed: int) -> Wire:
    wires = IN_SYNC if schedule.mode == "sync" else APART
    return [*wires.values()][seed % len(wires)]


def assert_alike_for_all(job: VirtualJob) -> None:
    """Buddies know what workers hold, bit by bit, and what has just been changed of it."""
    for each in job.sets:
        for chunk, server in enumerate(each.owners):
            shard: Any = each.executor(server)
            mine, copied = shard.memory[chunk], copy_of(job, each.set_index, server).memory[chunk]
            assert torch.equal(mine.held, copied.held)
            assert bytes(mine.change or b"") == bytes(copied.change or b"")


@pytest.mark.parametrize("wire", each(IN_SYNC, "int4/sign", "changing"))
def test_a_buddy_knows_what_workers_hold_bit_by_bit(wire: Wire) -> None:
    job = play(replace(SCHEDULE, has_buddies=True), wire=wire, is_watched=False)
    prove(job)
    assert_copies_are_the_shards(job)
    if wire.is_relative:
        assert_alike_for_all(job)
        for worker in in_workers(job):
            assert torch.equal(worker, job.parameters())


@pytest.mark.parametrize("wire", each(APART, "pull_copies"))
def test_a_buddy_decodes_what_its_server_decodes(wire: Wire) -> None:
    for mode in ("ssp", "async"):
        job = play(replace(SCHEDULE, has_buddies=True, mode=mode), wire=wire, is_watched=False)
        prove(job)
        assert_copies_are_the_shards(job)


def test_an_update_goes_to_the_buddy_as_it_was_encoded_and_a_sum_in_full() -> None:
    """So pushes and replies take 1.5 times the bytes in ssp and async, with any codec."""
    elements, num_chunks, iterations = 4096, 4, 5
    schedule = replace(
        SCHEDULE, has_buddies=True, group_sizes=(1, 1, 1), iterations=(iterations,) * 3,
        num_chunks=num_chunks, chunk_elements=elements,
    )  # fmt: skip
    model = 4 * elements * num_chunks
    for mode in ("sync", "ssp"):
        wire = replace(APART["int8"], push=Quantized("int8"), reply=Cast("fp16"))
        job = play(replace(schedule, mode=mode), wire=wire, is_watched=False)
        replications = [replication_of(each) for each in job.servers]
        told = sum(each.outbox.num_bytes_recorded for each in replications if each is not None)
        pushed = sum(worker.core.transfers.bytes_pushed for worker in job.workers)
        assert pushed < 0.3 * 3 * iterations * model
        steps = model * iterations if mode == "sync" else pushed
        num_records = num_chunks * iterations * (1 if mode == "sync" else 3)
        assert model + steps <= told <= model + steps + 600 * (num_records + num_chunks) + 4000


def test_the_death_of_a_server_is_survived_at_any_moment() -> None:
    met = play_deaths(SEEDS)
    for what in ("survived", "sync", "ssp"):
        assert met[what], met


def play_deaths(seeds: Iterable[int]) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        schedule = with_buddies(seed)
        job, undisturbed = play_with_server_death(schedule, wire=wire_of(schedule, seed))
        try:
            if job.errors:
                assert all(isinstance(error, PeerLostError) for error in job.errors.values())
                assert any(SETTING_UP in str(error) for error in job.errors.values())
                continue
            assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
            prove(job)
            for worker in job.workers:
                assert not worker.loop.replies.num_differing
            if not any(loop.hosted for loop in job.servers):
                continue
            if schedule.mode == "sync":
                for mine, other in zip(job.sets, undisturbed.sets, strict=True):
                    assert torch.equal(mine.parameters(), other.parameters())
                    for chunk, server in enumerate(mine.owners):
                        one, two = mine.executor(server), other.executor(server)
                        assert isinstance(one, TensorShard)
                        assert isinstance(two, TensorShard)
                        assert torch.equal(one.memory[chunk].values, two.memory[chunk].values)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met["survived"] += 1
        met[schedule.mode] += 1
    return met


def test_every_value_is_what_arithmetic_says_where_the_codec_leaves_nothing_out() -> None:
    survived = 0
    for seed in SEEDS[-3:]:
        job, _ = play_with_server_death(with_buddies(seed), wire=EXACT_HERE)
        if job.errors or not any(loop.hosted for loop in job.servers):
            continue
        for each in job.sets:
            prove_values(each, each.history())
        survived += 1
    assert survived


def play_coded_refills(seed: int, **more: Any) -> Any:
    schedule = schedule_with_refills(seed)
    return play_refills(seed, schedule=schedule, wire=wire_of(schedule, seed), **more)


def test_server_after_server_dies_and_copies_that_are_filled_have_what_workers_hold() -> None:
    met = play_and_prove(play_coded_refills, WITH_REFILLS)
    for what in ("survived", "sync", "same bits", "told meanwhile", "left out"):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_deaths(MORE)
    play_deaths(range(1000, 1100))
    play_and_prove(play_coded_refills, MORE_REFILLS)
    play_and_prove(play_coded_refills, range(1000, 1060))
    play_and_prove(play_coded_refills, range(2000, 2060), coordinator_dies=True)


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_what_is_sent_again_is_what_was_encoded_once(mode: str) -> None:
    """The rest of a push is kept by the codec: encoded again it would be added twice."""
    num_again = 0
    for seed in range(2):
        schedule = replace(SCHEDULE, seed=seed, mode=mode, has_buddies=True)
        job = VirtualJob(schedule, wire=wire_of(schedule, seed), is_watched=False)
        sent: dict[tuple[int, int, int], bytes] = {}
        transmit = job.network.transmit

        def look(
            sender: int, peer: int, frame: Frame, sent: Any = sent, transmit: Any = transmit
        ) -> None:
            nonlocal num_again
            header = Header.unpack(frame.header)
            if header.kind == Kind.PUSH and header.length and frame.payload is not None:
                payload = bytes(frame.payload[: header.length])
                num_again += bool(header.flags & Flag.RETRANSMIT)
                assert sent.setdefault((sender, header.chunk, header.clock), payload) == payload
            transmit(sender, peer, frame)

        job.network.transmit = look  # type: ignore[method-assign]
        job.network.run(until=lambda job=job: min(job.clocks_once_ready(), default=0) > 2)
        job.network.crash(server_id(1))
        job.run()
        prove(job)
    assert num_again


class _Wavering(Quantized):
    """Gives other bytes the next time."""

    def __init__(self) -> None:
        super().__init__("int8")
        self.num_calls = 0

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        self.num_calls += 1
        return super().encode(values * (1 + 0.1 * self.num_calls), seed=seed)


def test_a_codec_that_gives_other_bytes_for_the_same_values_ends_the_job() -> None:
    """Else the workers' parameters would be unknown after a server's failure."""
    wire = replace(RELATIVE, push=RAW, reply=_Wavering(), compare_every=1)
    with pytest.raises(ProtocolError, match=r"chunk \d: codec.pull encodes other bytes on this"):
        play(replace(SCHEDULE, has_buddies=True), wire=wire, is_watched=False)
