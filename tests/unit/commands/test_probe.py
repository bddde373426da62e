"""`psdist probe`: who exchanges with whom, what the times say, and real runs.

The runs on one host see one class of pairs; the Slurm test cluster, with shaped links, has the
others. The machine's own speed is asserted nowhere, only what the shaping guarantees.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from psdist.commands.probe import measuring, report
from psdist.commands.probe.exchange import DEPTH, FEWEST, Flow, together
from psdist.commands.probe.schedule import ALL_PAIRS, RankFacts, Step, neighbours, schedule
from psdist.topology.network import catalogue
from psdist.topology.network.catalogue import Network
from tests.support.mpirun import Completed, Mpi, run_mpi
from tests.support.slurm import network as slurm_network
from tests.support.slurm.cluster import SlurmCluster

GIGABIT = 1e9 / 8


def ranks_on(hosts: int, *, each: int = 1) -> list[RankFacts]:
    return [
        RankFacts(rank=rank, host=f"n{rank // each}", packages={0: frozenset({rank % each})})
        for rank in range(hosts * each)
    ]


def in_racks(hosts: int, size: int) -> dict[str, str]:
    return {f"n{node}": f"rack{node // size}" for node in range(hosts)}


def of_kind(steps: list[Step], kind: str) -> list[Step]:
    return [step for step in steps if step.kind == kind]


# Who exchanges with whom


@pytest.mark.parametrize(("hosts", "size"), [(2, 2), (4, 2), (7, 3), (16, 4), (16, 1)])
def test_up_to_sixteen_nodes_every_pair_is_measured_once(hosts: int, size: int) -> None:
    steps = schedule(ranks_on(hosts), in_racks(hosts, size))
    pairs = [pair for step in steps if step.kind in ("node", "rack") for pair in step.pairs]
    assert sorted(pairs) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]


def test_pairs_at_the_same_time_share_no_node_and_across_racks_no_uplink() -> None:
    for hosts, size in ((7, 3), (16, 4), (64, 8)):
        steps = schedule(ranks_on(hosts), in_racks(hosts, size))
        for step in of_kind(steps, "node"):
            nodes = [rank for pair in step.pairs for rank in pair]
            assert len(set(nodes)) == len(nodes)
        for step in of_kind(steps, "rack"):
            racks = [rank // size for pair in step.pairs for rank in pair]
            assert len(set(racks)) == len(racks)


def test_of_many_nodes_each_has_neighbours_at_doubling_distances() -> None:
    assert len(neighbours(ALL_PAIRS)) == ALL_PAIRS * (ALL_PAIRS - 1) // 2
    pairs = neighbours(64)
    apart = Counter(min(b - a, 64 - (b - a)) for a, b in pairs)
    assert apart == {1: 64, 2: 64, 4: 64, 8: 64, 16: 64, 32: 32}
    assert len(set(pairs)) == len(pairs)


def test_a_thousand_nodes_take_few_steps_and_leave_out_none() -> None:
    steps = schedule(ranks_on(1024), in_racks(1024, 32))
    assert len(steps) < 150
    seen = {rank for step in of_kind(steps, "node") for pair in step.pairs for rank in pair}
    assert seen == set(range(1024))
    loaded = [rack for step in of_kind(steps, "uplink") for rack in step.racks]
    assert sorted(loaded) == sorted({f"rack{number}" for number in range(32)})


def test_two_racks_of_one_size_load_both_uplinks_in_one_step() -> None:
    (step,) = of_kind(schedule(ranks_on(4), in_racks(4, 2)), "uplink")
    assert step.pairs == ((0, 2), (1, 3))
    assert step.racks == {"rack0", "rack1"}


def test_a_rack_is_loaded_with_nodes_of_all_other_racks_in_turn() -> None:
    steps = of_kind(schedule(ranks_on(9), in_racks(9, 3)), "uplink")
    (first,) = [step for step in steps if step.racks == {"rack0"}]
    assert first.pairs == ((0, 3), (1, 6), (2, 4))


def test_nodes_without_racks_have_neither_uplinks_nor_pairs_across() -> None:
    steps = schedule(ranks_on(4), dict.fromkeys(("n0", "n1", "n2", "n3"), ""))
    assert {step.kind for step in steps} == {"node"}


def test_ranks_that_may_use_both_sockets_are_bound_to_one_and_to_different_ones() -> None:
    both = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    ranks = [RankFacts(rank=rank, host="n0", packages=both) for rank in range(2)]
    core, socket = schedule(ranks, {"n0": ""})
    assert (core.kind, core.packages) == ("core", {0: 0, 1: 0})
    assert (socket.kind, socket.packages) == ("socket", {0: 0, 1: 1})
    assert socket.cpus == {0: {0, 1}, 1: {2, 3}}


def test_ranks_bound_to_one_socket_measure_nothing_across_sockets() -> None:
    steps = schedule(ranks_on(1, each=4), {"n0": ""})
    assert [(step.kind, len(step.pairs)) for step in steps] == [("core", 1)]


def test_two_ranks_do_not_share_one_cpu_where_others_need_not() -> None:
    cpus = [{0}, {0}, {1}]
    ranks = [
        RankFacts(rank=rank, host="n0", packages={0: frozenset(own)})
        for rank, own in enumerate(cpus)
    ]
    (step,) = schedule(ranks, {"n0": ""})
    assert step.pairs == ((0, 2),)


# What the times say


def flow(times: list[float]) -> Flow:
    return Flow(num_bytes=1000, done_s=tuple(times))


def test_the_first_and_last_blocks_of_a_flow_do_not_count() -> None:
    middle = [1.0 + 0.1 * number for number in range(FEWEST - 2 * DEPTH)]
    head = [0.9 + 0.001 * number for number in range(DEPTH)]
    tail = [middle[-1] + 5 + 0.001 * number for number in range(DEPTH)]
    assert flow(head + middle + tail).bytes_per_s == pytest.approx(10_000)


def test_one_pause_does_not_move_the_median() -> None:
    times = [0.1 * number for number in range(60)]
    paused = [at + (30.0 if number > 30 else 0.0) for number, at in enumerate(times)]
    assert flow(paused).bytes_per_s == pytest.approx(10_000)


def test_flows_that_take_a_link_in_turns_add_up_to_the_link() -> None:
    # The link carries 10 blocks a second: for twelve seconds the one has 9 of them, then the other.
    first = [n / 9 for n in range(1, 109)] + [12.0 + n for n in range(1, 13)]
    second = [float(n) for n in range(1, 13)] + [12 + n / 9 for n in range(1, 109)]
    assert together([flow(first), flow(second)]) == pytest.approx(10_000, rel=0.01)
    assert flow(first).bytes_per_s + flow(second).bytes_per_s == pytest.approx(18_000)


def test_flows_that_were_not_under_way_together_say_nothing() -> None:
    early = [0.01 * number for number in range(40)]
    assert together([flow(early), flow([at + 100 for at in early])]) == 0.0
    assert together([]) == 0.0


def measured(uplink_share: float) -> Network:
    """Four nodes in two racks: pairs at 1000 bytes/s, uplinks at that share of two of them."""
    hosts = ["n0", "n1", "n2", "n3"]
    steps = schedule(ranks_on(4), in_racks(4, 2))
    results = []
    for number, step in enumerate(steps):
        for first, second in step.pairs:
            every_s = 1.0 / (uplink_share if step.kind == "uplink" else 1.0)
            results.append(
                report.Result(
                    step=number,
                    first=first,
                    second=second,
                    latency_s=1e-6,
                    bytes_per_s=1000.0 if step.kind == "node" else 400.0,
                    flow=flow([every_s * at for at in range(1, 60)]),
                )
            )
    return report.catalogue(
        results, steps, hosts=hosts, racks=in_racks(4, 2), gpus=[], library="Open MPI v5.0.11"
    )


def test_an_uplink_is_the_sum_of_what_all_nodes_of_the_rack_send() -> None:
    found = measured(uplink_share=0.25)
    assert {link.bytes_per_s for link in found.node_links.values()} == {1000.0}
    assert found.switch_uplinks["rack0"].bytes_per_s == pytest.approx(500)
    assert not found.switch_uplinks["rack0"].is_lower_bound
    assert found.classes["rack"].bytes_per_s == 400.0


def test_an_uplink_that_the_nodes_could_not_fill_is_flagged_as_a_lower_bound() -> None:
    found = measured(uplink_share=0.95)
    assert found.switch_uplinks["rack1"].bytes_per_s == pytest.approx(1900)
    assert found.switch_uplinks["rack1"].is_lower_bound


def test_what_is_measured_can_be_written_and_read() -> None:
    found = measured(uplink_share=0.5)
    assert catalogue.decode(catalogue.encode(found), where="network.json") == found
    assert found.mpi == "Open MPI v5.0.11"


# Real runs


def run_probe(
    ranks: int, path: Path, *args: str, mpi: Mpi = "openmpi", timeout_s: float = 90
) -> Completed:
    words = ["-m", "psdist", "probe", "--quick", "--json", str(path), *args]
    return run_mpi(ranks, words, mpi=mpi, timeout_s=timeout_s)


@pytest.mark.mpi
@pytest.mark.parametrize(("mpi", "ranks"), [("openmpi", 4), ("mpich", 2)])
def test_the_ranks_of_a_host_are_measured_and_compared_with_the_run_before(
    tmp_path: Path, mpi: Mpi, ranks: int
) -> None:
    path = tmp_path / "network.json"
    first = run_probe(ranks, path, mpi=mpi)
    assert first.returncode == 0, first.text
    assert "compared" not in first.stdout
    assert "psdist probe: 1 node, " in first.stdout
    assert "\x1b" not in first.stdout  # though mpirun gives the ranks a terminal
    found = catalogue.read(path)
    assert len(found.hosts) == 1
    assert "core" in found.classes
    assert set(found.classes) <= {"core", "socket", "gpu"}
    assert all(pair.latency_s > 0 and pair.bytes_per_s > 0 for pair in found.pairs)
    assert {"psdist", "python", "mpi4py"} <= set(found.versions)
    second = run_probe(ranks, path, mpi=mpi)
    assert second.returncode == 0, second.text
    assert f"compared with {path} of {found.date}:" in second.stdout
    assert catalogue.read(path).date >= found.date
    assert [entry.name for entry in tmp_path.iterdir()] == ["network.json"]


def error_lines(done: Completed) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("psdist: ")]


@pytest.mark.mpi
def test_a_file_that_is_no_catalogue_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"mine": 1}')
    done = run_probe(2, path)
    assert done.returncode != 0, done.text
    (line,) = error_lines(done)
    assert str(path) in line
    assert path.read_text() == '{"mine": 1}'


@pytest.mark.mpi
def test_racks_that_do_not_have_these_hosts_are_one_line(tmp_path: Path) -> None:
    racks = tmp_path / "topology.conf"
    racks.write_text("SwitchName=rack1 Nodes=no-such-host-[1-4]\n")
    done = run_probe(2, tmp_path / "network.json", "--racks", str(racks))
    assert done.returncode != 0, done.text
    (line,) = error_lines(done)
    assert "topology.conf" in line
    assert not (tmp_path / "network.json").exists()


@pytest.mark.mpi
def test_one_rank_alone_is_told_how_to_start_several(tmp_path: Path) -> None:
    done = run_probe(1, tmp_path / "network.json")
    assert done.returncode != 0, done.text
    (line,) = error_lines(done)
    assert "mpirun -n 4 psdist probe" in line
    assert "srun -N 4" in line


SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7711)) as to:
    to.sendall(bytes(int(sys.argv[2])))
    to.shutdown(socket.SHUT_WR)
    to.recv(1)
"""
RECEIVE = """
import socket
with socket.create_server(("", 7711)) as server:
    print("ready", flush=True)
    with server.accept()[0] as origin:
        while origin.recv(1 << 20):
            pass
"""


