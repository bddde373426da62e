"""topk and randk: a few of the values, exactly; all others are 0 for the receiver.

    TopK(0.01)                      # the 1 % of largest magnitude
    RandK(0.01, is_scaled=False)    # 1 %, drawn by the seed: no index is sent

TopK's k values are exact: of those as large as the smallest that is sent the first ones. They are
found among candidates, those above a threshold that a sample suggests; where it was too high, among
all. RandK draws one value out of each of k neighbouring stretches. ``is_scaled`` multiplies it by
the stretch's length, which is right on average; with feedback it must not be, because then what is
left out comes later (an unscaled draw is a contraction, a scaled one is none).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from psdist.codecs import OnDevice, has_only_finite, require_size
from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode

_RUN = 1 << 16
"""Indexes are 16 bits within runs of this many values; each run has its number of values."""
_SAMPLE = 1 << 14
_FEW = 1 << 15
"""Up to this many values, all are sorted."""


def num_sent(ratio: float, num_values: int) -> int:
    """How many of the values are sent: one at least."""
    return max(1, min(num_values, round(ratio * num_values)))


class TopK(OnDevice):
    code = int(CodecCode.TOPK)

    def __init__(self, ratio: float) -> None:
        self.name = f"topk:{ratio:g}"
        self.ratio = ratio

    def num_bytes(self, num_values: int) -> int:
        num_runs = -(-num_values // _RUN)
        return 4 * num_runs + 6 * num_sent(self.ratio, num_values)

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        k = num_sent(self.ratio, len(values))
        if has_only_finite(values):
            places = _largest(values, k)
            sent = values.numpy()[places]
        else:
            places, sent = np.arange(k), np.full(k, np.nan, np.float32)
        starts = np.arange(0, len(values) + _RUN, _RUN)
        counts = np.diff(np.searchsorted(places, starts)).astype("<u4")
        parts = counts, sent, (places % _RUN).astype("<u2")
        return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))

    def encode_on_device(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The values are sorted: how many lie above a threshold would be an answer to wait for."""
        k, device = num_sent(self.ratio, len(values)), values.device
        is_finite = values.isfinite().all()
        # A stable sort has the first ones first among those that are equal.
        order = values.abs().sort(descending=True, stable=True).indices[:k]
        places = torch.where(is_finite, order.sort().values, torch.arange(k, device=device))
        sent = values.gather(0, places).masked_fill_(~is_finite, torch.nan)
        starts = torch.arange(0, len(values) + _RUN, _RUN, device=device)
        counts = torch.searchsorted(places, starts).diff().to(torch.int32)
        low = (places % _RUN).to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2]
        parts = counts.view(torch.uint8), sent.view(torch.uint8), low.reshape(-1)
        seen = torch.zeros_like(values).scatter_(0, places, sent)
        return torch.cat(parts), seen

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        data, k = payload.numpy(), num_sent(self.ratio, num_values)
        num_runs = -(-num_values // _RUN)
        counts = data[: 4 * num_runs].view("<u4").astype(np.int64)
        sent = data[4 * num_runs : 4 * (num_runs + k)].view(np.float32)
        low = data[4 * (num_runs + k) :].view("<u2")
        if counts.sum() != k:
            raise ProtocolError(f"codec {self.name}: {counts.sum()} values are told, {k} belong")
        places = np.repeat(np.arange(num_runs, dtype=np.int64) * _RUN, counts) + low
        if (np.diff(places) <= 0).any() or places[-1] >= num_values:
            raise ProtocolError(f"codec {self.name}: indexes are not ascending in {num_values}")
        values = np.zeros(num_values, np.float32)
        values[places] = sent
        return torch.from_numpy(values)


def _largest(values: torch.Tensor, k: int) -> npt.NDArray[np.int64]:
    """Where the ``k`` of largest magnitude stand, ascending."""
    magnitudes: npt.NDArray[np.float32] = values.abs().numpy()
    num = len(magnitudes)
    if num > _FEW and k < num // 4:
        sample = magnitudes[:: num // _SAMPLE]
        # So many of the sample lie above the threshold that too few of all would be a rarity.
        expected = k * len(sample) / num
        rank = min(len(sample), int(expected + 4 * expected**0.5) + 4)
        places = np.flatnonzero(magnitudes >= _smallest_of_largest(sample, rank))
        if len(places) >= k:
            return places[_are_largest(magnitudes[places], k)]
    return np.flatnonzero(_are_largest(magnitudes, k))


def _are_largest(magnitudes: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.bool_]:
    """Which are the ``k`` largest, of equal ones the first."""
    smallest = _smallest_of_largest(magnitudes, k)
    chosen: npt.NDArray[np.bool_] = magnitudes > smallest
    num_above = np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitudes == smallest)[: k - num_above]] = True
    return chosen


def _smallest_of_largest(magnitudes: npt.NDArray[np.float32], k: int) -> np.float32:
    place = len(magnitudes) - k
    smallest: np.float32 = np.partition(magnitudes, place)[place]
    return smallest


class RandK:
    code = int(CodecCode.RANDK)

    def __init__(self, ratio: float, *, is_scaled: bool) -> None:
        self.name = f"randk:{ratio:g}"
        self.ratio = ratio
        self._is_scaled = is_scaled

    def num_bytes(self, num_values: int) -> int:
        return 8 + 4 * num_sent(self.ratio, num_values)

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        places, lengths = _drawn(seed, num_sent(self.ratio, len(values)), len(values))
        sent = values.numpy()[places]
        if self._is_scaled:
            sent = np.clip(sent * lengths.astype(np.float32), -_MAX, _MAX)
        if not has_only_finite(values):
            sent = np.full(len(places), np.nan, np.float32)
        head = np.array([seed], "<u8")
        return torch.from_numpy(np.concatenate([head.view(np.uint8), sent.view(np.uint8)]))

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        seed = int.from_bytes(payload[:8].numpy().tobytes(), "little")
        places, _ = _drawn(seed, num_sent(self.ratio, num_values), num_values)
        values = np.zeros(num_values, np.float32)
        values[places] = payload[8:].numpy().view(np.float32)
        return torch.from_numpy(values)


_MAX = np.finfo(np.float32).max


def _drawn(
    seed: int, k: int, num_values: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One place of each of ``k`` stretches, and the stretches' lengths; by numpy's Philox, which is
    a counter: the same on all machines and in all versions."""
    bounds = np.arange(k + 1, dtype=np.int64) * num_values // k
    lengths = np.diff(bounds)
    drawn = np.random.Philox(key=seed).random_raw(k)
    # The upper 32 bits, times the length, is at most so much above: no stretch has 2^32 values.
    offsets = ((drawn >> np.uint64(32)) * lengths.astype(np.uint64)) >> np.uint64(32)
    return bounds[:-1] + offsets.astype(np.int64), lengths
