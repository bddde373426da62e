"""What this host's interfaces have sent, of which a benchmark takes differences.

before = sent(); ...; since = sent() - before
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Counts(NamedTuple):
    num_bytes: int = 0
    """With headers, but what Ethernet adds on the wire."""
    packets: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(self.num_bytes - earlier.num_bytes, self.packets - earlier.packets)


def sent(text: str | None = None) -> Counts:
    """By all interfaces but loopback; zero where the kernel does not tell. ``text``: of
    /proc/net/dev."""
    if text is None:
        try:
            text = Path("/proc/net/dev").read_text(encoding="ascii")
        except OSError:
            return Counts()
    num_bytes = packets = 0
    for line in text.splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            columns = counts.split()
            num_bytes += int(columns[8])
            packets += int(columns[9])
    return Counts(num_bytes, packets)
