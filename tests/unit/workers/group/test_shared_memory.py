"""Groups that read one another's memory: whatever comes first, bits and errors are the same."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from psdist.errors import (
    CollectiveError,
    InvariantError,
    TransportError,
    UsageError,
)
from psdist.protocol.memory import as_tensor
from psdist.protocol.partition import Span
from psdist.workers.group import segments
from psdist.workers.group.channel import AloneChannel, Done, GroupChannel, Pending
from psdist.workers.group.segments import (
    Bell,
    Segment,
    bytes_of,
    has_ended,
    open_bell,
    open_segment,
    ring,
    started_at,
)
from psdist.workers.group.shared_memory import (
    Offer,
    SharedMemoryChannel,
    connect,
)
from tests.support.group_operations import expected, finish, operations
from tests.support.process_groups import run_in_group

_open: list[SharedMemoryChannel] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """One process is all workers of many groups here, and may open 1,024 files."""
    yield
    while _open:
        _open.pop().close()


def group_of(size: int) -> list[SharedMemoryChannel]:
    """All ends of a group, in this process."""
    offers = [Offer() for _ in range(size)]
    table = [offer.row for offer in offers]
    group = [offer.accept(place, table, is_spinning=False) for place, offer in enumerate(offers)]
    _open.extend(group)
    return group


def besides_of(size: int) -> tuple[list[SharedMemoryChannel], list[SharedMemoryChannel]]:
    """All ends of a group, and of one beside it, in this process."""
    group = group_of(size)
    besides: dict[int, SharedMemoryChannel] = {}

    def make(channel: SharedMemoryChannel) -> None:
        besides[channel.place] = channel.duplicate()

    threads = [Thread(target=make, args=[channel]) for channel in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return group, [besides[place] for place in range(size)]


def play(scripts: Sequence[Any], *, seed: int) -> list[Any]:
    """What each script of a worker returns; which of them continues is drawn."""
    pick = random.Random(seed)
    results: list[Any] = [None] * len(scripts)
    pending: dict[int, Pending[Any] | None] = dict.fromkeys(range(len(scripts)))
    while pending:
        place = pick.choice(sorted(pending))
        awaited = pending[place]
        if awaited is None or awaited.is_done():
            try:
                pending[place] = next(scripts[place])
            except StopIteration as stop:
                results[place] = stop.value
                del pending[place]
    return results


# -- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(8))
def test_whoever_goes_on_first_the_sums_are_those_in_worker_order(size: int, seed: int) -> None:
    scripts = [operations(channel, channel) for channel in group_of(size)]
    results = play(scripts, seed=seed)
    for place, result in enumerate(results):
        assert result == expected(place, size), f"place {place}"


@pytest.mark.parametrize("seed", range(4))
def test_operations_of_ends_beside_one_another_do_not_meet(seed: int) -> None:
    group, besides = besides_of(3)
    results = play([operations(*ends) for ends in zip(group, besides, strict=True)], seed=seed)
    assert results == [expected(place, 3) for place in range(3)]


def test_memory_of_one_end_is_added_from_where_it_lies_by_the_one_beside_it() -> None:
    group, besides = besides_of(2)
    slices = [[Span(0, 0, 12)], [Span(0, 12, 24)]]
    flats = [as_tensor(channel.allocate(96), "float32", 24).fill_(1.0) for channel in group]
    sums = [torch.zeros(12) for _ in group]
    pending = [
        beside.reduce_scatter([flat], slices, [total])
        for beside, flat, total in zip(besides, flats, sums, strict=True)
    ]
    assert all(each.is_done() for each in pending)
    assert [total.tolist() for total in sums] == [[2.0] * 12] * 2
    assert [flat.tolist() for flat in flats] == [[1.0] * 24] * 2
    assert not any(channel._staging for channel in (*group, *besides))


def test_a_group_that_is_over_leaves_no_file_open() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    scripts = [operations(*ends) for ends in zip(*besides_of(3), strict=True)]
    play(scripts, seed=1)
    assert len(os.listdir("/proc/self/fd")) > before
    while _open:
        _open.pop().close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def small_rounds(channel: GroupChannel, num_rounds: int, *, is_shared: bool) -> Any:
    """Steps as a trainer makes them; what is the caller's again is spoilt at once."""
    length, size = 7 * channel.size + 1, channel.size
    slices = [[Span(0, 7 * place, 7 * place + 7)] for place in range(size - 1)]
    slices.append([Span(0, 7 * (size - 1), length)])
    ((_, first, last),) = slices[channel.place]
    values = torch.zeros(length)
    gradients = torch.zeros(length)
    if is_shared:
        gradients = as_tensor(channel.allocate(4 * length), "float32", length)
    for number in range(num_rounds):
        pending = channel.agree("optimizer.step", [channel.place, number])
        yield pending
        assert pending.result() == [[place, number] for place in range(size)]
        gradients.fill_(1e-8 * (number + channel.place))
        gradients[0] = 1e8 if channel.place == 0 else 1.0
        summed = channel.reduce_scatter([gradients], slices)
        yield summed
        summed.result()
        values[first:last] = gradients[first:last]
        if not is_shared:
            gradients.fill_(torch.nan)
        gathered = channel.all_gather([values], slices)
        yield gathered
        gathered.result()
        rows = [torch.full((length,), 1e-8 * (number + place)) for place in range(size)]
        for place, row in enumerate(rows):
            row[0] = 1e8 if place == 0 else 1.0
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        assert torch.equal(values, total), f"round {number}"
        values.fill_(torch.nan)
        gradients.fill_(torch.nan)
    return True


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_memory_may_be_written_when_the_seam_says_so(size: int, seed: int, is_shared: bool) -> None:
    scripts = [small_rounds(channel, 40, is_shared=is_shared) for channel in group_of(size)]
    assert all(play(scripts, seed=seed))


