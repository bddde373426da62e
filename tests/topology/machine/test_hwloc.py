"""lstopo's XML as machines: shapes, real ones, made ones, and what hwloc itself says of them.

Of the room hwloc, of machine, numa, codec with packed, and of text.bitmap.

Longer than other modules: the same machines are asked about every kind of object.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology import machine as machine_codec
from psdist.topology.machine import UNKNOWN, Machine
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.text import bitmap
from tests.support.machine_files import SHAPES, machine_file, real
from tests.support.mpirun import skip_or_fail
from tests.support.sys_files import bitmap_of

NAMES = (
    *SHAPES,
    *real(
        "16amd64-8n2c-cpusets.v3.xml",
        "16em64t-4s2c2t-offlines.v3.xml",
        "16intel64-manyVFs.v3.xml",
        "32em64t-2n8c2t-pci-normalio.v3.xml",
        "64intel64-heteromem.v3.xml",
        "cts1-pascal.xml",
        "eas-tioga.xml",
        "epyc-corona.xml",
        "g4dnmetal.xml",
        "memorysidecaches.v3.xml",
        "nvidiaDGX2.v2.xml",
        "nvidiaDGX2.v3.xml",
        "power8gpudistances.v3.xml",
    ),
)


@functools.cache
def machine_in(name: str) -> Machine:
    return hwloc_xml.read(machine_file(name))


def hwloc(*command: str, text: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        skip_or_fail(f"{command[0]} (Debian's hwloc) is missing", variable="PSDIST_REQUIRE_SLURM")
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


HWLOC_KINDS = {
    "package": "package",
    "die": "die",
    "numa": "numanode",
    "l3": "l3cache",
    "core": "core",
    "pu": "pu",
}


def levels(machine: Machine) -> dict[str, list[frozenset[int]]]:
    """Each level's PUs in logical order."""
    return {
        "package": [package.cpus for package in machine.packages],
        "die": list(machine.dies),
        "numa": [node.cpus for node in machine.numa_nodes],
        "l3": list(machine.l3_groups),
        "core": [frozenset(core.cpus) for core in machine.cores],
        "pu": [frozenset({cpu}) for core in machine.cores for cpu in core.cpus],
    }


def levels_by_hwloc(
    source: str, own: dict[str, list[frozenset[int]]]
) -> dict[str, list[frozenset[int]]]:
    """The same by hwloc-calc, asked for all in one run."""
    asked = [(kind, index) for kind, sets in own.items() for index in range(len(sets))]
    lines = "".join(f"{kind}:{index}\n" for kind, index in asked)
    answers = hwloc("hwloc-calc", "-i", source, "-q", text=lines).split("\n")
    masks = [answer for answer in answers if answer.startswith("0x")]
    assert len(masks) == len(asked)
    found: dict[str, list[frozenset[int]]] = {kind: [] for kind in own}
    for (kind, _), mask in zip(asked, masks, strict=True):
        found[kind].append(bitmap.members(bitmap.parse_mask(mask)))
    return found


