"""Groups of several hosts on the test cluster: what links carry, what trains, how a job ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.slurm.test_placement import CHUNK, ELEMENTS, EXCHANGES, RACKS, plan_of
from tests.support.mpirun import REPOSITORY, Completed
from tests.support.slurm import network
from tests.support.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

DIGITS = str(REPOSITORY / "psdist" / "examples" / "digits.py")
DEATHS = REPOSITORY / "tests" / "support" / "programs" / "deaths"
KILLED = str(DEATHS / "killed.py")
GOES_ON = str(DEATHS / "goes_on.py")


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


@pytest.mark.slow
@pytest.mark.parametrize(("group", "per_host"), [("rack", 3), ("rack", 2)])
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


@pytest.mark.parametrize(
    "tiers", [("auto",), pytest.param(("auto", "torch"), marks=pytest.mark.slow)]
)
def test_the_digits_example_trains_in_groups_of_a_rack_and_its_record_is_proved(
    slurm_cluster: SlurmCluster, tiers: tuple[str, ...]
) -> None:
    """Slurm tells the racks, and all are where the plan has them; the same parameters by torch's
    collectives alone on each host."""
    folder = slurm_cluster.directory("wide-digits")
    saved = []
    for tier in tiers:
        run_dir, model = folder / tier, folder / f"{tier}.safetensors"
        done = on_slurm(
            slurm_cluster, run_dir, "--group", "rack", "--servers", "4", "--record",
            *("--set", f"group_tier={tier}", DIGITS, "--epochs", "2", "--save", str(model)),
            per_host=3,
        )  # fmt: skip
        assert done.returncode == 0, done.text
        saved.append(model.read_bytes())
        report = check_run(run_dir, read_histories(run_dir))
        assert report.proved, report
    assert len(set(saved)) == 1
    ranks = json.loads((folder / "auto" / "ranks.json").read_text())
    hosts = {(each["group"], each["host"]) for each in ranks if each["role"] == "worker"}
    assert hosts == {(0, "h1"), (0, "h2"), (1, "h3"), (1, "h4")}
    plan = plan_of(folder / "auto")
    assert plan.source == "SLURM_TOPOLOGY_ADDR"
    assert [(each["rank"], each["role"], each["host"]) for each in ranks] == [
        (each.rank, each.role, each.host) for each in plan.ranks
    ]
    # Four hosts of one machine: their ranks would share its cores.
    assert all(each.cpus == () for each in plan.ranks)
    assert "rack1" in (folder / "auto" / "plan.txt").read_text()
    log = (folder / "auto" / "logs" / "rank-11.log").read_text()
    assert "the group's 4 workers on 2 hosts are joined by gloo" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ("eth9", r"GLOO_SOCKET_IFNAME=eth9: h\d has no such interface"),
        # Loopback is there, and joins nobody.
        ("lo", r"h\d at 127\.0\.0\.1 cannot be reached over lo"),
    ],
)
def test_an_interface_that_joins_no_hosts_is_one_error(
    slurm_cluster: SlurmCluster, interface: str, said: str
) -> None:
    run_dir = slurm_cluster.directory("wide-wrong") / "run"
    options = ("--group", "rack", "--servers", "4", "--placement", "cyclic")
    words = (*options, EXCHANGES, "1", str(ELEMENTS))
    done = on_slurm(slurm_cluster, run_dir, *words, env={"GLOO_SOCKET_IFNAME": interface})
    assert done.returncode != 0, done.text
    (line,) = {each for each in done.stderr.splitlines() if each.startswith("psdist: worker ")}
    assert re.search(said, line), done.text


def test_a_worker_that_is_killed_on_one_host_ends_the_job_with_a_line_that_names_it(
    slurm_cluster: SlurmCluster,
) -> None:
    """A group fails as a unit, wherever its workers are."""
    folder = slurm_cluster.directory("wide-killed")
    script = folder / "job.sbatch"
    script.write_text(
        "#!/bin/sh\n"
        'export PATH="$VENV/bin:$PATH"\n'
        "mpirun -n 8 --bind-to none --with-ft ulfm python -m psdist run --group rack --servers 4 "
        f"--placement cyclic {KILLED}\n"
    )
    done = slurm_cluster.sbatch(
        script,
        sbatch_args=["--nodes=4", "--ntasks-per-node=2"],
        timeout_s=120,
        env={
            "KILLED": "3",
            "PSDIST_RUN_DIR": str(folder / "run"),
            "PSDIST_CHUNK_BYTES": "4096",
            "PSDIST_PROGRESS": "off",
        },
    )
    assert done.returncode == 1, done.text
    assert "completed" not in done.stdout, done.text
    ranks = json.loads((folder / "run" / "ranks.json").read_text())
    hosts = [each["host"] for each in ranks if each["role"] == "worker" and each["group"] == 0]
    assert hosts == ["h1", "h2"]
    # The coordinator's, and of hosts that its abort reaches late the same words once more.
    lines = re.findall(r"^psdist: (?:server|worker) .*", done.stdout, re.MULTILINE)
    told = (
        r"error( at killed\.py line \d+)?: worker 1 \(rank 3 on h2\) has failed; .* restart the job"
    )
    assert lines, done.text
    assert all(re.fullmatch(rf".* \(rank \d on h\d\): {told}", line) for line in lines), done.text


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("tier", "dies"),
    [
        ("auto", "1 pushing 8, 0 gathering 13"),  # a host of the group has nobody left, nor a chief
        ("torch", "2 agreeing 5, 5 reducing 5, 7 parked 11, 3 collective 14"),
        ("auto", "0 reducing 4, 2 gathering 7, 3 pushing 10"),  # one is left of the group
    ],
)
def test_a_group_of_two_hosts_goes_on_without_its_dead(
    slurm_cluster: SlurmCluster, tier: str, dies: str
) -> None:
    """Of eight workers, two on each of four hosts, in a group for each rack."""
    folder = slurm_cluster.directory("wide-goes-on")
    script, run_dir = folder / "job.sbatch", folder / "run"
    script.write_text(
        "#!/bin/sh\n"
        'export PATH="$VENV/bin:$PATH"\n'
        "mpirun -n 12 --bind-to none --with-ft ulfm python -m psdist run --group rack --record "
        "--servers 4 --set failures.on_group_death=reform "
        f"--set hosts.group_tier={tier} {GOES_ON}\n"
    )
    done = slurm_cluster.sbatch(
        script,
        sbatch_args=["--nodes=4", "--ntasks-per-node=3"],
        timeout_s=300,
        env={
            "DIES": dies,
            "ITERATIONS": "20",
            "PYTHONPATH": str(REPOSITORY),
            "PSDIST_RUN_DIR": str(run_dir),
            "PSDIST_MAX_DEATHS": "4",
            "PSDIST_SAMPLES_OF_DEAD": "drop",
            "PSDIST_CHUNK_BYTES": "4096",
            "PSDIST_PROGRESS": "off",
        },
    )
    assert done.returncode == 0, done.text
    dead = sorted(int(each.split()[0]) for each in dies.split(","))
    ended = re.findall(r"^worker (\d) clock 20 has (\w+)$", done.stdout, re.MULTILINE)
    assert sorted(int(worker) for worker, _ in ended) == [w for w in range(8) if w not in dead]
    assert len({checksum for _, checksum in ended}) == 1, "in sync all end with the same parameters"
    ranks = json.loads((run_dir / "ranks.json").read_text())
    hosts = {(each["group"], each["host"]) for each in ranks if each["role"] == "worker"}
    assert hosts == {(0, "h1"), (0, "h2"), (1, "h3"), (1, "h4")}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit"], summary["clocks"]) == ("completed", [20, 20])
    assert sorted(each["worker"] for each in summary["deaths"]) == dead
    report = check_run(run_dir, read_histories(run_dir))
    assert report.proved, (report.violations, report.notes)
