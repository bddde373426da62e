"""`psdist bench group` on real ranks: every way is measured between the same ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist.commands.bench.group import WAYS
from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_bench_measures_every_way_of_every_size(mpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "group.json"
    words = ["-m", "psdist", "bench", "group", "--sizes", "64KiB,1MiB", "--repeats", "2"]
    done = run_mpi(
        3,
        [*words, "--json", str(file), "--plot", str(tmp_path / "group.svg")],
        timeout_s=120,
        mpi=mpi,
        env={"PSDIST_RUN_DIR": str(tmp_path / "run")},
    )
    assert done.returncode == 0, done.text
    assert "gloo all-reduce" in (tmp_path / "group.svg").read_text(encoding="utf-8")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["groups"] == [2]
    assert [row["num_bytes"] for row in result["rows"]] == [65536, 1048576]
    for row in result["rows"]:
        assert set(row["times_s"]) == set(WAYS)
        assert all(len(times) == 2 and min(times) > 0 for times in row["times_s"].values())
    assert "groups of 2 workers and 1 server" in done.stdout


def test_a_group_of_one_has_nothing_to_measure_and_says_what_to_start(tmp_path: Path) -> None:
    words = ["-m", "psdist", "bench", "group"]
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run")}
    done = run_mpi(2, words, timeout_s=60, env=env)
    assert done.returncode == 2, done.text
    assert "start it as mpirun -n 3 psdist bench group" in done.stderr
    assert done.stderr.count("psdist: error") == 1
