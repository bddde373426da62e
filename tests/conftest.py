"""How the whole suite runs: fast tests first, long ones only when asked for.

Owns: the order of the stages, the `--all` option, hypothesis' settings, the Slurm cluster as a
fixture, and the line at the end on what is not beside the clone. What a test needs that may be
missing (an MPI, the cluster) is decided where it is started, in tests/support/mpirun.py and
tests/support/slurm/cluster.py.

    python -m pytest tests                 # everything but what is marked slow
    python -m pytest tests -n 2 --dist loadscope --no-loadscope-reorder    # as tests/run.sh does
    python -m pytest tests --all -m slurm  # all of the Slurm tests
    python -m pytest tests/protocol --schedules 5000 --large-schedules 100
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import machine_files
from tests.support.slurm.cluster import slurm_cluster

__all__ = ["slurm_cluster"]

# Triton decides when it is imported, which torch may do in any test, whether it interprets kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A mistake shows in the stage that costs least: plain tests, then MPI, then the cluster.
STAGES = ("mpi", "slurm")
ON_THE_CLUSTER = "tests/slurm/"
IN_ONE_MPIRUN = "tests/training/"  # those of its files that say so
# The longest file. Its tests share nothing: dealt out one by one, and last, they fill what the
# others leave, so that all processes end together.
ONE_BY_ONE = "tests/mpi/test_bad_input.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--schedules",
        type=int,
        default=100,
        help="how many small seeded schedules tests/protocol plays (100)",
    )
    parser.addoption(
        "--large-schedules",
        type=int,
        default=10,
        help="how many large ones: up to 16 groups, 8 servers, 64 chunks (10)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # No deadlines: nothing timed is asserted, and the machine may be busy. The usual run draws the
    # same examples every time, so that a failure belongs to the change under test; --all explores.
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("usual", common, derandomize=True)
    settings.register_profile("all", common, max_examples=1000, print_blob=True)
    settings.load_profile("all" if config.getoption("--all") else "usual")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=_stage)  # stable: within a stage the files' order stays
    if hasattr(config, "workerinput"):
        # Side by side: what is on the cluster from the first test to the last begins at once, and
        # the others fill the time, in the order of the stages.
        items.sort(key=_turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """torch and thousands of tests stay until the end: the collector need not look at them, least
    of all while they come."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Side by side: a file's tests stay together, and files that share what is started once: the
    cluster, and the mpirun of all training jobs."""
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def scope_of(file: str) -> str:
        if file.startswith(ON_THE_CLUSTER):
            return ON_THE_CLUSTER
        if (
            file.startswith(IN_ONE_MPIRUN)
            and "\nOVER_MPI = " in (config.rootpath / file).read_text()
        ):
            return IN_ONE_MPIRUN
        return file

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file == ONE_BY_ONE else scope_of(file)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def alone_on_the_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """There is one cluster, and some tests count what its links carry: its tests take turns."""
    if request.node.get_closest_marker("slurm") is None:
        yield
        return
    # All processes of a run have the parent of their temporary folders in common.
    with (tmp_path_factory.getbasetemp().parent / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stage(item: pytest.Item) -> int:
    return max(
        (STAGES.index(name) + 1 for name in STAGES if item.get_closest_marker(name)), default=0
    )


def _turn(item: pytest.Item) -> int:
    if item.nodeid.startswith(ON_THE_CLUSTER):
        return 0
    return 2 if item.nodeid.startswith(ONE_BY_ONE) and _stage(item) else 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    line = machine_files.summary([str(report.longrepr) for report in skipped])
    if line:
        terminalreporter.write_line(line)
