"""From every source of racks to the cluster of a job.

Of cluster, sources, tree, same_host and the readers: slurm, rack_table, infiniband with fabric.

Longer than other modules: all sources of racks are held against the same clusters.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from psdist.errors import PlacementError
from psdist.topology.draw import text as draw_text
from psdist.topology.machine import Device, Machine, flat_machine
from psdist.topology.network import DEFAULT_LINK_BYTES_PER_S, Cluster, infiniband, rack_table, slurm
from psdist.topology.network.catalogue import UNMEASURED, Network, Speed
from psdist.topology.network.sources import build_cluster, parse_tree, port_guids, read_tree
from psdist.topology.network.tree import Tree
from psdist.topology.plan.planning import PlanRequest, plan_ahead
from tests.support.machine_files import machine_file, real

MACHINE = flat_machine(range(4))
GB = 1e9

CONF = """\
# two racks of two, one of one
SwitchName=s0 Nodes=n[1-2] LinkSpeed=900  # the first
switchname=s1 \\
    NODES="n[3-4]"
SwitchName=s2 Nodes=n5
SwitchName=s3 Switches=s[0-1]
SwitchName=s4 Switches=s[2-3]
"""
# As Slurm 22.05.8 was seen to print it for that file: a switch's line names all nodes below it.
SHOWN = """\
SwitchName=s0 Level=0 LinkSpeed=900 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n5
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]
SwitchName=s4 Level=2 LinkSpeed=1 Nodes=n[1-5] Switches=s[2-3]
"""
BLOCKS = """\
BlockName=b1 Nodes=n[1-4]
BlockName=b2 Nodes=n[5-8]
BlockSizes=4,8
"""
SHOWN_BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=n[5-8] BlockSize=4
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-8] BlockSize=8
"""
TABLE = """\
[[switch]]
name = "spine"

[[switch]]
name = "rack1"
parent = "spine"
nodes = "n[1-4]"
link = "25Gbit"
uplink = "50Gbit"

[[switch]]
name = "rack2"
parent = "spine"
nodes = "n[5-8]"
link = 12e9
uplink = "4 GB/s"
"""


def racks(tree: Tree) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for node in tree.nodes:
        found[node.switch].append(node.name)
    return dict(found)


def parents(tree: Tree) -> dict[str, str]:
    return {switch.name: switch.parent for switch in tree.switches}


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(1, count + 1)]


def homes(cluster: Cluster) -> dict[str, list[str]]:
    """Host: the switches above it."""
    return {
        node.name: [cluster.switches[each].name for each in cluster.path(index)]
        for index, node in enumerate(cluster.nodes)
    }


def complaint(text: str) -> str:
    with pytest.raises(PlacementError) as caught:
        parse_tree(text.encode(), where="racks")
    said = str(caught.value)
    assert said.startswith("racks"), said
    assert said.isprintable(), said
    assert len(said) < 400, said
    return said


# Slurm


def test_topology_conf_has_racks_under_switches() -> None:
    tree = slurm.parse_topology_conf(CONF, where="topology.conf")
    assert racks(tree) == {"s0": ["n1", "n2"], "s1": ["n3", "n4"], "s2": ["n5"]}
    assert parents(tree) == {"s4": "", "s2": "s4", "s3": "s4", "s0": "s3", "s1": "s3"}


def test_link_speed_has_no_unit_and_is_not_used() -> None:
    tree = slurm.parse_topology_conf(CONF, where="topology.conf")
    assert {switch.bytes_per_s for switch in tree.switches} == {0.0}
    assert any("LinkSpeed has no unit" in note for note in tree.notes)


def test_scontrols_output_is_the_same_tree_as_its_file() -> None:
    from_file = slurm.parse_topology_conf(CONF, where="racks")
    shown = slurm.parse_topology_conf(SHOWN, where="racks")
    assert (shown.switches, shown.nodes) == (from_file.switches, from_file.nodes)


def test_parallel_spines_that_list_the_same_leaves_are_one_switch() -> None:
    text = """
        SwitchName=s0 Nodes=n[1-2]
        SwitchName=s1 Nodes=n[3-5]
        SwitchName=s2 Switches=s[0-1]
        SwitchName=s3 Switches=s1,s0
        SwitchName=s4 Switches=s[2-3]
        SwitchName=s5 Switches=s[2-3]
    """
    tree = slurm.parse_topology_conf(text, where="t")
    assert parents(tree) == {"s[4-5]": "", "s[2-3]": "s[4-5]", "s0": "s[2-3]", "s1": "s[2-3]"}
    assert "t:4: s[2-3] are parallel and count as one switch" in tree.notes


def test_blocks_are_racks_under_one_root() -> None:
    for text in (BLOCKS, SHOWN_BLOCKS):
        tree = slurm.parse_topology_conf(text, where="topology.conf")
        assert racks(tree) == {"b1": names(4), "b2": names(8)[4:]}
        assert parents(tree) == {"network": "", "b1": "network", "b2": "network"}


