"""Pushes that the host encodes with error feedback, and decodes, in one pass over memory, in C.

The codecs in torch read and write the values of a chunk 10 to 20 times, into new memory each time.
``passes.c`` has the same arithmetic in one loop, with the same bits. It is compiled for the
processor at hand by the compiler of the host; without a compiler, or where a trial gives other
bits, the codec in torch encodes.

    kernels = kernels_for(codecs)                             # None: torch encodes all
    made = kernels.push(division, gradient, kept, times, into)
    made.left, made.number("missed")
    kernels.decode(coding, payload, into)                     # False: torch decodes it
    kernels.add(coding, payload, total, 2.0)                  # False: torch does, in two passes

psdist.c_libraries compiles it and keeps the library. Imported by ranks with a codec only.

Measured against numba and torch with ``out=``: tests/benchmarks/schemes/host_codecs.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from psdist.c_libraries import load_library
from psdist.codecs.chunks import HEAD, ChunkCoding, Form, Places, put, taken
from psdist.codecs.layout import Division, Stretch, num_values
from psdist.codecs.schemes.plain import Cast
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.errors import InvariantError
from psdist.protocol.memory import as_bytes, as_tensor

if TYPE_CHECKING:
    from torch import Tensor

_log: Final = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("passes.c")
_TRIAL: Final = 4096 + 77
"""Values of a trial; the last block is not full."""


class _Push(ctypes.Structure):
    """push_t of passes.c."""

    _fields_ = (
        ("gradient", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("times", ctypes.c_float),
        ("left", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("stretches", ctypes.c_void_p),
        ("num", ctypes.c_int64),
        ("seen", ctypes.c_void_p),
    )


_POINTERS: Final = [ctypes.c_void_p] * 2
_VALUES: Final = [*_POINTERS, ctypes.c_int64, ctypes.c_void_p]
_VERBS: Final[dict[str, tuple[list[Any], Any]]] = {
    "push": (_POINTERS, None),
    "decode": (_VALUES, ctypes.c_int),
    "add": ([*_VALUES, ctypes.c_float], ctypes.c_int),
}
"""Passes of passes.c -> arguments and result."""


class _Passes(NamedTuple):
    """The compiled functions of a codec."""

    push: Any
    decode: Any
    add: Any
    """Adds a payload to a sum."""


class _Numbers(ctypes.Structure):
    """numbers_t of passes.c."""

    _fields_ = (
        ("missed", ctypes.c_double),
        ("wanted", ctypes.c_double),
        ("most_missed", ctypes.c_float),
        ("most_given", ctypes.c_float),
    )


class Pushed(NamedTuple):
    left: Tensor
    """float32, of the chunk: the new residual of its coded values; zero elsewhere."""
    number: Callable[[str], float]
    """Reads a number by its name; 0 if it has no measure."""


class _Buffers:
    """Memory that is used again once no tensor refers to it: new pages for every residual cost more
    than the encoding."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def take(self, num: int) -> Tensor:
        """Return float32 values with any content."""
        free = self._free.setdefault(num, [])
        memory = free.pop() if free else np.empty(num, np.float32)
        view = memory[:]  # the tensor's storage keeps it, and every alias keeps the storage
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


