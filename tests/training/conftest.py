"""The training jobs over MPI of all modules here share one mpirun.

A module names its cases, tests/support/programs/training/<OVER_MPI>.py, and asks for ``outcomes``.
"""

from __future__ import annotations

import pytest

from tests.support.programs.training.cases import Outcome, Outcomes, run_over_mpi

TIMEOUT_S = 540


@pytest.fixture(autouse=True)
def leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short backward passes are."""
    monkeypatch.setattr("psdist.workers.early.overlap.BACKWARD_S", 0.0)
    monkeypatch.setattr("psdist.workers.early.group_overlap.BUCKET_S", 0.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for all cases, with all else that the machine does."""
    for item in items:
        if cases_of(item) is not None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S + 60))


def cases_of(item: pytest.Item) -> str | None:
    return getattr(getattr(item, "module", None), "OVER_MPI", None)


@pytest.fixture(scope="session")
def all_outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    """Outcomes of the cases of all modules whose tests are to run."""
    modules = sorted({name for item in request.session.items if (name := cases_of(item))})
    return run_over_mpi(modules, tmp_path_factory.mktemp("over-mpi"), timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, all_outcomes: Outcomes) -> dict[str, Outcome]:
    """Outcomes of this module's cases, by name."""
    return all_outcomes[request.module.OVER_MPI]
