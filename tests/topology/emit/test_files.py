"""What is written for each launcher; that launchers understand it: test_launchers."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import PlacementError
from psdist.topology.emit import MAX_RANKFILE_ENTRY, Emission, Launcher, files, write
from psdist.topology.network import Cluster, host_files, one_rack
from psdist.topology.plan import Plan, decode
from psdist.topology.text.bitmap import format_list
from tests.support.hand_made_plans import Place, hyperthreaded, machine_of, planned

ALL: tuple[Launcher, ...] = ("slurm", "openmpi4", "openmpi5", "mpich", "intel", "flux", "json")
FILLED_IN_ORDER: tuple[Launcher, ...] = ("hostfile", "pbs")
CLUSTER = one_rack(["n1", "n2"], machine_of(hyperthreaded(8)))
MIXED: list[Place] = [
    ("n1", "server", [0]),
    ("n2", "worker", range(1, 8)),
    ("n1", "worker", [1, 2, 3, 5]),
    ("n2", "server", [0]),
]
IN_BLOCKS: list[Place] = [
    ("n2", "server", [0]),
    ("n2", "worker", [1, 2]),
    ("n1", "server", [0]),
]
TAIL = ["psdist", "run", "--placement", "plan.json", "train.py"]


def emitted(
    places: list[Place], launcher: Launcher, cluster: Cluster = CLUSTER
) -> tuple[Emission, list[str]]:
    """The emission, and its only command without the end that all have."""
    emission = files(planned(cluster, places), cluster, launcher)
    assert len(emission.commands) == 1
    words = shlex.split(emission.commands[0])
    assert words[-len(TAIL) :] == TAIL
    return emission, words[: -len(TAIL)]


@pytest.mark.parametrize("launcher", ALL)
def test_every_emission_has_the_plan_as_psdist_reads_it(launcher: Launcher) -> None:
    plan = planned(CLUSTER, MIXED)
    emission = files(plan, CLUSTER, launcher)
    assert decode(emission.files["plan.json"].encode(), where="plan.json") == plan
    assert all(content.endswith("\n") for content in emission.files.values())
    assert all(line.isprintable() for line in (*emission.commands, *emission.notes))


def test_a_host_file_has_slots_and_is_read_back_as_an_input() -> None:
    emission, command = emitted(IN_BLOCKS, "hostfile")
    assert emission.files["hostfile"] == "n2 slots=2\nn1 slots=1\n"
    assert shlex.join(command) == ("mpirun -n 3 --hostfile hostfile --map-by slot --bind-to none")
    assert host_files.parse(emission.files["hostfile"].encode(), where="").slots == {
        "n2": 2,
        "n1": 1,
    }
    assert "each rank binds itself" in emission.notes[0]
    assert "/etc/mpi/hostfile" in emission.notes[0]


def test_pbs_has_a_line_for_each_rank_and_the_words_that_ask_for_its_hosts() -> None:
    emission, command = emitted(IN_BLOCKS, "pbs")
    assert emission.files["pbs.nodes"] == "n2\nn2\nn1\n"
    assert shlex.join(command) == "mpiexec -n 3 -machinefile pbs.nodes"
    assert host_files.parse(emission.files["pbs.nodes"].encode(), where="").slots == {
        "n2": 2,
        "n1": 1,
    }
    assert emission.files["pbs.select"] == (
        "-l select=1:host=n2:ncpus=8:mpiprocs=2+1:host=n1:ncpus=8:mpiprocs=1 -l place=excl\n"
    )


def test_flux_has_a_host_per_rank_and_asks_for_whole_nodes() -> None:
    emission, command = emitted(MIXED, "flux")
    assert emission.files["flux.hosts"] == "n1\nn2\nn1\nn2\n"
    assert shlex.join(command) == (
        "flux run -N 2 -n 4 --exclusive '--requires=hosts:n[1-2]' --taskmap=hostfile:flux.hosts "
        "-o cpu-affinity=off"
    )


@pytest.mark.parametrize("launcher", FILLED_IN_ORDER)
def test_a_file_that_is_filled_host_by_host_is_refused_where_ranks_mix_hosts(
    launcher: Launcher,
) -> None:
    with pytest.raises(PlacementError, match="the ranks of n1 are not numbered one after another"):
        emitted(MIXED, launcher)


def test_a_host_file_is_refused_where_open_mpi_takes_two_hosts_for_one() -> None:
    cluster = one_rack(["a.x", "a.y"], machine_of(hyperthreaded(2)))
    with pytest.raises(PlacementError, match=r"hosts a\.x and a\.y are one to Open MPI"):
        emitted([("a.x", "server", [0]), ("a.y", "worker", [0])], "hostfile", cluster)


def test_slurm_has_a_host_per_rank_and_binds_nothing() -> None:
    emission, command = emitted(MIXED, "slurm")
    assert emission.files["slurm.hosts"] == "n1\nn2\nn1\nn2\n"
    assert shlex.join(command) == (
        "SLURM_HOSTFILE=slurm.hosts srun -n 4 -N 2 --distribution=arbitrary --cpu-bind=none"
    )
    assert any("--nodelist=n[1-2]" in note for note in emission.notes)


@pytest.mark.parametrize(
    ("launcher", "option"),
    [
        ("openmpi4", "--rankfile openmpi.rankfile"),
        ("openmpi5", "--map-by rankfile:FILE=openmpi.rankfile"),
    ],
)
def test_open_mpi_has_host_and_logical_cores_of_each_rank(launcher: Launcher, option: str) -> None:
    emission, command = emitted(MIXED, launcher)
    assert emission.files["openmpi.rankfile"].splitlines() == [
        "rank 0=n1 slot=0",
        "rank 1=n2 slot=1-7",
        "rank 2=n1 slot=1-3,5",
        "rank 3=n2 slot=0",
    ]
    assert shlex.join(command) == f"mpirun -n 4 {option}"
    assert emission.notes == ()


def test_a_rankfile_entry_may_have_sixty_three_characters_and_no_more() -> None:
    cores = [*range(0, 33, 2), 35, 37, 39]
    fits, too_long = "a01", "a001"
    assert len(f"{fits} slot={format_list(cores)}") == MAX_RANKFILE_ENTRY == 63
    cluster = one_rack([fits, too_long], machine_of(hyperthreaded(64)))
    emission, command = emitted([(fits, "server", cores), (fits, "worker", [1])], "openmpi5",
                                cluster)  # fmt: skip
    assert emission.files["openmpi.rankfile"].startswith(f"rank 0=a01 slot={format_list(cores)}\n")
    assert "--bind-to" not in command
    assert emission.notes == ()
    emission, command = emitted([(too_long, "server", cores), (fits, "worker", [1])], "openmpi5",
                                cluster)  # fmt: skip
    assert emission.files["openmpi.rankfile"] == "rank 0=a001\nrank 1=a01\n"
    assert "--bind-to" not in command
    assert emission.notes[0].startswith("the cores of rank 0 take more than the 63 characters")
    assert "binds itself" in emission.notes[0]


def test_open_mpi_4_takes_hosts_alone_from_its_sequential_mapper() -> None:
    emission, command = emitted([("n1", "server", []), ("n2", "worker", [0])], "openmpi4")
    assert emission.files["openmpi.hosts"] == "n1\nn2\n"
    assert "openmpi.rankfile" not in emission.files
    assert shlex.join(command) == "mpirun -n 2 --hostfile openmpi.hosts --map-by seq --bind-to none"
    assert emission.notes[0].startswith("rank 0 is not to be bound: ")


def test_cores_that_two_ranks_share_are_not_told_to_open_mpi() -> None:
    places: list[Place] = [("n1", "server", [0, 1]), ("n1", "worker", [1, 2])]
    emission, _ = emitted(places, "openmpi5")
    assert emission.files["openmpi.rankfile"] == "rank 0=n1\nrank 1=n1\n"
    assert emission.notes[0].startswith("rank 1 shares a core with another rank")


def test_where_the_first_core_has_fewer_threads_open_mpi_is_told_hosts_only() -> None:
    """PRRTE 3.0.14 takes processors for cores there, and binds too little."""
    here = machine_of([(0,), (1, 4), (2, 5), (3, 6)])
    cluster = one_rack(["n1"], here)
    plan = planned(cluster, [("n1", "server", [0]), ("n1", "worker", [1, 2, 3])])
    emission = files(plan, cluster, "openmpi5")
    assert emission.files["openmpi.rankfile"] == "rank 0=n1\nrank 1=n1\n"
    assert emission.notes[0].startswith("on n1 the first core has fewer hardware threads")
    assert "each rank binds itself" in emission.notes[0]
    even = one_rack(["n1"], machine_of([(0, 4), (1,), (2, 5), (3, 6)]))
    told = planned(even, [("n1", "server", [0]), ("n1", "worker", [1, 2, 3])])
    assert "slot=1-3" in files(told, even, "openmpi5").files["openmpi.rankfile"]


def test_on_a_part_of_a_machine_logical_cores_are_not_told_to_open_mpi() -> None:
    part = machine_of(hyperthreaded(4, first_cpu=8), first_logical=8)
    cluster = one_rack(["n1", "n2"], part)
    emission, _ = emitted([("n1", "server", [8]), ("n2", "worker", [9])], "openmpi5", cluster)
    assert emission.files["openmpi.rankfile"] == "rank 0=n1\nrank 1=n2\n"
    assert emission.notes[0].startswith("the job has a part of n1 only")


def test_hosts_that_open_mpi_takes_for_one_are_refused() -> None:
    names = ["a1.north.example.org", "a1.south.example.org"]
    cluster = one_rack(names, machine_of(hyperthreaded(2)))
    plan = planned(cluster, [(names[0], "server", [0]), (names[1], "worker", [0])])
    for launcher in ("openmpi4", "openmpi5"):
        with pytest.raises(PlacementError, match="are one to Open MPI"):
            files(plan, cluster, launcher)
    assert files(plan, cluster, "slurm").files["slurm.hosts"].split() == names


def test_addresses_are_not_cut_at_their_dots_and_so_are_not_refused() -> None:
    names = ["10.0.0.1", "10.0.0.2"]
    cluster = one_rack(names, machine_of(hyperthreaded(2)))
    emission, _ = emitted([(names[0], "server", [0]), (names[1], "worker", [0])], "openmpi5",
                          cluster)  # fmt: skip
    assert emission.files["openmpi.rankfile"].startswith("rank 0=10.0.0.1 slot=0\n")


def test_mpich_has_counts_in_the_order_of_first_ranks_and_a_map_where_ranks_mix() -> None:
    emission, command = emitted(IN_BLOCKS, "mpich")
    assert emission.files["mpich.hosts"] == "n2:2\nn1:1\n"
    assert shlex.join(command) == "mpiexec -f mpich.hosts -n 3 -bind-to user:0+8,1+2+9+10"
    assert emission.notes == ()
    emission, command = emitted(MIXED, "mpich")
    assert emission.files["mpich.hosts"] == "n1:2\nn2:2\n"
    assert command[5:7] == ["-rankmap", "0,1,0,1"]
    assert command[7:] == ["-bind-to", "none"]
    assert "do not bind their ranks alike" in emission.notes[1]


def test_intel_has_a_line_per_run_of_ranks_and_masks_with_0x() -> None:
    emission, command = emitted(IN_BLOCKS, "intel")
    assert emission.files["intel.machines"] == "n2:2\nn1:1\n"
    assert command[-3:] == ["-genv", "I_MPI_PIN_DOMAIN", "[0x101,0x606]"]
    assert emission.notes == ()
    assert "'[0x101,0x606]'" in emission.commands[0]  # a shell would look for files of that name
    emission, command = emitted(MIXED, "intel")
    assert emission.files["intel.machines"] == "n1:1\nn2:1\nn1:1\nn2:1\n"
    assert command[-3:] == ["-genv", "I_MPI_PIN", "off"]


def test_masks_go_beyond_sixty_four_processors() -> None:
    cluster = one_rack(["n1"], machine_of(hyperthreaded(128)))
    places: list[Place] = [("n1", "server", [0]), ("n1", "worker", [127])]
    _, command = emitted(places, "intel", cluster)
    assert command[-1] == f"[{(1 << 0) + (1 << 128):#x},{(1 << 127) + (1 << 255):#x}]"


@pytest.mark.parametrize("launcher", ["mpich", "intel"])
def test_hosts_whose_processors_are_numbered_otherwise_are_not_bound_alike(
    launcher: Launcher,
) -> None:
    first, second = machine_of(hyperthreaded(2)), machine_of([(0, 1), (2, 3)])
    cluster = one_rack(["n1", "n2"], {"n1": first, "n2": second})
    places: list[Place] = [("n1", "server", [0]), ("n1", "worker", [1]), ("n2", "worker", [0])]
    emission, command = emitted(places, launcher, cluster)
    assert command[-1] in ("none", "off")
    assert any("do not bind their ranks alike" in note for note in emission.notes)


def test_json_says_how_many_ranks_to_start() -> None:
    emission, command = emitted(MIXED, "json")
    assert list(emission.files) == ["plan.json"]
    assert command == []
    assert "4 ranks" in emission.notes[0]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([8, 2, 0, 3, 1], "0-3,8"),
        ([1, 3, 5, 6], "1,3,5-6"),
        (range(60, 71), "60-70"),
    ],
)
def test_cores_are_written_as_ranges(numbers: Any, text: str) -> None:
    assert format_list(numbers) == text


@pytest.mark.parametrize("launcher", ALL)
@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("my train.py; reboot", "my train.py; reboot"),
        ("$(id).py", "$(id).py"),
        ("it's.py", "it's.py"),
        ("-rf", "./-rf"),
    ],
)
def test_a_script_is_one_word_whatever_its_name(launcher: Launcher, script: str, word: str) -> None:
    emission = files(planned(CLUSTER, MIXED), CLUSTER, launcher, script=script)
    assert shlex.split(emission.commands[0])[-len(TAIL) :] == [*TAIL[:-1], word]


@pytest.mark.parametrize("script", ["", "a\nb", "a\0b", "\x1b[2J"])
def test_a_script_that_is_no_word_is_refused(script: str) -> None:
    with pytest.raises(PlacementError, match="is empty or has control characters"):
        files(planned(CLUSTER, MIXED), CLUSTER, "slurm", script=script)


def other_host(plan: Plan) -> Plan:
    return replace(plan, ranks=(replace(plan.ranks[0], host="n9"), *plan.ranks[1:]))


def other_core(plan: Plan) -> Plan:
    return replace(plan, ranks=(replace(plan.ranks[0], cores=(8,)), *plan.ranks[1:]))


def other_cpu(plan: Plan) -> Plan:
    return replace(plan, ranks=(replace(plan.ranks[0], cpus=(0, 9)), *plan.ranks[1:]))


def shell_words(plan: Plan) -> Plan:
    return replace(plan, ranks=(replace(plan.ranks[0], host="n1;reboot"), *plan.ranks[1:]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_host, "rank 0: host 'n9' is not in the cluster"),
        (other_core, "rank 0: core 8 is not one of the 8 of n1"),
        (other_cpu, "rank 0: cpu 9 is on none of its cores on n1"),
        (shell_words, "ranks[0].host is 'n1;reboot'"),
    ],
)
def test_a_plan_for_another_cluster_is_refused_in_one_line(change: Any, expected: str) -> None:
    with pytest.raises(PlacementError) as caught:
        files(change(planned(CLUSTER, MIXED)), CLUSTER, "slurm")
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_launcher_that_is_not_known_is_refused() -> None:
    unknown: Any = "lsf"
    with pytest.raises(PlacementError, match="give one of slurm, openmpi4, openmpi5"):
        files(planned(CLUSTER, MIXED), CLUSTER, unknown)


def test_files_are_written_into_a_new_directory_and_over_older_ones(tmp_path: Path) -> None:
    there = tmp_path / "a" / "b"
    emission = files(planned(CLUSTER, MIXED), CLUSTER, "slurm")
    write(replace(emission, files={"slurm.hosts": "old, and longer than the new one\n"}), there)
    write(emission, there)
    assert {path.name: path.read_text() for path in there.iterdir()} == emission.files


def test_a_directory_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    emission = files(planned(CLUSTER, MIXED), CLUSTER, "slurm")
    with pytest.raises(PlacementError, match=r"cannot be written there \(.*\): give another"):
        write(emission, tmp_path / "file" / "below")


@pytest.mark.parametrize("launcher", FILLED_IN_ORDER)
def test_the_host_that_ranks_come_back_to_is_named(launcher: Launcher) -> None:
    cluster = one_rack(["n1", "n2", "n3"], machine_of(hyperthreaded(4)))
    places: list[Place] = [
        ("n3", "server", [0]),
        ("n1", "worker", [0]),
        ("n2", "worker", [0]),
        ("n1", "worker", [1]),
    ]
    with pytest.raises(PlacementError, match="the ranks of n1 are not numbered"):
        emitted(places, launcher, cluster)


def test_intel_mpi_pins_nobody_where_ranks_mix_hosts_though_they_bind_alike() -> None:
    places: list[Place] = [
        ("n1", "server", [0]),
        ("n2", "worker", [0]),
        ("n1", "worker", [1]),
        ("n2", "worker", [1]),
    ]
    emission, command = emitted(places, "intel")
    assert command[-2:] == ["I_MPI_PIN", "off"]
    assert emission.notes[0].startswith("the ranks mix hosts: ")


def test_a_note_leaves_out_hosts_that_nobody_would_type() -> None:
    names = [f"host{'x' * number}" for number in range(1, 30)]
    cluster = one_rack(names, machine_of(hyperthreaded(2)))
    places: list[Place] = [
        (name, "worker" if at else "server", [0]) for at, name in enumerate(names)
    ]
    assert not any("--nodelist" in note for note in emitted(places, "slurm", cluster)[0].notes)
