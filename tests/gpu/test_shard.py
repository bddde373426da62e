"""A server's shard on a real GPU: in whatever order, the bits of one whose every copy is waited for
at once; what it steps to is what torch's own optimizer makes of the same gradients there.

python -m pytest -n 0 -rs tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from psdist.protocol.memory import as_tensor
from psdist.servers.protocol.actions import Contribution, Reply, ReplyToken, SlotContent, Step
from psdist.servers.shard.tensors import TensorShard
from psdist.transfers import Copy, Mark, Pairs, ToGpu
from tests.unit.servers.test_shard_on_a_device import OPTIMIZERS, Driven, drive, spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

SCALE = 4096


class WaitedFor(ToGpu):
    """Nothing is ever under way."""

    def begin_computed(self, compute: Callable[[], Pairs], *, after: Iterable[Mark]) -> Copy:
        torch.cuda.synchronize()
        copy = super().begin_computed(compute, after=after)
        torch.cuda.synchronize()
        return copy


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("scale", "seed"), [(1, 0), (1, 1), (SCALE, 2), (SCALE, 3)])
def test_the_bits_are_those_of_a_shard_that_waits_for_every_copy(
    optimizer: str, dtype: str, scale: int, seed: int
) -> None:
    device = torch.device("cuda", 0)
    drive(Driven(spec(optimizer, dtype, scale=scale), seed, [WaitedFor(device), ToGpu(device)]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_torchs_optimizer_on_the_gpu(optimizer: str) -> None:
    device = torch.device("cuda", 0)
    given = spec(optimizer, "float32", scale=SCALE)
    shard = TensorShard(given, ToGpu(device))
    (slot,) = shard.make_slots(1)
    assert slot.payload is not None
    length = given.partition.chunks[0].length
    pushed = as_tensor(slot.payload, "float32", length)
    plain = torch.zeros(length, device=device, requires_grad=True)
    options: dict[str, Any] = dict(OPTIMIZERS[optimizer])
    if optimizer in ("torch.optim.SGD", "torch.optim.AdamW"):
        options["fused"] = True
    else:
        options["foreach"] = False
    made = getattr(torch.optim, optimizer.rpartition(".")[2])([plain], **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradient = torch.randn(length, generator=generator)
        shard.settle(slot)
        pushed.copy_(gradient)
        slot.num_received = gradient.nbytes
        shard.step(
            Step(
                chunk=0,
                gradient=slot,
                content=SlotContent.GRADIENT,
                gradient_scale=1.0,
                lr_scale=1.0,
                hyper=given.hyper,
                absent=frozenset(),
                source=0,
                target=0,
                contributions=(Contribution(0, 0, 1.0, False),),
            )
        )
        plain.grad = gradient.to(device)
        made.step()
        shard.begin_reply(Reply(ReplyToken(0, 0, 0, 0), 0, 0, 0, 0, 1))
        ours = as_tensor(shard.payload(0, 0), "float32", length)
        assert torch.equal(ours, plain.detach().cpu())