def test_several_roots_get_one_above_them_with_a_note() -> None:
    tree = slurm.parse_topology_conf(
        "SwitchName=a Nodes=n1\nSwitchName=network Nodes=n2", where="t"
    )
    assert parents(tree) == {"network+": "", "a": "network+", "network": "network+"}
    assert "2 switches have none above them (a, network)" in tree.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2",
            "racks:2: switch 'a' is already at racks:1",
        ),
        (
            "SwitchName=a Nodes=n1\n\nSwitchName=b Switches=a\nSwitchName=c Switches=a,d\n"
            "SwitchName=d Nodes=n2",
            "racks:4: switch 'a' is under 'c' here and under 'b' at racks:3",
        ),
        (
            "SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[3-4]",
            "racks:2: node 'n3' is under 'b' here and under 'a' at racks:1",
        ),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "racks:1: switch 'b' is in a circle"),
        ("SwitchName=a Switches=a", "racks:1: switch 'a' is in a circle"),
        (
            "SwitchName=r Switches=x\nSwitchName=x Nodes=n1\nSwitchName=a Switches=b\n"
            "SwitchName=b Switches=a",
            "in a circle",
        ),
        (
            "SwitchName=a Switches=b,c\nSwitchName=b Nodes=n1",
            "racks:1: switch 'c' is described nowh",
        ),
        ("SwitchName=a Nodes=n[1-999999999999]", "racks:1: host list: 'n[1-999999999999]' stands"),
        ("SwitchName=a", "racks:1: switch 'a' has neither Switches= nor Nodes="),
        ("SwitchName=a Nodes=n1 Switches=b", "racks:1: switch 'a' has both"),
        ("SwitchName=a Nodes=n1 Nodes=n2", "racks:1: 'Nodes' is given twice"),
        ("SwitchName=a Nodes=n1 Speed=2", "racks:1: unknown key 'speed'"),
        ("SwitchName=a;b Nodes=n1", "racks:1: 'a;b' is not a name of a switch"),
        (
            "SwitchName=a Nodes=n1\nInclude more.conf",
            "racks:2: 'Include more.conf' is not Key=value",
        ),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "racks:2: switches and blocks in one text"),
        ("SwitchName=a \\\nNodes=n1 \\\nNodes=n2", "racks:1: 'Nodes' is given twice"),
        ("BlockSizes=4", "no switch in it"),
        ("n1 slots=4\nn2 slots=4\n", "racks:1: 'n1 slots=4' begins a list of hosts"),
        ("n1:4\n", "racks:1: 'n1:4' begins a list of hosts"),
        ('{"version": 1}\n', "begins a list of hosts, which says nothing of racks: give it to"),
        ("", "nothing in it but comments"),
        ("# only\n", "nothing in it but comments"),
        (" " * (1 << 20) + "!", "racks:1: '!' begins no known format"),  # in linear time
        ("hello world\n", "racks:1: 'hello world' begins no known format"),
    ],
)
def test_what_is_no_tree_is_refused_with_its_line(text: str, said: str) -> None:
    assert said in complaint(text)


def test_the_addresses_that_tasks_are_told_make_a_tree() -> None:
    pattern = "switch.switch.node"
    tree = slurm.from_addresses(
        {
            "n1": ("s[1-2].rack1.n1", pattern),
            "n2": ("s[1-2].rack1.n2", pattern),
            "n3.example.org": ("s[1-2].rack2.n3.example.org", pattern),
        }
    )
    assert racks(tree) == {"rack1": ["n1", "n2"], "rack2": ["n3.example.org"]}
    assert parents(tree) == {"s[1-2]": "", "rack1": "s[1-2]", "rack2": "s[1-2]"}


