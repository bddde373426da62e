"""Encoding on a real GPU: the host's bytes, step by step, and in which order streams work. Skipped
where torch sees none; no timing is asserted.

python -m pytest -n 0 -rs tests/gpu
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from psdist.codecs import Codec, OnDevice
from psdist.codecs.blocks import norm_of, sums_of
from psdist.codecs.feedback import PushTerms
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.transfers import ToGpu
from tests.support.device_cases import FORMS, HARD, LENGTHS, Pair, hard_vector, same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

ALL = pytest.mark.parametrize("codec", FORMS.values(), ids=FORMS)
CYCLES = 500_000_000
"""A fraction of a second: far longer than a thread takes to ask for an encoding."""


@pytest.fixture
def transfers() -> ToGpu:
    return ToGpu(torch.device("cuda", torch.cuda.current_device()))


SCALES = (1e-44, 1e-38, 1e-3, 1.0, 1e6, 3e38)


@ALL
def test_a_gpu_gives_the_hosts_bytes_and_what_they_are_decoded_to(codec: OnDevice) -> None:
    lengths = (*LENGTHS, 70_000, 1 << 20, (1 << 22) + 77)
    for length, scale, ties in itertools.product(lengths, SCALES, (False, True)):
        places = range(0, length, max(1, length // len(HARD)))
        values = hard_vector(
            length, seed=length, scale=scale, placed=zip(places, HARD, strict=False), ties=ties
        )
        for each in (values, values.nan_to_num(1.0, 2.0, -2.0)):
            payload, seen = codec.encode_on_device(each.cuda())
            expected = codec.encode(each, seed=1)  # type: ignore[attr-defined]
            assert torch.equal(payload.cpu(), expected)
            decoded = codec.decode(expected, length)  # type: ignore[attr-defined]
            assert torch.equal(seen.cpu().isnan(), decoded.isnan())
            assert same_bits(seen.nan_to_num(7.0), decoded.nan_to_num(7.0))


@pytest.mark.parametrize("length", [*LENGTHS, 1 << 20])
def test_sums_and_norms_have_the_hosts_bits(length: int) -> None:
    values = hard_vector(256 * length if length < 5000 else length, seed=length)
    assert same_bits(sums_of(values.cuda().view(-1, 256)), sums_of(values.view(-1, 256)))
    assert float(norm_of(values.cuda())) == float(norm_of(values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@ALL
def test_step_by_step_payloads_and_residuals_are_the_hosts(
    codec: Codec, dtype: str, transfers: ToGpu
) -> None:
    pair = Pair(
        [(0, codec), (6, Exact()), (8, TopK(0.05)), (12, Sign())],
        transfers,
        dtype=dtype,
        exact=["b"],
        burst=4,
        shape=(300, 256),
        compare_every=2,
    )
    for step in range(20):
        absent = {step % 3} if step % 5 == 4 else set()
        gradient = hard_vector(pair.chunk.length, seed=step, scale=1e-3).to(pair.there.dtype)
        for segment in pair.chunk.segments:
            if segment.piece in absent:
                gradient[segment.offset : segment.offset + segment.length] = 0
        terms = PushTerms((1.0, 0.3, 0.0)[step % 3], absent)
        if step % 2:
            pair.begin(gradient * 2, PushTerms(0.7, ()))  # does not leave
        pair.begin(gradient, terms)
        one, other = pair.push(gradient, terms)
        assert one == other
        pair.require_same_residuals()


def test_an_encoding_waits_for_the_gradient_and_nobody_for_the_encoding(transfers: ToGpu) -> None:
    pair = Pair([(0, Sign())], transfers, shape=(1024, 1024))
    gradient, terms = hard_vector(pair.chunk.length, seed=1), PushTerms(1.0, ())
    there = gradient.cuda()
    for _ in range(2):  # what is loaded and allocated at first waits
        pair.begin(gradient, terms).wait()
    torch.cuda.synchronize()
    pair.there.zero_()
    torch.cuda._sleep(CYCLES)
    pair.there.copy_(there)
    copy = pair.device.begin(
        0, pair.there, pair.memories[1], clock=0, terms=terms, after=[transfers.mark()]
    )
    assert not copy.is_done()
    one, other = pair.push(gradient, terms)
    assert one == other


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_answer_of_the_gpu_is_waited_for_while_an_encoding_begins(transfers: ToGpu) -> None:
    """torch raises where it would."""
    parts: list[Any] = [(place, codec) for place, codec in enumerate(FORMS.values())]
    pair = Pair(parts, transfers, shape=(300, 256), compare_every=1)
    gradient, terms = hard_vector(pair.chunk.length, seed=1), PushTerms(1.0, {1})
    for _ in parts:
        pair.there.copy_(gradient)
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            pair.device.begin(
                0, pair.there, pair.memories[1], clock=pair.clock, terms=terms,
                after=[transfers.mark()],
            )  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        pair.push(gradient, terms)


def test_residuals_stay_on_the_gpu_and_checkpoints_have_them_on_the_host(transfers: ToGpu) -> None:
    pair = Pair([(0, Sign())], transfers)
    gradient = hard_vector(pair.chunk.length, seed=1)
    pair.there.copy_(gradient)
    pair.push(gradient, PushTerms(1.0, ()))
    assert pair.device.residuals()[0].values.device == transfers.device
    collected = pair.device.collect()
    assert collected["0"]["values"].device.type == "cpu"
    assert pair.device.restore(collected)
    pair.require_same_residuals()