def thousand_rounds(channel: GroupChannel) -> Any:
    return finish(small_rounds(channel, 1000, is_shared=True))


def test_processes_make_a_thousand_small_rounds() -> None:
    assert all(run_in_group(3, thousand_rounds, tier="shared_memory"))


@pytest.mark.parametrize("is_shared", [True, False])
def test_shared_flats_are_added_from_where_they_lie_and_others_are_staged(is_shared: bool) -> None:
    slices = [[Span(0, 0, 12)], [Span(0, 12, 24)]]
    channels = group_of(2)
    pending = []
    for channel in channels:
        flat = torch.ones(24)
        if is_shared:
            flat = as_tensor(channel.allocate(96), "float32", 24).fill_(1.0)
        pending.append(channel.reduce_scatter([flat], slices))
    assert all(each.is_done() for each in pending)
    assert [len(channel._staging) for channel in channels] == [not is_shared] * 2


def test_staging_memory_is_used_again_and_grows() -> None:
    channels = group_of(2)
    for length in (64, 64, 64, 64, 4096, 64, 4096):
        slices = [[Span(0, 0, 32)], [Span(0, 32, length)]]
        flats = [torch.full((length,), float(place)) for place in range(2)]
        pending = [
            channel.all_gather([flat], slices)
            for channel, flat in zip(channels, flats, strict=True)
        ]
        assert all(each.is_done() for each in pending)
        assert torch.equal(flats[0], flats[1])
        assert flats[0].tolist() == [0.0] * 32 + [1.0] * (length - 32)
    assert [len(channel._staging) for channel in channels] == [2, 2]


def test_entries_that_are_too_long_for_the_book_are_staged() -> None:
    channels = group_of(2)
    rows = [[0.1 * i for i in range(5000)], [1.5]]
    pending = [channel.agree("mean", row) for channel, row in zip(channels, rows, strict=True)]
    assert all(each.is_done() for each in pending)
    assert [each.result() for each in pending] == [rows, rows]
    flats = [[torch.full((4,), float(1 + place)) for _ in range(200)] for place in range(2)]
    slices = [[Span(i, 0, 2) for i in range(200)], [Span(i, 2, 4) for i in range(200)]]
    sums = [
        channel.reduce_scatter(mine, slices) for channel, mine in zip(channels, flats, strict=True)
    ]
    assert all(each.is_done() for each in sums)
    assert all(flat.tolist() == [3.0, 3.0, 1.0, 1.0] for flat in flats[0])
    assert all(flat.tolist() == [2.0, 2.0, 3.0, 3.0] for flat in flats[1])


