"""What workers have brought to a collective, as the answer that each of them gets; pure.

Everything to everybody would be the square of the workers. Payloads are there to be compared: each
different one is told once, and of many different ones the first few. Values are there to be summed:
the sum is told.

    collected(3, [enter_of_worker_0, enter_of_worker_1])
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psdist.errors import ProtocolError
from psdist.protocol.control import Collected, Enter
from psdist.protocol.ids import describe_workers

MOST_TOLD = 8
"""Different payloads in an answer."""
VALUE = np.dtype("<f8")


def collected(seq: int, entered: Sequence[Enter]) -> Collected:
    """``entered[worker]``. Values are summed in the order of the workers, so that all get the same
    bits in every run."""
    index_of: dict[bytes, int] = {}
    runs: list[int] = []
    for enter in entered:
        index = index_of.get(enter.payload)
        if index is None:
            index = len(index_of)
            if index < MOST_TOLD:
                index_of[enter.payload] = index
        if runs and runs[-2] == index:
            runs[-1] += 1
        else:
            runs += (index, 1)
    values = _sum(entered) if len(index_of) == 1 else b""
    return Collected(seq=seq, payloads=list(index_of), runs=runs, values=values, error="")


def _sum(entered: Sequence[Enter]) -> bytes:
    num_bytes = len(entered[0].values)
    wrong = [enter.worker for enter in entered if len(enter.values) != num_bytes]
    if wrong or num_bytes % VALUE.itemsize:
        raise ProtocolError(
            f"to {entered[0].name} worker 0 brought {num_bytes} bytes of numbers and "
            f"{describe_workers(wrong or [0])} other ones; numbers have {VALUE.itemsize} bytes, "
            "and whoever brings the same payload brings as many"
        )
    total = np.zeros(num_bytes // VALUE.itemsize)
    with np.errstate(all="ignore"):  # infinities and their differences are the user's
        for enter in entered:
            total += np.frombuffer(enter.values, VALUE)
    return total.astype(VALUE).tobytes()
