"""Make the channel of the remaining members of a group: torch.distributed's default process group
first, which scripts use as the group's, then the channel of the same tier as before.

    rebuilder = GroupRebuilder(channel, members=[0, 1, 2], device=device, timeout_s=1800.0)
    row = rebuilder.offer(place)                  # on all remaining members
    pending = rebuilder.form([0, 2], place, rows)
    pending.result()                              # a GroupChannel

To make a process group blocks until all members have called it, but a remaining member may be busy
in its script, or fail. So a thread makes it, and its caller may abandon it. All members first meet
in a store, where a member that learns of another failure leaves. Only when all have come do they
join, which takes moments, or a bounded time if a member fails meanwhile. Then all report whether
they have joined. If one has not, all leave the process group together and join again in another
attempt, with more time.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any, Final

import torch
import torch.distributed as dist

from psdist.errors import MemberLostError, TransportError
from psdist.workers.group import process_group
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.group.meeting import exchange
from psdist.workers.group.process_group import GRACE_S, ProcessGroupChannel
from psdist.workers.group.shared_memory import SharedMemoryChannel
from psdist.workers.group.two_levels import TwoLevelChannel

logger = logging.getLogger("psdist")

ATTEMPTS: Final = tuple(datetime.timedelta(seconds=each) for each in (5, 10, 20, 40))
"""Time to join, after all have come, in each attempt."""
MOST_S: Final = 2 * sum(each.total_seconds() for each in ATTEMPTS)
"""Maximum time until an abandoned thread ends."""
_LOOK_S: Final = 5e-3
_AGAIN: Final = "again: "
"""Prefix of the report of an attempt that may be repeated."""


class GroupRebuilder:
    def __init__(
        self,
        channel: GroupChannel,
        *,
        members: Sequence[int],
        device: torch.device,
        timeout_s: float,
        hosts: Sequence[int] = (),
    ) -> None:
        """``members``: the group's workers, by place in ``channel``; ``hosts``: the numbers of
        their hosts, of a group on several hosts; others as in :func:`process_group.start`."""
        self._channel = channel
        self._device = device
        self._timeout_s = timeout_s
        self._host_of = dict(zip(members, hosts, strict=True)) if hosts else {}
        self._network = process_group.network()
        self._server: Any = None
        """The store, if this worker is the first remaining member. The process group needs it
        until its end."""
        self._rebuilds: list[_Rebuild] = []
        """Threads that may not have ended; the last one is current."""

    def offer(self, place: int) -> list[float]:
        """Return the numbers that the others need of the remaining member at ``place``. Abandon
        earlier attempts. Raises :class:`TransportError`."""
        for rebuild in self._rebuilds:
            rebuild.abandon()
        self._server = None
        if place:
            return []
        ip = self._network.at.ip
        try:
            self._server = dist.TCPStore(  # type: ignore[attr-defined] # not in __all__
                ip, 0, None, is_master=True, wait_for_workers=False, timeout=ATTEMPTS[0]
            )
        except RuntimeError as error:
            raise TransportError(
                f"cannot listen at {ip}, where the remaining workers of the group meet: {error}"
            ) from error
        return [float(int(ipaddress.IPv4Address(ip))), float(self._server.port)]

    def form(self, members: Sequence[int], place: int, offers: list[list[float]]) -> _Rebuild:
        """Begin to make this worker's end of the group of ``members``."""
        earlier = [each for each in self._rebuilds if not each.is_done()]

        def run(is_abandoned: Event) -> GroupChannel:
            for before in earlier:
                before.wait(MOST_S)
                if not before.is_done():
                    raise TransportError(
                        "cannot rebuild this worker's group: the attempt before the last failure "
                        f"has not ended in {MOST_S:g} s"
                    )
            process_group.abandon()
            self._meet_and_join(members, place, offers[0], is_abandoned)
            return self._channel

        self._rebuilds = [*earlier, _Rebuild(run)]
        return self._rebuilds[-1]

    def _meet_and_join(
        self, members: Sequence[int], place: int, offer: Sequence[float], is_abandoned: Event
    ) -> None:
        """Repeat attempts until all members have joined in one."""
        size = len(members)
        alone = dist.HashStore  # type: ignore[attr-defined] # not in __all__
        store = alone() if size == 1 else reach(offer, is_abandoned)
        hosts = [self._host_of[each] for each in members] if self._host_of else []
        whole = datetime.timedelta(seconds=self._timeout_s + GRACE_S)
        for number, timeout in enumerate(ATTEMPTS):
            attempt = dist.PrefixStore(f"{number}", store)  # type: ignore[attr-defined] # as HashStore
            _exchange(attempt, "here", place, size, "", is_abandoned)
            mine, error = "", None
            try:
                self._join(attempt, place, size, hosts, timeout)
            except (RuntimeError, MemberLostError) as failure:
                mine = f"{_AGAIN}{failure}"
            except TransportError as failure:
                mine, error = str(failure), failure
            # A member must not leave the process group before all have tried to join it.
            reports = _exchange(attempt, "done", place, size, mine, is_abandoned)
            if not any(reports):
                process_group.set_timeout(whole)
                store.set_timeout(whole)  # for process groups of the script's own
                return
            process_group.abandon()
            final = next((each for each in reports if each and not each.startswith(_AGAIN)), "")
            if final:
                raise error or TransportError(final)
            why = "; ".join(dict.fromkeys(each[len(_AGAIN) :] for each in reports if each))
            logger.warning("group rendezvous failed; retrying: %s", why)
        raise TransportError(
            f"cannot rebuild this worker's group: its remaining workers have tried to join "
            f"{len(ATTEMPTS)} times: {why}"
        )

    def _join(
        self,
        store: Any,
        place: int,
        size: int,
        hosts: Sequence[int],
        timeout: datetime.timedelta,
    ) -> None:
        process_group.join(
            self._network, store, index=place, size=size, device=self._device, timeout=timeout
        )
        over: GroupChannel = AloneChannel()
        if size > 1:
            over = ProcessGroupChannel.joined(place=place, size=size, device=self._device)
        self._channel = _like(self._channel, over, hosts, timeout)


