"""A training job as a test sees it: who takes part, under which settings, and the workers' script.

The same :class:`Case` runs over MPI (``run_cases``) and over the virtual network (``virtual_job``):
its scripts get a real :class:`psdist.job.Job` from both.

    case = Case(name="two", script=train, groups=((0,), (1,)), settings={"mode": "ssp"})
    outcome = run_virtually(case, tmp_path)
    outcome.results[0]["parameters"]          # what worker 0's script returned
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from psdist.commands.check import Report, check_run
from psdist.config.settings import RunConfig
from psdist.history.writers import History, read_histories, read_history
from psdist.job import Job
from psdist.protocol.roles import Place, Roles
from tests.support.mpirun import run_mpi

Result = dict[str, Any]
"""What a script returns: tensors, numbers, strings, and lists and dicts of them."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a script has beside its job."""

    path: Path
    """The run directory."""
    sleep: Callable[[float], None]
    """Real seconds under MPI, virtual ones in the virtual network."""
    now_s: Callable[[], float]
    """The clock that those pass on."""


Script = Callable[[Job, Stage], Result]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    script: Script
    servers: int = 1
    groups: tuple[tuple[int, ...], ...] = ((0,),)
    """Worker numbers of each group."""
    hosts: tuple[int, ...] = ()
    """The number of each worker's host, over the virtual network; (): one host."""
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def num_ranks(self) -> int:
        return self.servers + self.num_workers

    @property
    def config(self) -> RunConfig:
        # One thread, because sums must not depend on how many there are; small chunks, so that
        # small models have several of them.
        defaults = {"threads": 1, "progress": "off", "chunk_bytes": 4096, "wait_timeout_s": 120.0}
        return RunConfig.model_validate({**defaults, **self.settings})

    def roles(self) -> Roles:
        """The first ranks serve; all on this host, whatever it would give by itself."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return Roles(
            places=tuple(
                Place(rank=rank, host=socket.gethostname(), pid=os.getpid(), cores=cores)
                for rank in range(self.num_ranks)
            ),
            server_ranks=tuple(range(self.servers)),
            worker_ranks=tuple(range(self.servers, self.num_ranks)),
            groups=self.groups,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case left in its run directory."""

    path: Path
    num_workers: int

    @cached_property
    def results(self) -> list[Result]:
        """What the scripts returned, by worker."""
        return [
            torch.load(result_path(self.path, worker), weights_only=True)
            for worker in range(self.num_workers)
        ]

    @cached_property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return loaded

    @cached_property
    def history(self) -> History:
        return read_history(self.path)

    def checked(self) -> Report:
        """What `psdist check` says; fails the test if the run broke a rule."""
        report = check_run(self.path, read_histories(self.path))
        assert report.proved, (self.path, report)
        return report


Outcomes = dict[str, dict[str, Outcome]]


def result_path(path: Path, worker: int) -> Path:
    return path / f"worker-{worker}.pt"


def cases_of(module: str) -> Sequence[Case]:
    cases: Sequence[Case] = import_module(f"{__package__}.{module}").CASES
    return cases


def run_over_mpi(modules: Sequence[str], folder: Path, *, timeout_s: float) -> Outcomes:
    """All cases of these modules beside this one in one mpirun; their outcomes by both names."""
    cases = {module: cases_of(module) for module in modules}
    program = ["-W", "error", "-m", f"{__package__}.run_cases", str(folder), *modules]
    most = max(case.num_ranks for each in cases.values() for case in each)
    done = run_mpi(most, program, timeout_s=timeout_s)
    assert done.returncode == 0, done.text
    return {
        module: {
            case.name: Outcome(path=folder / module / case.name, num_workers=case.num_workers)
            for case in each
        }
        for module, each in cases.items()
    }
