"""How the two ends of a line prove that they belong to the same job; pure.

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
import struct
from typing import Final

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 16
_MAGIC: Final = b"psdist-line 1\n"
_MAC_BYTES: Final = hashlib.sha256().digest_size
_RANK: Final = struct.Struct("<I")
CHALLENGE_BYTES: Final = len(_MAGIC) + NONCE_BYTES
REPLY_BYTES: Final = _RANK.size + NONCE_BYTES + _MAC_BYTES
ANSWER_BYTES: Final = _MAC_BYTES
GOODBYE: Final = b"."
"""What an end that closes its line on purpose says last."""


class GreetingError(Exception):
    """Who is at the other end is none of this job."""


def challenge(nonce: bytes) -> bytes:
    """What a hub says first; ``nonce``: random, another one for each line."""
    return _MAGIC + nonce


def reply(key: bytes, challenged: bytes, rank: int, nonce: bytes) -> bytes:
    """What the member of that rank says to a hub's challenge. Raises :class:`GreetingError`."""
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
