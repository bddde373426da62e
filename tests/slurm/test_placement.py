"""Placement inside a job: who serves, what the links carry, plans that are followed or not met."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from psdist.topology.plan import Plan, decode, encode
from psdist.topology.text import bitmap
from tests.support.mpirun import REPOSITORY, Completed, run_mpi
from tests.support.slurm import network
from tests.support.slurm.cluster import SlurmCluster

EXCHANGES = str(REPOSITORY / "tests" / "support" / "programs" / "messages" / "exchanges.py")
CHUNK = 64 << 10
ELEMENTS = 16 * CHUNK // 4
RACKS = """
[[switch]]
name = "rack1"
nodes = "h[1-2]"
link = "1Gbit"
uplink = "500Mbit"
parent = "spine"

[[switch]]
name = "rack2"
nodes = "h[3-4]"
link = "1Gbit"
uplink = "500Mbit"
parent = "spine"

[[switch]]
name = "spine"
"""


def plan_of(run_dir: Path) -> Plan:
    path = run_dir / "plan.json"
    return decode(path.read_bytes(), where=str(path))


def on_slurm(
    cluster: SlurmCluster, run_dir: Path, *options: str, iterations: int = 2, hosts: str = "h[1-4]"
) -> Completed:
    """Two ranks on each host; sync, every rank a group, 64 KiB chunks."""
    return cluster.srun(
        ["--mpi=pmix", "--nodelist", hosts, "--ntasks-per-node=2", "psdist", "run",
         "--group", "rank", "--run-dir", str(run_dir), "--set", f"chunk_bytes={CHUNK}",
         *options, EXCHANGES, str(iterations), str(ELEMENTS)],
        timeout_s=180,
    )  # fmt: skip


def here(ranks: int, *options: str, run_dir: Path) -> Completed:
    words = ["-m", "psdist", "run", "--run-dir", str(run_dir), *options, EXCHANGES, "1", "1000"]
    return run_mpi(ranks, words, timeout_s=120)


@pytest.mark.slurm
@pytest.mark.parametrize(
    "placement",
    ["auto", *(pytest.param(each, marks=pytest.mark.slow) for each in ("cyclic", "block"))],
)
def test_the_uplinks_carry_what_the_plan_says_within_3_percent(
    slurm_cluster: SlurmCluster, placement: str
) -> None:
    folder = slurm_cluster.directory(f"uplinks-{placement}")
    racks = folder / "racks.toml"
    racks.write_text(RACKS)
    counted: list[dict[str, tuple[int, int]]] = []
    with slurm_cluster.shaped("1gbit", uplink="500mbit"):
        for iterations in (5, 45):
            before = network.counted_bytes()
            done = on_slurm(
                slurm_cluster,
                folder / str(iterations),
                *("--servers", "2", "--placement", placement, "--set", f"racks={racks}"),
                iterations=iterations,
            )
            assert done.returncode == 0, done.text
            after = network.counted_bytes()
            counted.append(
                {
                    name: (sent - before[name][0], received - before[name][1])
                    for name, (sent, received) in after.items()
                }
            )
    plan = plan_of(folder / "45")
    assert plan.placement == placement
    if placement == "auto":  # a server in each rack
        serving = {each.host for each in plan.ranks if each.role == "server"}
        assert len(serving & {"h1", "h2"}) == len(serving & {"h3", "h4"}) == 1
    # Starting up, setting up and stopping are the same in both: the difference is 40 exchanges.
    for link in plan.links:
        predicted = 40 * link.num_bytes * (4 * ELEMENTS) / plan.model_bytes
        if link.kind == "switch":
            for one, many in zip(counted[0][link.name], counted[1][link.name], strict=True):
                assert many - one == pytest.approx(predicted, rel=0.03), (link, counted)
    assert len([link for link in plan.links if link.kind == "switch"]) == 2
    summary = json.loads((folder / "45" / "summary.json").read_text())
    assert summary["predicted_exchange_s"] == pytest.approx(
        plan.cost_s * 4 * ELEMENTS / plan.model_bytes
    )


@pytest.mark.slurm
@pytest.mark.slow
def test_a_plan_for_other_hosts_is_a_warning_or_with_strict_placement_an_error(
    slurm_cluster: SlurmCluster,
) -> None:
    folder = slurm_cluster.directory("strict")
    done = on_slurm(slurm_cluster, folder / "first", "--servers", "1", hosts="h[1-2]")
    assert done.returncode == 0, done.text
    given = ("--placement", str(folder / "first" / "plan.json"))
    warned = on_slurm(slurm_cluster, folder / "second", *given, hosts="h[2-3]")
    assert warned.returncode == 0, warned.text
    line = "psdist: warning: the job is not placed as planned: rank 0 is on h2, planned on h1; "
    assert warned.stderr.count(line) == 1, warned.text
    refused = on_slurm(
        slurm_cluster, folder / "third", *given, "--strict-placement", hosts="h[2-3]"
    )
    assert refused.returncode != 0, refused.text
    assert refused.stderr.count("rank 0 is on h2, planned on h1") == 1, refused.text
    assert "psdist: error: the job is not placed as planned" in refused.stderr
    assert not (folder / "third").exists()


@pytest.mark.mpi
def test_a_rank_binds_itself_to_the_cores_of_its_plan(tmp_path: Path) -> None:
    done = here(2, run_dir=tmp_path / "run")
    assert done.returncode == 0, done.text
    planned = [each.cpus for each in plan_of(tmp_path / "run").ranks]
    assert all(planned)
    assert not set(planned[0]) & set(planned[1])
    assert "not placed as planned" not in done.stderr
    off = here(2, "--set", "hosts.affinity=cards", run_dir=tmp_path / "off")
    assert off.returncode == 0, off.text
    assert [each.cpus for each in plan_of(tmp_path / "off").ranks] == [(), ()]


@pytest.mark.mpi
def test_a_plan_decides_who_serves_and_what_each_server_holds(tmp_path: Path) -> None:
    done = here(4, "--servers", "2", run_dir=tmp_path / "first")
    assert done.returncode == 0, done.text
    made = json.loads((tmp_path / "first" / "plan.json").read_text())
    text = json.dumps(made).replace('"role": "server"', '"role": "x"')
    assert text != json.dumps(made)
    # The same job with the roles turned round: the last ranks serve.
    for old, new in zip(made["ranks"], made["ranks"][::-1], strict=True):
        old["now"] = {key: new[key] for key in ("role", "group")}
    counts = {"server": 0, "worker": 0}
    for each in made["ranks"]:
        each |= each.pop("now")
        each["index"] = counts[each["role"]]
        counts[each["role"]] += 1
    path = tmp_path / "turned.json"
    path.write_text(json.dumps(made))
    assert encode(decode(path.read_bytes(), where="turned")) != b""
    done = here(4, "--placement", str(path), run_dir=tmp_path / "second")
    assert done.returncode == 0, done.text
    ranks = json.loads((tmp_path / "second" / "ranks.json").read_text())
    assert [each["role"] for each in ranks] == ["worker", "worker", "server", "server"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        ("{}", (), "given.json"),
        ("\0", (), "given.json"),
        (None, (), "must be auto, block, cyclic or the path of a plan.json"),
        (None, ("--set", "hosts.racks=/no/such/racks"), "/no/such/racks: cannot be read"),
        (None, ("--set", "hosts.network=/no/such/network"), "/no/such/network: cannot be read"),
    ],
)
def test_a_file_that_is_no_plan_is_one_line_on_all_ranks(
    tmp_path: Path, content: str | None, options: tuple[str, ...], text: str
) -> None:
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content)
    placement = () if options else ("--placement", str(path))
    done = here(2, *placement, *options, run_dir=tmp_path / "run")
    assert done.returncode == 2, done.text
    lines = [line for line in done.stderr.splitlines() if line.startswith("psdist: error: ")]
    assert len(lines) == 1, done.text
    assert text in lines[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
def test_processors_that_are_not_there_are_a_warning_or_an_error_that_names_the_rank(
    tmp_path: Path,
) -> None:
    done = here(2, run_dir=tmp_path / "made")
    assert done.returncode == 0, done.text
    made = json.loads((tmp_path / "made" / "plan.json").read_text())
    made["ranks"][1] |= {"cores": [98, 99], "cpus": [998, 999]}
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps(made))
    warned = here(2, "--placement", str(path), run_dir=tmp_path / "warned")
    assert warned.returncode == 0, warned.text
    text = re.compile(r"the job is not placed as planned: rank 1 on \S+ has processors .* 998-999")
    assert len(text.findall(warned.stderr)) == 1, warned.text
    given = ("--placement", str(path), "--strict-placement")
    refused = here(2, *given, run_dir=tmp_path / "refused")
    assert refused.returncode == 2, refused.text
    assert len(text.findall(refused.stderr)) == 1, refused.text
    assert not (tmp_path / "refused").exists()


@pytest.mark.mpi
def test_a_plan_gives_no_rank_a_processor_that_the_launcher_gave_to_none(tmp_path: Path) -> None:
    """Without a cgroup the kernel would allow it, and it may be another job's."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two processors")
    done = here(2, run_dir=tmp_path / "made")
    assert done.returncode == 0, done.text
    planned = [each.cpus for each in plan_of(tmp_path / "made").ranks]
    os.sched_setaffinity(0, planned[0])  # the ranks inherit it
    try:
        given = ("--placement", str(tmp_path / "made" / "plan.json"))
        done = here(2, *given, run_dir=tmp_path / "narrow")
    finally:
        os.sched_setaffinity(0, mine)
    assert done.returncode == 0, done.text
    had, wanted = bitmap.format_list(planned[0]), bitmap.format_list(planned[1])
    assert f" has processors {had}, planned {wanted}" in done.stderr, done.text


