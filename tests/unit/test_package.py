"""The package as users see it: what it exports, what importing it costs, what is distributed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import psdist
from psdist import errors
from psdist.commands.cli import JOB_SCRIPTS
from psdist.job import Job
from psdist.workers.model.optimizer import ServedOptimizer

REPOSITORY = Path(__file__).resolve().parents[2]
LINKED = ("servers", "topology", "workers")


def python(*words: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(path)},
    )


def test_the_public_names_are_these() -> None:
    assert psdist.__all__ == [
        "FTRL",
        "BuriedError",
        "CheckpointError",
        "CodecError",
        "CollectiveError",
        "ConfigError",
        "Embedding",
        "EmbeddingBag",
        "GroupReformedError",
        "HistoryError",
        "HostLostError",
        "HyperparameterError",
        "InvariantError",
        "Job",
        "JobEndedError",
        "LaunchError",
        "LazyAdam",
        "MemberLostError",
        "ModelError",
        "NonFiniteGradientError",
        "OptimizerRefusedError",
        "PeerLostError",
        "PlacementError",
        "ProtocolError",
        "PsdistError",
        "RowAdagrad",
        "RowSGD",
        "RowWiseAdagrad",
        "ServedOptimizer",
        "ServersLostError",
        "TraceError",
        "TransportError",
        "UsageError",
        "UserError",
        "WaitTimeoutError",
        "__version__",
        "init",
    ]
    assert set(psdist.__all__) <= set(dir(psdist))
    assert callable(psdist.init)
    assert psdist.Job is Job
    assert psdist.ServedOptimizer is ServedOptimizer
    with pytest.raises(AttributeError, match="module 'psdist' has no attribute 'Server'"):
        _ = psdist.Server


def test_every_error_is_public() -> None:
    defined = {name: each for name, each in vars(errors).items() if isinstance(each, type)}
    assert {name: getattr(psdist, name) for name in defined} == defined


def test_importing_psdist_imports_neither_torch_nor_mpi_nor_numpy(tmp_path: Path) -> None:
    program = (
        "import psdist, sys\n"
        "psdist.PsdistError, psdist.UsageError, dir(psdist)\n"
        "sys.exit(repr({'torch', 'mpi4py', 'numpy'} & set(sys.modules)))"
    )
    done = python("-c", program, path=REPOSITORY, cwd=tmp_path)
    assert done.stderr == "set()\n"


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_package_refuses_a_second_name(name: str) -> None:
    done = python("-c", f"import {name}", path=REPOSITORY, cwd=REPOSITORY)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: this folder is the package psdist.{name}; import it by that name: under a "
        "second name its classes would be other classes than the ones psdist itself uses"
    )


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_package_is_a_link_to_the_folder_beside(name: str) -> None:
    assert os.readlink(REPOSITORY / "psdist" / name) == f"../{name}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build leaves files in their folders."""
    pytest.importorskip("setuptools", reason="distributions are built with it, without a network")
    sources = tmp_path_factory.mktemp("distribution") / "sources"
    for name in ("psdist", *LINKED, "containers", "docs", "examples", "slurm"):
        shutil.copytree(
            REPOSITORY / name,
            sources / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for path in REPOSITORY.iterdir():
        if path.is_file():
            shutil.copy(path, sources)
    return sources


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    folder = sources.parent
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = python(*words, "--wheel-dir", str(folder), str(sources), path=sources, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("psdist_mpi-*.whl")
    return built


def test_a_source_distribution_has_job_scripts_examples_docs_and_pinned_versions(
    sources: Path, wheel: Path
) -> None:
    program = (
        "from setuptools import build_meta\nimport sys\nprint(build_meta.build_sdist(sys.argv[1]))"
    )
    folder = wheel.parent
    done = python("-c", program, str(folder), path=sources, cwd=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    archive = folder / done.stdout.splitlines()[-1]
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        files = {member.name.partition("/")[2] for member in opened if member.isfile()}
    assert archive.name.startswith("psdist_mpi-")
    wanted = {
        *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "NOTICE", "README.md"),
        *("SECURITY.md", "constraints.txt", "pyproject.toml", "setup.cfg"),
        *("slurm/quickstart.sh", "slurm/venv.sh", "slurm/requeue.sbatch"),
        *("containers/Dockerfile", "containers/psdist.def", "examples/language_model.py"),
        *(
            "docs/dev/design.md",
            "docs/convergence-10mbit.svg",
            "docs/bench/kill-matrix.json",
        ),
        *("psdist/py.typed", "psdist/servers/protocol/state.py"),
    }
    assert wanted <= files
    assert not {name for name in names if "__pycache__" in name or name.startswith("tests/")}


def test_a_wheel_has_the_licence_and_says_so(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert texts["LICENSE"] == (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert texts["NOTICE"] == (REPOSITORY / "NOTICE").read_text(encoding="utf-8")
    fields = texts["METADATA"].split("\n\n")[0].splitlines()
    assert "Name: psdist-mpi" in fields
    assert "License: Apache-2.0" in fields or "License-Expression: Apache-2.0" in fields
    assert "Author: The psdist authors" in fields


def test_the_citation_has_the_version_and_the_licence_of_the_package() -> None:
    lines = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {psdist.__version__}" in lines
    assert "license: Apache-2.0" in lines


def test_a_wheel_contains_every_module_and_linked_ones_as_files(wheel: Path, sources: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            item.filename: archive.read(item)
            for item in archive.infolist()
            if item.filename.endswith(".py")
        }
    folders = [sources / "psdist", *(sources / "psdist" / name for name in LINKED)]
    files = {path for folder in folders for path in folder.rglob("*.py")}
    assert packed == {str(path.relative_to(sources)): path.read_bytes() for path in files}
    assert "psdist/servers/protocol/state.py" in packed


def test_a_wheel_carries_the_job_scripts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [each for each in archive.namelist() if each.startswith("psdist/slurm/")]
        packed = {Path(each).name: archive.read(each) for each in names}
    assert packed == {
        name: (REPOSITORY / "slurm" / name).read_bytes() for name in JOB_SCRIPTS.values()
    }
    assert os.readlink(REPOSITORY / "psdist" / "slurm") == "../slurm"


def test_a_wheel_works_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    program = (
        "import psdist.commands.cli\n"
        "from psdist.servers.protocol import rules\n"
        "print(rules.__file__)"
    )
    done = python("-P", "-c", program, path=wheel, cwd=tmp_path)
    rules = wheel / "psdist" / "servers" / "protocol" / "rules" / "__init__.py"
    assert done.stdout.strip() == str(rules), done.stderr


def test_a_wheel_says_how_psdist_is_started(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("entry_points.txt")]
        assert "psdist = psdist.commands.cli:main" in archive.read(name).decode()
