"""What is drawn stays below all text, and leaves nothing behind; without a terminal nothing is."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from psdist.commands.launch.screen import Screen
from tests.support.tape import Tape


class Pipe:
    """Stands for a terminal, or for a file, that somebody reads."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def read(self) -> bytes:
        try:
            return os.read(self.reading, 1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


@pytest.fixture
def terminal() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def file() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_what_is_drawn_gives_way_to_text_and_comes_back_below_it(terminal: Pipe) -> None:
    screen = Screen(is_live=True, stdout=terminal.writing, stderr=terminal.writing)
    tape = Tape()
    screen.draw(["importing torch"])
    screen.put(1, b"hello\n")
    screen.flush()
    tape.write(terminal.read())
    assert tape.lines() == ["hello"]
    screen.draw(["sync 10 %", "5 samples/s"])
    tape.write(terminal.read())
    assert tape.lines() == ["hello", "sync 10 %", "5 samples/s"]
    screen.draw(["sync 11 %"])
    tape.write(terminal.read())
    assert tape.lines() == ["hello", "sync 11 %"]
    screen.erase()
    tape.write(terminal.read())
    assert tape.lines() == ["hello"]


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_text_and_drawing_the_text_is_whole(seed: int, terminal: Pipe) -> None:
    pick = random.Random(seed)
    screen = Screen(is_live=True, stdout=terminal.writing, stderr=terminal.writing)
    tape, text = Tape(), b""
    for _ in range(100):
        if pick.random() < 0.4:
            screen.draw([f"drawn {pick.random()}"] * pick.randrange(3))
        else:
            data = pick.choice([b"a line\n", b"two\nlines\n", b"prompt? ", b"\n", b"x"])
            text += data
            screen.put(pick.choice([1, 2]), data)
            screen.flush()
    screen.erase()
    tape.write(terminal.read())
    plain = Tape()
    plain.write(text)
    assert tape.lines() == plain.lines()


def test_nothing_is_drawn_behind_a_prompt(terminal: Pipe) -> None:
    screen = Screen(is_live=True, stdout=terminal.writing, stderr=terminal.writing)
    screen.put(1, b"name? ")
    screen.flush()
    screen.draw(["sync 10 %"])
    assert terminal.read() == b"name? "
    screen.end_line()
    screen.flush()
    screen.draw(["sync 10 %"])
    tape = Tape()
    tape.write(terminal.read())
    assert tape.lines() == ["", "sync 10 %"]


def test_text_for_a_file_does_not_disturb_what_is_drawn(terminal: Pipe, file: Pipe) -> None:
    screen = Screen(is_live=True, stdout=file.writing, stderr=terminal.writing)
    screen.draw(["sync 10 %"])
    terminal.read()
    screen.put(1, b"no newline")
    screen.flush()
    screen.draw(["sync 10 %"])
    assert file.read() == b"no newline"
    assert terminal.read() == b""


def test_without_a_terminal_no_control_character_is_written(file: Pipe) -> None:
    screen = Screen(is_live=False, stdout=file.writing, stderr=file.writing)
    screen.draw(["sync 10 %"])
    screen.put(1, b"text")
    screen.say("psdist: a line")
    screen.erase()
    screen.flush()
    assert file.read() in (b"textpsdist: a line\n", b"psdist: a line\ntext")


def test_a_terminal_that_takes_nothing_is_not_waited_for(terminal: Pipe) -> None:
    screen = Screen(is_live=True, stdout=terminal.writing, stderr=terminal.writing)
    screen.put(1, b"x" * 200_000 + b"\n")
    screen.flush()
    assert screen.waiting
    screen.draw(["sync 10 %"])
    received = b""
    while screen.waiting:
        received += terminal.read()
        screen.flush()
    assert received + terminal.read() == b"x" * 200_000 + b"\n"
