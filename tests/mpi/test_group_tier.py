"""Groups in shared memory on real ranks: the same bits as by torch, also with another job on the
host."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, Completed, Mpi, run_mpi

pytestmark = pytest.mark.mpi

PROGRAMS = REPOSITORY / "tests" / "support" / "programs"


def run(
    program: str, path: Path, *, ranks: int = 4, mpi: Mpi = "openmpi", **settings: str
) -> Completed:
    env = {f"PSDIST_{key.upper()}": value for key, value in settings.items() if key != "killed"}
    env |= {"PSDIST_RUN_DIR": str(path), "PSDIST_PROGRESS": "off", "PSDIST_CHUNK_BYTES": "4096"}
    env["KILLED"] = settings.get("killed", "")
    words = ["-m", "psdist", "run", "--servers", "1", str(PROGRAMS / program)]
    return run_mpi(ranks, words, timeout_s=120, mpi=mpi, env=env)


def digest(done: Completed) -> str:
    assert done.returncode == 0, done.text
    (found,) = set(re.findall(r"parameters ([0-9a-f]{64})", done.stdout))
    return str(found)


def said_of_the_group(path: Path) -> set[str]:
    logs = [file.read_text(encoding="utf-8") for file in (path / "logs").iterdir()]
    return {found for log in logs for found in re.findall(r"the group\'s 3 workers (.*)", log)}


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_every_tier_gives_the_same_bits_and_the_log_says_which(mpi: Mpi, tmp_path: Path) -> None:
    shared = digest(run("group_of_three.py", tmp_path / "auto", mpi=mpi))
    over_torch = digest(run("group_of_three.py", tmp_path / "torch", mpi=mpi, group_tier="torch"))
    over_mpi = digest(run("group_of_three.py", tmp_path / "mpi", mpi=mpi, group_tier="mpi"))
    assert shared == over_torch == over_mpi
    assert said_of_the_group(tmp_path / "auto") == {"reduce in shared memory"}
    assert said_of_the_group(tmp_path / "torch") == {"reduce over gloo: hosts.group_tier = torch"}
    assert said_of_the_group(tmp_path / "mpi") == {"reduce over MPI"}


@pytest.mark.slow
def test_nccl_is_refused_for_models_on_the_cpu_in_one_line(tmp_path: Path) -> None:
    done = run("group_of_three.py", tmp_path / "run", group_tier="nccl")
    assert done.returncode == 2, done.text
    (line,) = {each for each in done.stderr.splitlines() if "group_tier" in each}
    assert "hosts.group_tier = nccl: the model is on the CPU, whose memory NCCL does not" in line


@pytest.mark.slow
def test_of_two_jobs_on_a_host_one_ends_by_a_kill_and_the_other_well(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(2) as both:
        killed = both.submit(run, "deaths/killed.py", tmp_path / "killed", killed="2")
        well = both.submit(run, "group_of_three.py", tmp_path / "well")
    assert killed.result().returncode != 0, killed.result().text
    assert "completed" not in killed.result().stdout, killed.result().text
    digest(well.result())
    for path in ("killed", "well"):
        assert said_of_the_group(tmp_path / path) == {"reduce in shared memory"}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "psdist" in name]
