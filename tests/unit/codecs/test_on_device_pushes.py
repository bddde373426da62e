"""Pushes that a device encodes, with what is left out of them: as the host's, byte by byte."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from psdist.codecs import Codec
from psdist.codecs.feedback import PushTerms, Residual
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.errors import NonFiniteGradientError
from tests.support.device_cases import FORMS, Pair, hard_vector, same_bits
from tests.support.late_transfers import LateTransfers

CODECS: list[Codec] = [*FORMS.values(), Exact()]  # type: ignore[list-item] # each is a codec


def late(seed: int = 0, rate: float = 0.5) -> LateTransfers:
    return LateTransfers(seed, rate=rate)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_pushed_payloads_and_residuals_are_the_hosts(data: st.DataObject) -> None:
    draw = data.draw
    order = draw(st.lists(st.sampled_from(range(len(CODECS))), min_size=1, max_size=4))
    width = draw(st.integers(1, 3))
    pair = Pair(
        [(place * width, CODECS[which]) for place, which in enumerate(order)],
        late(draw(st.integers(0, 99))),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        exact=draw(st.sampled_from([(), ("b",), ("a", "b", "c")])),
        burst=draw(st.sampled_from([0, 0, 3])),
        has_feedback=draw(st.booleans()),
        compare_every=draw(st.sampled_from([1, 2, 64])),
    )
    rate = 1.0
    for _ in range(width * len(order) + 2):
        rate = draw(st.sampled_from([rate, 1.0, 0.3, 0.0]))
        absent = draw(st.sampled_from([(), (), {0}, {1, 2}]))
        scale = draw(st.sampled_from([1.0, 1e-38, 1e-3]))
        gradient = hard_vector(pair.chunk.length, seed=draw(st.integers(0, 999)), scale=scale)
        terms = PushTerms(rate, absent)
        if draw(st.booleans()):  # one that is begun too soon, and does not leave
            pair.begin(gradient * 2, PushTerms(0.7, ()))
        gradient = gradient.to(pair.there.dtype)
        for segment in pair.chunk.segments:
            if segment.piece in absent:
                gradient[segment.offset : segment.offset + segment.length] = 0
        if draw(st.booleans()):
            pair.begin(gradient, terms)
        else:
            pair.there.copy_(gradient)
        one, other = pair.push(gradient, terms)
        assert one == other
        pair.require_same_residuals()
    assert pair.host.errors.missed == pytest.approx(pair.device.errors.missed, rel=1e-4)
    assert pair.host.errors.wanted == pytest.approx(pair.device.errors.wanted, rel=1e-4)


def test_a_checkpoint_of_one_side_is_gone_on_with_by_the_other() -> None:
    parts = [(0, TopK(0.05)), (3, Sign())]
    first, second = Pair(parts, late()), Pair(parts, late())
    gradients = [hard_vector(first.chunk.length, seed=seed) for seed in range(8)]
    terms = PushTerms(1.0, ())
    for gradient in gradients[:4]:  # within what is still due
        first.there.copy_(gradient)
        first.push(gradient, terms)
    assert first.host.residuals()[0].due is not None
    assert second.host.restore(first.device.collect())
    assert second.device.restore(first.host.collect())
    second.clock = first.clock
    for gradient in gradients[4:]:
        payloads = set()
        for pair in (first, second):
            pair.there.copy_(gradient)
            payloads.update(pair.push(gradient, terms))
            pair.require_same_residuals()
        assert len(payloads) == 1


def test_what_is_of_other_chunks_is_not_gone_on_with() -> None:
    pair = Pair([(0, Sign())], late())
    assert not pair.device.restore({"4": {}})


@pytest.mark.parametrize("codec", [Quantized("int8"), Sign(), TopK(0.1)])
def test_what_is_not_finite_is_not_pushed_and_leaves_what_was_left(codec: Codec) -> None:
    pair = Pair([(0, codec)], late())
    gradient, terms = hard_vector(pair.chunk.length, seed=1, scale=1e30), PushTerms(1.0, ())
    pair.there.copy_(gradient)
    pair.push(gradient, terms)
    before = pair.device.residuals()[0]
    pair.there[3] = torch.nan
    with pytest.raises(NonFiniteGradientError, match=r"iteration 1: the gradient of chunk 0"):
        pair.device.encode(0, pair.there, pair.memories[1], clock=1, terms=terms)
    assert pair.device.residuals()[0] is before


def test_what_sixteen_bits_cannot_hold_is_not_pushed() -> None:
    pair = Pair([(0, TopK(0.05)), (3, Exact())], late(), dtype="float16")
    gradient, terms = torch.full((pair.chunk.length,), 6e4, dtype=torch.float16), PushTerms(1.0, ())
    pair.there.copy_(gradient)
    for _ in range(3):
        pair.push(gradient, terms)
    for encoder, into in ((pair.host, 0), (pair.device, 1)):
        with pytest.raises(NonFiniteGradientError, match="iteration 3"):
            encoder.encode(0, gradient, pair.memories[into], clock=3, terms=terms)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_whether_a_gradient_is_finite_is_told_with_its_payload(bad: float) -> None:
    """Also of a piece that the codec leaves alone, and where nothing is coded."""
    pair = Pair([(0, Sign())], late(), exact=["b"])
    gradient = hard_vector(pair.chunk.length, seed=1)
    for value, place, rate in ((0.5, 0, 1.0), (bad, 330, 1.0), (bad, 330, 0.0), (bad, 0, 1.0)):
        gradient[place] = value
        pair.begin(gradient, PushTerms(rate, ())).wait()
        assert pair.device.is_finite(0) == (value == 0.5)
        gradient[place] = 0.5


def test_only_encoded_bytes_and_a_few_numbers_are_copied() -> None:
    sizes = {"sign": 28.0, "int4": 7.7, "int8": 3.9, "bf16": 2.0}
    for name, times in sizes.items():
        codec: Codec = FORMS[name]  # type: ignore[assignment] # each is a codec
        pair = Pair([(0, codec)], late(), shape=(64, 256), compare_every=64)
        gradient = hard_vector(pair.chunk.length, seed=2)
        for clock in range(1, 4):
            pair.clock = clock
            pair.there.copy_(gradient)
            pair.push(gradient, PushTerms(1.0, ()))
        assert 3 * gradient.nbytes / pair.device.coder.num_bytes_to_host > 0.98 * times
        pair.clock = 64  # with what the device has decoded, for the checksum
        before = pair.device.coder.num_bytes_to_host
        pair.push(gradient, PushTerms(1.0, ()))
        assert pair.device.coder.num_bytes_to_host - before > gradient.nbytes


def test_a_checksum_is_of_what_the_device_has_decoded() -> None:
    gradient = hard_vector(960, seed=2)
    for codec, is_as_sent in ((Sign(), True), (_OtherArithmetic(), False)):
        pair = Pair([(0, codec)], late(), compare_every=1)
        pair.there.copy_(gradient)
        _, payload = pair.push(gradient, PushTerms(1.0, ()))
        content = pair.device.codings[0].read(memoryview(bytearray(payload)))
        assert content.is_as_sent == is_as_sent


class _OtherArithmetic(Sign):
    """A device that decodes one value otherwise than the host."""

    def encode_on_device(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        payload, seen = super().encode_on_device(values)
        seen[5] += 1
        return payload, seen


def test_residuals_of_a_checkpoint_are_on_the_host_and_count_as_much() -> None:
    pair = Pair([(0, Sign())], late())
    gradient = hard_vector(pair.chunk.length, seed=2)
    pair.there.copy_(gradient)
    pair.push(gradient, PushTerms(1.0, ()))
    (kept,) = pair.device.collect().values()
    ours = Residual(**{key: each for key, each in kept.items() if key in Residual._fields})
    assert same_bits(ours.values, pair.host.residuals()[0].values)
    assert pair.device.num_residual_bytes == pair.host.num_residual_bytes > 0