def test_slurm_without_a_topology_plugin_is_one_flat_rack() -> None:
    tree = slurm.from_addresses({name: (name, "node") for name in names(3)})
    cluster = build_cluster(names(3), MACHINE, tree=tree)
    assert [switch.parent for switch in cluster.switches] == [-1]
    assert any("without a topology plugin" in note for note in cluster.notes)


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ({"n1": ("rack1.n1", "switch.switch.node")}, "does not fit its pattern"),
        ({"n1": ("n1", "")}, "does not fit its pattern"),
        ({"n1": (".n1", "switch.node")}, "does not fit its pattern"),
        ({"n1": ("a$b.n1", "switch.node")}, "'a$b' is no host name"),
        ({"n 1": ("a.n1", "switch.node")}, "that is not a host name"),
        (
            {"n1": ("a.r.n1", "switch.switch.node"), "n2": ("b.r.n2", "switch.switch.node")},
            "switch 'r' is under 'b' here and under 'a' for another host",
        ),
        (
            {"n1": ("a.b.n1", "switch.switch.node"), "n2": ("b.a.n2", "switch.switch.node")},
            "switch 'b' is under '' here and under 'a' for another host",
        ),
    ],
)
def test_addresses_that_fit_no_tree_are_refused_with_the_host(
    addresses: dict[str, tuple[str, str]], said: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        slurm.from_addresses(addresses)
    assert str(caught.value).startswith("SLURM_TOPOLOGY_ADDR of ")
    assert said in str(caught.value)


# InfiniBand


def listing(
    cards: dict[str, list[tuple[str, int, str]]], cables: list[tuple[str, str, str]]
) -> str:
    """What ibnetdiscover prints: switch: (description, port GUID, rate); switch, switch, rate."""
    guid = {name: f"{number:016x}" for number, name in enumerate(cards, start=0xA000)}
    text = ["#", "# Topology file: generated on Sat Mar 1 2025", "#"]
    for name, found in cards.items():
        text += ["", "vendid=0x2c9", f"switchguid=0x{guid[name]}({guid[name]})"]
        text.append(
            f'Switch\t65 "S-{guid[name]}"\t\t# "MF0;{name}:MQM9701/U1" enhanced port 0 lid 1'
        )
        port = 0
        for description, number, rate in found:
            port += 1
            text.append(
                f'[{port}]\t"H-{number:016x}"[1]({number:x}) \t\t# "{description}" lid 9 {rate}'
            )
        for first, second, rate in cables:
            for here, there in ((first, second), (second, first)):
                if here == name:
                    port += 1
                    text.append(
                        f'[{port}]\t"S-{guid[there]}"[7]\t\t# "MF0;{there}:X/U1" lid 2 {rate}'
                    )
    for name, found in cards.items():
        for description, number, rate in found:
            text += ["", f"caguid=0x{number:x}", f'Ca\t1 "H-{number:016x}"\t\t# "{description}"']
            text.append(
                f'[1]({number:x}) \t"S-{guid[name]}"[1]\t\t# lid 1 lmc 0 "MF0;x:X/U1" lid 2 {rate}'
            )
    return "\n".join(text) + "\n"


def two_rails() -> str:
    """Two racks of three hosts; two leaves (rails) a rack; one host of each rack lost one name."""
    cards: dict[str, list[tuple[str, int, str]]] = {}
    for rack in (0, 1):
        for rail in (0, 1):
            cards[f"leaf{rack}{rail}"] = [
                (f"n{3 * rack + node} mlx5_{rail}", 100 * rack + 10 * rail + node, "4xNDR")
                for node in (1, 2, 3)
            ]
    cards["leaf01"][0] = ("MT4129 ConnectX7   Mellanox Technologies", 11, "4xNDR")
    cards["leaf11"][2] = ("localhost mlx5_1", 113, "4xNDR")
    cards["leaf00"].append(("Mellanox Technologies Aggregation Node", 900, "4xNDR"))
    cards |= {"spine1": [("Mellanox Technologies Aggregation Node", 901, "4xNDR")], "spine2": []}
    cables = [
        (f"leaf{rack}{rail}", spine, "4xNDR")
        for rack in (0, 1)
        for rail in (0, 1)
        for spine in ("spine1", "spine2")
    ]
    return listing(cards, cables)


def rooms_of_four_rails(*sizes: int) -> str:
    """Rooms of so many hosts, named as those of the real fabric are; a leaf for each card."""
    cards: dict[str, list[tuple[str, int, str]]] = {}
    for room, size in enumerate(sizes, start=1):
        for rail in (1, 2, 3, 4):
            cards[f"leaf-{rail}-{room}"] = [
                (
                    f"a1-p1-dgx-{room:02d}-c{host} mlx5_{rail}",
                    1000 * room + 10 * host + rail,
                    "4xNDR",
                )
                for host in range(1, size + 1)
            ]
    cards["leaf-1-1"].append(("MT4129 ConnectX7   Mellanox Technologies", 1, "4xNDR"))
    cables = [(leaf, spine, "4xNDR") for leaf in cards for spine in ("spine-1", "spine-2")]
    cables += [(leaf, "spine-1", "4xNDR") for leaf in cards if leaf.endswith("-2")]
    return listing(cards | {"spine-1": [], "spine-2": []}, cables)


def test_the_rails_of_a_rack_become_one_switch_with_all_their_links() -> None:
    tree = infiniband.parse_ibnetdiscover(two_rails(), where="fabric")
    assert racks(tree) == {"leaf00+1": ["n1", "n2", "n3"], "leaf10+1": ["n4", "n5", "n6"]}
    assert parents(tree) == {"spine1+1": "", "leaf00+1": "spine1+1", "leaf10+1": "spine1+1"}
    uplinks = {switch.name: switch.bytes_per_s for switch in tree.switches if switch.parent}
    assert uplinks == {"leaf00+1": 4 * 50 * GB, "leaf10+1": 4 * 50 * GB}
    links = {node.name: node.bytes_per_s for node in tree.nodes}
    assert links == {name: (50 if name in ("n1", "n6") else 100) * GB for name in names(6)}
    assert "2 cards do not name their host" in tree.notes[0]


def test_a_card_without_a_host_name_is_found_by_its_port_guid() -> None:
    tree = infiniband.parse_ibnetdiscover(two_rails(), where="fabric", hosts={11: "n1", 113: "n6"})
    assert {node.bytes_per_s for node in tree.nodes} == {100 * GB}
    assert tree.nodes[0].port_guids == (1, 11)
    assert tree.notes == ()


def test_the_machines_name_hosts_by_the_guids_of_their_cards() -> None:
    def with_nic(guid: int) -> Machine:
        nic = Device(
            kind="nic",
            names=("mlx5_0",),
            pci="",
            cpus=None,
            package=-1,
            numa=-1,
            port_guids=(guid,),
        )
        return replace(MACHINE, devices=(nic,))

    machines = {"a": with_nic(1), "b": with_nic(102), "c": with_nic(7), "d": with_nic(7)}
    assert port_guids(machines) == {1: "a", 102: "b"}  # c and d: one file for both
    tree = infiniband.parse_ibnetdiscover(two_rails(), where="fabric")
    cluster = build_cluster(["a", "b"], {k: machines[k] for k in "ab"}, tree=tree)  # n1, n5
    assert homes(cluster) == {"a": ["leaf00+1", "spine1+1"], "b": ["leaf10+1", "spine1+1"]}


def test_a_host_on_a_spine_does_not_make_it_a_leaf() -> None:
    cards = {
        "leaf1": [("n1 mlx5_0", 1, "4xHDR"), ("n2 mlx5_0", 2, "4xHDR")],
        "leaf2": [("n3 mlx5_0", 3, "4xHDR"), ("n4 mlx5_0", 4, "4xHDR")],
        "spine": [("ufm mlx5_0", 5, "4xEDR")],
    }
    cables = [("leaf1", "spine", "4xHDR"), ("leaf2", "spine", "4xHDR")]
    tree = infiniband.parse_ibnetdiscover(listing(cards, cables), where="fabric")
    assert parents(tree) == {"spine": "", "leaf1": "spine", "leaf2": "spine"}
    assert racks(tree)["spine"] == ["ufm"]
    assert {node.name: node.bytes_per_s for node in tree.nodes}["ufm"] == 12.5 * GB


def beside_each_other(num: int, pairs: Sequence[tuple[int, int]]) -> str:
    """Leaves with two hosts each, joined to one another."""
    cards = {
        f"leaf{i}": [(f"n{2 * i + k} mlx5_0", 10 + 2 * i + k, "4xHDR") for k in (0, 1)]
        for i in range(num)
    }
    return listing(cards, [(f"leaf{one}", f"leaf{other}", "4xHDR") for one, other in pairs])


RING = [(i, (i + 1) % 6) for i in range(6)]
TORUS = [
    pair
    for i in range(3)
    for k in range(3)
    for pair in ((3 * i + k, 3 * i + (k + 1) % 3), (3 * i + k, 3 * ((i + 1) % 3) + k))
]
# Three groups of three, each joined in itself and to both others.
DRAGONFLY = [(3 * g + a, 3 * g + b) for g in range(3) for a, b in ((0, 1), (0, 2), (1, 2))] + [
    (0, 3),
    (4, 6),
    (7, 1),
]


@pytest.mark.parametrize(
    ("num", "pairs"), [(6, RING), (9, TORUS), (9, DRAGONFLY), (3, [(0, 1), (1, 2)])]
)
def test_a_ring_a_torus_and_a_dragonfly_are_no_trees_and_have_no_bound(
    num: int, pairs: list[tuple[int, int]]
) -> None:
    tree = infiniband.parse_ibnetdiscover(beside_each_other(num, pairs), where="fabric")
    assert not tree.is_exact
    assert any("no tree" in note and "approximation" in note for note in tree.notes)
    cluster = build_cluster([node.name for node in tree.nodes], MACHINE, tree=tree)
    plan = plan_ahead(cluster, PlanRequest(servers=2), workers=[1] * (2 * num))
    assert plan.bound_s == 0
    assert "lower bound" not in draw_text.tree(plan, cluster)


@pytest.mark.parametrize(
    "text", [two_rails(), rooms_of_four_rails(4, 5), beside_each_other(2, [(0, 1)])]
)
def test_fabrics_that_are_trees_have_a_bound(text: str) -> None:
    tree = infiniband.parse_ibnetdiscover(text, where="fabric")
    assert tree.is_exact
    cluster = build_cluster([node.name for node in tree.nodes], MACHINE, tree=tree)
    plan = plan_ahead(cluster, PlanRequest(servers=1), workers=[1] * len(tree.nodes))
    assert plan.bound_s > 0


def test_hosts_and_racks_of_a_fabric_are_in_natural_order() -> None:
    cards = {
        f"leaf{i}": [(f"n{i} mlx5_0", i, "4xNDR"), (f"n{i + 90} mlx5_0", 90 + i, "4xNDR")]
        for i in (10, 9, 2)
    }
    cables = [(leaf, "spine", "4xNDR") for leaf in cards]
    text = listing(cards | {"spine": []}, cables)
    tree = infiniband.parse_ibnetdiscover(text, where="fabric")
    assert [node.name for node in tree.nodes] == ["n2", "n9", "n10", "n92", "n99", "n100"]
    assert [switch.name for switch in tree.switches[1:]] == ["leaf2", "leaf9", "leaf10"]


def test_three_levels_have_pods_between_racks_and_root() -> None:
    cards = {f"leaf{i}": [(f"n{i} mlx5_0", i, "4xNDR")] for i in range(1, 5)}
    cards |= {name: [] for name in ("podA1", "podA2", "podB1", "podB2", "core1", "core2")}
    pods = {1: "podA", 2: "podA", 3: "podB", 4: "podB"}
    cables = [(f"leaf{i}", f"{pods[i]}{k}", "4xNDR") for i in pods for k in (1, 2)]
    cables += [
        (f"pod{pod}{k}", f"core{core}", "4xNDR") for pod in "AB" for k in (1, 2) for core in (1, 2)
    ]
    tree = infiniband.parse_ibnetdiscover(listing(cards, cables), where="fabric")
    assert tree.is_exact
    assert parents(tree) == {
        "core1+1": "",
        "podA1+1": "core1+1",
        "podB1+1": "core1+1",
        "leaf1": "podA1+1",
        "leaf2": "podA1+1",
        "leaf3": "podB1+1",
        "leaf4": "podB1+1",
    }


@pytest.mark.parametrize(
    ("rate", "gbit_per_s"),
    [
        *(("4xSDR", 8), ("4xDDR", 16), ("4xQDR", 32), ("4xFDR10", 40), ("4xFDR", 54.545)),
        *(("4xEDR", 100), ("4xHDR", 200), ("2xHDR", 100), ("4xNDR", 400), ("4xXDR", 800)),
        ("4x????", 0),
    ],
)
def test_a_links_speed_is_width_times_the_data_rate_of_a_lane(rate: str, gbit_per_s: float) -> None:
    text = listing({"leaf": [("n1 mlx5_0", 1, rate)]}, [])
    (node,) = infiniband.parse_ibnetdiscover(text, where="fabric").nodes
    assert node.bytes_per_s * 8 / 1e9 == pytest.approx(gbit_per_s, abs=1e-3)


# As the program and its libraries print them on standard error; with -s on their way.
MESSAGES = """\
ibwarn: [4150] mad_rpc: _do_madrpc failed; dport (DR path slid 0; dlid 0; 0,1,5)
src/query_smp.c:227; umad (DR path slid 0; dlid 0; 0,1,5 Attr 0x11:0) bad status 110
-W- Topology file is not specified.
DR path slid 65535; dlid 65535; 0,1 -> new remote ca {0002c90300a1} portnum 1 lid 3-3"n1 mlx5_0"
"""


@pytest.mark.parametrize("where", ["first", "in between"])
def test_messages_among_the_lines_of_ibnetdiscover_are_passed_over(where: str) -> None:
    text = two_rails()
    lines = text.splitlines(keepends=True)
    mixed = MESSAGES + text if where == "first" else "".join(each + MESSAGES for each in lines)
    found = parse_tree(mixed.encode(), where="fabric")
    assert found == parse_tree(text.encode(), where="fabric")


def test_a_listing_that_failed_is_told_in_the_words_of_ibnetdiscover() -> None:
    text = (
        "ibwarn: [9] mad_rpc_open_port: client_register for mgmt 1 failed\n"
        "src/ibnetdisc.c:1183; can't open MAD port ((null):0)\n"
        "/usr/sbin/ibnetdiscover: iberror: failed: discover failed\n"
    )
    assert complaint(text) == (
        "racks: 'ibwarn: [9] mad_rpc_open_port: client_register f'...: ibnetdiscover has listed "
        "nothing: mend what it complains of (run it as root, on a host with an active InfiniBand "
        "port)"
    )


def in_a_chassis(text: str, *, spine: str) -> str:
    """As with -g: ``spine`` and one leaf in a chassis, first by their parts and then by kind."""
    head, *blocks = re.split(r"\n(?=\nvendid|\ncaguid)", text)
    inside = [each for each in blocks if f"MF0;{spine}:" in each.partition("port 0")[0]]
    leaf, *outside = [each for each in blocks if each not in inside]
    inside = [each.replace("[7]", "[7][ext 3]").replace("\n[1]\t", "\n[1][ext 2]\t")
              for each in inside]  # fmt: skip
    parts = [head, "", "Chassis 1 (guid 0x2c90300)", "Hostname: n1", "", "# Spine Nodes"]
    parts += [*inside, "", "# Line Nodes", leaf, "", "# Chassis Switches", *inside, leaf]
    parts += ["", "# Chassis CAs", "", "Non-Chassis Nodes", *outside]
    return "\n".join(parts)


def test_a_listing_with_headings_is_the_same_tree_and_counts_no_cable_twice() -> None:
    text = two_rails()
    grouped = in_a_chassis(text, spine="spine1")
    assert grouped.count('MF0;spine1:MQM9701/U1" enhanced') == 2
    tree = parse_tree(grouped.encode(), where="fabric")
    plain = parse_tree(text.encode(), where="fabric")
    assert set(tree.switches) == set(plain.switches)
    assert set(tree.nodes) == set(plain.nodes)
    without_comments = "\n".join(each for each in grouped.splitlines() if each[:1] != "#")
    assert parse_tree(without_comments.encode(), where="fabric") == tree


def test_a_listing_that_ends_early_is_noted() -> None:
    text = two_rails()
    notes = infiniband.parse_ibnetdiscover(text, where="fabric").notes
    assert not any("not listed" in note for note in notes)
    first, _, _ = text.partition("MF0;leaf01:")
    first, _, _ = first.rpartition("\nvendid")
    tree = infiniband.parse_ibnetdiscover(first, where="fabric")
    assert [node.name for node in tree.nodes] == ["n1", "n2", "n3"]
    assert tree.notes[0] == (
        "fabric: cables lead to 2 switches that are not listed: give all that ibnetdiscover printed"
    )
    switch, _, _ = first.partition("\n[1]")
    assert complaint(switch).endswith(
        "no card of a host in it: give all that ibnetdiscover printed"
    )


def test_a_switch_that_is_there_twice_without_headings_is_refused() -> None:
    assert "is there twice: give one listing" in complaint(two_rails() * 2)


BACK_TO_BACK = """\
#
# Initiated from node 0002c903000000a0 port 0002c903000000a1

vendid=0x2c9
devid=0x1003
caguid=0x2c903000000a0
Ca\t2 "H-0002c903000000a0"\t\t# "n1 mlx5_0"
[1](2c903000000a1) \t"H-0002c903000000b0"[1] (2c903000000b1) \t\t# lid 1 lmc 0 "n2 mlx5_0" lid 2 4xEDR
[2](2c903000000a2) \t"H-0002c903000000b0"[2] (2c903000000b2) \t\t# lid 3 lmc 0 "n2 mlx5_0" lid 4 4xEDR

vendid=0x2c9
caguid=0x2c903000000b0
Ca\t2 "H-0002c903000000b0"\t\t# "n2 mlx5_0"
[1](2c903000000b1) \t"H-0002c903000000a0"[1] (2c903000000a1) \t\t# lid 2 lmc 0 "n1 mlx5_0" lid 1 4xEDR
[2](2c903000000b2) \t"H-0002c903000000a0"[2] (2c903000000a2) \t\t# lid 4 lmc 0 "n1 mlx5_0" lid 3 4xEDR
"""  # noqa: E501 - as it is printed


def test_two_hosts_without_a_switch_are_one_rack_with_the_speed_of_their_cables() -> None:
    tree = parse_tree(BACK_TO_BACK.encode(), where="fabric")
    assert [(each.name, each.bytes_per_s) for each in tree.nodes] == [("n1", 25e9), ("n2", 25e9)]
    assert tree.nodes[0].port_guids == (0x2C903000000A1, 0x2C903000000A2)
    assert len(tree.switches) == 1
    assert tree.is_exact
    assert tree.notes == ()
    cluster = build_cluster(["n2", "n1"], MACHINE, tree=tree)
    assert [each.bytes_per_s for each in cluster.nodes] == [25e9, 25e9]


def test_hosts_in_a_ring_of_cables_are_one_rack_with_a_note() -> None:
    text = "\n".join(
        f'Ca\t2 "H-{host:016x}"\t\t# "n{host} mlx5_0"\n'
        f'[1]({host + 16:x}) \t"H-{host % 3 + 1:016x}"[2] (1) \t\t# lid 1 lmc 0 "x y0" lid 2 4xHDR'
        for host in (1, 2, 3)
    )
    tree = parse_tree(text.encode(), where="fabric")
    assert [each.name for each in tree.nodes] == ["n1", "n2", "n3"]
    assert not tree.is_exact
    assert tree.notes == (
        "fabric: 3 hosts are joined without a switch; one rack of them all is an approximation",
    )


def test_cards_that_are_joined_without_a_switch_must_name_their_hosts() -> None:
    nameless = re.sub(r'"n\d mlx5_0"', '"MT4119 ConnectX5   Mellanox Technologies"', BACK_TO_BACK)
    assert "none of the 4 cards in it names its host" in complaint(nameless)
    assert "no cards that are joined without one" in complaint(
        'vendid=0x2c9\nCa\t1 "H-1"\t\t# "n1 mlx5_0"\n'
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('Ca\t : 0x0002c903000000a0 ports 2 devid 0x1003 vendid 0x2c9 "n1 mlx5_0"',
         "a list of nodes (ibnetdiscover -l, -H, -S or -R)"),
        ('Switch\t : 0x0002c903000000a0 ports 36 devid 0xc738 vendid 0x2c9 "leaf"',
         "a list of nodes (ibnetdiscover -l, -H, -S or -R)"),
        ("SW     2  1 0x0002c903000000a0 4x FDR - CA     1  1 0x0002c903000000a1 ( 'a' - 'n1 h' )",
         "a report of ports (ibnetdiscover -p)"),
        ("< vendid=0x2c9", "differences between two fabrics (ibnetdiscover --diff)"),
        ("CA: n1 mlx5_0:", "the output of iblinkinfo"),
        ("Switch: 0x0002c903000000a0 leaf:", "the output of iblinkinfo"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["", "ibwarn: [1] x\n"])
def test_other_output_about_a_fabric_is_told_by_its_name(line: str, said: str, before: str) -> None:
    number = 1 + before.count("\n")
    assert complaint(before + line + "\n") == (
        f"racks:{number}: this is {said}, which has no tree: give what ibnetdiscover prints "
        "without options"
    )


def test_the_speed_of_a_link_is_read_before_what_full_information_adds() -> None:
    plain = listing({"leaf": [("n1 mlx5_0", 1, "4xNDR")]}, [])
    full = listing({"leaf": [("n1 mlx5_0", 1, "4xNDR s=4 w=2 v=4 e=8")]}, [])
    parse = infiniband.parse_ibnetdiscover
    assert parse(full, where="fabric") == parse(plain, where="fabric")


def test_a_fabric_without_host_names_says_what_is_missing() -> None:
    text = listing({"leaf": [("MT4129 ConnectX7   Mellanox Technologies", 1, "4xNDR")]}, [])
    assert "none of the 1 cards in it names its host" in complaint(text)


def test_a_line_that_ibnetdiscover_does_not_print_is_refused() -> None:
    assert "racks:4: 'hello' is not a line of ibnetdiscover's" in complaint(
        'vendid=0x2c9\n#\n\nhello\nSwitch\t1 "S-1"\n'
    )


@pytest.mark.parametrize(
    ("name", "sizes", "extra", "root", "num_unnamed"),
    [
        ("", [3, 4, 5], set(), "spine-1+1", 1),
        *real(
            (
                "ibnetdiscover.out",
                [10, 11, 14, 15, 16, 17, 18, 18],
                {"ubuntu", "B11-P1-CUFM-02"},  # the subnet manager's hosts, in the eighth rack
                "A10-P1-IBSPINE-01+8",
                72,
            )
        ),
    ],
    ids=lambda value: (value or "made") if isinstance(value, str) else "",
)
def test_a_fabric_has_a_rack_of_four_rails_for_each_room(
    name: str, sizes: list[int], extra: set[str], root: str, num_unnamed: int, tmp_path: Path
) -> None:
    path = machine_file(name) if name else tmp_path / "fabric"
    if not name:
        path.write_text(rooms_of_four_rails(*sizes))
    tree = read_tree(path)
    text = path.read_text()
    # Counted here in another way: by the cards' own blocks and by the room in the host's name.
    cards = re.findall(
        r'^Ca\t1 "H-\w+"\t\t# "(\w+-p1-dgx-(\d+)-c\d+) \S+"\n\[1\]\(\w+\) \t"(S-\w+)"', text, re.M
    )
    hosts = defaultdict(set)
    leaves = defaultdict(set)
    for host, room, leaf in cards:
        hosts[room].add(host)
        leaves[room].add(leaf)
    found = {switch: set(names) for switch, names in racks(tree).items()}
    assert sorted(map(sorted, found.values())) == sorted(
        sorted(names | (extra if room == "08" else set())) for room, names in hosts.items()
    )
    assert sorted(len(found[each] - extra) for each in found) == sizes
    per_host = Counter(host for host, _, _ in cards)
    for node in tree.nodes:
        assert node.bytes_per_s == 50 * GB * (2 if node.name in extra else per_host[node.name])
    ends = defaultdict(int)  # cables of each switch to other switches
    for block in re.findall(r'^Switch\t\d+ "(S-\w+)".*\n((?:\[.*\n)+)', text, re.M):
        ends[block[0]] = len(re.findall(r'^\[\d+\]\t"S-', block[1], re.M))
    uplinks = sorted(switch.bytes_per_s for switch in tree.switches if switch.parent)
    assert uplinks == sorted(50 * GB * sum(ends[leaf] for leaf in each) for each in leaves.values())
    assert [switch.parent for switch in tree.switches][:2] == ["", tree.switches[0].name]
    assert tree.switches[0].name == root
    assert f"{num_unnamed} cards do not name their host" in tree.notes[0]


# The user's table


def test_a_table_gives_racks_and_speeds() -> None:
    tree = rack_table.parse(TABLE, where="racks.toml")
    assert racks(tree) == {"rack1": names(4), "rack2": names(8)[4:]}
    assert parents(tree) == {"spine": "", "rack1": "spine", "rack2": "spine"}
    assert [switch.bytes_per_s for switch in tree.switches] == [0, 6.25 * GB, 4 * GB]
    assert {node.bytes_per_s for node in tree.nodes} == {25 / 8 * GB, 12 * GB}


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        *(("25Gbit", 3.125e9), ("25 Gbit/s", 3.125e9), ("100Gbps", 12.5e9), ("12GB", 12e9)),
        *(("1.5 TB/s", 1.5e12), ("500Mbit", 62.5e6), ("8Mbit", 1e6), ("12e9", 12e9)),
        ("700000", 7e5),
        *((12_000_000_000, 12e9), (1.5e9, 1.5e9)),
    ],
)
def test_speeds_are_read_as_people_write_them(text: object, bytes_per_s: float) -> None:
    assert rack_table.parse_speed(text, where="--link") == bytes_per_s


