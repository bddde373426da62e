"""The two-rank round trip again and again: it never hangs and leaves no process behind.

tests/support/mpirun.py fails a run that does not end, and one whose processes outlive the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, Mpi, run_mpi

TIMEOUT_S = 120
TRANSPORT = ("-m", "tests.support.programs.messages.round_trip")
JOB = (
    "-m",
    "psdist",
    "run",
    str(REPOSITORY / "tests" / "support" / "programs" / "round_trip_job.py"),
)

# Under a launcher that is not ours progress is lines.
PHASES = (
    r"psdist: 2 ranks are connected after \d+\.\d s; importing torch",
    r"psdist: the servers are ready after \d+\.\d s",
)

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("program", "mpi", "times"),
    [
        pytest.param(TRANSPORT, "openmpi", 3, id="transport-openmpi", marks=pytest.mark.slow),
        pytest.param(TRANSPORT, "mpich", 2, id="transport-mpich"),
        pytest.param(JOB, "openmpi", 1, id="job-openmpi"),
        pytest.param(JOB, "mpich", 1, id="job-mpich", marks=pytest.mark.slow),
    ],
)
def test_round_trips_of_two_ranks_end_and_leave_nothing(
    program: Sequence[str], mpi: Mpi, times: int, tmp_path: Path
) -> None:
    repeat(program, mpi, times, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
@pytest.mark.parametrize("program", [TRANSPORT, JOB], ids=["transport", "job"])
def test_a_hundred_round_trips_of_two_ranks_end_and_leave_nothing(
    program: Sequence[str], mpi: Mpi, tmp_path: Path
) -> None:
    repeat(program, mpi, 100, tmp_path)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_receiver_takes_payloads_in_any_order(mpi: Mpi, tmp_path: Path) -> None:
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_PROGRESS": "off"}
    program = ("-m", "tests.support.programs.messages.payloads")
    done = run_mpi(2, program, timeout_s=TIMEOUT_S, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    assert "every payload was the right one" in done.stdout, done.text
    assert "worker 0 announced 9 bytes and sent 8" in done.stdout, done.text
    # Libraries differ in their error for a message that is longer than the memory for it.
    assert re.search(r"^MPI failed while .*trunca", done.stdout, re.M | re.I), done.text


def repeat(program: Sequence[str], mpi: Mpi, times: int, folder: Path) -> None:
    for run in range(times):
        env = {"PSDIST_RUN_DIR": str(folder / str(run))}
        done = run_mpi(2, program, timeout_s=TIMEOUT_S, mpi=mpi, env=env)
        assert done.returncode == 0, done.text
        said = [line for line in done.stderr.splitlines() if not line.startswith("psdist: sync |")]
        assert len(said) == (len(PHASES) if program == JOB else 0), done.text
        for line, phase in zip(said, PHASES, strict=False):
            assert re.fullmatch(phase, line), done.text


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_trial_of_a_devices_memory_sends_that_of_the_cpu(mpi: Mpi) -> None:
    words = ["-m", "psdist.install.trials", "device-messages", "cpu"]
    done = run_mpi(2, words, timeout_s=TIMEOUT_S, mpi=mpi)
    assert done.returncode == 0, done.text
    (facts,) = re.findall(r"psdist-probe: (\{.*\})", done.stdout)
    assert '"world_size": 2, "unchanged": true' in facts
