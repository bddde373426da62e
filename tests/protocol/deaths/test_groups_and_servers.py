"""Workers fail whose groups continue without them, and servers that have buddies, the coordinator
among them: rules hold, every surviving worker makes every iteration, and what was acknowledged is
in the final parameters once.

More by hand: ``python -m tests.protocol.deaths.test_groups_and_servers 1000 2000 [coordinator]``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from psdist.errors import PsdistError
from psdist.history import EventKind
from psdist.protocol import coordinator_line
from psdist.protocol.control import Regroup, SaidToCoordinator
from psdist.servers.protocol.membership import Membership
from psdist.servers.replication import recording
from psdist.workers.protocol.resending import ResendingTransfers
from psdist.workers.protocol.transfers import Transfers
from tests.support.virtual.both_deaths import taken_over
from tests.support.virtual.going_on_with_buddies import (
    play_with_a_server_that_loses_what_heirs_push,
    play_with_groups_and_servers,
)
from tests.support.virtual.surviving import deaths_of, prove_survival

SEEDS = (5, 6, 18, 20)
COORDINATOR = (6, 13)
HEIRS = (6, 13)
"""In these a server fails with updates that other workers pushed for failed ones; in 13 no other
server has them."""
MANY = range(2000, 2300)


def play_and_prove(seeds: Iterable[int], **more: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_groups_and_servers(seed, **more)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        died, taken = deaths_of(job), taken_over(job)
        met[job.schedule.mode] += bool(died and taken)
        met["chief"] += bool(0 in died and taken)
        met["two servers"] += len(taken) > 1
        met["iterations that count in part"] += len(job.given_up)
        for each in job.sets:
            for log in each.history().servers:
                kinds = log.events["kind"]
                if {EventKind.TAKEOVER, EventKind.REFORM} <= set(kinds.tolist()):
                    is_first = np.argmax(kinds == EventKind.TAKEOVER) > np.argmax(
                        kinds == EventKind.REFORM
                    )
                    met["worker first" if is_first else "server first"] += 1
                    met["inherited"] += bool((kinds == EventKind.INHERIT).any())
    return met


def play_heirs(seeds: Iterable[int]) -> int:
    """Return how often a server had failed with updates pushed for failed workers."""
    met = 0
    for seed in seeds:
        job = play_with_a_server_that_loses_what_heirs_push(seed)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += bool(job.given_up and taken_over(job))
    return met


def test_the_living_finish_and_every_rule_holds() -> None:
    met = play_and_prove(SEEDS)
    for what in ("sync", "ssp", "async", "chief", "two servers", "worker first", "server first"):
        assert met[what], met
    assert met["iterations that count in part"], met


def test_the_coordinator_dies_while_groups_go_on() -> None:
    assert play_and_prove(COORDINATOR, coordinator=True)["worker first"]


def test_what_heirs_have_pushed_to_a_server_that_dies_is_pushed_again() -> None:
    assert play_heirs(HEIRS) == len(HEIRS)


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)
    play_and_prove(MANY, coordinator=True)
    assert play_heirs(range(100, 200))


ERRORS = (AssertionError, PsdistError)


def test_heirs_that_push_once_only_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Transfers.push_for_the_dead
    monkeypatch.setattr(ResendingTransfers, "push_for_the_dead", once)
    with pytest.raises(AssertionError, match="wait for ever"):
        play_heirs(HEIRS)


def test_who_goes_on_with_the_dead_in_their_groups_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_over(membership: Membership, *arguments: Any, **more: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Membership, "_shrink", lambda *_arguments: None)
            rightly(membership, *arguments, **more)

    rightly = Membership.take_over
    monkeypatch.setattr(Membership, "take_over", take_over)
    with pytest.raises(ERRORS):
        play_heirs(HEIRS)


def test_a_server_that_tells_its_buddy_of_deaths_alone_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "LOSSES", ("", "death"))
    with pytest.raises(ERRORS):
        play_heirs(HEIRS)


def test_words_of_workers_that_nobody_counts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [each for each in SaidToCoordinator.__subclasses__() if each is not Regroup]
    monkeypatch.setattr(coordinator_line, "SaidToCoordinator", tuple(counted))
    with pytest.raises(ERRORS):
        play_and_prove(COORDINATOR, coordinator=True)


if __name__ == "__main__":
    print(
        play_and_prove(
            range(int(sys.argv[1]), int(sys.argv[2])), coordinator="registrar" in sys.argv
        )
    )
