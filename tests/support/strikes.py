"""SIGKILL at a named moment of a job: what the job does then, and who is killed.

STRIKE="folding chief": the chief is killed when a server folds a push of iteration 12 into a sum.

    registering     its leader has registered its group with the first server, not with the
                    second; a server: the first group has registered with it
    pushing         of iteration 12 its second push has left, others have not; a server: two pushes
                    wait for it to take them
    parked          a worker waits for replies that the mode does not allow yet (not in async)
    folding         a server has added a second push of iteration 12 to a sum (in sync only)
    applying        a server steps a chunk by an update of iteration 12
    checkpointing   it has written a part of its file of the second checkpoint; the coordinator: all
                    files are there, and the checkpoint is about to count
    collective      a worker is in a job.mean, to which others have still to come
    saving          the chief has written half of what job.save writes
    shutting down   a worker has reported the end of its script; a server is to finish; the
                    coordinator has noted the end of all, and told no rank yet

The victims: worker 2, the chief, server 2, its standby server 1, the coordinator server 0. Where
the victim has no part in such a moment the first other rank that comes to it kills it. It happens
once: RUN_DIR.struck says when, and keeps a job that continues with that run from doing so again.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psdist.protocol.control import Done, Register
from psdist.protocol.events import Offered
from psdist.protocol.header import Kind
from psdist.protocol.ids import COORDINATOR

AT: Final = 12
"""The iteration in which it happens, where an iteration has such a moment."""
PHASES: Final = (
    *("registering", "pushing", "parked", "folding", "applying", "checkpointing"),
    *("collective", "saving", "shutting down"),
)
VICTIMS: Final = {
    "worker": ("worker", 2),
    "chief": ("worker", 0),
    "server": ("server", 2),
    "standby": ("server", 1),
    "coordinator": ("server", COORDINATOR),
}
NEVER: Final = {("parked", "async"), ("folding", "ssp"), ("folding", "async")}
"""Moments that a mode does not have."""
VARIABLE: Final = "STRIKE"


def mark_of(run_dir: Path) -> Path:
    """The file that says that it has happened."""
    return run_dir.with_name(run_dir.name + ".struck")


@dataclass(frozen=True)
class Strike:
    phase: str
    victim: str
    run_dir: Path

    @staticmethod
    def of_environment() -> Strike | None:
        """Return None if no rank is to be killed, or one has been."""
        run_dir = Path(os.environ["PSDIST_RUN_DIR"])
        if VARIABLE not in os.environ or mark_of(run_dir).exists():
            return None
        phase, _, victim = os.environ[VARIABLE].rpartition(" ")
        return Strike(phase, victim, run_dir)

    @property
    def role(self) -> str:
        return VICTIMS[self.victim][0]

    @property
    def number(self) -> int:
        return VICTIMS[self.victim][1]

    @property
    def leading_worker(self) -> int:
        """Return the worker that comes first to such a moment."""
        return self.number if self.role == "worker" else VICTIMS["worker"][1]

    @property
    def has_fallen(self) -> bool:
        return mark_of(self.run_dir).exists()

    def is_on(self, role: str, number: int) -> bool:
        return (self.role, self.number) == (role, number)

    def is_seen_by(self, server: int) -> bool:
        """Whether this server comes to the moment: the victim, or any where that is a worker."""
        return self.role == "worker" or self.number == server

    def fall(self) -> None:
        """Kill the victim, unless it was."""
        try:
            mark = os.open(mark_of(self.run_dir), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        ranks = json.loads((self.run_dir / "ranks.json").read_text("utf-8"))
        pid = [each["pid"] for each in ranks if each["role"] == self.role][self.number]
        told = {"phase": self.phase, "victim": self.victim, "at": time.time()}
        with os.fdopen(mark, "w") as file:
            file.write(json.dumps(told))
        os.kill(pid, signal.SIGKILL)


def install(strike: Strike) -> None:
    """Let this rank come to its moment; before psdist makes anything."""
    {
        "registering": _in_registering,
        "pushing": _in_pushing,
        "folding": _in_folding,
        "applying": _in_applying,
        "checkpointing": _in_checkpointing,
        "saving": _in_saving,
        "shutting down": _in_shutting_down,
    }.get(strike.phase, _in_the_script)(strike)


def _in_the_script(_strike: Strike) -> None:
    """Moments of a worker's script are in tests/support/programs/deaths/struck_script.py."""


def _in_registering(strike: Strike) -> None:
    from psdist.servers.protocol.state import ServerCore
    from psdist.workers.loop import WorkerLoop

    send, register, seen = WorkerLoop._send_control, ServerCore._on_register, Counter[str]()

    def sending(loop: WorkerLoop, action: Any) -> None:
        if isinstance(action.message, Register) and strike.is_on("worker", loop.core.seat.worker):
            seen["told"] += 1
            if seen["told"] == 2:
                strike.fall()
        send(loop, action)

    def registering(core: ServerCore, peer: int, message: Any) -> Any:
        if strike.is_on("server", core._server):
            strike.fall()
        return register(core, peer, message)

    _replace(WorkerLoop, "_send_control", sending)
    _replace(ServerCore, "_on_register", registering)


