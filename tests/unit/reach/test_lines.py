"""Both ends over real sockets on this host; how lines fall silent is played on the test cluster
(tests/slurm/test_cuts.py)."""

from __future__ import annotations

import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from psdist.reach import End, Rank, Watch
from psdist.reach import hub as hub_module
from psdist.reach import member as member_module
from psdist.reach.greeting import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    REPLY_BYTES,
    ask_on,
    challenge,
    end_of,
    reply,
    say_goodbye,
)
from psdist.reach.hub import Hub
from psdist.reach.member import HubAt, Member

KEY = bytes(range(KEY_BYTES))
HERE = ["127.0.0.1"]
WORKERS = {rank: Rank("h2", f"worker {rank}") for rank in (1, 2)}
COORDINATOR = {0: Rank("h1", "server 0")}
SOON_S = 20.0


class RecordingWatch(Watch):
    def __init__(self, ranks: dict[int, Rank], *, timeout_s: float, is_hub: bool) -> None:
        super().__init__(ranks, host="h1" if is_hub else "h2", timeout_s=timeout_s, is_hub=is_hub)
        self.happened: queue.Queue[tuple[int, End | None]] = queue.Queue()

    def on_open(self, rank: int) -> None:
        super().on_open(rank)
        self.happened.put((rank, None))

    def on_end(self, rank: int, how: End, now_s: float) -> None:
        super().on_end(rank, how, now_s)
        self.happened.put((rank, how))

    def next(self) -> tuple[int, End | None]:
        return self.happened.get(timeout=SOON_S)


