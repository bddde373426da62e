"""Nobody of a process group continues before all have connected: what gloo takes for connected, the
other side may still wait for."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from psdist.errors import MemberLostError
from psdist.workers.group import process_group
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.meeting import all_connected
from psdist.workers.group.process_group import ProcessGroupChannel
from tests.support.process_groups import run_in_group


def late(made: Callable[..., Any], connected: Path, *, is_late: bool) -> Callable[..., Any]:
    """That call, whose worker takes longer than others to connect."""

    def make(*arguments: Any, **more: Any) -> Any:
        group = made(*arguments, **more)
        if is_late:
            time.sleep(0.3)
            connected.touch()
        return group

    return make


def start_again(channel: GroupChannel, folder: Path) -> GroupChannel:
    def broadcast(data: bytes | None) -> bytes:
        if data is not None:
            (folder / "address.part").write_bytes(data)
            (folder / "address.part").rename(folder / "address")
        until_s = time.monotonic() + 60
        while not (folder / "address").exists():
            assert time.monotonic() < until_s
            time.sleep(1e-3)
        return (folder / "address").read_bytes()

    process_group.stop()
    return process_group.start(
        index=channel.place,
        size=channel.size,
        device=torch.device("cpu"),
        timeout_s=60.0,
        broadcast=broadcast,
    )


def see_who_is_connected(channel: GroupChannel, *, folder: Path) -> list[str]:
    """What has been made when the worker at place 1 had not connected yet."""
    assert isinstance(channel, ProcessGroupChannel)
    early = []

    def make(what: str, call: Callable[[], Any]) -> Any:
        connected = folder / what
        wraps = partial(late, connected=connected, is_late=channel.place == 1)
        with (
            mock.patch.object(dist, "init_process_group", wraps(dist.init_process_group)),
            mock.patch.object(dist, "new_group", wraps(dist.new_group)),
        ):
            made = call()
        if not connected.exists():
            early.append(what)
        return made

    again = make("start", lambda: start_again(channel, folder))
    inner = make("host", lambda: process_group.of_host(again, [0, 0, 1]))
    if channel.place < 2:
        make("beside of a host", inner.duplicate)
    make("beside", again.duplicate)
    return early


def test_nobody_goes_on_before_all_have_connected(tmp_path: Path) -> None:
    assert run_in_group(3, partial(see_who_is_connected, folder=tmp_path)) == [[], [], []]


class Slow:
    """A store whose user comes late to wait."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.has_heard = False

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def wait(self, keys: list[str]) -> None:
        time.sleep(0.2)
        self._store.wait(keys)
        self.has_heard = True


def new_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined] # exported, but not in __all__


def test_who_keeps_the_store_stays_until_the_others_have_heard() -> None:
    store = new_store()
    slow = Slow(store)
    other = Thread(target=all_connected, args=(slow, 1, 2))
    other.start()
    all_connected(store, 0, 2)
    assert slow.has_heard
    other.join()


@pytest.mark.parametrize(
    ("come", "said"),
    [([2], "nothing from place 1, 3"), ([1, 2, 3], "all had connected")],
)
def test_who_waits_in_vain_says_for_whom(come: list[int], said: str) -> None:
    store = new_store()
    store.set_timeout(datetime.timedelta(seconds=0.01))
    for each in come:
        store.set(f"connected {each}", b"")
    with pytest.raises(
        MemberLostError, match=f"the 4 workers.*at place 0 waits without success.*{said}"
    ):
        all_connected(store, 0, 4)