def test_every_value_of_an_agreement_arrives_bit_by_bit() -> None:
    values = [-0.0, float("inf"), 5e-324, 2.0**53 - 1, float("nan")]
    first, second = group_of(2)
    pending = first.agree("mean", values)
    assert second.agree("mean").is_done()
    assert pending.is_done()
    assert repr(pending.result()) == repr([values, []])


# -- what goes wrong -----------------------------------------------------------------------------

SLICES = [[Span(0, 0, 12)], [Span(0, 12, 24)]]


def test_calls_that_differ_are_the_same_error_on_every_worker_and_the_group_goes_on() -> None:
    channels = group_of(3)
    calls = ["save", "pull", "save"]
    pending = [channel.agree(call) for channel, call in zip(channels, calls, strict=True)]
    assert all(each.is_done() for each in pending)
    told = []
    for each in pending:
        with pytest.raises(CollectiveError, match="place 1 of the group called pull") as raised:
            each.result()
        told.append(str(raised.value))
    assert told == [told[0]] * 3
    again = [channel.agree("barrier") for channel in channels]
    assert all(each.is_done() for each in again)


def test_workers_in_different_operations_are_caught() -> None:
    first, second = group_of(2)
    pending = [first.all_gather([torch.ones(24)], SLICES), second.agree("pull")]
    for each in pending:
        assert each.is_done()
        with pytest.raises(InvariantError, match=r"place 0 in all_gather .*, place 1 in agree"):
            each.result()


def test_workers_with_other_shapes_are_caught() -> None:
    first, second = group_of(2)
    pending = [
        first.reduce_scatter([torch.ones(24)], SLICES),
        second.reduce_scatter([torch.ones(24, dtype=torch.float64)], SLICES),
    ]
    for each in pending:
        assert each.is_done()
        with pytest.raises(InvariantError, match="different operations"):
            each.result()


def test_the_result_of_an_operation_that_is_not_done_is_refused() -> None:
    first, _ = group_of(2)
    with pytest.raises(InvariantError, match="before it was done"):
        first.agree("barrier").result()


def one_is_killed(channel: GroupChannel) -> Any:
    finish(small_rounds(channel, 3, is_shared=True))
    if channel.place == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        finish(small_rounds(channel, 1, is_shared=True))
    except TransportError as error:
        return str(error)


def test_a_killed_worker_is_one_error_for_each_other_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    first, killed, third = run_in_group(3, one_is_killed, tier="shared_memory")
    assert killed == "exit -9"
    told = "the agreement of this worker's group failed, because the worker at place 1 of it has "
    assert first == third == f"{told}ended"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "psdist" in name]


def test_what_a_worker_brought_before_it_died_counts() -> None:
    first, second = group_of(2)
    pending = second.agree("barrier", [2.0])
    (dead,) = first._others
    dead._start = -2  # a process that began at another time has its number now
    mine = first.agree("barrier", [1.0])
    assert mine.is_done()
    assert mine.result() == [[1.0], [2.0]]
    late = first.agree("barrier")
    first._looked_s = 0.0
    assert late.is_done()
    with pytest.raises(TransportError, match="the worker at place 1 of it has ended"):
        late.result()
    assert pending.is_done()


def test_memory_that_is_not_to_be_had_later_is_an_error_that_says_what_to_do() -> None:
    first, _ = group_of(2)
    first._make = no_memory
    with pytest.raises(
        TransportError,
        match=r"1024 bytes .* No space left .* hosts.group_tier = torch",
    ):
        first.allocate(1024)


# -- setting up ----------------------------------------------------------------------------------


def no_memory(num_bytes: int) -> Segment:
    raise OSError(28, f"No space left for {num_bytes} bytes")


class Meeting:
    """An agreement of threads, for setting up a group without processes."""

    def __init__(self, size: int) -> None:
        self.rows: list[Sequence[float]] = [()] * size
        self.barrier = Barrier(size, timeout=30)


