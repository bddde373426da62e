"""`psdist bench step` on real ranks: every way of exchanging gradients takes its turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_bench_step_measures_psdist_and_its_rivals_in_turns(mpi: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    done = run_mpi(
        4,
        ("-m", "psdist", "bench", "step", "--size", "64KiB", "--layers", "3",
         "--compute", "0.003", "--repeats", "2", "--servers", "2", "--json", str(file),
         "--plot", str(tmp_path / "step.svg"), "--links"),
        timeout_s=120,
        mpi=mpi,
        env={"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_CHUNK_BYTES": "16KiB"},
    )  # fmt: skip
    assert done.returncode == 0, done.text
    result = json.loads(file.read_text(encoding="utf-8"))
    assert (result["servers"], result["workers"], result["hosts"]) == (2, 2, 1)
    times = {row["way"]: row["all_s"] for row in result["rows"]}
    assert len(times) == 6
    assert all(len(all_s) == 2 and min(all_s) > 0 for all_s in times.values())
    # A step sleeps, whatever it is compared with; an exchange alone does not have to.
    assert all(min(all_s) >= 0.003 for way, all_s in times.items() if way.endswith("step"))
    # CPU time of all ranks, including servers, per repetition.
    cpu = {row["way"]: row["user_s"] + row["system_s"] for row in result["rows"]}
    assert all(seconds > 0 for seconds in cpu.values())
    assert all(
        row["workers_s"] + row["servers_s"] == pytest.approx(cpu[row["way"]])
        and row["cpu_s_per_gb"] == pytest.approx(cpu[row["way"]] / (2 * 2 * 65536) * 1e9)
        for row in result["rows"]
    )
    assert all(
        row["cores_busy"] == pytest.approx(cpu[row["way"]] / (sum(row["all_s"]) / 2))
        for row in result["rows"]
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["exit"], summary["clocks"]) == ("completed", [5, 5])
    assert "2 servers, 2 workers on 1 hosts" in done.stdout
    assert "--links: no link to show, because all ranks are on one host" in done.stdout
    assert "DDP (gloo) step" in (tmp_path / "step.svg").read_text(encoding="utf-8")
