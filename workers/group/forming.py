"""Makes the channel of those who are left of a group: torch.distributed's default process group
first, in every tier, for that is what scripts use as the group's; then what it was made of before.

    former = GroupFormer(channel, members=[0, 1, 2], device=device, timeout_s=1800.0)
    row = former.offer(place)                  # on all who are left; the first one's is an address
    pending = former.form([0, 2], place, rows)
    pending.result()                           # a GroupChannel

A process group is made by calls that block until all are there, and of those who are left one may
be in its script meanwhile, or die. So they are made in a thread, and nobody waits for it who does
not want to. All come to a store first, where nobody waits blindly: who hears of another death
leaves it. Only when all have come do they join, which takes moments, and a bounded time where
somebody dies in these. Then all say whether they have; if one has not, all leave what they have
made, not before, and join again in another attempt, with more time.
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
from psdist.workers.group.process_group import GRACE_S, ProcessGroupChannel
from psdist.workers.group.shared_memory import SharedMemoryChannel
from psdist.workers.group.two_levels import TwoLevelChannel

logger = logging.getLogger("psdist")

_ATTEMPTS: Final = tuple(datetime.timedelta(seconds=each) for each in (5, 10, 20, 40))
"""How long those who have all come may take to join, the first time, the second, and so on."""
_MOST_S: Final = 2 * sum(each.total_seconds() for each in _ATTEMPTS)
"""How long one that nobody wants any more may take to end."""
_LOOK_S: Final = 5e-3
_AGAIN: Final = "again: "
"""Begins what is said of an attempt that another one may mend."""


class GroupFormer:
    def __init__(
        self,
        channel: GroupChannel,
        *,
        members: Sequence[int],
        device: torch.device,
        timeout_s: float,
        hosts: Sequence[int] = (),
    ) -> None:
        """``members``: the group's workers, by place in ``channel``; ``hosts``: the number of each
        one's host, of a group that lies on several; the rest as in :func:`process_group.start`."""
        self._channel = channel
        self._device = device
        self._timeout_s = timeout_s
        self._host_of = dict(zip(members, hosts, strict=True)) if hosts else {}
        self._network = process_group.network()
        self._server: Any = None
        """The store of the last attempt, where this worker is the first of those who are left. The
        process group that was made in it needs it as long as it lives."""
        self._formings: list[_Forming] = []
        """Those that may not have ended; the last one's channel is wanted."""

    def offer(self, place: int) -> list[float]:
        """What the others need of the worker at ``place`` of those who are left; another offer each
        time, and nothing comes of those before. Raises :class:`TransportError`."""
        for forming in self._formings:
            forming.abandon()
        self._server = None
        if place:
            return []
        ip = self._network.at.ip
        try:
            self._server = dist.TCPStore(  # type: ignore[attr-defined] # not in __all__
                ip, 0, None, is_master=True, wait_for_workers=False, timeout=_ATTEMPTS[0]
            )
        except RuntimeError as error:
            raise TransportError(
                f"{ip}, where this worker's group could meet to go on, cannot be listened at: "
                f"{error}"
            ) from error
        return [float(int(ipaddress.IPv4Address(ip))), float(self._server.port)]

    def form(self, members: Sequence[int], place: int, offers: list[list[float]]) -> _Forming:
        """Begin to make this worker's end of the group of ``members``."""
        earlier = [each for each in self._formings if not each.is_done()]

        def run(is_abandoned: Event) -> GroupChannel:
            for before in earlier:
                before.wait(_MOST_S)
                if not before.is_done():
                    raise TransportError(
                        "this worker's group cannot be formed anew: what was begun before the last "
                        f"death has not ended in {_MOST_S:g} s"
                    )
            process_group.abandon()
            self._meet_and_join(members, place, offers[0], is_abandoned)
            return self._channel

        self._formings = [*earlier, _Forming(run)]
        return self._formings[-1]

    def _meet_and_join(
        self, members: Sequence[int], place: int, offer: Sequence[float], is_abandoned: Event
    ) -> None:
        """Attempts, until all have joined in one."""
        size = len(members)
        alone = dist.HashStore  # type: ignore[attr-defined] # not in __all__
        store = alone() if size == 1 else _reach(offer, is_abandoned)
        hosts = [self._host_of[each] for each in members] if self._host_of else []
        whole = datetime.timedelta(seconds=self._timeout_s + GRACE_S)
        for number, timeout in enumerate(_ATTEMPTS):
            attempt = dist.PrefixStore(f"{number}", store)  # type: ignore[attr-defined] # as HashStore
            _tell_all(attempt, "here", place, size, "", is_abandoned)
            said, error = "", None
            try:
                self._join(attempt, place, size, hosts, timeout)
            except (RuntimeError, MemberLostError) as failure:
                said = f"{_AGAIN}{failure}"
            except TransportError as failure:
                said, error = str(failure), failure
            # Only now may somebody leave what others are still about to join.
            told = _tell_all(attempt, "done", place, size, said, is_abandoned)
            if not any(told):
                process_group.set_timeout(whole)
                store.set_timeout(whole)  # for process groups of the script's own
                return
            process_group.abandon()
            final = next((each for each in told if each and not each.startswith(_AGAIN)), "")
            if final:
                raise error or TransportError(final)
            why = "; ".join(dict.fromkeys(each[len(_AGAIN) :] for each in told if each))
            logger.warning("this worker's group joins again, since it could not: %s", why)
        raise TransportError(
            f"this worker's group cannot be formed anew: those of it who are left, all alive, have "
            f"tried to join {len(_ATTEMPTS)} times: {why}"
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


def _reach(offer: Sequence[float], is_abandoned: Event) -> Any:
    """The store of the first of those who are left. That it does not answer proves no death: only
    who hears of one gives up, with :class:`MemberLostError`."""
    ip, port = str(ipaddress.IPv4Address(int(offer[0]))), int(offer[1])
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined] # not in __all__
                ip, port, None, is_master=False, wait_for_workers=False, timeout=_ATTEMPTS[0]
            )
        except RuntimeError as error:
            if is_abandoned.wait(_LOOK_S):
                raise MemberLostError("another worker of it has died meanwhile") from error
            logger.warning("the first of this worker's group does not answer: %s", error)


