"""A worker's pushes of which every N-th has no codec, and what was left out before waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.codecs import RAW, Codec
from psdist.codecs.chunks import Form
from psdist.codecs.feedback import PushEncoder, PushTerms, Residual
from psdist.codecs.schemes.low_rank import LowRank
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.codecs.wire import Wire, WireFrom
from psdist.config.codec_specs import Skip
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece

LENGTH, EVERY = 256, 4
TOPK = TopK(0.05)
CODECS: Sequence[Codec] = (TOPK, Sign(), LowRank(1))


class Sender:
    """Of one chunk with the pieces "a" and "b", of 128 values each."""

    def __init__(
        self,
        codec: Codec = TOPK,
        *,
        dtype: str = "float32",
        later: Sequence[WireFrom] = (),
        **options: Any,
    ) -> None:
        pieces = [
            Piece(name=name, shape=(16, 8), stride=(8, 1), dtype=dtype, optimizer_group=0)
            for name in ("a", "b")
        ]
        wire = Wire(push=codec, reply=RAW, seed=0, burst=EVERY, later=tuple(later))
        partition = Partition.cut(pieces, chunk_bytes=1 << 20)
        assert wire.replies(partition) is None
        codings = wire.pushes(partition)
        assert codings is not None
        given: dict[str, Any] = {"mine": [0], "seed": 0, "group": 0, "has_feedback": True} | options
        self.encoder = PushEncoder(codings, **given)
        self.clock = 0
        self.form = Form.VALUES

    def push(
        self, gradient: torch.Tensor, rate: float = 1.0, absent: Sequence[int] = ()
    ) -> torch.Tensor:
        """What the server has of it."""
        codings = self.encoder.codings
        into, terms = allocate(codings.largest(0)), PushTerms(rate, absent)
        size = self.encoder.encode(0, gradient, into, clock=self.clock, terms=terms)
        content = codings.at(self.clock)[0].read(into[:size])
        self.clock, self.form = self.clock + 1, content.form
        return content.values()

    def residual(self) -> Residual:
        return self.encoder.residuals().get(0, Residual(torch.zeros(LENGTH), 1.0))


def gradients(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, LENGTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_burst_brings_the_gradient_alone_and_e_stays(codec: Codec) -> None:
    """All other pushes are as without it, with one push fewer."""
    sender, twin = Sender(codec), Sender(codec)
    for number, gradient in enumerate(gradients(3 * EVERY), start=1):
        before = sender.residual()
        seen = sender.push(gradient)
        if number % EVERY == 0:
            assert sender.form is Form.RAW
            assert torch.equal(seen, gradient)
            assert sender.residual() is before
            assert bool(before.values.any()), "nothing was left out: nothing is tested"
            continue
        twin.clock = 0  # no burst; what these codecs draw is drawn at the first push
        assert torch.equal(twin.push(gradient), seen)
    assert torch.equal(twin.residual().values, sender.residual().values)


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_sent_and_left_out_are_together_what_was_pushed(
    codec: Codec, dtype: str, seed: int, data: st.DataObject
) -> None:
    sender = Sender(codec, dtype=dtype)
    moved, wanted, rate = torch.zeros(LENGTH), torch.zeros(LENGTH), 1.0
    for gradient in gradients(3 * EVERY + 1, seed).to(getattr(torch, dtype)):
        rate = data.draw(st.sampled_from([rate, 1.0, 0.5, 0.0]))
        absent = data.draw(st.sampled_from([(), (), (0,), (1,)]))
        for piece in absent:
            gradient[128 * piece : 128 * (piece + 1)] = 0
        moved += rate * sender.push(gradient, rate, absent)
        wanted += rate * gradient.float()
    last = sender.residual()
    assert last.due is None, "a burst is no change of codecs"
    assert torch.allclose(moved + last.rate * last.values, wanted, atol=1e-3)


def test_what_is_due_waits_for_a_round_with_a_codec() -> None:
    """A change of codecs to one with bursts."""
    sender = Sender(later=[WireFrom(round=6, push=Sign(), reply=RAW, burst=3)])
    pushed = gradients(14)
    pushed[6:] *= 0.01  # what is due takes many of these
    for number, gradient in enumerate(pushed, start=1):
        before = sender.residual()
        seen = sender.push(gradient)
        is_burst = number in (4, 9, 12)
        assert (sender.form is Form.RAW) == is_burst, number
        assert (before.due is not None) == (number > 7), number
        if is_burst:
            assert torch.equal(seen, gradient)
            assert sender.residual() is before


def test_a_burst_is_not_left_for_later() -> None:
    sender = Sender(skips=[(0, Skip(0.5))])
    parameters = torch.full((LENGTH,), 1e6)
    for number, gradient in enumerate(gradients(2 * EVERY), start=1):
        before = sender.residual()
        left = sender.encoder.leaves(0, gradient, parameters, clock=sender.clock, lr=1.0, rate=1.0)
        assert left == bool(number % EVERY)
        if left:
            sender.clock += 1
        else:
            assert torch.equal(sender.push(gradient), gradient)
            assert sender.residual() is before


def test_it_goes_on_from_a_checkpoint_bit_by_bit() -> None:
    whole, pushed = Sender(), gradients(3 * EVERY)
    seen = [whole.push(gradient) for gradient in pushed]
    for cut in (EVERY - 1, EVERY, EVERY + 1):
        first, second = Sender(), Sender()
        for gradient in pushed[:cut]:
            first.push(gradient)
        assert second.encoder.restore(first.encoder.collect())
        second.clock = cut
        for gradient, expected in zip(pushed[cut:], seen[cut:], strict=True):
            assert torch.equal(second.push(gradient), expected)
