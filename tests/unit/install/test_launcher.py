"""Launchers recognised from their variables, and N singletons explained.

The variables are those that Open MPI 5.0.11's mpirun, MPICH 5.0.2's mpiexec and Slurm set.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.install import (
    Launcher,
    detect,
    explain_mismatch,
    explain_singleton,
    family_of,
    library_name,
    survives_deaths,
)

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS"

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
BATCH_SHELL = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
STEP = {
    **BATCH_SHELL,
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
}
PMIX_STEP = {**STEP, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.9.0"}
PMI2_STEP = {**STEP, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "8"}


def test_a_process_started_by_hand_has_no_launcher() -> None:
    launcher = detect({"PATH": "/bin", "HOME": "/home/me"})
    assert launcher == Launcher(name="none")
    assert not launcher.is_present


def test_mpirun_of_open_mpi_is_recognised() -> None:
    launcher = detect(MPIRUN)
    assert launcher == Launcher(name="openmpi", rank=3, size=4, local_rank=1, local_size=2)
    assert launcher.is_present


def test_mpiexec_of_mpich_is_recognised() -> None:
    assert detect(HYDRA) == Launcher(name="mpich", rank=1, size=2, local_rank=1, local_size=2)


@pytest.mark.parametrize("step", [STEP, PMIX_STEP, PMI2_STEP])
def test_a_slurm_step_of_several_tasks_is_a_launcher(step: dict[str, str]) -> None:
    assert detect(step) == Launcher(name="slurm", rank=2, size=4, local_rank=1)


@pytest.mark.parametrize("more", [{}, {"PMIX_RANK": "0"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_a_shell_inside_a_slurm_job_is_no_launcher(more: dict[str, str]) -> None:
    assert detect({**BATCH_SHELL, **more}) == Launcher(name="none")
    interactive = {**BATCH_SHELL, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", **more}
    assert detect(interactive) == Launcher(name="none")


def test_mpirun_inside_a_slurm_job_is_mpirun() -> None:
    # Its daemons are tasks of a step, and the ranks inherit that step's variables.
    assert detect({**STEP, **MPIRUN}).name == "openmpi"
    assert detect({**STEP, **HYDRA}).name == "mpich"


def test_another_pmix_launcher_is_recognised_without_a_size() -> None:
    assert detect({"PMIX_RANK": "5"}) == Launcher(name="pmix", rank=5)


@pytest.mark.parametrize("text", ["", " ", "-1", "two", "1.0", "9" * 50, "\u0663"])
def test_a_variable_that_is_no_number_counts_as_absent(text: str) -> None:
    assert detect({"OMPI_COMM_WORLD_SIZE": text}) == Launcher(name="none")


@given(
    st.dictionaries(st.sampled_from(sorted({**MPIRUN, **HYDRA, **PMIX_STEP})), st.text(max_size=4))
)
def test_no_environment_makes_detection_fail(environment: dict[str, str]) -> None:
    launcher = detect(environment)
    explain_singleton(environment, world_size=1, library_version=OPEN_MPI)
    explain_mismatch(environment, library_version=MPICH)
    assert launcher.size is None or launcher.size >= 0


def test_families_are_told_apart_by_the_version_text() -> None:
    assert family_of(OPEN_MPI) == "openmpi"
    assert family_of(MPICH) == "mpich"
    assert family_of(INTEL) == "intel"
    assert family_of("MVAPICH2 Version: 2.3.7") == "mpich"
    assert family_of("HAL MPI 9000") == "unknown"


@pytest.mark.parametrize(
    ("environment", "world_size"),
    [
        ({}, 1),
        (BATCH_SHELL, 1),
        (MPIRUN, 4),
        (PMIX_STEP, 4),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, 1),
    ],
)
def test_a_world_that_fits_its_launcher_needs_no_explanation(
    environment: dict[str, str], world_size: int
) -> None:
    assert explain_singleton(environment, world_size=world_size, library_version=OPEN_MPI) is None


def test_singletons_under_srun_are_explained_with_the_value_to_use() -> None:
    assert explain_singleton(PMI2_STEP, world_size=1, library_version=OPEN_MPI) == (
        "srun started 4 tasks, but each is alone (an MPI world of 1 rank): "
        "Open MPI v5.0.11 needs srun --mpi=pmix"
    )
    with_type = {**STEP, "SLURM_MPI_TYPE": "none"}
    assert explain_singleton(with_type, world_size=1, library_version=MPICH) == (
        "srun started 4 tasks, but each is alone (an MPI world of 1 rank): "
        "MPICH 5.0.2 needs srun --mpi=pmi2, not --mpi=none"
    )
    unknown = explain_singleton(STEP, world_size=1, library_version="HAL MPI 9000")
    assert unknown is not None
    assert unknown.endswith("HAL MPI 9000 needs another srun --mpi= value; see srun --mpi=list")


def test_the_right_value_that_still_gives_singletons_points_to_mpirun() -> None:
    step = {**PMIX_STEP, "SLURM_MPI_TYPE": "pmix"}
    text = explain_singleton(step, world_size=1, library_version=OPEN_MPI)
    assert text is not None
    assert "although srun ran with --mpi=pmix" in text
    assert text.endswith("use mpirun inside sbatch or salloc")


def test_singletons_under_the_mpirun_of_another_library_are_explained() -> None:
    for explain in (
        explain_mismatch(MPIRUN, library_version=MPICH),
        explain_singleton(MPIRUN, world_size=1, library_version=MPICH),
    ):
        assert explain == (
            "mpirun of Open MPI started 4 ranks, but mpi4py loads MPICH 5.0.2, so each would be "
            "alone: start the job with the mpirun of that installation "
            "(`psdist doctor` shows which is which)"
        )
    other = explain_mismatch(HYDRA, library_version=OPEN_MPI)
    assert other is not None
    assert other.startswith("mpirun of MPICH started 2 ranks, but mpi4py loads Open MPI v5.0.11")


def test_mpich_without_pmix_is_stopped_before_it_aborts() -> None:
    assert explain_mismatch(PMIX_STEP, library_version=MPICH) == (
        "srun started this job with --mpi=pmix, but MPICH 5.0.2 has no PMIx: use srun --mpi=pmi2"
    )
    with_pmix = MPICH + "\nMPICH configure: --with-pmix=/usr"
    assert explain_mismatch(PMIX_STEP, library_version=with_pmix) is None
    assert explain_mismatch(MPIRUN, library_version=with_pmix) is None


@pytest.mark.parametrize(
    ("environment", "library_version"),
    [
        ({}, OPEN_MPI),
        ({}, MPICH),
        (MPIRUN, OPEN_MPI),
        (HYDRA, MPICH),
        (HYDRA, INTEL),
        (PMIX_STEP, OPEN_MPI),
        (PMI2_STEP, MPICH),
        (PMI2_STEP, OPEN_MPI),  # starts, as singletons: explained after MPI_Init
    ],
)
def test_a_library_that_can_be_initialised_is_let_through(
    environment: dict[str, str], library_version: str
) -> None:
    assert explain_mismatch(environment, library_version=library_version) is None


def test_a_library_is_named_by_its_first_words() -> None:
    assert library_name(OPEN_MPI + "\0") == "Open MPI v5.0.11"
    assert library_name(MPICH) == "MPICH 5.0.2"
    assert library_name("\0") == "another MPI"


def test_ranks_outlive_one_another_only_where_the_launcher_was_asked_for_it() -> None:
    assert survives_deaths({"OMPI_MCA_mpi_ft_enable": "1"})  # mpirun --with-ft ulfm sets it
    assert not survives_deaths({"OMPI_MCA_mpi_ft_enable": "0"})
    assert not survives_deaths({"OMPI_COMM_WORLD_SIZE": "4"})
