"""The line between a parent and a rank: output, input, signals, and the end of either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from psdist.commands.launch.ranks import Rank, RankProcess, Ranks
from psdist.errors import LaunchError
from psdist.ranks.failure import Interrupted
from psdist.ranks.parent_link import connect_to_parent
from psdist.report import (
    KERNEL_VARIABLE,
    PARENT_VARIABLE,
    EndNow,
    Fact,
    Failed,
    Finished,
    Hello,
    InputWanted,
    PhaseReached,
    RoleTaken,
    SignalCame,
)
from tests.support.mpirun import REPOSITORY

TIMEOUT_S = 60.0
# In the background a shell ignores SIGINT for its children, nohup SIGHUP: not what is tested here.
START = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from psdist.ranks.parent_link import connect_to_parent
from psdist.ranks.failure import Interrupted
link = connect_to_parent(os.environ, rank=3)
"""


class Child:
    """A rank in a process of its own, and the parent's end of its line."""

    def __init__(self, ranks: Ranks, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ranks.environment(), "PYTHONUNBUFFERED": "1"},
            cwd=REPOSITORY,
        )
        accepted: list[Rank] = []
        wait_until(lambda: bool(accepted.extend(filter(None, [ranks.accept()])) or accepted))
        (self.rank,) = accepted
        assert self.next_fact() == Hello(rank=3)
        self.pipes = self.rank.welcome()

    def next_fact(self) -> Fact:
        facts: list[Fact] = []
        wait_until(lambda: bool(facts.extend(self.rank.receive()) or facts))
        (fact,) = facts
        return fact

    def line(self) -> bytes:
        """The next line that it writes, however many writes that takes."""
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self.pipes[0], 1)
            assert part, line
            line += part
        return line

    def output(self) -> bytes:
        """All that it writes until it ends."""
        with os.fdopen(self.pipes[0], "rb") as file:
            return file.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pipe in self.pipes:
            try:
                os.close(pipe)
            except OSError:
                continue


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def child(program: str) -> Iterator[tuple[Child, Ranks]]:
    with Ranks() as ranks:
        started = Child(ranks, program)
        try:
            yield started, ranks
        finally:
            started.end()


def test_what_a_rank_writes_arrives_in_the_parents_pipes_and_outlives_it() -> None:
    with child("os.write(1, b'one\\0'); os.write(2, b'two'); link.finished()") as (rank, _):
        assert rank.process.wait(TIMEOUT_S) == 0
        assert rank.output() == b"one\0"
        assert os.read(rank.pipes[1], 100) == b"two"
        assert rank.process.communicate()[0] == b""


def test_the_kernel_says_which_process_a_rank_is() -> None:
    with child("time.sleep(60)") as (rank, ranks):
        assert rank.rank.process.pid == rank.process.pid
        assert [each.process for each in ranks.alive] == [rank.rank.process]


def test_facts_arrive_in_order() -> None:
    program = (
        "link.reach('placing'); time.sleep(0.1); link.take_role('worker 1', 'worker')\n"
        "time.sleep(0.1); link.failed(130); time.sleep(60)"
    )
    with child(program) as (rank, _):
        assert rank.next_fact() == PhaseReached(phase="placing")
        assert rank.next_fact() == RoleTaken(who="worker 1", role="worker")
        assert rank.next_fact() == Failed(status=130)


@pytest.mark.parametrize("has_asked", [True, False])
def test_the_parents_input_is_for_the_rank_that_asks_for_it(
    has_asked: bool, tmp_path: Path
) -> None:
    (tmp_path / "input").write_bytes(b"two\nlines")
    ask = "link.take_input(); " if has_asked else ""
    with child(ask + "print(sys.stdin.read()); link.finished()") as (rank, _):
        kept = os.dup(0)
        try:
            with (tmp_path / "input").open("rb") as file:
                os.dup2(file.fileno(), 0)
                if has_asked:
                    assert rank.next_fact() == InputWanted()
                    rank.rank.give_input()
        finally:
            os.dup2(kept, 0)
            os.close(kept)
        assert rank.output() == (b"two\nlines\n" if has_asked else b"\n")


# In short sleeps: a signal that comes just before one begins does not interrupt it.
WAIT_FOR_SIGNALS = """
link.take_role("it", {role!r})
try:
    with link.script():
        print("waiting")
        while True:
            time.sleep(0.1)
except KeyboardInterrupt as error:
    print(type(error).__name__, getattr(error, "number", 2))
    link.finished()
"""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, b"KeyboardInterrupt 2\n"),
        (signal.SIGTERM, b"Interrupted 15\n"),
        (signal.SIGHUP, b"Interrupted 1\n"),
    ],
)
def test_a_signal_of_the_parents_interrupts_the_script(number: int, said: bytes) -> None:
    with child(WAIT_FOR_SIGNALS.format(role="worker")) as (rank, _):
        assert rank.next_fact() == RoleTaken(who="it", role="worker")
        assert rank.line() == b"waiting\n"
        rank.rank.tell(SignalCame(number=number))
        assert rank.output() == said
        assert rank.process.wait(TIMEOUT_S) == 0


