"""Bytes pass through the parent unchanged, in lines, and never hold it up."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from psdist.commands.launch.screen import Lines, Outlet


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


@pytest.mark.parametrize("seed", range(10))
def test_every_byte_comes_out_in_order_and_only_whole_lines_come_at_once(seed: int) -> None:
    pick = random.Random(seed)
    data = bytes(pick.choice(b"ab\n\r\0\xff") for _ in range(500))
    lines, shown, at = Lines(), b"", 0
    while at < len(data):
        size = pick.randrange(1, 40)
        now = lines.feed(data[at : at + size], now_s=0.0)
        assert not now or now.endswith(b"\n")
        shown += now
        at += size
    assert shown + lines.close() == data


def test_a_prompt_comes_out_after_a_moment() -> None:
    lines = Lines()
    assert lines.feed(b"one\nname? ", now_s=1.0) == b"one\n"
    assert lines.deadline_s == 1.0 + Lines.PARTIAL_S
    assert lines.overdue(now_s=1.0) == b""
    assert lines.overdue(now_s=2.0) == b"name? "
    assert lines.deadline_s is None
    assert lines.feed(b"ok\n", now_s=3.0) == b"ok\n"


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    lines = Lines()
    assert lines.feed(b"x" * (Lines.MAX_BYTES + 1), now_s=1.0) == b"x" * (Lines.MAX_BYTES + 1)


def test_an_outlet_writes_what_the_reader_takes_and_keeps_the_rest(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    outlet = Outlet(writing)
    data = bytes(range(256)) * 1024  # more than a pipe holds
    outlet.put(data)
    outlet.flush()
    assert outlet.is_waiting
    received = b""
    while outlet.is_waiting:
        received += os.read(reading, 1 << 20)
        outlet.flush()
    assert received + os.read(reading, 1 << 20) == data


def test_an_outlet_is_full_long_before_memory_is(pipe: tuple[int, int]) -> None:
    outlet = Outlet(pipe[1])
    outlet.put(b"x" * Outlet.FULL_BYTES)
    assert not outlet.is_full
    outlet.put(b"x")
    assert outlet.is_full


def test_where_nobody_reads_any_more_output_goes_nowhere(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    outlet = Outlet(writing)
    os.close(reading)
    outlet.put(b"text\n")
    outlet.flush()
    outlet.put(b"more\n")
    assert not outlet.is_waiting
