"""Pushes that a GPU encodes with error feedback in one launch of Triton (topk: three).

The codecs in torch launch 26 to 85 kernels for a chunk, and launching them takes all of the time.
These kernels give the same bits; where they cannot be had, or a trial gives other bits, the codec
in torch encodes. ``passes`` has the kernels and is the only module that imports triton: it is
imported when the first encoder of a rank that encodes on a GPU is made.

    kernels = kernels_for(device, codecs, ["bfloat16"])       # None without triton
    made = kernels.push(division, gradient, kept, times)      # None: the codec in torch encodes it
    made.payload, made.left, made.numbers

A push is encoded here if it has a residual of the same codec and nothing else is due: the first
push of a chunk, pieces without a gradient and pushes with a checksum are rare.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from psdist.codecs import OnDevice
from psdist.codecs.chunks import taken
from psdist.codecs.layout import Division, Stretch, num_values
from psdist.codecs.schemes.plain import Cast
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK, num_sent
from psdist.protocol.memory import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

_log: Final = logging.getLogger(__name__)

_BLOCK: Final = 256
_TRIAL: Final = 4 * 4096 + 77
"""Values of a trial: several programs, and a block that is not full."""
_MOST_PROGRAMS: Final = 1 << 12
"""topk: each program reads the counts of all."""
_KINDS: Final = {"int8": 8, "int4": 4, "int2": 2, "sign": 1, "fp16": 16, "bf16": 17}
"""Codec -> its number in ``passes``."""
_NUMBERS: Final = {"missed": 0, "wanted": 1, "most missed": 2, "gradient": 3}
"""Number -> its column; the first two are sums."""


class Pushed(NamedTuple):
    """A push that was encoded; all of it lies on the device."""

    payload: Tensor
    left: Tensor
    """The new residual of the chunk's coded values; zero elsewhere."""
    numbers: Tensor
    """float32, [programs, 4]: sums of the squares of what was left out and of what was asked for,
    largest magnitudes of what was left out and of the gradient."""

    def reader(self, on_host: Tensor) -> Callable[[str], float]:
        """Return how to read a number by name. ``on_host``: memory that ``numbers`` is copied to"""
        table = on_host.view(self.numbers.shape).numpy()

        def read(name: str) -> float:
            place = _NUMBERS.get(name)
            if place is None:
                return 0.0
            column = table[:, place]
            return float(column.sum(dtype="float64") if place < 2 else column.max())

        return read


