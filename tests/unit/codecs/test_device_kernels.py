"""Pushes that Triton's kernels encode: the host's bytes and residuals. Triton interprets kernels on
the CPU here (tests/conftest.py asks for it); tests/gpu/test_kernels.py has the same with a GPU.
Skipped without triton:

    python -m pip install triton && python -m pytest -n 0 tests/unit/codecs/test_device_kernels.py
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from psdist.codecs import OnDevice, device_kernels
from psdist.codecs.coders import DeviceCoder
from psdist.codecs.device_kernels import DeviceKernels, kernels_for
from psdist.codecs.feedback import PushTerms
from psdist.codecs.layout import Division, Stretch
from psdist.codecs.schemes.low_rank import LowRank
from psdist.errors import NonFiniteGradientError
from psdist.transfers import Transfers
from tests.support.device_cases import FORMS, LARGEST, Pair, hard_vector, require_same_steps

SAMPLE = ("int8",)
"""Codecs of every run: Triton interprets a kernel in seconds."""
ALL = pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, id=name, marks=() if name in SAMPLE else pytest.mark.slow)
        for name, codec in FORMS.items()
    ],
)
DTYPES = ("float32", "bfloat16", "float16")
CPU = torch.device("cpu")

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="triton is not installed, or there is a GPU: tests/gpu/test_kernels.py",
)


@pytest.fixture(scope="module")
def all_kernels() -> DeviceKernels:
    return DeviceKernels(CPU)


@pytest.fixture
def kernels(all_kernels: DeviceKernels, codec: OnDevice) -> DeviceKernels:
    """The kernels, with this codec's trial passed."""
    assert all(all_kernels.prove(codec, getattr(torch, dtype)) for dtype in DTYPES)
    return all_kernels


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter


@needs_triton
@ALL
def test_every_codec_passes_its_trial(codec: OnDevice, kernels: DeviceKernels) -> None:
    assert all(kernels.prove(codec, getattr(torch, dtype)) for dtype in DTYPES)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_step_by_step_payloads_and_residuals_are_the_hosts(
    codec: OnDevice, dtype: str, kernels: DeviceKernels
) -> None:
    num = require_same_steps(
        codec, DeviceCoder(Transfers(), kernels), kernels, dtype=dtype, shape=(60, 77)
    )
    assert num == 4, "all but the first, and one with a checksum"


@needs_triton
@pytest.mark.parametrize("exact", [("a",), ("b",), ("a", "c"), ("a", "b", "c")])
@ALL
def test_pieces_that_codecs_leave_alone_go_as_they_are(
    codec: OnDevice, exact: tuple[str, ...], kernels: DeviceKernels
) -> None:
    for dtype in ("float32", "bfloat16"):
        num = require_same_steps(
            codec, DeviceCoder(Transfers(), kernels), kernels, dtype=dtype, exact=exact
        )
        assert num == (0 if len(exact) == 3 else 4)


@needs_triton
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1.0, 1e36])
@ALL
def test_ties_and_values_of_any_size(codec: OnDevice, scale: float, kernels: DeviceKernels) -> None:
    for shape in ((1, 1), (1, 85), (86, 1), (30, 300)):
        require_same_steps(
            codec,
            DeviceCoder(Transfers(), kernels),
            kernels,
            shape=shape,
            scale=scale,
            ties=True,
            steps=3,
        )


@needs_triton
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), LARGEST])
@ALL
def test_a_gradient_that_is_not_finite_is_not_pushed(
    codec: Any, value: float, kernels: DeviceKernels
) -> None:
    pair = Pair([(0, codec)], Transfers(), coder=DeviceCoder(Transfers(), kernels))
    gradient, terms = hard_vector(pair.chunk.length, seed=1), PushTerms(1.0, ())
    pair.begin(gradient, terms)
    pair.push(gradient, terms)
    gradient[700] = value
    num = kernels.num_pushes
    pair.begin(gradient, terms)
    assert kernels.num_pushes == num + 1
    assert pair.device.is_finite(0) == (value == LARGEST)
    for encoder, values, into in (
        (pair.host, gradient, pair.memories[0]),
        (pair.device, pair.there, pair.memories[1]),
    ):
        if value == LARGEST:
            encoder.encode(0, values, into, clock=1, terms=terms)
        else:
            with pytest.raises(NonFiniteGradientError):
                encoder.encode(0, values, into, clock=1, terms=terms)
    pair.require_same_residuals()


def test_there_are_no_kernels_for_a_cpu_nor_for_codecs_without_one() -> None:
    pair = Pair([(0, FORMS["sign"])], Transfers())  # type: ignore[list-item] # it is a codec
    assert DeviceCoder.of(Transfers(), pair.device.codings, pair.partition).kernels is None
    assert kernels_for(CPU, [LowRank(2)], ["float32"]) is None


def test_kernels_that_cannot_be_had_or_give_other_bits_leave_the_push_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "psdist.codecs.device_kernels.passes"
    monkeypatch.delattr(device_kernels, "passes", raising=False)
    monkeypatch.setitem(sys.modules, name, None)  # as without triton
    assert kernels_for(CPU, [FORMS["sign"]], ["float32"]) is None
    assert "GPU kernels unavailable" in caplog.text
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(DeviceKernels, "push", lambda *_: None)
    assert kernels_for(CPU, [FORMS["sign"]], ["float32"]) is None
    assert "codec=sign dtype=torch.float32: its bits differ" in caplog.text


def test_kernels_that_fail_during_training_are_disabled_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full:
        def push(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

    coder = DeviceCoder(Transfers(), Full())  # type: ignore[arg-type]
    division = Division([Stretch(0, 8)], [], FORMS["sign"], (0,))  # type: ignore[arg-type]
    given: dict[str, Any] = {"kept": torch.zeros(8), "times": 1.0, "into": torch.empty(8)}
    for _ in range(2):
        assert coder.encode_at_once(0, division, torch.ones(8), **given) is None
    assert caplog.messages == [
        "GPU kernels disabled: OSError: [Errno 28] No space left on device; torch encodes instead"
    ]
