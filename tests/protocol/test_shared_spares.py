"""Spares that take the places of servers and of workers, whoever dies first: under seeded
schedules, on the virtual network. Whoever lives finishes, every update that was acknowledged is in
the final parameters once, and the joined histories prove it.

More by hand: ``python -m tests.protocol.test_shared_spares FIRST LAST [registrar]``.
"""

from __future__ import annotations

from tests.support.virtual.refills import by_hand
from tests.support.virtual.shared_spares import play_with_shared_spares

if __name__ == "__main__":
    by_hand(play_with_shared_spares)
