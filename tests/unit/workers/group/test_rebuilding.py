"""Groups of real processes that continue without those of them that end, in every operation: the
process group, torch's default one, is made again, and what it is made of."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from psdist.errors import GroupReformedError, MemberLostError, TransportError
from psdist.protocol.partition import Span
from psdist.workers.group import process_group, rebuilding, shared_memory
from psdist.workers.group import tier as group_tier
from psdist.workers.group.addresses import At
from psdist.workers.group.channel import GroupChannel, Pending
from psdist.workers.group.meeting import Hosts
from psdist.workers.group.process_group import GRACE_S, Network
from psdist.workers.group.rebuilding import GroupRebuilder
from psdist.workers.group.segments import Segment
from psdist.workers.group.shrinking import ShrinkingChannel
from psdist.workers.group.tier import Tier
from tests.support.group_operations import expected, finish, operations
from tests.support.process_groups import run_in_group

LENGTH = 60_000
"""Elements: more than the kernel takes of a worker that has ended."""
OPERATIONS = ("agree", "reduce_scatter", "all_gather", "broadcast")


def begin(
    channel: GroupChannel,
    what: str,
    members: Sequence[int],
    *,
    length: int = LENGTH,
    device: str = "cpu",
) -> Pending[Any]:
    """As a worker of the group of ``members`` does."""
    flat = torch.zeros(length, device=device)
    if what == "broadcast":
        return channel.broadcast(flat, len(members) - 1)
    step = length // len(members)
    slices = [[Span(0, at * step, at * step + step)] for at in range(len(members))]
    if what == "all_gather":
        return channel.all_gather([flat], slices)
    if what == "reduce_scatter":
        return channel.reduce_scatter([flat], slices)
    return channel.agree("save", [float(members[channel.place])])


def reforming(
    channel: GroupChannel, hosts: Sequence[int], device: str = "cpu"
) -> tuple[ShrinkingChannel, GroupRebuilder]:
    formed = group_tier.shrinking(
        channel,
        members=range(channel.size),
        device=torch.device(device),
        timeout_s=60.0,
        hosts=Hosts(numbers=hosts, names=[], gather=lambda data: [data]) if hosts else None,
    )
    assert formed is not None
    return formed


def exchange(folder: Path, name: str, place: int, size: int, row: list[float]) -> Any:
    """What each of those who are left offers, by place: what the coordinator tells them."""
    (folder / f"{name}-{place}.part").write_text(json.dumps(row))
    (folder / f"{name}-{place}.part").rename(folder / f"{name}-{place}")
    found = []
    for each in range(size):
        path, until_s = folder / f"{name}-{each}", time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < until_s, f"place {each} offers nothing"
            time.sleep(1e-3)
        found.append([float(value) for value in json.loads(path.read_text())])
    return found


def outlive(
    channel: GroupChannel,
    *,
    folder: Path,
    dies: Sequence[tuple[str, int]],
    hosts: Sequence[int],
    length: int = LENGTH,
    device: str = "cpu",
) -> Any:
    """Of those who fail, each in its operation: it has begun that, or the one before only."""
    worker = channel.place
    group, former = reforming(channel, hosts, device)
    of: dict[str, Any] = {"length": length, "device": device}
    members = list(range(channel.size))
    for number, (what, dying) in enumerate(dies):
        if worker == dying:
            if number % 2:
                begin(group, what, members, **of)
            os._exit(3)
        pending = begin(group, what, members, **of)
        pending.wait(0.05)
        group.cut()
        assert not pending.is_done()
        members.remove(dying)
        place = members.index(worker)
        offers = exchange(folder, f"{number}", place, len(members), former.offer(place))
        inner = former.form(members, place, offers)
        inner.wait(60.0)
        group.go_on(inner.result(), agreed=None, has_values=False, is_given_up=True)
        if what == "agree":
            while not pending.is_done():
                pending.wait(0.05)
            assert pending.result() == [[float(each)] for each in members]
        else:
            with pytest.raises(GroupReformedError):
                pending.result()
        group.all_gather([], [[] for _ in members])  # ends what was given up
        left = [hosts[each] for each in members] if hosts else []
        assert finish(operations(group, group, device)) == expected(place, len(members), left)
        assert (dist.get_rank(), dist.get_world_size()) == (place, len(members))
        ones = torch.ones(2, device=device)
        dist.all_reduce(ones)
        assert ones.tolist() == [len(members)] * 2, "what scripts use is the group's"
        for each in dist.distributed_c10d._world.pg_names:
            backend = each._get_backend(torch.device("cpu"))
            assert backend.options._timeout.total_seconds() == 60.0 + GRACE_S
        store = process_group._store_of(dist.group.WORLD)
        assert store.timeout.total_seconds() == 60.0 + GRACE_S
    return type(group.inner).__name__


@pytest.mark.parametrize(
    ("tier", "hosts", "dead", "kind"),
    [
        ("auto", [0, 0, 0, 1, 1], [3, 0, 2, 1], "AloneChannel"),
        ("torch", [0, 1, 0, 1, 2], [4, 0, 2], "ProcessGroupChannel"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("torch", [], [1, 0, 4, 2], "AloneChannel"),
                ("auto", [], [4, 0, 1], "SharedMemoryChannel"),
                ("auto", [0, 1, 2, 0], [0, 2], "TwoLevelChannel"),
                ("shared_memory", [], [0, 1, 2], "AloneChannel"),
            )
        ),
    ],
)
def test_a_death_in_every_operation_is_outlived(
    tier: Tier, hosts: list[int], dead: list[int], kind: str, tmp_path: Path
) -> None:
    size = len(hosts) or len(dead) + 1 + (kind != "AloneChannel")
    dies = list(zip(OPERATIONS, dead, strict=False))
    script = partial(outlive, folder=tmp_path, dies=dies, hosts=hosts)
    results = run_in_group(size, script, tier=tier, hosts=hosts)
    assert [each for at, each in enumerate(results) if at in dead] == ["exit 3"] * len(dead)
    assert {each for at, each in enumerate(results) if at not in dead} == {kind}


def die_meanwhile(channel: GroupChannel, *, folder: Path, ends: str, last: int) -> Any:
    """Three are left of four, of whom one ends while the group is rebuilt."""
    worker = channel.place
    group, former = reforming(channel, [])
    if worker == 3:
        os._exit(3)
    group.agree("save").wait(0.05)
    group.cut()
    offers = exchange(folder, "first", worker, 3, former.offer(worker))
    if worker == last:
        if ends == "come":
            # It has come to where they meet, and no farther.
            store = dist.TCPStore(  # type: ignore[attr-defined] # not in __all__
                "127.0.0.1", int(offers[0][1]), None, is_master=False, wait_for_workers=False
            )
            dist.PrefixStore("0", store).set(f"here {worker}", "")  # type: ignore[attr-defined] # as above
            time.sleep(0.2)
        os._exit(3)
    first = former.form([0, 1, 2], worker, offers)
    first.wait(0.3)
    members = [each for each in (0, 1, 2) if each != last]
    place = members.index(worker)
    offers = exchange(folder, "second", place, 2, former.offer(place))
    second = former.form(members, place, offers)
    second.wait(60.0)
    with pytest.raises(MemberLostError):
        first.result()
    group.go_on(second.result(), agreed=None, has_values=False, is_given_up=False)
    return finish(operations(group, group)) == expected(place, 2)


@pytest.mark.parametrize(
    ("ends", "last"),
    [
        ("offered", 1),
        pytest.param("come", 0, marks=pytest.mark.slow),
        pytest.param("come", 2, marks=pytest.mark.slow),
    ],
)
def test_a_death_while_it_is_formed_begins_it_again(ends: str, last: int, tmp_path: Path) -> None:
    script = partial(die_meanwhile, folder=tmp_path, ends=ends, last=last)
    results = run_in_group(4, script, tier="torch")
    assert results == ["exit 3" if each in (last, 3) else True for each in range(4)]


def go_on_without(
    dead: int, channel: GroupChannel, hosts: Sequence[int], folder: Path
) -> ShrinkingChannel:
    """The end of those who are left when that one, the last, has ended."""
    worker = channel.place
    group, former = reforming(channel, hosts)
    if worker == dead:
        os._exit(3)
    group.cut()
    offers = exchange(folder, "only", worker, dead, former.offer(worker))
    pending = former.form(list(range(dead)), worker, offers)
    pending.wait(60.0)
    group.go_on(pending.result(), agreed=None, has_values=False, is_given_up=False)
    return group


def fail_once(
    channel: GroupChannel, *, folder: Path, what: str, hosts: Sequence[int], fails: int
) -> Any:
    """One of those who are left has joined, and says that it has not."""
    worker = channel.place
    module: Any = shared_memory if what == "connect" else process_group
    made: Any = getattr(module, what)
    error = MemberLostError if what == "connect" else RuntimeError
    failures = [error("connection closed by peer")] if worker == fails else []

    def make(*arguments: Any, **more: Any) -> Any:
        result = made(*arguments, **more)
        if failures:
            raise failures.pop()
        return result

    with mock.patch.object(module, what, make):
        group = go_on_without(channel.size - 1, channel, hosts, folder)
    left = hosts[:-1]
    return finish(operations(group, group)) == expected(worker, group.size, left)


@pytest.mark.parametrize(
    ("what", "tier", "hosts", "fails"),
    [
        pytest.param("join", "torch", [], 0, marks=pytest.mark.slow),
        ("of_host", "auto", [0, 0, 1, 1], 2),
        ("connect", "auto", [], 1),
    ],
)
def test_all_join_again_where_one_has_failed(
    what: str, tier: Tier, hosts: list[int], fails: int, tmp_path: Path
) -> None:
    size = len(hosts) or 3
    script = partial(fail_once, folder=tmp_path, what=what, hosts=hosts, fails=fails)
    results = run_in_group(size, script, tier=tier, hosts=hosts)
    assert results == [True] * (size - 1) + ["exit 3"]


def be_late(channel: GroupChannel, *, folder: Path) -> Any:
    """As late again in the second attempt, which has more time."""
    joined, waits = process_group.join, [0.6, 0.6] if channel.place == 1 else []

    def join(*arguments: Any, **more: Any) -> None:
        if waits:
            time.sleep(waits.pop())
        joined(*arguments, **more)

    attempts = [datetime.timedelta(seconds=each) for each in (0.2, 30.0)]
    with (
        mock.patch.object(process_group, "join", join),
        mock.patch.object(rebuilding, "ATTEMPTS", attempts),
    ):
        group = go_on_without(3, channel, [], folder)
    return finish(operations(group, group)) == expected(channel.place, 3)


def test_who_comes_late_to_join_has_more_time_in_the_next_attempt(tmp_path: Path) -> None:
    results = run_in_group(4, partial(be_late, folder=tmp_path), tier="torch")
    assert results == [True, True, True, "exit 3"]


def test_a_process_group_that_could_not_be_made_has_used_up_no_name() -> None:
    """By which the members know one another's addresses in the next attempt."""
    store = dist.HashStore()  # type: ignore[attr-defined] # not in __all__
    network = Network(At("lo", "127.0.0.1"), ())
    num_keys = []
    for _ in range(2):
        with pytest.raises(RuntimeError):  # the other one does not come
            process_group.join(
                network,
                store,
                index=0,
                size=2,
                device=torch.device("cpu"),
                timeout=datetime.timedelta(seconds=0.05),
            )
        process_group.abandon()
        num_keys.append(store.num_keys())
    assert num_keys[0] == num_keys[1] > 0


