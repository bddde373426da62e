"""Writes of a script to parameters are found wherever they are; restored values are none."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from psdist.errors import UsageError
from psdist.protocol.memory import dtype_name
from psdist.protocol.partition import Chunk, Partition, Piece
from psdist.workers.model.flat import FlatModel
from psdist.workers.model.samples import PARTS
from psdist.workers.model.watch import ModelWatch
from tests.support.late_transfers import on_a_device

PROMISED = 64
"""Iterations in which a write that repeats is found."""
EVERY_SEED = range(100)


class Worker:
    """The memory of a worker. ``land()`` is a reply with other values, ``look()`` a push."""

    def __init__(self, model: nn.Sequential, *, chunk_bytes: int | None = None) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        pieces = [
            Piece(
                name=name,
                shape=tuple(parameter.shape),
                stride=tuple(parameter.stride()),
                dtype=dtype_name(parameter.dtype),
                optimizer_group=0,
            )
            for name, parameter in model.named_parameters()
        ]
        self.partition = Partition.cut(pieces, chunk_bytes=chunk_bytes)
        self.flat = FlatModel(self.partition, self.parameters)
        self._servers = [flat.clone() for flat in self.flat.values]
        self._watch = ModelWatch(model, parameters=self.parameters, names=self.names, frozen=[])
        self.clock = 0

    def land(self) -> None:
        for here, there in zip(self.flat.values, self._servers, strict=True):
            here.copy_(there)
        self.land_as_it_is()

    def land_as_it_is(self) -> None:
        self.flat.samples.take()
        self.flat.values_changed()

    def land_chunk(self, index: int) -> None:
        chunk = self.partition.chunks[index]
        stretch = slice(chunk.start, chunk.start + chunk.length)
        self.flat.values[chunk.buffer][stretch] = self._servers[chunk.buffer][stretch]
        self.flat.samples.take([index])

    def in_another_order(self, choose: random.Random) -> list[Chunk]:
        return choose.sample(self.partition.chunks, len(self.partition.chunks))

    def look(self) -> None:
        self._watch.look(self.flat, clock=self.clock)
        self.clock += 1


def large() -> nn.Sequential:
    """So large that a part is a part; pieces of one block and of many, and two buffers."""
    model = nn.Sequential(nn.Linear(3, 70), nn.Linear(1300, 800), nn.Linear(40, 10).double())
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    return model


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).to(dtype)


def refused_after(
    worker: Worker, write: Callable[[], object], land: Callable[[], None] | None = None
) -> tuple[str, int]:
    """The error of a script that writes in every iteration, and their number until then."""
    land = land or worker.land
    land()
    worker.look()
    for iteration in range(1, 2 * PROMISED):
        land()
        write()
        try:
            worker.look()
        except UsageError as error:
            return str(error), iteration
    return "nothing", 2 * PROMISED


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_write_to_any_element_in_every_iteration_is_found_in_64_iterations(
    is_on_device: bool,
) -> None:
    found_by_part = set()
    for seed in EVERY_SEED:
        with on_a_device() if is_on_device else nullcontext():
            worker = Worker(large())
        choose = random.Random(seed)
        sizes = [each.numel() for each in worker.parameters]
        # Half of the seeds write to a piece that is chosen first, so that small ones are, too.
        weights = sizes if seed % 2 else [1] * len(sizes)
        (piece,) = choose.choices(range(len(sizes)), weights)
        element = choose.randrange(sizes[piece])

        values = worker.parameters[piece].data.view(-1)

        def land(worker: Worker = worker, values: torch.Tensor = values, at: int = element) -> None:
            values[at] = 0.5  # all others are as the servers sent them
            worker.land_as_it_is()

        def write(values: torch.Tensor = values, at: int = element) -> None:
            values[at] += 1e-3

        told, iterations = refused_after(worker, write, land)
        assert f"parameter {worker.names[piece]} since the servers sent" in told
        assert "call job.set_parameters() on all workers after each write" in told
        assert iterations <= PROMISED
        found_by_part.add(iterations)
    assert len(found_by_part) > PARTS / 4, "a part that is all of the model would find all at once"


def test_a_write_while_other_chunks_have_not_landed_is_found() -> None:
    """With overlap = full a script reads parameters, and may write, one after the other."""
    for seed in range(3):
        worker = Worker(large(), chunk_bytes=1 << 18)
        choose = random.Random(seed)
        written = choose.choice(worker.partition.chunks)
        at = written.start + choose.randrange(written.length)
        worker.land()

        def land_and_write(
            worker: Worker = worker,
            choose: random.Random = choose,
            written: Chunk = written,
            at: int = at,
        ) -> None:
            for chunk in worker.in_another_order(choose):
                worker.land_chunk(chunk.index)
                if chunk is written:
                    worker.flat.values[chunk.buffer][at] += 1e-3

        told, iterations = refused_after(worker, lambda: None, land_and_write)
        assert "has written to parameter" in told
        assert 2 < iterations < PROMISED


def test_chunks_that_land_one_by_one_are_no_writes(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(large(), chunk_bytes=1 << 18)
    for seed in range(PARTS):
        worker.look()
        for values in worker._servers:
            values += 0.25
        for chunk in worker.in_another_order(random.Random(seed)):
            worker.land_chunk(chunk.index)
    assert not caplog.records


def test_a_single_write_is_warned_of_and_the_third_one_ends_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(small())
    for write in (1, 2):
        worker.land()
        worker.model[1].weight.data.mul_(0.5)
        worker.look()
        for _ in range(100):
            worker.land()
            worker.look()
        assert len(caplog.records) == 1, f"after write {write}"
    assert "iteration 0: the script has written to parameter 1.weight since" in caplog.text
    worker.land()
    with torch.no_grad():
        worker.model[0].bias[3] = 1.0  # torch sees this one
    with pytest.raises(UsageError, match=r"iteration 202: .* parameter 0\.bias .* as in 2 iter"):
        worker.look()


@pytest.mark.parametrize("piece", range(6))
def test_a_single_write_that_torch_sees_is_warned_of_in_a_large_model(
    piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(large())
    worker.land()
    nn.init.zeros_(worker.parameters[piece])
    worker.look()
    assert f"has written to parameter {worker.names[piece]}" in caplog.text


def restore_copy(parameter: nn.Parameter, change: torch.Tensor) -> None:
    saved = parameter.detach().clone()
    parameter.add_(change)
    parameter.copy_(saved)


def restore_sum(parameter: nn.Parameter, change: torch.Tensor) -> None:
    parameter.add_(change)
    parameter.sub_(change)


def restore_data(parameter: nn.Parameter, change: torch.Tensor) -> None:
    parameter.data.add_(change)
    parameter.data.sub_(change)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("restore", [restore_copy, restore_sum, restore_data])
def test_values_that_are_restored_are_no_writes(
    restore: Callable[[nn.Parameter, torch.Tensor], None],
    dtype: torch.dtype,
    scale: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A perturbation is as that of sharpness-aware minimisation, or twice the largest weight."""
    model = small(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    worker = Worker(model)
    generator = torch.Generator().manual_seed(1)
    for size in (0.05, 2 * max(float(each.detach().abs().max()) for each in model.parameters())):
        for _ in range(50):
            worker.land()
            with torch.no_grad():
                for parameter in worker.parameters:
                    change = torch.rand(parameter.shape, generator=generator, dtype=dtype)
                    restore(parameter, (2 * change - 1) * size)
            worker.look()
    assert not caplog.records


def test_a_sum_in_half_precision_restores_nothing() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        worker = Worker(small(dtype))
        change = torch.full((), 0.3, dtype=dtype)

        def write(worker: Worker = worker, change: torch.Tensor = change) -> None:
            restore_data(worker.parameters[0], change)

        told, iterations = refused_after(worker, write)
        assert "0.weight" in told
        assert iterations == 3


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("weight decay by hand", lambda p: p.mul_(1 - 1e-6)),
        ("a clip that has an effect on one element", lambda p: p.clamp_(max=float(p.max()) - 1e-5)),
        ("NaN", lambda p: p.view(-1)[7].fill_(torch.nan)),
        ("infinity", lambda p: p.view(-1)[7].fill_(torch.inf)),
    ],
)
def test_small_writes_and_values_that_are_no_numbers_are_found(
    name: str, write: Callable[[torch.Tensor], object]
) -> None:
    worker = Worker(small())
    told, _ = refused_after(worker, lambda: write(worker.parameters[2].data))
    assert "parameter 1.weight since" in told, name


def test_values_that_are_no_numbers_on_the_servers_are_no_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(small())
    worker._servers[0][5], worker._servers[0][6] = torch.nan, -torch.inf
    for _ in range(3):
        worker.land()
        worker.look()
    assert not caplog.records


def test_local_steps_are_the_scripts_own_progress(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(small())
    for _ in range(5):
        worker.land()
        worker.model[0].weight.data.mul_(0.5)
        worker._watch.look(worker.flat, clock=0, is_local=True)
    assert not caplog.records
