"""Failure scenarios as text: a transcript starts a virtual job, disturbs it, and checks the result.

    start servers=4 iterations=40,40 mode=async    # fields of Schedule; with replication
    run until every worker has passed iteration 2
    kill server 0
    deliver 5                                      # the next 5 events of the network
    run                                            # to the end
    expect error at server 2, worker 0: ServersLostError: server 0; --resume

    job = play(Path("coordinator_and_standby.txt"))

Commands: ``start``, ``run [until CONDITION]``, ``deliver N``, ``drop loss of PEER at PEER`` (the
peer does not get the notice of the failure), ``give loss of PEER at PEER`` (it gets it now),
``kill PEER`` and ``expect WHAT``. ``#`` begins a comment. A command that is wrong or fails raises
:class:`TranscriptError` with the file, the line and the reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from psdist.history import EventKind
from psdist.protocol.events import Arrived, Event, PeerLost
from psdist.protocol.header import Kind
from psdist.protocol.ids import describe_peer, server_id, worker_id
from tests.support.virtual.both_deaths import taken_over
from tests.support.virtual.fields import fields_in_use
from tests.support.virtual.job import VirtualJob, replication_of
from tests.support.virtual.network import LinkModel, VirtualNetwork
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import deaths_of, prove_survival


class TranscriptError(AssertionError):
    """A line of a transcript that cannot be read, or whose expectation does not hold."""


class _Network(VirtualNetwork):
    """Counts arrived pushes, and can drop the notice of a failure."""

    def __init__(self, schedule: Schedule) -> None:
        link = LinkModel(latency_s=schedule.latency_s, jitter_s=schedule.jitter_s)
        super().__init__(seed=schedule.seed, link=link)
        self.num_pushed: dict[tuple[int, int, int], int] = {}
        """(worker, server, iteration) -> pushes that have arrived."""
        self.drops: set[tuple[int, int]] = set()
        """(failed peer, receiver) of notices to drop."""
        self.dropped: dict[tuple[int, int], PeerLost] = {}

    def _give(self, peer: int, event: Event) -> None:
        if isinstance(event, PeerLost) and (event.peer, peer) in self.drops:
            self.dropped[event.peer, peer] = event
            return
        if isinstance(event, Arrived) and event.header.kind == Kind.PUSH:
            key = event.peer, peer, event.header.clock
            self.num_pushed[key] = self.num_pushed.get(key, 0) + 1
        super()._give(peer, event)

    def give_dropped(self, lost: int, peer: int) -> None:
        self.drops.discard((lost, peer))
        super()._give(peer, self.dropped.pop((lost, peer)))


class Player:
    """Runs the commands of one transcript."""

    def __init__(self) -> None:
        self._network: _Network | None = None
        self._job: VirtualJob | None = None
        self._has_run_to_end = False

    @property
    def job(self) -> VirtualJob:
        if self._job is None:
            raise TranscriptError("the first command must be start")
        return self._job

    @property
    def network(self) -> _Network:
        assert self._network is not None
        return self._network

    def do(self, line: str) -> None:
        for pattern, command in _COMMANDS.items():
            if found := re.fullmatch(pattern, line):
                command(self, *found.groups())
                return
        raise TranscriptError("unknown command")

    # -- commands --------------------------------------------------------------------------------

    def start(self, words: str | None) -> None:
        types = {each.name: each for each in dataclasses.fields(Schedule)}
        values: dict[str, object] = {"seed": 1, "servers": 2, "has_buddies": True}
        max_deaths = 0
        for word in (words or "").split():
            name, _, text = word.partition("=")
            if name == "max_deaths":
                max_deaths = int(text)
            elif name not in types:
                raise TranscriptError(f"Schedule has no field {name}")
            else:
                values[name] = _value(str(types[name].type), text)
        num_groups = len(values.get("group_sizes", (1, 1)))  # type: ignore[arg-type]
        values.setdefault("collectives", ((),) * num_groups)
        schedule = Schedule(**values)  # type: ignore[arg-type]
        self._network = _Network(schedule)
        self._job = VirtualJob(
            schedule, network=self._network, is_watched=False, max_deaths=max_deaths
        )

    def run(self) -> None:
        self.job.run()

    def run_dry(self) -> None:
        self.network.run()

    def run_until(self, words: str) -> None:
        for pattern, condition in _CONDITIONS.items():
            if found := re.fullmatch(pattern, words):
                holds = condition(self, *found.groups())
                self.network.run(until=holds)
                if not holds():
                    raise TranscriptError("the job has stopped before")
                return
        raise TranscriptError("unknown condition")

    def deliver(self, count: str) -> None:
        for _ in range(int(count)):
            if not self.network.step():
                raise TranscriptError("no event is left")

    def drop(self, lost: str, at: str) -> None:
        self.network.drops.add((_peer(lost), _peer(at)))

    def give(self, lost: str, at: str) -> None:
        key = _peer(lost), _peer(at)
        if key not in self.network.dropped:
            raise TranscriptError("no such notice was dropped")
        self.network.give_dropped(*key)

    def kill(self, victim: str) -> None:
        peer = _peer(victim)
        if peer not in self.network.unfinished:
            raise TranscriptError(f"{describe_peer(peer)} has ended")
        self.job.dead = peer
        self.network.crash(peer)

    # -- conditions ------------------------------------------------------------------------------

    def passed(self, iteration: str) -> Callable[[], bool]:
        return lambda: min(self.job.clocks_once_ready(), default=0) > int(iteration)

    def arrived(self, server: str, count: str, iteration: str, worker: str) -> Callable[[], bool]:
        key = worker_id(int(worker)), server_id(int(server)), int(iteration)
        return lambda: self.network.num_pushed.get(key, 0) >= int(count)

    def declared(self) -> Callable[[], bool]:
        coordinator = self.job.coordinator
        return lambda: bool(coordinator.out) and not coordinator.membership.is_settling

    # -- expectations ----------------------------------------------------------------------------

    def expect_error(self, peers: str, kind: str, words: str) -> None:
        expected = set(map(_peer, peers.split(", ")))
        if self.job.errors.keys() != expected:
            raise TranscriptError(f"errors at {_described(self.job.errors)}")
        for peer, error in self.job.errors.items():
            missing = [each for each in words.split("; ") if each not in str(error)]
            if type(error).__name__ != kind or missing:
                raise TranscriptError(f"{describe_peer(peer)}: {error!r}")

    def expect_waiting(self, peers: str) -> None:
        if not set(map(_peer, peers.split(", "))) <= set(self.network.unfinished):
            raise TranscriptError(f"only {_described(self.network.unfinished)} wait")

    def expect_held(self, is_none: str | None, server: str) -> None:
        outbox = replication_of(self.job.servers[int(server)]).outbox
        if outbox.primary.is_settled != bool(is_none):
            raise TranscriptError(f"messages are {'not ' * (not is_none)}held")

    def expect_takeovers(self, servers: str) -> None:
        found = taken_over(self.job)
        if found != [_peer(each) for each in servers.split(", ")]:
            raise TranscriptError(f"taken over: {_described(found)}")

    def expect_lost(self, workers: str) -> None:
        found = deaths_of(self.job)
        if [worker_id(each) for each in found] != [_peer(each) for each in workers.split(", ")]:
            raise TranscriptError(f"failed workers: {found}")

    def expect_successions(self, count: str) -> None:
        if self.job.num_successions != int(count):
            raise TranscriptError(f"there were {self.job.num_successions}")

    def expect_inherited(self, server: str) -> None:
        """Each update that a server kept of a failed worker is applied, except on ``server``."""
        for log in self.job.history().servers:
            kept = log.events[log.events["kind"] == EventKind.INHERIT]
            applied = log.events[log.events["kind"] == EventKind.APPLY]
            if not len(kept):
                raise TranscriptError(f"server {log.server} kept no update")
            done = set(map(tuple, applied[["chunk", "group", "clock"]].tolist()))
            for update in map(tuple, kept[["chunk", "group", "clock"]].tolist()):
                if (update in done) != (log.server != int(server)):
                    raise TranscriptError(f"server {log.server}: (chunk, group, clock) {update}")

    def expect_in_use(self, cls: str, field: str, server: str) -> None:
        """The field of an object of the class holds something at ``server``."""
        if (cls, field) not in fields_in_use(self.job.servers[int(server)], {cls}):
            raise TranscriptError("it is empty")

    def expect_survival(self) -> None:
        self.job.dead = None
        prove_survival(self.job)

    def expect_proof(self) -> None:
        self.job.dead = None
        prove(self.job)


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    r"start( .*)?": Player.start,
    r"run": Player.run,
    r"run until no event is left": Player.run_dry,
    r"run until (.*)": Player.run_until,
    r"deliver (\d+)": Player.deliver,
    r"drop loss of (.*) at (.*)": Player.drop,
    r"give loss of (.*) at (.*)": Player.give,
    r"kill (.*)": Player.kill,
    r"expect error at ([^:]*): (\w+): (.*)": Player.expect_error,
    r"expect waiting: (.*)": Player.expect_waiting,
    r"expect (no )?held messages at server (\d+)": Player.expect_held,
    r"expect taken over: (.*)": Player.expect_takeovers,
    r"expect failed workers: (.*)": Player.expect_lost,
    r"expect (\d+) failovers of the coordinator": Player.expect_successions,
    r"expect kept updates applied, except on server (\d+)": Player.expect_inherited,
    r"expect (\w+)\.(\w+) in use at server (\d+)": Player.expect_in_use,
    r"expect survival": Player.expect_survival,
    r"expect a correct run": Player.expect_proof,
}
_CONDITIONS: Final[dict[str, Callable[..., Callable[[], bool]]]] = {
    r"every worker has passed iteration (\d+)": Player.passed,
    r"server (\d+) has (\d+) pushes of iteration (\d+) from worker (\d+)": Player.arrived,
    r"the failed worker is declared": Player.declared,
}


def play(path: Path) -> VirtualJob:
    """Run the transcript; return its job. Raises :class:`TranscriptError`."""
    player = Player()
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        try:
            player.do(line)
        except (AssertionError, ValueError) as error:
            raise TranscriptError(f"{path.name}:{number}: {line}: {error}") from error
    return player.job


def _peer(words: str) -> int:
    kind, _, number = words.strip().partition(" ")
    if kind not in ("server", "worker") or not number.isdigit():
        raise TranscriptError(f"{words!r}: expected server N or worker N")
    return server_id(int(number)) if kind == "server" else worker_id(int(number))


def _described(peers: object) -> str:
    return ", ".join(map(describe_peer, sorted(peers))) or "none"  # type: ignore[call-overload]


def _value(kind: str, text: str) -> object:
    """Return a field of Schedule; ``kind`` is its annotation."""
    if kind.startswith("tuple[int"):
        return tuple(map(int, text.split(",")))
    if kind.startswith("tuple[float"):
        return tuple(map(float, text.split(",")))
    return {"int": int, "float": float, "bool": lambda each: each == "yes"}.get(kind, str)(text)