@pytest.mark.parametrize(
    "value",
    [
        *("", "fast", "25Gb", "25 gbit", "25GBps", "-1GB", "0", "1e99", "nan", "1GiB", "9" * 400),
        *(True, None, [], 0, -5, 1e16, 10**400, float("inf"), float("nan")),
    ],
)
def test_what_is_no_speed_is_refused(value: object) -> None:
    with pytest.raises(PlacementError, match=r"^--link: .* is not a speed: write 25Gbit"):
        rack_table.parse_speed(value, where="--link")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[switch]]\nname = "a"\nspeed = "1GB"', "racks: switch 'a': unknown key 'speed'"),
        (
            '[[switch]]\nname = "a"\nuplink = "1Gb"',
            "racks: switch 'a': uplink: '1Gb' is not a speed",
        ),
        ('[[switch]]\nnodes = "n1"', "racks: [[switch]] number 1: name = ''"),
        ('[[switch]]\nname = "a"\nnodes = ["n1"]', "switch 'a': nodes is a list, not a text"),
        ('[[switch]]\nname = "a"\nnodes = "n["', "switch 'a': nodes: host list: '['"),
        ('[[switch]]\nname = "a"\nparent = "b"', "switch 'a': switch 'b' is described nowhere"),
        ('[[switch]]\nname = "a"\nparent = "a"', "switch 'a': switch 'a' is in a circle"),
        ('[[switch]]\nname = "a"\n[[switch]]\nname = "a"', "switch 'a' is already at"),
        ('[[rack]]\nname = "a"', "unknown key 'rack'"),
        ('[switch]\nname = "a"', "no [[switch]] entry"),
        ("switch = 3", "no [[switch]] entry"),
        ("[[switch]\n", "not TOML"),
        ("switch = " + "[" * 5000, "nested too deep"),
        ('a = """\n"""', "strings over several lines"),
        ("a" + ".a" * 100_000 + " = 1", "racks:1: more than 32 dots outside of quotes"),
        ("switch = " + "9" * 10_000, "not TOML"),
        ("[[switch]]\n" + "#" * 2_000_000, "more than 1,048,576"),
    ],
)
def test_a_wrong_table_is_refused_with_the_entry(text: str, said: str) -> None:
    assert said in complaint(text)


