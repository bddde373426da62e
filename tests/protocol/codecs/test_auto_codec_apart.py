"""codec = auto in ssp and async, on the virtual network: groups are in different rounds, each of
which has its codecs; what is waited for others is not taken for bytes; each change follows from
what was observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest
import torch

from psdist.codecs.wire import Wire, WireFrom
from psdist.errors import ProtocolError
from psdist.history.rules.choices.decisions import with_decided_codecs
from psdist.history.rules.findings import Findings
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.weights import check_codecs
from psdist.protocol.control import BeginCodecs, Control
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.rules.on_arrival import Async, Ssp
from psdist.workers.protocol.core import WorkerCore
from tests.protocol.codecs.test_auto_codec import (
    EXACT,
    FP16,
    INT4,
    INT8,
    LADDER,
    Deaf,
    Unbarred,
    with_proposals,
)
from tests.protocol.codecs.test_reader_copies import copies_of, held
from tests.protocol.test_auto_mode import Skewed, lines_of, violations
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.joining import play_with_joins
from tests.support.virtual.mode_deaths import ModeDeathsJob
from tests.support.virtual.network import LinkModel, VirtualNetwork
from tests.support.virtual.proof import prove
from tests.support.virtual.surviving import deaths_of, prove_survival, with_several_groups

CASTS: Final = Wire(
    push=EXACT,
    reply=EXACT,
    seed=5,
    is_ladder=True,
    later=(
        WireFrom(round=0, push=FP16, reply=FP16),
        WireFrom(round=0, push=INT8, reply=FP16),
        WireFrom(round=0, push=INT4, reply=FP16),
    ),
)
"""Without pull_copies."""
COPIES: Final = replace(LADDER, has_copies=True)
BOTH: Final = {"casts": CASTS, "copies": COPIES}
MODES: Final = ("ssp", "async")
FEW_AND_MANY = pytest.mark.parametrize(
    "seeds",
    [range(4), pytest.param(range(4, 150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)


def each_kind(seeds: range) -> list[tuple[int, str, str]]:
    """(seed, mode, ladder); of few seeds each mode and each ladder with half of them."""
    if len(seeds) < 10:
        return [(seed, MODES[seed % 2], [*BOTH][seed // 2 % 2]) for seed in seeds]
    return [(seed, mode, ladder) for seed in seeds for mode in MODES for ladder in BOTH]


@FEW_AND_MANY
def test_every_schedule_ends_and_keeps_its_rules_while_the_coordinator_changes_codecs(
    seeds: range,
) -> None:
    num_changes = 0
    for seed, mode, ladder in each_kind(seeds):
        schedule, proposals = with_proposals(seed)
        job = VirtualJob(replace(schedule, mode=mode), wire=BOTH[ladder])
        job.proposals = proposals
        try:
            job.run()
            prove(job)
            assert all(worker.loop.replies.num_differing == 0 for worker in job.workers)
            num_changes += len(job.codecs) - 1
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}, {mode}, {ladder}") from error
    assert num_changes >= len(seeds) / 2


@FEW_AND_MANY
def test_codecs_change_where_workers_die(seeds: range) -> None:
    met: Counter[str] = Counter()
    for seed, mode, ladder in each_kind(seeds):
        schedule, proposals = with_proposals(seed)
        schedule = with_several_groups(replace(schedule, mode=mode, has_model=True))
        job = ModeDeathsJob(schedule, wire=BOTH[ladder])
        job.proposals = proposals
        try:
            job.run()
            prove_survival(job)
            lived = [each for each in job.workers if each.worker not in job.out_of_the_job]
            assert all(each.loop.replies.num_differing == 0 for each in lived)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {mode}, {ladder}") from error
        met["changed and failed"] += len(job.codecs) > 1 and bool(deaths_of(job))
        met += job.met
    assert met["changed and failed"], met
    assert met["between the phases"] or len(seeds) < 10, met


def play_joins(seeds: range, modes: tuple[str, ...]) -> int:
    """How many schedules had changes and a spare that has joined."""
    num_met = 0
    for seed in seeds:
        mode = modes[seed % len(modes)]
        schedule, proposals = with_proposals(seed)
        schedule = with_several_groups(replace(schedule, mode=mode, has_model=True))
        wire = LADDER if mode == "sync" else [*BOTH.values()][seed // 3 % 2]
        job = play_with_joins(seed, base=schedule, wire=wire, proposals=proposals)
        try:
            prove_survival(job)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {mode}") from error
        num_met += bool(len(job.codecs) > 1 and job.joined)
    return num_met


@pytest.mark.parametrize(
    "seeds",
    [range(3), pytest.param(range(3, 150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_spares_that_join_find_the_codecs_of_then(seeds: range) -> None:
    assert play_joins(seeds, ("sync", *MODES)) > len(seeds) / 4


def test_a_spare_that_forgets_what_it_was_told_before_it_came_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_slice = WorkerCore.take_slice

    def forget(core: WorkerCore, *arguments: Any, **more: Any) -> None:
        if core.levels.early is not None:
            core.levels.early.clear()
        take_slice(core, *arguments, **more)

    monkeypatch.setattr(WorkerCore, "take_slice", forget)
    with pytest.raises((AssertionError, ProtocolError)):
        play_joins(range(8), MODES)


# -- by the controller ---------------------------------------------------------------------------

ROUNDS, HALF = 150, 60
SCHEDULE: Final = Schedule(
    seed=1, mode="ssp", staleness=2, num_chunks=2, chunk_elements=256, servers=1,
    group_sizes=(1, 1), lr=1e-3, iterations=(ROUNDS,) * 2, collectives=((),) * 2,
    compute_s=(2e-3,) * 2, momentum=0.9,
)  # fmt: skip


class Uneven(Skewed):
    """The last group takes three times longer to compute than the others."""

    def compute_s(self) -> float:
        return 12e-3 if self.group == len(self.job.groups) - 1 else 4e-3


class Slowing(VirtualNetwork):
    """A chunk takes 10 ms on its links until the slowest group is half way, and nearly nothing
    then, or the other way round."""

    job: VirtualJob

    def __init__(self, seed: int, *, is_slow_first: bool) -> None:
        slow, fast = (LinkModel(latency_s=1e-5, bytes_per_s=each) for each in (1e5, 1e9))

        def link(_sender: int, _peer: int) -> LinkModel:
            is_early = min(worker.clock for worker in self.job.workers) < HALF
            return slow if is_slow_first == is_early else fast

        super().__init__(seed=seed, link=link)


def train(
    mode: str, wire: Wire, *, seed: int = 1, is_slow_first: bool = True, **more: Any
) -> VirtualJob:
    network = Slowing(seed, is_slow_first=is_slow_first)
    schedule = replace(SCHEDULE, seed=seed, mode=mode, **more)
    network.job = VirtualJob(
        schedule, wire=wire, network=network, make_worker=Uneven, is_watched=False
    )
    network.job.run()
    return network.job


def test_in_ssp_a_slow_link_brings_a_coarse_codec_and_a_fast_one_takes_it_away() -> None:
    """On the fast link a round takes 12.3 ms. The group that is three times faster waits 8 ms of it
    for the other one: no codec shortens that."""
    job = train("ssp", COPIES)
    prove(job)
    coarse, *finer = job.codecs[1:]
    assert (coarse.push, coarse.pull) == ("int4", "sign")
    assert 20 <= coarse.round < 40
    assert finer[0].round > HALF
    assert [each.push for each in finer] == ["int4", "int8", "fp16", "none"][: len(finer)]
    assert len(finer) > 1
    lines = lines_of(job)
    assert violations(job, lines) == ()
    for worker in job.workers:
        assert worker.loop.replies.num_differing == 0
        mine, theirs = held(worker), copies_of(job, worker)
        assert all(torch.equal(mine[chunk], theirs[chunk]) for chunk in mine)

    # A false report of it is found.
    at = next(number for number, line in enumerate(lines) if line.changed is not None)
    changed = lines[at].changed
    assert changed is not None
    forged = {
        "calls for int4/sign": {"level": 2},
        "to codecs that are none": {"level": 5},
        "changed to int4/sign": {"mode": "sync", "staleness": 0},
    }
    for words, update in forged.items():
        line = lines[at].model_copy(update={"changed": changed.model_copy(update=update)})
        found = violations(job, [*lines[:at], line, *lines[at + 1 :]])
        assert any(words in each for each in found), (words, found)
    assert any("was never set" in each for each in violations(job, lines[:at]))
    history = job.history()
    begun = history.run.model_copy(update={"codecs": history.run.codecs[:1]})
    later = changed.model_copy(update={"rounds": [changed.rounds[0] + 1]})
    wrong = [*lines[:at], lines[at].model_copy(update={"changed": later}), *lines[at + 1 :]]
    for run, is_proved in ((history.run, True), (with_decided_codecs(begun, wrong), False)):
        findings = Findings(max_listed_per_rule=5)
        for log in history.servers:
            check_codecs(ServerReplay(run, log), findings)
        assert (not findings.total) == is_proved


def test_in_async_each_group_counts_by_its_rate() -> None:
    job = train("async", CASTS)
    prove(job)
    coarse, *finer = job.codecs[1:]
    assert (coarse.push, coarse.pull) == ("int4", "fp16")
    assert 20 <= coarse.round < 60
    assert [each.push for each in finer] == ["int8", "fp16", "none"][: len(finer)]
    assert finer, "the link is fast now"
    assert violations(job, lines_of(job)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ladder", BOTH)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_slow_first", [True, False], ids=["slow first", "fast first"])
def test_a_link_that_changes_is_found_out(
    mode: str, ladder: str, seed: int, *, is_slow_first: bool
) -> None:
    job = train(
        mode,
        BOTH[ladder],
        seed=seed,
        is_slow_first=is_slow_first,
        group_sizes=(1,) * 3,
        iterations=(2 * ROUNDS,) * 3,
        collectives=((),) * 3,
        compute_s=(2e-3,) * 3,
    )
    prove(job)
    names = [each.name for each in job.history().run.ladder]
    levels = [
        names.index(f"{each.push}/{each.pull}".replace("none/none", "none")) for each in job.codecs
    ]
    if is_slow_first:
        # Level by level, in async with a window of the slowest group's rounds for each.
        assert levels[-1] < max(levels)
        assert levels[-1] == 0 or mode == "async"
    else:
        assert levels[-1] >= 2
    assert violations(job, lines_of(job)) == ()


# -- broken on purpose ---------------------------------------------------------------------------


def failures(mode: str, seeds: range, **broken: Any) -> Iterator[str]:
    """Yield the failures of runs in which one server may learn of other codecs long before
    another."""
    for seed in seeds:
        schedule = replace(
            SCHEDULE,
            seed=seed,
            mode=mode,
            servers=2,
            num_chunks=4,
            iterations=(12,) * 2,
            compute_s=(1e-6,) * 2,
            jitter_s=1e-3,
        )
        given = {key: make(seed) for key, make in broken.items()}
        job = VirtualJob(schedule, wire=COPIES, **given)
        job.proposals = range(50, 900, 50)
        try:
            job.run()
            prove(job)
        except (ProtocolError, AssertionError) as error:
            yield str(error)


class UnbarredSsp(Unbarred, Ssp):
    pass


class UnbarredAsync(Unbarred, Async):
    pass


@pytest.mark.parametrize("mode", ["ssp", pytest.param("async", marks=pytest.mark.slow)])
def test_who_sends_on_or_has_not_heard_of_other_codecs_is_found(mode: str) -> None:
    def unbarred(_seed: int) -> Callable[[int], MakeRule]:
        bounded = partial(UnbarredSsp, staleness=SCHEDULE.staleness)
        return lambda _server: bounded if mode == "ssp" else UnbarredAsync

    assert [*failures(mode, range(2))] == []
    assert next(failures(mode, range(6), rule=unbarred), "")
    assert "are expected in round" in next(
        failures(mode, range(6), network=lambda seed: Deaf(seed=seed)), ""
    )


class Early(VirtualNetwork):
    """Tells one worker that other codecs begin a round earlier than they do."""

    def transmit_control(self, sender: int, peer: int, message: Control, set_index: int) -> int:
        if isinstance(message, BeginCodecs) and peer == worker_id(1):
            message = replace(message, round=message.round - 1)
        return super().transmit_control(sender, peer, message, set_index)


def test_a_worker_that_changes_a_round_early_is_found() -> None:
    found = next(failures("async", range(6), network=lambda seed: Early(seed=seed)), "")
    assert "are expected in round" in found