def in_host(host: str, program: str, *args: str) -> list[str]:
    inside = f"--net=/run/netns/{slurm_network.namespace(host)}"
    return ["nsenter", inside, sys.executable, "-c", program, *args]


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_cluster")
def test_uplinks_count_what_crosses_them_and_nothing_that_stays_in_the_rack() -> None:
    num_bytes = 32 << 20
    for sender, target, crosses in (("h3", "h1", True), ("h4", "h3", False)):
        with subprocess.Popen(in_host(target, RECEIVE), stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            before = slurm_network.counted_bytes()
            words = in_host(sender, SEND, slurm_network.address(target), str(num_bytes))
            subprocess.run(words, check=True, timeout=30)
            after = slurm_network.counted_bytes()
        sent, received = (
            {name: after[name][way] - before[name][way] for name in after} for way in (0, 1)
        )
        assert sent[sender] == pytest.approx(num_bytes, rel=0.03)
        assert received[target] == pytest.approx(num_bytes, rel=0.03)
        # Slurm's own words and TCP's acknowledgements are some thousand bytes.
        expected = num_bytes if crosses else 0
        assert sent["rack2"] == pytest.approx(expected, rel=0.03, abs=num_bytes * 0.03)
        assert received["rack1"] == pytest.approx(expected, rel=0.03, abs=num_bytes * 0.03)


def probed(slurm_cluster: SlurmCluster) -> Network:
    """Links of 1 Gbit/s, uplinks of half of that."""
    path = slurm_cluster.directory("probe") / "network.json"
    words = ["--mpi=pmix", "-N", "4", "--ntasks-per-node=2", "psdist", "probe"]
    with slurm_cluster.shaped("1gbit", uplink="500mbit"):
        done = slurm_cluster.srun([*words, "--json", str(path)], timeout_s=120)
    assert done.returncode == 0, done.text
    return catalogue.read(path)


@pytest.mark.slurm
def test_on_a_cluster_every_kind_of_link_is_measured(slurm_cluster: SlurmCluster) -> None:
    found = probed(slurm_cluster)
    assert found.hosts == ("h1", "h2", "h3", "h4")
    kinds = Counter(pair.kind for pair in found.pairs)
    assert (kinds["core"], kinds["node"], kinds["rack"]) == (4, 2, 4)
    assert set(found.switch_uplinks) == {"rack1", "rack2"}
    assert len(found.node_links) == 4
    rates = [*found.node_links.values(), *found.switch_uplinks.values()]
    assert all(0 < link.bytes_per_s < 10 * GIGABIT for link in rates)
    assert not any(link.is_lower_bound for link in found.switch_uplinks.values())


@pytest.mark.slow
@pytest.mark.slurm
def test_on_shaped_links_the_shape_is_found(slurm_cluster: SlurmCluster) -> None:
    """By hand, on a quiet machine: where four hosts share busy CPUs, less is seen, or a burst."""
    found = probed(slurm_cluster)
    links = [link.bytes_per_s for link in found.node_links.values()]
    uplinks = [link.bytes_per_s for link in found.switch_uplinks.values()]
    assert all(0.4 * GIGABIT < rate < 1.15 * GIGABIT for rate in links), links
    assert all(0.4 * GIGABIT / 2 < rate < 1.15 * GIGABIT / 2 for rate in uplinks), uplinks
    assert max(uplinks) < min(links), (links, uplinks)


# GPUs


def test_without_a_driver_there_is_no_gpu_and_torch_is_not_loaded() -> None:
    program = (
        "import sys; from psdist.commands.probe import measuring as m; "
        "m._DRIVERS = ('/no/such/device',); "
        "print(m.visible_gpus(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "{} False\n"


def test_copies_to_a_gpu_and_back_have_a_speed() -> None:
    devices = measuring.visible_gpus()
    if not devices:
        pytest.skip("torch sees no GPU here")
    for number in devices.values():
        for speed in measuring.measure_gpu(number, num_bytes=16 << 20):
            # Faster than a network card of 1 Gbit/s, slower than any memory.
            assert GIGABIT < speed.bytes_per_s < 1e13
            assert 0 < speed.latency_s < 1e-2
