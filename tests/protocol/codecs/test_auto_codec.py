"""codec = auto on the virtual network: as lossless as the link allows, and back when it is fast
again; each message has the codec of its round, and each change follows from what was observed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from psdist.codecs.schemes.plain import Cast, Exact
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.wire import Wire, WireFrom
from psdist.errors import ProtocolError
from psdist.history.rules.choices.decisions import with_decided_codecs
from psdist.history.rules.findings import Findings
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.weights import check_codecs
from psdist.protocol.control import BeginCodecs, Control
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.rules import MakeRule, RoundRule
from psdist.servers.protocol.rules.clipping import Sync
from tests.protocol.codecs.test_reader_copies import held
from tests.protocol.test_auto_mode import Skewed, lines_of, violations
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.mode_deaths import ModeDeathsJob
from tests.support.virtual.network import LinkModel, VirtualNetwork
from tests.support.virtual.proof import prove
from tests.support.virtual.surviving import deaths_of, prove_survival, with_several_groups

EXACT, FP16 = Exact(), Cast("fp16")
INT8, INT4 = Quantized("int8"), Quantized("int4")
LADDER: Final = Wire(
    push=EXACT,
    reply=EXACT,
    seed=5,
    is_relative=True,
    compare_every=1,
    is_ladder=True,
    later=(
        WireFrom(round=0, push=FP16, reply=FP16),
        WireFrom(round=0, push=INT8, reply=INT8, exact_in_replies=("*1",)),
        WireFrom(round=0, push=INT4, reply=INT4),
        WireFrom(round=0, push=INT4, reply=Sign()),
    ),
)


def with_proposals(seed: int) -> tuple[Schedule, list[int]]:
    """A schedule in sync, and when the coordinator proposes other codecs."""
    pick = random.Random(f"{seed} proposals")
    schedule = replace(Schedule.from_seed(seed), mode="sync", later=(), mode_rate=0.0, death=None)
    schedule = replace(schedule, more_sets=(), mistake="")
    return schedule, sorted(int(10 ** pick.uniform(1.5, 3.5)) for _ in range(pick.randint(1, 6)))


def propose(seed: int) -> VirtualJob:
    schedule, proposals = with_proposals(seed)
    job = VirtualJob(schedule, wire=LADDER)
    job.proposals = proposals
    job.run()
    return job


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_every_schedule_ends_and_keeps_its_rules_while_the_coordinator_changes_codecs(
    seeds: range,
) -> None:
    num_changes = 0
    for seed in seeds:
        try:
            job = propose(seed)
            prove(job)
            assert all(worker.loop.replies.num_differing == 0 for worker in job.workers)
            num_changes += len(job.codecs) - 1
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {with_proposals(seed)}") from error
    assert num_changes > len(seeds) / 2


def test_codecs_change_where_workers_die_and_all_who_live_hold_the_same() -> None:
    met: Counter[str] = Counter()
    for seed in range(16):
        schedule, proposals = with_proposals(seed)
        job = ModeDeathsJob(with_several_groups(replace(schedule, has_model=True)), wire=LADDER)
        job.proposals = proposals
        job.run()
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        lived = [each for each in job.workers if each.worker not in job.out_of_the_job]
        assert all(each.loop.replies.num_differing == 0 for each in lived), seed
        met["changed and failed"] += len(job.codecs) > 1 and bool(deaths_of(job))
        met += job.met
    for what in ("changed and failed", "between the phases", "proposed while a death was told"):
        assert met[what], met


# -- by the controller ---------------------------------------------------------------------------

ROUNDS, HALF = 220, 60
SCHEDULE: Final = Schedule(
    seed=1, num_chunks=2, chunk_elements=256, servers=2, group_sizes=(1, 1), lr=1e-3,
    iterations=(ROUNDS,) * 2, collectives=((),) * 2, compute_s=(1e-3,) * 2, momentum=0.9,
)  # fmt: skip


class Steady(Skewed):
    """All compute alike."""

    def compute_s(self) -> float:
        return 1e-3


class Slowing(VirtualNetwork):
    """A chunk takes 10 ms on its links for the first half of the rounds, and nearly nothing then,
    or the other way round."""

    job: VirtualJob

    def __init__(self, seed: int, *, is_slow_first: bool) -> None:
        slow, fast = (LinkModel(latency_s=1e-5, bytes_per_s=each) for each in (1e5, 1e9))

        def link(_sender: int, _peer: int) -> LinkModel:
            return slow if is_slow_first == (self.job.workers[0].clock < HALF) else fast

        super().__init__(seed=seed, link=link)


def train(seed: int, *, is_slow_first: bool) -> VirtualJob:
    network = Slowing(seed, is_slow_first=is_slow_first)
    schedule = replace(SCHEDULE, seed=seed)
    network.job = VirtualJob(
        schedule, wire=LADDER, network=network, make_worker=Steady, is_watched=False
    )
    network.job.run()
    return network.job


@pytest.mark.parametrize("seed", range(1, 2))
def test_a_slow_link_brings_a_coarse_codec_and_a_fast_one_takes_it_away(seed: int) -> None:
    job = train(seed, is_slow_first=True)
    prove(job)
    coarse, *finer = job.codecs[1:]
    assert (coarse.push, coarse.pull) == ("int4", "sign")
    assert 20 <= coarse.round < 40
    assert HALF < finer[0].round < HALF + 50
    assert [each.push for each in finer] == ["int4", "int8", "fp16", "none"][-len(finer) :]
    assert job.codecs[-1].push == "none"
    assert violations(job, lines_of(job)) == ()
    # The last rounds have no codec: what was left out has come, and all hold the servers' own.
    for worker in job.workers:
        mine = held(worker)
        assert all(torch.equal(mine[chunk], job.parameters_of(chunk)) for chunk in mine)


def test_a_link_that_becomes_slow_is_found_out() -> None:
    job = train(3, is_slow_first=False)
    prove(job)
    assert [(each.push, each.pull) for each in job.codecs] == [
        *(("none", "none"), ("int4", "int4"), ("none", "none"), ("int4", "sign")),
    ]
    assert job.codecs[3].round > HALF
    assert violations(job, lines_of(job)) == ()


def test_decisions_that_do_not_follow_and_messages_of_other_codecs_are_found() -> None:
    job = train(1, is_slow_first=True)
    lines = lines_of(job)
    at = next(number for number, line in enumerate(lines) if line.changed is not None)
    changed, observed = lines[at].changed, lines[at - 1].observed
    assert changed is not None
    assert observed is not None
    sized = lines[0].sized
    assert sized is not None

    def with_line(number: int, **update: Any) -> list[Any]:
        line = lines[number].model_copy(update=update)
        return [*lines[:number], line, *lines[number + 1 :]]

    errors = [9] * (1 + len(observed.own_us))
    forged = {
        "changed to int8/int8": with_line(at, changed=changed.model_copy(update={"level": 2})),
        "calls for int4/sign": with_line(at, changed=changed.model_copy(update={"why": "none"})),
        "none of this run": with_line(at, changed=changed.model_copy(update={"level": 5})),
        "to codecs that": with_line(at, changed=changed.model_copy(update={"level": -1})),
        "was never set": lines[:at],
        "not of the codecs": with_line(0, sized=replace(sized, sizes=[5, 4])),
        "what was observed calls for no change": lines[1:],
        "not as much of each round": with_line(
            at - 1, observed=replace(observed, errors_ppm=errors)
        ),
    }
    for words, wrong in forged.items():
        assert any(words in line for line in violations(job, wrong)), words

    history = job.history()
    begun = history.run.model_copy(update={"codecs": history.run.codecs[:1]})
    assert with_decided_codecs(begun, lines) == history.run
    later = with_line(at, changed=changed.model_copy(update={"rounds": [changed.rounds[0] + 1]}))
    for run, is_proved in ((history.run, True), (with_decided_codecs(begun, later), False)):
        findings = Findings(max_listed_per_rule=5)
        for log in history.servers:
            check_codecs(ServerReplay(run, log), findings)
        assert (not findings.total) == is_proved


# -- broken on purpose ---------------------------------------------------------------------------


class Unbarred(RoundRule):
    """Sends parameters for later rounds while other codecs are proposed."""

    def hold_rounds(self, highest: int, chunks: Iterable[ChunkState]) -> None:
        pass


class UnbarredSync(Unbarred, Sync):
    pass


class Deaf(VirtualNetwork):
    """Says nothing of other codecs to one worker."""

    def transmit_control(self, sender: int, peer: int, message: Control, set_index: int) -> int:
        if isinstance(message, BeginCodecs) and peer == worker_id(0):
            return 0
        return super().transmit_control(sender, peer, message, set_index)


def failures(**broken: Any) -> list[str]:
    """Return the failures of runs in which one server may learn of other codecs long before
    another."""
    found = []
    for seed in range(8):
        schedule = replace(SCHEDULE, seed=seed, iterations=(12,) * 2, jitter_s=1e-3)
        given = {key: make(seed) for key, make in broken.items()}
        job = VirtualJob(schedule, wire=LADDER, **given)
        job.proposals = range(50, 900, 50)
        try:
            job.run()
            prove(job)
        except (ProtocolError, AssertionError) as error:
            found.append(str(error))
    return found


def test_without_a_fault_these_runs_end() -> None:
    assert failures() == []


def test_servers_that_send_on_while_codecs_are_proposed_are_found() -> None:
    def rule(_seed: int) -> Callable[[int], MakeRule]:
        return lambda _server: UnbarredSync

    assert failures(rule=rule)


def test_a_worker_that_has_not_heard_of_other_codecs_is_found() -> None:
    found = failures(network=lambda seed: Deaf(seed=seed))
    assert any("are expected in round" in each for each in found)
