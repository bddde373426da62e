"""A plan as text and as a picture: the values in them, what fits, and names that mean harm.

Of the whole room: drawing, text, text_tree and the svg modules.

Longer than other modules: text and picture are drawn from the same plans.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from psdist.errors import PlacementError
from psdist.topology.draw import Scene, duration, names, size, speed, svg_canvas
from psdist.topology.draw import svg as draw_svg
from psdist.topology.draw import text as draw_text
from psdist.topology.machine import Core, Device, Machine, NumaNode, Package, flat_machine
from psdist.topology.network import Cluster, Node, Switch
from psdist.topology.plan import LinkLoad, Plan, PlannedRank

CORES = 8
"""Of a package."""


def machine(*, num_packages: int = 2, cores: int = CORES, num_gpus: int = 2) -> Machine:
    def cpus(package: int) -> frozenset[int]:
        return frozenset(range(package * cores, (package + 1) * cores))

    def device(kind: str, name: str, bus: int, package: int) -> Device:
        return Device(
            kind="gpu" if kind == "gpu" else "nic",
            names=(name,),
            pci=f"0000:{bus:02x}:00.0",
            cpus=cpus(package),
            package=package,
            numa=package,
            bytes_per_s=25e9,
        )

    gpus = [device("gpu", f"cuda{i}", 0x3B + i, i % num_packages) for i in range(num_gpus)]
    return Machine(
        name="",
        packages=tuple(Package(os_index=i, cpus=cpus(i)) for i in range(num_packages)),
        dies=(),
        numa_nodes=tuple(
            NumaNode(os_index=i, cpus=cpus(i), memory_bytes=64 << 30, is_dram=True)
            for i in range(num_packages)
        ),
        l3_groups=tuple(cpus(i) for i in range(num_packages)),
        cores=tuple(
            Core(logical=i, cpus=(i,), package=i // cores, numa=i // cores, l3=i // cores)
            for i in range(num_packages * cores)
        ),
        devices=(*gpus, device("nic", "mlx5_0", 0x17, 0)),
    )


def cluster(
    num_racks: int, per_rack: int, *, of: Machine | None = None, prefix: str = "n"
) -> Cluster:
    of = of or machine()
    return Cluster(
        nodes=tuple(
            Node(
                name=f"{prefix}{i + 1}",
                machine=of,
                switch=1 + i // per_rack,
                bytes_per_s=12e9,
            )
            for i in range(num_racks * per_rack)
        ),
        switches=(
            Switch(name="core", parent=-1, bytes_per_s=0.0),
            *(
                Switch(name=f"rack{i + 1}", parent=0, bytes_per_s=3e9 * per_rack)
                for i in range(num_racks)
            ),
        ),
        source="topology.conf",
    )


def loads(
    cluster: Cluster, ranks: Sequence[PlannedRank], weights: Sequence[float]
) -> list[LinkLoad]:
    """What each link carries, by the formula of docs/guides/placement.md, for a model of 4 GB."""
    host_of = {node.name: index for index, node in enumerate(cluster.nodes)}
    mass = [0.0] * len(cluster.nodes)
    groups: list[set[int]] = [set() for _ in cluster.nodes]
    for each in ranks:
        if each.role == "server":
            mass[host_of[each.host]] += 4e9 * weights[each.index]
        else:
            groups[host_of[each.host]].add(each.group)
    num_groups = sum(map(len, groups))

    def carried(nodes: list[int]) -> float:
        inside, here = sum(mass[i] for i in nodes), sum(len(groups[i]) for i in nodes)
        return inside * (num_groups - here) + here * (4e9 - inside)

    found = [
        LinkLoad(name=node.name, kind="node", num_bytes=carried([i]), bytes_per_s=node.bytes_per_s)
        for i, node in enumerate(cluster.nodes)
    ]
    for index, switch in enumerate(cluster.switches):
        if switch.parent >= 0:
            nodes = [i for i in range(len(cluster.nodes)) if index in cluster.path(i)]
            found.append(
                LinkLoad(
                    name=switch.name,
                    kind="switch",
                    num_bytes=carried(nodes),
                    bytes_per_s=switch.bytes_per_s,
                )
            )
    return found


def planned(
    cluster: Cluster, *, workers: int = 4, servers_every: int = 1, weights: Sequence[float] = ()
) -> Plan:
    """A server on every so manyth node and some workers on each; one group a node."""
    ranks: list[PlannedRank] = []
    num_servers = num_workers = 0
    for index, node in enumerate(cluster.nodes):
        of = node.machine
        per_package = len(of.cores) // len(of.packages)
        roles = ["server"] * (index % servers_every == 0) + ["worker"] * workers
        used = [0] * len(of.packages)
        num_near = [0] * len(of.packages)
        for seat, role in enumerate(roles):
            package = seat % len(of.packages)
            take = 1 if role == "server" else max(1, (per_package - 1) // -(-workers // 2))
            first = package * per_package + used[package]
            cores = tuple(range(first, min(first + take, (package + 1) * per_package)))
            used[package] += take
            is_server = role == "server"
            near = [gpu.pci for gpu in of.gpus if gpu.package == package]
            free = near[num_near[package] :] if not is_server else []
            num_near[package] += not is_server
            ranks.append(
                PlannedRank(
                    rank=len(ranks),
                    host=node.name,
                    role="server" if is_server else "worker",
                    index=num_servers if is_server else num_workers,
                    group=-1 if is_server else index,
                    cores=cores,
                    cpus=cores,
                    package=package,
                    numa=package,
                    gpu=free[0] if free else "",
                    nic=of.nics[0].name if of.nics and package == 0 else "",
                )
            )
            num_servers += is_server
            num_workers += not is_server
    shares = tuple(weights) or (1 / num_servers,) * num_servers
    links = loads(cluster, ranks, shares)
    cost_s = max(link.seconds for link in links)
    return Plan(
        ranks=tuple(ranks),
        weights=shares,
        links=tuple(links),
        model_bytes=4e9,
        placement="auto",
        cost_s=cost_s,
        bound_s=cost_s / 1.005,
        compared={"block": 2.63 * cost_s, "cyclic": 1.17 * cost_s},
        source=cluster.source,
        notes=("link speeds are the default of 12 GB/s: nobody measured them",),
    )


HOSTILE = '"><script>alert(1)</script>&\x1b[2J\u202e\x00\ud800]]>'
FOUR = cluster(2, 2)
UNEVEN = (0.4, 0.3, 0.2, 0.1)


def texts(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def words_of(svg: str) -> list[str]:
    return [element.text or "" for element in texts(svg)]


def titles_of(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")
    return [element.text or "" for element in found]


def loads_in(text: str) -> dict[str, tuple[str, str, str]]:
    """Name, and size, time and share, of each line of the tree that has a load."""
    found = {}
    for line in text.split("\n\n")[0].splitlines():
        match = re.search(r"(\S+ [KMGT]?B) +(\S+ [mun]?s)  [━╌]+ +(?:<= +)?(\d+ %)", line)
        if match:
            found[line.strip(" │├└─").split()[0]] = match.groups()
    return found  # type: ignore[return-value]


# Amounts


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 B"),
        (-1e-9, "0 B"),
        (1, "1.00 B"),
        (999.4, "999 B"),
        (999.6, "1.00 KB"),
        (9.996e6, "10.0 MB"),
        (4.9e9, "4.90 GB"),
        (123.4e9, "123 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_a_size_has_three_digits_and_the_unit_that_suits_it(value: float, words: str) -> None:
    assert size(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(1.333, "1.33 s"), (0.409, "409 ms"), (2.5e-5, "25.0 us"), (0, "0 ns")]
)
def test_a_time_has_three_digits_and_the_unit_that_suits_it(value: float, words: str) -> None:
    assert duration(value) == words


def test_a_speed_has_no_zeros_at_its_end() -> None:
    assert [speed(12e9), speed(100e9), speed(12.5e9)] == ["12 GB/s", "100 GB/s", "12.5 GB/s"]


def test_names_that_brackets_cannot_hold_are_told_by_the_first_and_the_last() -> None:
    assert names(["n1", "n2", "n3"]) == "n[1-3]"
    assert names(["a b", "c", "d e"]) == "a b to d e"


# The scene


def test_a_plan_for_another_cluster_is_refused_by_the_name_of_the_host() -> None:
    plan = planned(FOUR)
    with pytest.raises(PlacementError, match="rank 0 on host 'n1'") as caught:
        draw_text.tree(plan, cluster(2, 2, prefix="other"))
    assert "\n" not in str(caught.value)
    with pytest.raises(PlacementError, match="'n1'"):
        draw_svg.picture(plan, cluster(2, 2, prefix="other"))


def test_exactly_one_link_is_the_worst_and_those_as_loaded_are_counted() -> None:
    plan = planned(FOUR)
    scene = Scene.of(plan, FOUR)
    assert [link.name for link in plan.links if scene.is_worst(link)] == ["rack1"]
    assert scene.num_tied == 1


def test_switches_without_nodes_are_left_out() -> None:
    empty = (Switch(name="spare", parent=0, bytes_per_s=1e9),) * 3
    larger = replace(FOUR, switches=(*FOUR.switches, *empty))
    plan = planned(FOUR)
    assert "spare" not in draw_text.tree(plan, larger)
    assert "spare" not in draw_svg.picture(plan, larger)


# The tree as text


def test_eight_nodes_with_eight_ranks_and_two_gpus_fit_100_columns_with_every_rank_once() -> None:
    where = cluster(2, 4)
    plan = planned(where, workers=7)
    text = draw_text.tree(plan, where)
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(map(int, re.findall(r"─ rank (\d+) ", text))) == list(range(64))
    assert "..." not in text  # nothing had to be cut


@pytest.mark.parametrize("width", [60, 72, 100, 140])
def test_no_line_of_the_tree_is_wider_than_asked_for(width: int) -> None:
    plan = planned(FOUR, weights=UNEVEN)
    assert max(map(len, draw_text.tree(plan, FOUR, width=width).splitlines())) <= width
    words = draw_text.explain(plan, FOUR, alternatives=[("x " * 100, 0.1)], width=width)
    assert max(map(len, words.splitlines())) <= width


def test_the_loads_in_the_tree_are_those_of_the_plan() -> None:
    plan = planned(FOUR, weights=UNEVEN)
    assert loads_in(draw_text.tree(plan, FOUR)) == {
        link.name: (
            size(link.num_bytes),
            duration(link.seconds),
            f"{100 * link.seconds / plan.cost_s:.0f} %",
        )
        for link in plan.links
    }


def test_the_worst_link_is_marked_once() -> None:
    text = draw_text.tree(planned(FOUR, weights=UNEVEN), FOUR)
    marked = [line for line in text.splitlines() if line.endswith("  worst")]
    assert len(marked) == 1
    assert "rack1" in marked[0]


def test_a_rank_stands_below_its_package_with_role_cores_and_devices() -> None:
    lines = draw_text.tree(planned(FOUR, weights=UNEVEN), FOUR).splitlines()
    package = next(i for i, line in enumerate(lines) if "package 0  cores 0-7, 1 free" in line)
    server = lines[package + 1]
    for words in ("rank 0 ", "server 0", "holds  40.0 %", "core 0 ", "mlx5_0"):
        assert words in server
    worker = lines[package + 2]
    for words in ("rank 2 ", "worker 1", "group 0", "cores 1-3", "GPU 3b:00.0", "NIC mlx5_0"):
        assert words in worker


def test_the_summary_has_time_worst_link_bound_comparison_and_notes() -> None:
    plan = planned(FOUR, weights=UNEVEN)
    summary = draw_text.tree(plan, FOUR).split("\n\n")[1]
    worst = plan.worst_link
    assert worst is not None
    for words in (
        f"exchange    {duration(plan.cost_s)} predicted",
        f"the uplink of rack1, 6 GB/s: {size(worst.num_bytes)} each way",
        "0.5 % above the lower bound",
        "block",
        "2.63 times as long",
        "cyclic",
        "1.17 times as long",
        "topology.conf",
        "nobody measured them",
    ):
        assert words in summary


def test_alike_nodes_fold_into_ranges_that_name_every_rank() -> None:
    where = cluster(4, 16)
    plan = planned(where, workers=7)
    text = draw_text.tree(plan, where)
    assert "n[2-16]  as n1, ranks 8-127" in text
    assert "rack[2-4]  as rack1, ranks 128-511" in text
    assert text.count("\n") < 50


def test_nodes_with_other_machines_or_other_seats_are_not_folded() -> None:
    where = cluster(1, 40)
    plan = planned(where, workers=7)
    moved = [replace(each, cores=(7,)) if each.rank == 32 else each for each in plan.ranks]
    assert moved[32].host == "n5"
    plan = replace(plan, ranks=tuple(moved))
    of = machine()
    of = replace(of, devices=(*of.devices, replace(of.nics[0], names=("eth0",), pci="")))
    where = replace(where, nodes=(*where.nodes[:39], replace(where.nodes[39], machine=of)))
    text = draw_text.tree(plan, where)
    assert "n[2-4,6-39]  as n1" in text
    assert "─ n5  2 packages, 16 cores, 2 GPUs, 1 NIC" in text
    assert "─ n40  2 packages, 16 cores, 2 GPUs, 2 NICs" in text


def with_fast_uplinks(where: Cluster, slowest: str) -> Cluster:
    """Where the link of one node is the worst."""
    return where.with_links(
        switch_bytes_per_s={each.name: 1e13 for each in where.switches},
        node_bytes_per_s={slowest: 11.999e9},
    )


def test_of_many_alike_the_one_with_the_worst_link_is_told_in_full() -> None:
    where = with_fast_uplinks(cluster(4, 16), "n37")
    lines = draw_text.tree(planned(where, workers=7), where).splitlines()
    assert [line[3:12] for line in lines if line.endswith("  worst")] == ["├─ n37  2"]
    assert any("─ rack3  16 nodes" in line for line in lines)
    assert any("─ n[33-36,38-48]  as n37" in line for line in lines)
    assert any("─ rack[1-2,4]  as rack3" in line for line in lines)


def test_the_worst_link_is_found_below_several_levels_of_alike_switches() -> None:
    where = with_fast_uplinks(cluster(4, 16), "n64")
    pods = tuple(Switch(name=f"pod{i}", parent=0, bytes_per_s=1e13) for i in (1, 2))
    racks = tuple(replace(each, parent=5 + i // 2) for i, each in enumerate(where.switches[1:]))
    where = replace(where, switches=(where.switches[0], *racks, *pods))
    lines = draw_text.tree(planned(where, workers=7), where).splitlines()
    assert ["n64" in line for line in lines if line.endswith("  worst")] == [True]
    assert any("pod1  as pod2" in line for line in lines)
    assert any("rack3  as rack4" in line for line in lines)


@pytest.mark.parametrize(
    ("num_racks", "per_rack", "is_random"),
    [(4, 16, True), (32, 32, False), (32, 32, True), (400, 3, True), (1, 1000, True)],
)
def test_a_large_cluster_takes_at_most_200_lines(
    num_racks: int, per_rack: int, is_random: bool
) -> None:
    chosen = random.Random(num_racks)
    where = cluster(num_racks, per_rack)
    if is_random:
        of = [machine(cores=8 + chosen.randrange(40)) for _ in range(50)]
        where = replace(
            where, nodes=tuple(replace(node, machine=chosen.choice(of)) for node in where.nodes)
        )
    plan = planned(where, workers=7, servers_every=2 + is_random)
    text = draw_text.tree(plan, where)
    assert text.count("\n") <= 200
    assert max(map(len, text.splitlines())) <= 100
    assert sum(line.endswith("  worst") for line in text.splitlines()) == 1


def test_a_tree_may_be_very_deep_and_a_cluster_empty() -> None:
    depth = 20_000
    deep = Cluster(
        nodes=(Node(name="n1", machine=machine(), switch=depth - 1, bytes_per_s=1e9),),
        switches=tuple(Switch(name=f"s{i}", parent=i - 1, bytes_per_s=1e9) for i in range(depth)),
        source="a chain",
    )
    plan = replace(planned(replace(FOUR, nodes=FOUR.nodes[:1])), links=())
    assert draw_text.tree(plan, deep).count("\n") <= 200
    words = words_of(draw_svg.picture(plan, deep))
    assert {"n1", "s0"} <= set(words)
    assert "s100" not in words
    empty = Cluster(nodes=(), switches=FOUR.switches[:1], source="nothing")
    nobody = replace(plan, ranks=(), weights=(), cost_s=0.0, bound_s=0.0)
    assert "nothing crosses a link" in draw_text.tree(nobody, empty)
    assert ElementTree.fromstring(draw_svg.picture(nobody, empty)) is not None


def test_ranks_that_sit_on_no_one_package_are_told_as_such() -> None:
    plan = planned(FOUR)
    across = replace(plan.ranks[0], package=-1, cores=(0, 8))
    loose = replace(plan.ranks[1], package=-1, cores=(), cpus=())
    plan = replace(plan, ranks=(across, loose, *plan.ranks[2:]))
    text = draw_text.tree(plan, FOUR)
    assert re.search(r"across packages\n.*─ rank 0 .*cores 0,8", text)
    assert re.search(r"not bound to cores\n.*─ rank 1 ", text)
    assert {"across packages", "not bound to cores"} <= set(words_of(draw_svg.picture(plan, FOUR)))


def test_a_machine_of_which_little_is_known_can_be_drawn() -> None:
    bare = replace(flat_machine(range(4)), packages=(), numa_nodes=())
    where = replace(FOUR, nodes=tuple(replace(node, machine=bare) for node in FOUR.nodes))
    plan = planned(FOUR)
    plan = replace(
        plan,
        ranks=tuple(replace(each, package=-1, cores=(), gpu="", nic="") for each in plan.ranks),
    )
    assert len(re.findall(r"─ rank \d+ ", draw_text.tree(plan, where))) == len(plan.ranks)
    assert "rank 7" in words_of(draw_svg.picture(plan, where))


def hostile() -> tuple[Plan, Cluster]:
    where = cluster(2, 2, prefix=HOSTILE)
    of = machine()
    bad = replace(of, devices=tuple(replace(each, names=(HOSTILE,)) for each in of.devices))
    where = replace(
        where,
        nodes=tuple(replace(node, machine=bad) for node in where.nodes),
        switches=tuple(replace(each, name=each.name + HOSTILE) for each in where.switches),
        source=HOSTILE,
    )
    return replace(planned(where), notes=(HOSTILE, "x" * 5000)), where


def test_text_of_hostile_names_is_printable_ascii_and_box_drawing_only() -> None:
    plan, where = hostile()
    for text in (draw_text.tree(plan, where), draw_text.explain(plan, where)):
        assert re.fullmatch("[ -~\n\u2500-\u257f]+", text)
        assert max(map(len, text.splitlines())) <= 100


# In words


def test_the_explanation_names_the_limiting_link_and_what_is_on_it() -> None:
    words = " ".join(draw_text.explain(planned(FOUR, weights=UNEVEN), FOUR).split())
    assert "The limit is the uplink of rack1 (6 GB/s)" in words
    # 70 % of 4 GB for the two groups outside, the other 30 % for the two inside.
    assert "2 servers of 4 with 70.0 % of the model, and 2 groups of 4" in words
    assert "5.60 GB is what the 2 groups outside" in words
    assert "2.40 GB is what the 2 groups inside exchange with the servers outside" in words


def test_what_would_help_is_ranked_and_what_would_not_is_told_apart() -> None:
    plan = planned(FOUR)
    text = draw_text.explain(
        plan,
        FOUR,
        alternatives=[
            ("another node", 1.2 * plan.cost_s),
            ("one more server", 0.8 * plan.cost_s),
            ("faster uplinks", 0.5 * plan.cost_s),
        ],
    )
    helps, helps_not = text.split("What would help")[1].split("What would not help")
    assert helps.index("50 % less  faster uplinks") < helps.index("20 % less  one more server")
    assert "1.20 times as long  another node" in helps_not


def test_where_nothing_helps_that_is_said() -> None:
    plan = planned(FOUR)
    text = draw_text.explain(plan, FOUR, alternatives=[("another node", plan.cost_s)])
    assert "Nothing that was tried would help by 1 % or more" in text


def test_a_plan_on_one_node_has_nothing_to_explain() -> None:
    where = replace(FOUR, nodes=FOUR.nodes[:1])
    plan = replace(planned(where), cost_s=0.0, bound_s=0.0)
    assert plan.worst_link is not None
    plan = replace(plan, links=tuple(replace(link, num_bytes=0.0) for link in plan.links))
    assert draw_text.explain(plan, where).startswith("Nothing crosses a link")


# The picture


def test_every_rank_is_on_the_four_node_picture_exactly_once() -> None:
    plan = planned(FOUR)
    labels = [words for words in words_of(draw_svg.picture(plan, FOUR)) if "rank " in words]
    named = [words for words in labels if re.fullmatch(r"rank \d+", words)]
    # GPUs say "rank 2" too, so a worker with a GPU is there twice: as itself and as its user.
    with_gpu = [f"rank {each.rank}" for each in plan.ranks if each.gpu]
    assert sorted(named) == sorted([f"rank {each.rank}" for each in plan.ranks] + with_gpu)


def test_every_core_of_the_four_node_picture_shows_its_rank() -> None:
    plan = planned(FOUR)
    shown = [words for words in words_of(draw_svg.picture(plan, FOUR)) if words.isdigit()]
    assert sorted(shown) == sorted(str(each.rank) for each in plan.ranks for _ in each.cores)


@pytest.mark.parametrize(("num_racks", "per_rack"), [(2, 2), (4, 16), (32, 32)])
def test_the_loads_in_the_picture_are_those_of_the_plan(num_racks: int, per_rack: int) -> None:
    where = cluster(num_racks, per_rack)
    plan = planned(where, workers=7, servers_every=2)
    svg = draw_svg.picture(plan, where)
    lines = {line for title in titles_of(svg) for line in title.splitlines()}
    labels = "\n".join(words_of(svg))
    for link in plan.links:
        share = f"{100 * link.seconds / plan.cost_s:.0f} %"
        told = f"{size(link.num_bytes)} each way in one exchange, {duration(link.seconds)} at"
        assert any(line.startswith(f"{link.name}: {told}") for line in lines)
        if link.kind == "switch" or len(where.nodes) <= draw_svg.MAX_FULL:
            at = f"{duration(link.seconds)} at {speed(link.bytes_per_s)} · {share}"
            assert at in labels or f"{duration(link.seconds)} · {share}" in labels
        else:
            assert f"\n{share}\n" in labels
    assert labels.count("worst link: ") == 1


def test_the_title_has_the_time_and_the_lines_below_it_bound_and_gain() -> None:
    plan = planned(FOUR)
    title, *rest = words_of(draw_svg.picture(plan, FOUR))
    assert (
        title
        == f"One exchange takes {duration(plan.cost_s)} (links): 4 servers, 16 workers on 4 nodes"
    )
    assert "0.5 % above the lower bound" in rest[0]
    assert "block" in rest[1]
    assert "2.63 times as long" in rest[1]


def boxes(svg: str) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right, bottom (estimated) and words of all labels."""
    found = []
    for element in texts(svg):
        words, height = element.text or "", float(element.attrib["font-size"])
        bold = element.get("font-weight") == "bold"
        width = svg_canvas.text_width(words, height, bold=bold)
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        x -= {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        found.append((x, y - 0.75 * height, x + width, y + 0.2 * height, words))
    return found


def long_names() -> Cluster:
    found = cluster(1, 8, prefix="a-rather-long-name-of-a-host-")
    named = (replace(each, name=f"{each.name}-" + "long" * 60) for each in found.switches)
    return replace(found, switches=tuple(named))


@pytest.mark.parametrize("where", [FOUR, long_names()])
def test_no_two_labels_of_a_picture_in_full_overlap(where: Cluster) -> None:
    svg = draw_svg.picture(planned(where, workers=5), where)
    width = float(ElementTree.fromstring(svg).attrib["viewBox"].split()[2])
    found = boxes(svg)
    for index, (left, top, right, bottom, words) in enumerate(found):
        assert left >= 0
        assert right <= width, words
        for left2, top2, right2, bottom2, words2 in found[index + 1 :]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, (words, words2)


def test_no_two_labels_of_a_picture_in_boxes_overlap() -> None:
    where = cluster(4, 16, prefix="compute-node-")
    found = sorted(
        boxes(draw_svg.picture(planned(where, workers=7), where)), key=lambda box: box[1]
    )
    for index, (left, top, right, bottom, words) in enumerate(found):
        for left2, top2, right2, bottom2, words2 in found[index + 1 :]:
            if top2 >= bottom:
                break
            apart = right <= left2 or right2 <= left or bottom2 <= top
            assert apart, (words, words2)


def test_hostile_names_leave_the_picture_well_formed_and_without_scripts() -> None:
    plan, where = hostile()
    svg = draw_svg.picture(plan, where)
    svg.encode("utf-8")
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
    assert tags <= {"svg", "title", "rect", "path", "text"}
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", svg)


def test_the_picture_of_a_large_cluster_marks_its_worst_link_and_names_its_nodes() -> None:
    where = cluster(32, 32)
    svg = draw_svg.picture(planned(where, workers=7, servers_every=4), where)
    assert {"n[1-32]", "n[993-1024]"} <= {word.partition(",")[0] for word in words_of(svg)}
    hovered = "\n".join(titles_of(svg))
    assert all(f"{node.name}: 2 packages" in hovered for node in where.nodes)


def test_many_devices_are_counted_and_not_all_drawn() -> None:
    of = machine()
    functions = tuple(
        replace(of.nics[0], names=(f"vf{i}",), pci=f"0000:17:{i:02x}.0") for i in range(60)
    )
    of = replace(of, devices=(*of.gpus, *functions))
    where = cluster(2, 2, of=of)
    words = words_of(draw_svg.picture(planned(where), where))
    assert words.count("and 53 more") == 4
    assert words.count("NIC vf6") == 4
    assert "NIC vf7" not in words
