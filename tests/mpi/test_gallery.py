"""The scripts of examples/ under ``psdist run``, at small size (docs/guides/examples.md)."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from safetensors import safe_open

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.mpirun import REPOSITORY, run_program

FOLDER = REPOSITORY / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
PAGE = REPOSITORY / "docs" / "guides" / "examples.md"
SAVED = {
    "dcgan": ["generator"],
    "dqn": ["policy"],
    "fine_tuning": ["fine_tuned"],
    "seq2seq": ["decoder", "encoder"],
}
"""Models that a script saves, unless it saves one under its own name."""
SAMPLE = {"dcgan", "dlrm", "dqn", "image_model", "language_model", "stream"}
"""Scripts that run without --all."""


def run_script(script: str, *options: str, folder: Path, num_ranks: int, words: str = "") -> None:
    command = [sys.executable, "-m", "psdist", "run", "-n", str(num_ranks), "--group", "rank"]
    command += ["--run-dir", "run", "--record", "--set", "checksum_every=2", *options]
    command += [str(FOLDER / f"{script}.py"), *words.split()]
    env = {"PYTHONPATH": str(REPOSITORY)}
    done = run_program(command, timeout_s=240, cwd=folder, env=env)
    assert done.returncode == 0, done.text
    full = re.search(r"full size: psdist run --workers 4 examples/(\w+)\.py --full", done.stdout)
    assert full, done.text
    assert full.group(1) == script
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["exit"] == "completed"
    assert all(min(each["clocks"]) > 0 for each in summary["sets"])
    assert summary["last"]["loss"] == summary["last"]["loss"], "not a number"
    report = check_run(folder / "run", read_histories(folder / "run"))
    assert report.proved, report
    for name in SAVED.get(script, [script]):
        with safe_open(folder / f"{name}.safetensors", "pt") as saved:
            assert saved.keys()


@pytest.mark.mpi
@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=[] if each in SAMPLE else pytest.mark.slow) for each in SCRIPTS],
)
def test_a_script_of_the_gallery_trains_on_a_server_and_a_worker(
    script: str, tmp_path: Path
) -> None:
    run_script(script, folder=tmp_path, num_ranks=2)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("options", [["--mode", "sync"], ["--mode", "ssp", "--staleness", "2"]])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_the_gallery_trains_in_groups_and_is_proved(
    script: str, options: list[str], tmp_path: Path
) -> None:
    run_script(script, *options, folder=tmp_path, num_ranks=4)


@pytest.mark.mpi
@pytest.mark.slow
def test_the_language_model_trains_with_checkpointed_activations(tmp_path: Path) -> None:
    run_script("language_model", folder=tmp_path, num_ranks=3, words="--checkpoint-activations")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_begins_with_the_commands_of_both_sizes_and_is_on_the_page(script: str) -> None:
    lines = (FOLDER / f"{script}.py").read_text(encoding="utf-8").splitlines()
    assert lines[2].startswith(f"    psdist run -n 3 examples/{script}.py ")
    assert lines[3].startswith(f"    psdist run --workers 4 examples/{script}.py --full ")
    assert f"(../../examples/{script}.py)" in PAGE.read_text(encoding="utf-8")


def test_the_full_language_model_has_the_size_that_its_docstring_gives() -> None:
    module = import_module("examples.language_model")
    num_parameters = sum(each.numel() for each in module.GPT(**module.FULL).parameters())
    assert f"{num_parameters / 1e6:.0f} million parameters" in str(module.__doc__)


def test_the_full_image_model_has_the_size_that_its_docstring_gives() -> None:
    module = import_module("examples.image_model")
    num_parameters = sum(each.numel() for each in module.build_model(64, 2).parameters())
    assert f"{num_parameters / 1e6:.1f} million parameters" in str(module.__doc__)
