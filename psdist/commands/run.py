"""`psdist run`: be a rank of the job that a launcher started, or start mpirun and be its parent.

run(RunRequest(ranks=6, command_line={"--mode": "ssp"}, program=Program(name="train.py")))
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from psdist.commands.program import Program
from psdist.config.settings import RunConfig
from psdist.config.sources import CommandLineValue, Resolved, resolve
from psdist.errors import LaunchError, UserError
from psdist.install import Launcher, detect
from psdist.install.distributions import rivals
from psdist.install.mpi import (
    check_room,
    find_mpirun,
    is_single_host,
    launch_environment,
    loaded_library,
    mpirun_command,
    python_flags,
)
from psdist.report import PARENT_VARIABLE


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The words of `psdist run`. `command_line` has the settings by their names or options.

    At most one of `ranks` and `workers` is given.
    """

    program: Program
    ranks: int | None = None
    workers: int | None = None
    config_file: Path | None = None
    profile: str | None = None
    command_line: Mapping[str, CommandLineValue] = field(default_factory=dict)


def run(request: RunRequest) -> int:
    """Run the program as this request says, and return the exit status.

    Under a launcher every mistake goes to psdist.commands.run_rank, where all ranks agree on it and
    one prints it. Where it starts mpirun it stays until that has ended; before it does, it raises
    UserError.
    """
    launcher = detect(os.environ)
    outcome = _outcome(request)
    num_ranks = request.ranks
    if request.workers is not None and not launcher.is_present:
        if isinstance(outcome, UserError):
            raise outcome
        num_ranks = num_ranks_for(request.workers, outcome.config, os.environ)
    if num_ranks is not None and not _has_that_many(launcher, num_ranks):
        if launcher.is_present:
            outcome = LaunchError(
                f"-n {num_ranks} does not fit: {_started_by(launcher)} {launcher.size} ranks "
                "already; leave -n out, or start psdist run -n without a launcher around it"
            )
        elif isinstance(outcome, UserError):
            raise outcome
        else:
            script = request.program.name
            return start_mpirun(
                num_ranks, run_arguments(request), script=script, config=outcome.config
            )

    from psdist.commands.run_rank import run_program

    return run_program(outcome, request.program, num_workers=request.workers)


def start_mpirun(
    num_ranks: int, arguments: Sequence[str], *, script: str, config: RunConfig
) -> int:
    """Run ``mpirun -n num_ranks python -m psdist run ARGUMENTS``; return the job's exit status.

    ``script`` is for the display. Raises LaunchError if there is no mpirun that belongs to the MPI
    library in use, or if it cannot be started.
    """
    from psdist.commands.launch import make_parent

    environment = launch_environment(os.environ)
    name = Path(script).name
    with make_parent(
        num_ranks=num_ranks, script=name, config=config
    ) as parent:  # from now on a terminal shows progress
        mpirun = find_mpirun(loaded_library(environment), environment)
        survives_deaths = config.max_deaths > 0 or config.replication != "none"
        command = mpirun_command(mpirun, num_ranks, environment, survives_deaths=survives_deaths)
        check_room(mpirun, command, num_ranks, environment)
        command += [sys.executable, *python_flags(), "-m", "psdist", "run", *arguments]
        # Asked by SIGTERM, Open MPI's mpirun ends its ranks, those that are stopped among them,
        # and clears up. MPICH's would wait for stopped ones; killed, its helpers end them.
        death_signal = signal.SIGTERM if mpirun.family == "openmpi" else signal.SIGKILL
        return parent.run(command, environment, death_signal=death_signal)


def run_arguments(request: RunRequest) -> list[str]:
    """The words after ``psdist run`` that give the same request, except the number of ranks."""
    words: list[str] = [] if request.workers is None else [f"--workers={request.workers}"]
    if request.config_file is not None:
        words.append(f"--config={request.config_file}")
    if request.profile is not None:
        words.append(f"--profile={request.profile}")
    for key, value in request.command_line.items():
        if value is None:
            continue
        if key.startswith("--"):
            words.append(key if value is True else f"{key}={value}")
        else:
            words.append(f"--set={key}={_as_text(value)}")
    return [*words, *request.program.words]


def _outcome(request: RunRequest) -> Resolved | UserError:
    """The configuration, or why the program cannot be run."""
    try:
        _require_own_files()
        resolved = resolve(
            command_line=request.command_line,
            environment=os.environ,
            file=request.config_file,
            profile=request.profile,
        )
    except UserError as error:
        return error
    return request.program.problem() or resolved


def _require_own_files() -> None:
    """Warn, once in a job, of other distributions that provide psdist.

    Raises LaunchError if their files and psdist-mpi's lie in one folder."""
    is_first = not detect(os.environ).rank and PARENT_VARIABLE not in os.environ
    for rival in rivals(sys.path, package=Path(__file__).absolute().parents[1]):
        text = f"{rival.problem}: {rival.remedy}"
        if rival.is_error:
            raise LaunchError(text)
        if is_first:
            print(f"psdist: warning: {text}", file=sys.stderr)


def _has_that_many(launcher: Launcher, num_ranks: int) -> bool:
    if not launcher.is_present:
        return num_ranks == 1
    # A launcher that does not say how many it started is believed.
    return launcher.size is None or launcher.size == num_ranks


def _started_by(launcher: Launcher) -> str:
    return "srun started" if launcher.name == "slurm" else "mpirun started"


def _as_text(value: CommandLineValue) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


_STRATEGIES: Final = ("auto", "block", "cyclic")  # all else is the path of a plan
SERVERS_ON_ONE_HOST: Final = 1
"""Choice of the mapper for ``servers = auto``: at most one server per host."""


def num_ranks_for(num_workers: int, config: RunConfig, environment: Mapping[str, str]) -> int:
    """Return the number of ranks of ``--workers N``: N workers, the servers and the spares.

    Reads the plan that ``placement`` names. Raises LaunchError if the number is not known before
    the ranks are placed.
    """
    if config.placement not in _STRATEGIES:
        return _num_ranks_of_plan(num_workers, config.placement)
    if config.servers != "auto":
        return num_workers + config.servers + config.spares
    if not is_single_host(environment):
        raise LaunchError(
            f"--workers {num_workers} with servers = auto on several hosts: how many serve is "
            "decided once the ranks are placed; add --servers N, or give the number of all ranks "
            "with -n"
        )
    return num_workers + SERVERS_ON_ONE_HOST + config.spares


def _num_ranks_of_plan(num_workers: int, placement: str) -> int:
    from psdist.topology.plan import MAX_BYTES, decode
    from psdist.topology.text import file_bytes

    data, where = file_bytes(Path(placement), max_bytes=MAX_BYTES)
    plan = decode(data, where=where)
    if len(plan.worker_ranks) != num_workers:
        raise LaunchError(
            f"--workers {num_workers}, but the plan {where} has {len(plan.worker_ranks)}; leave "
            "--workers out (-n starts the planned number of ranks), or make a new plan"
        )
    return len(plan.ranks)
