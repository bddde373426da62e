"""Shared by tests of users' mistakes: the script that makes them, and a job's messages.

done = run_mpi(3, [..., str(SCRIPT), "raises_on_one_worker"], timeout_s=TIMEOUT_S, env=QUIET)
assert the_line(done) == "psdist: error: ..."
"""

from __future__ import annotations

import re

from tests.support.mpirun import REPOSITORY, Completed

TIMEOUT_S = 120
# Aborts of MPICH and Open MPI, Slurm's, and what Open MPI's libevent says at some ends of ranks.
LAUNCHERS_LINE = re.compile(
    r"Abort\(\d+\) on node |\[[^]]+:\d+\] |srun: |slurmstepd(-\S+)?: |\[warn\] Epoll "
)
SCRIPT = REPOSITORY / "tests" / "support" / "programs" / "bad_script.py"
QUIET = {"PSDIST_PROGRESS": "off", "PSDIST_SPIN": "off"}


def said(done: Completed) -> list[str]:
    """The lines of standard error that are ours: not those that launchers print at an abort."""
    lines: list[str] = []
    is_theirs = False
    for line in done.stderr.replace("\0", "").splitlines():
        if re.fullmatch(r"[-=]{60,}", line.strip()):
            is_theirs = not is_theirs  # Open MPI draws lines around its advice, MPICH above it
        elif is_theirs or not line.strip():
            continue
        elif not LAUNCHERS_LINE.match(line):
            lines.append(line)
    return lines


def the_line(done: Completed, *, status: int = 2) -> str:
    """The message is one line, and the job has failed."""
    assert done.returncode == status, done.text
    lines = said(done)
    assert len(lines) == 1, done.text
    return lines[0]