def _tell_all(
    store: Any, what: str, place: int, size: int, said: str, is_abandoned: Event
) -> list[str]:
    """What each says there, once all do; :class:`MemberLostError` if another one has died
    meanwhile, as the first one has whose store is gone. That one, who keeps it, goes on last."""
    keys = [f"{what} {each}" for each in range(size)]
    heard = [f"{what} is known to {each}" for each in range(size)]
    try:
        store.set(keys[place], said)
        _wait_for(store, keys, is_abandoned)
        told = [store.get(key).decode("utf-8") for key in keys]
        store.set(heard[place], "")
        if place == 0:
            _wait_for(store, heard, is_abandoned)
    except RuntimeError as error:
        raise MemberLostError(f"the first of this worker's group is gone: {error}") from error
    return told


def _wait_for(store: Any, keys: list[str], is_abandoned: Event) -> None:
    while not store.check(keys):
        if is_abandoned.wait(_LOOK_S):
            raise MemberLostError("another worker of it has died meanwhile")


def _like(
    before: GroupChannel, over: GroupChannel, hosts: Sequence[int], timeout: datetime.timedelta
) -> GroupChannel:
    """An end of the group that ``over`` joins, made as ``before`` was, which is over; memory that
    it has handed out is as good for this one. ``hosts``: of the places of ``over``, where
    ``before`` joins several."""
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


class _Forming:
    """What a thread makes."""

    def __init__(self, run: Callable[[Event], GroupChannel]) -> None:
        self._run = run
        self._is_abandoned = Event()
        self._results: list[GroupChannel] = []
        self._error: Exception | None = None
        self._thread = Thread(target=self._main, name="psdist-forming", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        began_s = time.monotonic()
        try:
            self._results.append(self._run(self._is_abandoned))
        except RuntimeError as error:  # torch's, and of nobody's death
            self._error = TransportError(f"this worker's group cannot be formed anew: {error}")
        except Exception as error:
            self._error = error
        else:
            logger.info("the group was formed anew in %.3f s", time.monotonic() - began_s)

    def abandon(self) -> None:
        """Nobody wants what comes of it; it ends soon."""
        self._is_abandoned.set()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, at_most_s: float) -> None:
        self._thread.join(None if at_most_s == float("inf") else at_most_s)

    def result(self) -> GroupChannel:
        if self._error is not None:
            raise self._error
        return self._results[0]
