"""lr by staleness and delay compensation under mpirun, with a group that is always slow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from psdist.commands import check
from psdist.history import EventKind
from psdist.history.files import read_history
from tests.support.mpirun import REPOSITORY, run_mpi

pytestmark = pytest.mark.mpi

SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "schemes" / "backup_script.py")
QUIET = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.slow
def test_a_group_that_is_always_slow_counts_for_less(tmp_path: Path) -> None:
    words = ["-m", "psdist", "run", "--mode", "async", "--set", "stale_lr=inverse", "--record"]
    words += [
        "--set",
        "delay_compensation=0.04",
        "--group",
        "rank",
        "--servers",
        "1",
        "--set",
        "overlap=full",
    ]
    words += ["--run-dir", str(tmp_path / "run"), SCRIPT, str(tmp_path), "16", "0.01", "always"]
    done = run_mpi(4, words, timeout_s=120, env=QUIET)
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    history = read_history(tmp_path / "run")
    (server,) = history.servers
    applied = server.events[server.events["kind"] == EventKind.APPLY]
    shares = applied["lr_scale"] / (applied["weight"] / history.run.num_workers)
    least = [float(np.min(shares[applied["group"] == group])) for group in range(3)]
    assert least[2] < 0.5
    assert min(least[:2]) > least[2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (served,) = summary["per_server"]
    assert served["copy_bytes"] == 3 * served["parameter_bytes"]
    assert "of what each of 3 groups was given" in (tmp_path / "run/logs/rank-0.log").read_text()
