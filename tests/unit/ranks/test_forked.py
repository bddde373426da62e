"""A process that a script has forked ends by itself: the rank and its MPI are its parent's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

from psdist.ranks.exit import Exit

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NOT_HERE = 99


class Ending(Exit):
    def __init__(self) -> None: ...

    def fail(self, text: str, status: int) -> NoReturn:
        raise AssertionError(f"the job was ended: {text}, {status}")

    def cause_of(self, error: Exception) -> Exception:
        return error


def nothing() -> None: ...


def leave_with_words() -> None:
    sys.exit("words")


def fail() -> None:
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (nothing, 0),
        (sys.exit, 0),
        (lambda: sys.exit(4), 4),
        (leave_with_words, 1),
        (fail, 1),
    ],
)
def test_a_forked_process_ends_with_its_own_status_and_the_rank_goes_on(
    leave: Callable[[], None], status: int
) -> None:
    rank = os.getpid()
    seen: list[int] = []

    def script() -> int:
        child = os.fork()
        if not child:
            leave()
            return 0
        seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return 0

    try:
        assert Ending().run(script) == 0
    finally:
        if os.getpid() != rank:
            os._exit(NOT_HERE)
    assert seen == [status]
