"""An mpirun whose pid is that of one that was killed: its folder is in the way, unless the job's
own is used (psdist/install/quirks.py)."""

from __future__ import annotations

import os
from pathlib import Path

from psdist.install.quirks import own_session
from tests.support.mpirun import Completed, environment_prefix, require, run_program

# Takes the place of this shell, so that its pid is the shell's.
LEAVE_A_FOLDER = """
mkdir "$1/ompi.$$"
touch "$1/ompi.$$/pmix.$(hostname -s).tool.$$"
shift
exec env "$@"
"""


def start(left_in: Path, *, own: Path | None) -> Completed:
    mpirun = environment_prefix("openmpi") / "bin" / "mpirun"
    session = {"PRTE_MCA_prte_local_tmpdir_base": str(left_in)}
    if own is not None:
        session = own_session(own, {})
    words = [f"{name}={value}" for name, value in session.items()]
    words += [str(mpirun), "-n", "1", "--allow-run-as-root", "--bind-to", "none"]
    return run_program(
        ["bash", "-c", LEAVE_A_FOLDER, "bash", str(left_in), *words, "echo", "started"],
        timeout_s=60,
    )


def test_what_a_killed_mpirun_leaves_is_in_nobodys_way(tmp_path: Path) -> None:
    require("openmpi")
    left, own = tmp_path / "left", tmp_path / "own"
    left.mkdir()
    own.mkdir()
    assert "listener thread failed to start" in start(left, own=None).text, "the quirk may go"
    done = start(left, own=own)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.text
    assert not list(own.iterdir()), "it cleans up after itself"


def test_a_folder_that_the_user_has_chosen_stays() -> None:
    for name in ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"):
        assert own_session(Path("/own"), {**os.environ, name: "/scratch"}) == {}
