"""Forged histories that a faulty server or worker could have written: each is refused.

The list is the test: a sentence that says the fault, what it does to an honest history, and the
rule that must refuse it. Here: groups, updates, steps, weights and pushes. The honest run has
groups 0 (workers 0 and 1), 1 and 2, which leave after 8, 8 and 6 iterations, chunks 0 and 2 on
server 0, chunk 1 on server 1, and a collective at 3. The check's findings for each are in
forged.txt.

Longer than other modules: it is one list.
"""

from __future__ import annotations

import numpy as np
import pytest

from psdist.history import NO_CHUNK, EventFlag, EventKind
from psdist.history.rules.findings import Rule
from psdist.history.rules.log import replay
from tests.support.history.forged_words import expected
from tests.support.history.forging import Fault, FaultList, Forgery
from tests.unit.history.test_forged_loads import FAULTS as LOADS
from tests.unit.history.test_forged_replies import FAULTS as OTHERS

APPLY, JOIN, SUSPEND = EventKind.APPLY, EventKind.JOIN, EventKind.SUSPEND
RESUME, LEAVE, DEATH = EventKind.RESUME, EventKind.LEAVE, EventKind.DEATH


FAULTS = FaultList()
fault, change = FAULTS.fault, FAULTS.change

SYNC = {"mode": "sync"}
ONCE = {"iterations": (1, 1, 1), "collectives": ()}

# -- groups that join, stop, come back and leave ---------------------------------------------------


