"""Codecs end to end over the virtual network: encoded by workers, decoded and added by servers,
encoded again for the replies, decoded where workers compute.

The codecs are tests/support/rounding.py's. The values of servers and workers are predicted by
rounding the same numbers in a loop of a few lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from psdist.codecs import RAW, seed_of
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import Header, Kind
from psdist.protocol.memory import allocate, as_tensor
from psdist.workers.model.flat import FlatModel
from tests.support.rounding import Dithered, Rounding
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.network import VirtualNetwork
from tests.support.virtual.numbers import gradient_of, initial_values
from tests.support.virtual.proof import prove
from tests.support.virtual.size_worker import SizeWorker
from tests.support.virtual.sizes import CostModel, SizeShard
from tests.support.virtual.virtual_worker import VirtualWorker

BOTH_WAYS = Wire(push=Rounding("bfloat16"), reply=Rounding("float16"), seed=5, has_feedback=False)
# Weights, lr and the number of groups are powers of two: nothing rounds but what is to be tested.
TWO_GROUPS = Schedule(seed=3, num_chunks=3, servers=2, iterations=(5, 5), lr=0.5)


class Thirds(VirtualWorker):
    """Its gradients do not fit into 16 bits."""

    def gradient(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        return thirds(self.worker, self.clock, index, parameter)


def thirds(worker: int, clock: int, index: int, parameter: torch.Tensor) -> torch.Tensor:
    return gradient_of(worker, clock, index, parameter) / 3


def predicted(
    job: VirtualJob, pushed: Callable[[int, int, int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The servers' chunks at the end, in sync with plain SGD; ``pushed(group, chunk, clock,
    gradient)`` is what a server decodes of a group's mean gradient."""
    schedule, partition = job.schedule, job.partition
    model = [torch.nn.Parameter(torch.zeros(piece.shape)) for piece in partition.pieces]
    with torch.no_grad():
        for index, parameter in enumerate(model):
            parameter.copy_(initial_values(index, parameter))
    flat = FlatModel(partition, model)
    values = [as_tensor(flat.parameter_bytes(chunk), "float32", 64) for chunk in partition.chunks]
    for clock in range(schedule.iterations[0]):
        sums = [torch.zeros(64) for _ in values]
        for group, members in enumerate(job.groups):
            means = [torch.zeros(64) for _ in values]
            for worker in members:
                for index, parameter in enumerate(model):
                    parameter.grad = thirds(worker, clock, index, parameter)
                flat.collect_gradients(scale=1.0)
                for chunk, mean in zip(partition.chunks, means, strict=True):
                    mean += as_tensor(flat.gradient_bytes(chunk), "float32", 64) / len(members)
            for chunk, mean in enumerate(means):
                sums[chunk] += pushed(group, chunk, clock, mean)
        for value, total in zip(values, sums, strict=True):
            value -= schedule.lr * (total / len(job.groups))
    return torch.cat(values)


def in_workers(worker: VirtualWorker) -> torch.Tensor:
    return torch.cat([as_tensor(memory, "float32", 64) for memory in worker.parameters])


@pytest.mark.parametrize("group_sizes", [(1, 1), (2, 2)])
def test_what_is_pushed_and_replied_is_rounded_as_the_codecs_say(
    group_sizes: tuple[int, int],
) -> None:
    """A worker encodes its slice of its group's mean, and decodes it before the group shares."""
    schedule = replace(TWO_GROUPS, group_sizes=group_sizes)
    job = play(schedule, wire=BOTH_WAYS, make_worker=Thirds)
    prove(job)
    push, reply = BOTH_WAYS.push, BOTH_WAYS.reply
    assert isinstance(push, Rounding)
    assert isinstance(reply, Rounding)
    expected = predicted(job, lambda _group, _chunk, _clock, mean: push.rounded(mean, 0))
    assert torch.equal(job.parameters(), expected)
    raw = play(schedule, make_worker=Thirds)
    assert not torch.equal(raw.parameters(), expected), "the codec has changed nothing"
    for worker in job.workers:
        assert torch.equal(in_workers(worker), reply.rounded(expected, 0))
        assert not torch.equal(in_workers(worker), expected)


