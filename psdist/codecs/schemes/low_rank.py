"""lowrank:K: a matrix by K columns and K rows whose products add up to something near it.

    codec = LowRank(4)
    of_chunk = codec.of([Matrix(width=512, before=0, length=512 * 256)])

PowerSGD (Vogels, Karimireddy and Jaggi, arXiv 1905.13727, algorithm 1): with M [rows, width] and Q
[width, K] what the last encoding has given,

    P = orthonormal(M Q),    Q = M' P,    sent: P and Q;    decoded: P Q'

One step of the power method from where the last one has ended comes near the best K directions
where M changes slowly; a first Q is drawn. P P' is a projection, so the error is never larger than
the matrix. Each group sends its own P and Q, since servers add what they have decoded; in the paper
all workers add up P, then Q.

Each stretch of a piece that chunks cut is a matrix of its own, padded with zeros to whole rows; the
decoded padding is dropped. Vectors are sent as they are, in float32. So are matrices whose P and Q
have no fewer values. Decoding adds in one order, without a library's matrix product, so that both
ends have the same bits on any machine. Encoding depends on that library, as gradients do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from psdist.codecs import Matrix, MatrixCodec, require_size
from psdist.protocol.header import CodecCode

_SMALLEST: Final = torch.finfo(torch.float32).tiny
_LARGEST: Final = torch.finfo(torch.float32).max * (1 - 2.0**-10)
_BLOCK: Final = 1 << 15
"""Values that are decoded at a time: they stay in a core's cache while products are added."""


class LowRank(MatrixCodec):
    code = int(CodecCode.LOW_RANK)

    def __init__(self, rank: int, matrices: Sequence[Matrix] | None = None) -> None:
        """``matrices``: the values, one matrix after another; None: one vector."""
        self.name = f"lowrank:{rank}"
        self._rank = rank
        self._matrices = matrices

    def of(self, matrices: Sequence[Matrix]) -> LowRank:
        return LowRank(self._rank, tuple(matrices))

    def num_bytes(self, num_values: int) -> int:
        return 4 * sum(self._num_sent(matrix) for matrix in self._all(num_values))

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        starts = [None] * len(self._all(len(values)))
        return self.encode_from(values, seed=seed, starts=starts)[0]

    def encode_from(
        self, values: torch.Tensor, *, seed: int, starts: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The new start of each matrix is Q', [K, width]."""
        sent: list[torch.Tensor] = []
        after: list[torch.Tensor | None] = []
        at = 0
        for number, (matrix, start) in enumerate(zip(self._all(len(values)), starts, strict=True)):
            part = values[at : at + matrix.length]
            at += matrix.length
            if self._is_coded(matrix):
                columns, rows = self._factors(_filled_up(part, matrix), start, (seed, number))
                sent += [columns.reshape(-1), rows.reshape(-1)]
                after.append(rows)
            else:
                sent.append(part)
                after.append(None)
        return torch.cat(sent).view(torch.uint8), after

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        sent, parts, at = payload.view(torch.float32), [], 0
        for matrix in self._all(num_values):
            if self._is_coded(matrix):
                middle = at + self._rank * matrix.rows
                stop = middle + self._rank * matrix.width
                columns = sent[at:middle].view(self._rank, matrix.rows)
                rows = sent[middle:stop].view(self._rank, matrix.width)
                first = matrix.before
                parts.append(_product(columns, rows).view(-1)[first : first + matrix.length])
            else:
                stop = at + matrix.length
                parts.append(sent[at:stop])
            at = stop
        return torch.cat(parts)

    def _all(self, num_values: int) -> Sequence[Matrix]:
        return [Matrix(0, 0, num_values)] if self._matrices is None else self._matrices

    def _is_coded(self, matrix: Matrix) -> bool:
        return matrix.width > 0 and self._rank * (matrix.rows + matrix.width) < matrix.length

    def _num_sent(self, matrix: Matrix) -> int:
        if not self._is_coded(matrix):
            return matrix.length
        return self._rank * (matrix.rows + matrix.width)

    def _factors(
        self, matrix: torch.Tensor, start: torch.Tensor | None, seed: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """P', [K, rows], and Q', [K, width]."""
        num_rows, width = matrix.shape
        columns = torch.zeros(self._rank, num_rows)
        scale = float(matrix.abs().amax())
        if not np.isfinite(scale):
            return columns, torch.full((self._rank, width), torch.nan)
        if scale < _SMALLEST:
            return columns, torch.zeros(self._rank, width)
        scaled = matrix / scale
        orthonormal, _ = torch.linalg.qr((scaled @ self._directions(start, width, seed)).double())
        columns = orthonormal.t().to(torch.float32).contiguous()
        # The norm of a column of M is at most the root of its rows times its largest value. The
        # decoded column is no longer: a part of the largest floats is left out.
        rows = (columns @ scaled).mul_(min(scale, _LARGEST / num_rows**0.5))
        return columns, rows

    def _directions(
        self, start: torch.Tensor | None, width: int, seed: tuple[int, int]
    ) -> torch.Tensor:
        """Q, of columns of length 1; what has none is drawn, by numpy's Philox (a counter: the same
        on all machines and in all versions)."""
        found = torch.zeros(self._rank, width, dtype=torch.float64)
        if start is not None and start.shape == found.shape:
            found.copy_(start)
        lengths = found.square().sum(dim=1, keepdim=True).sqrt()
        is_drawn = ~((lengths > 0) & lengths.isfinite())
        if bool(is_drawn.any()):
            bits = np.random.Philox(key=np.array(seed, np.uint64)).random_raw(found.numel())
            drawn = torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53 - 0.5).view_as(found)
            found = torch.where(is_drawn, drawn, found)
            lengths = found.square().sum(dim=1, keepdim=True).sqrt()
        return (found / lengths).t().to(torch.float32)


def _filled_up(part: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """[rows, width], zero where the stretch has nothing."""
    behind = matrix.rows * matrix.width - matrix.before - matrix.length
    if matrix.before or behind:
        part = torch.nn.functional.pad(part, (matrix.before, behind))
    return part.view(matrix.rows, matrix.width)


def _product(columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[rows, width]: each product is rounded, then added to those before, in the order of K."""
    num_rows, width = columns.shape[1], rows.shape[1]
    result = torch.empty(num_rows, width, dtype=torch.float32)
    step = max(1, _BLOCK // width)
    products = torch.empty(min(step, num_rows), width, dtype=torch.float32)
    for first in range(0, num_rows, step):
        block = result[first : first + step]
        for number, (column, row) in enumerate(zip(columns, rows, strict=True)):
            into = block if number == 0 else products[: len(block)]
            torch.mul(column[first : first + step, None], row, out=into)
            if number:
                block += into
    return result