def test_many_host_names_with_dots_may_stand_in_a_table() -> None:
    hosts = ",".join(f"n{index}.cluster.example.org" for index in range(100))
    tree = rack_table.parse(f"[[switch]]\nname = 'a'\nnodes = '{hosts}' # a.b\n", where="t")
    assert len(tree.nodes) == 100


@pytest.mark.parametrize(
    "value",
    [
        '"' + "\\\\" * 40 + "." * 40 + '"',
        '"' + '\\"' + "." * 40 + '"',
        "'\"" + "." * 40 + "\\'",
        "1 # it's " + "." * 40,
    ],
)
def test_dots_in_strings_and_comments_are_not_counted(value: str) -> None:
    assert complaint(f"a = {value}") == (
        "racks: unknown key 'a': only [[switch]] entries belong here"
    )


@pytest.mark.parametrize("before", ["1", '"\\""', "'\\'", '"\'"', "'\"'", '"\\\\"'])
def test_dots_behind_a_string_are_counted(before: str) -> None:
    text = f"a = {before}" + "." * 40
    assert complaint(text).startswith("racks:1: more than 32 dots outside of quotes")


# The cluster of a job


@pytest.mark.parametrize("text", [CONF, SHOWN, BLOCKS, SHOWN_BLOCKS, TABLE, "\ufeff" + CONF])
def test_a_files_format_is_seen_from_its_content(text: str, tmp_path: Path) -> None:
    path = tmp_path / "racks"
    path.write_text(text, encoding="utf-8")
    assert len(read_tree(path).nodes) in (5, 8)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="cannot be read \\(No such file or directory\\)"):
        read_tree(tmp_path / "racks")


