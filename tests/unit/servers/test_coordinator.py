"""Collectives: who has come, who has missed the call, who is done; in whatever order it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import ProtocolError
from psdist.protocol.collected import PREPARED, collected
from psdist.protocol.control import (
    Absent,
    Collected,
    Control,
    Done,
    Enter,
    Finished,
    Metrics,
    Progress,
    Resume,
    Resumed,
    WhoIsAbsent,
    encode_control,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorAction, is_plain
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.workers.data.position import EqualPasses


def tell(coordinator: Coordinator, message: Control) -> list[CoordinatorAction]:
    """As the peer whose message it is."""
    worker, server = getattr(message, "worker", None), getattr(message, "server", None)
    if isinstance(message, Metrics):
        worker = message.line["worker"]
    return coordinator.handle(server_id(server) if worker is None else worker_id(worker), message)


@dataclass(frozen=True)
class Script:
    """What a worker does: an iteration for each entry of ``batches``, the number of batches in a
    pass of the psdist loader that it comes from (0: the script's own). Then the collective."""

    batches: tuple[int, ...]
    call: str | None = "save"
    """None: the script ends without any call."""

    def messages(self, worker: int, reported: Random | None = None) -> list[Control]:
        """In the order in which they leave; ``reported`` chooses which iterations are."""
        passes = EqualPasses()
        messages: list[Control] = []

        def progress(clock: int) -> Progress:
            return Progress(
                worker=worker,
                clock=clock,
                samples=clock,
                loader_batches=passes.num_batches,
                loader_until=passes.until,
            )

        for clock, length in enumerate(self.batches):
            if length:
                passes.on_batch(length)
            passes.end_iteration()
            if reported is None or reported.random() < 0.5:
                messages.append(progress(clock + 1))
        messages.append(progress(len(self.batches)))
        if self.call is None:
            messages.append(Done(worker=worker, statistics={}))
        else:
            messages.append(Enter(worker=worker, seq=1, name=self.call, payload=b""))
        return messages


def has_passed(other: Script, first: Script) -> bool:
    return first.call is not None and len(other.batches) > len(first.batches)


def is_alike(other: Script, first: Script) -> bool:
    """Whether both iterate over loaders of one length, up to the first iteration too many."""
    used = {*first.batches, *other.batches[: len(first.batches) + 1]}
    return bool(first.batches) and len(used) == 1 and 0 not in used


def play(scripts: Sequence[Script], mode: str, chance: Random) -> tuple[list[str], list[str]]:
    """The errors and the warnings, in an order of arrival that ``chance`` chooses."""
    coordinator = assemble(num_workers=len(scripts), num_servers=1, mode=mode)
    queues = [each.messages(worker, chance) for worker, each in enumerate(scripts)]
    actions: list[CoordinatorAction] = []
    while left := [queue for queue in queues if queue]:
        actions += tell(coordinator, chance.choice(left).pop(0))
    sent = [each.message for each in actions if isinstance(each, SendControl)]
    errors = [each.error for each in sent if isinstance(each, Collected)]
    return errors, [each.text for each in actions if isinstance(each, Warn)]


scripts = st.builds(
    Script,
    batches=st.lists(st.sampled_from([0, 3, 7]), max_size=4).map(tuple)
    | st.integers(0, 4).map(lambda count: (3,) * count),
    call=st.sampled_from(["save", "save", "mean", None]),
)


@given(
    scripts=st.lists(scripts, min_size=2, max_size=4),
    mode=st.sampled_from(["sync", "ssp", "async"]),
    seed=st.integers(0, 2**32),
)
def test_the_verdict_follows_from_the_scripts_whatever_the_order_of_arrival(
    scripts: list[Script], mode: str, seed: int
) -> None:
    errors, warnings = play(scripts, mode, Random(seed))
    pairs = [(other, first) for first in scripts for other in scripts if has_passed(other, first)]
    is_error = mode == "sync" and any(is_alike(other, first) for other, first in pairs)
    calls = {each.call for each in scripts}
    if is_error or (len(calls) > 1 and calls != {None}):
        assert errors
        assert all(errors)
    else:
        assert not errors
        assert bool(warnings) == bool(pairs)
    if not is_error:
        assert not any("although both iterate" in error for error in errors)
    if is_error and calls == {"save"}:
        assert all("although both iterate" in error for error in errors)
    assert len(warnings) <= 2  # one for each name


@given(seed=st.integers(0, 2**32))
def test_the_words_are_the_same_whatever_the_order_of_arrival(seed: int) -> None:
    alike = [Script((12,) * 5), Script((12,) * 9, call=None)]
    errors, warnings = play(alike, "sync", Random(seed))
    assert errors == [
        "worker 0 called save after 5 iterations, but worker 1 continued past iteration 5 without "
        "calling save, although both iterate over a job.loader of 12 batches; save must be called "
        "by every worker, after the same iteration"
    ]
    assert warnings == []
    errors, warnings = play(alike, "async", Random(seed))
    assert errors == [
        "save was called by worker 0 only; absent: worker 1, whose script has finished; save must "
        "be called by every worker"
    ]
    assert warnings == [
        "worker 0 called save after 5 iterations, but worker 1 continued past iteration 5 without "
        "calling save; save must be called by every worker: if worker 1 never calls it, that will "
        "be an error at the end of its script"
    ]


def test_a_worker_that_goes_on_is_told_of_at_its_first_iteration_too_many() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    for message in Script((12,) * 5).messages(0):
        assert tell(coordinator, message) == []
    *on_time, late = Script((12,) * 6).messages(1)[:6]
    for message in on_time:
        assert tell(coordinator, message) == []
    (action,) = tell(coordinator, late)
    assert isinstance(action, SendControl)
    assert isinstance(action.message, Collected)
    assert "but worker 1 continued past iteration" in action.message.error


def test_whoever_comes_to_it_after_all_is_told_the_same() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    told = []
    for message in [*Script((12,) * 5).messages(0), *Script((12,) * 6).messages(1)]:
        told += tell(coordinator, message)
    errors = {each.message.error for each in told if isinstance(each, SendControl)}
    assert [each.peer for each in told if isinstance(each, SendControl)] != []
    assert len(told) == 2
    assert len(errors) == 1


def test_a_warning_comes_once_for_each_call() -> None:
    coordinator = assemble(num_workers=2, num_servers=1, mode="ssp")
    warnings = []
    for seq, name in enumerate(["mean", "mean", "save"], start=1):
        for worker, clock in ((0, 2 * seq), (1, 2 * seq + 1)):
            told = tell(coordinator, Progress(worker=worker, clock=clock, samples=0))
            told += tell(coordinator, Enter(worker=worker, seq=seq, name=name, payload=b""))
            warnings += [each.text for each in told if isinstance(each, Warn)]
        tell(coordinator, Resumed(seq=seq, server=0))
    assert [text.split(" after")[0] for text in warnings] == [
        "worker 0 called mean",
        "worker 0 called save",
    ]


# -- entering, resuming, failing -------------------------------------------------------------------


def answers(actions: list[CoordinatorAction]) -> dict[int, object]:
    sent = [action for action in actions if isinstance(action, SendControl)]
    assert len(sent) == len(actions)
    return {action.peer: action.message for action in sent}


def enter(worker: int, name: str = "save", seq: int = 1) -> Enter:
    return Enter(worker=worker, seq=seq, name=name, payload=bytes([worker % 256]))


def test_a_collective_ends_when_all_workers_have_come_and_all_servers_have_resumed() -> None:
    coordinator = assemble(num_workers=2, num_servers=2)
    assert tell(coordinator, enter(1)) == []
    resumes = answers(tell(coordinator, enter(0)))
    assert resumes == {server_id(0): Resume(seq=1), server_id(1): Resume(seq=1)}
    assert tell(coordinator, Resumed(seq=1, server=1)) == []
    collected = Collected(seq=1, payloads=[b"\0", b"\1"], runs=[0, 1, 1, 1], values=b"", error="")
    done = answers(tell(coordinator, Resumed(seq=1, server=0)))
    assert done == {worker_id(0): collected, worker_id(1): collected}


def test_whoever_comes_late_to_a_failed_collective_hears_the_same_error() -> None:
    coordinator = assemble(num_workers=3, num_servers=1)
    tell(coordinator, enter(0, "barrier"))
    failed = answers(tell(coordinator, enter(2, "mean")))
    late = answers(tell(coordinator, enter(1, "mean")))
    assert failed.keys() == {worker_id(0), worker_id(2)}
    assert late.keys() == {worker_id(1)}
    assert {*map(str, failed.values())} == {*map(str, late.values())}
    error = getattr(late[worker_id(1)], "error", "")
    assert error.startswith(
        "workers made different calls: worker 0 called barrier; worker 2 called mean"
    )
    assert tell(coordinator, Done(worker=1, statistics={})) == []  # it is told once


@pytest.mark.parametrize("finishes_first", [True, False])
def test_a_collective_fails_when_somebody_who_has_not_come_has_finished(
    finishes_first: bool,
) -> None:
    coordinator = assemble(num_workers=12, num_servers=1)
    if finishes_first:
        tell(coordinator, Done(worker=11, statistics={}))
    for worker in range(10):
        failed = tell(coordinator, enter(worker))
        if finishes_first and worker == 0:
            break
    else:
        failed = tell(coordinator, Done(worker=11, statistics={}))
    error = getattr(answers(failed)[worker_id(0)], "error", "")
    came = "worker 0" if finishes_first else "workers 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert error == (
        f"save was called by {came} only; absent: worker 11, whose script has finished; save must "
        "be called by every worker"
    )


