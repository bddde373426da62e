"""The coordinator's state machine between jobs: which workers have called psdist.init, with which
settings, and which have ended; pure.

A job begins when every worker has sent ``Begin`` with the same settings. Then all other ranks are
sent ``Begun``. Until then servers wait, and no part of the job exists. A worker whose process ends
sends ``Gone``: no job can begin after that. After the last ``Gone`` the servers end.

    lobby = Lobby(num_workers=4, num_servers=2)
    lobby.handle(worker_id(0), Begin(worker=0, job=1, settings={"mode": "ssp"}))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.collected import MOST_TOLD
from psdist.protocol.control import Absent, Begin, Begun, Control, End, Gone, WhoIsAbsent
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    describe_workers,
    server_id,
    worker_id,
)
from psdist.servers.protocol.actions import SendControl


@dataclass(slots=True)
class Open:
    """The coordinator begins the job itself, before the other ranks receive ``Begun``."""

    begun: Begun


@dataclass(slots=True)
class AllGone:
    """All workers have ended: the coordinator ends as well."""


LobbyAction = SendControl | Open | AllGone


class Lobby:
    TAKES = (Begin, Gone, WhoIsAbsent)

    def __init__(
        self,
        *,
        num_workers: int,
        num_servers: int,
        spares: Iterable[int] = (),
        joining: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """``num_workers``: workers that begin jobs; ``spares``: ids of ranks that wait to replace
        failed servers; ``joining``: worker that may replace a failed one -> id under which it
        waits."""
        self._num_workers = num_workers
        servers = map(server_id, range(num_servers))
        self._others = [*dict.fromkeys((*servers, *spares, *joining.values()))]
        """Ids of the ranks that receive ``Begun`` and ``End`` and do not send ``Gone``."""
        self._waits_as = joining
        self._members = set(range(num_workers))
        """Workers that send ``Gone`` when they end."""
        self._job = 1
        self._called: dict[int, Mapping[str, Any]] = {}
        """Worker -> what it has passed to psdist.init for this job."""
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        """Workers in ``_gone`` that failed."""
        self._error = ""
        """Reason why this job cannot begin; workers that call later receive it too."""

    @property
    def called(self) -> list[int]:
        """Workers that have called psdist.init for the next job."""
        return sorted(self._called)

    @property
    def job(self) -> int:
        """Number of the next job."""
        return self._job

    def admit(self, substitutes: Iterable[int]) -> None:
        """These have joined a job. They send ``Gone`` when they end, as other workers do."""
        joined = set(substitutes)
        self._members |= joined
        ids = {self._waits_as[each] for each in joined}
        self._others = [each for each in self._others if each not in ids]

    def handle(self, peer: int, message: Control) -> list[LobbyAction]:
        """Return the actions for a message of a class in ``TAKES``. Raises :class:`ProtocolError`
        if the peer sends for another worker, or the message is not valid now."""
        if isinstance(message, Begin):
            self._require_worker(peer, message)
            return self._on_begin(peer, message)
        if isinstance(message, Gone):
            self._require_worker(peer, message)
            return self._on_gone(peer, message)
        if isinstance(message, WhoIsAbsent):
            self._require_worker(peer, message)
            return self._on_who_is_absent(message)
        raise InvariantError(f"the lobby was given {type(message).__name__}")

    def _require_worker(self, peer: int, message: Begin | Gone | WhoIsAbsent) -> None:
        worker = message.worker
        allowed = self._members if isinstance(message, Gone) else range(self._num_workers)
        if worker not in allowed or peer != worker_id(worker):
            _refuse(peer, f"sent {type(message).__name__} of worker {worker}")

    def _on_begin(self, peer: int, message: Begin) -> list[LobbyAction]:
        if message.job != self._job or (message.worker in self._called and not self._error):
            _refuse(peer, f"began job {message.job}, where job {self._job} is next, or twice")
        if message.worker in self._gone:
            _refuse(peer, f"began job {message.job}, and its process has ended")
        self._called[message.worker] = message.settings
        if self._error:
            return self._tell([message.worker])
        if self._gone:
            return self._fail_for_the_gone()
        if message.settings != next(iter(self._called.values())):
            self._error = _difference(self._called)
            return self._tell(self._called)
        if len(self._called) < self._num_workers:
            return []
        begun = Begun(job=self._job, settings=message.settings)
        self._job += 1
        self._called = {}
        others = [*self._others, *(worker_id(worker) for worker in range(self._num_workers))]
        return [Open(begun), *(SendControl(each, begun) for each in others if each != COORDINATOR)]

    def _on_gone(self, peer: int, message: Gone) -> list[LobbyAction]:
        if message.worker in self._gone:
            _refuse(peer, "sent Gone twice")
        self._gone.add(message.worker)
        self._called.pop(message.worker, None)
        if self._gone == self._members:
            others = (each for each in self._others if each != COORDINATOR)
            return [*(SendControl(each, End()) for each in others), AllGone()]
        return self._fail_for_the_gone() if self._called and not self._error else []

    def lose(self, worker: int) -> list[LobbyAction]:
        """The worker failed, after a job or in a job that continued without it. Treat it as if it
        had sent ``Gone``."""
        if worker in self._gone or worker not in self._members:
            return []
        self._dead.add(worker)
        return self._on_gone(worker_id(worker), Gone(worker=worker))

    def _fail_for_the_gone(self) -> list[LobbyAction]:
        whose = "whose script has" if len(self._gone) == 1 else "whose scripts have"
        what = f"{whose} finished"
        if self._dead:
            what += f" or which {'has' if len(self._dead) == 1 else 'have'} failed"
        self._error = (
            f"psdist.init was called for job {self._job} by {describe_workers(self._called)}; "
            f"absent: {describe_workers(self._gone)}, {what}; psdist.init must be "
            "called by every worker"
        )
        return self._tell(self._called)

    def _tell(self, workers: Iterable[int]) -> list[LobbyAction]:
        answer = Begun(job=self._job, settings={}, error=self._error)
        return [SendControl(worker_id(worker), answer) for worker in workers]

    def _on_who_is_absent(self, message: WhoIsAbsent) -> list[LobbyAction]:
        if message.seq != self._job or self._error:
            return []  # it has begun, or has failed: the question has crossed the answer
        absent = [worker for worker in range(self._num_workers) if worker not in self._called]
        answer = Absent(seq=message.seq, workers=absent[:MOST_TOLD], num_absent=len(absent))
        return [SendControl(worker_id(message.worker), answer)]


def _difference(called: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the first setting that differs between workers."""
    by_value: dict[str, list[int]] = {}
    for key in sorted({key for settings in called.values() for key in settings}):
        by_value = {}
        for worker, settings in sorted(called.items()):
            passed = f"{key}={settings[key]!r}" if key in settings else f"no {key}"
            by_value.setdefault(passed, []).append(worker)
        if len(by_value) > 1:
            break
    told = ", ".join(f"{each} by {describe_workers(who)}" for each, who in by_value.items())
    return f"psdist.init was given {told}; every worker must pass the same settings"


def _refuse(peer: int, why: str) -> NoReturn:
    raise ProtocolError(f"the coordinator: {describe_peer(peer)} {why}")