def never_join(channel: GroupChannel, *, folder: Path) -> Any:
    def join(*_arguments: Any, **_more: Any) -> None:
        raise RuntimeError(f"no way from {channel.place}")

    with (
        mock.patch.object(process_group, "join", join),
        pytest.raises(TransportError, match="workers have tried to join 4 times") as raised,
    ):
        go_on_without(2, channel, [], folder)
    assert not isinstance(raised.value, MemberLostError), "for whose death it would wait"
    return str(raised.value).partition(" times: ")[2]


def test_who_is_left_and_cannot_join_ends_in_an_error_that_says_why_on_all(tmp_path: Path) -> None:
    results = run_in_group(3, partial(never_join, folder=tmp_path), tier="torch")
    assert results == ["no way from 0; no way from 1"] * 2 + ["exit 3"]


def lack_memory(channel: GroupChannel, *, folder: Path) -> str:
    def make(_num_bytes: int) -> Segment:
        raise OSError("none")

    if channel.place == 1:
        cast("Any", channel)._make = make
    with pytest.raises(TransportError, match="shared memory for the remaining workers") as error:
        go_on_without(2, channel, [], folder)
    assert not isinstance(error.value, MemberLostError)
    assert "have tried" not in str(error.value), "another attempt would not mend it"
    return str(error.value)