def _in_pushing(strike: Strike) -> None:
    from psdist.servers.set_loop import SetLoop
    from psdist.workers.loop import WorkerLoop

    send, decide, seen = WorkerLoop._send_push, SetLoop.decide, Counter[str]()

    def pushing(loop: WorkerLoop, action: Any) -> None:
        send(loop, action)
        if action.header.clock == AT and strike.is_on("worker", loop.core.seat.worker):
            seen["sent"] += 1
            if seen["sent"] == 2:
                strike.fall()

    def deciding(loop: SetLoop, event: Any) -> Any:
        is_push = isinstance(event, Offered) and event.kind == Kind.PUSH and event.clock == AT
        if is_push and strike.is_on("server", loop._options.server):
            seen["offered"] += 1
            if seen["offered"] == 2:
                strike.fall()
        return decide(loop, event)

    _replace(WorkerLoop, "_send_push", pushing)
    _replace(SetLoop, "decide", deciding)


def _in_folding(strike: Strike) -> None:
    from psdist.servers.set_loop import SetLoop

    fold, seen = SetLoop._fold, Counter[str]()

    def folding(loop: SetLoop, action: Any) -> None:
        fold(loop, action)
        if action.clock == AT and strike.is_seen_by(loop._options.server):
            seen["folded"] += 1
            if seen["folded"] == 2:
                strike.fall()

    _replace(SetLoop, "_fold", folding)


def _in_applying(strike: Strike) -> None:
    from psdist.servers.set_loop import SetLoop

    step = SetLoop._step

    def stepping(loop: SetLoop, action: Any) -> None:
        groups = [each.group for each in action.contributions if each.clock == AT]
        is_its = strike.role == "server" or strike.number in groups
        if groups and is_its and strike.is_seen_by(loop._options.server):
            strike.fall()
        step(loop, action)

    _replace(SetLoop, "_step", stepping)


def _in_checkpointing(strike: Strike) -> None:
    from psdist.ranks.checkpointing import files, worker_files
    from psdist.servers.protocol.checkpoints import CompleteCheckpoint

    name = f"{strike.role}-{strike.number}.safetensors"

    def is_second() -> bool:
        return (strike.run_dir / "checkpoints" / "latest").exists()

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def writing(path: Path, *given: Any) -> Any:
            if path.name == name and is_second() and strike.victim != "coordinator":
                path.write_bytes(b"\0" * 100)
                strike.fall()
            return write(path, *given)

        return writing

    do = files.CheckpointFiles.do

    def doing(checkpoints: files.CheckpointFiles, action: Any) -> None:
        is_whole = isinstance(action, CompleteCheckpoint)
        if is_whole and is_second() and strike.victim == "coordinator":
            strike.fall()
        do(checkpoints, action)

    _replace(files, "write_file", dying(files.write_file))
    _replace(worker_files, "write_tensors", dying(worker_files.write_tensors))
    _replace(files.CheckpointFiles, "do", doing)


def _in_saving(strike: Strike) -> None:
    from psdist import prepared

    write = prepared.PreparedModel.write

    def writing(model: prepared.PreparedModel, path: Path) -> None:
        write(model, path)
        if not strike.has_fallen:
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            strike.fall()
            path.write_bytes(whole)

    _replace(prepared.PreparedModel, "write", writing)


def _in_shutting_down(strike: Strike) -> None:
    from psdist.ranks.reporter import Reporter
    from psdist.servers.loop import ServerLoop
    from psdist.servers.protocol.coordinator import Complete
    from psdist.workers.loop import WorkerLoop

    send, finish, report = WorkerLoop._send_control, ServerLoop._on_finish, Reporter.on_action

    def sending(loop: WorkerLoop, action: Any) -> None:
        send(loop, action)
        if isinstance(action.message, Done) and strike.is_on("worker", loop.core.seat.worker):
            strike.fall()

    def finishing(loop: ServerLoop, peer: int) -> Any:
        if strike.victim != "coordinator" and strike.is_on("server", loop.transport.me):
            strike.fall()
        return finish(loop, peer)

    def reporting(reporter: Reporter, action: Any) -> None:
        if isinstance(action, Complete) and strike.victim == "coordinator":
            strike.fall()
        report(reporter, action)

    _replace(WorkerLoop, "_send_control", sending)
    _replace(ServerLoop, "_on_finish", finishing)
    _replace(Reporter, "on_action", reporting)


def _replace(owner: Any, name: str, by: Any) -> None:
    setattr(owner, name, by)
