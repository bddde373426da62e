"""`psdist doctor`: every question is asked, whatever the others meet; errors decide the status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from psdist.commands import doctor
from psdist.commands.doctor import Finding, examine
from psdist.errors import LaunchError
from psdist.install.distributions import Rival
from psdist.install.mpi import MpiLibrary, Mpirun, Output
from psdist.install.trials import MARK
from tests.support.mpirun import REQUIRED_BY, run_program, skip_or_fail, why_missing

LIBRARY = MpiLibrary(
    version_text="Open MPI v5.0.11, package: x", family="openmpi", mpi4py="4.1.2", file=None
)
MPIRUN = Mpirun(path=Path("/opt/mpi/bin/mpirun"), family="openmpi", version=(5, 0, 11))
MPICH_RUN = Mpirun(path=Path("/usr/bin/mpirun"), family="mpich", version=(4, 0, 2))
TORCH = {"version": "2.13.0", "cuda": None, "devices": [], "gloo": True, "nccl": False}
ROUND_TRIP = {
    "world_size": 2,
    "multiple": True,
    "ulfm": True,
    "seconds": 0.001,
    "unchanged": True,
}
MPI_LIST = """MPI plugin types are...
\tnone
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4
"""


class Machine:
    """A machine whose programs answer what a test says; a None answer did not come in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, tuple[int | None, str]] = {
            "torch": (0, f"{MARK} {json.dumps(TORCH)}"),
            "round-trip": (0, f"{MARK} {json.dumps(ROUND_TRIP)}"),
            "--mpi=list": (0, MPI_LIST),
            "--version": (0, "slurm 22.05.8"),
            "--format=%P %D nodes %t": (0, "debug* 4 nodes idle\n"),
        }
        self.mpi: MpiLibrary | LaunchError = LIBRARY
        self.mpirun: Mpirun | LaunchError = MPIRUN
        self.path_mpirun: Mpirun | None = MPIRUN
        self.programs = {"srun", "sinfo", "lstopo"}
        monkeypatch.setattr(doctor, "output_of", self._output_of)
        monkeypatch.setattr(doctor, "loaded_library", lambda _: self._or_raise(self.mpi))
        monkeypatch.setattr(doctor, "find_mpirun", lambda *_: self._or_raise(self.mpirun))
        monkeypatch.setattr(
            doctor, "mpirun_on_path", lambda _: self.path_mpirun and self.path_mpirun.path
        )
        monkeypatch.setattr(doctor, "examine_mpirun", lambda *_: self.path_mpirun)
        monkeypatch.setattr(
            doctor.shutil,
            "which",
            lambda name, path=None: f"/bin/{name}" if name in self.programs else path and None,
        )

    def torch(self, **facts: object) -> None:
        self.answers["torch"] = (0, f"{MARK} {json.dumps({**TORCH, **facts})}")

    def round_trip(self, **facts: object) -> None:
        self.answers["round-trip"] = (0, f"{MARK} {json.dumps({**ROUND_TRIP, **facts})}")

    def findings(self) -> dict[str, Finding]:
        return {finding.subject: finding for finding in examine({})}

    def status(self) -> int:
        return doctor.main(Console(quiet=True))

    def _output_of(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str]
    ) -> Output:
        assert timeout_s > 0
        assert set(environment) <= {"HOME"} or "PATH" in environment
        status, text = self.answers[command[-1]]
        return Output(status=status, text=text)

    @staticmethod
    def _or_raise(answer: Any) -> Any:
        if isinstance(answer, LaunchError):
            raise answer
        return answer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    return Machine(monkeypatch)


def test_a_machine_on_which_all_fits_has_no_errors(machine: Machine) -> None:
    findings = machine.findings()
    assert {finding.state for finding in findings.values()} <= {"ok", "note"}
    assert findings["MPI"].value == "Open MPI v5.0.11 (site), mpi4py 4.1.2"
    assert findings["Slurm"].value == "slurm 22.05.8, srun --mpi= none, pmi2, pmix, pmix_v4"
    assert findings["partitions"].value == "debug* 4 nodes idle"
    assert findings["srun --mpi="].value == "pmix fits Open MPI v5.0.11"
    assert findings["two ranks"].value == "1 MiB there and back in 1.00 ms"
    assert machine.status() == 0


@pytest.mark.parametrize(("is_error", "state"), [(True, "error"), (False, "warning")])
def test_a_second_distribution_is_named_with_the_line_that_uninstalls_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, is_error: bool, state: str
) -> None:
    rival = Rival(problem="psdist 2.1.4", remedy="pip uninstall psdist", is_error=is_error)
    monkeypatch.setattr(doctor, "rivals", lambda *_, **__: [rival])
    finding = machine.findings()["distribution"]
    assert (finding.value, finding.remedy) == ("psdist 2.1.4", "pip uninstall psdist")
    assert finding.state == state
    assert machine.status() == int(is_error)


