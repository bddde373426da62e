"""The ends of a line between hosts: the proof that both belong to one job, keepalive, the end.

    hub                                 member
    challenge(nonce)              ->
                                  <-    reply(key, nonce, rank, nonce of its own)
    rank, answer = accepted(...)  ->    is_answer(...)

The key went over MPI and never crosses the line. Both prove that they have it (HMAC-SHA256, RFC
2104) over both nonces, so that nothing that was overheard opens another line.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from typing import Final

from psdist.reach import End

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 16
_MAGIC: Final = b"psdist-line 1\n"
_MAC_BYTES: Final = hashlib.sha256().digest_size
_RANK: Final = struct.Struct("<I")
CHALLENGE_BYTES: Final = len(_MAGIC) + NONCE_BYTES
REPLY_BYTES: Final = _RANK.size + NONCE_BYTES + _MAC_BYTES
ANSWER_BYTES: Final = _MAC_BYTES
GOODBYE: Final = b"."
"""Last byte from an end that closes its line on purpose."""


class GreetingError(Exception):
    """The other end is not part of this job."""


def challenge(nonce: bytes) -> bytes:
    """First message of a hub; ``nonce``: random, another one for each line."""
    return _MAGIC + nonce


def reply(key: bytes, challenged: bytes, rank: int, nonce: bytes) -> bytes:
    """Answer of that rank's member to a hub's challenge. Raises :class:`GreetingError`."""
    if len(challenged) != CHALLENGE_BYTES or not challenged.startswith(_MAGIC):
        raise GreetingError("this is no hub of psdist")
    said = _RANK.pack(rank) + nonce
    return said + _mac(key, b"member", challenged[len(_MAGIC) :], said)


def accepted(key: bytes, nonce: bytes, replied: bytes) -> tuple[int, bytes]:
    """The rank of a member that has replied so to the challenge with that nonce, and the hub's
    answer. Raises :class:`GreetingError`."""
    said, mac = replied[:-_MAC_BYTES], replied[-_MAC_BYTES:]
    if len(replied) != REPLY_BYTES or not hmac.compare_digest(
        mac, _mac(key, b"member", nonce, said)
    ):
        raise GreetingError("it does not know the key of this job")
    (rank,) = _RANK.unpack_from(said)
    return rank, _mac(key, b"hub", nonce, said)


def is_answer(key: bytes, challenged: bytes, replied: bytes, answer: bytes) -> bool:
    """Whether a hub that has challenged, and was replied to so, has proved itself by its answer."""
    expected = _mac(key, b"hub", challenged[len(_MAGIC) :], replied[:-_MAC_BYTES])
    return hmac.compare_digest(answer, expected)


def _mac(key: bytes, who: bytes, nonce: bytes, said: bytes) -> bytes:
    return hmac.digest(key, who + nonce + said, "sha256")


_ASKS: Final = 4
"""Unanswered questions after which a line counts as silent."""
_MOST_S: Final = 32767
"""Maximum seconds that the kernel accepts."""
_CLOSED: Final = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


def ask_on(connection: socket.socket, timeout_s: float) -> None:
    """From now on this host's kernel asks the other's whether it is there, ``_ASKS`` times in
    ``timeout_s``, in whole seconds; the line ends when nothing at all has come for so long. (man 7
    tcp: keepalive, TCP_USER_TIMEOUT.)"""
    every_s = min(max(1, round(timeout_s / _ASKS)), _MOST_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKS)
    milliseconds = min(round(1000 * timeout_s), 2**31 - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def end_of(connection: socket.socket) -> End:
    """How a line has ended that has something to read; waits where it has not."""
    try:
        said = connection.recv(len(GOODBYE))
    except _CLOSED:
        return End.CLOSED
    except OSError:  # timed out, or the kernel's last word was that there is no way
        return End.SILENT
    return End.GOODBYE if said == GOODBYE else End.CLOSED


def say_goodbye(connection: socket.socket) -> None:
    """The other end is to know that this one ends on purpose. Does not wait."""
    try:
        connection.send(GOODBYE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        return
