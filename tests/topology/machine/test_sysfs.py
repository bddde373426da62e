"""Machines out of /sys: made-up trees in a folder, and this machine; and which source is asked.

The subjects are live, sysfs, kernel_files and pci.

Longer than other modules: made-up machines and what is asked of them stand together.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from psdist.errors import PlacementError
from psdist.topology import machine as machine_codec
from psdist.topology.machine import UNKNOWN, Machine, live, pci, sysfs
from psdist.topology.machine import hwloc as hwloc_xml
from tests.support.mpirun import skip_or_fail
from tests.support.sys_files import CPU, Root, two_sockets


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def by_lstopo(folder: Path) -> Machine:
    """What hwloc reads from the same files; without -x86 it would add this processor's own."""
    program = shutil.which("lstopo-no-graphics")
    if program is None:
        skip_or_fail("lstopo (Debian's hwloc) is missing", variable="PSDIST_REQUIRE_SLURM")
    done = subprocess.run(
        [program, "-i", str(folder), "--if", "fsroot", "--of", "xml"],
        env={**os.environ, "HWLOC_COMPONENTS": "-x86"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return hwloc_xml.parse(done.stdout)


def check_like_lstopo(folder: Path) -> Machine:
    own, other = sysfs.read_machine(folder), by_lstopo(folder)
    assert own.cores == other.cores
    assert own.packages == other.packages
    assert own.dies == other.dies
    assert own.l3_groups == other.l3_groups
    assert [node.cpus for node in own.numa_nodes] == [node.cpus for node in other.numa_nodes]
    return own


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_two_sockets_are_what_lstopo_makes_of_the_same_files(
    root: Root, is_interleaved: bool
) -> None:
    machine = check_like_lstopo(two_sockets(root, is_interleaved=is_interleaved).path)
    assert machine.name == "n7"
    assert len(machine.cores) == 8
    assert machine.memory_bytes == 8 << 30
    assert [core.package for core in machine.cores] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert machine.cores[1].cpus == ((2, 10) if is_interleaved else (1, 9))
    assert [core.l3 for core in machine.cores] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_pus_may_start_at_8_and_nodes_may_be_0_and_8(root: Root) -> None:
    for first, node in ((8, 0), (16, 8)):
        cpus = range(first, first + 4)
        for cpu in cpus:
            root.cpu(cpu, package=node, core=(cpu,), l3=cpus)
        root.packages({(node, 0): cpus})
        root.node(node, cpus)
    root.online([*range(8, 12), *range(16, 20)])
    machine = check_like_lstopo(root.path)
    assert [package.os_index for package in machine.packages] == [0, 8]
    assert [node.os_index for node in machine.numa_nodes] == [0, 8]
    assert machine.cores[0].cpus == (8,)


def test_dies_are_there_where_a_package_has_several(root: Root) -> None:
    groups = {(0, 0): (0, 1), (0, 1): (2, 3)}
    for (package, die), cpus in groups.items():
        for cpu in cpus:
            root.cpu(cpu, package=package, die=die, core=(cpu,), l3=cpus)
    root.packages(groups)
    root.node(0, range(4))
    root.online(range(4))
    assert check_like_lstopo(root.path).dies == ({0, 1}, {2, 3})


def test_this_machine_is_what_lstopo_says() -> None:
    program = shutil.which("lstopo-no-graphics")
    if program is None:
        skip_or_fail("lstopo (Debian's hwloc) is missing", variable="PSDIST_REQUIRE_SLURM")
    with_lstopo = live.this_machine()
    without = live.this_machine(use_lstopo=False)
    assert without.cores == with_lstopo.cores
    assert without.packages == with_lstopo.packages
    assert without.l3_groups == with_lstopo.l3_groups
    assert [node.cpus for node in without.numa_nodes] == [
        node.cpus for node in with_lstopo.numa_nodes
    ]
    known = {device.pci: device for device in with_lstopo.devices}
    for device in without.devices:
        assert device.package == known[device.pci].package
    assert without.cpus == os.sched_getaffinity(0)
    assert without.name == socket.gethostname()


def test_pus_that_are_offline_are_not_there(root: Root) -> None:
    two_sockets(root).online([*range(8), *range(9, 16)])
    machine = sysfs.read_machine(root.path)
    assert machine.cores[0].cpus == (0,)
    assert len(machine.cpus) == 15


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job_1/step_0", "sys/fs/cgroup/job_1/step_0/cpuset.cpus.effective"),
        ("0::/job_1/step_0/task", "sys/fs/cgroup/job_1/cpuset.cpus.effective"),  # from above
        ("0::/../x", "sys/fs/cgroup/cpuset.cpus.effective"),  # in a container
        ("5:cpu,cpuset:/slurm\n0::/", "sys/fs/cgroup/cpuset/slurm/cpuset.effective_cpus"),
    ],
)
def test_only_pus_of_the_cgroup_are_there_and_count(root: Root, cgroup: str, file: str) -> None:
    two_sockets(root)
    root.write("proc/self/cgroup", cgroup)
    root.write(file, "4-7,12-15")
    machine = sysfs.read_machine(root.path)
    assert [core.cpus for core in machine.cores] == [(4, 12), (5, 13), (6, 14), (7, 15)]
    assert [core.logical for core in machine.cores] == [0, 1, 2, 3]
    # As in hwloc, a package whose memory may be used stays without PUs.
    assert [(package.os_index, len(package.cpus)) for package in machine.packages] == [
        (0, 0),
        (1, 8),
    ]
    assert {(core.package, core.numa) for core in machine.cores} == {(1, 1)}


