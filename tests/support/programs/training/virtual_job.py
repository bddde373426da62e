"""A whole training job in one process: real Jobs, real servers, the virtual network between them.

Every worker's script runs in a thread of its own, but only one thread runs at a time: the network
hands the baton to a worker when something has arrived for it, and the worker hands it back when
it would wait. So a schedule is decided by the seed alone, and a run can be repeated exactly.

    outcome = run_virtually(case, tmp_path / "run", seed=3)

Groups reduce over the virtual network, too, so scripts cannot use torch.distributed themselves:
it has one default process group per process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from psdist.config.sources import Resolved
from psdist.job import Job
from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.checkpointing.resuming import choose
from psdist.ranks.checkpointing.rollbacks import read_rollbacks
from psdist.ranks.checkpointing.tuning_state import tuning_state_of
from psdist.ranks.exit import Exit
from psdist.ranks.rank import Bootstrap, Comms, Rank
from psdist.ranks.run_files import Begun
from psdist.ranks.server import server_actor
from psdist.transport.virtual import Actor
from psdist.transport.waiting import Waiting
from psdist.workers.group.channel import AloneChannel, GroupChannel
from tests.support.programs.training.cases import Case, Outcome, Stage, result_path
from tests.support.virtual.group import VirtualGroup
from tests.support.virtual.host_groups import over_hosts
from tests.support.virtual.network import LinkModel, VirtualNetwork


class JobFailedError(Exception):
    """The job was ended with this text; what a person would read."""


class DeadlockError(AssertionError):
    """Nothing is under way any more, and somebody still waits."""


def run_virtually(
    case: Case,
    path: Path,
    *,
    seed: int = 0,
    link: LinkModel | None = None,
    resumes: bool = False,
    fails: tuple[int, int] | None = None,
) -> Outcome:
    """Run ``case`` to its end; whatever a worker or a server raises is raised here. ``resumes``:
    with the run that is in ``path`` already, as with ``--resume``; ``fails``: a peer, and how often
    the script of the last worker sleeps before it fails."""
    path.mkdir(parents=True, exist_ok=True)
    begun = Begun(path=path)
    if resumes:
        (path / "ranks.json").write_text("[]")
        rollbacks = read_rollbacks(path)
        checkpoint, attempt = choose(path, print, rollbacks)
        tuning_state = tuning_state_of(case.config, checkpoint, print, rollbacks)
        begun = Begun(path=path, attempt=attempt, checkpoint=checkpoint, tuning_state=tuning_state)
    network = VirtualNetwork(seed=seed, link=link)
    board: list[bytes] = []
    workers: list[_Worker] = []
    channels = _channels(case, network, seed, link or LinkModel())

    def rank_of(peer: int, number: int, worker: _Worker | None) -> Rank:
        channel = channels[worker.index] if worker is not None else AloneChannel()
        rank = _VirtualRank(
            Bootstrap(
                resolved=Resolved(config=case.config, sources={}),
                roles=case.roles(),
                path=path,
                started_s=time.monotonic(),
                buddies=_buddies_of(case),
                attempt=begun.attempt,
                checkpoint=begun.checkpoint,
                tuning_state=begun.tuning_state,
            ),
            number=number,
            transport=network.endpoint(peer),
            core_share=1.0,
            comms=_VirtualComms(worker, channel, board),
            now_s=lambda: network.now_s,
        )
        if rank.bootstrap.buddies:
            rank.begin_job(1, case.config)
        return rank

    for index in range(case.num_workers):
        worker = _Worker(index)
        rank = rank_of(worker_id(index), case.servers + index, worker)
        sleep = worker.pause
        if fails is not None and index == case.num_workers - 1:
            sleep = partial(_fail_later, network, worker, fails[0], [fails[1]])
        worker.run = _script_of(case, rank, path, sleep)
        workers.append(worker)
        network.spawn(worker_id(index), worker.actor())
    for index in range(case.servers):
        session = rank_of(server_id(index), index, None).session
        actor = server_actor(session, session.transport)
        network.spawn(server_id(index), actor)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as over MPI: a server steps in this thread
    try:
        with (
            mock.patch("psdist.workers.group.process_group.start", _start),
            mock.patch("psdist.workers.group.process_group.stop"),
        ):
            network.run()
        if network.unfinished:
            raise DeadlockError(f"{path}: these peers wait for ever: {network.unfinished}")
    finally:
        torch.set_num_threads(num_threads)
        for worker in workers:
            worker.abandon()
    return Outcome(path=path, num_workers=case.num_workers)


def _channels(
    case: Case, network: VirtualNetwork, seed: int, link: LinkModel
) -> dict[int, GroupChannel]:
    """Every worker's end of its group."""
    channels: dict[int, GroupChannel] = {}
    for members in case.groups:
        hosts = [case.hosts[worker] for worker in members] if case.hosts else []
        if len(set(hosts)) > 1:
            ids = [worker_id(worker) for worker in members]
            ends = over_hosts(network, ids, hosts, seed=seed, link=link)
            channels.update(zip(members, ends, strict=True))
            continue
        group = VirtualGroup(network, list(map(worker_id, members)), seed=seed, link=link)
        for place, worker in enumerate(members):
            channels[worker] = AloneChannel() if len(members) == 1 else group.channel(place)
    return channels


