"""Run many jobs one after another in one mpirun: starting one costs more than most jobs.

    mpiexec -n 6 python -m tests.support.programs.training.run_cases OUT sync_cases group_cases/bf16

Runs the cases of these modules beside it, or single ones of them, each on as many of the ranks as
it needs and in OUT/<module>/<case>/. The first failure ends everything, told as a job tells it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mpi4py

from psdist.ranks.loading import uncollected

mpi4py.rc.thread_level = "multiple"
with uncollected():
    import torch
    from mpi4py import MPI  # it starts MPI

    from psdist.config.sources import Resolved
    from psdist.job import Job
    from psdist.ranks.connecting import join
    from psdist.ranks.rank import Bootstrap, Rank
    from psdist.ranks.server import serve_job
    from tests.support.programs.training.cases import Case, Stage, cases_of, result_path


def main(arguments: Sequence[str]) -> int:
    folder, *wanted = arguments
    comm = MPI.COMM_WORLD
    for module, _, name in (each.partition("/") for each in wanted):
        for case in cases_of(module):
            if name in ("", case.name):
                _run(case, comm, Path(folder) / module / case.name)
                _wait_for_all(comm)
    gc.freeze()  # the interpreter's end need not look for cycles in what the cases have imported
    return 0


def _run(case: Case, comm: MPI.Intracomm, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    takes_part = comm.rank < case.num_ranks
    job_comm = comm.Split(0 if takes_part else MPI.UNDEFINED, comm.rank)
    if not takes_part:
        return
    job_comm.Set_errhandler(MPI.ERRORS_RETURN)
    bootstrap = Bootstrap(
        resolved=Resolved(config=case.config, sources={}),
        roles=case.roles(),
        path=path,
        started_s=time.monotonic(),
    )
    rank = join(job_comm, bootstrap)
    rank.exit.run(lambda: _take_part(case, rank, path))


def _take_part(case: Case, rank: Rank, path: Path) -> int:
    if rank.role == "worker":
        return _work(case, rank, path)
    torch.set_num_threads(rank.num_threads)
    serve_job(rank)
    rank.exit.close()
    return 0


def _work(case: Case, rank: Rank, path: Path) -> int:
    job = Job(rank.session)
    result = case.script(job, Stage(path=path, sleep=time.sleep, now_s=time.monotonic))
    torch.save(result, result_path(path, job.worker))
    return job.finish()


def _wait_for_all(comm: MPI.Intracomm) -> None:
    # Not Barrier: ranks that have nothing to do would take the cores from those that have.
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