def test_kinds_of_cores_come_from_their_capacity(root: Root) -> None:
    two_sockets(root)
    for cpu in range(16):
        root.write(f"{CPU}/cpu{cpu}/cpu_capacity", 1024 if cpu % 8 < 4 else 446)
    assert [core.kind for core in sysfs.read_machine(root.path).cores] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_kinds_of_cores_come_from_intels_types_before_their_capacity(root: Root) -> None:
    two_sockets(root)
    root.write("sys/devices/cpu_core/cpus", "0-3,8-11")
    root.write("sys/devices/cpu_atom/cpus", "4-7,12-15")
    for cpu in range(16):
        root.write(f"{CPU}/cpu{cpu}/cpu_capacity", 1024 - cpu)
    assert [core.kind for core in sysfs.read_machine(root.path).cores] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_memory_without_pus_is_not_ordinary_memory(root: Root) -> None:
    two_sockets(root).node(4, [], gib=64)
    machine = sysfs.read_machine(root.path)
    assert [(node.os_index, node.is_dram) for node in machine.numa_nodes] == [
        (0, True),
        (1, True),
        (4, False),
    ]
    assert machine.memory_bytes == 8 << 30


def test_devices_are_near_their_node(root: Root) -> None:
    two_sockets(root)
    folder = root.device(
        "0000:3b:00.0",
        "0x020700",
        "0x15b3",
        node=1,
        near="4-7,12-15",
        current_link_speed="16.0 GT/s PCIe",
        current_link_width="16",
    )
    root.write(f"{folder}/net/ib0/address", "")
    gid = "fe80:0000:0000:0000:ec0d:9a03:0067:fdd4"
    root.write(f"{folder}/infiniband/mlx5_0/ports/1/gids/0", gid)
    root.device("0000:1a:00.0", "0x030200", "0x10de", node=0, near="0-3,8-11")
    uuid = "GPU-affad486-897e-9778-18e8-26a7127927a8"
    root.write(
        "proc/driver/nvidia/gpus/0000:1a:00.0/information",
        f"Model: \t\t Tesla V100\nGPU UUID: \t {uuid}\nBus Type: \t PCIe",
    )
    machine = sysfs.read_machine(root.path)
    (gpu,), (nic,) = machine.gpus, machine.nics
    assert (gpu.pci, gpu.package, gpu.numa, gpu.uuid) == ("0000:1a:00.0", 0, 0, uuid)
    assert gpu.cpus == {0, 1, 2, 3, 8, 9, 10, 11}
    assert (nic.names, nic.package, nic.numa) == (("ib0", "mlx5_0"), 1, 1)
    assert nic.port_guids == (0xEC0D9A030067FDD4,)
    assert nic.bytes_per_s == pytest.approx(31.507692e9)
    assert machine_codec.unpack(machine_codec.pack(machine)) == machine


def test_a_device_without_a_node_has_an_unknown_place(root: Root) -> None:
    two_sockets(root).device("0000:1a:00.0", "0x030200", "0x10de", node=-1, near="0-15")
    machine = sysfs.read_machine(root.path)
    (gpu,) = machine.gpus
    assert (gpu.cpus, gpu.package, gpu.numa) == (None, UNKNOWN, UNKNOWN)
    assert any("1 of 1 devices" in note for note in machine.notes)


def test_consoles_and_network_functions_without_a_driver_are_left_out(root: Root) -> None:
    two_sockets(root)
    root.device("0000:03:00.0", "0x030000", "0x1a03", node=0, near="0-3,8-11")
    for number in range(40):
        root.device(f"0000:04:00.{number % 8}", "0x020000", "0x8086", node=0, near="0-3,8-11")
    machine = sysfs.read_machine(root.path)
    assert machine.devices == ()
    assert machine.notes == (
        "for display only, no GPU to compute on: 0000:03:00.0",
        "8 network functions without a driver (virtual ones) left out",
    )


