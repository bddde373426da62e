"""The end of lines that calls: on every rank, to each hub on another host.

    hubs = {0: HubAt(["10.0.0.1"], 4711, key)}
    member = Member(watch, hubs, rank=5, timeout_s=60, known=lambda: dead_ranks, on_verdict=end)
    member.close()

A thread for each line, which sleeps while the line is open. ``on_verdict`` is called in one of
them, once.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from psdist.reach import Watch
from psdist.reach.greeting import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    NONCE_BYTES,
    GreetingError,
    ask_on,
    end_of,
    is_answer,
    reply,
    say_goodbye,
)

logger = logging.getLogger("psdist")

CALLING_S: Final = 60.0
"""For so long a hub is called again."""
_CALL_S: Final = 5.0
_AGAIN_S: Final = 0.5
_LEAVE_S: Final = 1.0
_LOOK_S: Final = 0.25


class HubAt(NamedTuple):
    addresses: Sequence[str]
    """Those that it may be reached at; which one is tried."""
    port: int
    key: bytes


class Member:
    def __init__(
        self,
        watch: Watch,
        hubs: Mapping[int, HubAt],
        *,
        rank: int,
        timeout_s: float,
        on_verdict: Callable[[str], None],
        known: Callable[[], Collection[int]] = tuple,
        calling_s: float = CALLING_S,
    ) -> None:
        """``hubs``: by their ranks; ``rank``: this one; ``known()``: ranks whose death the job
        knows of. Where those are all hubs nothing is watched from here any more."""
        self._watch = watch
        self._rank = rank
        self._timeout_s = timeout_s
        self._known = known
        self._on_verdict = on_verdict
        self._calling_until_s = time.monotonic() + calling_s
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._has_told = False
        self._lines: dict[int, socket.socket] = {}
        self._threads = [
            threading.Thread(target=self._hold, args=(hub, at), name="psdist-reach", daemon=True)
            for hub, at in hubs.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Say goodbye on all lines; no verdict comes any more."""
        with self._lock:
            self._is_closing.set()
            for connection in self._lines.values():
                say_goodbye(connection)
        for thread in self._threads:  # a thread that is still calling a host is left alone
            thread.join(_LEAVE_S)

    # -- in the threads ------------------------------------------------------------------------

    def _hold(self, hub: int, at: HubAt) -> None:
        connection = self._called(at)
        if connection is None:
            return
        with connection:
            with self._lock:
                self._lines[hub] = connection
                self._watch.on_open(hub)
                if self._is_closing.is_set():
                    say_goodbye(connection)
            how = end_of(connection)
            with self._lock:
                del self._lines[hub]
                self._watch.on_end(hub, how, time.monotonic())
        logger.debug("the line to rank %d has ended: %s", hub, how.value)
        while self._watch.is_waiting and not self._is_closing.wait(_LOOK_S):
            with self._lock:
                verdict = self._watch.verdict(time.monotonic(), self._known())
                if verdict is None or self._has_told:
                    continue
                self._has_told = True
            self._on_verdict(verdict)
            return

    def _called(self, at: HubAt) -> socket.socket | None:
        """A line that both ends have proved; None where there is none to be had."""
        said = "no address of it is known"
        while not self._is_closing.is_set() and time.monotonic() < self._calling_until_s:
            for address in at.addresses:
                if self._is_closing.is_set():
                    return None
                try:
                    return self._greeted(address, at)
                except (OSError, GreetingError) as error:
                    said = f"{address}: {error}"
            self._is_closing.wait(_AGAIN_S)
        if not self._is_closing.is_set():
            logger.info(
                "no line to the coordinator's host, which is not watched from here: %s", said
            )
        return None

    def _greeted(self, address: str, at: HubAt) -> socket.socket:
        connection = socket.create_connection((address, at.port), timeout=_CALL_S)
        try:
            challenged = _received(connection, CHALLENGE_BYTES)
            replied = reply(at.key, challenged, self._rank, secrets.token_bytes(NONCE_BYTES))
            connection.sendall(replied)
            if not is_answer(at.key, challenged, replied, _received(connection, ANSWER_BYTES)):
                raise GreetingError("it does not know the key of this job")
            ask_on(connection, self._timeout_s)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    said = b""
    while len(said) < num_bytes:
        part = connection.recv(num_bytes - len(said))
        if not part:
            raise GreetingError("it has hung up")
        said += part
    return said