def test_without_a_source_there_is_one_flat_rack_with_a_note() -> None:
    cluster = build_cluster(names(3), MACHINE, tree=None)
    assert len(cluster.switches) == 1
    assert cluster.source == "one flat rack"
    assert "one flat rack is assumed" in cluster.notes[0]
    assert {node.bytes_per_s for node in cluster.nodes} == {DEFAULT_LINK_BYTES_PER_S}


def test_hosts_keep_their_order_and_their_own_machines() -> None:
    machines = {"n5": flat_machine([0]), "n1": MACHINE}
    cluster = build_cluster(["n5", "n1"], machines, tree=parse_tree(CONF.encode(), where="t"))
    assert [node.name for node in cluster.nodes] == ["n5", "n1"]
    assert [len(node.machine.cores) for node in cluster.nodes] == [1, 4]


def test_switches_that_do_not_matter_to_the_job_are_left_out() -> None:
    tree = parse_tree(CONF.encode(), where="t")
    assert homes(build_cluster(["n1", "n3", "n4"], MACHINE, tree=tree)) == {
        "n1": ["s0", "s3"],
        "n3": ["s1", "s3"],
        "n4": ["s1", "s3"],
    }
    assert homes(build_cluster(["n1", "n5"], MACHINE, tree=tree)) == {
        "n1": ["s0", "s4"],
        "n5": ["s2", "s4"],
    }
    assert homes(build_cluster(["n2", "n1"], MACHINE, tree=tree)) == {"n2": ["s0"], "n1": ["s0"]}


