"""Which mpirun belongs to which library, its flags, and programs that do not end in time."""

from __future__ import annotations

import os
import pwd
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from psdist.errors import LaunchError
from psdist.install import mpi as installation
from psdist.install.mpi import (
    MpiLibrary,
    Mpirun,
    Output,
    find_mpirun,
    is_single_host,
    launch_environment,
    loaded_library,
    mpirun_command,
    num_physical_cores,
    output_of,
)

OPEN_MPI = MpiLibrary(
    version_text="Open MPI v5.0.11, package: x\0", family="openmpi", mpi4py="4.1", file=None
)
MPICH = MpiLibrary(
    version_text="MPICH Version:      5.0.2\n", family="mpich", mpi4py="4.1", file=None
)
PLAIN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(family: str = "openmpi", version: tuple[int, ...] = (5, 0, 11)) -> Mpirun:
    return Mpirun(path=Path("/opt/mpi/bin/mpirun"), family=family, version=version)


def flags(num_ranks: int, environment: dict[str, str], **kind: object) -> str:
    command = mpirun_command(mpirun(**kind), num_ranks, environment)
    assert command[:3] == ["/opt/mpi/bin/mpirun", "-n", str(num_ranks)]
    return " ".join(command[3:])


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_mpirun(folder: Path, kind: str) -> Path:
    answers = {
        "openmpi": 'echo "mpirun (Open MPI) 5.0.11"',
        "openmpi4": 'echo "mpirun (Open MPI) 4.1.4"',
        "mpich": 'printf "HYDRA build details:\\n    Version:      4.0.2\\n"',
    }
    return program(folder, "mpirun", answers[kind])


def test_an_mpirun_belongs_to_the_library_of_its_family_and_series() -> None:
    assert mpirun().belongs_to(OPEN_MPI)
    assert mpirun(version=(5, 0, 3)).belongs_to(OPEN_MPI)
    assert not mpirun(version=(4, 1, 4)).belongs_to(OPEN_MPI)
    assert not mpirun("mpich", (5, 0, 2)).belongs_to(OPEN_MPI)
    assert mpirun("mpich", (4, 0, 2)).belongs_to(MPICH)
    assert not mpirun("unknown", ()).belongs_to(MPICH)


def test_the_mpirun_of_the_same_mpi_is_found_behind_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "empty"))
    fake_mpirun(tmp_path / "a", "openmpi4")
    fake_mpirun(tmp_path / "b", "mpich")
    right = fake_mpirun(tmp_path / "c", "openmpi")
    environment = {"PATH": f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/c"}
    found = find_mpirun(OPEN_MPI, environment)
    assert (found.path, found.name) == (right, "Open MPI 5.0.11")
    assert find_mpirun(MPICH, environment).path == tmp_path / "b" / "mpirun"


def test_this_pythons_mpirun_comes_before_that_beside_the_library_and_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "venv").mkdir()
    (tmp_path / "site").mkdir()
    on_path = fake_mpirun(tmp_path / "path", "openmpi")
    environment = {"PATH": str(on_path.parent)}
    library = MpiLibrary(
        version_text=OPEN_MPI.version_text,
        family="openmpi",
        mpi4py="4.1",
        file=tmp_path / "site" / "lib" / "libmpi.so.40",
    )
    assert find_mpirun(library, environment).path == on_path
    beside = fake_mpirun(tmp_path / "site" / "bin", "openmpi")
    assert find_mpirun(library, environment).path == beside
    own = fake_mpirun(tmp_path / "venv" / "bin", "openmpi")
    assert find_mpirun(library, environment).path == own


def test_without_a_fitting_mpirun_the_error_names_the_others_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "empty"))
    other = fake_mpirun(tmp_path / "a", "mpich")
    program(tmp_path / "broken", "mpirun", "").write_bytes(b"\x7fELF, but not really")
    mute = program(tmp_path / "mute", "mpirun", "echo 'Failed initializing Open MPI'; exit 1")
    with pytest.raises(LaunchError) as caught:
        find_mpirun(OPEN_MPI, {"PATH": f"{tmp_path}/broken:{tmp_path}/a:{tmp_path}/mute"})
    assert str(caught.value) == (
        f"no mpirun of Open MPI v5.0.11, which mpi4py loads, was found in {tmp_path}/empty/bin, "
        f"next to the library, or on PATH ({other} is MPICH 4.0.2; {mute} does not say its "
        "version): "
        "pip install 'psdist-mpi[mpi]', or load your site's MPI module"
    )


