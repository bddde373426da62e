"""How the Slurm test cluster's racks and uplinks are written; what is run needs root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY
from tests.support.slurm.hosts import EVEN, Cluster
from tests.support.slurm.network import RACKS, ClusterError, racks_of, uplinks_of


def test_racks_are_numbers_of_hosts() -> None:
    assert racks_of(EVEN) == RACKS
    assert racks_of("3+1") == {"rack1": ("h1", "h2", "h3"), "rack2": ("h4",)}
    assert racks_of("1+3") == {"rack1": ("h1",), "rack2": ("h2", "h3", "h4")}


@pytest.mark.parametrize("sizes", ["", "4", "4+0", "2+1", "2+3", "2+1+1", "a+b", "-1+5", "3+1+"])
def test_racks_that_cannot_be_are_refused(sizes: str) -> None:
    with pytest.raises(ClusterError, match=r"^racks of "):
        racks_of(sizes)


def test_one_uplink_is_that_of_all_racks() -> None:
    assert uplinks_of(None) == [None, None]
    assert uplinks_of("1gbit") == ["1gbit", "1gbit"]
    assert uplinks_of(("500mbit", None)) == ["500mbit", None]
    with pytest.raises(ClusterError, match="3 uplinks for 2 racks"):
        uplinks_of(("1gbit", "1gbit", "1gbit"))


def test_a_cluster_that_says_nothing_of_its_racks_has_even_ones(tmp_path: Path) -> None:
    cluster = Cluster(directory=tmp_path)
    assert cluster.racks() == EVEN
    assert not cluster.is_kept()
    (tmp_path / "cluster.json").write_text('{"keep": true}')
    assert cluster.racks() == EVEN
    assert cluster.is_kept()
    (tmp_path / "cluster.json").write_text('{"keep": false, "racks": "3+1"}')
    assert cluster.racks() == "3+1"
    assert not cluster.is_kept()


def test_the_benchmark_of_uneven_racks_runs_what_the_mapper_plans() -> None:
    """It asserts that the fastest way is the plan's; the others are slower by what it prints."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.placing.uneven_racks",
            "--predict",
            "--servers",
            "3",
            "4",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "3 servers: 1+0+0+2 (83,0,0,17 %)           117 ms of 4MiB" in done.stdout
    assert "4 servers: 1+1+0+2 (44,44,0,13 %)           67 ms of 4MiB" in done.stdout