def _start(*, broadcast: Any, **_: object) -> GroupChannel:
    """Instead of torch's process group: ``broadcast`` is a method of the worker's comms."""
    channel: GroupChannel = broadcast.__self__.channel
    return channel


def _buddies_of(case: Case) -> tuple[int, ...]:
    """Return the server that stores the replica of each server's shard; () without replicas."""
    if case.config.replication == "none":
        return ()
    return tuple((server + 1) % case.servers for server in range(case.servers))


def _fail_later(
    network: VirtualNetwork, worker: _Worker, peer: int, left: list[int], sleep_s: float
) -> None:
    """Sleep; ``peer`` fails before if none of the times is left."""
    if not left[0]:
        network.crash(peer)
    left[0] -= 1
    worker.pause(sleep_s)


def _script_of(
    case: Case,
    rank: Rank,
    path: Path,
    sleep: Callable[[float], None],
) -> Callable[[], None]:
    def run() -> None:
        job = Job(rank.session)
        result = case.script(job, Stage(path=path, sleep=sleep, now_s=rank.now_s))
        torch.save(result, result_path(path, job.worker))
        job.finish()

    return run


class _AbandonedError(BaseException):
    """The job has ended without this worker: its thread must end, too."""


class _Worker:
    """A thread that runs only while it has the baton."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.run: Callable[[], None] = lambda: None
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=f"worker-{index}", daemon=True)
        self._sleep_s: float | None = None
        self._error: BaseException | None = None
        self._is_done = self._is_abandoned = False

    def actor(self) -> Actor:
        self._thread.start()
        while True:
            self._may_run.release()
            self._has_paused.acquire()
            if self._error is not None:
                raise self._error
            if self._is_done:
                return
            yield self._sleep_s

    def _main(self) -> None:
        self._may_run.acquire()
        try:
            if not self._is_abandoned:
                self.run()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._error = error
        self._is_done = True
        self._has_paused.release()

    def pause(self, sleep_s: float | None = None) -> None:
        """Hand the baton back, until something arrives or for so many virtual seconds."""
        if not self._is_abandoned:
            self._sleep_s = sleep_s
            self._has_paused.release()
            self._may_run.acquire()
        if self._is_abandoned:  # again and again: some keep errors for later
            raise _AbandonedError

    def abandon(self) -> None:
        if self._thread.is_alive():
            self._is_abandoned = True
            self._may_run.release()
            self._thread.join(timeout=30)
            assert not self._thread.is_alive()


class _BatonWaiting(Waiting):
    def __init__(self, worker: _Worker) -> None:
        super().__init__(is_spinning=False)
        self._worker = worker

    def idle(self, what: str) -> bool:  # noqa: ARG002
        self._worker.pause()
        return False


class _VirtualComms(Comms):
    def __init__(self, worker: _Worker | None, channel: GroupChannel, board: list[bytes]) -> None:
        """``board``: what the chief has broadcast so far, for all workers."""
        super().__init__()
        self.worker, self.channel = worker, channel
        self._board, self._num_read = board, 0

    def broadcast_among_workers(
        self,
        memory: memoryview,
        *,
        dead: Collection[int] = frozenset(),  # noqa: ARG002
    ) -> None:
        assert self.worker is not None
        if self.worker.index == 0:
            self._board.append(bytes(memory))
        while len(self._board) <= self._num_read:
            self.worker.pause(1e-4)
        memory[:] = self._board[self._num_read]
        self._num_read += 1


class _VirtualRank(Rank):
    def __init__(self, bootstrap: Bootstrap, **more: Any) -> None:
        super().__init__(bootstrap, **more)
        self.exit = _VirtualExit(self)

    @property
    def survives_ranks(self) -> bool:
        return True

    def waiting(self, *, has_deadline: bool = True) -> Waiting:  # noqa: ARG002
        assert isinstance(self.comms, _VirtualComms)
        assert self.comms.worker is not None
        return _BatonWaiting(self.comms.worker)


class _VirtualExit(Exit):
    def abort(self, heading: str, text: str, status: int) -> NoReturn:
        raise JobFailedError(f"{heading} ({status}): {text}")