def test_without_mpi_the_other_questions_are_still_asked(machine: Machine) -> None:
    machine.mpi = LaunchError("mpi4py finds no MPI library: pip install 'psdist-mpi[mpi]'")
    findings = machine.findings()
    assert findings["MPI"].state == "error"
    assert findings["MPI"].remedy.endswith("pip install 'psdist-mpi[mpi]'")
    assert findings["torch"].state == "ok"
    assert findings["Slurm"].state == "ok"
    assert "two ranks" not in findings
    assert machine.status() == 1


def test_an_mpirun_of_another_mpi_is_an_error_without_slurm(machine: Machine) -> None:
    machine.mpirun = LaunchError("no mpirun of Open MPI v5.0.11 (/usr/bin/mpirun is MPICH 4.0.2)")
    machine.programs.discard("srun")
    findings = machine.findings()
    assert findings["mpirun"].state == "error"
    assert "/usr/bin/mpirun is MPICH 4.0.2" in findings["mpirun"].remedy
    assert machine.status() == 1


def test_no_mpirun_is_a_warning_where_srun_can_start_the_ranks(machine: Machine) -> None:
    machine.mpirun = LaunchError("no mpirun of Open MPI v5.0.11")
    finding = machine.findings()["mpirun"]
    assert finding.state == "warning"
    assert finding.remedy == "start jobs with srun --mpi=pmix; psdist run -n needs an mpirun"
    assert machine.status() == 0


def test_another_mpirun_first_on_path_is_a_warning_with_the_remedy(machine: Machine) -> None:
    machine.path_mpirun = MPICH_RUN
    finding = machine.findings()["mpirun on PATH"]
    assert (finding.state, finding.value) == ("warning", "/usr/bin/mpirun is MPICH 4.0.2")
    assert finding.remedy.endswith("put /opt/mpi/bin first on PATH, or use psdist run -n")
    assert machine.status() == 0
    machine.path_mpirun = None
    assert machine.findings()["mpirun on PATH"].state == "note"


def test_an_srun_without_the_fitting_value_is_a_warning(machine: Machine) -> None:
    machine.answers["--mpi=list"] = (0, "MPI plugin types are...\n\tnone\n\tpmi2\n")
    finding = machine.findings()["srun --mpi="]
    assert finding.value == "Open MPI v5.0.11 needs pmix, which srun does not offer"
    assert (finding.state, finding.remedy) == ("warning", "use mpirun inside sbatch or salloc")


def test_slurm_that_is_absent_or_silent_is_no_error(machine: Machine) -> None:
    machine.answers["--mpi=list"] = (1, "srun: fatal: no configuration\n")
    finding = machine.findings()["Slurm"]
    assert finding.value == "/bin/srun reaches no cluster: srun: fatal: no configuration"
    machine.answers["--mpi=list"] = (None, "")
    assert machine.findings()["Slurm"].value.endswith("it does not answer")
    machine.programs.clear()
    findings = machine.findings()
    assert findings["Slurm"].state == findings["hwloc"].state == "note"
    assert machine.status() == 0


def test_a_controller_that_does_not_answer_is_a_warning(machine: Machine) -> None:
    machine.answers["--format=%P %D nodes %t"] = (None, "")
    finding = machine.findings()["partitions"]
    assert (finding.state, finding.value) == ("warning", "sinfo: no answer")


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ((None, ""), "no end within 60 s"),
        ((1, "---\nwhat went wrong\n\nadvice\n---\n"), "failed with status 1: what went wrong"),
        ((0, "no facts"), "failed with status 0: no facts"),
    ],
)
def test_a_round_trip_that_fails_is_an_error_with_the_command_to_try(
    machine: Machine, answer: tuple[int | None, str], value: str
) -> None:
    machine.answers["round-trip"] = answer
    finding = machine.findings()["two ranks"]
    assert (finding.state, finding.value) == ("error", value)
    assert finding.remedy.startswith("see its whole output: /opt/mpi/bin/mpirun -n 2 ")
    assert machine.status() == 1


def test_singletons_damaged_bytes_and_a_low_thread_level_are_errors(machine: Machine) -> None:
    machine.round_trip(world_size=1)
    assert machine.findings()["two ranks"].value == "started, but each in a world of 1"
    assert machine.status() == 1
    machine.round_trip(unchanged=False)
    assert machine.findings()["two ranks"].state == "error"
    machine.round_trip(multiple=False)
    assert machine.findings()["threads"].state == "error"
    assert machine.status() == 1


def test_an_mpi_without_ulfm_is_only_noted(machine: Machine) -> None:
    machine.round_trip(ulfm=False)
    assert machine.findings()["fault tolerance"].state == "note"
    assert machine.status() == 0


def test_torch_that_is_missing_or_without_gloo_is_an_error(machine: Machine) -> None:
    machine.answers["torch"] = (1, "ModuleNotFoundError: No module named 'torch'")
    finding = machine.findings()["torch"]
    assert (finding.state, finding.value) == (
        "error",
        "ModuleNotFoundError: No module named 'torch'",
    )
    assert machine.status() == 1
    machine.answers["torch"] = (None, "")
    assert machine.findings()["torch"].value == "took too long to load"
    machine.torch(gloo=False)
    assert machine.findings()["reduction"].state == "error"
    assert machine.status() == 1


