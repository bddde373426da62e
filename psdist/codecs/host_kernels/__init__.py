"""Pushes that the host encodes with error feedback, and decodes, in one pass over memory, in C.

The codecs in torch read and write the values of a chunk 10 to 20 times, into new memory each time.
``passes.c`` has the same arithmetic in one loop, with the same bits. It is compiled for the
processor at hand by the compiler of the host; without a compiler, or where a trial gives other
bits, the codec in torch encodes.

    kernels = kernels_for(codecs)                             # None: torch encodes all
    made = kernels.push(division, gradient, kept, times, into)
    made.left, made.number("missed")
    kernels.decode(coding, payload, into)                     # False: torch decodes it

The compiled library is kept in ``~/.cache/psdist`` (or ``XDG_CACHE_HOME``). Its name contains
the source, the compiler and the processor, so hosts of several kinds share a home. Where nothing
can be written there, the library is loaded from memory. Imported by ranks with a codec only.

Measured against numba and torch with ``out=``: tests/benchmarks/schemes/host_codecs.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from psdist.codecs.chunks import HEAD, ChunkCoding, Form, Places, put, taken
from psdist.codecs.layout import Division, Stretch, num_values
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.protocol.memory import as_tensor

if TYPE_CHECKING:
    from torch import Tensor

_log: Final = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("passes.c")
_COMPILERS: Final = ("gcc", "clang", "cc")  # the cc of a Cray compiles for other nodes
_FLAGS: Final = (
    *("-std=c99", "-O3", "-march=native", "-shared", "-fPIC"),
    "-ffp-contract=off",  # a product and a sum round one after the other
    *("-fno-math-errno", "-fno-trapping-math"),  # loops with conditions become vectors; same bits
)
_TIMEOUT_S: Final = 60.0
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
    )


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
        self._proven: dict[str, Any] = {}
        """Codec -> its pass over a push."""
        self._decoders: dict[str, Any] = {}
        """Codec -> its pass over a payload."""
        self._buffers = _Buffers()
        self._tables: dict[tuple[Stretch, ...], np.ndarray[Any, Any]] = {}
        self.num_pushes = 0
        """Pushes that were encoded here; trials count."""

    def prove(self, codec: Any) -> bool:
        """Encode hard values both ways: a codec whose bits differ stays with torch."""
        if codec.name not in self._proven:
            encode = getattr(self._library, f"{codec.name}_push")
            encode.argtypes, encode.restype = [ctypes.c_void_p] * 2, None
            self._proven[codec.name] = encode
            decode = getattr(self._library, f"{codec.name}_decode")
            decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
            decode.restype = ctypes.c_int
            self._decoders[codec.name] = decode
            if not self._has_same_bits(codec):
                self._proven[codec.name] = self._decoders[codec.name] = None
                _log.warning("host kernel disabled: codec=%s: its bits differ from those of torch; "
                             "torch encodes instead", codec.name)  # fmt: skip
        return self._proven[codec.name] is not None

    def _has_same_bits(self, codec: Any) -> bool:
        generator = torch.Generator().manual_seed(7)
        division = Division([Stretch(0, _TRIAL)], [], codec, (0,))
        for scale in (1.0, 1e-3, 3e-39, 1e37):
            gradient, kept = (torch.randn(_TRIAL, generator=generator) * scale for _ in range(2))
            gradient[:: 1 + _TRIAL // 40] = 0.0
            gradient[256:512], kept[256:512] = 0.0, -0.0
            payload = torch.empty(codec.num_bytes(_TRIAL), dtype=torch.uint8)
            pushed = self.push(division, gradient, kept, 0.7, payload)
            asked = gradient + kept * 0.7
            expected = codec.encode(asked, seed=0)
            seen, decoded = codec.decode(expected, _TRIAL), torch.empty(_TRIAL)
            missed = asked - seen
            if not self._decode(division, expected, decoded):
                return False
            if not torch.equal(decoded.view(torch.int32), seen.view(torch.int32)):
                return False
            if pushed is None or not torch.equal(payload, expected):
                return False
            if not torch.equal(pushed.left.view(torch.int32), missed.view(torch.int32)):
                return False
        return True

    def push(
        self, division: Division, gradient: Tensor, kept: Tensor, times: float, into: Tensor
    ) -> Pushed | None:
        """Encode ``gradient`` + ``kept`` x ``times`` (both of the chunk) to ``into`` (uint8).
        Return None if torch must do it."""
        encode = self._proven.get(division.codec.name)
        is_finite = bool(np.isfinite(np.float32(times)))
        if encode is None or not is_finite or gradient.device.type != "cpu":
            return None
        num = num_values(division.coded)
        values, before = gradient.to(torch.float32).contiguous(), kept.contiguous()
        left = self._buffers.take(len(gradient))
        if num < len(gradient):
            left.zero_()
        stretches = self._table(tuple(division.coded))
        numbers = _Numbers()
        request = _Push(
            gradient=values.data_ptr(),
            kept=before.data_ptr(),
            times=times,
            left=left.data_ptr(),
            payload=into.data_ptr(),
            stretches=stretches.ctypes.data,
            num=num,
        )
        encode(ctypes.addressof(request), ctypes.addressof(numbers))
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
        places = _whole(coding, payload)
        if places is None or into.dtype != torch.float32 or into.device.type != "cpu":
            return False
        division, num_exact = places.division, num_values(places.division.exact)
        if num_values(division.coded) < len(into):
            into.zero_()
        part = torch.frombuffer(
            payload, dtype=torch.uint8, offset=places.coded_at, count=places.coded_bytes
        )
        if not self._decode(division, part, into):
            return False
        if num_exact:
            given = as_tensor(payload[places.exact_at :], coding.chunk.dtype, num_exact)
            put(into, division.exact, given)
        return True

    def _decode(self, division: Division, payload: Tensor, into: Tensor) -> bool:
        decode = self._decoders.get(division.codec.name)
        if decode is None:
            return False
        stretches, num = self._table(tuple(division.coded)), num_values(division.coded)
        return not decode(payload.data_ptr(), stretches.ctypes.data, num, into.data_ptr())

    def _table(self, stretches: tuple[Stretch, ...]) -> np.ndarray[Any, Any]:
        found = self._tables.get(stretches)
        if found is None:
            found = self._tables[stretches] = np.array(stretches, np.int64)
        return found


def _whole(coding: ChunkCoding, payload: memoryview) -> Places | None:
    """Return the places of a payload that leaves nothing out and needs no comparison; else None."""
    if len(payload) < HEAD.size or coding.all.length_bytes or not coding.all.coded:
        return None
    if HEAD.unpack_from(payload)[:3] != (Form.VALUES, 0, 0):
        return None
    places = coding.places()
    is_whole = places.form is Form.VALUES and places.num_bytes == len(payload)
    return places if is_whole else None


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
    return HostKernels(_loaded())


def _has_kernel(codec: object) -> bool:
    if isinstance(codec, Quantized):
        return not codec.name.endswith(":stochastic")
    return isinstance(codec, Sign)


def _loaded() -> ctypes.CDLL:
    """Return the library, from the cache if it is there. Raises OSError and SubprocessError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"no compiler on PATH: {', '.join(_COMPILERS)}")
    path = _folder() / f"passes-{_key(compiler)}.so"
    if not path.is_absolute():  # a user without a home: nothing is kept
        return _from_memory(_compiled(compiler))
    with suppress(OSError):
        # Nobody else may have written what this process is to run.
        if path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o022:
            return ctypes.CDLL(str(path))
    library = _compiled(compiler)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_bytes(library)
            new.chmod(0o600)
            new.replace(path)  # ranks that compile at the same time write the same
        return ctypes.CDLL(str(path))
    return _from_memory(library)


def _from_memory(library: bytes) -> ctypes.CDLL:
    with open(os.memfd_create("psdist-kernels"), "wb") as memory:
        memory.write(library)
        memory.flush()
        return ctypes.CDLL(f"/proc/self/fd/{memory.fileno()}")


def _compiled(compiler: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="psdist-kernels-") as folder:
        target = Path(folder) / "passes.so"
        command = [compiler, *_FLAGS, "-o", str(target), str(_SOURCE), "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(f"{compiler} failed with status {done.returncode}: {done.stderr[-500:]}")
        return target.read_bytes()


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # its specification: ignore a relative one
        cache = Path(os.path.expanduser("~/.cache"))
    return cache / "psdist"


def _key(compiler: str) -> str:
    """Return a name for the library that other processors, compilers and versions do not share."""
    facts = [platform.machine(), platform.libc_ver()[1], *_FLAGS, os.path.realpath(compiler)]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        facts += sorted({line for line in lines if line.startswith(wanted)})
    with suppress(OSError):
        facts.append(str(os.stat(os.path.realpath(compiler)).st_size))
    text = "\n".join(facts).encode() + _SOURCE.read_bytes()
    return hashlib.blake2b(text, digest_size=12).hexdigest()