def reach(offer: Sequence[float], is_abandoned: Event) -> Any:
    """Return the store of the first remaining member, which may answer late. Raises
    :class:`MemberLostError` when the attempt is abandoned."""
    ip, port = str(ipaddress.IPv4Address(int(offer[0]))), int(offer[1])
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined] # not in __all__
                ip, port, None, is_master=False, wait_for_workers=False, timeout=ATTEMPTS[0]
            )
        except RuntimeError as error:
            if is_abandoned.wait(_LOOK_S):
                raise MemberLostError("another worker of it has failed meanwhile") from error
            logger.warning("the first of this worker's group does not answer: %s", error)


def _exchange(
    store: Any, what: str, place: int, size: int, word: str, is_abandoned: Event
) -> list[str]:
    """Return the word of each member. Raises :class:`MemberLostError` if a member has failed."""

    def wait(keys: list[str]) -> None:
        while not store.check(keys):
            if is_abandoned.wait(_LOOK_S):
                raise MemberLostError("another worker of it has failed meanwhile")

    try:
        return exchange(store, what, place, size, word=word, wait=wait)
    except RuntimeError as error:
        raise MemberLostError(f"the first of this worker's group is gone: {error}") from error


def _like(
    before: GroupChannel, over: GroupChannel, hosts: Sequence[int], timeout: datetime.timedelta
) -> GroupChannel:
    """Return an end of the group that ``over`` joins, of the same kind as ``before``, which has
    ended. It keeps the memory that ``before`` has allocated. ``hosts``: of the places of ``over``,
    if ``before`` joins several hosts."""
    if isinstance(before, TwoLevelChannel):
        if len(set(hosts)) > 1 and isinstance(over, ProcessGroupChannel):
            here = process_group.of_host(over, hosts, timeout=timeout)
            return TwoLevelChannel(_like(before.inner, here, [], timeout), over, hosts=hosts)
        return _like(before.inner, over, [], timeout)
    if isinstance(before, SharedMemoryChannel):
        if isinstance(over, ProcessGroupChannel):
            return before.succeed(over)
        before.close()
    elif isinstance(before, ProcessGroupChannel) and isinstance(over, ProcessGroupChannel):
        return type(before).like(over)
    return over


class _Rebuild:
    """A channel that a thread makes."""

    def __init__(self, run: Callable[[Event], GroupChannel]) -> None:
        self._run = run
        self._is_abandoned = Event()
        self._results: list[GroupChannel] = []
        self._error: Exception | None = None
        self._thread = Thread(target=self._main, name="psdist-rebuild", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        began_s = time.monotonic()
        try:
            self._results.append(self._run(self._is_abandoned))
        except RuntimeError as error:  # torch's, and not a failed member
            self._error = TransportError(f"cannot rebuild this worker's group: {error}")
        except Exception as error:
            self._error = error
        else:
            logger.info("the group was rebuilt in %.3f s", time.monotonic() - began_s)

    def abandon(self) -> None:
        """Request the end of the thread."""
        self._is_abandoned.set()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, at_most_s: float) -> None:
        self._thread.join(None if at_most_s == float("inf") else at_most_s)

    def result(self) -> GroupChannel:
        if self._error is not None:
            raise self._error
        return self._results[0]