def test_a_chance_is_the_same_in_a_repeated_run_and_comes_from_run_group_chunk_and_clock() -> None:
    codec = Dithered()
    wire = Wire(push=codec, reply=codec, seed=5, has_feedback=False)
    job, again, other = (
        play(replace(TWO_GROUPS, jitter_s=jitter_s), wire=each, make_worker=Thirds)
        for each, jitter_s in ((wire, 1e-4), (wire, 1e-3), (replace(wire, seed=6), 1e-4))
    )
    expected = predicted(
        job,
        lambda group, chunk, clock, mean: codec.rounded(mean, seed_of(5, group, chunk, clock)),
    )
    assert torch.equal(job.parameters(), expected)
    for one, two in zip(job.workers, again.workers, strict=True):
        assert torch.equal(in_workers(one), in_workers(two))
    assert not torch.equal(in_workers(job.workers[0]), in_workers(other.workers[0]))
    prove(job)


def test_what_is_left_out_of_a_push_comes_with_the_next_one() -> None:
    codec = Rounding("bfloat16")
    job = play(TWO_GROUPS, wire=Wire(push=codec, reply=RAW, seed=0), make_worker=Thirds)
    left: dict[tuple[int, int], torch.Tensor] = {}

    def pushed(group: int, chunk: int, _clock: int, gradient: torch.Tensor) -> torch.Tensor:
        wanted = gradient + left.get((group, chunk), torch.zeros_like(gradient))
        left[group, chunk] = wanted - codec.rounded(wanted, 0)
        return codec.rounded(wanted, 0)

    assert torch.equal(job.parameters(), predicted(job, pushed))