def number_by_hwloc(source: str, kind: str) -> int:
    """0 where there is no such level, which hwloc-calc calls an error."""
    if shutil.which("lstopo-no-graphics") is None:
        skip_or_fail("lstopo (Debian's hwloc) is missing", variable="PSDIST_REQUIRE_SLURM")
    done = subprocess.run(
        ["lstopo-no-graphics", "-i", source, "--no-io", "--of", "console", "--only", kind],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def check_against_hwloc(source: str, machine: Machine) -> None:
    # What stands in for missing packages is ours, not hwloc's.
    has_packages = not any("no packages" in note for note in machine.notes)
    own = {
        kind: sets for kind, sets in levels(machine).items() if kind != "package" or has_packages
    }
    assert own == levels_by_hwloc(source, own)
    for kind, sets in own.items():
        assert len(sets) == number_by_hwloc(source, HWLOC_KINDS[kind]), kind


@pytest.mark.parametrize(
    ("name", "packages", "nodes", "l3s", "cores", "pus", "gpus", "nics"),
    [
        ("fast-memory.xml", 1, 8, 0, 8, 32, 0, 0),
        ("four-quarters.xml", 1, 4, 8, 16, 32, 4, 4),
        ("nvlink-switches.xml", 2, 2, 0, 4, 4, 8, 0),
        ("nvlink-to-processors.xml", 2, 2, 0, 4, 16, 4, 0),
        ("part-of-machine.xml", 4, 3, 4, 13, 23, 0, 0),
        ("two-sockets.xml", 2, 2, 2, 8, 16, 2, 2),
        *real(
            ("16amd64-8n2c-cpusets.v3.xml", 6, 5, 0, 10, 10, 0, 0),
            ("16em64t-4s2c2t-offlines.v3.xml", 4, 1, 4, 6, 7, 0, 0),
            ("16intel64-manyVFs.v3.xml", 2, 2, 2, 16, 16, 0, 6),
            ("32em64t-2n8c2t-pci-normalio.v3.xml", 2, 2, 2, 16, 32, 4, 3),
            ("64intel64-heteromem.v3.xml", 1, 8, 4, 16, 64, 0, 0),
            ("cts1-pascal.xml", 2, 2, 2, 36, 72, 2, 3),
            ("eas-tioga.xml", 1, 4, 8, 64, 128, 8, 5),
            ("epyc-corona.xml", 2, 8, 16, 48, 96, 4, 3),
            ("g4dnmetal.xml", 2, 2, 2, 48, 96, 8, 2),
            ("memorysidecaches.v3.xml", 2, 4, 2, 40, 80, 0, 0),
            ("nvidiaDGX2.v2.xml", 2, 2, 2, 4, 4, 16, 0),
            ("nvidiaDGX2.v3.xml", 2, 2, 2, 4, 4, 16, 0),
            ("power8gpudistances.v3.xml", 2, 2, 8, 8, 16, 4, 0),
        ),
    ],
)
def test_machines_have_what_they_have(
    name: str,
    packages: int,
    nodes: int,
    l3s: int,
    cores: int,
    pus: int,
    gpus: int,
    nics: int,
) -> None:
    machine = machine_in(name)
    assert len(machine.packages) == packages
    assert len(machine.numa_nodes) == nodes
    assert len(machine.l3_groups) == l3s
    assert len(machine.cores) == cores
    assert len(machine.cpus) == pus
    assert (len(machine.gpus), len(machine.nics)) == (gpus, nics)
    assert [core.logical for core in machine.cores] == list(range(cores))


@pytest.mark.parametrize("name", NAMES)
def test_machines_are_what_hwloc_says(name: str, tmp_path: Path) -> None:
    source = machine_file(name)
    if ".v3." in name:
        # hwloc 2.9 reads what version 3 says of processors and memory if it is told it is 2.
        text = source.read_text(encoding="utf-8").replace('version="3.0"', 'version="2.0"', 1)
        source = tmp_path / name
        source.write_text(text, encoding="utf-8")
    check_against_hwloc(str(source), machine_in(name))


@pytest.mark.parametrize("name", [*SHAPES, *real("nvidiaDGX2.v2.xml")])
def test_two_versions_of_one_file_are_the_same_machine(name: str, tmp_path: Path) -> None:
    newer = tmp_path / name
    if name in SHAPES:
        newer.write_text(in_version_3(machine_file(name).read_text("utf-8")), encoding="utf-8")
    else:
        newer = machine_file(name.replace(".v2.", ".v3."))
    assert hwloc_xml.read(newer) == machine_in(name)


def in_version_3(text: str) -> str:
    """As hwloc 3 writes it: an OS device has the sum of its types."""
    types = {"0": "1", "1": "4", "2": "16", "3": "32", "5": "12"}
    text = text.replace('<topology version="2.0">', '<topology version="3.0">')
    return re.sub(r' osdev_type="(\d)"', lambda match: f' osdev_type="{types[match[1]]}"', text)


@pytest.mark.parametrize("name", [name for name in NAMES if ".v3." not in name])
def test_devices_are_near_the_processors_that_hwloc_says(name: str) -> None:
    machine = machine_in(name)
    own = {each: device.cpus for device in machine.devices for each in device.names}
    lines = "".join(f"os={each}\n" for each in own)
    answers = hwloc("hwloc-calc", "-i", str(machine_file(name)), "-q", text=lines).split("\n")
    masks = [answer for answer in answers if answer.startswith("0x")]
    assert [bitmap.members(bitmap.parse_mask(mask)) for mask in masks] == list(own.values())


@pytest.mark.parametrize("name", NAMES)
def test_machines_travel_between_ranks_unchanged(name: str) -> None:
    machine = machine_in(name)
    packed = json.loads(json.dumps(machine_codec.pack(machine)))
    assert machine_codec.unpack(packed) == machine
    assert len(json.dumps(packed)) < 10_000


@pytest.mark.parametrize("name", NAMES)
def test_indices_of_cores_and_devices_lead_to_what_contains_them(name: str) -> None:
    machine = machine_in(name)
    for core in machine.cores:
        assert set(core.cpus) <= machine.packages[core.package].cpus
        assert core.numa == UNKNOWN or set(core.cpus) <= machine.numa_nodes[core.numa].cpus
        assert core.l3 == UNKNOWN or set(core.cpus) <= machine.l3_groups[core.l3]
    for device in machine.devices:
        assert device.cpus is not None
        assert device.cpus <= machine.packages[device.package].cpus
        assert device.numa == UNKNOWN or device.cpus <= machine.numa_nodes[device.numa].cpus


@pytest.mark.parametrize(
    ("name", "gpus", "nics"),
    [
        (
            "four-quarters.xml",
            {"rsmi3": ("0000:d1:00.0", 0), "rsmi0": ("0000:c1:00.0", 3)},
            {"hsi0": 3, "hsi1": 2, "hsi2": 0, "hsi3": 1},
        ),
        *real(
            (
                "eas-tioga.xml",
                {"rsmi4": ("0000:d1:00.0", 0), "rsmi0": ("0000:c1:00.0", 3)},
                {"hsi0": 3, "hsi1": 1, "hsi2": 0, "hsi3": 2},
            )
        ),
    ],
)
def test_gpus_are_joined_by_bus_id_since_their_order_is_not_that_of_numa_nodes(
    name: str, gpus: dict[str, tuple[str, int]], nics: dict[str, int]
) -> None:
    machine = machine_in(name)
    numbers = {gpu.names[0]: (gpu.pci, gpu.numa) for gpu in machine.gpus}
    assert numbers == numbers | gpus
    assert {nic.name: nic.numa for nic in machine.nics if nic.name.startswith("hsi")} == nics


@pytest.mark.parametrize(
    ("name", "uuid", "bytes_per_s", "nic_names", "port_guid"),
    [
        (
            "two-sockets.xml",
            "GPU-00000000-1111-2222-3333-444444444444",
            31.507692e9,
            ("ib0", "mlx5_0"),
            0x0011223344556677,
        ),
        *real(
            (
                "cts1-pascal.xml",
                "GPU-affad486-897e-9778-18e8-26a7127927a8",
                15.753846e9,
                ("hsi0", "mlx5_0"),
                0xEC0D9A030067FDD4,
            )
        ),
    ],
)
def test_one_function_with_many_names_is_one_device(
    name: str, uuid: str, bytes_per_s: float, nic_names: tuple[str, ...], port_guid: int
) -> None:
    gpu, *_ = machine_in(name).gpus
    assert gpu.names == ("cuda0", "nvml0", "opencl0d0")
    assert gpu.uuid == uuid
    assert gpu.bytes_per_s == pytest.approx(bytes_per_s)
    nic = machine_in(name).nics[0]
    assert nic.names == nic_names
    assert nic.port_guids == (port_guid,)


@pytest.mark.parametrize(
    ("name", "gpus", "nics"),
    [
        ("two-sockets.xml", [0, 0], [0, 1]),
        *real(("g4dnmetal.xml", [0, 0, 0, 0, 1, 1, 1, 1], [1, 1])),
    ],
)
def test_the_nic_on_the_second_socket_is_there(name: str, gpus: list[int], nics: list[int]) -> None:
    assert [nic.package for nic in machine_in(name).nics] == nics
    assert [gpu.package for gpu in machine_in(name).gpus] == gpus


@pytest.mark.parametrize(
    ("name", "count"), [("two-sockets.xml", 4), *real(("16intel64-manyVFs.v3.xml", 12))]
)
def test_virtual_functions_without_a_driver_are_left_out_with_a_note(name: str, count: int) -> None:
    machine = machine_in(name)
    assert all(nic.names for nic in machine.nics)
    assert any(note.startswith(f"{count} network functions") for note in machine.notes)


@pytest.mark.parametrize(
    ("name", "dram", "of_cores", "memory_bytes"),
    [
        ("fast-memory.xml", [1, 3, 5, 7], {1, 3, 5, 7}, 64_000_000_000),
        *real(("64intel64-heteromem.v3.xml", [0, 1, 2, 3], {0, 2, 4, 6}, 4 << 30)),
    ],
)
def test_fast_memory_beside_dram_is_not_ordinary_memory(
    name: str, dram: list[int], of_cores: set[int], memory_bytes: int
) -> None:
    machine = machine_in(name)
    assert [node.os_index for node in machine.numa_nodes if node.is_dram] == dram
    assert {core.numa for core in machine.cores} == of_cores
    assert machine.memory_bytes == memory_bytes


@pytest.mark.parametrize(
    ("name", "gpus_of_a_board", "switches_of_a_board"),
    [("nvlink-switches.xml", 4, 3), *real(("nvidiaDGX2.v2.xml", 8, 6))],
)
def test_gpus_behind_switches_are_linked_also_between_boards(
    name: str, gpus_of_a_board: int, switches_of_a_board: int
) -> None:
    links = machine_in(name).links
    # Each GPU has 25 GB/s to each switch of its board; trunks join the two boards.
    num_gpus = 2 * gpus_of_a_board
    assert len(links) == num_gpus * (num_gpus - 1) // 2
    assert {link.bytes_per_s for link in links} == {switches_of_a_board * 25e9}


@pytest.mark.parametrize("name", ["nvlink-to-processors.xml", *real("power8gpudistances.v3.xml")])
def test_gpus_are_linked_to_each_other_and_to_the_processor(name: str) -> None:
    links = {(link.first, link.second): link for link in machine_in(name).links}
    assert links["0002:01:00.0", "0003:01:00.0"].bytes_per_s == 40e9
    assert links["0002:01:00.0", ""].bytes_per_s == 40e9
    assert ("0002:01:00.0", "000a:01:00.0") not in links


@pytest.mark.parametrize(
    ("name", "nodes", "of_cores"),  # of the first cores
    [
        ("part-of-machine.xml", [0, 2, 3], [0, 0, 0, *[UNKNOWN] * 4, 1, 1, 1, 1, 2, 2]),
        *real(("16amd64-8n2c-cpusets.v3.xml", [1, 2, 3, 5, 4], [UNKNOWN, UNKNOWN, 0, 0])),
    ],
)
def test_cores_whose_memory_is_not_allowed_have_no_numa_node(
    name: str, nodes: list[int], of_cores: list[int]
) -> None:
    machine = machine_in(name)
    assert [node.os_index for node in machine.numa_nodes] == nodes
    assert [core.numa for core in machine.cores][: len(of_cores)] == of_cores


# Machines that lstopo makes. Levels from the outside in, as hwloc's synthetic descriptions.
def synthetic(shape: str, *, version: int = 2, extra: tuple[str, ...] = ()) -> str:
    flags = ("--export-xml-flags", "1") if version == 1 else ()
    return hwloc("lstopo-no-graphics", "--input", shape, *extra, *flags, "--of", "xml")


@st.composite
def shapes(draw: st.DrawFn) -> str:
    levels_out_in = [
        (draw(st.sampled_from(("pack", ""))), 3),
        (draw(st.sampled_from(("die", ""))), 2),
        (draw(st.sampled_from(("numa", "", "group"))), 2),
        (draw(st.sampled_from(("l3", ""))), 2),
        (draw(st.sampled_from(("l2", ""))), 2),
        ("core", 4),
        ("pu", 4),
    ]
    parts = [f"{name}:{draw(st.integers(1, most))}" for name, most in levels_out_in if name]
    if draw(st.booleans()):
        # Numbers of the kernel that run across the tree.
        parts[-1] += f"(indexes={draw(st.sampled_from(('core:pu', 'pu:core')))})"
    return " ".join(parts)


def check_shape(shape: str, version: int, folder: Path) -> None:
    text = synthetic(shape, version=version)
    source = folder / "made.xml"
    source.write_text(text, encoding="utf-8")
    machine = hwloc_xml.parse(text)
    check_against_hwloc(str(source), machine)
    assert frozenset().union(*levels(machine)["package"]) == machine.cpus
    assert machine_codec.unpack(machine_codec.pack(machine)) == machine


@settings(max_examples=25)
@given(shape=shapes(), version=st.sampled_from((1, 2)))
def test_made_machines_are_what_hwloc_says(
    shape: str, version: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_shape(shape, version, tmp_path_factory.mktemp("made"))


@pytest.mark.slow
@settings(max_examples=500)
@given(shape=shapes(), version=st.sampled_from((1, 2)))
def test_many_made_machines_are_what_hwloc_says(
    shape: str, version: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_shape(shape, version, tmp_path_factory.mktemp("made"))


def test_the_old_format_says_the_same_of_a_machine_as_the_new() -> None:
    shape = "pack:2 die:2 numa:2 l3:2 core:2 pu:2"
    old, new = (hwloc_xml.parse(synthetic(shape, version=version)) for version in (1, 2))
    assert levels(old) == levels(new)
    assert [core.numa for core in old.cores] == [core.numa for core in new.cores]
    assert len(new.dies) == 4


def test_a_missing_package_level_falls_back_to_numa_nodes() -> None:
    text = synthetic("numa:2 core:2 pu:1")
    machine = hwloc_xml.parse(text.replace('type="Group"', 'type="Misc"'))
    assert [package.cpus for package in machine.packages] == [{0, 1}, {2, 3}]
    assert [core.package for core in machine.cores] == [0, 0, 1, 1]
    assert any("NUMA nodes count as packages" in note for note in machine.notes)


def test_a_missing_package_level_falls_back_to_groups_first() -> None:
    machine = hwloc_xml.parse(synthetic("group:2 core:2 pu:1"))
    assert [package.cpus for package in machine.packages] == [{0, 1}, {2, 3}]
    assert any("groups count as packages" in note for note in machine.notes)


def test_a_machine_without_any_level_is_one_package_and_each_pu_a_core() -> None:
    xml = machine_xml("".join(f'<object type="PU" os_index="{cpu}"/>' for cpu in (8, 9)))
    machine = hwloc_xml.parse(xml)
    assert [core.cpus for core in machine.cores] == [(8,), (9,)]
    assert [package.cpus for package in machine.packages] == [{8, 9}]
    assert [node.cpus for node in machine.numa_nodes] == [{8, 9}]
    assert len(machine.notes) == 2


def machine_xml(inside: str, *, version: str = "2.0", after: str = "", root: str = "") -> str:
    return (
        f'<!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology version="{version}">'
        f'<object type="Machine" {root}>{inside}</object>{after}</topology>'
    )


def core_xml(number: int, *cpus: int) -> str:
    pus = "".join(f'<object type="PU" os_index="{cpu}"/>' for cpu in cpus)
    mask = bitmap_of(cpus)
    return f'<object type="Core" os_index="{number}" cpuset="{mask}">{pus}</object>'


def package_xml(number: int, *cpus: int, inside: str = "") -> str:
    cores = "".join(core_xml(cpu, cpu) for cpu in cpus)
    mask = bitmap_of(cpus)
    return f'<object type="Package" os_index="{number}" cpuset="{mask}">{cores}{inside}</object>'


TWO_PACKAGES = package_xml(0, 0, 1) + package_xml(1, 2, 3)


def test_only_pus_that_are_online_and_allowed_are_there() -> None:
    xml = machine_xml(TWO_PACKAGES, root='cpuset="0x7" allowed_cpuset="0xe"')
    machine = hwloc_xml.parse(xml)
    assert [core.cpus for core in machine.cores] == [(1,), (2,)]
    assert [core.logical for core in machine.cores] == [0, 1]


def test_siblings_count_by_their_first_pu_and_not_by_their_place_in_the_file() -> None:
    xml = machine_xml(package_xml(1, 2, 3) + package_xml(0, 0, 1))
    assert [package.os_index for package in hwloc_xml.parse(xml).packages] == [0, 1]


@pytest.mark.parametrize(("version", "kind"), [("2.0", None), ("3.0", "gpu")])
def test_the_number_of_a_device_type_means_other_things_in_version_3(
    version: str, kind: str | None
) -> None:
    device = '<object type="OSDev" name="x0" osdev_type="4"/>'  # DMA in 2, GPU in 3
    machine = hwloc_xml.parse(machine_xml(package_xml(0, 0) + device, version=version))
    assert [each.kind for each in machine.devices] == ([kind] if kind else [])


def pci_xml(bus: str, kind: str, inside: str = "") -> str:
    return (
        f'<object type="Bridge" bridge_type="0-1"><object type="PCIDev" pci_busid="{bus}" '
        f'pci_type="{kind} [0000:0000] 00">{inside}</object></object>'
    )


def test_a_device_below_the_machine_has_an_unknown_place() -> None:
    xml = machine_xml(TWO_PACKAGES + pci_xml("0000:3B:00.0", "0302 [10de:1db8]"))
    machine = hwloc_xml.parse(xml)
    (gpu,) = machine.gpus
    assert (gpu.pci, gpu.cpus, gpu.package, gpu.numa) == ("0000:3b:00.0", None, UNKNOWN, UNKNOWN)
    assert any("1 of 1 devices" in note for note in machine.notes)


def test_a_device_below_a_machine_of_one_package_is_near_all_of_it() -> None:
    xml = machine_xml(package_xml(0, 0, 1) + pci_xml("0000:3b:00.0", "0207 [15b3:1017]"))
    (nic,) = hwloc_xml.parse(xml).nics
    assert (nic.cpus, nic.package, nic.numa) == ({0, 1}, 0, 0)


@pytest.mark.parametrize("name", ["card0", "controlD64", "renderD128", ":0.0"])
@pytest.mark.parametrize("chip", ["1a03:2000", "102b:0532", "1b73:0001"])
def test_a_console_of_a_management_controller_is_no_gpu_and_is_said(name: str, chip: str) -> None:
    card = f'<object type="OSDev" name="{name}" osdev_type="1"/>'
    xml = machine_xml(package_xml(0, 0, inside=pci_xml("0000:03:00.0", f"0300 [{chip}]", card)))
    machine = hwloc_xml.parse(xml)
    assert machine.devices == ()
    assert machine.notes == ("for display only, no GPU to compute on: 0000:03:00.0",)


def test_a_screen_without_a_pci_function_is_no_gpu() -> None:
    xml = machine_xml(
        package_xml(0, 0, inside='<object type="OSDev" name="card0" osdev_type="1"/>')
    )
    assert hwloc_xml.parse(xml).devices == ()


def test_a_display_that_a_compute_runtime_names_is_a_gpu() -> None:
    names = '<object type="OSDev" name="opencl0d0" subtype="OpenCL" osdev_type="5"/>'
    xml = machine_xml(package_xml(0, 0, inside=pci_xml("0000:03:00.0", "0300 [1b73:0001]", names)))
    machine = hwloc_xml.parse(xml)
    assert [gpu.names for gpu in machine.gpus] == [("opencl0d0",)]
    assert machine.notes == ()


def test_slingshot_is_a_network_card_by_either_name() -> None:
    for name, number in (("hsi0", 2), ("cxi0", 3)):
        device = f'<object type="OSDev" name="{name}" osdev_type="{number}"/>'
        inside = pci_xml("0000:d5:00.0", "0200 [17db:0501]", device)
        (nic,) = hwloc_xml.parse(machine_xml(package_xml(0, 0, inside=inside))).nics
        assert nic.names == (name,)


def test_without_os_devices_network_cards_are_known_by_their_class() -> None:
    inside = pci_xml("0000:d5:00.0", "0200 [17db:0501]")
    (nic,) = hwloc_xml.parse(machine_xml(package_xml(0, 0, inside=inside))).nics
    assert nic.name == "0000:d5:00.0"


def numa_xml(number: int, *, memory: int, gp: int = 0, subtype: str = "") -> str:
    return (
        f'<object type="NUMANode" os_index="{number}" cpuset="0x3" gp_index="{gp}" '
        f'local_memory="{memory}" subtype="{subtype}"/>'
    )


def test_dram_is_picked_by_size_where_nothing_else_tells_it() -> None:
    nodes = numa_xml(0, memory=16) + numa_xml(8, memory=96)
    machine = hwloc_xml.parse(machine_xml(package_xml(0, 0, 1, inside=nodes)))
    assert [(node.os_index, node.is_dram) for node in machine.numa_nodes] == [(0, False), (8, True)]
    assert {core.numa for core in machine.cores} == {1}


@pytest.mark.parametrize(
    ("first", "second", "dram"),
    [(90_000, 22_500, 1), (22_500, 90_000, 0), (100, 60, 0)],  # HBM is twice as fast, or more
)
def test_dram_is_picked_by_bandwidth_before_size(first: int, second: int, dram: int) -> None:
    nodes = numa_xml(0, memory=96, gp=5) + numa_xml(1, memory=96, gp=6)
    values = "".join(
        f'<memattr_value target_obj_type="NUMANode" target_obj_gp_index="{gp}" value="{value}"/>'
        for gp, value in ((5, first), (6, second))
    )
    after = f'<memattr name="Bandwidth">{values}</memattr>'
    machine = hwloc_xml.parse(machine_xml(package_xml(0, 0, 1, inside=nodes), after=after))
    assert [node.is_dram for node in machine.numa_nodes] == [dram == 0, dram == 1]


def test_kinds_of_cores_are_ranked_by_their_type_and_not_by_frequency() -> None:
    def kinds(name: str, first: str, second: str) -> list[int]:
        after = "".join(
            f'<cpukind cpuset="{mask}"><info name="{name}" value="{value}"/></cpukind>'
            for mask, value in (("0x3", first), ("0xc", second))
        )
        machine = hwloc_xml.parse(machine_xml(TWO_PACKAGES, after=after))
        return [core.kind for core in machine.cores]

    assert kinds("CoreType", "IntelCore", "IntelAtom") == [1, 1, 0, 0]
    assert kinds("LinuxCapacity", "446", "1024") == [0, 0, 1, 1]
    assert kinds("FrequencyMaxMHz", "3000", "3100") == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["n1;rm -rf", "$(id)", "-n", "a b", "n\u00e9"])
def test_a_host_name_with_other_characters_is_left_out_with_a_note(name: str) -> None:
    info = f'<info name="HostName" value="{name}"/>'
    machine = hwloc_xml.parse(machine_xml(info + TWO_PACKAGES))
    assert machine.name == ""
    assert any("host name" in note for note in machine.notes)


def test_the_host_name_stands_at_the_top_in_version_3() -> None:
    after = '<info name="HostName" value="n17.cluster"/>'
    assert hwloc_xml.parse(machine_xml(TWO_PACKAGES, version="3.0", after=after)).name == (
        "n17.cluster"
    )


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ("", "XML:1: not XML (no element found); give the output of lstopo --of xml"),
        (
            "<a/>",
            "XML:1: its first element is 'a', not topology; give the output of lstopo --of xml",
        ),
        (
            machine_xml(TWO_PACKAGES, version="4.0"),
            "XML:1: topology version '4.0' is none of 1, 2 and 3; give the output of "
            "lstopo --of xml",
        ),
        (
            machine_xml(""),
            "XML: no PU in it is online and allowed; export the machine again, inside the job",
        ),
        (
            machine_xml(TWO_PACKAGES, root='cpuset="0xf...f"'),
            "XML:1: cpuset: bitmap '0xf...f' is infinite: it names no PUs; export the machine "
            "again; give the output of lstopo --of xml",
        ),
        (
            machine_xml(core_xml(0, 3) + core_xml(1, 3)),
            "XML: PU 3 is in it twice; export the machine again",
        ),
    ],
)
def test_what_is_no_machine_is_refused_in_one_line(xml: str, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        hwloc_xml.parse(xml)
    assert str(caught.value) == message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"none\.xml: cannot be read \(No such file"):
        hwloc_xml.read(tmp_path / "none.xml")


