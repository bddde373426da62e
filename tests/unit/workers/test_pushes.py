"""What a worker sends of its gradients: the frames of its pushes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psdist.codecs import Raw
from psdist.codecs.checks import Checks
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.wire import Wire
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.partition import Chunk, Partition, Piece
from psdist.workers.push_transforms import transforms_of
from psdist.workers.pushes import Pushes

LENGTH = 256
PIECE = Piece(name="a", shape=(LENGTH,), stride=(1,), dtype="float32", optimizer_group=0)
PARTITION = Partition.cut([PIECE], chunk_bytes=1 << 20)
HYPER = pack_hyperparameters([{"lr": 0.5}])


class Memory:
    def __init__(self) -> None:
        self.gradient = torch.linspace(-1.0, 1.0, LENGTH)

    def gradient_frame(self, _chunk: Chunk) -> Frame:
        return Frame(memoryview(self.gradient.numpy()).cast("B"))

    parameter_frame = gradient_frame


def pushes_with(codec: Any) -> Pushes:
    seat = SimpleNamespace(group=0)
    core: Any = SimpleNamespace(
        mine=[0],
        seat=seat,
        settings_of=lambda _version: (HYPER, ()),
        transfers=SimpleNamespace(count_coded=lambda _more: None),
    )
    wire = Wire(push=codec, reply=Raw(), seed=0, checks=Checks("all"))
    return Pushes(PARTITION.chunks, [0], *transforms_of(core, PARTITION, Memory(), wire=wire))


@pytest.mark.parametrize("codec", [Raw(), Sign()])
def test_a_push_that_goes_again_leaves_the_frame_that_went_first_as_it_is(codec: Any) -> None:
    """The network may still have it, and never finds other bytes there."""
    pushes = pushes_with(codec)
    header = Header(
        kind=Kind.PUSH, sender=worker_id(0), clock=3, length=PARTITION.chunks[0].num_bytes
    )
    first = pushes.frame(header)
    sent, payload = bytes(first.header), bytes(first.payload or b"")
    again = pushes.frame(header._replace(flags=Flag.RETRANSMIT, clock=3))
    assert again is not first
    assert again.header is not first.header
    assert bytes(first.header) == sent
    assert bytes(again.payload or b"") == payload
    flags = [Header.unpack(bytes(each.header)).flags for each in (first, again)]
    assert flags == [Flag.CHECKSUMMED, Flag.CHECKSUMMED | Flag.RETRANSMIT]
    assert pushes.frame(header._replace(clock=4)) is again