class Thread_(AloneChannel):
    def __init__(
        self, place: int, meeting: Meeting, change: Callable[[Sequence[float]], Sequence[float]]
    ) -> None:
        self.place, self.size = place, len(meeting.rows)
        self._meeting, self._change = meeting, change

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        assert call == "start"
        self._meeting.rows[self.place] = self._change(values)
        self._meeting.barrier.wait()
        rows = [list(row) for row in self._meeting.rows]
        self._meeting.barrier.wait()
        return Done(rows)


def set_up(
    makes: Sequence[Callable[[int], Segment]],
    change: Callable[[Sequence[float]], Sequence[float]] = lambda row: row,
) -> list[tuple[SharedMemoryChannel | None, str]]:
    """What :func:`connect` says on each worker; ``change`` what the first one tells of itself."""
    meeting = Meeting(len(makes))
    found: list[tuple[SharedMemoryChannel | None, str]] = [(None, "")] * len(makes)

    def run(place: int) -> None:
        over = Thread_(place, meeting, change if place == 0 else lambda row: row)
        found[place] = connect(over, is_spinning=False, make=makes[place])

    threads = [Thread(target=run, args=(place,)) for place in range(len(makes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_group_whose_memory_all_can_open_is_set_up() -> None:
    found = set_up([Segment] * 3)
    pending = [channel.agree("barrier") for channel, _ in found if channel is not None]
    assert [each.is_done() for each in pending] == [True] * 3


def test_one_worker_without_memory_to_share_means_none_for_all_and_each_says_why() -> None:
    found = set_up([Segment, no_memory, Segment])
    assert [channel for channel, _ in found] == [None] * 3
    reasons = [why_not for _, why_not in found]
    assert reasons[0] == reasons[2] == "the worker at place 1 of the group could not allocate any"
    assert "No space left for 12288 bytes" in reasons[1]


def test_a_process_id_that_means_another_process_here_is_noticed() -> None:
    def other_token(row: Sequence[float]) -> Sequence[float]:
        return [*row[:-1], 5.0] if len(row) > 1 else row

    (first, _), (second, why_not) = set_up([Segment] * 2, other_token)
    assert first is None
    assert second is None
    assert "cannot be opened: its number is another process's here" in why_not


def test_a_process_that_cannot_be_found_is_noticed() -> None:
    def nobody(row: Sequence[float]) -> Sequence[float]:
        return [2.0**30, *row[1:]] if len(row) > 1 else row

    _, (second, why_not) = set_up([Segment] * 2, nobody)
    assert second is None
    assert f"memory of process {2**30}, of the worker at place 0 of the group, cannot" in why_not


def kind_of(channel: GroupChannel) -> str:
    return type(channel).__name__


def test_without_memory_to_share_the_group_falls_back_to_gloo() -> None:
    assert run_in_group(2, kind_of, tier="auto", make=no_memory) == ["ProcessGroupChannel"] * 2
    assert run_in_group(2, kind_of, tier="auto") == ["SharedMemoryChannel"] * 2


def test_shared_memory_that_was_demanded_and_cannot_be_is_an_error() -> None:
    with pytest.raises(
        UsageError,
        match=r"hosts.group_tier = shared_memory: .*No space left.* gloo",
    ):
        run_in_group(2, kind_of, tier="shared_memory", make=no_memory)


# -- memory and bells ----------------------------------------------------------------------------


def test_a_segment_is_zeros_that_another_process_may_read_and_not_write() -> None:
    segment = Segment(5000)
    assert segment.num_bytes == 8192
    memory = open_segment(os.getpid(), segment.fd, 8192)
    theirs = bytes_of(memory)
    assert not theirs.any()
    segment.bytes[4999] = 7
    assert theirs[4999] == 7
    with pytest.raises(TypeError):
        memory[0] = 1
    fd = segment.fd
    segment.close()
    with pytest.raises(OSError, match="No such file"):
        open_segment(os.getpid(), fd, 8192)
    segment.bytes[0] = 3
    assert theirs[0] == 3  # whoever has it keeps it


def test_more_memory_than_the_host_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(OSError, match="8192 bytes are wanted, 8191 are free"):
        Segment(5000, free_bytes=lambda: 8191)
    assert Segment(5000, free_bytes=lambda: 8192).num_bytes == 8192
    assert Segment(5000, free_bytes=lambda: None).num_bytes == 8192


def test_a_bell_that_rang_before_is_heard_and_then_silent() -> None:
    bell = Bell()
    fd = open_bell(os.getpid(), bell.fd)
    ring(fd)
    ring(fd)
    bell.wait(60.0)
    assert not bell._poll.poll(0)
    bell.close()
    ring(fd)  # nobody is there any more
    os.close(fd)


def test_who_sleeps_is_woken_by_the_one_it_waits_for_and_only_then() -> None:
    first, second, third = group_of(3)
    pending = first.agree("barrier")
    assert not pending.is_done()
    rung: list[bool] = []

    def wait(_: float) -> None:
        third.agree("barrier")
        rung.append(bool(first._bell._poll.poll(0)))
        second.agree("barrier")
        rung.append(bool(first._bell._poll.poll(0)))

    first._bell.wait = wait  # type: ignore[method-assign]
    pending.wait(60.0)
    assert rung == [False, True]
    assert pending.is_done()


def test_who_came_while_one_was_about_to_sleep_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = group_of(2)
    pending = first.agree("barrier")
    is_second_here = False

    def fence_as_the_second_comes() -> None:
        nonlocal is_second_here
        if not is_second_here:
            is_second_here = True
            second.agree("barrier")

    monkeypatch.setattr("psdist.workers.group.shared_memory.fence", fence_as_the_second_comes)
    monkeypatch.setattr(first._bell, "wait", lambda _: pytest.fail("it sleeps"))
    pending.wait(60.0)
    assert is_second_here
    assert pending.is_done()


def test_a_process_is_known_by_its_number_and_when_it_began() -> None:
    assert started_at(os.getpid()) > 0
    assert started_at(2**30) == -1


# -- a group that continues without somebody -------------------------------------------------------


def successors_of(group: list[SharedMemoryChannel], left: list[int]) -> list[SharedMemoryChannel]:
    """The ends of those who are left at these places."""
    made: dict[int, SharedMemoryChannel] = {}

    def succeed(place: int, over: SharedMemoryChannel) -> None:
        made[place] = group[place].succeed(over)

    threads = [
        Thread(target=succeed, args=each) for each in zip(left, group_of(len(left)), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in left:
        _open.remove(group[place])
    _open.extend(made.values())
    return [made[place] for place in left]


@pytest.mark.parametrize("left", [[0, 1], [0, 2], [1, 2]])
def test_who_is_left_is_a_group_like_any_other(left: list[int]) -> None:
    group = group_of(3)
    for place in left:
        group[place].agree("save", [1.0])  # which the third one never comes to
    made = successors_of(group, left)
    assert [(each.place, each.size) for each in made] == [(0, 2), (1, 2)]
    results = play([operations(each, each) for each in made], seed=3)
    assert results == [expected(place, 2) for place in range(2)]


def test_memory_that_the_group_has_handed_out_is_added_from_where_it_lies_still() -> None:
    group = group_of(3)
    flats = [as_tensor(channel.allocate(96), "float32", 24).fill_(1.0) for channel in group]
    made = successors_of(group, [0, 2])
    slices = [[Span(0, 0, 12)], [Span(0, 12, 24)]]
    left = [flats[0], flats[2]]
    pending = [each.reduce_scatter([flat], slices) for each, flat in zip(made, left, strict=True)]
    assert all(each.is_done() for each in pending)
    assert [flat.sum().item() for flat in left] == [36.0, 36.0]
    assert not any(each._staging for each in made)


def test_closing_it_again_closes_nothing_of_anybody_else() -> None:
    group = group_of(2)
    group[0].close()
    later = [os.pipe() for _ in range(3)]  # which get the numbers that are free
    group[0].close()
    for ends in later:
        for fd in ends:
            os.close(fd)


def test_a_process_that_is_about_to_end_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed before it is listed no more."""
    listed = iter([7, 7, 7, -1])
    monkeypatch.setattr(segments, "started_at", lambda _pid: next(listed))
    assert has_ended(5, 7)
    assert next(listed, None) is None


def test_a_process_that_lives_has_not_ended_nor_has_another_with_its_number() -> None:
    me = os.getpid()
    assert not has_ended(me, started_at(me), within_s=0.01)
    assert has_ended(me, started_at(me) + 1, within_s=0.01)