@given(st.frozensets(st.integers(0, 300)))
def test_sets_of_pus_survive_both_notations(cpus: frozenset[int]) -> None:
    assert bitmap.members(bitmap.parse_mask(bitmap_of(cpus))) == cpus
    assert bitmap.parse_list(bitmap.format_list(cpus)) == cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0x00000001,,0x0", {64}),
        ("0x0", set()),
        ("", set()),
        ("f", {0, 1, 2, 3}),
        ("0x80000000,0x00000001", {0, 63}),
    ],
)
def test_bitmaps_are_groups_of_32_with_the_highest_first(text: str, cpus: set[int]) -> None:
    assert bitmap.members(bitmap.parse_mask(text)) == cpus


@pytest.mark.parametrize(
    "text",
    ["0xf...f", "0x", "x", "0x1,0x", "10x1", "0x1x1", "0x123456789", "-1", " 1", "0x1;", "," * 512],
)
def test_other_bitmaps_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match=r"^bitmap"):
        bitmap.members(bitmap.parse_mask(text))


@pytest.mark.parametrize("text", ["3-1", "a", "1,", "1-", "0-99999999", "0:3", "1 2", "," * 99_999])
def test_other_lists_of_cpus_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match=r"^CPU list"):
        bitmap.parse_list(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format: 2 is not format 1"),
        ({"name": "a b"}, "name is 'a b', not a host name"),
        ({"cores": [[0, "0", 7, 0, 0, 0]]}, r"cores\[0\].package is 7, not below 1"),
        ({"cores": [[0, "", 0, 0, -1, 0]]}, r"cores\[0\].cpus is '', not the PUs of a core"),
        ({"cores": [[0, "0", 0, 0, -1, 0]] * 2}, "cores share a PU"),
        ({"cores": [[0, "0-99999999", 0, 0, -1, 0]]}, "runs backwards or beyond"),
        ({"cores": [[0, "0", 0, 0, -1]]}, r"cores\[0\] is a list, not 6 fields"),
        ({"cores": [[0, "0", -1, 0, -1, 0]]}, r"package is -1, not the package of a core"),
        ({"cores": [[True, "0", 0, 0, -1, 0]]}, r"cores\[0\].logical is True, not a whole number"),
        ({"dies": ["0-16383"] * 62}, r"dies\[61\] is one of sets with more than 1,000,000 PUs"),
        ({"more": 1}, "the content has the unknown key 'more'"),
        ({"packages": 5}, "packages is 5, not a list"),
        ({"links": [["a", "b", float("nan")]]}, r"links\[0\].bytes_per_s is nan, not less than 1"),
        ({"notes": ["a\nb"]}, r"notes\[0\] is 'a\\nb', not at most"),
    ],
)
def test_packed_machines_are_checked_on_arrival(change: dict[str, object], message: str) -> None:
    packed = machine_codec.pack(hwloc_xml.parse(machine_xml(package_xml(0, 0))))
    with pytest.raises(PlacementError, match=message):
        machine_codec.unpack({**packed, **change})
