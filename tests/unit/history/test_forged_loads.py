"""Forged histories, as in test_forged.py: values that the chief has set in the middle.

The honest run is the same as there, except for values of all chunks that are set in its collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psdist.history import NO_CHUNK, EventFlag, EventKind
from psdist.history.rules.findings import Rule
from tests.support.history.forged_words import expected
from tests.support.history.forging import Fault, FaultList, Forge, Forgery

APPLY, LOAD = EventKind.APPLY, EventKind.LOAD

FAULTS = FaultList()


def fault(what: str, rule: Rule | None, **settings: Any) -> Callable[[Forge], Forge]:
    return FAULTS.fault(what, rule, sets_values=True, **settings)


def change(what: str, rule: Rule | None, **values: Any) -> None:
    """Change the load of chunk 2."""

    @fault(what, rule)
    def _(forged: Forgery) -> None:
        load = forged.event(0, LOAD, chunk=2)
        for name, value in values.items():
            assert load[name] != value, "the change changes nothing"
            load[name] = value


change("values are set one iteration late, it says", Rule.LOADS, clock=4)
change("values are set one iteration early, it says", Rule.LOADS, clock=2)
change("values are set for a group that is not the chief's", Rule.LOADS, group=1)
change("values are scaled", Rule.LOADS, lr_scale=0.5)
change("values are set without a checksum, but with its bytes", None, flags=EventFlag.NONE)
change("values are set as the last contribution to a step", None, flags=EventFlag.LAST)
change("values have half a checksum", None, weight=0.5)
change("values have a checksum below 0", None, weight=-1.0)
change("values have a checksum of 33 bits", None, weight=2.0**32)
change("values have a checksum that is no number", None, weight=float("nan"))
change("values of no chunk are set", None, chunk=NO_CHUNK)
change("values of a chunk are set that the run does not have", None, chunk=3)
change("values of another chunk are set instead", Rule.LOADS, chunk=0)


@fault("other values are set than are recorded", Rule.CHECKSUM)
def _(forged: Forgery) -> None:
    load = forged.event(0, LOAD, chunk=2)
    load["weight"] = float(int(load["weight"]) ^ 1)


@fault("a server sends the values before those that were set", Rule.CHECKSUM)
def _(forged: Forgery) -> None:
    load = forged.find_event(0, LOAD, chunk=2)
    sums = forged.sums[0]
    is_mine = sums["chunk"] == 2
    before = sums[is_mine & (sums["position"] <= load)][-1]
    behind = np.flatnonzero(is_mine & (sums["position"] > load))[0]
    sums["crc"][behind] = before["crc"]


@fault("values are set by a server that does not own the chunk", Rule.LOADS)
def _(forged: Forgery) -> None:
    load = forged.find_event(1, LOAD, chunk=1)
    forged.insert(1, load, forged.event(0, LOAD, chunk=0))


@fault("values of one chunk are not set", Rule.LOADS)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, LOAD, chunk=2))


@fault("values of one chunk are set twice", Rule.LOADS)
def _(forged: Forgery) -> None:
    load = forged.find_event(0, LOAD, chunk=2)
    forged.insert(0, load, forged.events[0][load])


@fault("values are set before the last update of the chief's group", Rule.LOADS)
def _(forged: Forgery) -> None:
    update = forged.find_event(0, APPLY, chunk=2, group=0, clock=2)
    forged.move(0, forged.find_event(0, LOAD, chunk=2), update)


@fault("values are set in the middle of a step", Rule.STEPS, mode="sync")
def _(forged: Forgery) -> None:
    step = next(
        step
        for step in (forged.step(0, number) for number in range(100))
        if forged.events[0]["chunk"][step[0]] == 2 and forged.events[0]["clock"][step[0]] == 3
    )
    forged.move(0, forged.find_event(0, LOAD, chunk=2), step[1] - 1)


@fault("values are set behind the next update of the chief's group", Rule.LOADS)
def _(forged: Forgery) -> None:
    update = forged.find_event(0, APPLY, chunk=2, group=0, clock=3)
    forged.move(0, forged.find_event(0, LOAD, chunk=2), update)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_faulty_server_that_sets_values_is_refused_in_these_words(fault: Fault) -> None:
    assert fault.refused() == expected()[fault.what]
