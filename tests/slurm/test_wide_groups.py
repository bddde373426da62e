"""Groups of several hosts on the test cluster: what links carry, what trains, how a job ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.test_placement import CHUNK, ELEMENTS, EXCHANGES, RACKS, plan_of
from tests.support.mpirun import REPOSITORY, Completed
from tests.support.slurm import network
from tests.support.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

DIGITS = str(REPOSITORY / "psdist" / "examples" / "digits.py")
KILLED = str(REPOSITORY / "tests" / "support" / "programs" / "killed.py")


def on_slurm(
    cluster: SlurmCluster,
    run_dir: Path,
    *words: str,
    per_host: int = 2,
    launcher: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Completed:
    return cluster.srun(
        ["--mpi=pmix", "--nodelist", "h[1-4]", f"--ntasks-per-node={per_host}", *launcher,
         "psdist", "run", "--run-dir", str(run_dir), *words],
        timeout_s=180,
        env=env,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("group", "per_host"),
    [("rack", 3), pytest.param("rack", 2, marks=pytest.mark.slow)],
)
def test_all_links_carry_what_the_plan_says_within_3_percent(
    slurm_cluster: SlurmCluster, group: str, per_host: int
) -> None:
    folder = slurm_cluster.directory(f"wide-{group}")
    racks = folder / "racks.toml"
    racks.write_text(RACKS)
    counted: list[dict[str, tuple[int, int]]] = []
    for iterations in (5, 45):
        before = network.counted_bytes()
        done = on_slurm(
            slurm_cluster, folder / str(iterations),
            *("--group", group, "--servers", "4", "--set", f"racks={racks}"),
            *("--set", f"chunk_bytes={CHUNK}", EXCHANGES, str(iterations), str(ELEMENTS)),
            per_host=per_host,
        )  # fmt: skip
        assert done.returncode == 0, done.text
        after = network.counted_bytes()
        counted.append(
            {
                name: (sent - before[name][0], received - before[name][1])
                for name, (sent, received) in after.items()
            }
        )
    plan = plan_of(folder / "45")
    assert len({each.group for each in plan.ranks if each.role == "worker"}) == 2
    for link in plan.links:
        each = (link.num_bytes + link.group_bytes) * (4 * ELEMENTS) / plan.model_bytes
        assert (link.group_bytes > 0) is (link.kind == "node")
        for one, many in zip(counted[0][link.name], counted[1][link.name], strict=True):
            assert many - one == pytest.approx(40 * each, rel=0.03), (link, counted)