def test_a_chain_of_switches_is_as_slow_as_its_slowest_uplink() -> None:
    text = """
        [[switch]]
        name = "root"
        [[switch]]
        name = "a"
        parent = "root"
        uplink = "8GB"
        [[switch]]
        name = "b"
        parent = "a"
        uplink = "5GB"
        [[switch]]
        name = "c"
        parent = "b"
        nodes = "n[1-2]"
        uplink = "9GB"
        [[switch]]
        name = "d"
        parent = "root"
        nodes = "n[3-4]"
        uplink = "7GB"
    """
    cluster = build_cluster(names(4), MACHINE, tree=rack_table.parse(text, where="t"))
    found = {switch.name: switch.bytes_per_s for switch in cluster.switches if switch.parent >= 0}
    assert found == {"c": 5 * GB, "d": 7 * GB}
    assert homes(cluster)["n1"] == ["c", "root"]


def test_an_uplink_of_unknown_speed_lets_all_that_is_below_it_pass() -> None:
    cluster = build_cluster(names(5), MACHINE, tree=parse_tree(CONF.encode(), where="t"))
    found = {switch.name: switch.bytes_per_s / 12e9 for switch in cluster.switches}
    assert found == {"s4": 5, "s3": 4, "s2": 1, "s0": 2, "s1": 2}
    assert any("no oversubscription" in note for note in cluster.notes)
    assert any("12 GB/s, by default" in note for note in cluster.notes)


