"""The seam for the network: what servers and workers may ask of it.

Two implementations: :mod:`psdist.transport.mpi` and :mod:`psdist.transport.virtual` (one process,
a virtual clock, seeded delays). The loops of servers and workers drive either, and never know
which.

Peers are *stable ids* (:mod:`psdist.protocol.roles`), never MPI ranks. The rules:

* ``send`` does not block. The frame and its payload belong to the network until the matching
  :class:`Sent` event, or until the answer has come, which proves the same: **the bytes of an open
  send never change**.
* A message without payload, and every control message, arrives by itself as :class:`Arrived` or
  :class:`ControlArrived`. A message with payload is first *offered*; its bytes stay with the
  sender until ``accept`` names the frame to receive them into. That is how a server's memory
  stays bounded however many workers push at once.
* Messages of one pair of peers are offered in the order they were sent.
* Nothing here waits: ``poll`` returns the next event or None.

    transport.send(server_id(0), frame)
    while (event := transport.poll()) is not None: ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from psdist.errors import WaitTimeoutError
from psdist.protocol.control import HEADER_BYTES, Control, Header


class Frame:
    """A header and the payload that goes with it; ``accept`` fills the payload only.

    ``payload`` is writable memory of at most ``capacity`` bytes, or None for a message that has
    no bytes (a simulation with sizes alone, an empty push). ``owner`` is for whoever made the
    frame.
    """

    __slots__ = ("capacity", "header", "owner", "payload")

    def __init__(self, payload: memoryview | None = None, *, capacity: int | None = None) -> None:
        self.header = bytearray(HEADER_BYTES)
        self.payload = payload
        self.capacity = capacity if capacity is not None else (len(payload) if payload else 0)
        self.owner: Any = None


@dataclass(slots=True)
class Offered:
    """A message with payload waits at its sender; ``accept(ticket, frame)`` brings it."""

    peer: int
    kind: int
    chunk: int
    num_bytes: int
    ticket: Any


@dataclass(slots=True)
class Arrived:
    """A data message is here. ``frame`` is the one given to ``accept`` (None without payload)."""

    peer: int
    header: Header
    frame: Frame | None


@dataclass(slots=True)
class ControlArrived:
    peer: int
    message: Control


@dataclass(slots=True)
class Sent:
    """The memory of ``frame`` is the caller's again."""

    frame: Frame


Event = Offered | Arrived | ControlArrived | Sent


class Transport(Protocol):
    """One endpoint of the network."""

    @property
    def me(self) -> int:
        """This endpoint's stable id."""
        ...

    def send(self, peer: int, frame: Frame, *, num_bytes: int = 0) -> None:
        """Send the frame's header and the first ``num_bytes`` of its payload.

        The header must be packed already, and its ``length`` is ``num_bytes``.
        """
        ...

    def send_control(self, peer: int, message: Control) -> None:
        """Send a control message; nothing to look after."""
        ...

    def accept(self, ticket: Any, frame: Frame) -> None:
        """Receive an offered message into ``frame``; :class:`Arrived` follows."""
        ...

    def poll(self) -> Event | None:
        """The next event, if any; makes progress."""
        ...

    def now(self) -> float:
        """Seconds on this network's clock."""
        ...


class Waiting:
    """What to do between two polls that brought nothing: spin, or back off; warn; give up.

    Blocking MPI calls take a whole core; with more ranks than cores that starves the ranks one
    waits for. So a wait spins only where a core is to spare, and otherwise sleeps for times that
    double from ``FIRST_SLEEP_S`` to ``LAST_SLEEP_S``.
    """

    FIRST_SLEEP_S = 20e-6
    LAST_SLEEP_S = 1e-3
    SPINS = 64
    """Empty polls before the first sleep: a reply that is on its way comes within these."""

    def __init__(
        self,
        *,
        is_spinning: bool,
        warn_s: float = 30.0,
        timeout_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock()`` gives seconds, ``sleep`` takes them."""
        self.is_spinning = is_spinning
        self.warn_s = warn_s
        self.timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        """Something happened: start over."""
        self._empty_polls = 0
        self._sleep_s = self.FIRST_SLEEP_S
        self._since: float | None = None
        self._warn_at_s = self.warn_s

    def idle(self, what: str) -> bool:
        """One empty poll. True when it is time to warn; raises :class:`WaitTimeoutError`."""
        self._empty_polls += 1
        if self._empty_polls <= self.SPINS:
            return False
        if self._empty_polls % 256 == 0 or not self.is_spinning:
            now = self._clock()
            if self._since is None:
                self._since = now
            waited_s = now - self._since
            if waited_s > self.timeout_s:
                raise WaitTimeoutError(
                    f"waited {waited_s:.0f} s for {what}, longer than wait_timeout_s = "
                    f"{self.timeout_s:g}; raise it if such waits are normal here"
                )
            if not self.is_spinning:
                self._sleep(self._sleep_s)
                self._sleep_s = min(2 * self._sleep_s, self.LAST_SLEEP_S)
            if waited_s > self._warn_at_s:
                self._warn_at_s *= 2
                return True
        return False
