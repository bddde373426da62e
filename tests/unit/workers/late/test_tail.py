"""The tail of a step, one call after the other: who takes the loop, what is awaited, what is told.

The loop, the values and the driver are played here; parameters are real ones.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

from psdist.errors import TransportError, UsageError
from psdist.protocol.partition import Partition, Piece
from psdist.workers.late import tail as module
from psdist.workers.late.guarded import Guarded
from psdist.workers.late.tail import Tail

TAKES_S = 3.0
"""A wait, on the clock of these tests."""


class Played:
    """A worker of which every call is written down."""

    def __init__(self) -> None:
        pieces = [
            Piece(name=name, shape=(length,), stride=(1,), dtype="float32", optimizer_group=0)
            for name, length in (("a", 128), ("b", 64))
        ]
        self.partition = Partition.cut(pieces, chunk_bytes=256)
        assert [len(chunk.segments) for chunk in self.partition.chunks] == [1, 1, 1]
        self.log: list[object] = []
        self.now_s = 0.0
        self.landed: set[int] = set()
        self.error: Exception | None = None
        self.is_inferring: bool | None = None
        self.parameters = [Parameter(torch.ones(each.shape)) for each in pieces]
        note: Callable[..., None] = lambda *words: self.log.append(words)  # noqa: E731
        flat = SimpleNamespace(
            parameters=self.parameters, values_changed=lambda: note("values changed")
        )
        values = SimpleNamespace(place=self.place, record_use=lambda clock: note("use", clock))
        driver = SimpleNamespace(wake=lambda: note("wake"), take_over=lambda: note("take over"))
        loop = SimpleNamespace(
            begin_waiting=lambda clock: note("begin waiting", clock),
            wait_for_chunk=lambda chunk: {chunk},
            wait_for_replies=lambda: {0, 1, 2},
            carry_on=self.carry_on,
            now_s=lambda: self.now_s,
            core=SimpleNamespace(
                transfers=SimpleNamespace(is_done=lambda chunk: chunk in self.landed)
            ),
        )
        self.tail = Tail(
            self.partition,
            [0, 1, 2],
            cast(Any, flat),
            cast(Any, loop),
            cast(Any, values),
            move=lambda chunks: note("move", *chunks),
            driver=cast(Any, driver),
        )

    def carry_on(self, wait: set[int]) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(("wait", *sorted(wait)))
        self.now_s += TAKES_S
        self.landed |= wait

    def place(
        self, chunks: Sequence[int], pieces: set[int], move: Callable[[Sequence[int]], None]
    ) -> None:
        self.log.append(("place", sorted(pieces)))
        self.is_inferring = torch.is_inference_mode_enabled()
        move(chunks)

    def begun(self) -> Played:
        self.tail.begin(7)
        self.log.clear()
        return self

    def told(self) -> list[object]:
        told, self.log[:] = list(self.log), []
        return told

    @property
    def guarded(self) -> list[bool]:
        return [type(each) is Guarded for each in self.parameters]


def read(parameter: Parameter) -> float:
    return float(parameter.detach().sum())


@pytest.fixture
def played() -> Any:
    made = Played()
    yield made
    made.error = None
    made.tail._problem = None
    made.tail.finish_now()


def test_it_begins_with_versions_raised_guards_closed_and_the_driver_awake(
    played: Played,
) -> None:
    played.tail.begin(7)
    assert played.told() == [("values changed",)]
    played.tail.resume()
    assert played.told() == [("wake",)]
    assert played.tail.is_pending
    assert played.guarded == [True, True]


def test_a_read_awaits_its_own_chunks_and_takes_what_else_has_landed(played: Played) -> None:
    played.begun().landed.add(2)
    assert read(played.parameters[0]) == 128
    assert played.told() == [
        ("take over",),
        ("begin waiting", 7),
        ("wait", 0),
        ("wait", 1),
        ("place", [0, 1]),
        ("move", 0, 1, 2),
    ]
    assert not played.tail.is_pending
    assert played.guarded == [False, False]
    assert played.tail.waited_s == 2 * TAKES_S


def test_while_something_is_left_the_driver_goes_on_and_other_guards_stay(played: Played) -> None:
    played.begun()
    read(played.parameters[1])
    assert played.told() == [
        ("take over",),
        ("begin waiting", 7),
        ("wait", 2),
        ("place", [1]),
        ("move", 2),
        ("wake",),
    ]
    assert played.guarded == [True, False]
    read(played.parameters[1])
    assert played.told() == []
    read(played.parameters[0])  # what is in place is neither awaited nor moved again
    assert [each for each in played.told() if each[0] in ("wait", "move")] == [  # type: ignore[index]
        ("wait", 0),
        ("wait", 1),
        ("move", 0, 1),
    ]


def test_a_piece_stays_guarded_until_all_of_its_chunks_are_in_place(played: Played) -> None:
    played.begun().landed.add(0)
    read(played.parameters[1])
    assert ("move", 0, 2) in played.told()
    assert played.guarded == [True, False]


def test_a_use_is_recorded_once_when_everything_is_in_place(played: Played) -> None:
    played.begun().tail.use(8)
    read(played.parameters[1])
    assert ("use", 8) not in played.told()
    read(played.parameters[0])
    assert played.told()[-1] == ("use", 8)
    played.tail.begin(8)
    played.tail.finish_now()
    assert ("use", 8) not in played.told()


def test_a_finish_takes_over_awaits_the_rest_and_is_counted(played: Played) -> None:
    played.begun().tail.finish_now()
    assert played.told() == [
        ("take over",),
        ("begin waiting", 7),
        ("wait", 0, 1, 2),
        ("place", [0, 1]),
        ("move", 0, 1, 2),
    ]
    assert played.tail.waited_s == TAKES_S
    played.tail.finish_now()
    assert list(played.tail.finish()) == []
    played.tail.resume()
    assert played.told() == []


def test_a_script_that_computes_again_wakes_the_driver_while_something_is_left(
    played: Played,
) -> None:
    played.begun().tail.resume()
    assert played.told() == [("wake",)]


def test_what_went_wrong_unseen_is_raised_by_the_next_call(played: Played) -> None:
    played.begun().error = TransportError("a server is gone")
    played.tail.finish_before()
    played.error = None
    with pytest.raises(TransportError, match="a server is gone"):
        read(played.parameters[0])
    with pytest.raises(TransportError, match="a server is gone"):
        played.tail.finish_now()
    assert played.tail.is_pending


def test_another_thread_may_neither_read_nor_finish(played: Played) -> None:
    played.begun()
    for call in (lambda: read(played.parameters[0]), played.tail.finish_now):
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="another thread than"):
            pool.submit(call).result()
    assert played.told() == []


def test_a_forked_process_may_not_read(played: Played) -> None:
    played.begun()
    with (
        mock.patch.object(os, "getpid", return_value=os.getpid() + 1),
        pytest.raises(UsageError, match="parameter a is read in a process that was forked before"),
    ):
        read(played.parameters[0])
    assert played.told() == []


def test_all_tails_of_this_thread_are_finished_before_what_nobody_can_tell_of(
    played: Played,
) -> None:
    other = Played().begun()
    other.tail.owner = threading.Thread()
    played.begun()
    module.finish_all()
    assert not played.tail.is_pending
    assert other.tail.is_pending
    other.tail.owner = threading.current_thread()
    module.finish_all()
    assert not other.tail.is_pending
    other.log.clear()
    module.finish_all()
    assert other.told() == []


def test_a_thread_does_not_finish_what_one_before_it_left_whose_number_it_has() -> None:
    left: list[Played] = []
    first = threading.Thread(target=lambda: left.append(Played().begun()))
    first.start()
    first.join()
    same_number: list[bool] = []

    def compile_something() -> None:
        same_number.append(threading.get_ident() == first.ident)
        module.finish_all()

    for _ in range(20):
        then = threading.Thread(target=compile_something)
        then.start()
        then.join()
    assert any(same_number), "this system gives no thread the number of one that has ended"
    assert left[0].tail.is_pending


def test_values_come_plainly_whatever_the_reader_is_in(played: Played) -> None:
    played.begun()
    with torch.inference_mode():
        read(played.parameters[0])
    assert played.is_inferring is False


def test_a_compiler_that_is_loaded_is_asked_to_tell_of_itself_once(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    handler = SimpleNamespace(start_callbacks=told, register_start_callback=told.append)
    loaded = SimpleNamespace(callback_handler=handler)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", cast(Any, loaded))
    for clock in (7, 8):
        played.tail.begin(clock)
        played.tail.finish_now()
    assert told == [module._on_compile]
