"""`psdist status`: what the coordinator writes of how a job stands, read back and said to
people."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psdist.commands import status as command
from psdist.config.settings import RunConfig
from psdist.errors import ConfigError
from psdist.protocol.control import Enter, Progress
from psdist.protocol.ids import worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks.reporting.rank_reports import OpenCall, RankReports
from psdist.ranks.reporting.run_status import RunStatus
from psdist.ranks.reporting.status import StatusFile
from psdist.report.run_directory import RunDirectory
from psdist.report.status import read_status
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.joins import Joined
from psdist.servers.protocol.views import Death

ROLES = Roles(
    places=tuple(Place(rank=rank, host="n1", pid=rank, cores=(0,)) for rank in range(5)),
    server_ranks=(0,),
    worker_ranks=(1, 2, 3, 4),
    groups=((0,), (1, 2), (3,)),
)


class Job:
    """A job with a clock of its own, whose coordinator writes status.json."""

    def __init__(self, path: Path, roles: Roles = ROLES) -> None:
        self.now_s = 100.0
        self.path = path
        self.roles = roles
        self.status = RunStatus(RunConfig(), roles, {})
        self.file = StatusFile(RunDirectory(path), clock=lambda: self.now_s)

    def start(self, *called: int) -> None:
        self.file.write_start(self.roles, mode="sync", called=called, job=1)

    def write(
        self,
        progress: dict[int, Progress] | None = None,
        *,
        done: Collection[int] = (),
        outcome: str = "",
        **reports: Any,
    ) -> None:
        workers: dict[int, dict[str, Any]] = {worker: {} for worker in done}
        told = RankReports(
            roles=self.roles, workers=workers, servers={}, progress=progress or {}, **reports
        )
        self.file.write(self.status, told, outcome=outcome)

    def lines(self, age_s: float = 0.0) -> list[str]:
        return command.lines_of(read_status(self.path), age_s=age_s)


def test_a_job_that_hangs_at_its_start_names_who_is_missing_and_since_when(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.file.is_due
    job.start(0, 3)
    assert not job.file.is_due
    job.now_s += 34
    job.start(0, 3)
    assert job.lines(age_s=1.2) == [
        "starting, sync, 4 workers; told 1 s ago",
        "  waiting    psdist.init, for 34 s: workers 1, 2 missing; workers 0, 3 there",
    ]


def test_who_waits_in_a_collective_for_whom_and_who_stands_still(tmp_path: Path) -> None:
    job = Job(tmp_path)
    progress = {w: Progress(worker=w, clock=40 + w, samples=0) for w in range(4)}
    call = OpenCall(7, "save", [0], [1, 2])
    job.write(progress, calls=[call])
    job.now_s += 12
    job.status.update(Death(3, "worker 3 (rank 4 on n1)", generation=1, left=(), chief=0), 1.0)
    progress[0] = Progress(worker=0, clock=50, samples=0, waited_s=3.25, epoch=2, batch=9)
    job.write(progress, calls=[call], out=frozenset({3}), done=[0])
    assert job.lines() == [
        "training, sync, 4 workers; told 0 s ago",
        "  waiting    save, for 12 s: workers 1, 2 missing; worker 0 there",
        "  failed     worker 3 (rank 4 on n1)",
        "  finished   worker 0",
        "  worker 1    group 1, iteration 41; the same for 12 s; waited 0.0 s in steps",
        "  worker 2    group 1, iteration 42; the same for 12 s; waited 0.0 s in steps",
        "  worker 0    group 0, iteration 50, epoch 2 batch 9; the same for 0 s; waited 3.2 s in "
        "steps",
    ]
    job.write(progress, out=frozenset({3}), done=[0, 1, 2])
    assert job.lines(age_s=60)[:2] == [
        "ending, sync, 4 workers; told 60 s ago",
        "  old        server 0 has told nothing for 60 s: it is busy or stuck, or the job has "
        "ended",
    ]


def test_an_ended_job_says_how_and_where_each_worker_was_at_last(tmp_path: Path) -> None:
    job = Job(tmp_path)
    progress = {w: Progress(worker=w, clock=40, samples=0) for w in range(2)}
    job.write(progress)
    job.now_s += 0.3
    last = {w: Progress(worker=w, clock=60, samples=0, epoch=3, batch=w) for w in range(2)}
    job.write(last, calls=[OpenCall(7, "save", [0], [1])], outcome="E" * 9000)
    assert job.lines(age_s=3600) == [
        "ended, sync, 4 workers; told 3600 s ago",
        f"  outcome    {'E' * 1024}",
        "  waiting    save, for 0 s: worker 1 missing; worker 0 there",
        "  worker 0    group 0, iteration 60, epoch 3 batch 0; waited 0.0 s in steps",
        "  worker 1    group 1, iteration 60, epoch 3 batch 1; waited 0.0 s in steps",
    ]


def test_the_next_call_is_waited_for_from_its_own_beginning(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(calls=[OpenCall(1, "mean", [0], [1])])
    job.now_s += 50
    job.write(calls=[OpenCall(2, "mean", [1], [0])])
    assert job.lines()[1] == "  waiting    mean, for 0 s: worker 0 missing; worker 1 there"


def test_the_coordinator_knows_which_collectives_are_open() -> None:
    coordinator = assemble(num_workers=3, num_servers=1)
    assert coordinator.open_collectives() == []
    coordinator.handle(worker_id(2), Enter(worker=2, seq=1, name="save", payload=b""))
    assert coordinator.open_collectives() == [(1, "save", [2], [0, 1])]
    coordinator.handle(worker_id(0), Enter(worker=0, seq=1, name="mean", payload=b""))
    assert coordinator.open_collectives() == []  # it has failed


def test_a_file_that_is_none_of_ours_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no status.json: no job of several ranks writes"):
        command.main(tmp_path)
    Job(tmp_path).start()
    whole = json.loads((tmp_path / "status.json").read_text())
    for key, wrong in {"at": "now", "waits": [{}], "phase": "asleep", "more": 1}.items():
        (tmp_path / "status.json").write_text(json.dumps({**whole, key: wrong}))
        with pytest.raises(ConfigError, match=rf"is damaged or of another version.*: {key}"):
            command.main(tmp_path)
    (tmp_path / "status.json").write_text("[")
    with pytest.raises(ConfigError, match="another version of psdist: its JSON: Invalid JSON"):
        command.main(tmp_path)


def test_the_command_prints_and_says_when_the_job_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Job(tmp_path).start(0, 1, 2)
    assert abs(read_status(tmp_path).at - time.time()) < 60
    (tmp_path / "summary.json").write_text("{}")
    assert command.main(tmp_path) == 0
    told = capsys.readouterr().out
    assert "worker 3 missing; workers 0, 1, 2 there" in told
    assert "the job has ended" in told


def test_spares_that_wait_are_counted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    words = "which {} to take a failed rank's place"
    for count, wait in ((1, "waits"), (2, "wait")):
        job.write(num_idle_spares=count)
        assert f"  spares     {count}, {words.format(wait)}" in job.lines()
    job.write()
    assert "spares" not in " ".join(job.lines())
    job.write(num_idle_spares=1, outcome="completed")
    assert "spares" not in " ".join(job.lines()), "nothing waits any more"


def test_spares_wait_from_the_start_on(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(ROLES, spare_ranks=(4,)))
    job.start(0)
    assert read_status(tmp_path).spares == 1


def test_spares_for_workers_are_no_workers_until_they_have_joined(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(ROLES, num_substitutes=1))
    job.start(0)
    status = read_status(tmp_path)
    assert (status.spares, status.num_workers) == (1, ROLES.num_workers - 1)
    assert ROLES.num_workers - 1 not in status.waits[0].absent
    job.status.update(Joined(3, 1, (14,), ""), 0.0)
    job.write()
    place = "has taken the place of worker 1, from iteration 14 on"
    assert f"  joined     worker 3, a spare (rank 4 on n1) {place}" in job.lines()
