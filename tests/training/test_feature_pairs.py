"""Every pair of features that docs/reference/conflicts.md does not list works: real jobs on the
virtual network, a few features in each, so that every allowed pair is in one; the check proves each
run.

tests/protocol/deaths/test_feature_pairs.py has spares and shrinking groups.

More by hand: ``python -m tests.training.test_feature_pairs 100``, the number of seeds.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.protocol.ids import server_id, worker_id
from tests.support.feature_pairs import covering, features_played, together, uses_adam
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.problems import Problem, flat
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

PROBLEM = Problem()
ELSEWHERE = ("spares", "on_group_death")
NOT_HERE = ("trace", "server_device", "group_tier", "encode_on")
"""Settings of machines that the virtual network has not."""
EXAMPLES = features_played(without=(*ELSEWHERE, *NOT_HERE))
RUNS = covering(EXAMPLES)
VICTIM = 3


def script_of(settings: Mapping[str, Any]) -> Any:
    """Two epochs of a loader; the script reports its loss, and sets the mode if it may."""

    def train(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        kind = torch.optim.AdamW if uses_adam(settings) else torch.optim.SGD
        model, optimizer = job.prepare(model, kind(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(96, PROBLEM.num_inputs, generator=generator)
        y = torch.randint(0, PROBLEM.num_classes, (96,), generator=generator)
        loader = job.loader(TensorDataset(x, y), batch_size=4)
        for epoch in job.epochs(2):
            if epoch and settings.get("set_mode") == "allowed":
                job.set_mode("ssp", staleness=1)
            for inputs, labels in loader:
                stage.sleep(1e-3 * (1 + 3 * (job.worker == 2)))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                job.report(float(loss.detach()))
        return {"parameters": flat(model), "clock": job.clock}

    return train


def play(run: tuple[int, ...], path: Path, seed: int) -> None:
    """Play a run of these features and prove it. A worker or a server fails in it if it may."""
    settings = together([EXAMPLES[each] for each in run])
    assert settings is not None
    case = Case(
        name="pair",
        script=script_of(settings),
        servers=2,
        groups=((0, 1), (2,), (VICTIM,)),
        settings={"record": True, **settings},
    )
    may_fail = [worker_id(VICTIM)] * bool(settings.get("max_deaths"))
    if settings.get("replication") == "buddy":
        may_fail += [server_id(1), server_id(0)]
    fails = (may_fail[seed % len(may_fail)], 1 + seed % 7) if may_fail else None
    link = LinkModel(latency_s=1e-5, jitter_s=(1e-4, 1e-3, 1e-2)[seed % 3])
    with (
        warnings.catch_warnings(),
        mock.patch("psdist.workers.early.overlap.BACKWARD_S", 0.0),
        mock.patch("psdist.workers.early.group_overlap.BUCKET_S", 0.0),
    ):
        if fails is not None:  # its files stay open
            warnings.simplefilter("ignore", ResourceWarning)
        run_virtually(case, path, seed=seed, link=link, fails=fails)
        gc.collect()
    report = check_run(path, read_histories(path))
    assert not report.violations, report.violations[:3]
    assert report.num_applies
    # The records of a worker that fails end before it.
    assert report.proved or fails is not None, report.notes


def prove(seed: int) -> None:
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                play(run, Path(folder) / "run", seed)
            except Exception as error:  # say which features, whatever went wrong
                settings = together([EXAMPLES[each] for each in run])
                raise AssertionError(f"seed {seed}: {settings}: {error}") from error


def test_every_allowed_pair_of_features_is_proved() -> None:
    prove(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_more_seeds() -> None:
    for seed in range(1, 10):
        prove(seed)


LOOK = """
import sys
from psdist.commands.cli import main

try:
    main()
except SystemExit as ended:
    print("status", ended.code)
parts = ("torch", "mpi4py", "psdist.servers", "psdist.workers", "psdist.features.")
print("imported", [each for each in sys.modules if each.startswith(parts)])
"""
"""Runs psdist, and prints what of the parts of features it has imported."""


def test_help_and_check_import_no_torch_and_no_part_of_a_feature(tmp_path: Path) -> None:
    play(RUNS[0], tmp_path / "run", 0)
    for words in (["--help"], ["check", str(tmp_path / "run")]):
        command = [sys.executable, "-c", LOOK, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "status 0" in done.stdout, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        # Data of run.json, which the check reads.
        assert lines[-1] in ("imported []", "imported ['psdist.features.backup']")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(int(sys.argv[1])):
        prove(number)