class Ends:
    """A hub, and the members that are made for it; all closed at the end."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, str]] = queue.Queue()
        self.watch = RecordingWatch(WORKERS, timeout_s=0.5, is_hub=True)
        self.decides = True
        self.known: set[int] = set()
        self.members: list[Member] = []
        self.hub = Hub(
            self.watch,
            key=KEY,
            num_lines=len(WORKERS),
            timeout_s=8.0,
            known=lambda: self.known,
            decides=lambda: self.decides,
            on_verdict=lambda text: self.told.put(("hub", text)),
        )

    def member(
        self, rank: int, *, key: bytes = KEY, addresses: list[str] = HERE, calling_s: float = SOON_S
    ) -> tuple[Member, RecordingWatch]:
        watch = RecordingWatch(COORDINATOR, timeout_s=0.5, is_hub=False)
        made = Member(
            watch,
            {0: HubAt(addresses, self.hub.port, key)},
            rank=rank,
            timeout_s=8.0,
            on_verdict=lambda text: self.told.put(("member", text)),
            calling_s=calling_s,
        )
        self.members.append(made)
        return made, watch


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for member in made.members:
        member.close()
    made.hub.close()


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_member_that_closes_has_said_goodbye(ends: Ends) -> None:
    member, _ = ends.member(2)
    assert ends.watch.next() == (2, None)
    member.close()
    assert ends.watch.next() == (2, End.GOODBYE)
    assert ends.hub.verdict is None


def test_a_hub_that_closes_has_said_goodbye(ends: Ends) -> None:
    _, watch = ends.member(1)
    assert watch.next() == (0, None)
    ends.watch.next()
    ends.hub.close()
    assert watch.next() == (0, End.GOODBYE)
    assert ends.told.empty()


def test_an_address_that_leads_elsewhere_is_passed_over(ends: Ends) -> None:
    # Nobody listens at the hub's port on the one, and the other is not even an address.
    _, watch = ends.member(1, addresses=["127.9.9.9.9", "127.0.0.1"])
    assert watch.next() == (0, None)


def test_a_member_calls_again_until_the_hub_is_there(ends: Ends) -> None:
    ends.hub.close()
    with closing(socket.create_server(("127.0.0.1", ends.hub.port))) as listening:
        listening.settimeout(SOON_S)
        _, watch = ends.member(1)
        for _ in range(2):
            connection, _ = listening.accept()
            connection.close()
    assert watch.happened.empty()


def test_a_member_that_calls_in_vain_ends_all_the_same(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()
    answered = threading.Event()

    def call(*_: object, **__: object) -> socket.socket:
        called.set()
        answered.wait(SOON_S)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", call)
    monkeypatch.setattr(member_module, "_LEAVE_S", 0.1)
    member, watch = ends.member(1, addresses=["192.0.2.1", "192.0.2.2"])
    assert called.wait(SOON_S)
    member.close()
    called.clear()
    answered.set()
    for thread in member._threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert not called.is_set()  # not the other address
    assert watch.happened.empty()


def test_who_does_not_know_the_key_gets_no_line(ends: Ends) -> None:
    _, watch = ends.member(1, key=bytes(KEY_BYTES), calling_s=0.3)
    ends.member(2)
    assert ends.watch.next() == (2, None)
    ends.members[0].close()
    assert ends.watch.happened.empty()
    assert watch.happened.empty()


def test_a_hub_that_does_not_know_the_key_gets_no_line() -> None:
    watch = RecordingWatch(COORDINATOR, timeout_s=0.5, is_hub=False)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(SOON_S)
        at = HubAt(HERE, listening.getsockname()[1], KEY)
        member = Member(watch, {0: at}, rank=1, timeout_s=8.0, on_verdict=print)
        try:
            with closing(listening.accept()[0]) as connection:
                connection.sendall(challenge(bytes(NONCE_BYTES)))
                assert len(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) == REPLY_BYTES
                connection.sendall(bytes(ANSWER_BYTES))
                connection.settimeout(SOON_S)
                assert connection.recv(1) == b""
        finally:
            member.close()
    assert watch.happened.empty()


def test_a_second_line_of_the_same_rank_is_turned_away(ends: Ends) -> None:
    ends.member(1)
    assert ends.watch.next() == (1, None)
    _, second = ends.member(1, calling_s=0.3)
    ends.members[1].close()
    assert ends.watch.happened.empty()
    assert second.happened.empty()


def test_strangers_take_no_place_from_members(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_MOST_STRANGERS", 3)
    monkeypatch.setattr(hub_module, "GREETING_S", 1000.0)
    strangers = [socket.create_connection(("127.0.0.1", ends.hub.port)) for _ in range(8)]
    try:
        ends.member(1)
        assert ends.watch.next() == (1, None)
        # The first were turned away for those that came later.
        strangers[0].settimeout(SOON_S)
        said = strangers[0].recv(CHALLENGE_BYTES)
        while said and (part := strangers[0].recv(64)):
            said += part
        assert len(said) == CHALLENGE_BYTES
    finally:
        for each in strangers:
            each.close()


def test_a_stranger_that_says_nothing_is_turned_away_in_time(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "GREETING_S", 0.1)
    with closing(socket.create_connection(("127.0.0.1", ends.hub.port))) as stranger:
        stranger.settimeout(SOON_S)
        assert len(stranger.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
        assert stranger.recv(1) == b""


def test_a_stranger_that_talks_nonsense_is_turned_away(ends: Ends) -> None:
    with closing(socket.create_connection(("127.0.0.1", ends.hub.port))) as stranger:
        stranger.settimeout(SOON_S)
        stranger.recv(CHALLENGE_BYTES)
        stranger.sendall(b"x" * REPLY_BYTES)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert ends.watch.happened.empty()


MEMBER = """
import sys, time
from psdist.reach.member import HubAt, Member
from psdist.reach import Rank, Watch
port, key = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
watch = Watch({0: Rank("h1", "server 0")}, host="h2", timeout_s=0.5, is_hub=False)
Member(watch, {0: HubAt(["127.0.0.1"], port, key)}, rank=1, timeout_s=8.0, on_verdict=print)
time.sleep(600)
"""


def test_a_stopped_process_keeps_its_line_and_a_killed_one_is_told_after_a_while(
    ends: Ends,
) -> None:
    command = [sys.executable, "-c", MEMBER, str(ends.hub.port), KEY.hex()]
    process = subprocess.Popen(command)
    try:
        assert ends.watch.next() == (1, None)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert ends.watch.happened.empty()
    finally:
        process.kill()
        process.wait()
    assert ends.watch.next() == (1, End.CLOSED)
    wait_until(lambda: ends.hub.verdict is not None)
    assert ends.hub.verdict is not None
    assert ends.hub.verdict.startswith("worker 1 ended without a word, and for 0.5 s ")


def test_a_verdict_that_nobody_heeds_is_carried_out_by_the_hub(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "GRACE_S", 0.2)
    caller = fake_member(ends, 2)
    assert ends.watch.next() == (2, None)
    caller.close()
    who, text = ends.told.get(timeout=SOON_S)
    assert (who, text) == ("hub", ends.hub.verdict)


def test_a_verdict_that_is_heeded_is_not_carried_out_twice(ends: Ends) -> None:
    caller = fake_member(ends, 2)
    assert ends.watch.next() == (2, None)
    caller.close()
    wait_until(lambda: ends.hub.verdict is not None)
    ends.hub.close()
    assert ends.told.empty()


def test_a_standby_decides_nothing_until_it_is_the_coordinator(ends: Ends) -> None:
    ends.decides = False
    caller = fake_member(ends, 2)
    assert ends.watch.next() == (2, None)
    caller.close()
    assert ends.watch.next() == (2, End.CLOSED)
    time.sleep(1.2)
    assert ends.hub.verdict is None
    ends.decides = True
    wait_until(lambda: ends.hub.verdict is not None)


def test_a_death_that_the_job_knows_of_is_no_verdict(ends: Ends) -> None:
    ends.known = {2}
    caller = fake_member(ends, 2)
    assert ends.watch.next() == (2, None)
    caller.close()
    assert ends.watch.next() == (2, End.CLOSED)
    time.sleep(1.2)
    assert ends.hub.verdict is None


def fake_member(ends: Ends, rank: int) -> socket.socket:
    """A line of that rank, whose end does as the test wants."""
    connection = socket.create_connection(("127.0.0.1", ends.hub.port), timeout=SOON_S)
    challenged = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    connection.sendall(reply(KEY, challenged, rank, bytes(16)))
    assert len(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
    return connection


def test_a_member_whose_hub_has_died_ends_after_a_while_once() -> None:
    told: queue.Queue[str] = queue.Queue()
    made = Ends()
    watch = RecordingWatch(COORDINATOR, timeout_s=0.5, is_hub=False)
    member = Member(
        watch,
        {0: HubAt(HERE, made.hub.port, KEY)},
        rank=1,
        timeout_s=8.0,
        on_verdict=told.put,
    )
    try:
        assert watch.next() == (0, None)
        made.watch.next()
        ((line, _),) = made.hub._lines.values()
        line.shutdown(socket.SHUT_RDWR)  # as its kernel does when a process is gone
        assert watch.next() == (0, End.CLOSED)
        assert told.get(timeout=SOON_S).startswith("server 0 ended without a word")
    finally:
        member.close()
        made.hub.close()
    assert told.empty()


def test_a_member_that_loses_both_hubs_tells_once() -> None:
    told: queue.Queue[str] = queue.Queue()
    made = {0: Ends(), 2: Ends()}
    hubs = {0: COORDINATOR[0], 2: Rank("h3", "server 1")}
    watch = RecordingWatch(hubs, timeout_s=0.5, is_hub=False)
    member = Member(
        watch,
        {hub: HubAt(HERE, each.hub.port, KEY) for hub, each in made.items()},
        rank=1,
        timeout_s=8.0,
        on_verdict=told.put,
    )
    try:
        assert {watch.next()[0], watch.next()[0]} == {0, 2}
        for each in made.values():
            each.watch.next()
            ((line, _),) = each.hub._lines.values()
            line.shutdown(socket.SHUT_RDWR)
        assert told.get(timeout=SOON_S).startswith("server 0, server 1 ended without a word")
        time.sleep(0.6)  # both threads have looked again
    finally:
        member.close()
        for each in made.values():
            each.hub.close()
    assert told.empty()


def test_hosts_that_cannot_call_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = RecordingWatch(WORKERS, timeout_s=0.5, is_hub=True)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        hub = Hub(
            watch, key=KEY, num_lines=2, timeout_s=8.0, known=set, decides=lambda: True,
            on_verdict=print, opening_s=0.1,
        )  # fmt: skip
        wait_until(lambda: bool(caplog.records))
        time.sleep(0.3)
        hub.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("h2 cannot call this host over TCP")


def test_the_kernel_asks_often_enough_to_know_in_time() -> None:
    with closing(socket.socket()) as connection:
        for timeout_s, every_s in ((60.0, 15), (1.0, 1), (10.0, 2)):
            ask_on(connection, timeout_s)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            tcp = socket.IPPROTO_TCP
            assert connection.getsockopt(tcp, socket.TCP_KEEPIDLE) == every_s
            assert connection.getsockopt(tcp, socket.TCP_KEEPINTVL) == every_s
            assert connection.getsockopt(tcp, socket.TCP_KEEPCNT) == 4
            assert connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 1000 * timeout_s
        ask_on(connection, 1e9)
        assert connection.getsockopt(tcp, socket.TCP_KEEPIDLE) == 32767


class Raising:
    """A connection whose kernel reports this."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def recv(self, _num_bytes: int) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (TimeoutError(110, "Connection timed out"), End.SILENT),
        (OSError(113, "No route to host"), End.SILENT),
        (OSError(101, "Network is unreachable"), End.SILENT),
        (ConnectionResetError(104, "Connection reset by peer"), End.CLOSED),
        (BrokenPipeError(32, "Broken pipe"), End.CLOSED),
    ],
)
def test_what_the_kernel_says_of_a_line(error: OSError, how: End) -> None:
    assert end_of(Raising(error)) is how  # type: ignore[arg-type]


def test_goodbye_on_a_line_that_has_ended_is_no_error() -> None:
    one, other = socket.socketpair()
    with closing(other):
        one.close()
        say_goodbye(one)
        say_goodbye(other)