class DeviceKernels:
    """The kernels for one device, with the codecs that have passed their trial."""

    def __init__(self, device: torch.device) -> None:
        from psdist.codecs.device_kernels import passes

        self._passes: Any = passes
        self._device = device
        self._proven: set[tuple[Any, torch.dtype]] = set()
        self._tables: dict[tuple[Stretch, ...], tuple[Tensor, Tensor]] = {}
        self._host_tables: list[Tensor] = []
        """Sources of copies that may not have been made yet."""
        self.num_pushes = 0
        """Pushes that were encoded here; trials count."""

    def prove(self, codec: OnDevice, dtype: torch.dtype) -> bool:
        """Encode hard values both ways, once: a codec whose bits differ stays with torch. Waits for
        the device."""
        if (codec, dtype) not in self._proven and _has_kernel(codec):
            self._proven.add((codec, dtype))
            if not self._has_same_bits(codec, dtype):
                self._proven.discard((codec, dtype))
                _log.warning("GPU kernel disabled: codec=%s dtype=%s: its bits differ from the "
                             "host's; torch encodes instead", codec.name, dtype)  # fmt: skip
                return False
        return (codec, dtype) in self._proven

    def _has_same_bits(self, codec: Any, dtype: torch.dtype) -> bool:
        generator = torch.Generator().manual_seed(7)
        every = [Stretch(0, _TRIAL)]
        for scale in (1.0, 1e-3, 3e-39, 1e37):
            gradient, kept = (torch.randn(_TRIAL, generator=generator) * scale for _ in range(2))
            gradient[:: 1 + _TRIAL // 40] = 0.0
            gradient = gradient.to(dtype).nan_to_num_().to(self._device)  # float16: no infinity
            kept = kept.to(self._device)
            gradient[256:512], kept[256:512] = 0.0, -0.0
            times = float(torch.tensor(0.7))
            pushed = self.push(Division(every, [], codec, (0,)), gradient, kept, times)
            asked = gradient.to(torch.float32) + kept * times
            payload, seen = codec.encode_on_device(asked)
            if pushed is None or not torch.equal(pushed.payload, payload):
                return False
            if not torch.equal(pushed.left.view(torch.int32), (asked - seen).view(torch.int32)):
                return False
        return True

    def push(
        self, division: Division, gradient: Tensor, kept: Tensor, times: float
    ) -> Pushed | None:
        """Encode ``gradient`` + ``kept`` x ``times`` (both of the chunk). Asks the device for no
        answer. Return None if torch must do it."""
        codec: Any = division.codec
        num = num_values(division.coded)
        if not num or (codec, gradient.dtype) not in self._proven:
            return None
        times = torch.tensor(times, dtype=torch.float32).item()
        if not math.isfinite(times):
            return None
        is_whole = len(division.coded) == 1 and num == len(gradient)
        left = (torch.empty if is_whole else torch.zeros)(
            len(gradient), dtype=torch.float32, device=self._device
        )
        payload = torch.empty(codec.num_bytes(num), dtype=torch.uint8, device=self._device)
        begins, shifts = self._table(tuple(division.coded))
        given = _Given(gradient, kept, times, left, begins, shifts, len(division.coded), num)
        launch = self._largest if isinstance(codec, TopK) else self._blocks
        numbers = launch(codec, given, payload)
        if numbers is None:
            return None
        if division.exact:
            exact = numbers.new_zeros((1, numbers.shape[1]))
            exact[0, 3] = taken(gradient, division.exact).abs().amax()
            numbers = torch.cat([numbers, exact])
        self.num_pushes += 1
        return Pushed(payload, left, numbers)

    def _blocks(self, codec: Any, given: _Given, payload: Tensor) -> Tensor | None:
        passes = self._passes
        num_blocks = -(-given.num // _BLOCK)
        num_programs = -(-num_blocks // passes.ROWS)
        numbers = payload.new_empty((num_programs, passes.NUMBERS), dtype=torch.float32)
        passes.encode_blocks[(num_programs,)](
            given.gradient, given.kept, given.times, given.left, payload, numbers, given.begins,
            given.shifts, given.num, num_blocks, given.num_stretches, KIND=_KINDS[codec.name],
            ROWS=passes.ROWS, **passes.EXACTLY,
        )  # fmt: skip
        return numbers

    def _largest(self, codec: Any, given: _Given, payload: Tensor) -> Tensor | None:
        passes, num = self._passes, given.num
        num_programs = -(-num // passes.RUN)
        if num_programs > _MOST_PROGRAMS:
            return None
        k, num_totals = num_sent(codec.ratio, num), -(-num // (1 << 16))
        asked = torch.empty(num, dtype=torch.float32, device=self._device)
        numbers = asked.new_empty((num_programs, passes.NUMBERS))
        counts = asked.new_empty((num_programs, 2), dtype=torch.int32)
        stretches = given.begins, given.shifts
        grid, run = (num_programs,), {"RUN": passes.RUN, **passes.EXACTLY}
        passes.add_residual[grid](
            given.gradient, given.kept, given.times, asked, numbers, *stretches, num,
            given.num_stretches, **run,
        )  # fmt: skip
        least = asked.abs().topk(k, sorted=False).values.amin()
        passes.count_largest[grid](asked, least, counts, num, **run)
        totals = payload[: 4 * num_totals].view(torch.int32)
        sent = payload[4 * num_totals : 4 * (num_totals + k)].view(torch.float32)
        low = payload[4 * (num_totals + k) :].view(torch.int16)
        most = max(16, 1 << (num_programs - 1).bit_length())
        passes.take_largest[grid](
            asked, least, counts, given.left, low, sent, totals, numbers, *stretches, num, k,
            num_programs, given.num_stretches, MOST=most, **run,
        )  # fmt: skip
        return numbers

    def _table(self, stretches: tuple[Stretch, ...]) -> tuple[Tensor, Tensor]:
        """By stretch: where it begins among the coded values, and what to add to find the place in
        the chunk."""
        found = self._tables.get(stretches)
        if found is None:
            begins, at = [], 0
            for start, stop in stretches:
                begins.append(at)
                at += stop - start
            shifts = [each.start - begin for each, begin in zip(stretches, begins, strict=True)]
            both = torch.tensor([begins, shifts], dtype=torch.int32)
            if self._device.type == "cuda":
                both = both.pin_memory()
            self._host_tables.append(both)
            there = both.to(self._device, non_blocking=True)
            found = self._tables[stretches] = (there[0], there[1])
        return found


class _Given(NamedTuple):
    gradient: Tensor
    kept: Tensor
    times: float
    left: Tensor
    begins: Tensor
    shifts: Tensor
    num_stretches: int
    num: int


def kernels_for(
    device: torch.device, codecs: Iterable[Any], dtypes: Collection[str]
) -> DeviceKernels | None:
    """Return the kernels that have passed a trial for these codecs and dtypes of gradients; None
    if there are none, or this host has no triton. Compiles them; waits for the device."""
    wanted = [codec for codec in codecs if _has_kernel(codec)]
    if not wanted:
        return None
    try:
        kernels = DeviceKernels(device)
        proven = [kernels.prove(each, torch_dtype(dtype)) for each in wanted for dtype in dtypes]
    except Exception as error:  # triton raises whatever its compiler, driver or cache raise
        _log.warning("GPU kernels unavailable: %s: %s; torch encodes instead",
                     type(error).__name__, error)  # fmt: skip
        return None
    return kernels if any(proven) else None


def _has_kernel(codec: object) -> bool:
    if type(codec) is Quantized:  # a subclass may give other bytes under the same name
        return codec.has_device_form
    return type(codec) in (Cast, Sign, TopK)
