"""Steps by speed over MPI: killed within a round, or asked to end, and resumed, every sample of an
epoch is seen once.

tests/support/programs/resuming/by_speed.py is the script.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.mpirun import Completed, environment_prefix, require, run_program
from tests.support.programs.resuming.by_speed import COUNT, EPOCHS

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

WORKERS = 2


def run(run_dir: Path, *words: str, script: tuple[str, ...] = ()) -> Completed:
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", str(WORKERS), "--servers", "1"]
    argv += ["--group", "rank", "--local-steps", "8", "--set", "steps_by=speed", "--record"]
    argv += ["--resume", "--run-dir", str(run_dir), *words]
    argv += ["-m", "tests.support.programs.resuming.by_speed", f"{run_dir}.out", *script]
    repository = str(Path(__file__).parents[3])
    env = {"PSDIST_PROGRESS": "off", "PYTHONPATH": repository}
    return run_program(argv, timeout_s=240, env=env)


@pytest.mark.parametrize(
    ("end", "words", "status"),
    [
        ("kill", ("--checkpoint-every", "2"), None),
        ("usr1", ("--set", "on_usr1=requeue"), 75),
        ("kill", ("--checkpoint-every", "2", "--mode", "ssp", "--staleness", "4"), None),
        ("usr1", ("--set", "on_usr1=requeue", "--mode", "async"), 75),
    ],
)
def test_every_sample_is_seen_once(
    end: str, words: tuple[str, ...], status: int | None, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = run(run_dir, *words, script=("--end", end))
    assert first.returncode == status if status is not None else first.returncode != 0, first.text
    again = run(run_dir, *words)
    assert again.returncode == 0, again.text
    assert "resumes from checkpoint step-" in again.text
    seen = [json.loads(Path(f"{run_dir}.out-{n}.json").read_text()) for n in range(WORKERS)]
    for epoch in map(str, range(EPOCHS)):
        found = Counter(chain.from_iterable(each[epoch] for each in seen))
        assert found == Counter(range(COUNT)), epoch
    report = check_run(run_dir, read_histories(run_dir))
    assert not report.violations, report.violations
