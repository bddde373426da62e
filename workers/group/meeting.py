"""The rendezvous of a group's workers on several hosts, before torch connects them.

at = meet(hosts, index)              # this worker's address; the same error on all workers
host_named_in("Read error [10.0.0.2]:10372")      # ", on h2,"
forget()                             # when the group ends
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from psdist.errors import MemberLostError, UsageError
from psdist.workers.group.addresses import (
    HINTS,
    REMEDY,
    At,
    Offer,
    choose,
    listen,
    offer,
    unreachable,
)

INTERFACE = "GLOO_SOCKET_IFNAME"

_REACH_S = 10.0
"""How long a worker tries to reach another host of its group."""

_names: dict[str, str] = {}
"""Address -> name, of the group's hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The hosts of a group on several hosts."""

    numbers: Sequence[int]
    """For each place the number of its host."""
    names: Sequence[str]
    """For each place the name of its host."""
    gather: Callable[[bytes], list[bytes]]
    """Return the bytes of every worker of the group, by place. A collective."""
    preferred: Sequence[str] = ()
    """Interfaces, cards or networks that this worker's MPI or its plan uses."""


def address_of(data: bytes) -> tuple[str, int]:
    ip, port = data.decode("ascii").split()
    return ip, int(port)


def meet(hosts: Hosts, index: int) -> At:
    """Choose this worker's address, and test the addresses of the other hosts. An error is the
    same on all workers. A collective."""
    hints = [os.environ[name] for name in HINTS if name in os.environ]
    mine = offer(
        host=hosts.names[index],
        wanted=os.environ.get(INTERFACE, ""),
        preferred=[*hints, *hosts.preferred],
    )
    offers = [Offer.decode(row) for row in hosts.gather(mine.encode())]
    at, server, said = At("", ""), None, ""
    try:
        at = choose(offers, hosts.numbers, index)
        server = listen(at)
    except (UsageError, OSError) as error:
        said = str(error)
    port = 0 if server is None else server.getsockname()[1]
    ends = [
        address_of(row) if b"." in row else ("", 0)
        for row in hosts.gather(f"{at.ip} {port}".encode("ascii"))
    ]
    with ExitStack() as stack:
        if server is not None:
            stack.enter_context(server)
        if not said and all(port for _, port in ends):
            seen = {hosts.numbers[index]}
            for place, (number, end) in enumerate(zip(hosts.numbers, ends, strict=True)):
                if number not in seen and not said:
                    seen.add(number)
                    said = unreachable(hosts.names[place], end, at, _REACH_S)
                    if said:
                        said = f"from {hosts.names[index]}, {said}; {REMEDY}"
        told = [row.decode("utf-8") for row in hosts.gather(said.encode("utf-8"))]
    _names.update((ip, name) for (ip, _), name in zip(ends, hosts.names, strict=True))
    wrong = next(filter(None, told), "")
    if wrong:
        raise UsageError(f"a group over several hosts needs a network that joins them: {wrong}")
    return at


def host_named_in(text: str) -> str:
    """Return the host of the group that torch's message names, for an error."""
    found = [name for ip, name in _names.items() if re.search(rf"\b{re.escape(ip)}\b", text)]
    return f", on {found[0]}," if len(found) == 1 else ""


def forget() -> None:
    _names.clear()


def all_connected(store: Any, place: int, size: int) -> None:
    """Wait until each of the ``size`` members of a new process group has connected.

    gloo's opening side counts a connection as made before the other side accepts it. A member that
    leaves at once would close it: "connectFullMesh failed ... Connection closed by peer". ``store``
    serves this process group only. Place 0, which may hold it, returns last. Raises
    :class:`MemberLostError` after the timeout of ``store``, or if the store is gone.
    """
    try:
        exchange(store, "connected", place, size, wait=store.wait)
    except RuntimeError as error:
        missing = [f"{each}" for each in range(size) if not _is_there(store, f"connected {each}")]
        who = f"nothing from place {', '.join(missing)}" if missing else "all had connected"
        raise MemberLostError(
            f"the {size} workers of this worker's group wait for each other to have connected, and "
            f"the one at place {place} waits without success ({who}): {error}"
        ) from error


def exchange(
    store: Any,
    what: str,
    place: int,
    size: int,
    *,
    word: str = "",
    wait: Callable[[list[str]], None],
) -> list[str]:
    """Return the ``word`` of each of ``size`` processes, once all have written it to ``store``.

    ``wait(keys)``: return when the store has these keys. Place 0, which may hold the store, returns
    last. Raises torch's RuntimeError if the store is gone.
    """
    keys = [f"{what} {each}" for each in range(size)]
    read = [f"{what}, read by {each}" for each in range(size)]
    store.set(keys[place], word)
    wait(keys)
    words = [store.get(key).decode("utf-8") for key in keys]
    store.set(read[place], "")
    if place == 0:
        wait(read)
    return words


def _is_there(store: Any, key: str) -> bool:
    with suppress(RuntimeError):
        return bool(store.check([key]))
    return False