def test_mpich_needs_a_flag_only_inside_a_slurm_job_of_one_host() -> None:
    mpich = {"family": "mpich", "version": (5, 0, 2)}
    assert flags(64, {}, **mpich) == ""
    assert flags(64, {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2"}, **mpich) == ""
    one_host = {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1"}
    assert flags(64, one_host, **mpich) == "-launcher fork"


def test_open_mpi_uses_shared_memory_and_ties_no_rank_to_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installation, "num_physical_cores", lambda: 4)
    shared = "--mca pml ob1 --mca btl self,sm"
    assert flags(4, PLAIN) == f"--bind-to none {shared}"
    assert flags(5, PLAIN) == f"--oversubscribe --bind-to none {shared}"
    assert flags(2, PLAIN, version=(4, 1, 4)).endswith("--mca btl self,vader")
    assert flags(2, {**PLAIN, "OMPI_MCA_pml": "ucx"}) == "--bind-to none"
    assert flags(2, {**PLAIN, "OMPI_MCA_btl": "self,tcp"}) == "--bind-to none"
    assert flags(2, {**PLAIN, "PRTE_MCA_hwloc_default_binding_policy": "core"}) == shared


def test_in_a_slurm_allocation_of_one_host_a_slot_is_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installation, "num_physical_cores", lambda: 4)
    job = {**PLAIN, "SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1"}
    assert "--oversubscribe" in flags(2, {**job, "SLURM_NTASKS": "1"})
    assert "--oversubscribe" in flags(2, job)
    assert "--oversubscribe" not in flags(2, {**job, "SLURM_NTASKS": "2"})
    assert "--oversubscribe" in flags(5, {**job, "SLURM_NTASKS": "8"})


def test_open_mpi_is_told_that_root_may_run_it_only_where_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert flags(2, {}).startswith("--allow-run-as-root")
    assert "root" not in flags(2, PLAIN)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" not in flags(2, {})


def test_in_an_allocation_of_several_hosts_open_mpi_chooses_its_own_transport() -> None:
    assert flags(64, {**PLAIN, "SLURM_JOB_NUM_NODES": "4"}) == ""
    assert flags(64, {**PLAIN, "PBS_NODEFILE": "/var/spool/nodes"}) == ""
    assert is_single_host({"SLURM_JOB_NUM_NODES": "1"})
    assert is_single_host({})


def test_a_new_mpirun_does_not_inherit_what_an_outer_launcher_said() -> None:
    environment = {"PMI_RANK": "0", "PMIX_RANK": "0", "PMIX_MCA_gds": "hash", "PATH": "/bin"}
    kept = {"PMIX_MCA_gds": "hash", "PATH": "/bin", "HOME": "/home/me"}
    assert launch_environment(environment | {"HOME": "/home/me"}) == kept


def test_a_new_mpirun_has_a_home_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    of_user = pwd.getpwuid(os.getuid()).pw_dir
    assert launch_environment({"PATH": "/bin"}) == {"PATH": "/bin", "HOME": of_user}
    assert launch_environment({"HOME": ""}) == {"HOME": ""}

    def has_no_entry(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    assert launch_environment({}) == {"HOME": "/"}


def test_there_is_a_core_to_run_on() -> None:
    assert 1 <= num_physical_cores() <= len(os.sched_getaffinity(0))


def test_a_program_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    # The child ignores the polite request and holds the output open.
    script = program(tmp_path, "slow", "(trap '' TERM; sleep 60) &\necho $!; sleep 60")
    output = output_of([str(script)], timeout_s=0.5, environment=os.environ)
    assert output.status is None
    child = int(output.text.split()[0])
    deadline_s = time.monotonic() + 30
    while is_running(child):  # a killed process takes a moment to be gone
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_has_both_streams_the_status_and_the_facts(tmp_path: Path) -> None:
    script = program(
        tmp_path, "prog", """echo 'psdist-probe: {"a": 1}'; echo late >&2; echo ----; exit 3"""
    )
    output = output_of([str(script)], timeout_s=30, environment=os.environ)
    assert output.status == 3
    assert output.facts() == {"a": 1}
    assert output.last_line() == "late"
    nothing = output_of(["/bin/true"], timeout_s=30, environment=os.environ)
    assert (nothing.facts(), nothing.last_line()) == (None, "(no output)")


def test_the_cause_of_a_failing_mpirun_is_an_exception_or_its_first_line() -> None:
    box = "-----\nThere are not enough slots\n\nAdvice.\n-----\n\0"
    assert Output(status=1, text=box).first_cause() == "There are not enough slots"
    traceback = "Traceback (most recent call last):\n  File x\nmpi4py.MPI.Exception: no\n" + box
    assert Output(status=1, text=traceback).first_cause() == "mpi4py.MPI.Exception: no"
    assert Output(status=1, text="").first_cause() == "(no output)"


def test_a_missing_mpi_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(LaunchError) as caught:
        loaded_library(os.environ)
    text = str(caught.value)
    assert text.startswith("mpi4py finds no MPI library (/nonexistent/libmpi.so: ")
    assert "pip install 'psdist-mpi[mpi]', or load your site's MPI module" in text


def test_files_beside_a_script_shadow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert installation.python_flags() == ["-P"]
    monkeypatch.chdir(Path(installation.__file__).resolve().parents[2])
    assert installation.python_flags() == []


def test_open_mpi_alone_survives_deaths() -> None:
    command = mpirun_command(mpirun(), 2, PLAIN, survives_deaths=True)
    assert command[3:5] == ["--with-ft", "ulfm"]
    assert "--with-ft" not in mpirun_command(mpirun(), 2, PLAIN)
    with pytest.raises(LaunchError, match=r"needs Open MPI's mpirun --with-ft ulfm; "):
        mpirun_command(mpirun("mpich", (5, 0, 2)), 2, PLAIN, survives_deaths=True)
