"""A worker whose every poll brings something: the transport must not keep what it has sent.

mpirun -n 1 python -m tests.support.programs.messages.never_idle
"""

from __future__ import annotations

from psdist.transport.mpi import MpiTransport
from tests.benchmarks.steps.round_trip import RoundTrip


def main() -> None:
    trip = RoundTrip(4096)
    most = 0
    for _ in range(300):
        trip.push()
        transport = trip.worker.transport
        assert isinstance(transport, MpiTransport)
        most = max(most, len(transport._sending))
    print(f"300 pushes, {most} sends kept at most")
    assert most < 64, most


if __name__ == "__main__":
    main()