def test_gpus_without_nccl_are_a_warning(machine: Machine) -> None:
    machine.torch(cuda="12.8", devices=["H200", "H200"])
    findings = machine.findings()
    assert findings["torch"].value == "2.13.0, CUDA 12.8"
    assert findings["GPUs"].value == "2 x H200"
    assert findings["reduction"].state == "warning"
    machine.torch(cuda="12.8", devices=["H200"], nccl=True)
    assert machine.findings()["reduction"].value == "torch.distributed has gloo and nccl"


def test_whether_mpi_takes_memory_of_a_gpu_is_found_out_by_doing_it_and_no_is_no_error(
    machine: Machine,
) -> None:
    def found(status: int | None, text: str) -> str:
        machine.answers["device-messages"] = status, text
        finding = machine.findings()["GPU memory over MPI"]
        assert (finding.state, finding.remedy) == ("note", "")
        assert machine.status() == 0
        answer, what_it_means = finding.value.split("; ")
        assert what_it_means == "psdist sends from pinned memory of the host in any case"
        return answer

    machine.torch(cuda="12.8", devices=["H200"], nccl=True)
    facts = {"world_size": 2, "unchanged": True, "seconds": 0.002}
    assert found(0, f"{MARK} {json.dumps(facts)}") == "yes: 4 MiB there and back in 2.00 ms"
    assert found(0, f"{MARK} {json.dumps({**facts, 'unchanged': False})}").startswith("no: other")
    assert found(0, f"{MARK} {json.dumps({**facts, 'world_size': 1})}").startswith("no: other")
    crash = "rank 1 exited on signal 11 (Segmentation fault)"
    assert found(139, crash) == f"no: it ended with status 139: {crash}"
    assert found(1, f"{MARK} {json.dumps(facts)}").startswith("no: it ended with status 1")
    assert found(None, "") == "no: no end within 120 s"


def test_memory_of_a_gpu_is_not_sent_where_there_is_none_or_nothing_can_be_sent(
    machine: Machine,
) -> None:
    assert "GPU memory over MPI" not in machine.findings()
    machine.torch(cuda="12.8", devices=["H200"], nccl=True)
    machine.round_trip(unchanged=False)
    assert "GPU memory over MPI" not in machine.findings()
    machine.mpirun = LaunchError("none")
    assert "GPU memory over MPI" not in machine.findings()


def test_a_question_that_breaks_keeps_no_other_from_being_asked(machine: Machine) -> None:
    machine.answers["torch"] = (0, f"{MARK} not json")
    findings = machine.findings()
    assert findings["torch"].state == "warning"
    assert findings["torch"].value.startswith("could not be found out (JSONDecodeError: ")
    assert findings["two ranks"].state == "ok"


def test_little_shared_memory_and_one_core_are_warnings(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY_BYTES", 1 << 62)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0})
    findings = machine.findings()
    assert "docker run --shm-size=1g" in findings["/dev/shm"].remedy
    assert findings["cores"].state == "warning"
    assert machine.status() == 0


def test_the_report_has_every_finding_and_every_remedy(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.path_mpirun = MPICH_RUN
    machine.torch(gloo=False)
    assert doctor.main(Console(width=200, color_system=None)) == 1
    text = capsys.readouterr().out
    for finding in machine.findings().values():
        assert finding.subject in text
        assert finding.remedy in text
    assert text.endswith("Training would fail here (errors: 1).\n")


def test_text_in_square_brackets_is_shown_as_it_is(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.mpi = LaunchError("none: pip install 'psdist-mpi[mpi]' [/red]")
    doctor.main(Console(width=200, color_system=None))
    assert "pip install 'psdist-mpi[mpi]' [/red]" in capsys.readouterr().out


def test_under_mpirun_one_rank_refuses_and_the_others_are_silent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert machine.status() == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(LaunchError, match="here it is one of 4: run it without mpirun or srun"):
        machine.status()


@pytest.mark.mpi
def test_the_doctor_is_content_with_this_machine() -> None:
    if (why := why_missing("openmpi")) is not None:
        skip_or_fail(why, variable=REQUIRED_BY["openmpi"])
    done = run_program([sys.executable, "-m", "psdist", "doctor"], timeout_s=240)
    assert done.returncode == 0, done.text
    assert "1 MiB there and back in " in done.stdout
    assert "MPI_THREAD_MULTIPLE" in done.stdout
    assert done.stdout.endswith("Training can start here.\n")


@pytest.mark.mpi
def test_the_doctor_finds_a_missing_mpi_library() -> None:
    done = run_program(
        [sys.executable, "-m", "psdist", "doctor"],
        timeout_s=240,
        env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"},
    )
    assert done.returncode == 1, done.text
    assert "mpi4py finds no MPI library (/nonexistent/libmpi.so: " in done.stdout