def test_who_is_absent_is_answered_while_the_collective_lasts_only() -> None:
    coordinator = assemble(num_workers=3, num_servers=1)
    tell(coordinator, enter(2))
    asked = WhoIsAbsent(worker=2, seq=1)
    assert answers(tell(coordinator, asked)) == {
        worker_id(2): Absent(seq=1, workers=[0, 1], num_absent=2)
    }
    tell(coordinator, enter(0))
    tell(coordinator, enter(1))
    tell(coordinator, Resumed(seq=1, server=0))
    assert tell(coordinator, asked) == []


def test_a_server_that_resumes_what_is_not_complete_breaks_the_protocol() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    tell(coordinator, enter(0))
    for seq in (1, 7):
        with pytest.raises(ProtocolError, match=f"server 0 resumed collective {seq}"):
            tell(coordinator, Resumed(seq=seq, server=0))


# -- what a worker says of its loaders -------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        ([], (0, 0)),
        ([{12}], (12, 1)),
        ([{12}, {12}, {12}], (12, 3)),
        ([{12}, set(), {12}], (12, 1)),  # a batch of its own
        ([{12}, {12}, {7}, {12}], (12, 2)),
        ([{12}, {12, 7}], (12, 1)),
        ([set(), {12}], (0, 0)),
        ([{12, 7}, {12}], (0, 0)),
    ],
)
def test_passes_are_equal_until_the_first_iteration_of_another_kind(
    iterations: list[set[int]], expected: tuple[int, int]
) -> None:
    passes = EqualPasses()
    for lengths in iterations:
        for length in [*lengths, *lengths]:
            passes.on_batch(length)
        passes.end_iteration()
    assert (passes.num_batches, passes.until) == expected


