"""The passes over a push on a GPU, in Triton: one launch encodes a chunk with error feedback.

    encode_blocks[(programs,)](gradient, kept, ..., KIND=INT8, ROWS=ROWS, **EXACTLY)

A program takes ``ROWS`` blocks of 256 values. It adds the residual to the gradient, codes the sum,
and writes the payload, the new residual and its part of the push's numbers. Nothing else is read or
written, so a push costs one read and one write of memory.

The bits are those of the codecs in torch (psdist.codecs.schemes):

- Divisions are ``div_rn``. Triton's ``/`` is not correctly rounded.
- Launches pass ``EXACTLY``: without it the compiler joins a product and a sum into one operation.
- Sums that decide bits are added in the order of :func:`psdist.codecs.blocks.sums_of`.
- Largest values are compared as whole numbers, where NaN is above infinity. Triton's own maximum
  drops NaN.

Imports triton, which only ranks with a GPU have. Change a codec and its pass together; the test is
tests/unit/codecs/test_device_kernels.py, and tests/gpu/test_kernels.py on a real card.
"""

# Triton compiles these functions, and its types are not Python's.
# mypy: ignore-errors
from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

INT8: Final = tl.constexpr(8)
INT4: Final = tl.constexpr(4)
INT2: Final = tl.constexpr(2)
SIGN: Final = tl.constexpr(1)
FP16: Final = tl.constexpr(16)
BF16: Final = tl.constexpr(17)
ROWS: Final = 8
"""Blocks of a program."""
RUN: Final = 4096
"""Values of a program that chooses the largest."""
NUMBERS: Final = 4
"""Numbers that each program writes: the sums of squares of what was left out and of what was asked
for, and the largest magnitudes of what was left out and of the gradient."""
EXACTLY: Final[dict[str, Any]] = {"enable_fp_fusion": False, "num_warps": 8}

