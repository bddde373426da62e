"""What a registrar knows, as bytes and back."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgpack
import pytest

from psdist.codecs.layout import Stretch
from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.decisions import Controller, Observation, Times
from psdist.controller.mode import ModeControl
from psdist.controller.steps import StepControl
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Finish, Progress
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.collectives import Collective
from psdist.servers.protocol.registrar import Registrar
from psdist.servers.protocol.succession.lines import Lines
from psdist.servers.protocol.succession.standing import pack, unpack


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 7, -1.5, "text", b"bytes", [], (), {}, set(), frozenset({1}), deque([1, 2])),
        Counter({1: 2}),
        {"a": [1, (2, {3: {4}})], (1, 2): deque([{5: "x"}])},
    ],
)
def test_plain_values_and_containers_come_back(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)


def test_objects_and_messages_come_back() -> None:
    told = Progress(worker=1, clock=3, samples=4)
    value = Collective("mean", earliest={None: told}, resumed={2})
    found = unpack(pack(value))
    assert found == value
    assert found is not value
    assert found.earliest[None] == told


def test_what_is_one_is_one_again() -> None:
    shared: list[int] = []
    found = unpack(pack([shared, {"again": shared}]))
    found[0].append(1)
    assert found[1]["again"] == [1]
    around: list[Any] = []
    around.append(around)
    found = unpack(pack(around))
    assert found[0] is found


def test_a_registrar_of_its_own_comes_back() -> None:
    first = Registrar(num_workers=2, num_servers=2, buddies=(1, 0), num_spares=1, max_deaths=1)
    first.handle(worker_id(0), Progress(worker=0, clock=2, samples=9))
    second = unpack(pack(first))
    assert second.progress == first.progress
    assert second.alone == first.alone == []
    second.handle(worker_id(1), Progress(worker=1, clock=1, samples=9))
    assert set(first.progress) == {0}
    assert set(second.progress) == {0, 1}


def test_a_registrar_with_every_part_comes_back() -> None:
    first = Registrar(
        num_workers=4,
        num_servers=2,
        groups=((0, 1), (2,), (3,)),
        max_deaths=1,
        num_substitutes=1,
        reforms=True,
        control=BoundControl(num_groups=3, lowest=0, highest=4),
        steps=StepControl(sizes=[2, 1, 1], local_steps=2),
    )
    assert pack(unpack(pack(first))) == pack(first)


@pytest.mark.parametrize(
    "control",
    [
        BoundControl(num_groups=2, lowest=0, highest=4),
        ModeControl(num_groups=2, staleness=3),
        CodecControl(num_groups=2, names=["none", "int8", "int4"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_a_controller_has_observed_comes_back(control: Controller) -> None:
    for group in (0, 1):
        control.observe(Observation(group, 5, [5, 6], [7, 8], [1, 2]))
    second = unpack(pack(control))
    rounds = second._window._rounds
    assert rounds == control._window._rounds
    assert {type(each) for of_group in rounds.values() for each in of_group.values()} == {Times}
    assert pack(second) == pack(control)


def test_a_named_tuple_of_other_fields_is_refused() -> None:
    name = f"{Times.__module__}.Times"
    with pytest.raises(ProtocolError, match="damaged"):
        unpack(msgpack.packb([[0], [[name, 1, 2]]]))


def test_lines_come_back_with_what_they_keep() -> None:
    lines = Lines()
    lines.say(worker_id(1), Finish())
    found = unpack(pack(lines))
    found.close()
    assert found.on_follows(worker_id(1), 0) == [Finish()]


def test_what_no_registrar_has_is_refused() -> None:
    for value in (object(), [lambda: 0], {"a": range(3)}, {Stretch(1, 2): 4}):
        with pytest.raises(InvariantError, match="a registrar was to be told of with a "):
            pack(value)


def deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"\xc1",
            msgpack.packb(7),
            msgpack.packb([[0], []]),
            msgpack.packb([[0, 0], [["list"]]]),
        ),
        msgpack.packb([[0], [["subprocess.Popen", "args", "x"]]]),
        msgpack.packb([[0], [["psdist.servers.protocol.registrar.Callable"]]]),
        msgpack.packb([[0], [["a message", b"\x81"]]]),
        msgpack.packb([[0], [["dict", 1]]]),
        msgpack.packb([[0], [["psdist.servers.protocol.collectives.Warn", "no such", 1]]]),
        msgpack.packb([[0], [["tuple", [0]]]]),
        pack(deep(70)),
    ],
)
def test_anything_else_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ProtocolError) as error:
        unpack(data)
    assert "\n" not in str(error.value)
