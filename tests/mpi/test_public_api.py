"""A script's view of its job, under both MPIs: a job each, that `psdist run --workers` starts.

tests/support/programs/api_script.py is the script; every worker writes down what it saw.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpirun import (
    REPOSITORY,
    Mpi,
    environment_prefix,
    require,
    run_mpi,
    run_program,
)

pytestmark = pytest.mark.mpi

TIMEOUT_S = 120
SCRIPT = REPOSITORY / "tests" / "support" / "programs" / "api_script.py"
QUIET = {"PSDIST_PROGRESS": "off"}


@dataclass(frozen=True)
class Seen:
    """One job of two workers and a server."""

    run_dir: Path
    by_worker: list[dict[str, Any]]

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


@pytest.fixture(scope="module", params=["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    mpi: Mpi = request.param
    require(mpi)
    folder = tmp_path_factory.mktemp(mpi)
    python = str(environment_prefix(mpi) / "bin" / "python")
    words = ["-m", "psdist", "run", "--workers", "2", "--run-dir", str(folder / "run")]
    words += ["-m", "tests.support.programs.api_script", str(folder / "seen")]
    done = run_program([python, *words], timeout_s=TIMEOUT_S, env=QUIET)
    assert done.returncode == 0, done.text
    by_worker = [json.loads((folder / f"seen.{worker}").read_text()) for worker in range(2)]
    return Seen(run_dir=folder / "run", by_worker=by_worker)


# -- ranks ---------------------------------------------------------------------------------------


def test_rank_and_world_size_count_workers_only_as_under_torchrun(seen: Seen) -> None:
    counts = {"world_size": 2, "num_workers": 2, "num_servers": 1, "servers": 1}
    assert [each["numbers"] for each in seen.by_worker] == [
        {"rank": 0, "worker": 0, "local_rank": 0, "mpi_rank": 1, **counts},
        {"rank": 1, "worker": 1, "local_rank": 1, "mpi_rank": 2, **counts},
    ]


def test_files_have_the_rank_of_mpi_with_the_worker_beside_it(seen: Seen) -> None:
    ranks = json.loads((seen.run_dir / "ranks.json").read_text())
    assert [(each["rank"], each["role"], each["worker"]) for each in ranks] == [
        (0, "server", None),
        (1, "worker", 0),
        (2, "worker", 1),
    ]
    logged = [(line["rank"], line["worker"]) for line in seen.lines("metrics.jsonl")]
    assert sorted(logged) == [(1, 0), (2, 1)]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_world_with_another_number_of_workers_is_one_line(mpi: Mpi, tmp_path: Path) -> None:
    words = ["-m", "psdist", "run", "--workers", "2", "--run-dir", str(tmp_path / "run")]
    words += ["--servers", "2", str(SCRIPT), "never"]
    done = run_mpi(3, words, timeout_s=TIMEOUT_S, mpi=mpi, env=QUIET)
    assert done.returncode == 2, done.text
    told = [line for line in done.stderr.splitlines() if line.startswith("psdist: error: ")]
    assert told == [
        "psdist: error: --workers 2 does not fit: the launcher started 3 ranks; 1 of them would "
        "work besides 2 that serve; start as many ranks as workers and servers together, say with "
        "--servers how many serve, or leave --workers out"
    ], done.text
    assert not (tmp_path / "run").exists()


# -- what is reported and saved --------------------------------------------------------------------


def test_a_mean_takes_a_tree_of_numbers_and_tensors(seen: Seen) -> None:
    for each in seen.by_worker:
        assert each["mean"] == {"worker": 0.5, "pair": [1.0, 1.0]}
        assert each["per_class"] == [0.0, 0.5, 1.0]


def test_loaders_of_the_scripts_own_are_shared_out(seen: Seen) -> None:
    first, second = seen.by_worker
    assert (first["batches"], second["batches"]) == ([2], [3])
    assert (first["sampled"], second["sampled"]) == ([0, 2, 4], [1, 3, 0])


def test_flags_and_the_groups_norm_are_the_same_on_every_worker(seen: Seen) -> None:
    first, second = seen.by_worker
    assert first["flags"] == second["flags"] == [True, False, True]
    assert first["norm"] == second["norm"] > 0.1


def test_a_log_line_may_have_names_that_are_no_identifiers(seen: Seen) -> None:
    for line in seen.lines("metrics.jsonl"):
        assert (line["loss/train"], line["epoch"]) == (0.5, 1)
    summary = json.loads((seen.run_dir / "summary.json").read_text())
    assert summary["last"] == {"loss/train": 0.5, "epoch": 1}


def test_a_saved_model_can_be_read_by_whom_the_umask_lets(seen: Seen) -> None:
    saved = seen.run_dir.with_name("model.safetensors")
    (seen.run_dir / "by-hand").touch()
    assert saved.stat().st_mode == (seen.run_dir / "by-hand").stat().st_mode


# -- mistakes, each caught, told to both workers ---------------------------------------------------

KEEP = "keep what job.prepare returns (model, optimizer = job.prepare(model, optimizer)) and call"
TOLD = {
    "step of the original": "this optimizer was passed to job.prepare, and its own step() would "
    f"train this worker alone; {KEEP} step() of that optimizer",
    "save of initial values": "job.save: workers 0, 1 computed gradients and never called "
    "optimizer.step() of the prepared optimizer, so the servers hold older values; "
    f"{KEEP} step() of that optimizer in every iteration. To change hyperparameters, write to its "
    "param_groups instead of making another optimizer",
    "save under another name": "job.save('model.pt'): it writes a safetensors file, whose name "
    "must end in .safetensors: 'model.safetensors' (safetensors.torch.load_file reads it)",
    "different rates": "iteration 1: workers 0 and 1 of one group disagree on hyperparameters: "
    "lr 0.1 against 0.2 in optimizer group 0; nothing was pushed. Every worker must use the same "
    "schedule: one that follows a loss must follow job.mean(loss)",
}


def test_mistakes_say_the_same_on_every_worker_and_can_be_caught(seen: Seen) -> None:
    assert [each["mistakes"] for each in seen.by_worker] == [TOLD, TOLD]
    summary = json.loads((seen.run_dir / "summary.json").read_text())
    assert (summary["groups"], summary["clocks"]) == (1, [3])