def test_known_speeds_are_kept_without_a_note() -> None:
    cluster = build_cluster(names(8), MACHINE, tree=rack_table.parse(TABLE, where="t"))
    assert cluster.notes == ()
    assert [switch.bytes_per_s for switch in cluster.switches[1:]] == [6.25 * GB, 4 * GB]
    assert cluster.nodes[0].bytes_per_s == 25 / 8 * GB


def test_a_host_that_the_tree_does_not_have_hangs_under_the_root() -> None:
    cluster = build_cluster(["n1", "x1"], MACHINE, tree=parse_tree(CONF.encode(), where="t"))
    assert homes(cluster) == {"n1": ["s0", "s4"], "x1": ["s4"]}
    assert "t: without x1; assumed at the root" in cluster.notes


@pytest.mark.parametrize(("asked", "listed"), [("n1.example.org", "n1"), ("n1", "n1.example.org")])
def test_a_full_name_and_a_short_one_are_the_same_host(asked: str, listed: str) -> None:
    tree = slurm.parse_topology_conf(f"SwitchName=a Nodes={listed},n2", where="t")
    cluster = build_cluster([asked, "n2"], MACHINE, tree=tree)
    assert homes(cluster) == {asked: ["a"], "n2": ["a"]}


def test_two_full_names_of_different_domains_are_different_hosts() -> None:
    tree = slurm.parse_topology_conf("SwitchName=a Nodes=n1.a.org,n1.b.org,10.0.0.1", where="t")
    for other in ("n1.c.org", "n1", "10.0.0.2"):
        with pytest.raises(PlacementError, match="none of the hosts is in it"):
            build_cluster([other], MACHINE, tree=tree)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([], "no hosts to plan for"),
        (["n1", "n2", "n1"], "host 'n1' is named twice"),
        (["n1.a.org", "n1.b.org"], "hosts 'n1.a.org' and 'n1.b.org' are both 'n1' in the tree"),
        (["x1", "x2"], "t: none of the hosts is in it (x1, x2; it has n1, n2, n3, n4, n5)"),
    ],
)
def test_hosts_that_cannot_be_placed_are_refused(hosts: list[str], said: str) -> None:
    tree = parse_tree(CONF.encode(), where="t")
    with pytest.raises(PlacementError) as caught:
        build_cluster(hosts, MACHINE, tree=tree)
    assert said in str(caught.value)


def test_a_host_without_a_machine_is_refused() -> None:
    with pytest.raises(PlacementError, match="host 'n2': its machine is not known"):
        build_cluster(["n1", "n2"], {"n1": MACHINE}, tree=None)


NOTHING_MEASURED = Network(
    date="2025-03-01",
    hosts=(),
    mpi="",
    components=(),
    versions={},
    classes={},
    node_links={},
    switch_uplinks={},
    pairs=(),
)


def measured(bytes_per_s: float) -> Speed:
    return replace(UNMEASURED, latency_s=1e-6, bytes_per_s=bytes_per_s)


def test_what_was_measured_goes_before_what_the_tree_says() -> None:
    network = replace(
        NOTHING_MEASURED,
        hosts=("n1", "n5"),
        classes={"node": measured(2 * GB)},
        node_links={"n1.example.org": measured(3 * GB), "n5": UNMEASURED},
        switch_uplinks={"rack1": measured(5 * GB), "elsewhere": measured(1)},
    )
    tree = rack_table.parse(TABLE, where="t")
    cluster = build_cluster(["n1", "n2", "n5"], MACHINE, tree=tree, network=network)
    assert [node.bytes_per_s for node in cluster.nodes] == [3 * GB, 25 / 8 * GB, 12 * GB]
    assert [switch.bytes_per_s for switch in cluster.switches[1:]] == [5 * GB, 4 * GB]
    flat = build_cluster(["n1", "n2"], MACHINE, tree=None, network=network)
    assert [node.bytes_per_s for node in flat.nodes] == [3 * GB, 2 * GB]
    assert any("n2 not known: 2 GB/s, typical of those measured" in note for note in flat.notes)
    other = replace(network, classes={}, hosts=("m1", "m2"), node_links={})
    for hosts in (["n1", "n2"], ["n1"]):
        notes = build_cluster(hosts, MACHINE, tree=None, network=other).notes
        assert "the measured network has no link of these nodes (measured: m1, m2)" in notes


@pytest.mark.parametrize(
    ("listed", "at_least", "taken"), [("4GB", 2, 4), ("4GB", 9, 9), ("", 2, 24), ("", 30, 30)]
)
def test_an_uplink_measured_as_at_least_so_fast_is_never_made_slower_by_that(
    listed: str, at_least: float, taken: float
) -> None:
    uplink = f'uplink = "{listed}"' if listed else ""
    text = f"[[switch]]\nname = 'a'\nnodes = 'n[1-2]'\n{uplink}\n[[switch]]\nname='b'\nnodes='n3'"
    network = replace(
        NOTHING_MEASURED,
        switch_uplinks={"a": replace(measured(at_least * GB), is_lower_bound=True)},
    )
    tree = rack_table.parse(text, where="t")
    cluster = build_cluster(names(3), MACHINE, tree=tree, network=network)
    found = {switch.name: switch.bytes_per_s for switch in cluster.switches}
    assert found["a"] == taken * GB
