"""Each codec alone: what a receiver has, how wrong it may be, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from psdist.codecs import Codec, Raw, Varying
from psdist.codecs.blocks import BLOCK, blocks_of
from psdist.codecs.schemes import codec_of
from psdist.codecs.schemes.low_rank import LowRank
from psdist.codecs.schemes.own import Own, own_codec
from psdist.codecs.schemes.packed import Packed
from psdist.codecs.schemes.plain import Cast, Plain
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import RandK, TopK, num_sent
from psdist.config.codec_specs import parse_codec
from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode

OWN: Final = "tests.support.own_codecs:Halves"
LEVELS: Final = {"int8": 127, "int4": 7, "int2": 1}
TINY: Final = 2.0**-126
CODECS: Final[dict[str, Codec]] = {
    "fp16": Cast("fp16"),
    "bf16": Cast("bf16"),
    "int8": Quantized("int8"),
    "int4": Quantized("int4"),
    "int2": Quantized("int2"),
    "int8:stochastic": Quantized("int8", is_stochastic=True),
    "int4:stochastic": Quantized("int4", is_stochastic=True),
    "int2:stochastic": Quantized("int2", is_stochastic=True),
    "sign": Sign(),
    "topk:0.1": TopK(0.1),
    "randk:0.1": RandK(0.1, is_scaled=False),
    "lowrank:2": LowRank(2),
    "skip:0.5": Plain(),
    OWN: own_codec(OWN),
    "bf16+zstd": Packed(Cast("bf16")),
    "int4+zstd": Packed(Quantized("int4")),
    "int2:stochastic+zstd": Packed(Quantized("int2", is_stochastic=True)),
    "topk:0.1+zstd": Packed(TopK(0.1)),
}
ALL: Final = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
LENGTHS: Final = (1, 2, 63, 64, 255, 256, 257, 1000, 70_000)

SPECIAL: Final = [
    *(0.0, -0.0, 1.0, -1.0, 65504.0, 65520.0, 1e38, -3.4028234663852886e38),
    *(1e-45, -1e-45, 1e-39, 1.1754943508222875e-38, 1e-30, 2.0**-126 * 127),
]


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Of any length and scale, some of the values special, some blocks of zeros."""
    length = draw(st.sampled_from(LENGTHS[:-1]) | st.integers(1, 2000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(length, generator=generator) * draw(st.sampled_from([1e-38, 1e-3, 1, 1e6]))
    for place, value in draw(
        st.lists(st.tuples(st.integers(0, length - 1), st.sampled_from(SPECIAL)), max_size=8)
    ):
        values[place] = value
    if draw(st.booleans()):
        values[draw(st.integers(0, length - 1)) :] = 0
    return values


def decoded(codec: Codec, values: torch.Tensor, seed: int = 1) -> torch.Tensor:
    before = values.clone()
    payload = codec.encode(values, seed=seed)
    is_same = torch.equal(values.view(torch.int32), before.view(torch.int32))
    assert is_same, "encoding has changed the values"
    assert payload.dtype == torch.uint8
    most = codec.num_bytes(len(values))
    assert 0 < len(payload) <= most if isinstance(codec, Varying) else len(payload) == most > 0
    seen = codec.decode(payload, len(values))
    assert (seen.dtype, seen.shape) == (torch.float32, values.shape)
    return seen


def by_block(values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``reduce`` of each block, for each value of it; in float64."""
    found = reduce(blocks_of(values.to(torch.float64)))
    return found[:, None].expand(-1, BLOCK).reshape(-1)[: len(values)]


@ALL
@settings(max_examples=25)
@given(values=vectors())
def test_an_encoding_follows_from_values_and_seed_alone(codec: Codec, values: torch.Tensor) -> None:
    first, again = (codec.encode(values.clone(), seed=5) for _ in range(2))
    assert torch.equal(first, again)
    for _ in range(2):  # bit by bit, NaN too: both ends decode the same
        one, two = (codec.decode(payload, len(values)) for payload in (first, again.clone()))
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    assert one.isfinite().all()


@ALL
@pytest.mark.parametrize("length", LENGTHS)
def test_zeros_are_zeros(codec: Codec, length: int) -> None:
    assert not decoded(codec, torch.zeros(length)).any()


@pytest.mark.parametrize("kind", LEVELS)
@settings(max_examples=30)
@given(values=vectors())
def test_multiples_of_a_scale_are_wrong_by_half_of_it_or_by_chance_by_less_than_one(
    kind: str, values: torch.Tensor
) -> None:
    scale = by_block(values, lambda blocks: blocks.abs().amax(dim=1)) / LEVELS[kind]
    # Below it the block becomes zeros; the scale itself is rounded to float32.
    allowed = scale.where(scale >= TINY, 2 * TINY * LEVELS[kind]) * (1 + 1e-5)
    exact = values.to(torch.float64)
    by_chance = decoded(Quantized(kind, is_stochastic=True), values).to(torch.float64)
    assert ((by_chance - exact).abs() <= allowed).all()
    if kind != "int2":
        nearest = decoded(Quantized(kind), values).to(torch.float64)
        assert ((nearest - exact).abs() <= allowed / 2).all() or bool((scale < TINY).any())
        assert ((nearest - exact).abs() <= allowed).all()


@pytest.mark.parametrize("kind", LEVELS)
def test_a_block_whose_scale_would_be_denormal_becomes_zeros(kind: str) -> None:
    values = torch.full((256,), LEVELS[kind] * TINY * 0.9)
    assert not decoded(Quantized(kind, is_stochastic=True), values).any()
    assert decoded(Quantized(kind), 2 * values).all()


@pytest.mark.parametrize("codec", [Quantized("int2"), Sign()], ids=["int2", "sign"])
@settings(max_examples=30)
@given(values=vectors())
def test_the_error_of_few_bits_is_that_of_a_projection(codec: Codec, values: torch.Tensor) -> None:
    """|x - C(x)|^2 = |x|^2 - |C(x)|^2, block by block: a contraction whatever the values are."""
    seen, exact = decoded(codec, values).to(torch.float64), values.to(torch.float64)
    squares = [blocks_of(each * each).sum(dim=1) for each in (exact, seen, exact - seen)]
    of_exact, of_seen, of_error = squares
    close = 1e-5 * of_exact + (2 * TINY) ** 2 * BLOCK
    assert (of_error <= of_exact + close).all()
    assert ((of_exact - of_seen - of_error).abs() <= close + 1e-4 * of_exact).all()
    if of_exact.max() > 1e-30:
        assert of_error.sum() < of_exact.sum()


def test_sign_is_the_mean_magnitude_of_each_block_with_the_values_signs() -> None:
    values = torch.randn(600, generator=torch.Generator().manual_seed(3))
    means = torch.cat([part.abs().mean().expand(len(part)) for part in values.split(BLOCK)])
    assert torch.allclose(decoded(Sign(), values), means.copysign(values), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_two_bits_lose_less_than_a_quarter_of_a_normal_vector(scale: float) -> None:
    values = scale * torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    of_error = (decoded(Quantized("int2"), values) - values).square().sum() / values.square().sum()
    assert 0.15 < of_error < 0.25
    of_sign = (decoded(Sign(), values) - values).square().sum() / values.square().sum()
    assert 0.34 < of_sign < 0.38  # 1 - 2 / pi


@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 300, 40_000, 200_000])
def test_topk_sends_the_k_largest_exactly_and_no_others(ratio: float, length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    values = (values * 8).round() / 8  # many are equal
    seen, k = decoded(TopK(ratio), values), num_sent(ratio, length)
    assert k == max(1, round(ratio * length))
    order = np.lexsort((np.arange(length), -values.abs().numpy()))[:k]
    expected = torch.zeros(length)
    expected[order.copy()] = values[order.copy()]
    assert torch.equal(seen, expected)


def test_topk_finds_them_where_a_sample_misleads() -> None:
    """The sampled values are the only large ones: candidates would be too few."""
    values = torch.full((1 << 18,), 0.5)
    values[:: (1 << 18) // (1 << 14)] = torch.linspace(1, 2, 1 << 14)
    seen = decoded(TopK(0.2), values)
    assert int((seen != 0).sum()) == round(0.2 * len(values))
    assert torch.equal(seen[values > 0.5], values[values > 0.5])


@settings(max_examples=25)
@given(values=vectors(), seed=st.integers(0, 2**63 - 1))
def test_randk_sends_one_value_of_each_stretch_exactly(values: torch.Tensor, seed: int) -> None:
    ones = decoded(RandK(0.1, is_scaled=False), torch.ones(len(values)), seed)
    assert int(ones.sum()) == num_sent(0.1, len(values))
    seen = decoded(RandK(0.1, is_scaled=False), values, seed)
    assert torch.equal(seen, values * ones)


def test_what_is_drawn_depends_on_the_seed() -> None:
    values = torch.ones(2000)
    one, two = (decoded(RandK(0.1, is_scaled=False), values, seed) for seed in (1, 2))
    assert not torch.equal(one, two)
    chance = Quantized("int4", is_stochastic=True)
    values = torch.randn(2000)
    assert not torch.equal(decoded(chance, values, 1), decoded(chance, values, 2))


@pytest.mark.parametrize(
    "codec",
    [*(Quantized(kind, is_stochastic=True) for kind in LEVELS), RandK(0.25, is_scaled=True)],
    ids=lambda codec: codec.name,
)
def test_what_is_left_to_chance_is_right_on_average(codec: Codec) -> None:
    """The mean over n seeds is wrong by no more than five standard errors of the worst value."""
    values = torch.randn(300, generator=torch.Generator().manual_seed(9))
    seen = torch.stack([decoded(codec, values, seed) for seed in range(600)])
    error = (seen.mean(dim=0) - values).abs()
    spread = float((seen - values).square().mean(dim=0).max()) ** 0.5
    assert 0 < error.max() <= 5 * spread / 600**0.5


@pytest.mark.parametrize(
    ("name", "largest", "digits"), [("fp16", 65504.0, 11), ("bf16", 3.3895e38, 8)]
)
@settings(max_examples=25)
@given(values=vectors())
def test_a_cast_rounds_to_nearest_and_saturates(
    name: str, largest: float, digits: int, values: torch.Tensor
) -> None:
    seen = decoded(Cast(name), values)
    assert seen.abs().max() <= largest * 1.0001
    inside = values.abs() <= largest
    smallest = 2.0**-25 if name == "fp16" else 2.0**-133
    allowed = (values.abs() * 2.0**-digits).clamp(min=smallest)
    assert ((seen - values).abs()[inside] <= allowed[inside]).all()
    assert (seen[~inside].abs() > 0.99 * largest).all()


@ALL
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("place", [0, 300, 999])
def test_nothing_becomes_finite_that_was_not(codec: Codec, wrong: float, place: int) -> None:
    values = torch.linspace(-1, 1, 1000)
    values[place] = wrong
    seen = decoded(codec, values)
    assert not seen.isfinite().all()
    if not isinstance(codec, TopK | RandK | Own) and not codec.name.startswith("topk"):
        others = torch.arange(1000) // BLOCK != place // BLOCK
        assert seen[others].isfinite().all(), "other blocks are none of its business"


def test_the_largest_floats_are_finite_in_every_block_codec() -> None:
    values = torch.full((300,), 3.4028234663852886e38)
    for codec in (Sign(), Quantized("int2"), Quantized("int4"), Quantized("int8")):
        assert torch.allclose(decoded(codec, values), values, rtol=1e-5)


# -- what is no payload ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [codec for codec in CODECS.values() if not isinstance(codec, Varying)],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize("length", [1, 256, 1000])
def test_a_payload_that_is_cut_off_or_longer_is_refused(codec: Codec, length: int) -> None:
    payload = codec.encode(torch.randn(length), seed=1)
    for wrong in (payload[:-1], payload[:0], torch.cat([payload, payload[:1]])):
        with pytest.raises(ProtocolError, match=rf"codec {codec.name}: \d+ bytes where {length} "):
            codec.decode(wrong, length)


@ALL
@settings(max_examples=25)
@given(data=st.data())
def test_random_bytes_are_decoded_or_refused_and_nothing_else(
    codec: Codec, data: st.DataObject
) -> None:
    length = data.draw(st.sampled_from([1, 64, 257, 1000]))
    seed = data.draw(st.integers(0, 2**31))
    size = (codec.num_bytes(length),)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    try:
        seen = codec.decode(payload, length)
    except ProtocolError:
        return
    assert len(seen) == length


@pytest.mark.parametrize(
    ("codec", "place", "byte", "refused"),
    [
        (CODECS["int8"], 4, 0x80, "a code that no sender uses"),
        (CODECS["int4"], 4, 0x10, "a code that no sender uses"),
        (CODECS["int4"], 4, 0x01, "a code that no sender uses"),
        (CODECS["int2"], 4, 0b11111100, "a code that no sender uses"),
        (CODECS["int8"], 3, 0xBF, "a scale is below 0"),
        (CODECS["sign"], 3, 0xBF, "a scale is below 0"),
        (CODECS["topk:0.1"], 0, 7, "7 values are told, 26 belong"),
        (CODECS["topk:0.1"], 4 + 4 * 26 + 1, 0x01, "indexes are not ascending in 256"),
        (CODECS["topk:0.1"], 4 + 6 * 26 - 1, 0x01, "indexes are not ascending in 256"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bytes_that_no_encoder_makes_are_refused(
    codec: Codec, place: int, byte: int, refused: str
) -> None:
    payload = codec.encode(torch.linspace(1, 2, 256), seed=1)
    codec.decode(payload.clone(), 256)
    payload[place] = byte
    with pytest.raises(ProtocolError, match=refused):
        codec.decode(payload, 256)


# -- names -------------------------------------------------------------------------------------


def test_every_name_has_its_codec_and_every_codec_a_number_of_its_own() -> None:
    codes: dict[int, str] = {}
    for name, codec in CODECS.items():
        made = codec_of(parse_codec(name), has_feedback=True)
        assert not isinstance(made, Raw)
        assert made.name == (name if codec.code != CodecCode.PLAIN else "plain")
        assert made.code == codec.code
        codes[made.code] = name
    assert set(codes) | {CodecCode.RAW, CodecCode.ROWS} == set(CodecCode)  # no codec of a setting
    assert isinstance(codec_of(parse_codec("none"), has_feedback=True), Raw)


def test_randk_is_scaled_where_nothing_comes_later() -> None:
    codec = codec_of(parse_codec("randk:0.5"), has_feedback=False)
    assert not isinstance(codec, Raw)
    assert sorted(set(decoded(codec, torch.ones(100)).tolist())) == [0.0, 2.0]


def test_an_index_that_comes_twice_is_refused() -> None:
    codec = TopK(0.1)
    payload = codec.encode(torch.arange(256.0), seed=0)
    first = 4 + 4 * num_sent(0.1, 256)
    payload[first + 2 : first + 4] = payload[first : first + 2].clone()
    with pytest.raises(ProtocolError, match="indexes are not ascending in 256"):
        codec.decode(payload, 256)