def test_no_memory_to_go_on_with_is_an_error_on_all(tmp_path: Path) -> None:
    results = run_in_group(3, partial(lack_memory, folder=tmp_path), tier="auto")
    assert "the worker at place 1" in results[0]
    assert "cannot allocate shared memory: none" in results[1]


def test_that_the_first_one_does_not_answer_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None, "store"])

    def connect(*where: Any, **_more: Any) -> Any:
        assert where == ("127.0.0.1", 7, None)
        store = next(answers)
        if store is None:
            raise RuntimeError("timed out")
        return store

    monkeypatch.setattr(dist, "TCPStore", connect)
    assert rebuilding.reach([float(0x7F000001), 7.0], Event()) == "store"
    answers = iter([None])
    is_abandoned = Event()
    is_abandoned.set()
    with pytest.raises(MemberLostError):
        rebuilding.reach([float(0x7F000001), 7.0], is_abandoned)


def former_at(ip: str, monkeypatch: pytest.MonkeyPatch) -> GroupRebuilder:
    monkeypatch.setattr("psdist.workers.group.process_group._networks", [Network(At("lo", ip), ())])
    channel: Any = None
    return GroupRebuilder(channel, members=[0, 1], device=torch.device("cpu"), timeout_s=1.0)


def test_who_is_not_the_first_offers_nothing_and_each_offer_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    former = former_at("127.0.0.1", monkeypatch)
    assert former.offer(1) == []
    (ip, port), (same, other) = former.offer(0), former.offer(0)
    assert ip == same == float(0x7F000001)
    assert port != other


def test_a_place_to_meet_that_cannot_be_had_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: Any, **_more: Any) -> Any:
        raise RuntimeError("too many open files")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    with pytest.raises(TransportError, match=r"cannot listen at 10\.0\.0\.7, where"):
        former_at("10.0.0.7", monkeypatch).offer(0)


def test_what_was_begun_before_and_does_not_end_is_waited_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rebuilding, "MOST_S", 0.05)
    ends, store = Event(), object()

    def reach(_offer: Any, _is_abandoned: Event) -> Any:
        ends.wait(60.0)
        return store

    monkeypatch.setattr(rebuilding, "reach", reach)
    monkeypatch.setattr(process_group, "abandon", lambda: None)
    former = former_at("127.0.0.1", monkeypatch)
    first = former.form([0, 1], 1, [[0.0, 0.0]])
    second = former.form([0, 1], 1, [[0.0, 0.0]])
    second.wait(60.0)
    third = former.form([0, 1], 1, [[0.0, 0.0]])  # the first one has still not ended
    third.wait(60.0)
    for each in (second, third):
        with pytest.raises(TransportError, match=r"last failure has not ended in 0\.05 s"):
            each.result()
    ends.set()
    first.wait(60.0)
