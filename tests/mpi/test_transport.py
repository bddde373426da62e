"""Transport's contract over MPI, between ranks that do nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_headers_and_control_messages_of_a_pair_keep_their_order(mpi: Mpi, tmp_path: Path) -> None:
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_PROGRESS": "off"}
    program = ("-m", "tests.support.programs.messages.in_order")
    done = run_mpi(3, program, timeout_s=120, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    assert "all in order" in done.stdout, done.text


def test_under_ulfm_what_had_left_the_dead_comes_before_its_loss_and_nothing_after(
    tmp_path: Path,
) -> None:
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_PROGRESS": "off"}
    program = ("-m", "tests.support.programs.deaths.last_words")
    done = run_mpi(3, program, timeout_s=120, env=env, launcher_args=("--with-ft", "ulfm"))
    assert done.returncode == 0, done.text
    host = socket.gethostname()
    said = f": 10 messages, then lost: worker 1 (rank 2 on {host})"
    assert f"worker 0 (rank 1 on {host}){said}" in done.stdout, done.text
    assert f"server 0 (rank 0 on {host}){said}" in done.stdout, done.text


def test_under_ulfm_what_a_successor_sends_comes_although_the_death_was_noticed_late(
    tmp_path: Path,
) -> None:
    """The successor was known first: its offer was taken for the failed one's, and left."""
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_PROGRESS": "off", "PSDIST_SERVERS": "2"}
    program = ("-m", "tests.support.programs.deaths.late_notice")
    done = run_mpi(3, program, timeout_s=120, env=env, launcher_args=("--with-ft", "ulfm"))
    assert done.returncode == 0, done.text
    assert "worker 0 (rank 2 on" in done.stdout, done.text
    assert "it has come" in done.stdout, done.text


def test_who_never_polls_in_vain_keeps_few_of_its_sends(tmp_path: Path) -> None:
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run")}
    done = run_mpi(1, ("-m", "tests.support.programs.messages.never_idle"), timeout_s=120, env=env)
    assert done.returncode == 0, done.text
    assert "300 pushes" in done.stdout, done.text
