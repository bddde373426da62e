"""What a worker's pushes leave out, and when it comes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from psdist.codecs import Codec
from psdist.codecs.chunks import ChunkCodings, Form
from psdist.codecs.feedback import CodingErrors, PushEncoder, PushTerms
from psdist.codecs.schemes.plain import Plain
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.config.codec_specs import Skip
from psdist.errors import NonFiniteGradientError
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece

PIECES = [
    Piece(name=name, shape=(16, 8), stride=(8, 1), dtype="float32", optimizer_group=0)
    for name in ("a", "b")
]
PARTITION = Partition.cut(PIECES, chunk_bytes=1 << 20)
LENGTH = 256


def encoder_of(codec: Codec, **options: Any) -> PushEncoder:
    codings = ChunkCodings(codec, PARTITION, patterns=())
    given: dict[str, Any] = {"mine": [0], "seed": 0, "group": 0, "has_feedback": True} | options
    return PushEncoder(codings, **given)


class Sender:
    def __init__(self, encoder: PushEncoder) -> None:
        self.encoder = encoder
        self.clock = 0
        self.into = allocate(encoder.codings[0].sizes[1])
        self.form = Form.RAW

    def push(
        self, gradient: torch.Tensor, rate: float = 1.0, absent: Collection[int] = ()
    ) -> torch.Tensor:
        """What the server has of it."""
        terms = PushTerms(rate, absent)
        num = self.encoder.encode(0, gradient, self.into, clock=self.clock, terms=terms)
        self.clock += 1
        content = self.encoder.codings[0].read(self.into[:num])
        self.form = content.form
        return content.values()

    def left(self) -> torch.Tensor:
        return self.encoder.residuals()[0].values


def gradients(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, LENGTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", [TopK(0.1), Sign(), Quantized("int4")], ids=lambda c: c.name)
def test_sent_and_left_out_are_together_what_was_pushed(codec: Codec) -> None:
    sender, pushed = Sender(encoder_of(codec)), gradients(30)
    seen = sum(sender.push(gradient) for gradient in pushed)
    assert torch.allclose(seen + sender.left(), pushed.sum(dim=0), atol=1e-4)
    assert sender.left().any()


def test_without_feedback_it_is_lost() -> None:
    gradient = torch.linspace(0, 1, LENGTH)
    without = Sender(encoder_of(TopK(0.1), has_feedback=False))
    first, second = without.push(gradient), without.push(gradient)
    assert torch.equal(first, second)
    assert not without.encoder.residuals()
    again = Sender(encoder_of(TopK(0.1)))
    again.push(gradient)
    assert not torch.equal(again.push(gradient), first)


def test_what_was_left_out_under_one_rate_moves_later_by_what_it_would_have_moved() -> None:
    """Parameters that have moved by rate x what was seen, and what is left, are together the sum of
    rate x gradient, however the rate changes."""
    sender = Sender(encoder_of(Sign()))
    rates = [1.0, 0.25, 0.5, 3.0, 1e-3]
    pushed = gradients(len(rates))
    moved = sum(
        rate * sender.push(gradient, rate) for rate, gradient in zip(rates, pushed, strict=True)
    )
    wanted = sum(rate * gradient for rate, gradient in zip(rates, pushed, strict=True))
    assert torch.allclose(moved + rates[-1] * sender.left(), wanted, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, float("nan"), float("inf")])
def test_where_nothing_would_move_the_gradient_goes_as_it_is(rate: float) -> None:
    sender, (first, second, third) = Sender(encoder_of(Sign())), gradients(3)
    sender.push(first, 2.0)
    left = sender.left().clone()
    assert torch.equal(sender.push(second, rate), second)
    assert sender.form is Form.RAW
    assert torch.equal(sender.left(), left)
    sender.push(third, 1.0)
    expected = Sender(encoder_of(Sign())).push(third + 2 * left)
    assert torch.allclose(sender.left(), third + 2 * left - expected, atol=1e-6)


def test_a_piece_without_a_gradient_is_left_out_and_keeps_what_it_has() -> None:
    sender, (first, second, third) = Sender(encoder_of(Sign())), gradients(3)
    sender.push(first, 2.0)
    left = sender.left().clone()
    second[128:] = 0  # the second piece has none
    seen = sender.push(second, 1.0, absent={1})
    assert not seen[128:].any()
    assert torch.equal(sender.left()[128:], 2 * left[128:]), "in the units of the rate now"
    assert torch.allclose(seen[:128] + sender.left()[:128], second[:128] + 2 * left[:128])
    seen = sender.push(third, 1.0)
    assert seen[128:].any()


def test_gradients_stay_as_they_are_and_errors_are_counted() -> None:
    sender, (gradient,) = Sender(encoder_of(Sign())), gradients(1)
    before = gradient.clone()
    seen = sender.push(gradient)
    assert torch.equal(gradient, before)
    errors = sender.encoder.errors
    assert errors.missed[0] == pytest.approx(float((gradient - seen).square().sum()), rel=1e-4)
    assert errors.wanted[0] == pytest.approx(float(gradient.square().sum()), rel=1e-4)


def test_what_overflows_with_what_was_left_out_is_an_error_that_says_so() -> None:
    sender, (gradient,) = Sender(encoder_of(Sign())), gradients(1)
    sender.push(gradient * 1e30, 1e10)
    with pytest.raises(NonFiniteGradientError, match=r"iteration 1: the gradient of chunk 0 with"):
        sender.push(gradient, 1e-10)


def test_who_goes_on_with_what_was_left_out_sends_the_same() -> None:
    one, other, pushed = Sender(encoder_of(Sign())), Sender(encoder_of(Sign())), gradients(4)
    for gradient in pushed[:3]:
        one.push(gradient, 0.5)
    assert other.encoder.restore(one.encoder.collect())
    assert torch.equal(one.push(pushed[3], 0.25), other.push(pushed[3], 0.25))
    assert one.encoder.num_residual_bytes == 4 * LENGTH


def test_what_was_left_out_of_other_chunks_is_not_gone_on_with() -> None:
    one, (gradient,) = Sender(encoder_of(Sign())), gradients(1)
    one.push(gradient)
    collected = one.encoder.collect()
    shorter = {"0": {**collected["0"], "values": collected["0"]["values"][:64]}}
    for wrong in ({"1": collected["0"]}, shorter):
        other = encoder_of(Sign())
        assert not other.restore(wrong)
        assert not other.residuals()
    assert not encoder_of(Sign(), mine=[]).restore(collected)


def test_errors_of_a_long_run_take_no_more_room_and_none_is_lost() -> None:
    errors = CodingErrors()
    for clock in range(1000):
        errors.add(clock, 1.0, clock)
        errors.add(clock, 1.0, 0.0)
    assert len(errors.missed) == len(errors.wanted) <= 64
    assert errors.width == 16
    assert errors.missed == [32.0] * 62 + [16.0]
    assert errors.wanted[1] == sum(range(16, 32))
    assert sum(errors.wanted) == sum(range(1000))


# -- pushes that are left for later ------------------------------------------------------------


def leaving(sender: Sender, gradient: torch.Tensor, parameters: torch.Tensor, **given: Any) -> bool:
    terms = {"lr": 0.5, "rate": 1.0} | given
    return sender.encoder.leaves(0, gradient, parameters, clock=sender.clock, **terms)


def test_a_push_is_left_for_later_while_what_it_moves_is_small_but_not_for_ever() -> None:
    sender = Sender(encoder_of(Plain(), skips=[(0, Skip(0.01, most=3))]))
    parameters, small = torch.ones(LENGTH), torch.full((LENGTH,), 0.004)
    # 0.5 x 0.004 k against 0.01: the sum comes near it after five, of which three may be left.
    assert [leaving(sender, small, parameters) for _ in range(3)] == [True] * 3
    assert not leaving(sender, small, parameters)
    assert torch.allclose(sender.push(small), 4 * small), "all that was left comes at once"
    assert not sender.left().any()
    assert leaving(sender, small, parameters), "it is counted again"
    assert sender.encoder.num_skipped == 4


def test_what_adds_up_is_compared_with_the_parameters_by_their_norms() -> None:
    sender = Sender(encoder_of(Plain(), skips=[(0, Skip(0.01))]))
    parameters, small = torch.ones(LENGTH), torch.full((LENGTH,), 0.008)
    assert leaving(sender, small, parameters)
    assert leaving(sender, small, parameters)
    assert not leaving(sender, small, parameters), "0.5 x 0.024 is above 0.01"
    alone = Sender(encoder_of(Plain(), skips=[(0, Skip(0.01))]))
    assert not leaving(alone, 0 * small, torch.zeros(LENGTH)), "nothing is small against nothing"
    assert not leaving(alone, small, parameters, lr=2.0)
    for rate in (0.0, float("nan")):
        assert not leaving(alone, small, parameters, rate=rate)
    assert not leaving(Sender(encoder_of(Plain())), 0 * small, parameters)


def test_what_was_left_for_later_is_in_units_of_the_rate_now_and_in_checkpoints() -> None:
    sender = Sender(encoder_of(Plain(), skips=[(0, Skip(0.01, most=2))]))
    parameters, small = torch.ones(LENGTH), torch.full((LENGTH,), 0.004)
    memory = small.clone()
    assert leaving(sender, memory, parameters)
    memory.zero_()  # the next backward pass writes there
    other = Sender(encoder_of(Plain(), skips=[(0, Skip(0.01, most=2))]))
    assert other.encoder.restore(sender.encoder.collect())
    for each in (sender, other):
        assert leaving(each, small, parameters, rate=2.0)
        assert not leaving(each, small, parameters, rate=2.0)
        assert torch.allclose(each.push(small, rate=4.0), small * (1 + (2 + 1) / 4), rtol=1e-5)


def test_exact_pieces_bring_what_was_left_for_later_too() -> None:
    codings = ChunkCodings(Sign(), PARTITION, patterns=("a",))
    encoder = PushEncoder(
        codings, mine=[0], seed=0, group=0, has_feedback=True, skips=[(0, Skip(0.01))]
    )
    sender, small = Sender(encoder), gradients(1)[0] * 1e-3
    assert leaving(sender, small, torch.ones(LENGTH))
    assert torch.allclose(sender.push(small)[:128], 2 * small[:128])


def test_a_gradient_that_overflows_with_what_was_left_is_not_left_for_later() -> None:
    sender = Sender(encoder_of(Plain(), skips=[(0, Skip(0.01))]))
    assert leaving(sender, torch.full((LENGTH,), 1e30), torch.full((LENGTH,), 1e36), rate=1e10)
    with pytest.raises(NonFiniteGradientError, match=r"chunk 0 with what codec plain has left out"):
        leaving(sender, torch.ones(LENGTH), torch.ones(LENGTH), rate=1e-10)


def test_what_was_left_out_of_the_newest_iteration_is_known() -> None:
    errors = CodingErrors()
    assert errors.of_newest(-1) == 0.0
    for chunk in range(2):
        errors.add(4, 1.0 + chunk, 8.0 + 4.0 * chunk)
    assert errors.of_newest(4) == pytest.approx((3 / 20) ** 0.5)
    assert errors.of_newest(3) == 0.0
    errors.add(5, 0.0, 0.0)
    assert errors.of_newest(5) == errors.of_newest(4) == 0.0
