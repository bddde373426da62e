"""A group over MPI does what every other one does, bit for bit, and says what went wrong."""

from __future__ import annotations

import re

import pytest

from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = ["-W", "error", "-m", "tests.support.programs.messages.group_over_mpi"]


@pytest.mark.parametrize(
    ("mpi", "longest"),
    [
        ("openmpi", None),
        pytest.param("mpich", 100, marks=pytest.mark.slow),
        pytest.param("openmpi", 100, marks=pytest.mark.slow),
        pytest.param("mpich", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_sum_in_worker_order_and_gather_agree_and_broadcast(
    mpi: Mpi, longest: int | None
) -> None:
    env = {} if longest is None else {"LONGEST": str(longest)}
    done = run_mpi(4, PROGRAM, timeout_s=120, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    assert sorted(re.findall(r"^(\d of \d: \w+)$", done.stdout, re.M)) == sorted(
        f"{place} of {size}: True" for size in (2, 3, 4) for place in range(size)
    ), done.text
    assert sorted(re.findall(r"^(\d on hosts \d+: \w+)$", done.stdout, re.M)) == sorted(
        f"{place} on hosts {hosts}: True" for hosts in ("0011", "0100") for place in range(4)
    ), done.text
    assert len(re.findall(r"^\d of \d at once: True$", done.stdout, re.M)) == 2 + 3 + 4, done.text
    exchanged = re.findall(r"^\d of \d exchanged: (\w+)$", done.stdout, re.M)
    assert exchanged == ["True"] * 2 * (2 + 3 + 4), done.text
    assert re.findall("by tier: (.*)", done.stdout) == ["MpiChannel"] * 4

    called = "the worker at place 0 of the group called save; the worker at place 1 of the group "
    for size in (2, 3, 4):
        told = re.findall(rf"^\d of {size} told: (.*)$", done.stdout, re.M)
        assert len(told) == size
        assert all(f"{called}called pull" in each for each in told)
    assert "for the other workers of this worker's group in barrier, longer than" in done.stdout
    assert sorted(re.findall("refused: (.*)", done.stdout)) == [
        *["slices end at element 25 of 24"] * 2,
        *["slices give elements from 11 on of flat 0 twice"] * 2,
        "the result of an operation of a group before it was done",
    ]


def test_a_rank_that_ends_is_an_error_for_its_group() -> None:
    args = ("--with-ft", "ulfm")
    done = run_mpi(2, PROGRAM, timeout_s=120, env={"ENDS": "1"}, launcher_args=args)
    assert "ended: the reduce-scatter of this worker's group failed, perhaps because" in done.text
