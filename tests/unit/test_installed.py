"""The environment of the quickstart and of the containers: its size, and that it works.

    python -m pytest --all tests/unit/test_installed.py     # needs a package index, 5 minutes, root

The wheels come from a folder, which is filled first. No container tool is needed: the steps of
containers/psdist.def run in a root of Debian 12 that debootstrap makes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY

CONTAINERS = REPOSITORY / "containers"
STEPS = ("apt-get", "bash", "export", "rm")
MOST_BYTES = 1_300_000_000
"""Limit of an environment with a CPU build of torch."""
STEP = 900.0
"""Seconds that a step may take; each test has several."""
LIMIT = pytest.mark.timeout(3000)

MOUNTED = """set -e
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs -o size=1g none "$ROOT/dev/shm"
mkdir -p "$ROOT/wheels"
mount --bind "$WHEELS" "$ROOT/wheels"
exec chroot "$ROOT" env -i HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels "$@"
"""


def run(*words: str, **environment: str) -> str:
    """Return the output of a program, in which warnings follow the rest."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=STEP,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def section(name: str) -> list[str]:
    """The lines of a section of psdist.def."""
    text = (CONTAINERS / "psdist.def").read_text(encoding="utf-8")
    return [line.strip() for line in text.split(f"\n%{name}\n")[1].split("\n\n")[0].splitlines()]


def test_both_recipes_copy_the_same_files_and_take_the_same_steps() -> None:
    text = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8").replace(" && \\\n    ", "\n")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    first = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert first == ["FROM debian:12-slim"]
    assert "\nFrom: debian:12-slim\n" in (CONTAINERS / "psdist.def").read_text(encoding="utf-8")

    copied: dict[str, str] = {}
    for words in (line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")):
        copied |= dict.fromkeys(words[:-1], words[-1])
    assert dict(line.split() for line in section("files")) == copied

    steps = [line.removeprefix("RUN ") for line in text.splitlines()]
    steps = [line for line in steps if line.startswith(STEPS)]
    assert [line for line in section("post") if line.startswith(STEPS)] == steps
    assert len(steps) == 5, steps


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    """A folder with all that psdist-mpi[mpi,examples] needs, and a CPU build of torch."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "pip", "download", "--quiet", "--dest", folder, "setuptools", "wheel"]
        words += ["--constraint", str(REPOSITORY / "constraints.txt")]
        torch = re.search(
            r'^TORCH_PIN="(.*)"', (REPOSITORY / "slurm" / "venv.sh").read_text(), re.M
        )
        assert torch is not None
        run(sys.executable, *words, torch[1], f"{REPOSITORY}[mpi,examples]")
        if not any("+cpu" in path.name for path in Path(folder).glob("torch-*.whl")):
            pytest.skip("pip offers no CPU build of torch: set PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS")
        yield Path(folder)


@pytest.mark.slow
@LIMIT
def test_with_a_cpu_wheel_of_torch_the_environment_is_small(wheels: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = 'source "$0"; make_venv "$1" mpi,examples'
        script = str(REPOSITORY / "slurm" / "venv.sh")
        environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PYTHON": sys.executable}
        told = run("bash", "-c", words, script, f"{folder}/venv", **environment)
        assert "1.3 GB with a CPU build" in told
        used = int(run("du", "--summarize", "--block-size=1", f"{folder}/venv").split()[0])
        assert used <= MOST_BYTES
        assert "psdist" in run(f"{folder}/venv/bin/psdist", "--version")


def debootstrap(folder: Path) -> tuple[str, dict[str, str]]:
    """The program and its environment, installed or unpacked. Skips if there is neither."""
    if found := shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin"):
        return found, {}
    try:
        subprocess.run(["apt-get", "download", "debootstrap"], cwd=folder, check=True, timeout=STEP)
        (package,) = folder.glob("debootstrap*.deb")
        subprocess.run(["dpkg", "--extract", str(package), str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no debootstrap, and apt-get does not get it: {error}")
    share = str(folder / "usr" / "share" / "debootstrap")
    return str(folder / "usr" / "sbin" / "debootstrap"), {"DEBOOTSTRAP_DIR": share}


@pytest.fixture(scope="module")
def clean_root() -> Iterator[Path]:
    """A root of Debian 12 with what its smallest variant has."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("a clean root needs root, and apt-get of Debian or Ubuntu")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        program, environment = debootstrap(Path(folder))
        words = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
        mirror = run(*words).split()[0]
        command = [program, "--variant=minbase", "bookworm", str(root), mirror]
        run("unshare", "--mount", *command, **environment)
        yield root


@pytest.mark.slow
@LIMIT
def test_the_quickstart_passes_in_a_clean_root_made_by_the_steps_of_the_recipe(
    wheels: Path, clean_root: Path
) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    (clean_root / "opt" / "psdist").mkdir()
    for name, there in (line.split() for line in section("files")):
        source, target = REPOSITORY / name, clean_root / there.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)

    def inside(script: str) -> str:
        words = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", MOUNTED, "sh", "sh", "-c"]
        return run(*words, script, ROOT=str(clean_root), WHEELS=str(wheels))

    arguments = dict(line.split("=") for line in section("arguments"))
    post = "\n".join(["set -e", *section("post")])
    for name, value in arguments.items():
        post = post.replace(f"{{{{ {name} }}}}", value)
    assert "{{" not in post
    assert "1.3 GB with a CPU build" in inside(post)
    path = "export PATH=/opt/psdist/.venv/bin:$PATH"
    assert path in section("environment")
    told = inside(f"{path}; cd /opt/psdist; psdist doctor; bash slurm/quickstart.sh --yes")
    assert "Open MPI v5" in told
    assert "Training can start here." in told
    assert "proved: the run kept the rules of ssp, staleness <= 3" in told
    assert "Installing" not in told
