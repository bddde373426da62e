"""A job that only waits, under a real parent and a real mpirun, without torch: it starts fast.

    python -m tests.support.programs.idle_job parent 2      # like psdist run -n 2
    mpirun -n 2 ... idle_job rank                           # what the parent starts

Rank 0 is the coordinator, the others are workers. Each prints ``rank R is up as PID`` and waits for
its end, which only its parent, its launcher or a signal brings.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from psdist.commands.launch import make_parent
from psdist.config.settings import RunConfig
from psdist.install import detect
from psdist.install.mpi import find_mpirun, launch_environment, loaded_library, mpirun_command
from psdist.ranks.agreement import start_mpi
from psdist.ranks.failure import end_all, format_error
from psdist.ranks.parent_link import connect_to_parent


def be_parent(num_ranks: int) -> int:
    environment = launch_environment(os.environ)
    mpirun = find_mpirun(loaded_library(environment), environment)
    command = mpirun_command(mpirun, num_ranks, environment)
    command += [sys.executable, "-m", "tests.support.programs.idle_job", "rank"]
    death_signal = signal.SIGTERM if mpirun.family == "openmpi" else signal.SIGKILL
    with make_parent(
        num_ranks=num_ranks, script="idle_job.py", config=RunConfig(progress="off")
    ) as parent:
        return parent.run(command, environment, death_signal=death_signal)


def be_rank() -> None:
    rank = detect(os.environ).rank
    assert rank is not None
    link = connect_to_parent(os.environ, rank=rank)
    assert link is not None
    comm = start_mpi()
    link.take_role(f"rank {rank}", "worker" if rank else "registrar")
    comm.Barrier()
    try:
        print(f"rank {rank} is up as {os.getpid()}", flush=True)
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt as error:
        text, status = format_error(error)
        link.failed(status)
        end_all(comm, f"rank {rank}", text, status)


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        sys.exit(be_parent(int(sys.argv[2])))
    be_rank()
