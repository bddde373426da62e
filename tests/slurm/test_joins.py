"""Spares on a host of their own take the places of ranks that are killed on other hosts: the
chief's state comes to them in the run directory, which all hosts share."""

from __future__ import annotations

import json
import re

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.mpirun import REPOSITORY
from tests.support.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "joins.py"


@pytest.mark.parametrize(
    ("servers", "dies", "places", "spares"),
    [
        pytest.param(1, "1 loading 8,3 pushing 20", [1, 3], [0, 1], id="workers"),
        pytest.param(2, "0 loading 8,2 kills-1 30", [0], [0], id="chief-and-server"),
        pytest.param(2, "1 kills-0 8,3 loading 30", [3], [1], id="registrar-and-worker"),
    ],
)
def test_a_spare_of_another_host_takes_the_place(
    servers: int, dies: str, places: list[int], spares: list[int], slurm_cluster: SlurmCluster
) -> None:
    folder = slurm_cluster.directory("joins")
    script, run_dir = folder / "job.sbatch", folder / "run"
    replication = "buddy" if servers > 1 else "none"
    script.write_text(
        "#!/bin/sh\n"
        'export PATH="$VENV/bin:$PATH"\n'
        "mpirun -n 8 --bind-to none --with-ft ulfm python -m psdist run --group rank --record "
        f"--servers {servers} --spares 2 --set failures.replication={replication} {PROGRAM}\n"
    )
    done = slurm_cluster.sbatch(
        script,
        sbatch_args=["--nodes=4", "--ntasks-per-node=2"],
        timeout_s=300,
        env={
            "DIES": dies,
            "MAY_JOIN": str(len(places)),
            "PYTHONPATH": str(REPOSITORY),
            "PSDIST_RUN_DIR": str(run_dir),
            "PSDIST_MAX_DEATHS": "4",
            "PSDIST_CHUNK_BYTES": "4096",
            "PSDIST_PROGRESS": "off",
        },
    )
    assert done.returncode == 0, done.text
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit"], len(summary["deaths"])) == ("completed", 2)
    assert [each["place"] for each in summary["joined"]] == places
    first = 8 - 2 - servers
    assert [each["worker"] - first for each in summary["joined"]] == spares
    ranks = json.loads((run_dir / "ranks.json").read_text())
    assert {each["host"] for each in ranks if each["role"] == "spare"} == {"h4"}
    assert all(re.search(r"on h4\)$", each["who"]) for each in summary["joined"])
    report = check_run(run_dir, read_histories(run_dir))
    assert report.proved, (report.violations, report.notes)
