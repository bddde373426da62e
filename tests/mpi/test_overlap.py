"""Gradients that leave during backward on real ranks: by a thread, or by the hooks themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.mpirun import REPOSITORY, Mpi, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = str(REPOSITORY / "tests" / "support" / "programs" / "overlap_script.py")
WORKERS = 2
LATE = 5
"""Steps that return early: all but those that are watched."""


@pytest.mark.parametrize(
    ("mpi", "polling", "group", "tier", "device"),
    [
        pytest.param("openmpi", "", "rank", "auto", "late", marks=pytest.mark.slow),
        ("openmpi", "", "node", "auto", "cpu"),
        pytest.param("openmpi", "", "rank", "auto", "cpu", marks=pytest.mark.slow),
        pytest.param("openmpi", "1", "rank", "auto", "cpu", marks=pytest.mark.slow),
        pytest.param("mpich", "", "rank", "auto", "cpu", marks=pytest.mark.slow),
        pytest.param("openmpi", "1", "node", "auto", "cpu", marks=pytest.mark.slow),
        pytest.param("openmpi", "", "node", "torch", "cpu", marks=pytest.mark.slow),
        pytest.param("openmpi", "", "node", "mpi", "cpu", marks=pytest.mark.slow),
        pytest.param("openmpi", "1", "node", "mpi", "cpu", marks=pytest.mark.slow),
        pytest.param("mpich", "", "node", "mpi", "cpu", marks=pytest.mark.slow),
        pytest.param("mpich", "", "node", "auto", "cpu", marks=pytest.mark.slow),
    ],
)
def test_chunks_leave_during_backward_and_the_bits_are_those_without(
    mpi: Mpi, polling: str, group: str, tier: str, device: str, tmp_path: Path
) -> None:
    overlap_on_ranks(tmp_path, mpi=mpi, polling=polling, group=group, tier=tier, device=device)


def overlap_on_ranks(
    tmp_path: Path, *, mpi: Mpi, polling: str, group: str, tier: str, device: str
) -> None:
    env = {
        "DEVICE": device,
        "PYTHONPATH": str(REPOSITORY),
        "PSDIST_RUN_DIR": str(tmp_path / "run"),
        "PSDIST_PROGRESS": "off",
        "PSDIST_CHUNK_BYTES": "4096",
        "PSDIST_GROUP": group,
        "PSDIST_GROUP_TIER": tier,
        "PSDIST_RECORD": "true",
        "PSDIST_CHECKSUM_EVERY": "1",
        "POLLING": polling,
    }
    words = ["-m", "psdist", "run", "--servers", "1", PROGRAM]
    done = run_mpi(1 + WORKERS, words, timeout_s=120, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    assert len(set(re.findall(r"parameters ([0-9a-f]{64})", done.stdout))) == 1, done.text
    assert re.findall(r"has a thread: (\w+)", done.stdout) == [str(not polling)] * WORKERS
    off, auto, full = json.loads((tmp_path / "run" / "summary.json").read_text())["sets"]
    assert off["early_pushes"] == 0
    assert auto["early_pushes"] > (WORKERS if group == "rank" else 1) * auto["chunks"]
    assert full["early_pushes"] > 0
    late = str(LATE if (group, device) == ("rank", "cpu") else 0)
    assert re.findall(r"late steps: (\w+)", done.stdout) == [late] * WORKERS
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, report
