"""Codecs on the device where values lie: the host's bytes, bit by bit. The device is the CPU here;
tests/gpu/test_encoding.py has the same with a GPU."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from psdist.codecs import OnDevice
from psdist.codecs.blocks import norm_of, sums_of
from psdist.codecs.schemes.plain import Cast
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sparse import TopK
from tests.support.device_cases import FORMS, HARD, LENGTHS, hard_vector, same_bits

ALL = pytest.mark.parametrize("codec", FORMS.values(), ids=FORMS)


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    length = draw(st.sampled_from(LENGTHS) | st.integers(1, 3000))
    return hard_vector(
        length,
        seed=draw(st.integers(0, 2**31)),
        scale=draw(st.sampled_from([1e-44, 1e-38, 1e-3, 1.0, 1e6, 3e38])),
        placed=draw(
            st.lists(st.tuples(st.integers(0, length - 1), st.sampled_from(HARD)), max_size=8)
        ),
        zeros_from=draw(st.none() | st.integers(0, length - 1)),
        ties=draw(st.booleans()),
    )


@ALL
@settings(max_examples=20, deadline=None)
@given(values=vectors())
def test_a_device_gives_the_hosts_bytes_and_what_they_are_decoded_to(
    codec: OnDevice, values: torch.Tensor
) -> None:
    before = values.clone()
    payload, seen = codec.encode_on_device(values)
    assert same_bits(values, before), "encoding has changed the values"
    expected = codec.encode(values, seed=1)  # type: ignore[attr-defined]
    assert torch.equal(payload, expected)
    decoded = codec.decode(expected, len(values))  # type: ignore[attr-defined]
    assert torch.equal(seen.isnan(), decoded.isnan())
    assert same_bits(seen.nan_to_num(7.0), decoded.nan_to_num(7.0))


@ALL
@pytest.mark.parametrize("length", [131_072, 200_001])
def test_large_counts_are_the_hosts_too(codec: OnDevice, length: int) -> None:
    values = hard_vector(length, seed=length, scale=1e-3, ties=True)
    payload, seen = codec.encode_on_device(values)
    expected = codec.encode(values, seed=1)  # type: ignore[attr-defined]
    assert torch.equal(payload, expected)
    assert same_bits(seen, codec.decode(expected, length))  # type: ignore[attr-defined]


@ALL
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_the_hosts_too(codec: OnDevice, bad: float) -> None:
    values = hard_vector(1000, seed=3)
    values[[17, 600]] = bad
    payload, seen = codec.encode_on_device(values)
    expected = codec.encode(values, seed=1)  # type: ignore[attr-defined]
    assert torch.equal(payload, expected)
    assert not seen.isfinite().all()


@pytest.mark.parametrize(("name", "pattern"), [("fp16", 0x7E00), ("bf16", 0x7FC0)])
def test_nan_in_sixteen_bits_has_one_pattern(name: str, pattern: int) -> None:
    """Processors make several of them, by vector and one by one."""
    bits = torch.tensor([0x7FC00000, -1, 0x7F800001, -0x400000] * 11, dtype=torch.int32)
    values, codec = bits.view(torch.float32), Cast(name)
    for payload in (codec.encode(values, seed=1), codec.encode_on_device(values)[0]):
        assert payload.view(torch.int16).tolist() == [pattern] * len(values)


def test_random_numbers_of_the_host_have_no_form_for_devices() -> None:
    assert not Quantized("int4", is_stochastic=True).has_device_form
    assert Quantized("int4").has_device_form
    assert TopK(0.5).has_device_form


@pytest.mark.parametrize("num", [1, 2, 3, 5, 64])
def test_sums_are_of_one_order_whatever_the_processor(num: int) -> None:
    blocks = hard_vector(256 * num, seed=num).view(-1, 256)
    for block, total in zip(blocks.tolist(), sums_of(blocks), strict=True):
        while len(block) > 1:
            middle = len(block) // 2
            pairs = zip(block[:middle], block[middle:], strict=True)
            block = [float(torch.tensor(one) + torch.tensor(other)) for one, other in pairs]
        assert block == total.tolist()


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1500, 5000])
def test_a_norm_is_of_one_order_whatever_the_processor(length: int) -> None:
    values = hard_vector(length, seed=length)
    squares = [each * each for each in values.tolist()]
    squares += [0.0] * (-length % 256)
    sums = []
    for start in range(0, len(squares), 256):
        block = squares[start : start + 256]
        while len(block) > 1:
            middle = len(block) // 2
            block = [a + b for a, b in zip(block[:middle], block[middle:], strict=True)]
        sums += block
    while len(sums) > 1:
        sums += [0.0] * (len(sums) % 2)
        middle = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:middle], sums[middle:], strict=True)]
    assert float(norm_of(values)) == sums[0] ** 0.5