_INFINITY: Final = tl.constexpr(0x7F800000)
_TINY: Final = tl.constexpr(2.0**-126)
_DOWN: Final = tl.constexpr(2.0**-8)
_UP: Final = tl.constexpr(2.0**8)
_LARGEST: Final = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_CAP: Final = tl.constexpr((2.0 - 2.0**-23) * 2.0**127 * (1 - 2.0**-20))
_TERNARY: Final = tl.constexpr(0.7)
_MAGIC: Final = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22 and subtracted again: the nearest whole number, halves to even."""
_NAN_BITS: Final = tl.constexpr(0x7FC00000)
"""Not the number itself: triton refuses a global that is unequal to what it was."""


@triton.jit
def _bits(values):
    """The bits of magnitudes: as whole numbers they have the order of the magnitudes."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _or_nan(is_finite, values):
    """``values``, and NaN where they are not finite."""
    bits = tl.where(is_finite, values.to(tl.int32, bitcast=True), _NAN_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sums(values, ROWS: tl.constexpr):
    """[ROWS]: halves are added until one is left, as psdist.codecs.blocks.sums_of does."""
    values = tl.sum(tl.reshape(values, (ROWS, 2, 128)), axis=1)
    values = tl.sum(tl.reshape(values, (ROWS, 2, 64)), axis=1)
    values = tl.sum(tl.reshape(values, (ROWS, 2, 32)), axis=1)
    values = tl.sum(tl.reshape(values, (ROWS, 2, 16)), axis=1)
    values = tl.sum(tl.reshape(values, (ROWS, 2, 8)), axis=1)
    values = tl.sum(tl.reshape(values, (ROWS, 2, 4)), axis=1)
    values = tl.sum(tl.reshape(values, (ROWS, 2, 2)), axis=1)
    return tl.sum(tl.reshape(values, (ROWS, 2)), axis=1)


@triton.jit
def _multiples(asked, LEVELS: tl.constexpr):
    """Scales, [rows], and whole multiples, as psdist.codecs.schemes.quantized."""
    most = tl.max(_bits(asked), axis=1)
    is_finite = most < _INFINITY
    scales = tl.div_rn(most.to(tl.float32, bitcast=True), tl.full(most.shape, LEVELS, tl.float32))
    scales = tl.where(scales < _TINY, 0.0, scales)
    scales = tl.minimum(scales, tl.full(most.shape, _CAP / LEVELS, tl.float32))
    divisors = tl.where(is_finite & (scales != 0.0), scales, 1.0)
    multiples = tl.div_rn(tl.where(is_finite[:, None], asked, 0.0), divisors[:, None])
    return _or_nan(is_finite, scales), (multiples + _MAGIC) - _MAGIC


@triton.jit
def _ternary(asked, counts, ROWS: tl.constexpr):
    """Scales, [rows], and -1, 0 and 1, as psdist.codecs.schemes.quantized."""
    magnitudes = tl.abs(asked)
    means = tl.div_rn(_sums(magnitudes, ROWS), counts)
    times = tl.where(_bits(means) < _INFINITY, 1.0, _DOWN)
    magnitudes = magnitudes * times[:, None]
    means = tl.div_rn(_sums(magnitudes, ROWS), counts)
    chosen = magnitudes > (means * _TERNARY)[:, None]
    num_chosen = tl.maximum(tl.sum(chosen.to(tl.int32), axis=1), 1).to(tl.float32)
    scales = tl.div_rn(_sums(tl.where(chosen, magnitudes, 0.0), ROWS), num_chosen)
    scales = tl.minimum(scales, times * _LARGEST)
    scales = scales * tl.where(times == 1.0, 1.0, _UP)
    scales = tl.where(scales < _TINY, 0.0, scales)
    signs = tl.where(asked < 0.0, -1.0, 1.0)
    is_finite = _bits(means) < _INFINITY
    return _or_nan(is_finite, scales), tl.where(chosen & is_finite[:, None], signs, 0.0)


@triton.jit
def _mean(asked, counts, ROWS: tl.constexpr):
    """Mean magnitudes, [rows], as psdist.codecs.schemes.sign."""
    magnitudes = tl.abs(asked)
    means = tl.div_rn(_sums(magnitudes, ROWS), counts)
    small = tl.div_rn(_sums(magnitudes * _DOWN, ROWS), counts)
    again = tl.minimum(small, tl.full(small.shape, _LARGEST * _DOWN, tl.float32)) * _UP
    again = _or_nan(_bits(small) < _INFINITY, again)
    return tl.where(_bits(means) < _INFINITY, means, again)


@triton.jit
def _half(asked):
    """Bits of float16, and what they are decoded to, as psdist.codecs.schemes.plain."""
    clamped = tl.minimum(tl.maximum(asked, -65504.0), 65504.0)
    magnitudes = _bits(asked)
    rounded = tl.where(magnitudes == _INFINITY, asked, clamped).to(tl.float16)
    bits = rounded.to(tl.int16, bitcast=True)
    bits = tl.where(magnitudes > _INFINITY, tl.full(bits.shape, 0x7E00, tl.int16), bits)
    return bits, bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _brain(asked):
    """Bits of bfloat16, and what they are decoded to, as psdist.codecs.schemes.plain."""
    magnitudes = _bits(asked)
    clamped = tl.minimum(magnitudes, 0x7F7F0000)
    clamped = tl.where(magnitudes == _INFINITY, magnitudes, clamped)
    rounded = clamped + 0x7FFF + ((clamped >> 16) & 1)  # halves to even; the rest is cut off
    upper = tl.where(magnitudes > _INFINITY, 0x7FC0, rounded >> 16)
    is_negative = (asked.to(tl.int32, bitcast=True) < 0) & (magnitudes <= _INFINITY)
    upper = upper | tl.where(is_negative, 0x8000, 0)
    return upper.to(tl.int16), (upper << 16).to(tl.float32, bitcast=True)


@triton.jit
def _place(at, begins, shifts, num_stretches):
    """Where the coded values ``at`` lie in the chunk."""
    place = at
    number = 0
    while number < num_stretches:  # the interpreter of Triton cannot count to a tensor with range
        place = tl.where(at >= tl.load(begins + number), at + tl.load(shifts + number), place)
        number += 1
    return place


@triton.jit
def _asked(gradient, kept, times, place, is_inside):
    """The gradient, and the gradient with the residual: both float32, zero outside."""
    given = tl.load(gradient + place, mask=is_inside, other=0.0)
    if given.dtype == tl.bfloat16:  # the upper half of a float32; Triton's interpreter rounds
        given = (given.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        given = given.to(tl.float32)
    residual = tl.load(kept + place, mask=is_inside, other=0.0)
    return given, tl.where(is_inside, given + residual * times, 0.0)


@triton.jit
def _write_numbers(numbers, program, missed, asked, given):
    at = numbers + program * 4
    tl.store(at, tl.sum(tl.sum(missed * missed, axis=1), axis=0))
    tl.store(at + 1, tl.sum(tl.sum(asked * asked, axis=1), axis=0))
    most_missed = tl.max(tl.max(_bits(missed), axis=1), axis=0)
    most_given = tl.max(tl.max(_bits(given), axis=1), axis=0)
    tl.store(at + 2, most_missed.to(tl.float32, bitcast=True))
    tl.store(at + 3, most_given.to(tl.float32, bitcast=True))


_VARYING = ("num", "num_blocks", "num_stretches", "k", "num_programs")
_PLACES = ("gradient", "kept", "left", "payload", "asked", "low", "sent", "counts")


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PLACES)
def encode_blocks(
    gradient, kept, times, left, payload, numbers, begins, shifts,
    num, num_blocks, num_stretches, KIND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``num`` coded values; ``kept``: the residual, to be multiplied by ``times``."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, 256)
    at = rows[:, None] * 256 + columns[None, :]
    is_inside = at < num
    is_block = rows < num_blocks
    place = _place(at, begins, shifts, num_stretches)
    given, asked = _asked(gradient, kept, times, place, is_inside)
    counts = tl.maximum(tl.minimum(num - rows * 256, 256), 1).to(tl.float32)
    codes = payload + num_blocks * 4
    if KIND == FP16 or KIND == BF16:  # noqa: SIM109 - of Triton
        if KIND == FP16:
            bits, seen = _half(asked)
        else:
            bits, seen = _brain(asked)
        tl.store(payload.to(tl.pointer_type(tl.int16)) + at, bits, mask=is_inside)
    elif KIND == SIGN:
        scales = _mean(asked, counts, ROWS)
        is_negative = asked.to(tl.int32, bitcast=True) < 0
        seen = tl.where(is_negative, -scales[:, None], scales[:, None])
        eighths = tl.reshape(is_negative.to(tl.int32), (ROWS, 32, 8))
        weights = 128 >> tl.arange(0, 8)
        packed = tl.sum(eighths * weights[None, None, :], axis=2)
        to = codes + rows[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(to, packed.to(tl.uint8), mask=is_block[:, None])
    elif KIND == INT8:
        scales, multiples = _multiples(asked, 127)
        seen = multiples * scales[:, None]
        packed = (multiples.to(tl.int32) & 255).to(tl.uint8)
        tl.store(codes + at, packed, mask=is_block[:, None])
    elif KIND == INT4:
        scales, multiples = _multiples(asked, 7)
        seen = multiples * scales[:, None]
        parts = tl.reshape(multiples.to(tl.int32) + 8, (ROWS, 2, 128))
        weights = 1 << (4 * tl.arange(0, 2))
        packed = tl.sum(parts * weights[None, :, None], axis=1)
        to = codes + rows[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(to, packed.to(tl.uint8), mask=is_block[:, None])
    else:
        scales, multiples = _ternary(asked, counts, ROWS)
        seen = multiples * scales[:, None]
        parts = tl.reshape(multiples.to(tl.int32) + 2, (ROWS, 4, 64))
        weights = 1 << (2 * tl.arange(0, 4))
        packed = tl.sum(parts * weights[None, :, None], axis=1)
        to = codes + rows[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(to, packed.to(tl.uint8), mask=is_block[:, None])
    if KIND != FP16 and KIND != BF16:
        tl.store(payload.to(tl.pointer_type(tl.float32)) + rows, scales, mask=is_block)
    missed = tl.where(is_inside, asked - seen, 0.0)
    tl.store(left + place, missed, mask=is_inside)
    _write_numbers(numbers, program, missed, asked, given)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PLACES)
def add_residual(
    gradient, kept, times, asked, numbers, begins, shifts, num, num_stretches, RUN: tl.constexpr
):
    """topk, first pass: write p = g + r e of the coded values, one after another, to ``asked``."""
    program = tl.program_id(0)
    at = program * RUN + tl.arange(0, RUN)
    is_inside = at < num
    place = _place(at, begins, shifts, num_stretches)
    given, sums = _asked(gradient, kept, times, place, is_inside)
    tl.store(asked + at, sums, mask=is_inside)
    most = tl.max(_bits(given), axis=0)
    tl.store(numbers + program * 4 + 3, most.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PLACES)
def count_largest(asked, least, counts, num, RUN: tl.constexpr):
    """topk, second pass: how many magnitudes of each run are above ``least``, and how many equal
    it."""
    program = tl.program_id(0)
    at = program * RUN + tl.arange(0, RUN)
    magnitudes = _bits(tl.load(asked + at, mask=at < num, other=0.0))
    limit = _bits(tl.load(least))
    above = tl.sum((magnitudes > limit).to(tl.int32), axis=0)
    equal = tl.sum(((magnitudes == limit) & (at < num)).to(tl.int32), axis=0)
    tl.store(counts + program * 2, above)
    tl.store(counts + program * 2 + 1, equal)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PLACES)
def take_largest(
    asked, least, counts, left, low, sent, totals, numbers, begins, shifts,
    num, k, num_programs, num_stretches, RUN: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """topk, third pass: the ``k`` largest, ascending by place, of equal ones the first.

    ``low``, ``sent``: the places modulo 65,536 and the values in the payload; ``totals``: their
    numbers by stretches of 65,536; ``MOST``: at least ``num_programs``, a power of two."""
    program = tl.program_id(0)
    each = tl.arange(0, MOST)
    is_run = each < num_programs
    above = tl.load(counts + each * 2, mask=is_run, other=0)
    equal = tl.load(counts + each * 2 + 1, mask=is_run, other=0)
    num_equal = k - tl.sum(above, axis=0)  # of those that equal the smallest, so many are taken
    equal_stop = tl.minimum(tl.cumsum(equal, axis=0), num_equal)
    taken_stop = tl.cumsum(above, axis=0) + equal_stop
    above_before = tl.sum(tl.where(each < program, above, 0), axis=0)
    equal_before = tl.sum(tl.where(each < program, equal, 0), axis=0)
    before = above_before + tl.minimum(equal_before, num_equal)
    # The runs of one stretch are 65536 // RUN neighbours; the last one writes its total.
    per_total = 65536 // RUN
    if (program % per_total == per_total - 1) or (program == num_programs - 1):
        first = program // per_total * per_total
        stop = tl.sum(tl.where(each == program, taken_stop, 0), axis=0)
        start = tl.sum(tl.where(each == first - 1, taken_stop, 0), axis=0)
        tl.store(totals + program // per_total, stop - start)
    at = program * RUN + tl.arange(0, RUN)
    is_inside = at < num
    values = tl.load(asked + at, mask=is_inside, other=0.0)
    magnitudes = _bits(values)
    limit = _bits(tl.load(least))
    is_equal = (magnitudes == limit) & is_inside
    rank = equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0)
    is_taken = (magnitudes > limit) | (is_equal & (rank <= num_equal))
    to = before + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
    is_written = is_taken & (to < k)  # always, if all values are finite
    tl.store(sent + to, values, mask=is_written)
    tl.store(low + to, (at & 65535).to(tl.int16), mask=is_written)
    missed = tl.where(is_taken, values - values, values)  # NaN and infinity leave NaN
    place = _place(at, begins, shifts, num_stretches)
    tl.store(left + place, missed, mask=is_inside)
    at_numbers = numbers + program * 4
    tl.store(at_numbers, tl.sum(missed * missed, axis=0))
    tl.store(at_numbers + 1, tl.sum(values * values, axis=0))
    tl.store(at_numbers + 2, tl.max(_bits(missed), axis=0).to(tl.float32, bitcast=True))