@pytest.mark.mpi
def test_a_plan_for_another_number_of_ranks_or_servers_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    done = here(2, run_dir=tmp_path / "two")
    assert done.returncode == 0, done.text
    given = ("--placement", str(tmp_path / "two" / "plan.json"))
    refused = here(3, *given, run_dir=tmp_path / "three")
    assert refused.returncode == 2, refused.text
    assert re.search(r"a plan for 2 ranks, but the job has 3", refused.stderr), refused.text
    refused = here(2, *given, "--servers", "2", run_dir=tmp_path / "three")
    assert refused.returncode == 2, refused.text
    assert "servers = 2, but the plan " in refused.stderr, refused.text


def test_a_login_node_plans_without_torch_mpi_or_scipy(tmp_path: Path) -> None:
    """64 nodes, with emitting and drawing; what the command imports is what it needs."""
    program = (
        "import sys\n"
        "from psdist.commands.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    print('status', end.code, [m for m in ('torch', 'mpi4py', 'scipy', 'numpy')"
        " if m in sys.modules])\n"
    )
    racks = tmp_path / "topology.conf"
    racks.write_text(
        "".join(f"SwitchName=r{r} Nodes=n[{8 * r + 1}-{8 * r + 8}]\n" for r in range(8))
        + "SwitchName=spine Switches=r[0-7]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "--racks", str(racks), "--nodes", "n[1-64]",
         "--workers-per-node", "1", "--model-bytes", "4G", "--emit", "slurm",
         "--out", str(tmp_path / "out"), "--svg", str(tmp_path / "plan.svg"), "--explain"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "status 0 []" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "out" / "plan.json").exists()
    picture = done.stdout.split("\nwritten to ")[0]
    assert max(map(len, picture.splitlines())) <= 100
