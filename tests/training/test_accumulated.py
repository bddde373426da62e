"""Gradients that are accumulated when a checkpoint is made: no step has used them, and they are
in it.

tests/support/programs/accumulates.py is the script.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.forked_runs import ForkedRuns
from tests.support.mpirun import REPOSITORY, Completed

SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "accumulates.py")
STEPS = 14


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    with ForkedRuns() as found:
        yield found


def train(runs: ForkedRuns, path: Path, *given: str, every: int = 100, **more: str) -> Completed:
    words = ["--run-dir", str(path / "run"), "--resume", "--checkpoint-every", str(every)]
    options = {"steps": str(STEPS), "out": str(path / "out.safetensors")}
    options |= {"checkpoints": str(path / "run" / "checkpoints"), **more}
    return runs.play("run", *words, SCRIPT, *given, *(f"{k}={v}" for k, v in options.items()))


def gradients_in(run_dir: Path) -> int:
    """Bytes of tensors in the worker's file; it holds no others that are so large."""
    (path,) = run_dir.glob("checkpoints/*/worker-0.safetensors")
    with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call] # safetensors'
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(16 * 3 for shape in shapes if shape == [3, 16])


@pytest.fixture(scope="module")
def whole(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run; zeros or none make no difference to it."""
    path = tmp_path_factory.mktemp("whole")
    assert train(runs, path).returncode == 0
    return path


@pytest.mark.parametrize(("every", "zero"), [(4, "none"), (5, "zeros"), (6, "zeros")])
def test_a_set_that_accumulates_goes_on_with_the_same_bits(
    every: int, zero: str, runs: ForkedRuns, whole: Path, tmp_path: Path
) -> None:
    parts = tmp_path
    assert train(runs, parts, every=every, die=str(every + 1), zero=zero).returncode == 9
    # A used or zero gradient takes no room.
    assert bool(gradients_in(parts / "run")) == bool(every % 3)
    done = train(runs, parts, zero=zero)
    assert f"begins at [{every}, {every // 3}]" in done.stdout, done.text
    assert done.returncode == 0, done.text
    assert "dropped" not in done.text
    found = [(path / "out.safetensors").read_bytes() for path in (whole, parts)]
    assert found[0] == found[1]


def test_without_a_loop_of_psdists_they_are_dropped_with_a_line(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    assert train(runs, tmp_path, loop="clock", at="4", die="5").returncode == 9
    done = train(runs, tmp_path, loop="clock")
    assert done.returncode == 0, done.text
    assert "begins at [4, 1]" in done.stdout
    assert done.text.count("(parameter set 1), are dropped") == 1
