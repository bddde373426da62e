"""Streams and pinned memory on a real GPU; skipped where torch sees none. No timing is asserted.

python -m pytest -n 0 -rs tests/gpu
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.commands.doctor import examine
from psdist.protocol.memory import as_tensor
from psdist.transfers import ToGpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

NUM = 1 << 22
CYCLES = 500_000_000
"""A fraction of a second: far longer than a thread takes to ask for a copy."""


def host(transfers: ToGpu, value: float = 0.0) -> Tensor:
    return as_tensor(transfers.allocate(4 * NUM), "float32", NUM).fill_(value)


@pytest.fixture
def transfers() -> ToGpu:
    return ToGpu(torch.device("cuda", torch.cuda.current_device()))


def test_memory_of_the_host_is_pinned_and_zero(transfers: ToGpu) -> None:
    memory = host(transfers)
    assert memory.is_pinned()
    assert not memory.count_nonzero()


def test_memory_of_the_device_is_zeroed_before_anything_is_copied_there(
    transfers: ToGpu,
) -> None:
    source = host(transfers, 5.0)
    transfers.device_memory("float32", NUM)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    place = transfers.device_memory("float32", NUM)
    copy = transfers.begin([(source, place)], after=[])
    copy.join()
    assert bool((place == 5.0).all())


def test_a_copy_waits_for_what_its_thread_had_asked_for_and_no_one_waits_for_it(
    transfers: ToGpu,
) -> None:
    source, target = transfers.device_memory("float32", NUM), host(transfers)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    source.fill_(3.0)
    copy = transfers.begin([(source, target)], after=[transfers.mark()])
    assert not copy.is_done()
    copy.wait()
    assert copy.is_done()
    assert bool((target == 3.0).all())


def test_a_copy_that_is_begun_in_another_thread_waits_for_the_mark_of_this_one(
    transfers: ToGpu,
) -> None:
    source, target = transfers.device_memory("float32", NUM), host(transfers)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call] # torch's
        torch.cuda._sleep(CYCLES)
        source.fill_(3.0)
        mark = transfers.mark()
    copies: list[Any] = []
    thread = threading.Thread(
        target=lambda: copies.append(transfers.begin([(source, target)], after=[mark]))
    )
    thread.start()
    thread.join()
    copies[0].wait()
    assert bool((target == 3.0).all())


def test_what_is_computed_next_comes_behind_a_copy_that_was_joined(transfers: ToGpu) -> None:
    source, place = host(transfers, 5.0), transfers.device_memory("float32", NUM)
    assert not (place.clone() + 1.0 - 1.0).count_nonzero()  # loading a kernel waits for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    before = place.clone()  # still reads what was there
    copy = transfers.begin([(source, place)], after=[transfers.mark()])
    copy.join()
    after = place + 1.0
    assert not copy.is_done()
    assert bool((after == 6.0).all())
    assert not before.count_nonzero()
    assert copy.is_done()


def test_copies_are_done_in_the_order_in_which_they_were_begun(transfers: ToGpu) -> None:
    source, targets = transfers.device_memory("float32", NUM), [host(transfers) for _ in range(3)]
    copies = [transfers.begin([(source, each)], after=[transfers.mark()]) for each in targets]
    copies[-1].wait()
    assert all(copy.is_done() for copy in copies)


def test_hooks_of_gradients_run_in_another_thread_on_the_stream_of_their_gradient(
    transfers: ToGpu,
) -> None:
    """What overlap takes for granted: docs/dev/design.md, Overlap on a GPU."""
    layer = nn.Linear(64, 64, device="cuda")
    flat, target = transfers.device_memory("float32", 64 * 64), host(transfers)
    seen: list[tuple[int, Any]] = []

    def hook(parameter: Tensor) -> None:
        torch.cuda._sleep(CYCLES)
        assert parameter.grad is not None
        flat.copy_(parameter.grad.view(-1))
        seen.append((threading.get_ident(), transfers.mark()))

    layer.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call] # torch's
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(torch.ones(8, 64, device="cuda")).square().sum().backward()
    ((thread, mark),) = seen
    assert thread != threading.get_ident()
    copy = transfers.begin([(flat, target[: 64 * 64])], after=[mark])
    copy.wait()
    assert layer.weight.grad is not None
    assert torch.equal(target[: 64 * 64], layer.weight.grad.view(-1).cpu())


@pytest.mark.mpi
def test_the_doctor_says_whether_mpi_takes_memory_of_the_gpu() -> None:
    (found,) = [each for each in examine(os.environ) if each.subject == "GPU memory over MPI"]
    print(found.value)
    assert found.value.startswith(("yes: 4 MiB there and back", "no: "))
    assert "other bytes" not in found.value
