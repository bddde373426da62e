"""Scripts that tutorials show run, and so do the cells of the notebook."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, run_program
from tests.support.pages import blocks, execute, python_blocks, read_notebook, whole_scripts

TUTORIALS = sorted(
    path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/tutorials/*.md")
)
SCRIPTS = REPOSITORY / "tests" / "support" / "programs" / "page_scripts.py"


@pytest.mark.parametrize("page", TUTORIALS)
def test_code_of_a_tutorial_is_python(page: str) -> None:
    for block in python_blocks(page):
        ast.parse(block)


def test_settings_that_a_tutorial_shows_are_settings(tmp_path: Path) -> None:
    shown = [block for page in TUTORIALS for block in blocks(page, "toml")]
    assert len(shown) == 1
    (tmp_path / "run.toml").write_text(shown[0])
    command = [sys.executable, "-m", "psdist", "settings", "--show", "--config", "run.toml", "a.py"]
    done = run_program(command, timeout_s=60, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.text
    assert "report.record = true  (run.toml)" in done.stdout


def test_each_page_for_those_who_come_from_another_library_has_one_script() -> None:
    converted = [page for page in TUTORIALS if "/from-" in page]
    assert len(converted) == 4
    assert [len(whole_scripts(page)) for page in converted] == [1, 1, 1, 1]


@pytest.mark.mpi
def test_the_scripts_of_the_tutorials_train(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "psdist", "run", "-n", "2", "--run-dir", "run", str(SCRIPTS)]
    done = run_program(
        [*command, *TUTORIALS], timeout_s=200, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}
    )
    assert done.returncode == 0, done.text
    clocks = [line for line in done.stdout.splitlines() if ": clock " in line]
    assert clocks == [
        "docs/tutorials/from-accelerate.md: clock 32",
        "docs/tutorials/from-ddp.md: clock 48",
        "docs/tutorials/from-horovod.md: clock 32",
        "docs/tutorials/from-rpc.md: clock 16",
        "docs/tutorials/tables.md: clock 16",
    ], done.text
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.mpi
def test_the_notebook_runs_and_sees_what_its_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    outputs = execute(read_notebook(REPOSITORY / "docs/tutorials/staleness.ipynb"), cwd=tmp_path)
    printed = "".join(each.get("text", "") for cell in outputs for each in cell)
    assert "sync   at most 0 behind" in printed
    assert "ssp 3  at most 3 behind" in printed
    pictures = [each for cell in outputs for each in cell if "image/png" in each.get("data", {})]
    assert len(pictures) == 1
