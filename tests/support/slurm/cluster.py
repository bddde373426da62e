"""The Slurm test cluster as a fixture: `srun` and `sbatch` that a test waits for.

Owns: bringing the cluster up for a test session and down after the last one that uses it, the
environment of a job, and the proof that a job left nothing running. How the cluster is built is
tests/support/slurm/hosts.py's.

    def test_every_host_answers(slurm_cluster: SlurmCluster) -> None:
        done = slurm_cluster.srun(["-N", "4", "hostname"], timeout_s=60)
        assert sorted(done.stdout.split()) == ["h1", "h2", "h3", "h4"], done.text
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.mpirun import (
    LINGER_S,
    REPOSITORY,
    Completed,
    LeftoverProcessError,
    Mpi,
    ProgramTimeoutError,
    command_line,
    end_processes,
    environment_prefix,
    program_environment,
    require,
    run_anywhere,
    skip_or_fail,
    wait_until_gone,
)
from tests.support.slurm import network
from tests.support.slurm.hosts import Cluster, state_directory, why_unavailable

POLL_S = 0.2
UP_TIMEOUT_S = 120.0
REQUIRED_BY = "PSDIST_REQUIRE_SLURM"


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    """Four hosts, h1 to h4, of four cores each, in two racks, with everything but /tmp shared."""

    cluster: Cluster = field(default_factory=lambda: Cluster(directory=state_directory()))

    def srun(
        self,
        args: Sequence[str],
        *,
        timeout_s: float,
        mpi: Mpi = "openmpi",
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> Completed:
        """Run `srun *args`; `python` and `psdist` are those of the environment with that MPI."""
        job = f"test-{uuid.uuid4().hex}"
        try:
            return run_anywhere(
                ["srun", f"--job-name={job}", *args],
                timeout_s=timeout_s,
                env=self._environment(mpi, env),
                cwd=cwd,
            )
        finally:
            self._slurm("scancel", f"--name={job}")

    def sbatch(
        self,
        script: Path,
        *,
        timeout_s: float,
        script_args: Sequence[str] = (),
        sbatch_args: Sequence[str] = (),
        mpi: Mpi = "openmpi",
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> Completed:
        """Submit a job script and wait for its end: its exit status, and its output as stdout.

        The script finds its environment in VENV. `timeout_s` includes the time in the queue.
        """
        output = self.directory("sbatch") / "output.txt"
        marker = uuid.uuid4().hex
        environment = program_environment(marker, self._environment(mpi, env))
        submit = ["sbatch", "--parsable", f"--output={output}", "--open-mode=append"]
        submitted = subprocess.run(
            [*submit, *sbatch_args, str(script), *script_args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            cwd=cwd,
            check=False,
        )
        if submitted.returncode != 0:
            return Completed(
                returncode=submitted.returncode, stdout=submitted.stdout, stderr=submitted.stderr
            )
        job = submitted.stdout.strip()
        try:
            returncode = self._wait_for_job(job, time.monotonic() + timeout_s)
            text = output.read_text(errors="replace") if output.exists() else ""
            done = Completed(returncode=returncode or 0, stdout=text, stderr="")
            if returncode is None:
                raise ProgramTimeoutError(
                    f"{script} had not ended after {timeout_s:g} s and was killed\n{done.text}"
                )
            if left := wait_until_gone(marker):
                named = ", ".join(f"{pid} ({command_line(pid)})" for pid in left)
                raise LeftoverProcessError(
                    f"{script} ended, but {LINGER_S:g} s later {named} still ran\n{done.text}"
                )
            return done
        finally:
            self._slurm("scancel", job)
            end_processes(marker, dump_stacks=False)

    @contextmanager
    def shaped(
        self, rate: str | None, *, uplink: str | Sequence[str | None] | None = None
    ) -> Iterator[None]:
        """With the hosts' links and the racks' uplinks limited; afterwards as they were."""
        before = network.limits()
        network.limit(rate, uplink)
        try:
            yield
        finally:
            network.limit(*before)

    def directory(self, name: str) -> Path:
        """A new directory that all hosts see (pytest's tmp_path is not one)."""
        made = self.cluster.jobs / f"{name}-{uuid.uuid4().hex[:12]}"
        made.mkdir(parents=True)
        return made

    def cancel_all(self) -> None:
        """End every job of the cluster."""
        self._slurm("scancel", "--user=root")

    def _environment(self, mpi: Mpi, extra: Mapping[str, str] | None) -> dict[str, str]:
        require(mpi)
        prefix, slurm = environment_prefix(mpi), self.cluster.environment()
        return {
            **slurm,
            "PATH": f"{prefix}/bin:{slurm['PATH']}",
            "VENV": str(prefix),
            # The hosts claim more cores than there are: a rank that waits must let others run.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # Everybody is root on the cluster, and Open MPI wants to hear that twice.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **(extra or {}),
        }

    def _wait_for_job(self, job: str, deadline: float) -> int | None:
        """The job's exit status (128 + n for signal n), or None at the deadline."""
        while time.monotonic() < deadline:
            shown = self._slurm("scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", shown)
            status = re.search(r"ExitCode=(\d+):(\d+)", shown)
            if state is None or status is None:
                raise AssertionError(f"Slurm does not know job {job}: {shown}")
            if state[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"):
                exited, signalled = int(status[1]), int(status[2])
                ended_well = state[1] == "COMPLETED"
                return exited or (128 + signalled if signalled else int(not ended_well))
            time.sleep(POLL_S)
        return None

    def _slurm(self, *argv: str) -> str:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            env=self.cluster.environment(),
            check=False,
        )
        return done.stdout


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster, up. One that a person started is used and stays up.

    Skips where root or packages are missing, or fails there under PSDIST_REQUIRE_SLURM.
    """
    if (why := why_unavailable() or _why_hidden()) is not None:
        skip_or_fail(why, variable=REQUIRED_BY)
    cluster = Cluster(directory=state_directory())
    try:
        with cluster.in_use():
            _command("up", "--for-tests")
            yield SlurmCluster(cluster=cluster)
    finally:
        _command("down", "--for-tests")


def _why_hidden() -> str | None:
    for place in (REPOSITORY, Path(sys.prefix)):
        if Path("/tmp") in place.parents:
            return f"{place} is under /tmp, which the hosts of the Slurm test cluster do not share"
    return None


def _command(*args: str) -> None:
    # A process of its own: the daemons outlive it and have no parent here.
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "cluster"), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=UP_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"tests/cluster {' '.join(args)}: {done.stderr}", pytrace=False)