# -- what cannot be --------------------------------------------------------------------------------


PROGRESS = Progress(worker=1, clock=3, samples=1)
DONE = Done(worker=1, statistics={})


@pytest.mark.parametrize(
    ("peer", "messages", "what"),
    [
        (worker_id(0), [enter(1)], "worker 0 sent Enter of worker 1"),
        (worker_id(2), [enter(2)], "worker 2 sent Enter of worker 2"),
        (worker_id(-1), [enter(-1)], "spare 524287 sent Enter of worker -1"),
        (server_id(1), [enter(1)], "server 1 sent Enter of worker 1"),
        (worker_id(1), [enter(1, seq=2)], "worker 1 entered collective 2 after collective 0$"),
        (
            worker_id(1),
            [enter(1), enter(1, seq=2)],
            "worker 1 entered collective 2 after collective 1, which is not over$",
        ),
        (worker_id(1), [enter(1), enter(1)], "worker 1 entered collective 1 after collective 1"),
        (
            worker_id(1),
            [DONE, enter(1, seq=2)],
            "entered collective 2 after collective 0, and its script has finished$",
        ),
        (worker_id(1), [DONE, DONE], "worker 1 sent Done twice"),
        (worker_id(1), [enter(1), DONE], "worker 1 sent Done twice, inside a collective"),
        (worker_id(1), [Done(worker=1, statistics={"a": b"b"})], "what is no plain data"),
        (worker_id(0), [DONE], "worker 0 sent Done of worker 1"),
        (worker_id(0), [PROGRESS], "worker 0 sent Progress of worker 1"),
        (
            worker_id(1),
            [PROGRESS, Progress(worker=1, clock=2, samples=1)],
            "worker 1 sent Progress at clock 2 after 3",
        ),
        (
            worker_id(1),
            [Progress(worker=1, clock=-1, samples=0)],
            "at clock -1 after none",
        ),
        (worker_id(1), [Progress(worker=1, clock=0, samples=-1)], "after none, -1 samples"),
        (worker_id(0), [WhoIsAbsent(worker=1, seq=1)], "worker 0 sent WhoIsAbsent of worker 1"),
        (worker_id(1), [Metrics(line={"worker": 0})], "a line of metrics that is not its own"),
        (worker_id(1), [Metrics(line={})], "a line of metrics that is not its own"),
        (worker_id(1), [Metrics(line={"worker": 1, "values": [1]})], "or no plain data"),
        (worker_id(1), [Metrics(line={"worker": 1, "values": {"a": b"b"}})], "or no plain data"),
        (server_id(1), [Resumed(seq=1, server=0)], "server 1 sent Resumed of server 0"),
        (server_id(2), [Resumed(seq=1, server=2)], "server 2 sent Resumed of server 2"),
        (server_id(-1), [Resumed(seq=1, server=-1)], "server -1 sent Resumed of server -1"),
        (server_id(0), [Finished(server=1, statistics={})], "server 0 sent Finished of server 1"),
        (
            server_id(1),
            [Finished(server=1, statistics={})],
            "server 1 sent Finished twice, unasked",
        ),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_peer(
    peer: int, messages: list[Control], what: str
) -> None:
    coordinator = assemble(num_workers=2, num_servers=2)
    *before, last = messages
    for message in before:
        coordinator.handle(peer, message)
    with pytest.raises(ProtocolError, match=f"the coordinator: .*{what}"):
        coordinator.handle(peer, last)


def test_a_server_resumes_a_collective_once_and_reports_once() -> None:
    coordinator = assemble(num_workers=1, num_servers=3)
    tell(coordinator, enter(0))
    tell(coordinator, Resumed(seq=1, server=2))
    tell(coordinator, Resumed(seq=1, server=1))
    with pytest.raises(ProtocolError, match="server 2 resumed collective 1 twice"):
        tell(coordinator, Resumed(seq=1, server=2))
    tell(coordinator, Resumed(seq=1, server=0))
    tell(coordinator, Done(worker=0, statistics={}))
    with pytest.raises(ProtocolError, match=r"server 1 sent Finished .* no plain data"):
        tell(coordinator, Finished(server=1, statistics={"a": {"b": [b"c"]}}))
    assert tell(coordinator, Finished(server=1, statistics={"a": {"b": [1, None, "c", 0.5]}})) == []
    with pytest.raises(ProtocolError, match="server 1 sent Finished twice"):
        tell(coordinator, Finished(server=1, statistics={}))


def test_plain_data_is_what_a_json_file_takes_and_no_deeper_than_needed() -> None:
    deep: object = 1
    for _ in range(9):
        deep = [deep]
    assert is_plain([[[[[[[[1]]]]]]]])
    assert not is_plain(deep)
    assert not is_plain({1: 2})
    assert not is_plain({"a": 1, 1: "a"})
    assert not is_plain({"a": 1, "b": b"b"})
    assert not is_plain([1, b"b"])
    assert not is_plain((1,))


# -- what all have brought -------------------------------------------------------------------------


def test_an_answer_does_not_grow_with_the_workers() -> None:
    sizes = []
    for num_workers in (100, 10_000):
        entered = [
            Enter(worker=worker, seq=1, name="mean", payload=b"tree", values=np.ones(3).tobytes())
            for worker in range(num_workers)
        ]
        answer = collected(1, entered)
        assert np.frombuffer(answer.values).tolist() == [num_workers] * 3
        sizes.append(len(encode_control(answer)))
    assert sizes[1] - sizes[0] < 8


def test_of_many_different_payloads_a_few_are_told() -> None:
    entered = [enter(worker) for worker in range(200)]
    answer = collected(1, entered)
    assert answer.payloads == [bytes([worker]) for worker in range(8)]
    assert answer.runs[:16] == [number for each in range(8) for number in (each, 1)]
    assert answer.runs[16:] == [8, 192]


def test_numbers_are_summed_in_the_order_of_the_workers() -> None:
    rows = [0.1, 1e17, -1e17, 0.3]
    entered = [
        Enter(worker=worker, seq=1, name="mean", payload=b"", values=np.array([row]).tobytes())
        for worker, row in enumerate(rows)
    ]
    assert np.frombuffer(collected(1, entered).values)[0] == ((0.1 + 1e17) - 1e17) + 0.3
    different = [*entered[:3], Enter(worker=3, seq=1, name="mean", payload=b"x")]
    assert collected(1, different).values == b""


@pytest.mark.parametrize(
    ("lengths", "what"),
    [
        ((8, 16), "worker 0 brought 8 bytes of numbers and worker 1 a different"),
        ((7, 7), "worker 0 brought 7 bytes of"),
    ],
)
def test_numbers_that_do_not_fit_together_break_the_protocol(
    lengths: tuple[int, ...], what: str
) -> None:
    entered = [
        Enter(worker=worker, seq=1, name="mean", payload=b"", values=bytes(length))
        for worker, length in enumerate(lengths)
    ]
    with pytest.raises(ProtocolError, match=f"to mean {what}"):
        collected(1, entered)


def test_what_rounds_took_is_refused_where_nothing_depends_on_it() -> None:
    for told in ({"own_us": [5]}, {"waits_us": [1]}, {"errors_ppm": [3]}):
        progress = Progress(worker=0, clock=1, samples=1, **told)
        with pytest.raises(ProtocolError, match="worker 0 told what rounds took, unasked"):
            tell(assemble(num_workers=1, num_servers=1), progress)


def test_a_prepare_of_more_parameters_ends_the_state_in_which_all_have_prepared() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    for worker in range(2):
        tell(coordinator, Enter(worker=worker, seq=1, name="prepare", payload=PREPARED))
    tell(coordinator, Resumed(seq=1, server=0))
    assert coordinator.is_ready
    tell(coordinator, Enter(worker=0, seq=2, name="prepare", payload=PREPARED))
    assert coordinator.is_ready
    tell(coordinator, Enter(worker=1, seq=2, name="prepare", payload=b"another model"))
    assert not coordinator.is_ready