@pytest.mark.parametrize("first", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_every_schedule_ends_and_keeps_its_modes_rules_with_codecs_both_ways(first: int) -> None:
    """Pulls, duplicates, empty pushes, slots that are sums: all of them meet encoded bytes. The
    history's checksums are of what workers have decoded."""
    for seed in range(first, first + 20):
        try:
            prove(play(Schedule.from_seed(seed), wire=BOTH_WAYS, make_worker=Thirds))
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {Schedule.from_seed(seed)}") from error


# -- headers, bytes and refusals ---------------------------------------------------------------


class HeardNetwork(VirtualNetwork):
    """Counts payloads by kind and codec."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.heard: Counter[tuple[Kind, int, int]] = Counter()

    def transmit(self, sender: int, peer: int, frame: Frame) -> None:
        header = Header.unpack(frame.header)
        if header.length:
            self.heard[Kind(header.kind), header.codec, header.length] += 1
        super().transmit(sender, peer, frame)


def test_headers_name_the_codec_and_counts_are_of_encoded_bytes() -> None:
    network = HeardNetwork()
    job = play(TWO_GROUPS, wire=BOTH_WAYS, make_worker=Thirds, network=network)
    heads, groups, iterations = 3 * 8, 2, 5
    layouts = BOTH_WAYS.pushes(job.partition)
    assert layouts is not None
    encoded = sum(each.usual_bytes for each in layouts)
    lengths = [segment.length for chunk in job.partition.chunks for segment in chunk.segments]
    assert encoded == heads + sum(-(-2 * length // 8) * 8 for length in lengths)
    heard: Counter[tuple[Kind, int]] = Counter()
    for (kind, code, length), num in network.heard.items():
        heard[kind, code] += num * length
    assert heard == {
        (Kind.INIT, 0): 3 * 64 * 4,
        (Kind.PUSH, 201): groups * iterations * encoded,
        (Kind.REPLY, 200): groups * (iterations + 1) * encoded,
    }
    for worker in job.workers:
        counts = worker.core.counts()
        assert counts.bytes_pushed == encoded * iterations
        assert counts.bytes_pulled == encoded * (iterations + 1)


@pytest.mark.parametrize(
    ("of_workers", "of_servers", "refused"),
    [
        (
            Wire(push=Rounding("float16"), reply=RAW, seed=0),
            RAW_WIRE,
            r"server 0: worker [01] sent 136 bytes of chunk \d by codec 200, dtype 1; 256 bytes by "
            r"codec 0 \(raw\), dtype 1 are expected; do all ranks run the same version",
        ),
        (
            Wire(push=Rounding("float16"), reply=RAW, seed=0),
            Wire(push=Rounding("bfloat16"), reply=RAW, seed=0),
            r"server 0: worker [01] sent 136 bytes of chunk \d by codec 200, dtype 1; "
            r"8 to 264 bytes by codec 201 \(bfloat16\), dtype 1 are expected",
        ),
        (
            RAW_WIRE,
            Wire(push=RAW, reply=Rounding("float16"), seed=0),
            r"worker [01]: server 0 sent 136 bytes of chunk \d by codec 200, dtype 1; 256 bytes by "
            r"codec 0 \(raw\), dtype 1 are expected",
        ),
        (
            Wire(push=RAW, reply=Rounding("float16"), seed=0),
            RAW_WIRE,
            r"worker [01]: server 0 sent 256 bytes of chunk \d by codec 0, dtype 1; 8 to 264 bytes",
        ),
    ],
    ids=["push", "push-by-another", "reply", "raw-reply"],
)
def test_a_codec_that_is_not_expected_is_refused_naming_the_peer(
    of_workers: Wire, of_servers: Wire, refused: str
) -> None:
    class Differing(VirtualJob):
        @property
        def wire(self) -> Wire:
            """Servers are created first; workers get their wire from the job."""
            return of_workers

        @wire.setter
        def wire(self, _wire: Wire) -> None:
            pass

    job = Differing(replace(TWO_GROUPS, servers=1), wire=of_servers)
    with pytest.raises(ProtocolError, match=refused):
        job.network.run()


def test_a_server_that_decodes_something_else_than_the_sender_ends_the_run() -> None:
    """Another version of a codec on another host: all sizes are right."""

    class Another(Rounding):
        def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
            return super().decode(payload, num_values) + 1

    class Differing(VirtualJob):
        @property
        def wire(self) -> Wire:
            return Wire(push=Rounding("float16"), reply=RAW, seed=0)

        @wire.setter
        def wire(self, _wire: Wire) -> None:
            pass

    job = Differing(
        replace(TWO_GROUPS, servers=1), wire=Wire(push=Another("float16"), reply=RAW, seed=0)
    )
    refused = r"chunk 0: codec float16 decodes other values here than where they were encoded"
    with pytest.raises(ProtocolError, match=refused):
        job.network.run()


def test_a_copy_aside_is_what_servers_have_and_leaves_parameters_as_they_are() -> None:
    class Copies(Thirds):
        def iterate(self) -> Iterator[float | None]:
            yield from super().iterate()
            before = in_workers(self).clone()
            for memory in self.parameters:
                memory[:] = bytes(len(memory))
            frames = [Frame(allocate(256)) for _ in self.parameters]
            self.loop.begin_copy(frames, clock=self.clock + 1)
            yield from self._until(lambda: self.core.is_idle)
            payloads = [frame.payload for frame in frames]
            copied = [as_tensor(each, "float32", 64) for each in payloads if each is not None]
            brought.append(torch.cat(copied))
            assert torch.equal(reply.rounded(brought[0], 0), before)
            assert before.any()
            assert not in_workers(self).any()

    reply = BOTH_WAYS.reply
    assert isinstance(reply, Rounding)
    brought: list[torch.Tensor] = []
    schedule = replace(TWO_GROUPS, group_sizes=(1,), iterations=(1,), collectives=((),))
    job = play(schedule, wire=BOTH_WAYS, make_worker=Copies)
    (copy,) = brought
    assert torch.equal(copy, job.parameters())
    assert not torch.equal(copy, reply.rounded(copy, 0)), "a cast would show"


def test_sizes_alone_are_those_of_the_codec() -> None:
    model = CostModel(fold_s_per_byte=0.0, step_s_per_byte=0.0, copy_s_per_byte=0.0)
    jobs = [
        play(
            TWO_GROUPS,
            wire=wire,
            make_executor=partial(SizeShard, model=model),
            make_worker=SizeWorker,
        )
        for wire in (RAW_WIRE, BOTH_WAYS)
    ]
    raw, cast = (job.workers[0].core.counts() for job in jobs)
    assert 0 < cast.bytes_pushed < 0.7 * raw.bytes_pushed
    assert 0 < cast.bytes_pulled < 0.7 * raw.bytes_pulled
