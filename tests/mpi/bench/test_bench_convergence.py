"""`psdist bench convergence` on real ranks: schemes and DDP train the same task, one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi

STEPS = 12
PROGRAM = ("-m", "psdist", "bench", "convergence", "--task", "digits", "--steps", str(STEPS))
SCHEMES = ("codec=int4/sign", "push_codec=int8 mode=ssp staleness=2 local_steps=3")
PARAMETERS = 9930


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_schemes_and_ddp_train_the_same_task_on_the_same_ranks(mpi: Mpi, tmp_path: Path) -> None:
    file, run_dir = tmp_path / "convergence.json", tmp_path / "run"
    done = run_mpi(
        3,
        (*PROGRAM, "--every", "4", "--scheme", SCHEMES[0], "--scheme", SCHEMES[1],
         "--ddp", "plain,powersgd:1", "--link", "10Mbit", "--servers", "1",
         "--json", str(file), "--plot", str(tmp_path / "curves.svg")),
        timeout_s=180,
        mpi=mpi,
        env={"PSDIST_RUN_DIR": str(run_dir), "PSDIST_GROUP": "rank"},
    )  # fmt: skip
    assert done.returncode == 0, done.text
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["sync, no codec", *SCHEMES, "DDP", "DDP, PowerSGD rank 1"]
    for row in rows.values():
        assert [step for step, _, _ in row["curve"]] == [4, 8, 12]
        assert all(math.isfinite(loss) for _, _, loss in row["curve"])
        assert row["seconds"] > 0
        assert row["loss"] < math.log(10)  # better than a guess
    base, coded, local, ddp, power = rows.values()
    # The same samples, values and steps: the same loss, except for the order of sums.
    assert ddp["loss"] == pytest.approx(base["loss"], rel=1e-3)
    assert coded["loss"] != base["loss"]
    assert coded["left_out"] > 0
    assert (base["left_out"], base["staleness"]) == (None, 0)
    assert local["staleness"] <= 2
    # Two workers push and pull every value in every step, and get the first ones.
    every_step = 2 * 2 * 4 * PARAMETERS * STEPS
    assert every_step <= base["bytes"] < every_step * 1.2
    assert coded["bytes"] < base["bytes"] / 4
    assert local["bytes"] < base["bytes"] / 2
    assert ddp["bytes"] == 2 * 4 * PARAMETERS * STEPS
    assert power["bytes"] < ddp["bytes"]
    # All of the bytes of one direction cross the server's link, after the computation.
    assert base["link_bytes"] == pytest.approx(base["bytes"])
    at_link_s = result["alone_s"] + base["link_bytes"] / STEPS / 1.25e6
    assert base["at_link"]["10Mbit"] == pytest.approx(at_link_s)
    for job, codecs in (("run", False), ("run-2", True), ("run-3", True)):
        summary = json.loads((tmp_path / job / "summary.json").read_text(encoding="utf-8"))
        assert summary["exit"] == "completed"
        assert (summary["coding"] is not None) == codecs
    assert "seconds at 10Mbit, computed" in (tmp_path / "curves.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        pytest.param(
            ("--scheme", "codec=int8 mode=async"),
            "a relative reply needs the version",
            id="settings",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--scheme", "servers=3"), "none of a scheme's settings", id="words"),
    ],
)
def test_a_scheme_that_cannot_be_is_refused_once(
    words: tuple[str, str], line: str, tmp_path: Path
) -> None:
    done = run_mpi(
        3, (*PROGRAM, *words), timeout_s=90, env={"PSDIST_RUN_DIR": str(tmp_path / "run")}
    )
    assert done.returncode == 2, done.text
    assert done.text.count(line) == 1
