from __future__ import annotations

import pytest

from psdist.reach.greeting import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    REPLY_BYTES,
    GreetingError,
    accepted,
    challenge,
    is_answer,
    reply,
)

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
NONCE, MINE = b"h" * NONCE_BYTES, b"m" * NONCE_BYTES


def test_both_ends_prove_the_key_and_the_member_its_rank() -> None:
    challenged = challenge(NONCE)
    replied = reply(KEY, challenged, 70_000, MINE)
    rank, answer = accepted(KEY, NONCE, replied)
    assert rank == 70_000
    assert is_answer(KEY, challenged, replied, answer)
    assert (len(challenged), len(replied), len(answer)) == (
        CHALLENGE_BYTES,
        REPLY_BYTES,
        ANSWER_BYTES,
    )
    assert KEY not in challenged + replied + answer


def test_a_member_with_another_key_is_turned_away() -> None:
    replied = reply(OTHER, challenge(NONCE), 3, MINE)
    with pytest.raises(GreetingError, match="does not know the key"):
        accepted(KEY, NONCE, replied)


def test_what_was_overheard_opens_no_second_line() -> None:
    replied = reply(KEY, challenge(NONCE), 3, MINE)
    with pytest.raises(GreetingError, match="does not know the key"):
        accepted(KEY, b"x" * NONCE_BYTES, replied)


@pytest.mark.parametrize("at", [0, 4, 4 + NONCE_BYTES, REPLY_BYTES - 1])
def test_a_reply_with_a_changed_byte_is_turned_away(at: int) -> None:
    replied = bytearray(reply(KEY, challenge(NONCE), 3, MINE))
    replied[at] ^= 1
    with pytest.raises(GreetingError, match="does not know the key"):
        accepted(KEY, NONCE, bytes(replied))


@pytest.mark.parametrize("length", [0, 1, REPLY_BYTES - 1, REPLY_BYTES + 1])
def test_a_reply_of_another_length_is_turned_away(length: int) -> None:
    replied = (reply(KEY, challenge(NONCE), 3, MINE) + b"\0")[:length]
    with pytest.raises(GreetingError):
        accepted(KEY, NONCE, replied)


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2 and more ".ljust(CHALLENGE_BYTES)])
def test_a_member_tells_another_service_nothing(said: bytes) -> None:
    with pytest.raises(GreetingError, match="no hub of psdist"):
        reply(KEY, said, 3, MINE)


def test_a_challenge_of_another_length_is_no_hub_s() -> None:
    with pytest.raises(GreetingError, match="no hub of psdist"):
        reply(KEY, challenge(NONCE) + b"x", 3, MINE)


def test_a_hub_that_does_not_know_the_key_is_found_out() -> None:
    challenged = challenge(NONCE)
    replied = reply(KEY, challenged, 3, MINE)
    forged = reply(OTHER, challenged, 3, MINE)
    _, answer = accepted(OTHER, NONCE, forged)
    assert not is_answer(KEY, challenged, replied, answer)
    # Nor is what the member itself has proved with an answer.
    assert not is_answer(KEY, challenged, replied, replied[-ANSWER_BYTES:])
