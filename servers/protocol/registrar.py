"""Who has come to a collective, who is done, what goes into the run's files; pure.

One server, number 0, is the registrar beside being a server: it is always responsive, which the
chief, busy computing, is not. It is no coordinator of updates: consistency is every server's own.

A collective (save, mean, barrier, prepare) goes this way: every worker sends ``Enter``; when all
have come, every server is told to ``Resume`` the groups that waited; when all servers have
answered, every worker gets ``Collected``. So no worker leaves a collective before every server
counts every group again.

A worker that misses the call goes on alone. It is noticed by what it has finished: a worker that
has made more iterations than another had when that one entered has *passed* it. Whether that is an
error follows from the two workers' iterations alone; when their messages come decides only how
early it is told.

    registrar = Registrar(num_workers=4, num_servers=2)
    registrar.handle(Enter(worker=0, seq=1, name="barrier", payload=b""))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from psdist.errors import ProtocolError
from psdist.protocol.control import (
    Absent,
    Collected,
    Control,
    Done,
    Enter,
    Failure,
    Finish,
    Finished,
    Metrics,
    Progress,
    Resume,
    Resumed,
    Stop,
    WhoIsAbsent,
)
from psdist.protocol.ids import describe_workers, server_id, worker_id
from psdist.servers.protocol.actions import SendControl


@dataclass(slots=True)
class WriteMetrics:
    """One line for metrics.jsonl."""

    line: dict[str, Any]


@dataclass(slots=True)
class EndJob:
    """Somebody failed: print this once, end every rank with this status."""

    failure: Failure


@dataclass(slots=True)
class Complete:
    """All workers are done and all servers have reported."""


@dataclass(slots=True)
class Warn:
    """Tell the user; the job goes on."""

    text: str


RegistrarAction = SendControl | WriteMetrics | EndJob | Complete | Warn


@dataclass(slots=True)
class _Collective:
    name: str
    """What its first worker called."""
    entered: dict[int, Enter] = field(default_factory=dict)
    earliest: dict[int, Progress] = field(default_factory=dict)
    """Of those that have entered, the one with the fewest iterations, by the length of the loaders
    that these were made of (0: not all of one length)."""
    resumed: set[int] = field(default_factory=set)
    error: str = ""
    """Why it has failed: whoever comes later is told the same."""


class Registrar:
    TAKES = (Enter, Resumed, Done, Finished, Metrics, Progress, Failure, WhoIsAbsent)

    def __init__(self, *, num_workers: int, num_servers: int, mode: str = "sync") -> None:
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._mode = mode
        self._warned_of: set[str] = set()
        """Names of collectives."""
        self._collectives: dict[int, _Collective] = {}
        self.progress: dict[int, Progress] = {}
        self.done: dict[int, dict[str, Any]] = {}
        """Statistics of the workers that are done."""
        self.servers: dict[int, dict[str, Any]] = {}
        """Statistics of the servers, at the end."""
        self.last: dict[str, Any] = {}
        """The chief's last value of every logged name."""

    def handle(self, message: Control) -> list[RegistrarAction]:
        if isinstance(message, Progress):
            return self._on_progress(message)
        if isinstance(message, Metrics):
            return self._on_metrics(message.line)
        if isinstance(message, Enter):
            return self._on_enter(message)
        if isinstance(message, Resumed):
            return self._on_resumed(message)
        if isinstance(message, Done):
            return self._on_done(message)
        if isinstance(message, Finished):
            self.servers[message.server] = message.statistics
            return self._complete_if_all_reported()
        if isinstance(message, WhoIsAbsent):
            return self._on_who_is_absent(message)
        if isinstance(message, Failure):
            return [EndJob(message)]
        return []

    def _on_metrics(self, line: dict[str, Any]) -> list[RegistrarAction]:
        if line.get("worker") == 0:
            self.last.update(line.get("values", {}))
        values = line.get("values", {})
        return [WriteMetrics({**{k: v for k, v in line.items() if k != "values"}, **values})]

    def _on_enter(self, message: Enter) -> list[RegistrarAction]:
        collective = self._collectives.get(message.seq)
        if collective is None:
            collective = self._collectives[message.seq] = _Collective(message.name)
        collective.entered[message.worker] = message
        if collective.error:
            return self._answer(message.seq, [], collective.error, [message.worker])
        actions = self._check_missed_calls(message.seq, collective, message.worker)
        return actions if collective.error else actions + self._go_on(message, collective)

    def _go_on(self, message: Enter, collective: _Collective) -> list[RegistrarAction]:
        """``message.worker`` has come, and nobody has passed anybody."""
        if message.name != collective.name:
            return self._fail(
                message.seq,
                collective,
                f"workers made different calls: {_who_called(collective)}; every worker must make "
                "the same calls in the same order",
            )
        return self._fail_if_a_script_has_finished(message.seq, collective) or (
            self._resume_if_all_have_come(message.seq, collective)
        )

    def _on_progress(self, message: Progress) -> list[RegistrarAction]:
        self.progress[message.worker] = message
        actions: list[RegistrarAction] = []
        for seq, collective in sorted(self._collectives.items()):
            actions += self._judge(seq, collective, message)
        return actions

    def _check_missed_calls(
        self, seq: int, collective: _Collective, worker: int
    ) -> list[RegistrarAction]:
        """``worker`` has entered: it may have passed one who had, or have been passed before."""
        mine = self.progress.get(worker)
        if mine is None:
            return []
        actions = self._judge(seq, collective, mine)
        length = mine.loader_batches if mine.loader_until >= mine.clock else 0
        earliest = collective.earliest.get(length)
        if earliest is None or _order(mine) < _order(earliest):
            collective.earliest[length] = mine
            for other in sorted(self.progress.values(), key=_order):
                actions += self._judge(seq, collective, other)
        return actions

    def _judge(self, seq: int, collective: _Collective, other: Progress) -> list[RegistrarAction]:
        """What to do if ``other`` has finished an iteration past somebody's entry."""
        if collective.error:
            return []
        name = collective.name
        alike = collective.earliest.get(other.loader_batches) if other.loader_batches else None
        if self._mode == "sync" and alike is not None and other.loader_until > alike.clock:
            return self._fail(
                seq,
                collective,
                f"{_describe_passing(name, alike, other)}, although both iterate over a job.loader "
                f"of {other.loader_batches} batches; {name} must be called by every worker, after "
                "the same iteration",
            )
        passed = [first for first in collective.earliest.values() if first.clock < other.clock]
        if not passed or name in self._warned_of:
            return []
        self._warned_of.add(name)
        return [
            Warn(
                f"{_describe_passing(name, min(passed, key=_order), other)}; {name} must be called "
                f"by every worker: if worker {other.worker} never calls it, that will be an error "
                "at the end of its script"
            )
        ]

    def _fail_if_a_script_has_finished(
        self, seq: int, collective: _Collective
    ) -> list[RegistrarAction]:
        gone = self.done.keys() - collective.entered.keys()
        if not gone or collective.error:
            return []
        whose = "whose script has" if len(gone) == 1 else "whose scripts have"
        return self._fail(
            seq,
            collective,
            f"{collective.name} was called by {describe_workers(collective.entered)} only; absent: "
            f"{describe_workers(gone)}, {whose} finished; {collective.name} must be called by "
            "every worker",
        )

    def _resume_if_all_have_come(self, seq: int, collective: _Collective) -> list[RegistrarAction]:
        if len(collective.entered) < self._num_workers:
            return []
        return [
            SendControl(server_id(server), Resume(seq=seq)) for server in range(self._num_servers)
        ]

    def _fail(self, seq: int, collective: _Collective, error: str) -> list[RegistrarAction]:
        collective.error = error
        return self._answer(seq, [], error, sorted(collective.entered))

    @staticmethod
    def _answer(
        seq: int, payloads: list[bytes], error: str, workers: Iterable[int]
    ) -> list[RegistrarAction]:
        answer = Collected(seq=seq, payloads=payloads, error=error)
        return [SendControl(worker_id(worker), answer) for worker in workers]

    def _on_resumed(self, message: Resumed) -> list[RegistrarAction]:
        collective = self._collectives.get(message.seq)
        if collective is None or len(collective.entered) < self._num_workers:
            raise ProtocolError(
                f"server {message.server} resumed collective {message.seq}, which is not complete"
            )
        collective.resumed.add(message.server)
        if len(collective.resumed) < self._num_servers:
            return []
        del self._collectives[message.seq]
        payloads = [collective.entered[worker].payload for worker in range(self._num_workers)]
        return self._answer(message.seq, payloads, "", range(self._num_workers))

    def _on_done(self, message: Done) -> list[RegistrarAction]:
        self.done[message.worker] = message.statistics
        actions: list[RegistrarAction] = []
        for seq, collective in sorted(self._collectives.items()):
            actions += self._fail_if_a_script_has_finished(seq, collective)
        if len(self.done) == self._num_workers:
            actions += [
                SendControl(server_id(server), Finish()) for server in range(self._num_servers)
            ]
        return actions

    def _complete_if_all_reported(self) -> list[RegistrarAction]:
        if len(self.servers) < self._num_servers:
            return []
        stops = [SendControl(worker_id(worker), Stop()) for worker in range(self._num_workers)]
        return [*stops, Complete()]

    def _on_who_is_absent(self, message: WhoIsAbsent) -> list[RegistrarAction]:
        collective = self._collectives.get(message.seq)
        if collective is None:
            return []  # it is over: the question has crossed the answer
        absent = [worker for worker in range(self._num_workers) if worker not in collective.entered]
        return [
            SendControl(worker_id(message.worker), Absent(seq=message.seq, workers=absent)),
        ]


def _order(progress: Progress) -> tuple[int, int]:
    return progress.clock, progress.worker


def _describe_passing(name: str, first: Progress, other: Progress) -> str:
    return (
        f"worker {first.worker} called {name} after {first.clock} iterations, but worker "
        f"{other.worker} continued past iteration {first.clock} without calling {name}"
    )


def _who_called(collective: _Collective) -> str:
    by_name: dict[str, list[int]] = {}
    for worker, enter in sorted(collective.entered.items()):
        by_name.setdefault(enter.name, []).append(worker)
    return "; ".join(
        f"{describe_workers(workers)} called {name}" for name, workers in by_name.items()
    )
