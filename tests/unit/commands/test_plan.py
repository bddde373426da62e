"""`psdist plan`: what it prints and writes is right, and a user's mistake is one clear line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.plan import LAUNCHERS, PlanOptions, run
from psdist.errors import PlacementError

# Two packages, each with a NUMA node of 1 GB and four cores.
NODE = """<?xml version="1.0"?>
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0xff" complete_cpuset="0xff">
{packages}
 </object>
</topology>
"""
PACKAGE = """  <object type="Package" os_index="{number}" cpuset="{cpus:#x}"
    complete_cpuset="{cpus:#x}">
   <object type="NUMANode" os_index="{number}" cpuset="{cpus:#x}" local_memory="1000000000"/>
{cores}
  </object>"""
CORE = """   <object type="Core" os_index="{number}" cpuset="{cpus:#x}" complete_cpuset="{cpus:#x}">
    <object type="PU" os_index="{number}" cpuset="{cpus:#x}" complete_cpuset="{cpus:#x}"/>
   </object>"""
RACKS = """
[[switch]]
name = "rack1"
nodes = "n[1-3]"
link = "10Gbit"
uplink = "20Gbit"
parent = "spine"
[[switch]]
name = "rack2"
nodes = "n[4-5]"
parent = "spine"
[[switch]]
name = "spine"
"""


def xml(*, packages: int = 2) -> str:
    return NODE.format(
        packages="\n".join(
            PACKAGE.format(
                number=package,
                cpus=0xF << 4 * package,
                cores="\n".join(
                    CORE.format(number=cpu, cpus=1 << cpu)
                    for cpu in range(4 * package, 4 * package + 4)
                ),
            )
            for package in range(packages)
        )
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with node.xml, small.xml, racks.toml and train.py, and nothing of Slurm's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("PBS_NODEFILE", raising=False)
    (tmp_path / "node.xml").write_text(xml())
    (tmp_path / "small.xml").write_text(xml(packages=1))
    (tmp_path / "racks.toml").write_text(RACKS)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def options(**changes: Any) -> PlanOptions:
    usual = {"machines": ["node.xml"], "nodes": "n[1-2]", "model_bytes": "100M"}
    return PlanOptions(**(usual | changes))


def command(words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "psdist", "plan", *shlex.split(words)],
        capture_output=not more,
        text=True,
        check=False,
        timeout=60,
        **more,
    )


def recounted(plan: dict[str, Any], hosts: set[str]) -> float:
    """The bytes each way over the link above these hosts, counted from the ranks alone."""
    homes = {each["group"]: each["host"] for each in plan["ranks"] if each["role"] == "worker"}
    inside = sum(host in hosts for host in homes.values())
    share = sum(
        plan["weights"][each["index"]]
        for each in plan["ranks"]
        if each["role"] == "server" and each["host"] in hosts
    )
    return float((share * (len(homes) - inside) + (1 - share) * inside) * plan["model_bytes"])


@pytest.mark.parametrize("group", ["node", "socket", "numa", "rank"])
@pytest.mark.parametrize(
    ("placement", "servers"), [("auto", "3"), ("auto", "auto"), ("block", "4")]
)
def test_the_printed_loads_are_those_of_the_ranks(
    here: Path, group: str, placement: str, servers: str
) -> None:
    asked = options(
        nodes="n[1-5]",
        racks=Path("racks.toml"),
        workers_per_node=3,
        workers=["n5=6"],
        servers=servers,
        group=group,
        placement=placement,
        launcher="json",
    )
    assert run(asked) == 0
    plan = json.loads((here / "plan" / "plan.json").read_text())
    below = {"rack1": {"n1", "n2", "n3"}, "rack2": {"n4", "n5"}}
    for link in plan["links"]:
        assert link["num_bytes"] == pytest.approx(
            recounted(plan, below.get(link["name"], {link["name"]}))
        ), link["name"]
    seconds = [link["num_bytes"] / link["bytes_per_s"] for link in plan["links"]]
    assert plan["cost_s"] == pytest.approx(max(seconds))
    assert plan["bound_s"] <= plan["cost_s"] * (1 + 1e-6)
    taken = Counter((each["host"], cpu) for each in plan["ranks"] for cpu in each["cpus"])
    assert max(taken.values()) == 1
    assert sum(plan["weights"]) == pytest.approx(1)


def test_a_host_file_gives_hosts_and_a_worker_for_each_slot(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hosts").write_text("n3 slots=3\nn1 slots=1\n")
    asked = options(nodes=None, hostfile=Path("hosts"), servers="1", launcher="hostfile")
    assert run(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    ranks = json.loads((here / "plan" / "plan.json").read_text())["ranks"]
    workers = [each["host"] for each in ranks if each["role"] == "worker"]
    assert workers == ["n3", "n3", "n3", "n1"]
    serving = next(each["host"] for each in ranks if each["role"] == "server")
    counts = Counter(each["host"] for each in ranks)
    assert (here / "plan" / "hostfile").read_text() == (
        f"n3 slots={counts['n3']}\nn1 slots={counts['n1']}\n"
    )
    slots = {"n3": 3, "n1": 1}
    assert (
        f"{serving}: more ranks than slots in hosts ({serving}: {counts[serving]} of "
        f"{slots[serving]}), servers come in addition to workers"
    ) in text


def test_workers_that_are_told_come_before_slots(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hosts").write_text("n1 slots=4\nn2 slots=4\n")
    asked = options(nodes=None, hostfile=Path("hosts"), launcher="json")
    for changes, expected in (
        ({"workers_per_node": 2}, {"n1": 2, "n2": 2}),
        ({"workers": ["n2=1"]}, {"n1": 4, "n2": 1}),
        ({"server_nodes": "n2"}, {"n1": 4}),
    ):
        assert run(replace(asked, **changes)) == 0
        ranks = json.loads((here / "plan" / "plan.json").read_text())["ranks"]
        assert Counter(each["host"] for each in ranks if each["role"] == "worker") == expected
    capsys.readouterr()
    assert run(replace(asked, workers_per_node=1)) == 0
    assert "more ranks than slots" not in capsys.readouterr().out


def test_a_pbs_job_says_its_hosts_itself(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "nodes").write_text("n7\nn7\nn8\n")
    monkeypatch.setenv("PBS_NODEFILE", "nodes")
    assert run(options(nodes=None, launcher="json")) == 0
    ranks = json.loads((here / "plan" / "plan.json").read_text())["ranks"]
    assert Counter(each["host"] for each in ranks if each["role"] == "worker") == {"n7": 2, "n8": 1}
    for changes in ({"nodes": "n1"}, {"nodes": None, "racks": Path("racks.toml")}):
        assert run(options(launcher="json", **changes)) == 0
        ranks = json.loads((here / "plan" / "plan.json").read_text())["ranks"]
        assert "n7" not in {each["host"] for each in ranks}, changes


def test_two_sources_of_hosts_are_refused(here: Path) -> None:
    (here / "hosts").write_text("n1\n")
    with pytest.raises(PlacementError, match="--hostfile and --nodes both name the hosts"):
        run(options(hostfile=Path("hosts")))


def test_hosts_that_flux_leaves_out_are_a_note(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hosts").write_text("STATE NNODES NODELIST\nfree 2 n[1-2]\ndown 1 n3\n")
    assert run(options(nodes=None, hostfile=Path("hosts"))) == 0
    text = capsys.readouterr().out
    assert "hosts: without n3, which are down or drained" in text
    assert "2 workers" in text
    assert "more ranks than slots" not in text  # it tells of none


def test_as_many_ranks_as_slots_need_no_note(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hosts").write_text("n1 slots=2\n")
    asked = options(nodes=None, hostfile=Path("hosts"), servers="1", workers_per_node=1)
    assert run(asked) == 0
    assert "more ranks than slots" not in capsys.readouterr().out
    assert run(replace(asked, workers_per_node=2)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "n1: more ranks than slots in hosts (n1: 3 of 2)" in text


def test_every_launcher_gets_the_host_of_every_rank(here: Path) -> None:
    for launcher in LAUNCHERS:
        run(options(nodes="n[1-3]", workers_per_node=2, launcher=launcher, out=Path(launcher)))
    ranks = json.loads((here / "json" / "plan.json").read_text())["ranks"]
    hosts = [each["host"] for each in ranks]
    assert (here / "slurm" / "slurm.hosts").read_text().split() == hosts
    assert (here / "flux" / "flux.hosts").read_text().split() == hosts
    assert (here / "pbs" / "pbs.nodes").read_text().split() == hosts
    for name in ("mpich/mpich.hosts", "intel/intel.machines"):
        lines = [line.split(":") for line in (here / name).read_text().split()]
        assert [host for host, count in lines for _ in range(int(count))] == hosts, name
    for name in ("openmpi4", "openmpi5"):
        for each, line in zip(
            ranks, (here / name / "openmpi.rankfile").read_text().splitlines(), strict=True
        ):
            first, last = each["cores"][0], each["cores"][-1]
            cores = f"{first}-{last}" if last > first else str(first)
            assert line == f"rank {each['rank']}={each['host']} slot={cores}"


@pytest.mark.usefixtures("here")
def test_what_does_not_go_into_memory_is_refused_and_not_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = options(servers="2", model_bytes="800M")
    run(asked)
    summary = capsys.readouterr().out
    assert "cyclic" in summary
    assert "block" not in summary
    with pytest.raises(PlacementError, match="placement block: n1 would hold 100 % of the model"):
        run(options(servers="2", model_bytes="800M", placement="block"))
    with pytest.raises(PlacementError, match=r"servers = 1 there is memory for 0\.533 GB of the"):
        run(options(servers="1", model_bytes="800M"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": "n[1-4"}, "--nodes: host list: '[1-4'"),
        ({"nodes": " "}, "--nodes: no host in it"),
        ({"nodes": "n1,n1"}, "--nodes: n1 is named twice"),
        ({"machines": ["=node.xml"]}, "--machine '=node.xml': must be HOSTS=FILE"),
        ({"machines": ["n1="]}, "--machine 'n1=': must be HOSTS=FILE"),
        ({"machines": ["n1=node.xml"]}, "--machine: none for n2; add"),
        ({"machines": ["n3=node.xml"]}, "n3 not among the nodes of the job (n[1-2])"),
        ({"machines": ["node.xml", "small.xml"]}, "--machine 'small.xml': 'node.xml' is for all"),
        ({"machines": ["n[1-2]=node.xml", "n1=small.xml"]}, "n1 has 'node.xml' already"),
        ({"workers": ["3"]}, "--workers '3': must be HOSTS=N"),
        ({"workers": ["n1=x"]}, "--workers n1=x: must be a whole number"),
        ({"workers": ["n1=2", "n1=3"]}, "--workers 'n1=3': n1 has '2' already"),
        ({"server_nodes": ""}, "--server-nodes: no host in it"),
        ({"server_nodes": "n1", "workers": ["n1=2"]}, "--server-nodes: n1 has 2 workers by"),
        ({"servers": "\u0663"}, "--servers '\u0663': must be a whole number"),
        ({"servers": "15"}, "15 servers asked for, but there is room for 14 on 2 nodes"),
        ({"model_bytes": "0.5"}, "--model-bytes '0.5': not a size"),
        (
            {"model_bytes": "64KiB", "servers": "4"},
            "--servers 4: 3 of them would hold nothing, since 65.5 KB are cut into 1 chunk; ask "
            "for 1, or cut it finer, --chunk-bytes 16384 (in the run: transfer.chunk_bytes)",
        ),
        (
            {"model_bytes": "10M", "servers": "14", "placement": "block"},
            "--servers 14: 4 of them would hold nothing, since 10.0 MB are cut into 10 chunks of "
            "1,048,576 bytes; ask for 10",
        ),
        ({"model_bytes": "6K", "servers": "2"}, "since 6.00 KB are cut into 1 chunk; ask for 1"),
        ({"chunk_bytes": "1KiB"}, "--chunk-bytes '1KiB': must be a size from 4KiB to 256MiB"),
        ({"chunk_bytes": "4 bytes"}, "--chunk-bytes '4 bytes': must be a size from 4KiB"),
        ({"link": "25"}, "--link: '25' is 25 bytes per second, too slow for a network"),
        ({"launcher": "lsf"}, "--emit 'lsf': must be one of slurm"),
        ({"out": Path("there")}, "--out 'there': no files are written without --emit"),
        ({"script": "x.py"}, "--script 'x.py': no files are written without --emit"),
        ({"launcher": "slurm", "script": ""}, "script '' is empty"),
        ({"svg": Path("none/plan.svg")}, "none/plan.svg: cannot be written (No such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_printed_or_written(
    here: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    before = sorted(here.iterdir())
    with pytest.raises(PlacementError) as caught:
        run(options(**changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    assert sorted(here.iterdir()) == before


def planned(here: Path, **changes: Any) -> dict[str, Any]:
    assert run(options(launcher="json", **changes)) == 0
    plan: dict[str, Any] = json.loads((here / "plan" / "plan.json").read_text())
    return plan


def test_no_server_is_planned_that_would_hold_nothing(here: Path) -> None:
    usual = planned(here, model_bytes="1G")
    assert len(usual["weights"]) == 2
    small = planned(here, model_bytes="64KiB")
    assert small["weights"] == [1.0]
    assert any("no more servers, which would hold nothing" in note for note in small["notes"])
    finer = planned(here, model_bytes="64KiB", chunk_bytes="16KiB")
    assert len(finer["weights"]) == 2


@pytest.mark.usefixtures("here")
def test_what_would_help_names_no_server_that_would_hold_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(options(model_bytes="100M", servers="2", explain=True))
    assert "one more server" in capsys.readouterr().out
    run(options(model_bytes="1MiB", servers="2", chunk_bytes="512KiB", explain=True))
    assert "one more server" not in capsys.readouterr().out


def test_a_machine_file_may_have_an_equals_sign_in_its_name(here: Path) -> None:
    (here / "a=b.xml").write_text(xml())
    assert run(options(machines=["n[1-2]=a=b.xml"])) == 0


@pytest.mark.usefixtures("here")
def test_all_but_commands_and_names_fits_a_hundred_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for launcher in LAUNCHERS:
        run(options(nodes="n[1-9]", launcher=launcher, script="gone.py", explain=True))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[:-1])) <= 100
        assert "note: the script is not there yet; --script names another" in lines


@pytest.mark.usefixtures("here")
def test_a_reader_that_leaves_and_a_full_disk_leave_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = "--machine node.xml --nodes n[1-2] --model-bytes 100M"
    try:
        done = command(words, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = command(words, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith("psdist: error: standard output: cannot be written (No space")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("here")
def test_planning_imports_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from psdist.commands.plan import PlanOptions, run;"
        "run(PlanOptions(machines=['node.xml'], nodes='n[1-2]', launcher='slurm', explain=True));"
        "sys.exit(repr({'torch', 'mpi4py', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "set()\n"


@pytest.mark.usefixtures("here")
def test_where_the_terminal_has_only_ascii_the_tree_is_drawn_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command("--machine node.xml --nodes n[1-2] --model-bytes 100M")
    assert done.returncode == 0, done.stderr
    assert "|- n1  2 packages, 8 cores" in done.stdout


@pytest.mark.parametrize("columns", ["60", "80", "120", "200"])
def test_text_is_as_wide_as_the_terminal(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    run(options(racks=here / "racks.toml", explain=True, matrix=True, nodes="n[1-5]"))
    widest = max(map(len, capsys.readouterr().out.splitlines()))
    assert int(columns) - 12 <= widest <= int(columns)


@pytest.mark.parametrize("columns", ["", "0", "many", "-5"])
def test_a_width_that_is_none_is_a_pipes(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    run(options(racks=here / "racks.toml", nodes="n[1-5]"))
    assert 88 <= max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_the_matrix_is_printed_on_request(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(options())
    assert "ranks that compute" not in capsys.readouterr().out
    run(options(matrix=True))
    assert "n1; alike: n2\nno GPU and no network card is known here" in capsys.readouterr().out
    assert here
