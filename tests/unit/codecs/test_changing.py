"""A worker's pushes where the codec changes within the run: what was left out is not lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.codecs import RAW, Codec, Raw
from psdist.codecs.chunks import ChunkCodings, Form
from psdist.codecs.feedback import PushEncoder, PushTerms, Residual
from psdist.codecs.layout import CodecOf
from psdist.codecs.schemes.low_rank import LowRank
from psdist.codecs.schemes.plain import Exact, Plain
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.config.codec_specs import Skip
from psdist.errors import InvariantError, NonFiniteGradientError, ProtocolError
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.rounds import Turns

LENGTH = 256
EXACT = Exact()
TOPK = TopK(0.05)
CODECS: Sequence[Codec] = (EXACT, TOPK, Sign(), Quantized("int4"), LowRank(1), Plain())


def partition_of(dtype: str) -> Partition:
    pieces = [
        Piece(name=name, shape=(16, 8), stride=(8, 1), dtype=dtype, optimizer_group=0)
        for name in ("a", "b")
    ]
    return Partition.cut(pieces, chunk_bytes=1 << 20)


def codings_of(
    parts: Sequence[tuple[int, Codec | Raw]], partition: Partition
) -> ChunkCodings | None:
    """Each from its round on."""
    turns = Turns([(start, number) for number, (start, _) in enumerate(parts)])
    return ChunkCodings.of([CodecOf(codec) for _, codec in parts], partition, turns)


class Sender:
    def __init__(
        self, parts: Sequence[tuple[int, Codec]], *, dtype: str = "float32", **options: Any
    ) -> None:
        codings = codings_of(parts, partition_of(dtype))
        assert codings is not None
        given: dict[str, Any] = {"mine": [0], "seed": 0, "group": 0, "has_feedback": True} | options
        self.encoder = PushEncoder(codings, **given)
        self.clock = 0
        self.form = Form.RAW
        self.size = 0

    def push(
        self, gradient: torch.Tensor, rate: float = 1.0, absent: Collection[int] = ()
    ) -> torch.Tensor:
        """What the server has of it."""
        codings, clock = self.encoder.codings, self.clock
        into, terms = allocate(codings.largest(0)), PushTerms(rate, absent)
        self.size = self.encoder.encode(0, gradient, into, clock=clock, terms=terms)
        content = codings.at(clock)[0].read(into[: self.size])
        self.clock += 1
        self.form = content.form
        return content.values()

    def residual(self) -> Residual:
        nothing = torch.zeros(LENGTH)
        return self.encoder.residuals().get(0, Residual(nothing, 1.0))

    def left(self) -> torch.Tensor:
        """By this codec and all before it."""
        values, due = self.residual().values, self.residual().due
        return values if due is None else values + due


def gradients(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, LENGTH, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    order=st.lists(st.sampled_from(range(len(CODECS))), min_size=2, max_size=6),
    width=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_sent_and_left_out_are_together_what_was_pushed_whatever_the_codecs(
    order: list[int], width: int, dtype: str, seed: int, data: st.DataObject
) -> None:
    """Parameters that have moved by rate x what was seen, and rate x what is left, are together the
    sum of rate x gradient."""
    parts = [(place * width, CODECS[codec]) for place, codec in enumerate(order)]
    sender, moved, wanted = Sender(parts, dtype=dtype), torch.zeros(LENGTH), torch.zeros(LENGTH)
    rate = 1.0
    for gradient in gradients(width * len(order) + 3, seed).to(getattr(torch, dtype)):
        rate = data.draw(st.sampled_from([rate, 1.0, 0.5]))
        absent = data.draw(st.sampled_from([(), (), {0}, {1}]))
        for piece in absent:
            gradient[128 * piece : 128 * (piece + 1)] = 0
        moved += rate * sender.push(gradient, rate, absent)
        wanted += rate * gradient.float()
    last = sender.residual()
    # Where the values are bfloat16 pieces that codecs leave alone are rounded; there are none.
    assert torch.allclose(moved + last.rate * sender.left(), wanted, atol=1e-3)


def test_a_portion_that_sixteen_bits_cannot_hold_is_no_push() -> None:
    sender = Sender([(0, TOPK), (3, EXACT)], dtype="float16")
    pushed = torch.full((4, LENGTH), 6e4, dtype=torch.float16)
    for gradient in pushed[:3]:
        sender.push(gradient)
    with pytest.raises(NonFiniteGradientError, match=r"iteration 3: .* has left out before"):
        sender.push(pushed[3])


def test_what_was_left_leaves_in_portions_as_large_as_the_gradient_and_then_all_is_exact() -> None:
    sender, pushed = Sender([(0, TOPK), (20, EXACT)]), gradients(60)
    for gradient in pushed[:20]:
        sender.push(gradient)
    before = sender.left().norm()
    assert before > 1.5 * pushed[20].norm(), "else nothing is tested"
    sizes = []
    for gradient in pushed[20:]:
        portion = sender.push(gradient) - gradient
        assert sender.form is Form.RAW
        assert portion.norm() <= gradient.norm() * 1.0001
        sizes.append(float(portion.norm() / gradient.norm()))
    assert sizes[0] == pytest.approx(1, rel=1e-4)
    assert sizes[-1] == 0
    assert not sender.encoder.residuals(), "memory that nobody needs is given back"
    assert sender.encoder.num_residual_bytes == 0
    assert torch.equal(sender.push(pushed[0]), pushed[0])


def test_a_warm_up_without_a_codec_keeps_nothing_and_then_feedback_begins() -> None:
    sender, pushed = Sender([(0, EXACT), (3, TOPK)]), gradients(5)
    for gradient in pushed[:3]:
        assert torch.equal(sender.push(gradient), gradient)
        assert not sender.encoder.residuals()
    fresh = Sender([(0, TOPK)])
    fresh.clock = 3
    for gradient in pushed[3:]:
        assert torch.equal(sender.push(gradient), fresh.push(gradient))
    assert sender.size < 4 * LENGTH / 4


def test_the_same_codec_again_is_no_change() -> None:
    """Of it e goes into the next push whole."""
    one, two = Sender([(0, TOPK)]), Sender([(0, TOPK), (2, TopK(0.05))])
    for gradient in gradients(5):
        assert torch.equal(one.push(gradient), two.push(gradient))
    assert two.residual().due is None


@pytest.mark.parametrize("at", range(1, 9))
def test_a_checkpoint_anywhere_goes_on_with_the_same_bits(at: int) -> None:
    parts = [(0, LowRank(1)), (3, TOPK), (5, Sign()), (7, EXACT)]
    sender, other = Sender(parts), Sender(parts)
    for clock, gradient in enumerate(gradients(30)):
        if clock == at:
            assert other.encoder.restore(sender.encoder.collect())
            other.clock = clock
        seen = sender.push(gradient)
        if clock >= at:
            assert torch.equal(other.push(gradient), seen)
            assert torch.equal(other.left(), sender.left())


def test_what_is_due_of_other_chunks_is_not_gone_on_with() -> None:
    sender = Sender([(0, TOPK), (20, Sign())])
    for gradient in gradients(21):
        sender.push(gradient)
    collected = sender.encoder.collect()
    assert collected["0"]["codec"] == "sign"
    collected["0"]["due"] = collected["0"]["due"][:100]
    assert not Sender([(0, Sign())]).encoder.restore(collected)


def test_a_run_that_goes_on_with_another_codec_owes_what_the_first_one_left() -> None:
    sender, pushed = Sender([(0, TOPK)]), gradients(30)
    for gradient in pushed[:20]:
        sender.push(gradient)
    left = sender.left()
    other = Sender([(0, Quantized("int8"))])
    assert other.encoder.restore(sender.encoder.collect())
    seen = other.push(pushed[20])
    assert (seen - pushed[20]).norm() < 1.1 * pushed[20].norm() < 0.8 * left.norm()
    assert torch.allclose(seen + other.left(), pushed[20] + left, atol=1e-4)


def test_where_nothing_would_move_what_is_due_stays() -> None:
    sender, pushed = Sender([(0, TOPK), (3, EXACT)]), gradients(6)
    for gradient in pushed[:4]:
        sender.push(gradient)
    left = sender.left().clone()
    assert torch.equal(sender.push(pushed[4], 0.0), pushed[4])
    assert torch.equal(sender.left(), left)


def test_pushes_left_for_later_end_with_the_rounds_that_have_them() -> None:
    skips = [(0, Skip(0.5)), (3, None)]
    sender = Sender([(0, Plain()), (3, EXACT)], skips=skips)
    pushed, held = gradients(4) * 1e-3, torch.ones(LENGTH)
    for clock, gradient in enumerate(pushed[:3]):
        assert sender.encoder.leaves(0, gradient, held, clock=clock, lr=1.0, rate=1.0)
    sender.clock = 3
    assert not sender.encoder.leaves(0, pushed[3], held, clock=3, lr=1.0, rate=1.0)
    seen = sender.push(pushed[3])
    assert torch.allclose(seen + sender.left(), pushed.sum(dim=0), atol=1e-6)
    assert not torch.equal(seen, pushed[3])


def test_without_feedback_nothing_is_due() -> None:
    sender, pushed = Sender([(0, TOPK), (1, EXACT)], has_feedback=False), gradients(2)
    sender.push(pushed[0])
    assert torch.equal(sender.push(pushed[1]), pushed[1])
    assert not sender.encoder.residuals()


def test_what_is_due_and_is_not_finite_is_an_error_that_names_the_iteration() -> None:
    sender = Sender([(0, TOPK), (1, Sign())])
    sender.push(gradients(1)[0] * 1e38, rate=1.0)
    with pytest.raises(NonFiniteGradientError, match="iteration 1: the gradient of chunk 0"):
        sender.push(gradients(1)[0], rate=1e-30)


def test_a_payload_of_another_rounds_codec_is_refused() -> None:
    sender = Sender([(0, TopK(0.05)), (1, TopK(0.1))])
    codings = sender.encoder.codings
    into = allocate(codings.largest(0))
    terms = PushTerms(1.0, ())
    num = sender.encoder.encode(0, gradients(1)[0], into, clock=0, terms=terms)
    assert codings.at(0)[0].read(into[:num])
    with pytest.raises(ProtocolError, match=r"topk:0\.1"):
        codings.at(1)[0].read(into[:num])


def test_rounds_without_a_head_and_rounds_with_one_are_not_mixed() -> None:
    with pytest.raises(InvariantError, match="some rounds are raw"):
        codings_of([(0, RAW), (3, TOPK)], partition_of("float32"))


def test_rounds_of_one_codec_share_what_is_known_of_it() -> None:
    codings = codings_of([(0, TOPK), (2, EXACT), (5, TOPK)], partition_of("float32"))
    assert codings is not None
    assert codings.at(0) is codings.at(1) is codings.at(5) is codings.at(900)
    assert codings.at(2).codec is EXACT
    assert codings.largest(0) == codings.at(2)[0].sizes[1] > 4 * LENGTH
