"""What ranks and their parent tell each other is decoded with limits, or refused."""

from __future__ import annotations

import json

import pytest

from psdist import report as facts
from psdist.errors import InvariantError, ProtocolError
from psdist.report import (
    EndNow,
    Failed,
    Hello,
    PhaseReached,
    RoleTaken,
    SignalCame,
    Training,
    decode_fact,
    decode_order,
    encode,
)

TRAINING = Training(
    at_s=1.5, mode="sync", behind=1, ahead=2, samples=3, slowest=1, last={"loss": "0.1"}
)


@pytest.mark.parametrize(
    "fact",
    [
        Hello(rank=3),
        PhaseReached(phase="importing"),
        RoleTaken(who="worker 1 (rank 3 on n2)", role="worker"),
        TRAINING,
        Failed(status=130),
    ],
)
def test_a_fact_comes_back_as_it_was_sent(fact: facts.Fact) -> None:
    assert decode_fact(encode(fact)) == fact


def test_an_order_comes_back_as_it_was_sent() -> None:
    assert decode_order(encode(SignalCame(number=2))) == SignalCame(number=2)
    assert decode_order(encode(EndNow(number=15))) == EndNow(number=15)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "hello"},
        {"kind": "unheard of"},
        {"at_s": "soon"},
        {"behind": -1},
        {"others_wait": 1.5},
        {"mode": "x" * 65},
        {"last": {f"v{number}": "1" for number in range(9)}},
        {"last": {"loss": 0.1}},
        {"more": 1},
    ],
)
def test_what_is_no_fact_is_refused(change: dict[str, object]) -> None:
    packet = {**json.loads(encode(TRAINING)), **change}
    with pytest.raises(ProtocolError):
        decode_fact(json.dumps(packet).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"kind": "signal"}'])
def test_what_is_no_packet_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_order(data)
    with pytest.raises(ProtocolError):
        decode_fact(data)


def test_a_packet_beyond_the_limit_is_neither_sent_nor_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "PACKET_BYTES", 40)
    with pytest.raises(InvariantError, match="limit 40"):
        encode(TRAINING)
    with pytest.raises(ProtocolError, match="more than 40 bytes"):
        decode_fact(b"x" * 41)
