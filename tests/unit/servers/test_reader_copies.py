"""What a server knows that each reader holds, and which replies are relative to it."""

from __future__ import annotations

import zlib

import pytest
import torch

from psdist.codecs import ANY_SERVER, RAW, sender_to
from psdist.codecs.chunks import Content, Form
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.wire import Wire
from psdist.protocol.header import Flag
from psdist.protocol.ids import worker_id
from psdist.protocol.memory import as_bytes, as_tensor
from psdist.protocol.optimizers import pack_hyperparameters, traits
from psdist.protocol.partition import Partition, Piece
from psdist.servers.protocol.actions import Contribution, Load, Reply, ReplyToken, SlotContent, Step
from psdist.servers.shard.executor import ShardSpec
from psdist.servers.shard.tensors import TensorShard
from tests.support.rounding import Rounding

HYPER = pack_hyperparameters([{"lr": 0.5}])
ONE, OTHER = worker_id(0), worker_id(1)
HALF = Wire(
    push=RAW, reply=Rounding("float16"), seed=0, is_relative=True, has_copies=True, compare_every=1
)


class Server:
    """A shard of one chunk of 64 values, and what its replies say."""

    def __init__(self, wire: Wire = HALF, dtype: str = "float32") -> None:
        piece = Piece(name="p", shape=(64,), stride=(1,), dtype=dtype, optimizer_group=0)
        self.dtype = dtype
        self.shard = TensorShard(
            ShardSpec(
                partition=Partition.cut([piece], chunk_bytes=None),
                chunks=(0,),
                optimizer="torch.optim.SGD",
                traits=traits("torch.optim.SGD"),
                hyper=HYPER,
                wire=wire,
            )
        )
        (self.slot,) = self.shard.make_slots(1)
        self.set(1.0)

    def set(self, value: float) -> None:
        self._fill(value)
        self.shard.load(Load(0, self.slot))

    def step(self, gradient: float) -> None:
        self._fill(gradient)
        self.shard.step(
            Step(
                chunk=0,
                gradient=self.slot,
                content=SlotContent.GRADIENT,
                gradient_scale=1.0,
                lr_scale=1.0,
                hyper=HYPER,
                absent=frozenset(),
                source=0,
                target=0,
                contributions=(Contribution(0, 0, 1.0, False),),
            )
        )

    def _fill(self, value: float) -> None:
        assert self.slot.payload is not None
        as_tensor(self.slot.payload, self.dtype, 64).fill_(value)

    @property
    def values(self) -> torch.Tensor:
        return self.shard.memory[0].values

    def payload(
        self, peer: int, *, held: int, version: int, flags: int = 0, clock: int = 3
    ) -> memoryview:
        into = self.shard.payload(0, 0)
        reply = Reply(ReplyToken(peer, 0, 0, 0), clock, 0, flags, 0, version, held)
        return into[: self.shard.encode(reply, into=into)]

    def content(self, peer: int, *, held: int, version: int, flags: int = 0) -> Content:
        sent = self.payload(peer, held=held, version=version, flags=flags)
        return self.shard.replies.coding(0, 0).read(sent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reply_is_relative_to_what_its_reader_was_sent_last(dtype: str) -> None:
    server = Server(dtype=dtype)
    one, other = (torch.zeros(64, dtype=getattr(torch, dtype)) for _ in range(2))
    first = server.content(ONE, held=0, version=1)
    assert first.form is Form.RAW
    assert first.change(one)
    server.step(1.0 / 3)
    assert server.content(OTHER, held=0, version=2).change(other)
    second = server.content(ONE, held=1, version=2)
    assert second.form is Form.CHANGE
    assert second.change(one), "the checksum is that of what this reader has now"
    server.step(1.0 / 7)
    for peer, mine in ((ONE, one), (OTHER, other)):
        found = server.content(peer, held=2, version=3)
        assert found.form is Form.CHANGE
        assert found.change(mine)
        assert torch.equal(mine, server.shard.replies.held_by(peer, 0))
        assert server.shard.checksum(0, 0, encoded=None, reader=peer) == zlib.crc32(as_bytes(mine))
        assert (mine.float() - server.values).abs().max() < 1e-2
    assert server.shard.statistics().copy_bytes == one.nbytes + other.nbytes


@pytest.mark.parametrize("held", [0, 2, 3])
def test_who_holds_something_else_gets_all_and_goes_on_from_there(held: int) -> None:
    server = Server()
    server.content(ONE, held=0, version=1)
    server.step(1.0 / 3)
    found = server.content(ONE, held=held, version=2)
    assert found.form is Form.RAW
    mine = torch.zeros(64)
    assert found.change(mine)
    assert torch.equal(mine, server.values)
    server.step(1.0 / 7)
    again = server.content(ONE, held=2, version=3)
    assert again.form is Form.CHANGE
    assert again.change(mine)


def test_values_that_are_set_come_in_full() -> None:
    server = Server()
    server.content(ONE, held=0, version=1)
    server.set(5.0)
    assert server.shard.statistics().copy_bytes == 0
    found = server.content(ONE, held=1, version=2)
    assert found.form is Form.RAW
    assert torch.equal(found.values(), torch.full((64,), 5.0))


def test_a_copy_for_saving_has_the_parameters_and_leaves_alone_what_its_reader_holds() -> None:
    server = Server()
    mine = torch.zeros(64)
    server.content(ONE, held=0, version=1).change(mine)
    server.step(1.0 / 3)
    server.content(ONE, held=1, version=2).change(mine)
    server.step(1.0 / 3)
    saved = server.content(ONE, held=0, version=3, flags=Flag.FRESH)
    assert torch.equal(saved.values(), server.values)
    assert torch.equal(mine, server.shard.replies.held_by(ONE, 0))
    found = server.content(ONE, held=2, version=3)
    assert found.form is Form.CHANGE
    assert found.change(mine)


def test_readers_have_noise_of_their_own_and_the_same_when_it_is_repeated() -> None:
    wire = Wire(
        push=RAW, reply=Quantized("int2", is_stochastic=True), seed=7, is_relative=True,
        has_copies=True, compare_every=1000,
    )  # fmt: skip

    def sent() -> list[bytes]:
        server = Server(wire)
        for peer in (ONE, OTHER):
            server.payload(peer, held=0, version=1)
        # Values of several magnitudes: multiples of the largest would need no chance.
        assert server.slot.payload is not None
        server.step(0.0)
        server.values.add_(torch.linspace(-1.0, 1.0, 64))
        return [bytes(server.payload(peer, held=1, version=2)) for peer in (ONE, OTHER)]

    one, other = sent()
    assert one != other
    assert sent() == [one, other]
    assert len({ANY_SERVER, sender_to(0), sender_to(1), 0, 1}) == 5