class HostKernels:
    """The compiled passes, for the codecs that have passed their trial."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._proven: dict[Any, _Passes | None] = {}
        """By codec: an object of a class of the user's may have the name of another one. None after
        a failed trial."""
        self._buffers = _Buffers()
        self._tables: dict[tuple[Stretch, ...], np.ndarray[Any, Any]] = {}
        self.num_pushes = 0
        """Pushes that were encoded here; trials count."""

    def prove(self, codec: Any) -> bool:
        """Encode hard values both ways: a codec whose bits differ stays with torch."""
        if codec not in self._proven:
            passes = [getattr(self._library, f"{codec.name}_{verb}") for verb in _VERBS]
            for each, (arguments, result) in zip(passes, _VERBS.values(), strict=True):
                each.argtypes, each.restype = arguments, result
            self._proven[codec] = _Passes(*passes)
            if not self._has_same_bits(codec):
                self._proven[codec] = None
                _log.warning("host kernel disabled: codec=%s: its bits differ from those of torch; "
                             "torch encodes instead", codec.name)  # fmt: skip
        return self._proven[codec] is not None

    def _has_same_bits(self, codec: Any) -> bool:
        generator = torch.Generator().manual_seed(7)
        division = Division([Stretch(0, _TRIAL)], [], codec, (0,))
        for scale in (1.0, 1e-3, 3e-39, 1e37):
            gradient, kept = (torch.randn(_TRIAL, generator=generator) * scale for _ in range(2))
            gradient[:: 1 + _TRIAL // 40] = 0.0
            gradient[256:512], kept[256:512] = 0.0, -0.0
            payload = torch.empty(codec.num_bytes(_TRIAL), dtype=torch.uint8)
            found = torch.empty(_TRIAL)
            pushed = self.push(division, gradient, kept, 0.7, payload, seen=found)
            asked = gradient + kept * 0.7
            expected = codec.encode(asked, seed=0)
            seen, decoded = codec.decode(expected, _TRIAL), torch.empty(_TRIAL)
            if pushed is None or not torch.equal(payload, expected):
                return False
            sums = [(kept.clone(), kept.add(seen, alpha=weight)) for weight in (1.0, 0.7)]
            self._decode(division, expected, decoded)
            for weight, (total, _) in zip((1.0, 0.7), sums, strict=True):
                self._add(division, expected, total, weight)
            pairs = [(decoded, seen), (found, seen), (pushed.left, asked - seen), *sums]
            for one, other in pairs:
                if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                    return False
        return True

    def push(
        self,
        division: Division,
        gradient: Tensor,
        kept: Tensor | None,
        times: float,
        into: Tensor,
        *,
        seen: Tensor | None = None,
    ) -> Pushed | None:
        """Encode ``gradient`` + ``kept`` x ``times`` (both of the chunk) to ``into`` (uint8).
        ``seen`` (float32, of the coded values) gets the decoded values. Return None if torch must
        do it."""
        passes = self._proven.get(division.codec)
        is_finite = bool(np.isfinite(np.float32(times)))
        if passes is None or not is_finite or gradient.device.type != "cpu":
            return None
        num = num_values(division.coded)
        values = gradient.to(torch.float32).contiguous()
        before = None if kept is None else kept.contiguous()
        left = self._buffers.take(len(gradient))
        if num < len(gradient):
            left.zero_()
        stretches = self._table(tuple(division.coded))
        numbers = _Numbers()
        request = _Push(
            gradient=values.data_ptr(),
            kept=None if before is None else before.data_ptr(),
            times=times,
            left=left.data_ptr(),
            payload=into.data_ptr(),
            stretches=stretches.ctypes.data,
            num=num,
            seen=None if seen is None else seen.data_ptr(),
        )
        passes.push(ctypes.addressof(request), ctypes.addressof(numbers))
        self.num_pushes += 1

        def number(name: str) -> float:
            if name == "gradient":
                exact = taken(gradient, division.exact).abs()
                most = float(exact.amax()) if len(exact) else 0.0
                return float(np.maximum(numbers.most_given, most))  # NaN if either is
            found = getattr(numbers, name.replace(" ", "_"), 0.0)
            return float(found)

        return Pushed(left, number)

    def decode(self, coding: ChunkCoding, payload: memoryview, into: Tensor) -> bool:
        """Write the values of a payload of pushes to ``into`` (float32, of the chunk), zero where
        nothing was sent. Return False if torch must do it, which finds what is wrong with it."""
        places, division = _whole(coding, payload), coding.all
        if places is None or places.form is not Form.VALUES:
            return False
        if not self._can(division, into):
            return False
        if num_values(division.coded) < len(into):
            into.zero_()
        if self._decode(division, _coded(places, payload), into):
            return False
        (_, has_checksum, _, checksum) = HEAD.unpack_from(payload)
        if has_checksum and checksum != zlib.crc32(as_bytes(taken(into, division.coded))):
            return False
        if division.exact:
            put(into, division.exact, _given(coding, places, payload))
        return True

    def add(
        self,
        coding: ChunkCoding,
        payload: memoryview,
        total: Tensor,
        weight: float = 1.0,
        *,
        form: Form = Form.VALUES,
    ) -> bool:
        """Add the values times ``weight`` to ``total`` (float32, of the chunk); exact values of a
        ``CHANGE`` replace those in ``total``. Return False if torch must do it. Raises
        :class:`ProtocolError` as ``coding.read``; a part is added then."""
        places, division = _whole(coding, payload), coding.all
        if places is None or places.form is not form or HEAD.unpack_from(payload)[1]:
            return False
        if not self._can(division, total):
            return False
        if self._add(division, _coded(places, payload), total, weight):
            coding.read(payload)
            raise InvariantError(f"chunk {coding.chunk.index}: only the kernel refuses its payload")
        if division.exact:
            given = _given(coding, places, payload)
            if form is Form.VALUES:
                given = taken(total, division.exact).add(given, alpha=weight)
            put(total, division.exact, given)
        return True

    def encode_change(
        self, coding: ChunkCoding, values: Tensor, held: Tensor, into: memoryview
    ) -> int:
        """Write a relative reply, from ``held`` to ``values`` (both float32, of the chunk).
        ``held`` becomes the result of adding it. Return its bytes; 0 if torch must do it."""
        places, division = coding.places(form=Form.CHANGE), coding.all
        is_alike = values.dtype == held.dtype and places.form is Form.CHANGE
        if not (is_alike and division.coded and self._can(division, held)):
            return 0
        payload = _coded(places, into)
        if self.push(division, values, held, -1.0, payload) is None:
            return 0
        if division.exact:
            _given(coding, places, into).copy_(taken(values, division.exact))
        places.finish(into)
        if not self.add(coding, into[: places.num_bytes], held, form=Form.CHANGE):
            raise InvariantError(f"chunk {coding.chunk.index}: its own change cannot be added")
        return places.num_bytes

    def _can(self, division: Division, values: Tensor) -> bool:
        is_known = self._proven.get(division.codec) is not None
        return is_known and values.dtype == torch.float32 and values.device.type == "cpu"

    def _decode(self, division: Division, payload: Tensor, into: Tensor) -> bool:
        """Return True if no sender makes such a payload."""
        stretches, num = self._table(tuple(division.coded)), num_values(division.coded)
        passes = self._proven[division.codec]
        assert passes is not None
        return bool(passes.decode(payload.data_ptr(), stretches.ctypes.data, num, into.data_ptr()))

    def _add(self, division: Division, payload: Tensor, total: Tensor, weight: float) -> bool:
        stretches, num = self._table(tuple(division.coded)), num_values(division.coded)
        passes, to = self._proven[division.codec], total.data_ptr()
        assert passes is not None
        return bool(passes.add(payload.data_ptr(), stretches.ctypes.data, num, to, weight))

    def _table(self, stretches: tuple[Stretch, ...]) -> np.ndarray[Any, Any]:
        found = self._tables.get(stretches)
        if found is None:
            found = self._tables[stretches] = np.array(stretches, np.int64)
        return found


def _whole(coding: ChunkCoding, payload: memoryview) -> Places | None:
    """Return the places of a payload that leaves nothing out; else None."""
    if len(payload) < HEAD.size or coding.all.length_bytes or not coding.all.coded:
        return None
    form, has_checksum, num_left_out, _ = HEAD.unpack_from(payload)
    if form not in (Form.VALUES, Form.CHANGE) or has_checksum > 1 or num_left_out:
        return None
    places = coding.places(form=Form(form))
    is_whole = places.form is not Form.RAW and places.num_bytes == len(payload)
    return places if is_whole else None


def _coded(places: Places, payload: memoryview) -> Tensor:
    return torch.frombuffer(
        payload, dtype=torch.uint8, offset=places.coded_at, count=places.coded_bytes
    )


def _given(coding: ChunkCoding, places: Places, payload: memoryview) -> Tensor:
    num = num_values(places.division.exact)
    return as_tensor(payload[places.exact_at :], coding.chunk.dtype, num)


def kernels_for(codecs: Iterable[Any]) -> HostKernels | None:
    """Return the kernels that have passed a trial for these codecs; None if there are none, or this
    host cannot compile them. The first call on a kind of processor takes about a second."""
    wanted = [codec for codec in codecs if _has_kernel(codec)]
    if not wanted:
        return None
    try:
        kernels = of_this_process()
        proven = [kernels.prove(each) for each in wanted]
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        _log.info("host kernels unavailable: %s: %s; torch encodes instead",
                  type(error).__name__, error)  # fmt: skip
        return None
    return kernels if any(proven) else None


@functools.cache
def of_this_process() -> HostKernels:
    """Load and try the library once, however many parameter sets there are."""
    return HostKernels(load_library(_SOURCE))


def _has_kernel(codec: object) -> bool:
    if type(codec) is Quantized:  # a subclass may give other bytes under the same name
        return not codec.name.endswith(":stochastic")
    return type(codec) in (Cast, Sign)
