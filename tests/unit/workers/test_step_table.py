"""What workers agree upon before they reduce, when one of them fails between two agreements."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import pytest

from psdist.errors import HyperparameterError
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.partition import Partition, Piece
from psdist.workers.group.channel import Done
from psdist.workers.reduction import Row, WorkerGroup

T = TypeVar("T")

MINE = pack_hyperparameters([{"lr": 0.5}])
OTHERS = pack_hyperparameters([{"lr": 0.25}])
ENDED = Row(weight=0.0, set_index=0, hyper=b"", has_ended=True, begun=[0])


class Group:
    """What each agreement brings is known."""

    def __init__(self, *tables: Sequence[Sequence[float]]) -> None:
        self._tables = list(tables)
        self.brought: list[list[float]] = []

    def agree(self, _call: str, values: Sequence[float]) -> Done[Any]:
        self.brought.append(list(values))
        return Done(self._tables.pop(0) if self._tables else self.brought)


def result(steps: Generator[Any, None, T]) -> T:
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    found: T = stopped.value.value
    return found


def group_of(channel: Any, *, worker: int) -> WorkerGroup:
    channel.size, channel.place = 1, 0
    partition = Partition.cut(
        [Piece(name="p", shape=(4,), stride=(1,), dtype="float32", optimizer_group=0)],
        chunk_bytes=None,
    )
    return WorkerGroup(channel, partition, (), (worker,), worker=worker)


def table_of(rows: dict[int, Row]) -> list[Row]:
    """As the worker that comes last gets it."""
    group: Any = Group()
    for worker, row in rows.items():
        table = result(group_of(group, worker=worker).gather(row))
    return table


def stepping(hyper: bytes) -> Row:
    return Row(weight=1.0, set_index=0, hyper=hyper)


def said(worker: int, hyper: bytes) -> list[float]:
    return [float(each) for each in (worker, *hyper)]


def test_who_has_died_since_says_nothing_of_hyperparameters() -> None:
    table = table_of({4: stepping(MINE), 5: ENDED, 6: stepping(MINE)})
    group: Any = Group([said(4, MINE), said(6, MINE)])  # worker 5 has failed
    steps = group_of(group, worker=4)
    assert result(steps.hyperparameters(table, MINE, clock=7)) == MINE
    assert group.brought == [said(4, MINE)]


def test_who_has_ended_takes_those_of_who_steps() -> None:
    table = table_of({4: ENDED, 5: stepping(MINE), 6: stepping(MINE)})
    group: Any = Group([said(4, b""), said(6, MINE)])  # worker 5 has failed
    assert result(group_of(group, worker=4).hyperparameters(table, b"", clock=7)) == MINE


def test_where_all_that_step_have_died_it_has_its_own() -> None:
    table = table_of({4: ENDED, 5: stepping(MINE)})
    group: Any = Group([said(4, b"")])
    assert result(group_of(group, worker=4).hyperparameters(table, b"", clock=7)) == b""


def test_those_who_step_must_say_the_same() -> None:
    table = table_of({4: stepping(MINE), 5: stepping(OTHERS), 6: ENDED})
    group: Any = Group([said(4, MINE), said(5, OTHERS), said(6, b"")])
    with pytest.raises(HyperparameterError, match="iteration 7: workers 4 and 5"):
        result(group_of(group, worker=4).hyperparameters(table, MINE, clock=7))
