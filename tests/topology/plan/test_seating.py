"""Seats inside a host: whole cores, close together, beside the GPU or the network card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.topology.machine import UNKNOWN, Core, Device, Machine, NumaNode, Package
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.machine.cards import network_cards
from psdist.topology.plan.gpu_shares import Role, compute_gpus, package_of
from psdist.topology.plan.seating import Seat, nearest_to_network, seat
from tests.support.machine_files import REAL_FOLDER, SHAPES, machine_file, real
from tests.support.seats import complaints


def machine(
    *,
    packages: int = 2,
    numa: int = 1,
    cores: int = 4,
    threads: int = 1,
    first: int = 0,
    gpus: Sequence[int] = (),
    nic: int = UNKNOWN,
    kinds: Sequence[int] = (),
) -> Machine:
    """``numa`` nodes in each package, ``cores`` cores in each; GPUs and the card by package."""
    made: list[Core] = []
    for package in range(packages):
        for node in range(numa):
            for _ in range(cores):
                number = len(made)
                cpus = tuple(first + number * threads + thread for thread in range(threads))
                home = package * numa + node
                made.append(
                    Core(
                        logical=number,
                        cpus=cpus,
                        package=package,
                        numa=home,
                        l3=home,
                        kind=kinds[number] if kinds else 0,
                    )
                )

    def cpus_of(package: int) -> frozenset[int]:
        return frozenset(cpu for core in made if core.package == package for cpu in core.cpus)

    devices = [
        Device(
            kind="gpu",
            names=(f"cuda{index}",),
            pci=f"0000:{index:02x}:00.0",
            cpus=cpus_of(package),
            package=package,
            numa=UNKNOWN,
        )
        for index, package in enumerate(gpus)
    ]
    if nic != UNKNOWN:
        devices.append(
            Device(kind="nic", names=("ib0",), pci="", cpus=cpus_of(nic), package=nic, numa=UNKNOWN)
        )
    return Machine(
        name="n1",
        packages=tuple(Package(os_index=p, cpus=cpus_of(p)) for p in range(packages)),
        dies=(),
        numa_nodes=tuple(
            NumaNode(os_index=n, cpus=frozenset(), memory_bytes=0, is_dram=True)
            for n in range(packages * numa)
        ),
        l3_groups=(),
        cores=tuple(made),
        devices=tuple(devices),
    )


MACHINES = st.builds(
    machine,
    packages=st.integers(1, 3),
    numa=st.integers(1, 2),
    cores=st.integers(1, 5),
    threads=st.integers(1, 2),
    first=st.sampled_from([0, 8]),
    gpus=st.lists(st.integers(0, 0), max_size=4),
    nic=st.sampled_from([UNKNOWN, 0]),
)
ROLES = st.lists(st.sampled_from(["server", "worker"]), min_size=1, max_size=8)


@given(MACHINES, ROLES)
def test_everybody_gets_whole_cores_and_no_core_twice(here: Machine, roles: list[Role]) -> None:
    seats = seat(here, roles)
    if len(here.cores) < len(roles):
        assert all(each.cores == () and each.cpus == () for each in seats)
        return
    assert complaints(here, roles, seats) == []
    cpus = {core.logical: core.cpus for core in here.cores}
    for each in seats:
        assert each.cpus == tuple(sorted(cpu for core in each.cores for cpu in cpus[core]))


@given(MACHINES, ROLES, st.integers(1, 9))
def test_a_servers_need_never_makes_shares_unequal_or_leaves_somebody_without_a_core(
    here: Machine, roles: list[Role], needed: int
) -> None:
    if len(here.cores) >= len(roles):
        seats = seat(here, roles, server_cores=needed)
        assert complaints(here, roles, seats) == []
        assert all(
            1 <= len(each.cores) <= needed
            for each, role in zip(seats, roles, strict=True)
            if role == "server"
        )


@pytest.mark.parametrize(
    "name", [*SHAPES, *real(*(path.name for path in REAL_FOLDER.glob("*.xml")))]
)
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("are_one_group", [False, True])
def test_on_every_machine_workers_begin_beside_their_gpus_with_equal_shares(
    name: str, workers: int, servers: int, are_one_group: bool
) -> None:
    here = hwloc_xml.read(machine_file(name))
    roles: list[Role] = ["server"] * servers + ["worker"] * workers
    if len(here.cores) >= len(roles):
        seats = seat(here, roles, server_cores=3, are_one_group=are_one_group)
        assert complaints(here, roles, seats) == []


@pytest.mark.parametrize(
    ("here", "workers", "shares"),
    [
        (machine(packages=2, cores=32), 2, [30, 29]),
        (machine(packages=2, cores=32), 8, [8, 8, 8, 8, 8, 7, 7, 7]),
        (machine(packages=4, cores=24), 5, [12, 12, 13, 13, 13]),
    ],
)
def test_workers_have_equal_shares_and_the_server_what_it_needs(
    here: Machine, workers: int, shares: list[int]
) -> None:
    seats = seat(here, ["server", *["worker"] * workers], server_cores=3)
    assert len(seats[0].cores) == 3
    assert sorted(len(each.cores) for each in seats[1:]) == sorted(shares)
    assert UNKNOWN not in {each.package for each in seats}


def nodes_of(here: Machine, found: Seat) -> list[int]:
    """The NUMA nodes of a seat, first that of its first core."""
    by_number = {core.logical: core.numa for core in here.cores}
    return list(dict.fromkeys(by_number[core] for core in found.cores))


def test_a_share_larger_than_a_numa_node_begins_beside_its_gpu_and_grows() -> None:
    """Four quarters: GPUs count in another order than the nodes that they hang on."""
    here = hwloc_xml.read(machine_file("four-quarters.xml"))
    seats = seat(here, ["worker", "worker"])
    home = {gpu.pci: gpu.numa for gpu in here.gpus}
    assert [nodes_of(here, each)[0] for each in seats] == [home[each.gpu] for each in seats]
    assert all(len(nodes_of(here, each)) == 2 for each in seats)


def test_of_two_sockets_with_gpus_at_some_nodes_every_worker_has_the_node_of_its_gpu() -> None:
    here = hwloc_xml.read(machine_file("eight-quarters.xml"))
    seats = seat(here, ["worker"] * 4)
    home = {gpu.pci: gpu.numa for gpu in here.gpus}
    for each in seats:
        mine = {core.logical for core in here.cores if core.numa == home[each.gpu]}
        assert mine <= set(each.cores)
        assert nodes_of(here, each)[0] == home[each.gpu]


def test_a_worker_that_is_alone_on_its_host_gets_all_of_it_from_its_gpu_on() -> None:
    here = machine(cores=4, gpus=(1,))
    (alone,) = seat(here, ["worker"])
    assert sorted(alone.cores) == list(range(8))
    assert alone.package == UNKNOWN
    assert {len(each.cores) for each in seat(here, ["worker", "server"])} == {1, 4}


def test_workers_sit_beside_their_gpus_and_servers_beside_the_network_card() -> None:
    here = machine(cores=6, gpus=(1, 0, 0), nic=1)
    seats = seat(here, ["server", "worker", "worker", "worker"])
    assert [each.package for each in seats] == [1, 1, 0, 0]
    assert [each.gpu for each in seats] == ["", "0000:00:00.0", "0000:01:00.0", "0000:02:00.0"]
    assert {each.nic for each in seats} == {"ib0"}
    without_card = seat(replace(here, devices=here.gpus), ["server", "worker"])
    assert [each.package for each in without_card] == [0, 1]


def test_a_server_takes_a_core_less_rather_than_memory_behind_the_other_socket() -> None:
    here = machine(cores=6, gpus=(0, 0, 1, 1), nic=1)
    seats = seat(here, ["server", *["worker"] * 4])
    assert [len(each.cores) for each in seats] == [1, 3, 3, 3, 2]
    wide = machine(cores=24, gpus=(0, 0, 0, 0, 1, 1, 1, 1), nic=1)
    seats = seat(wide, ["server", *["worker"] * 8])
    assert [len(each.cores) for each in seats] == [1, *[6] * 7, 5]
    assert seats[0].package == 1


def test_a_fast_fabric_is_taken_before_an_ethernet_port_that_is_nearer() -> None:
    here = machine(cores=2, nic=0)
    slow = replace(here.devices[0], names=("enp3s0f0",))
    fast = replace(here.devices[0], names=("hsi0",), package=1)
    assert network_cards(replace(here, devices=(slow, fast))) == (fast,)
    seats = seat(replace(here, devices=(slow, fast)), ["server", "worker"])
    assert [(each.nic, each.package) for each in seats] == [("hsi0", 1), ("hsi0", 0)]
    assert network_cards(replace(here, devices=(slow,))) == (slow,)


def test_ranks_are_balanced_over_packages_and_numa_nodes() -> None:
    seats = seat(machine(cores=4), ["worker"] * 5)
    assert sorted(each.package for each in seats) == [0, 0, 0, 1, 1]
    seats = seat(machine(numa=2, cores=2), ["worker"] * 4)
    assert sorted(each.numa for each in seats) == [0, 1, 2, 3]


def test_gpus_that_no_runtime_has_named_count_where_none_is_named() -> None:
    here = machine(gpus=(0, 1))
    unnamed = replace(here.devices[0], names=("card0",))
    assert compute_gpus(replace(here, devices=(unnamed, here.devices[1]))) == here.devices[1:]
    assert compute_gpus(replace(here, devices=(unnamed,))) == (unnamed,)


def test_gpus_are_shared_evenly_over_the_sockets() -> None:
    here = machine(cores=8, gpus=(0, 0, 0, 0, 1, 1, 1, 1))
    seats = seat(here, ["worker", "worker"])
    assert [each.gpu for each in seats] == ["0000:00:00.0", "0000:04:00.0"]
    assert [each.package for each in seats] == [0, 1]


def test_a_worker_that_sees_one_gpu_gets_that_one_and_sits_beside_it() -> None:
    here = machine(cores=4, gpus=(0, 1))
    seats = seat(here, ["worker", "worker"], gpus=[("0000:01:00.0",), ("0000:00:00.0",)])
    assert [each.gpu for each in seats] == ["0000:01:00.0", "0000:00:00.0"]
    assert [each.package for each in seats] == [1, 0]


def test_what_a_launcher_bound_is_kept_and_the_gpu_is_chosen_for_it() -> None:
    here = machine(cores=4, gpus=(0, 1))
    masks = [frozenset({4, 5}), frozenset({0, 1})]
    seats = seat(here, ["worker", "worker"], masks=masks)
    assert [each.cpus for each in seats] == [(4, 5), (0, 1)]
    assert [each.gpu for each in seats] == ["0000:01:00.0", "0000:00:00.0"]


def test_masks_that_overlap_are_shared_out_anew() -> None:
    here = machine(cores=2)
    seats = seat(here, ["server", "worker"], masks=[here.cpus, here.cpus])
    assert [set(each.cpus) for each in seats] == [{2}, {0, 1}]


def test_more_ranks_than_cores_are_not_bound_but_know_their_package() -> None:
    here = machine(packages=1, cores=2)
    seats = seat(here, ["server", "worker", "worker"], masks=[here.cpus] * 3)
    assert [each.cpus for each in seats] == [(), (), ()]
    assert [each.package for each in seats] == [0, 0, 0]


def test_nobody_is_bound_where_binding_is_off() -> None:
    assert [each.cpus for each in seat(machine(), ["worker"] * 2, may_bind=False)] == [(), ()]


def test_a_server_leaves_the_powerful_cores_of_a_hybrid_processor_to_the_worker() -> None:
    here = machine(packages=1, cores=4, kinds=(1, 1, 0, 0))
    seats = seat(here, ["server", "worker"])
    assert [each.cores for each in seats] == [(3,), (0, 1, 2)]


def test_pus_that_start_at_eight_and_hyperthreads_are_named_as_the_system_names_them() -> None:
    here = machine(packages=1, cores=2, threads=2, first=8)
    assert [each.cpus for each in seat(here, ["server", "worker"])] == [(10, 11), (8, 9)]


def test_an_unknown_place_of_a_device_moves_nobody() -> None:
    here = machine(cores=4, gpus=(0,))
    lost = replace(here.devices[0], cpus=None, package=UNKNOWN)
    seats = seat(replace(here, devices=(lost,)), ["worker", "worker"])
    assert [each.package for each in seats] == [0, 1]


def test_the_ranks_beside_the_network_card_come_first() -> None:
    here = machine(cores=2, nic=1)
    masks = [frozenset({0}), frozenset({1}), frozenset({2}), frozenset({3})]
    assert nearest_to_network(here, masks) == [2, 3, 0, 1]
    assert nearest_to_network(machine(cores=2), masks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mask", "package"), [({0, 1, 2}, 0), ({3, 4, 5}, 1), ({2, 5}, 0), ({99}, UNKNOWN)]
)
def test_a_masks_package_is_where_most_of_it_is(mask: set[int], package: int) -> None:
    assert package_of(machine(cores=4), mask) == package


@pytest.mark.parametrize(("gpus", "workers"), [(4, 8), (4, 6), (3, 8), (8, 12), (2, 3)])
def test_workers_that_share_a_gpu_are_neighbours(gpus: int, workers: int) -> None:
    here = machine(cores=16, gpus=[index * 2 // gpus for index in range(gpus)])
    owned = [each.gpu for each in seat(here, ["worker"] * workers)]
    assert owned == sorted(owned)
    counts = Counter(owned)
    assert len(counts) == gpus
    assert max(counts.values()) - min(counts.values()) <= 1


def test_ranks_of_a_socket_take_turns_at_its_network_cards() -> None:
    here = machine(cores=8, nic=0)
    (card,) = here.devices
    cards = [
        replace(card, names=(f"hsi{index}",), pci=f"0000:{index}0:00.0", package=index // 2)
        for index in range(4)
    ]
    seats = seat(replace(here, devices=tuple(cards)), ["worker"] * 8)
    for package, names in ((0, {"hsi0": 2, "hsi1": 2}), (1, {"hsi2": 2, "hsi3": 2})):
        assert Counter(each.nic for each in seats if each.package == package) == names


def test_a_share_on_several_numa_nodes_has_the_card_where_it_begins() -> None:
    here = hwloc_xml.read(machine_file("four-quarters.xml"))
    cards = {card.name: card.numa for card in here.nics}
    seats = seat(here, ["worker", "worker"])
    assert [cards[each.nic] for each in seats] == [nodes_of(here, each)[0] for each in seats]


@pytest.mark.parametrize("name", ["nvlink-to-processors.xml", *real("power8gpudistances.v3.xml")])
def test_workers_of_a_group_get_gpus_that_nvlinks_join(name: str) -> None:
    here = hwloc_xml.read(machine_file(name))
    together = seat(here, ["worker", "worker"], are_one_group=True)
    assert [each.gpu for each in together] == ["0002:01:00.0", "0003:01:00.0"]
    assert complaints(here, ["worker", "worker"], together) == []
    apart = seat(here, ["worker", "worker"])
    assert [each.package for each in apart] == [0, 1]


@pytest.mark.parametrize(
    "name", ["nvlink-switches.xml", *real("nvidiaDGX2.v2.xml", "eas-tioga.xml")]
)
def test_workers_of_a_group_are_spread_where_all_gpus_are_joined(name: str) -> None:
    here = hwloc_xml.read(machine_file(name))
    roles: list[Role] = ["worker", "worker"]
    assert seat(here, roles, are_one_group=True) == seat(here, roles)


def test_a_worker_whose_node_is_full_takes_nobodys_place() -> None:
    """The second worker of a full package sat where the third one's GPU is."""
    here = machine(packages=4, cores=1, gpus=(1, 1, 0, 2))
    roles: list[Role] = ["worker"] * 4
    assert [each.package for each in seat(here, roles)] == [1, 3, 0, 2]