def test_without_packages_numa_nodes_count_as_packages(root: Root) -> None:
    two_sockets(root)
    for path in root.path.glob(f"{CPU}/cpu*/topology/physical_package_id"):
        path.write_text("-1\n")
    machine = sysfs.read_machine(root.path)
    assert len(machine.packages) == 2
    assert any("NUMA nodes count" in note for note in machine.notes)


def test_a_tree_that_names_processors_only_is_a_machine_of_cores(root: Root) -> None:
    root.online(range(3))
    machine = sysfs.read_machine(root.path)
    assert [core.cpus for core in machine.cores] == [(0,), (1,), (2,)]
    assert len(machine.packages) == len(machine.numa_nodes) == 1


@pytest.mark.parametrize("text", ["", "many", "0-99999999", "3-1", "\0"])
def test_files_that_make_no_sense_say_nothing(root: Root, text: str) -> None:
    two_sockets(root)
    whole = sysfs.read_machine(root.path)
    for name in ("core_cpus_list", "die_id"):
        root.write(f"{CPU}/cpu0/topology/{name}", text)
    root.write(f"{CPU}/cpu0/cache/index3/level", text)
    root.write("proc/self/cgroup", text)
    machine = sysfs.read_machine(root.path)
    assert machine.cpus == whole.cpus
    assert machine.packages == whole.packages


def test_where_sys_has_no_processors_the_error_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"sys/devices/system/cpu: no processor"):
        sysfs.read_machine(tmp_path)


def fake_lstopo(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "lstopo"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(live, "_PROGRAMS", ("lstopo",))


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("exit 3", "lstopo: exit status 3; /sys answers instead"),
        ("echo nonsense", "lstopo:1: not XML (syntax error); give the output of lstopo --of xml"),
        ("exec sleep 60", "lstopo: no answer in 0.2 s; /sys answers instead"),
    ],
)
def test_where_lstopo_fails_sys_answers_with_a_note(
    script: str, note: str, root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_sockets(root)
    fake_lstopo(tmp_path, script, monkeypatch)
    monkeypatch.setattr(live, "LSTOPO_TIMEOUT_S", 0.2)
    machine = live.this_machine(affinity={4, 12}, root=root.path)
    assert [core.logical for core in machine.cores] == [4]
    assert machine.notes == (note,)


def test_without_a_place_for_temporary_files_sys_answers(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_sockets(root)
    fake_lstopo(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    machine = live.this_machine(affinity={4, 12}, root=root.path)
    assert [core.logical for core in machine.cores] == [4]
    assert machine.notes == ("lstopo: No such file or directory; /sys answers instead",)


def test_an_answer_that_lacks_pus_of_this_process_is_not_used(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_sockets(root)
    pu = '<object type="PU" os_index="0"/>'
    xml = f'<topology version="2.0"><object type="Machine">{pu}</object></topology>'
    fake_lstopo(tmp_path, f"echo '{xml}'", monkeypatch)
    machine = live.this_machine(affinity={0, 9}, root=root.path)
    assert machine.cpus == {0, 9}
    assert len(machine.packages) == 2
    assert machine.notes == ("lstopo does not know all PUs of this process: asked /sys instead",)


def test_lstopo_is_not_told_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_lstopo(tmp_path, f"env > {tmp_path}/environment; exit 1", monkeypatch)
    monkeypatch.setenv("HWLOC_XMLFILE", "/other.xml")
    monkeypatch.setenv("HWLOC_SYNTHETIC", "pack:9")
    live.this_machine()
    text = (tmp_path / "environment").read_text(encoding="utf-8")
    assert "HWLOC_XMLFILE" not in text
    assert "HWLOC_SYNTHETIC" not in text


def test_where_nothing_tells_of_the_processors_each_pu_is_a_core(tmp_path: Path) -> None:
    machine = live.this_machine(affinity={3, 5}, use_lstopo=False, root=tmp_path)
    assert [core.cpus for core in machine.cores] == [(3,), (5,)]
    assert len(machine.notes) == 2


@pytest.mark.parametrize(
    ("text", "bus"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("3b:00.1", "0000:3b:00.1"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("3b:00.8", ""),
        ("", ""),
    ],
)
def test_bus_ids_are_written_one_way(text: str, bus: str) -> None:
    assert pci.bus_id(text) == bus


def test_a_link_of_unknown_speed_or_width_has_none() -> None:
    assert pci.link_bytes_per_s("Unknown", "16") == 0.0
    assert pci.link_bytes_per_s("8.0 GT/s PCIe", "255") == 0.0
    assert pci.link_bytes_per_s("5.0 GT/s PCIe", "4") == pytest.approx(2e9)
