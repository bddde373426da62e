"""`psdist bench pushpull` on real ranks: every size is measured, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_bench_measures_sizes_of_many_and_of_few_chunks_in_turn(mpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "pushpull.json"
    done = run_mpi(
        3,
        ("-m", "psdist", "bench", "pushpull", "--sizes", "1MiB,4KiB,256KiB,4KiB",
         "--repeats", "2", "--servers", "1", "--json", str(file),
         "--plot", str(tmp_path / "pushpull.svg")),
        timeout_s=120,
        mpi=mpi,
        env={"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_CHUNK_BYTES": "64KiB"},
    )  # fmt: skip
    assert done.returncode == 0, done.text
    assert "push + pull" in (tmp_path / "pushpull.svg").read_text(encoding="utf-8")
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["chunks"] for row in rows] == [16, 1, 4, 1]
    for row in rows:
        assert len(row["all_push_pull_s"]) == 2
        assert all(seconds > 0 for seconds in row["all_push_pull_s"])