def test_a_signal_of_the_launchers_ends_the_rank_at_once() -> None:
    with child(WAIT_FOR_SIGNALS.format(role="worker")) as (rank, _):
        assert rank.line() == b"waiting\n"
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_a_server_gets_no_signals_of_scripts_and_is_told_to_end() -> None:
    program = """
link.take_role("it", "registrar")
while link.end_signal is None:
    time.sleep(0.01)
print("end", link.end_signal)
link.finished()
"""
    with child(program) as (rank, _):
        rank.rank.tell(SignalCame(number=signal.SIGTERM))
        rank.rank.tell(SignalCame(number=signal.SIGUSR1))
        rank.rank.tell(EndNow(number=signal.SIGINT))
        assert rank.output() == b"end 2\n"


@pytest.mark.parametrize("work", ["time.sleep(60)", "while True: pass", "os.read(0, 1)"])
def test_a_rank_whose_parent_hangs_up_ends_itself_whatever_it_does(work: str) -> None:
    with child(f"link.take_input() if 'read' in {work!r} else None\n{work}") as (rank, ranks):
        if "read" in work:
            assert rank.next_fact() == InputWanted()
            reading, writing = os.pipe()
            kept = os.dup(0)
            os.dup2(reading, 0)
            rank.rank.give_input()
            os.dup2(kept, 0)
        ranks.hang_up()
        assert rank.process.wait(TIMEOUT_S) == 1
        if "read" in work:
            for end in (reading, writing, kept):
                os.close(end)


def test_a_rank_that_has_finished_outlives_its_parent() -> None:
    with child("link.finished(); time.sleep(2); print('done')") as (rank, ranks):
        assert rank.next_fact() == Finished()
        ranks.hang_up()
        assert rank.output() == b"done\n"
        assert rank.process.wait(TIMEOUT_S) == 0


def test_the_end_of_a_rank_is_noticed() -> None:
    with child("os._exit(7)") as (rank, ranks):
        wait_until(lambda: not list(rank.rank.receive()) and not rank.rank.is_connected)
        assert ranks.connected == []
        rank.process.wait(TIMEOUT_S)
        assert not rank.rank.process.is_alive


def test_only_this_user_can_enter_the_folder_of_the_socket_and_it_goes_in_the_end() -> None:
    with Ranks() as ranks:
        folder = Path(ranks.environment()[PARENT_VARIABLE]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_folder_with_a_long_path_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with Ranks() as ranks:
        assert ranks.environment()[PARENT_VARIABLE].startswith("/tmp/psdist-")
    assert list(long.iterdir()) == []


def test_without_a_folder_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(LaunchError, match="No space left on device; set TMPDIR to one with"):
        Ranks()


def test_the_folder_has_an_absolute_path_where_tmpdir_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", ".")
    with Ranks() as ranks:
        assert ranks.folder.parent == tmp_path


def test_a_rank_without_a_parent_or_on_another_host_has_no_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psdist.ranks.parent_link._replace_input", os.close)
    assert connect_to_parent({}, rank=0) is None
    with Ranks() as ranks:
        elsewhere = {**ranks.environment(), KERNEL_VARIABLE: "another"}
        assert connect_to_parent(elsewhere, rank=0) is None
        nowhere = {**ranks.environment(), PARENT_VARIABLE: "/nowhere/parent"}
        assert connect_to_parent(nowhere, rank=0) is None


def test_a_rank_that_comes_after_its_parents_end_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psdist.ranks.parent_link._replace_input", os.close)
    with Ranks() as ranks:
        ranks.listener.close()  # as the kernel does; the socket's file stays
        with pytest.raises(LaunchError, match="psdist run, which started this rank, has ended"):
            connect_to_parent(ranks.environment(), rank=0)


def test_a_process_is_not_taken_for_a_later_one_with_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = RankProcess.of(process.pid)
    assert found.is_alive
    assert not RankProcess(process.pid, "1").is_alive
    process.communicate(b"\n")
    assert not found.is_alive
    found.signal_group(signal.SIGKILL)  # nobody's: nothing happens


def test_an_interruption_is_an_interruption_by_the_keyboard_for_scripts() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise Interrupted(signal.SIGTERM)