@fault("a group joins twice", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.insert(0, 3, forged.event(0, JOIN, group=1))


def joins(forged: Forgery) -> np.void:
    return forged.event(0, JOIN, group=0)


change("a join counts a worker too many", Rule.MEMBERSHIP, joins, weight=3.0)
change("a join counts a worker too few", Rule.MEMBERSHIP, joins, weight=1.0)
change("a join counts no number of workers", Rule.MEMBERSHIP, joins, weight=float("nan"))
change("a group joins in the middle of its iterations", Rule.MEMBERSHIP, joins, clock=3)
change("a join is scaled", Rule.MEMBERSHIP, joins, lr_scale=0.5)
change("a join is logged for another group", Rule.MEMBERSHIP, joins, group=1)
change("a join has the flags of an update", None, joins, flags=EventFlag.LAST)
change("a join names a chunk", None, joins, chunk=0)
change("an event is of a kind that does not exist", None, joins, kind=19)


@fault("a group never joins one of two servers", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.delete(1, forged.find_event(1, JOIN, group=2))


@fault("the server forgets to resume a group", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, RESUME, group=1))


@fault("a group is resumed that was not suspended", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.insert(0, 3, forged.event(0, RESUME, group=1))


@fault("the server forgets to suspend a group that it resumes", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, SUSPEND, group=1))


@fault("a group is suspended twice", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    position = forged.find_event(0, SUSPEND, group=1)
    forged.insert(0, position, forged.events[0][position])


def suspends(forged: Forgery) -> np.void:
    return forged.event(0, SUSPEND, group=1)


change("a suspension is stamped one too low", Rule.MEMBERSHIP, suspends, clock=2)
change("a suspension is stamped one too high", Rule.APPLIES, suspends, clock=4)
change("another group is suspended", Rule.MEMBERSHIP, suspends, group=2)
change("a suspension is logged as a death", Rule.MEMBERSHIP, suspends, kind=DEATH)
change("a suspension is logged as a leave", Rule.MEMBERSHIP, suspends, kind=LEAVE)
change(
    "a resumption is stamped with a clock",
    Rule.MEMBERSHIP,
    lambda forged: forged.event(0, RESUME, group=1),
    clock=3,
)


@fault("a group is suspended before its updates are there", Rule.APPLIES)
def _(forged: Forgery) -> None:
    forged.move(0, forged.find_event(0, SUSPEND, group=1), forged.find_event(0, APPLY, group=1))


@fault("an update is applied while its group is suspended", Rule.APPLIES)
def _(forged: Forgery) -> None:
    update = forged.find_event(0, APPLY, group=1, clock=3)
    forged.move(0, update, forged.find_event(0, SUSPEND, group=1) + 1)


@fault("two groups are suspended at clocks one too low", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    for group in (1, 2):
        forged.event(0, SUSPEND, group=group)["clock"] = 2


@fault("a group is suspended and leaves at clocks one too low", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.event(0, SUSPEND, group=1)["clock"] = 2
    forged.event(0, LEAVE, group=1)["clock"] = 7


@fault("two groups are suspended before their updates are there", Rule.APPLIES)
def _(forged: Forgery) -> None:
    for group in (1, 2):
        at = forged.find_event(0, APPLY, group=group)
        forged.move(0, forged.find_event(0, SUSPEND, group=group), at)


@fault("a group is suspended at once, and has brought an update", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    first = forged.find_event(0, APPLY, group=1)
    suspended = forged.event(0, SUSPEND, group=1).copy()
    forged.insert(0, first + 1, suspended, clock=0)
    forged.insert(0, first + 2, suspended, kind=RESUME, clock=0)


def leaves(forged: Forgery) -> np.void:
    return forged.event(0, LEAVE, group=2)


change("a leave is stamped one too low", Rule.MEMBERSHIP, leaves, clock=5)
change("a leave is stamped below an earlier suspension", Rule.MEMBERSHIP, leaves, clock=2)
change("a leave is stamped one too high", Rule.APPLIES, leaves, clock=7)
change("another group leaves", Rule.MEMBERSHIP, leaves, group=1)
change("a leave is logged as a suspension", Rule.MEMBERSHIP, leaves, kind=SUSPEND)
change("a leave is logged as a death", Rule.MEMBERSHIP, leaves, kind=DEATH, clock=0)


@fault("a group leaves before its last update is applied", Rule.APPLIES)
def _(forged: Forgery) -> None:
    last = forged.find_event(0, APPLY, last=True, group=2)
    forged.move(0, forged.find_event(0, LEAVE, group=2), last)


@fault("a group never leaves a server that closes its log", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, LEAVE, group=2))


@fault(
    "a group leaves out of a collective", Rule.MEMBERSHIP, collectives=(8,), iterations=(8, 8, 8)
)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, RESUME, group=2))


@fault("a group joins again after it has left", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.insert(0, len(forged.events[0]), forged.event(0, JOIN, group=2))


@fault("a group fails after it has left", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.insert(0, len(forged.events[0]), forged.event(0, LEAVE, group=2), kind=DEATH)


@fault("a live group is declared dead", Rule.APPLIES)
def _(forged: Forgery) -> None:
    update = forged.find_event(0, APPLY, group=2, clock=4)
    forged.insert(0, update, forged.event(0, LEAVE, group=2), kind=DEATH, clock=4)


@fault(
    "a live group is declared dead by the only server", Rule.APPLIES, num_servers=1, num_chunks=1
)
def _(forged: Forgery) -> None:
    update = forged.find_event(0, APPLY, group=2, clock=4)
    forged.insert(0, update, forged.event(0, LEAVE, group=2), kind=DEATH, clock=4)


@fault("two deaths are stamped with fewer updates than there are", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    for group, clock in ((2, 5), (1, 7)):
        leave = forged.event(0, LEAVE, group=group)
        leave["clock"], leave["kind"] = clock, DEATH


@fault("two groups leave one server later than the other", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    for group, clock in ((1, 9), (2, 7)):
        forged.event(0, LEAVE, group=group)["clock"] = clock


@fault("a death is stamped with fewer updates than there are", Rule.MEMBERSHIP)
def _(forged: Forgery) -> None:
    forged.event(0, LEAVE, group=2)["clock"] = 5
    forged.event(0, LEAVE, group=2)["kind"] = DEATH


# -- updates ---------------------------------------------------------------------------------------


@fault("an update is lost", Rule.APPLIES)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, APPLY, group=1, chunk=2, clock=4))


@fault("the last update of a group is lost", Rule.APPLIES)
def _(forged: Forgery) -> None:
    forged.delete(0, forged.find_event(0, APPLY, group=2, chunk=2, clock=5))


@fault("the last updates of two groups are lost", Rule.APPLIES)
def _(forged: Forgery) -> None:
    for group, clock in ((2, 5), (1, 7)):
        forged.delete(0, forged.find_event(0, APPLY, group=group, chunk=2, clock=clock))


@fault("a chunk never gets an update of a group", Rule.APPLIES)
def _(forged: Forgery) -> None:
    for clock in range(6):
        forged.delete(0, forged.find_event(0, APPLY, group=2, chunk=2, clock=clock))


@fault("an update is applied twice", Rule.APPLIES)
def _(forged: Forgery) -> None:
    position = forged.find_event(0, APPLY, group=1, chunk=2, clock=4)
    forged.insert(0, position, forged.events[0][position])


@fault("two updates of a group change places", Rule.APPLIES)
def _(forged: Forgery) -> None:
    one = forged.find_event(0, APPLY, group=1, chunk=2, clock=4)
    forged.swap(0, one, forged.find_event(0, APPLY, group=1, chunk=2, clock=5))


@fault("an update is applied before its group joins", Rule.APPLIES)
def _(forged: Forgery) -> None:
    forged.move(0, forged.find_event(0, APPLY, group=1, clock=0), 0)


@fault("an update is applied after its group has left", Rule.APPLIES)
def _(forged: Forgery) -> None:
    last = forged.find_event(0, APPLY, last=True, group=2)
    forged.move(0, last, forged.find_event(0, LEAVE, group=2))


def update(forged: Forgery) -> np.void:
    return forged.apply(0, group=1, chunk=2, clock=4)


change("an update is applied to a chunk of another server", Rule.APPLIES, update, chunk=1)
change("an update is applied to the neighbouring chunk", Rule.APPLIES, update, chunk=0)
change("an update is booked on another group", Rule.APPLIES, update, group=2)
change("an update is stamped one too high", Rule.APPLIES, update, clock=5)
change("an update is stamped one too low", Rule.APPLIES, update, clock=3)
change("an update is no whole step in ssp", Rule.STEPS, update, flags=0)
change("an update has a flag that does not exist", None, update, flags=5)
change("an update names a chunk that does not exist", None, update, chunk=3)
change("an update names a group that does not exist", None, update, group=3)


# -- steps -----------------------------------------------------------------------------------------


@fault("two steps become one", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    forged.events[0]["flags"][forged.step(0, 3)[-1]] &= ~EventFlag.LAST & 0xFF


@fault("a step is split in two", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    forged.events[0]["flags"][forged.step(0, 3)[0]] |= EventFlag.LAST


@fault("the last step of a chunk is never completed", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    forged.events[0]["flags"][forged.step(0, -1)[-1]] &= ~EventFlag.LAST & 0xFF


@fault("contributions are summed as they arrive", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    first, second, *_ = forged.step(0, 3)
    forged.swap(0, first, second)


@fault("a step is made without one of its groups", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    first, *_, last = forged.step(0, 3)
    late = forged.delete(0, first)
    forged.insert(0, last, late)
    forged.events[0]["flags"][last] |= EventFlag.LAST


@fault("a contribution is summed twice", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    first = forged.step(0, 3)[0]
    forged.insert(0, first, forged.events[0][first])


@fault("something else happens inside a step", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    forged.move(0, forged.find_event(0, SUSPEND, group=1), forged.step(0, 1)[1])


@fault("a step holds updates of two iterations", Rule.STEPS, **SYNC)
def _(forged: Forgery) -> None:
    forged.events[0]["clock"][forged.step(0, 3)[0]] += 1


@fault("a reply goes out in the middle of a step", Rule.WHOLE_STEPS, **SYNC)
def _(forged: Forgery) -> None:
    inside = forged.step(0, 2)[1]
    chunk = int(forged.events[0]["chunk"][inside])
    for worker in (0, 1):
        use = forged.use(worker, iteration=int(forged.events[0]["clock"][inside]), chunk=chunk)
        use["position"] = inside


# -- the factor on the learning rate ---------------------------------------------------------------


def scaled(name: str, rule: Rule | None, lr_scale: float) -> None:
    change(name, rule, update, lr_scale=lr_scale)


scaled("the learning rate is not scaled in ssp", Rule.SCALES, 1.0)
scaled("the learning rate is scaled by nothing that is a number", Rule.SCALES, float("nan"))
scaled("the learning rate is scaled with the wrong sign", Rule.SCALES, -0.25)


@fault("weights are divided by the number of groups", Rule.SCALES)
def _(forged: Forgery) -> None:
    forged.rescale(0, 3.0)


@fault("weights are divided by all workers although a group has left", Rule.SCALES)
def _(forged: Forgery) -> None:
    forged.rescale(0, 4.0)


@fault("the weight of the neighbour scales the learning rate", Rule.SCALES)
def _(forged: Forgery) -> None:
    other = forged.apply(0, group=0, chunk=2, clock=4)
    forged.apply(0, group=1, chunk=2, clock=4)["lr_scale"] = other["lr_scale"]


@fault("groups in a collective do not count in the scale", Rule.SCALES, mode="async", seed=4)
def _(forged: Forgery) -> None:
    inside = forged.find_event(0, SUSPEND) + 1
    while forged.events[0]["kind"][inside] != APPLY:
        inside += 1
    active = 4 - sum(
        (2, 1, 1)[event["group"]] for event in forged.events[0][:inside] if event["kind"] == SUSPEND
    )
    event = forged.events[0][inside]
    event["lr_scale"] = event["weight"] / active


@fault("the learning rate is scaled in sync", Rule.SCALES, **SYNC)
def _(forged: Forgery) -> None:
    forged.rescale(0, 4.0)


@fault("the learning rate of an empty update is scaled", Rule.SCALES, empty_rate=0.5)
def _(forged: Forgery) -> None:
    forged.apply(0, flags=EventFlag.LAST | EventFlag.EMPTY)["lr_scale"] = 0.25


# -- weights ---------------------------------------------------------------------------------------

change("an update weighs nothing that is a number", Rule.WEIGHTS, update, weight=float("nan"))
change("an update weighs infinitely much", Rule.WEIGHTS, update, weight=float("inf"))
change("an update weighs less than nothing", Rule.WEIGHTS, update, weight=-1.0)
change("an update with a gradient weighs nothing", Rule.WEIGHTS, update, weight=0.0)
change("an update is called empty", Rule.WEIGHTS, update, flags=EventFlag.LAST | EventFlag.EMPTY)


@fault("an update is applied with the weight of the neighbour, and scaled so", Rule.WEIGHTS)
def _(forged: Forgery) -> None:
    other = forged.apply(0, group=0, chunk=2, clock=4)
    event = forged.apply(0, group=1, chunk=2, clock=4)
    event["weight"], event["lr_scale"] = other["weight"], other["lr_scale"]


@fault("contributions of a step change their weights", Rule.WEIGHTS, **SYNC)
def _(forged: Forgery) -> None:
    weights = forged.events[0]["weight"]
    step = forged.step(0, 3)
    weights[step] = weights[step[::-1]]


@fault("an empty update is applied as if it had a gradient", Rule.WEIGHTS, empty_rate=0.5, **SYNC)
def _(forged: Forgery) -> None:
    is_empty = forged.events[0]["flags"] & EventFlag.EMPTY != 0
    event = forged.events[0][np.flatnonzero(is_empty & (forged.events[0]["weight"] > 0))[0]]
    event["flags"] &= ~EventFlag.EMPTY & 0xFF


@fault("what a whole group skipped is applied", Rule.WEIGHTS, empty_rate=0.5)
def _(forged: Forgery) -> None:
    event = forged.apply(0, weight=0.0)
    event["weight"], event["flags"], event["lr_scale"] = 1.0, EventFlag.LAST, 0.25


@fault("one chunk of a skipped iteration is applied in sync", Rule.WEIGHTS, empty_rate=0.5, **SYNC)
def _(forged: Forgery) -> None:
    event = forged.apply(0, weight=0.0)
    event["weight"], event["flags"] = 1.0, event["flags"] & EventFlag.LAST


# -- workers' records of their pushes --------------------------------------------------------------


def pushes(forged: Forgery) -> np.void:
    return forged.push(0, 4)


change("a worker pushes with another weight than its group", Rule.PUSHES, pushes, weight=7.0)
change("a worker brings another weight than was counted", Rule.PUSHES, pushes, own=0.25)
change("a worker brings a weight below nothing", Rule.PUSHES, pushes, own=-0.5)
change("a worker pushes with a weight below nothing", Rule.PUSHES, pushes, weight=-0.5)
change("a worker brings no number", Rule.PUSHES, pushes, own=float("nan"))
change("a worker pushes with an infinite weight", Rule.PUSHES, pushes, weight=float("inf"))
change("a worker pushes a gradient that weighs nothing", Rule.PUSHES, pushes, weight=0.0)
change("a worker pushes an iteration twice", Rule.PUSHES, pushes, iteration=3)
change("a worker says that it pushed no gradient", Rule.WEIGHTS, pushes, is_empty=1)
change("a worker's record of a push is of another chunk", Rule.PUSHES, pushes, chunk=2)


@fault("two groups count less than their workers bring", Rule.PUSHES)
def _(forged: Forgery) -> None:
    for worker in (2, 3):
        forged.push(worker, 4)["own"] += 0.25


@fault("a worker calls a chunk empty before its only push", Rule.PUSHES, **ONCE)
def _(forged: Forgery) -> None:
    part = forged.pushes[2][:1].copy()
    part["chunk"], part["is_empty"] = 0, 1
    forged.pushes[2] = np.concatenate([part, forged.pushes[2]])


@fault("a group forgets one of its workers", Rule.PUSHES)
def _(forged: Forgery) -> None:
    weight = forged.push(1, 4)["own"]
    for worker in (0, 1):
        forged.push(worker, 4)["weight"] = weight
    for server in (0, 1):
        events = forged.events[server]
        is_it = (events["kind"] == APPLY) & (events["group"] == 0) & (events["clock"] == 4)
        events["lr_scale"][is_it] *= np.float32(weight) / events["weight"][is_it]
        events["weight"][is_it] = weight


@fault("a worker forgets an iteration", Rule.PUSHES)
def _(forged: Forgery) -> None:
    forged.pushes[2] = forged.pushes[2][forged.pushes[2]["iteration"] != 4]


@fault("a worker forgets its last iteration", Rule.PUSHES)
def _(forged: Forgery) -> None:
    forged.pushes[2] = forged.pushes[2][forged.pushes[2]["iteration"] != 7]


@fault("a worker says that it pushed more than its group finished", Rule.PUSHES)
def _(forged: Forgery) -> None:
    more = forged.pushes[2][-1:].copy()
    more["iteration"] += 1
    forged.pushes[2] = np.concatenate([forged.pushes[2], more])


@fault("a worker calls a chunk empty that another one pushes", Rule.PUSHES)
def _(forged: Forgery) -> None:
    part = forged.pushes[0][4:5].copy()
    part["chunk"], part["is_empty"] = 2, 1  # worker 1's
    forged.pushes[0] = np.insert(forged.pushes[0], 5, part)


@fault("a worker calls a chunk empty of which it pushed a gradient", Rule.WEIGHTS)
def _(forged: Forgery) -> None:
    part = forged.pushes[0][4:5].copy()
    part["chunk"], part["is_empty"] = 0, 1
    forged.pushes[0] = np.insert(forged.pushes[0], 5, part)


def parts(forged: Forgery) -> np.ndarray:
    """The records of worker 2 about one chunk."""
    return np.flatnonzero(forged.pushes[2]["chunk"] != NO_CHUNK)


@fault("a worker calls a chunk empty twice", Rule.PUSHES, empty_rate=0.3)
def _(forged: Forgery) -> None:
    at = parts(forged)[0]
    forged.pushes[2] = np.insert(forged.pushes[2], at, forged.pushes[2][at : at + 1])


@fault("a worker calls a chunk empty before it pushes anything", Rule.PUSHES, empty_rate=0.3)
def _(forged: Forgery) -> None:
    at = parts(forged)[0]
    forged.pushes[2] = np.insert(forged.pushes[2], 0, forged.pushes[2][at : at + 1])


@fault("a worker calls a chunk empty with another weight", Rule.PUSHES, empty_rate=0.3)
def _(forged: Forgery) -> None:
    forged.pushes[2]["weight"][parts(forged)[0]] = 7.0


@fault("a worker calls a chunk full in words made for empty ones", Rule.PUSHES, empty_rate=0.3)
def _(forged: Forgery) -> None:
    forged.pushes[2]["is_empty"][parts(forged)[0]] = 0


@fault("a worker calls a chunk of a skipped iteration empty again", Rule.PUSHES, empty_rate=0.5)
def _(forged: Forgery) -> None:
    is_skipped = (forged.pushes[2]["weight"] == 0) & (forged.pushes[2]["chunk"] == NO_CHUNK)
    at = int(np.flatnonzero(is_skipped)[0])
    again = forged.pushes[2][at : at + 1].copy()
    again["chunk"] = 1
    forged.pushes[2] = np.insert(forged.pushes[2], at + 1, again)


@fault("a worker does not say which chunk was empty", Rule.WEIGHTS, empty_rate=0.3)
def _(forged: Forgery) -> None:
    forged.pushes[2] = forged.pushes[2][forged.pushes[2]["chunk"] == NO_CHUNK]


@fault("two workers write each other's pushes", Rule.PUSHES)
def _(forged: Forgery) -> None:
    forged.pushes[1], forged.pushes[3] = forged.pushes[3], forged.pushes[1]


# -- the list is a test ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_faulty_server_or_worker_is_refused_in_these_words(fault: Fault) -> None:
    assert fault.refused() == expected()[fault.what]


@pytest.mark.parametrize("block_cells", [1, 7])
@pytest.mark.parametrize(
    "fault",
    [
        fault
        for fault in [*FAULTS, *OTHERS]
        if fault.rule in (Rule.BOUND, Rule.OWN, Rule.STEPS, Rule.WHOLE_STEPS)
    ],
    ids=lambda fault: fault.what,
)
def test_words_are_the_same_in_however_many_blocks_updates_are_counted(
    fault: Fault, block_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BLOCK_CELLS", block_cells)
    assert fault.refused() == expected()[fault.what]


def test_every_fault_has_a_name_of_its_own_and_its_words() -> None:
    names = [fault.what for fault in [*FAULTS, *OTHERS, *LOADS]]
    assert len(names) == len(set(names)) >= 160
    assert set(names) == expected().keys()
