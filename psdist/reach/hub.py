"""The end of lines that listens: on the coordinator, and on its standby.

    hub = Hub(watch, key=key, num_lines=6, timeout_s=60, known=lambda: dead_ranks,
              decides=lambda: True, on_verdict=end)
    hub.port                     # for the members
    hub.verdict                  # None while all is well; the job's owner polls it
    hub.close()

A thread of its own, which sleeps while no line ends. ``on_verdict`` is called in it, ``GRACE_S``
after the verdict: by then the owner has ended the process, or is stuck.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from psdist.reach import Watch
from psdist.reach.greeting import (
    NONCE_BYTES,
    REPLY_BYTES,
    GreetingError,
    accepted,
    ask_on,
    challenge,
    end_of,
    say_goodbye,
)

logger = logging.getLogger("psdist")

GRACE_S: Final = 5.0
GREETING_S: Final = 10.0
"""For so long a caller may take to greet."""
OPENING_S: Final = 90.0
"""After this, who has not called cannot."""
_LOOK_S: Final = 0.25
_MOST_STRANGERS: Final = 64


@dataclass(slots=True)
class _Caller:
    """Somebody who has called and is not known yet."""

    connection: socket.socket
    nonce: bytes
    until_s: float
    said: bytearray = field(default_factory=bytearray)


class Hub:
    def __init__(
        self,
        watch: Watch,
        *,
        key: bytes,
        num_lines: int,
        timeout_s: float,
        known: Callable[[], Collection[int]],
        decides: Callable[[], bool],
        on_verdict: Callable[[str], None],
        opening_s: float = OPENING_S,
    ) -> None:
        """``known()``: ranks whose failure the job has noticed; ``decides()``: True if this hub
        decides. Raises :class:`OSError` if it cannot open a listening port."""
        self._watch = watch
        self._key = key
        self._num_lines = num_lines
        self._timeout_s = timeout_s
        self._known = known
        self._decides = decides
        self._on_verdict = on_verdict
        self._opening_until_s: float | None = time.monotonic() + opening_s
        self.verdict: str | None = None
        self._is_closing = False
        self._callers: dict[int, _Caller] = {}
        self._lines: dict[int, tuple[socket.socket, int]] = {}
        """By file descriptor: with the rank at the other end."""
        self._listening = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="psdist-reach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye on all lines; no verdict comes any more."""
        self._is_closing = True
        with suppress(OSError):  # the thread has ended already
            self._waker.send(b".")
        self._thread.join()

    # -- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing and self.verdict is None:
            for key, _ in self._selector.select(self._sleep_s()):
                self._ready(key.fd)
            now_s = time.monotonic()
            for caller in [each for each in self._callers.values() if now_s > each.until_s]:
                self._turn_away(caller)
            self._look_for_unopened(now_s)
            if self._watch.is_waiting and self._decides():
                self.verdict = self._watch.verdict(now_s, self._known())
        if not self._is_closing:
            self._wait_for_the_end()
        for connection, _ in self._lines.values():
            say_goodbye(connection)
            connection.close()
        for caller in list(self._callers.values()):
            self._turn_away(caller)
        self._selector.close()
        for each in (self._listening, self._woken, self._waker):
            each.close()

    def _sleep_s(self) -> float | None:
        if self._watch.is_waiting or self._callers:
            return _LOOK_S
        if self._opening_until_s is not None:
            return max(0.0, self._opening_until_s - time.monotonic())
        return None

    def _wait_for_the_end(self) -> None:
        assert self.verdict is not None
        until_s = time.monotonic() + GRACE_S
        while not self._is_closing:
            if time.monotonic() > until_s:
                self._on_verdict(self.verdict)
                return
            time.sleep(_LOOK_S)

    def _ready(self, descriptor: int) -> None:
        if descriptor == self._listening.fileno():
            self._take_call()
        elif descriptor in self._callers:
            self._hear(self._callers[descriptor])
        elif descriptor in self._lines:
            connection, rank = self._lines.pop(descriptor)
            self._selector.unregister(connection)
            how = end_of(connection)
            connection.close()
            logger.debug("the line of rank %d has ended: %s", rank, how.value)
            self._watch.on_end(rank, how, time.monotonic())

    def _take_call(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has hung up; or there are no descriptors left: it calls again
            return
        connection.setblocking(False)
        if len(self._callers) >= self._num_lines + _MOST_STRANGERS:
            self._turn_away(next(iter(self._callers.values())))
        caller = _Caller(
            connection, secrets.token_bytes(NONCE_BYTES), time.monotonic() + GREETING_S
        )
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(challenge(caller.nonce))
        except OSError:
            self._turn_away(caller)

    def _hear(self, caller: _Caller) -> None:
        connection = caller.connection
        try:
            said = connection.recv(REPLY_BYTES - len(caller.said))
            caller.said += said
            if said and len(caller.said) < REPLY_BYTES:
                return
            rank, answer = accepted(self._key, caller.nonce, bytes(caller.said))
            if not self._watch.may_open(rank):
                raise GreetingError(f"no line of rank {rank} is awaited")
            connection.send(answer)
            ask_on(connection, self._timeout_s)
        except (OSError, GreetingError) as error:
            logger.debug("a caller at the hub's port was turned away: %s", error)
            self._turn_away(caller)
            return
        del self._callers[connection.fileno()]
        self._lines[connection.fileno()] = (connection, rank)
        self._watch.on_open(rank)

    def _turn_away(self, caller: _Caller) -> None:
        del self._callers[caller.connection.fileno()]
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _look_for_unopened(self, now_s: float) -> None:
        """Log once which hosts are not monitored."""
        if self._opening_until_s is None:
            return
        if now_s < self._opening_until_s and len(self._lines) < self._num_lines:
            return
        self._opening_until_s = None
        if unwatched := self._watch.unwatched:
            logger.warning(
                "%s cannot call this host over TCP: host monitoring is off between them, and a cut "
                "is noticed by failures.wait_timeout_s only "
                "(GLOO_SOCKET_IFNAME=NAME names the interface to use)",
                ", ".join(unwatched),
            )
