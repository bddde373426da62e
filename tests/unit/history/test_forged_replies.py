"""Forged histories, as in test_forged.py: uses, checksums, run.json and summary.json.

The honest run is the same as there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psdist.history.rules.findings import Rule
from tests.support.history.forged_words import expected
from tests.support.history.forging import Fault, FaultList, Forgery
from tests.support.history.toy_run import crc_of

PAIRS = {"groups": ((0, 1, 2), (3, 4)), "iterations": (8, 8)}

FAULTS = FaultList()
fault, change = FAULTS.fault, FAULTS.change

# -- uses ------------------------------------------------------------------------------------------


def give(forged: Forgery, workers: tuple[int, ...], iteration: int, chunk: int, other: int) -> None:
    """These workers use in ``iteration`` what they really used in iteration ``other``."""
    for worker in workers:
        use = forged.use(worker, iteration=iteration, chunk=chunk)
        honest = forged.use(worker, iteration=other, chunk=chunk)
        for name in ("position", "crc"):
            use[name] = honest[name]


@fault("a reply goes out one iteration beyond the bound", Rule.BOUND, staleness=0)
def _(forged: Forgery) -> None:
    # As if it had been made right after the group's own update.
    for worker, iteration, group in ((2, 5, 1), (3, 5, 2), (0, 5, 0), (1, 5, 0)):
        own = forged.find_event(0, 1, group=group, chunk=2, clock=iteration - 1)
        forged.use(worker, iteration=iteration, chunk=2)["position"] = own + 1


@fault("a worker uses parameters without its own last update", Rule.OWN)
def _(forged: Forgery) -> None:
    give(forged, (2,), 5, 2, 4)


@fault("a worker uses parameters without two of its updates", Rule.OWN, pipeline=1, mode="async")
def _(forged: Forgery) -> None:
    give(forged, (2,), 7, 2, 4)


@fault("workers of two groups use other versions than the rest", Rule.SAME_VERSION, **PAIRS)
def _(forged: Forgery) -> None:
    for worker, chunk in ((1, 2), (2, 1), (4, 1)):
        give(forged, (worker,), 5, chunk, 6)


@fault("a worker uses the last chunk once more as before at its end", Rule.SAME_VERSION)
def _(forged: Forgery) -> None:
    give(forged, (1,), 7, 2, 6)


@fault("a worker of a group leaves out an iteration", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[1] = forged.uses[1][forged.uses[1]["iteration"] != 3]


@fault("a forward pass begins in the iteration before", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.use(2, iteration=5, chunk=0)["iteration"] = 4


@fault("the first use is of a reply to come", Rule.SAMPLING)
def _(forged: Forgery) -> None:
    forged.use(2, iteration=0, chunk=2)["reply"] = 1


@fault("a worker uses newer parameters than its group", Rule.SAME_VERSION)
def _(forged: Forgery) -> None:
    give(forged, (1,), 5, 2, 6)


@fault("a worker uses the reply before the one that its group uses", Rule.SAME_VERSION)
def _(forged: Forgery) -> None:
    give(forged, (0,), 5, 2, 4)


@fault("a worker goes back to older parameters", Rule.BACKWARDS, mode="async", collectives=())
def _(forged: Forgery) -> None:
    give(forged, (2,), 6, 2, 4)


@fault("a worker names an older reply than before", Rule.BACKWARDS, mode="async", collectives=())
def _(forged: Forgery) -> None:
    forged.use(2, iteration=5, chunk=2)["reply"] = 2


@fault("a worker uses a version beyond the server's log", Rule.KNOWN_VERSION)
def _(forged: Forgery) -> None:
    forged.use(2, iteration=7, chunk=2)["position"] = len(forged.events[0]) + 1


@fault("a worker took a chunk from a server that does not own it", Rule.KNOWN_VERSION)
def _(forged: Forgery) -> None:
    forged.use(2, iteration=5, chunk=2)["server"] = 1


@fault("a worker used one chunk of an iteration in no version", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    uses = forged.uses[2]
    forged.uses[2] = uses[(uses["iteration"] != 5) | (uses["chunk"] != 1)]


@fault("a worker used one chunk twice and its neighbour never", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.use(2, iteration=5, chunk=2)["chunk"] = 0


@fault("a worker records a use twice", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[2] = np.insert(forged.uses[2], 10, forged.uses[2][10:11])


@fault("the second forward pass of an iteration lacks a chunk", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[2] = np.insert(forged.uses[2], 9, forged.uses[2][9:11], axis=0)


@fault("the last forward pass of a worker is cut short", Rule.COVERAGE, checksum_every=0)
def _(forged: Forgery) -> None:
    again = forged.uses[2][-3:-1].copy()
    forged.uses[2] = np.concatenate([forged.uses[2], again])


@fault("a worker leaves out an iteration", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[2] = forged.uses[2][forged.uses[2]["iteration"] != 5]


@fault("a worker leaves out two iterations", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[2] = forged.uses[2][~np.isin(forged.uses[2]["iteration"], [2, 5])]


@fault("a worker leaves out its last iteration", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[2] = forged.uses[2][forged.uses[2]["iteration"] != 7]


@fault("a worker trains one iteration more than its group", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    more = forged.uses[3][-3:].copy()
    more["iteration"] += 1
    more["reply"] += 1
    forged.uses[3] = np.concatenate([forged.uses[3], more])


@fault("a worker records its iterations out of order", Rule.BACKWARDS)
def _(forged: Forgery) -> None:
    forged.uses[2] = np.concatenate([forged.uses[2][3:6], forged.uses[2][:3], forged.uses[2][6:]])


@fault("two workers write each other's uses", Rule.COVERAGE)
def _(forged: Forgery) -> None:
    forged.uses[2], forged.uses[3] = forged.uses[3], forged.uses[2]


def use(forged: Forgery) -> np.void:
    return forged.use(2, iteration=5, chunk=2)


change("a use is of a reply two iterations old", Rule.SAMPLING, use, reply=3)
change("a use is of a reply to an iteration to come", Rule.SAMPLING, use, reply=6)
change("a use is of the reply to a pull that nobody made", Rule.CHECKSUM, use, reply=5)
change("a use names a chunk that does not exist", None, use, chunk=3)
change("a use names a server that does not exist", None, use, server=2)
change("a use says neither yes nor no to its checksum", None, use, has_crc=2)

# -- checksums -------------------------------------------------------------------------------------


@fault("a server takes no checksums", Rule.SAMPLING)
def _(forged: Forgery) -> None:
    forged.sums[0] = forged.sums[0][:0]


@fault("neither server nor workers have any checksum", Rule.SAMPLING, checksum_every=16)
def _(forged: Forgery) -> None:
    forged.sums = [sums[:0] for sums in forged.sums]
    for uses in forged.uses:
        uses["has_crc"] = uses["crc"] = 0


@fault("a server leaves out one checksum", Rule.SAMPLING, checksum_every=3)
def _(forged: Forgery) -> None:
    forged.sums[0] = np.delete(forged.sums[0], 4)


@fault("a server leaves out the checksum of a reply that nobody used", Rule.SAMPLING)
def _(forged: Forgery) -> None:
    sums = forged.sums[0]
    forged.sums[0] = sums[(sums["worker"] != 2) | (sums["chunk"] != 2) | (sums["clock"] != 7)]


@fault("a server takes a checksum too many", Rule.SAMPLING, checksum_every=3)
def _(forged: Forgery) -> None:
    more = forged.sums[0][4:5].copy()
    more["clock"] += 1
    forged.sums[0] = np.insert(forged.sums[0], 5, more)


@fault("a push is answered before it is applied", Rule.SAMPLING)
def _(forged: Forgery) -> None:
    last = forged.find_event(0, 1, last=True, group=2, chunk=2)
    forged.checksum(0, worker=3, chunk=2, clock=5)["position"] = last


@fault("a server does not tell workers of its checksums", Rule.SAMPLING)
def _(forged: Forgery) -> None:
    for uses in forged.uses:
        is_mine = uses["server"] == 0
        uses["has_crc"][is_mine] = uses["crc"][is_mine] = 0


change("a use lacks the checksum that it had to carry", Rule.SAMPLING, use, has_crc=0, crc=0)


@fault("a use carries a checksum that nobody asked for", Rule.SAMPLING, checksum_every=4)
def _(forged: Forgery) -> None:
    one = forged.use(2, has_crc=0)
    one["has_crc"] = 1


@fault("a worker takes the checksum of the neighbouring chunk", Rule.CHECKSUM)
def _(forged: Forgery) -> None:
    use(forged)["crc"] = forged.use(2, iteration=5, chunk=0)["crc"]


@fault("a worker computes on the bytes of the iteration before", Rule.CHECKSUM)
def _(forged: Forgery) -> None:
    use(forged)["crc"] = forged.use(2, iteration=4, chunk=2)["crc"]


@fault("a reply is overwritten while it is sent", Rule.CHECKSUM)
def _(forged: Forgery) -> None:
    crcs = [crc_of(2, version) for version in range(23)]
    use(forged)["crc"] = crcs[crcs.index(int(use(forged)["crc"])) + 1]


def checksum(forged: Forgery) -> np.void:
    return forged.checksum(0, worker=2, chunk=2, clock=4)


change("a server's checksum is not that of its bytes", Rule.CHECKSUM, checksum, crc=7)
change("a server's checksum is of the neighbouring chunk", Rule.CHECKSUM, checksum, chunk=0)
change("a server's checksum is of a chunk that is not its own", Rule.CHECKSUM, checksum, chunk=1)
change("a server's checksum is of a reply to somebody else", Rule.SAMPLING, checksum, worker=3)
change("a server's checksum is of the reply to another clock", Rule.SAMPLING, checksum, clock=5)
change("a server's checksum is of another position", Rule.CHECKSUM, checksum, position=3)
change("a server's checksum lies beyond its log", Rule.CHECKSUM, checksum, position=10**6)
change("a server's checksum is for a worker that does not exist", None, checksum, worker=4)


@fault("the same bytes have two checksums", Rule.CHECKSUM)
def _(forged: Forgery) -> None:
    other = forged.sums[0][:1].copy()
    other["crc"] ^= 1
    forged.sums[0] = np.concatenate([other, forged.sums[0]])


@fault("an empty step changes the bytes", Rule.CHECKSUM, empty_rate=0.7, mode="async")
def _(forged: Forgery) -> None:
    # From the first empty update of a chunk on, one reply and its use have other bytes.
    position = int(np.flatnonzero(forged.events[0]["flags"] & 2)[0])
    chunk = int(forged.events[0]["chunk"][position])
    sums = forged.sums[0]
    at = int(np.flatnonzero((sums["chunk"] == chunk) & (sums["position"] > position))[0])
    sums["crc"][at] ^= 1
    for uses in forged.uses:
        is_it = (uses["chunk"] == chunk) & (uses["position"] == sums["position"][at])
        uses["crc"][is_it & (uses["reply"] == sums["clock"][at])] ^= 1


# -- run.json --------------------------------------------------------------------------------------


def promise(what: str, rule: Rule, **changes: Any) -> None:
    """run.json promises something else than the run had; the summary is as it was."""

    def forge(forged: Forgery) -> None:
        assert {key: forged.run[key] for key in changes} != changes
        forged.run |= changes
        forged.is_summary_asked = True

    FAULTS.append(Fault(what, rule, forge))


promise("run.json promises async of a run of ssp", Rule.SUMMARY, mode="async", staleness=None)
promise("run.json promises sync of a run of ssp", Rule.STEPS, mode="sync", staleness=None)
promise("run.json promises a looser bound", Rule.SUMMARY, staleness=3)
promise("run.json promises a tighter bound", Rule.BOUND, staleness=0)
promise("run.json promises a pipeline", Rule.SUMMARY, pipeline=1)
promise("run.json promises fewer checksums", Rule.SAMPLING, checksum_every=2)
promise("run.json promises no checksums", Rule.SAMPLING, checksum_every=0)
promise("run.json gives a chunk to another server", Rule.APPLIES, owners=(0, 1, 1))
promise("run.json changes the groups' members", Rule.PUSHES, groups=((0, 2), (1,), (3,)))
promise(
    "run.json makes two groups of one",
    Rule.MEMBERSHIP,
    groups=((0,), (2,), (3,), (1,)),
    slices=((0, 0, 0),),
)
promise("run.json cuts the slices elsewhere", Rule.SAMPLING, slices=((0, 0, 0), (0, 0, 1)))


@fault("run.json halves checksum_every, and so does the summary", Rule.SAMPLING, checksum_every=4)
def _(forged: Forgery) -> None:
    forged.run["checksum_every"] = forged.summary["recorded"]["checksum_every"] = 2
    forged.is_summary_asked = True


# -- summary.json ----------------------------------------------------------------------------------


def claim(what: str, *path: str | int, to: Any) -> None:
    """summary.json says ``to`` at ``path``."""

    def forge(forged: Forgery) -> None:
        at: Any = forged.summary
        for key in path[:-1]:
            at[key] = list(at[key]) if isinstance(at[key], tuple) else at[key]
            at = at[key]
        before = at.get(path[-1]) if isinstance(at, dict) else at[path[-1]]
        assert before != to
        at[path[-1]] = to
        forged.summary = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in forged.summary.items()
        }
        forged.is_summary_asked = True

    FAULTS.append(Fault(f"summary.json {what}", Rule.SUMMARY, forge))


claim("is of another mode", "mode", to="async")
claim("has another bound", "staleness", to=1)
claim("has a server more", "servers", to=3)
claim("has a worker fewer", "workers", to=3)
claim("has another number of groups", "groups", to=4)
claim("has another number of chunks", "chunks", to=4)
claim("calls a server empty that is not", "empty_servers", to=(1,))
claim("says that a group finished more", "clocks", 2, to=7)
claim("says that a group finished less", "clocks", 0, to=7)
claim("counts more updates", "updates_applied", to=23)
claim("knows of no updates after a completed run", "updates_applied", to=None)
claim("says that nothing was stale", "max_staleness_seen", to=0)
claim("counts a use as fresher than it was", "staleness_seen", "0", to=1)
claim("counts a staleness that no use had", "staleness_seen", "9", to=1)
claim("knows of no record", "recorded", to=None)
claim("sampled other replies", "recorded", "checksum_every", to=16)
claim("lacks a server's counts", "per_server", to=())
claim("has a server count other events", "per_server", 0, "position", to=40)
claim("has a server take a push less", "per_server", 0, "pushes", to=43)
claim("has a server make a step more", "per_server", 1, "steps", to=23)
claim("has a server count other updates", "per_server", 1, "updates", to=21)
claim("has a server answer less than was pushed", "per_server", 0, "replies", to=43)
claim("has a server hold another chunk", "per_server", 1, "num_chunks", to=2)
claim("has a server take a checksum more", "per_server", 1, "checksums", to=1)
claim("has a server copy more often than it steps", "per_server", 1, "copies_on_write", to=23)


@fault("summary.json counts nothing as the history shows it", Rule.SUMMARY)
def _(forged: Forgery) -> None:
    forged.summary |= {"updates_applied": 1, "max_staleness_seen": 9, "staleness_seen": {"9": 1}}
    forged.summary |= {"mode": "sync", "groups": 1, "clocks": (1, 1, 1)}
    for server in forged.summary["per_server"]:
        server |= dict.fromkeys(server, 1)
    forged.is_summary_asked = True


@fault("an event file and everything that depends on it is one record shorter", Rule.SUMMARY)
def _(forged: Forgery) -> None:
    # An empty suspension: nothing but the server's own count knows of it.
    for kind in (3, 4):
        forged.delete(1, forged.find_event(1, kind, group=1))
    forged.is_summary_asked = True


# -- the list is a test ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_faulty_server_or_worker_is_refused_in_these_words(fault: Fault) -> None:
    assert fault.refused() == expected()[fault.what]
