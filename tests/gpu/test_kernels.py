"""Pushes that Triton's kernels encode on a real GPU: the host's bytes and residuals, over codecs,
dtypes, sizes and places of exact pieces. Skipped where torch sees no GPU; no timing is asserted.

    python -m pytest -n 0 -v tests/gpu/test_kernels.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psdist.codecs import OnDevice
from psdist.codecs.coders import DeviceCoder
from psdist.codecs.device_kernels import DeviceKernels, kernels_for
from psdist.codecs.feedback import PushTerms
from psdist.errors import NonFiniteGradientError
from psdist.transfers import ToGpu
from tests.support.device_cases import FORMS, Pair, hard_vector, require_same_steps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.filterwarnings("default"),  # those of Triton's compiler are not ours to mend
]

ALL = pytest.mark.parametrize("codec", FORMS.values(), ids=FORMS)
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def transfers() -> ToGpu:
    return ToGpu(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture(scope="module")
def kernels(transfers: ToGpu) -> DeviceKernels:
    found = kernels_for(transfers.device, FORMS.values(), DTYPES)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_every_codec_passes_its_trial(codec: OnDevice, dtype: str, kernels: DeviceKernels) -> None:
    assert kernels.prove(codec, getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_payloads_and_residuals_are_the_hosts(
    codec: OnDevice, dtype: str, kernels: DeviceKernels, transfers: ToGpu
) -> None:
    for shape, scale, ties in (
        ((1, 1), 1.0, False),
        ((1, 85), 1e-38, True),
        ((60, 77), 1e-44, False),
        ((300, 256), 1e-3, False),
        ((300, 256), 1e36, True),
        ((700, 1001), 1e-3, True),
    ):
        if dtype == "float16" and scale > 1.0:
            continue  # not finite in this dtype, so not pushed
        num = require_same_steps(
            codec,
            DeviceCoder(transfers, kernels),
            kernels,
            dtype=dtype,
            shape=shape,
            scale=scale,
            ties=ties,
        )
        assert num == 4, "all but the first, and one with a checksum"


@pytest.mark.parametrize("exact", [("a",), ("b",), ("a", "c")])
@ALL
def test_pieces_that_codecs_leave_alone_go_as_they_are(
    codec: OnDevice, exact: tuple[str, ...], kernels: DeviceKernels, transfers: ToGpu
) -> None:
    for dtype in DTYPES:
        require_same_steps(
            codec,
            DeviceCoder(transfers, kernels),
            kernels,
            dtype=dtype,
            exact=exact,
            shape=(77, 100),
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@ALL
def test_a_gradient_that_is_not_finite_is_not_pushed(
    codec: Any, value: float, kernels: DeviceKernels, transfers: ToGpu
) -> None:
    pair = Pair([(0, codec)], transfers, coder=DeviceCoder(transfers, kernels))
    gradient, terms = hard_vector(pair.chunk.length, seed=1), PushTerms(1.0, ())
    pair.begin(gradient, terms)
    pair.push(gradient, terms)
    gradient[700] = value
    pair.begin(gradient, terms).wait()
    assert not pair.device.is_finite(0)
    with pytest.raises(NonFiniteGradientError):
        pair.device.encode(0, pair.there, pair.memories[1], clock=1, terms=terms)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@ALL
def test_no_answer_of_the_gpu_is_waited_for_while_an_encoding_begins(
    codec: Any, kernels: DeviceKernels, transfers: ToGpu
) -> None:
    """torch raises where it would; Triton asks the GPU for nothing after the trial."""
    pair = Pair([(0, codec)], transfers, shape=(300, 256), coder=DeviceCoder(transfers, kernels))
    gradient, terms = hard_vector(pair.chunk.length, seed=1), PushTerms(1.0, ())
    for _ in range(2):
        pair.begin(gradient, terms)
        pair.push(gradient, terms)
    torch.cuda.synchronize()
    num, mode = kernels.num_pushes, torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        pair.device.begin(
            0, pair.there, pair.memories[1], clock=pair.clock, terms=terms,
            after=[transfers.mark()],
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert kernels.num_pushes == num + 1
    pair.push(gradient, terms)
    pair.require_same_residuals()


def test_a_job_gets_the_kernels_of_its_codecs(transfers: ToGpu) -> None:
    pair = Pair([(0, FORMS["int8"])], transfers)  # type: ignore[list-item] # it is a codec
    assert DeviceCoder.of(transfers, pair.device.codings, pair.partition).kernels is not None
