"""The command line: what reaches the script, what reaches the launcher, errors in one line.

Longer than other modules: one test or two for every command and option.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psdist.commands import cli
from psdist.commands.program import Program
from psdist.commands.run import RunRequest, run_arguments
from psdist.config.settings import RunConfig
from psdist.config.sources import Resolved
from psdist.errors import UserError, WaitTimeoutError
from tests.support.mpirun import (
    REPOSITORY,
    REQUIRED_BY,
    Completed,
    run_program,
    skip_or_fail,
    why_missing,
)

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_LOCAL", "PSDIST_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests themselves were started by."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    return "train.py"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str, tuple[str, ...]]]:
    """Stands for psdist.commands.run_rank, which starts MPI: what it was asked to run."""
    calls: list[tuple[Any, str, tuple[str, ...]]] = []

    def run_program(outcome: Any, program: Program, *, num_workers: int | None = None) -> int:
        calls.append((outcome, program.name, program.arguments))
        return 7 if num_workers is None else 40 + num_workers

    module = types.ModuleType("psdist.commands.run_rank")
    module.run_program = run_program  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "psdist.commands.run_rank", module)
    return calls


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """What mpirun was asked to start, which it did not."""
    calls: list[tuple[int, list[str]]] = []

    def start_mpirun(
        num_ranks: int,
        arguments: list[str],
        *,
        script: str,
        config: RunConfig,
    ) -> int:
        calls.append((num_ranks, arguments))
        assert script in arguments
        assert (config.progress, config.grace_s) == ("auto", 30.0)
        assert (config.max_deaths, config.replication) == (0, "none")
        return 0

    monkeypatch.setattr("psdist.commands.run.start_mpirun", start_mpirun)
    return calls


def status_of(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def under_mpirun(monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))


def test_help_imports_neither_torch_nor_mpi_nor_numpy() -> None:
    program = (
        "import sys\n"
        "from psdist.commands.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as exit:\n"
        "    assert exit.code == 0, exit.code\n"
        "modules = {'torch', 'mpi4py', 'numpy', 'psdist.commands.run_rank', 'psdist.joining'}\n"
        "heavy = modules & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: psdist" in done.stdout


def test_a_run_is_configured_without_torch_or_mpi(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from psdist.commands.cli import main\n"
        "try:\n"
        "    main(['run', '-n', '2', '--mode', 'x', 'train.py'])\n"
        "except SystemExit as exit:\n"
        "    assert exit.code == 2, exit.code\n"
        "sys.exit(bool({'torch', 'mpi4py', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("psdist: error: mode = x (command line): must be ")


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plan", "--help"], ["doctor"]])
@pytest.mark.parametrize("has_buffer", [True, False])
def test_a_full_disk_behind_standard_output_is_one_line_and_a_failure(
    words: list[str], has_buffer: bool
) -> None:
    code = "from psdist.commands import cli, doctor; doctor.main = lambda **_: print('well') or 0; "
    python = [sys.executable, *([] if has_buffer else ["-u"]), "-c", f"{code} cli.main()", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            python, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"},
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "psdist: error: standard output: cannot be written (No space left on device): free some "
        "space, or send it elsewhere\n"
    )


def test_a_reader_that_has_left_ends_a_command_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from psdist.commands import cli, doctor; doctor.main = lambda **_: print('well') or 0; "
    words = [sys.executable, "-c", f"{code} cli.main(['doctor'])"]
    try:
        done = subprocess.run(
            words, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_standard_streams_take_no_files_and_end_no_command(tmp_path: Path) -> None:
    code = (
        "import os; from psdist.commands import cli, doctor\n"
        "doctor.main = lambda **_: print('lost', flush=True) or os.open('new', os.O_CREAT) < 3\n"
        "cli.main(__import__('sys').argv[1:])"
    )
    closed = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", sys.executable, "-c", code]
    done = subprocess.run([*closed, "doctor"], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0
    words = [*closed[:2], 'exec "$@" >&-', *closed[3:], "plan", "--nodes", "n[1-2]"]
    done = subprocess.run(words, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_file_that_fails_keeps_its_traceback() -> None:
    code = (
        "from psdist.commands import cli, doctor\n"
        "doctor.main = lambda **_: open('/dev/full', 'wb', buffering=0).write(b'x')\n"
        "cli.main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("OSError: [Errno 28] No space left on device")


def test_python_m_psdist_is_psdist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "psdist", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("psdist 0.")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of() == 2
    assert "Commands:" in capsys.readouterr().out


def test_everything_after_the_script_reaches_it_untouched(script: str, started: list[Any]) -> None:
    words = ["--epochs", "5", "--help", "--mode", "async", "--", "-n", "3", "--set", "x"]
    assert status_of("run", "--mode", "ssp", script, *words) == 7
    ((outcome, started_script, arguments),) = started
    assert isinstance(outcome, Resolved)
    assert outcome.config.mode == "ssp"
    assert (started_script, arguments) == (script, tuple(words))


def test_options_are_settings_from_the_command_line(
    script: str, started: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("staleness = 9\ncredits = 2\n")
    options = ["--config", "run.toml", "--staleness", "1", "--servers", "2", "--group", "rank"]
    options += [
        "--run-dir",
        "out",
        "--seed",
        "5",
        "--record",
        "--trace",
        "--set",
        "chunk_bytes=1MiB",
    ]
    options += ["--set", "optimizers=a:B,c:D", "--set", "warn-s=3"]
    assert status_of("run", *options, script) == 7
    ((outcome, _, _),) = started
    assert outcome.config == RunConfig(
        staleness=1,
        servers=2,
        group="rank",
        run_dir="out",
        seed=5,
        record=True,
        trace=True,
        credits=2,
        chunk_bytes=1 << 20,
        optimizers=("a:B", "c:D"),
        warn_s=3.0,
    )
    assert outcome.sources["staleness"] == "command line"
    assert outcome.sources["credits"] == "run.toml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "Missing argument 'SCRIPT' (see psdist run --help)"),
        (["run", "--set", "mode", "train.py"], "'mode' is not KEY=VALUE (see psdist run --help)"),
        (["run", "--set", "=1", "train.py"], "'=1' is not KEY=VALUE (see psdist run --help)"),
        (
            ["run", "--mode", "ssp", "--set", "mode=sync", "train.py"],
            "mode is given twice, as ssp and as sync (see psdist run --help)",
        ),
        (
            ["run", "--moed", "ssp", "train.py"],
            "No such option: --moed",
        ),
        (
            ["run", "--watch", "loss", "train.py"],
            "--watch is no setting any more: call job.report(loss) in the script (see psdist run "
            "--help)",
        ),
        (["rnu"], "No such command 'rnu'"),
        (["bench"], "Missing command"),
        (
            ["bench", "pushpull", "--sizes", "4KiB,4Mbit"],
            "'4Mbit' is no size; write bytes or a size such as 64KiB or 4MiB",
        ),
        (["run", "-n", "0", "train.py"], "'-n' / '--ranks'"),
        (["run", "-n", "two", "train.py"], "'-n' / '--ranks'"),
        (["run", "--workers", "0", "train.py"], "'--workers'"),
        (
            ["run", "-n", "3", "--workers", "2", "train.py"],
            "-n 3 and --workers 2: give the number of all ranks or that of the workers",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*words) == 2
    text = capsys.readouterr().err
    assert text.startswith("psdist: error: ")
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-n", "3", "--staleness", "-1", "train.py"],
            "staleness = -1 (command line): must be a whole number from 0 to 2147483647",
        ),
        (["-n", "3", "--set", "stalenes=1", "train.py"], "did you mean staleness?"),
        (["-n", "3", "none.py"], "the script none.py does not exist (working directory "),
        (["-n", "3", "."], "the script . is a directory; name the file to run"),
        (["-n", "3", "-m", "train.py"], "-m train.py: not the name of a module"),
        (["-n", "3", "--config", "none.toml", "train.py"], "cannot read the configuration file"),
        (["-n", "3", "--resume", "train.py"], "resume = true (command line) without run_dir"),
    ],
)
def test_mistakes_are_reported_before_mpirun_starts(
    words: list[str],
    message: str,
    script: str,
    started: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script
    assert status_of("run", *words) == 2
    text = capsys.readouterr().err
    assert text.startswith("psdist: error: ")
    assert message in text
    assert text.count("\n") == 1
    assert started == []


def test_under_a_launcher_mistakes_go_where_all_ranks_agree(
    script: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_mpirun(monkeypatch, rank=1, size=4)
    assert status_of("run", "--mode", "x", script) == 7
    assert status_of("run", "none.py") == 7
    assert status_of("run", "--moed", "ssp", script) == 7
    assert status_of("run", "-n", "3", script) == 7
    errors = [outcome for outcome, _, _ in started]
    assert all(isinstance(error, UserError) for error in errors)
    assert [str(error).split(" (")[0] for error in errors] == [
        "mode = x",
        "the script none.py does not exist",
        "No such option: --moed",
        "-n 3 does not fit: mpirun started 4 ranks already; leave -n out, or start psdist run -n "
        "without a launcher around it",
    ]


def test_n_that_the_world_already_has_starts_no_mpirun(
    script: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_of("run", "-n", "1", script) == 7
    under_mpirun(monkeypatch, rank=1, size=4)
    assert status_of("run", "-n", "4", script) == 7
    assert all(isinstance(outcome, Resolved) for outcome, _, _ in started)


def test_a_shell_inside_a_slurm_job_starts_mpirun(
    script: str,
    started: list[Any],
    asked: list[tuple[int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert status_of("run", "-n", "2", "--mode", "ssp", script, "--epochs", "1") == 0
    assert asked == [(2, ["--mode=ssp", "--", script, "--epochs", "1"])]
    assert started == []


def test_workers_are_started_with_the_servers_beside_them(
    script: str, asked: list[tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("run", "--workers", "4", script) == 0
    assert status_of("run", "--workers", "4", "--servers", "3", script) == 0
    assert status_of("run", "--workers", "1", script) == 0
    assert asked == [
        (5, ["--workers=4", "--", script]),
        (7, ["--workers=4", "--servers=3", "--", script]),
        (2, ["--workers=1", "--", script]),
    ]
    assert status_of("run", "--workers", "4", "none.py") == 2
    assert "the script none.py does not exist" in capsys.readouterr().err


def test_under_a_launcher_the_ranks_hear_how_many_workers_are_expected(
    script: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_mpirun(monkeypatch, rank=1, size=4)
    assert status_of("run", "--workers", "3", script) == 43
    assert len(started) == 1


@pytest.mark.parametrize("is_module", [True, False])
def test_the_words_for_the_ranks_give_the_same_request(
    is_module: bool, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--epochs", "5", "--", "-m", "-x", "", "a b")
    request = RunRequest(
        program=Program(name=script, arguments=arguments, is_module=is_module),
        workers=3,
        config_file=Path("run with space.toml"),
        profile="study",
        command_line={
            "--mode": "ssp",
            "--staleness": "4",
            "--run-dir": "-odd=name",
            "--record": True,
            "--trace": True,
            "chunk_bytes": "4MiB",
            "optimizers": "a:B,c:D",
        },
    )
    received: list[RunRequest] = []

    def run(request: RunRequest) -> int:
        received.append(request)
        return 0

    monkeypatch.setattr("psdist.commands.run.run", run)
    assert status_of("run", *run_arguments(request)) == 0
    assert received == [request]


def test_a_script_whose_name_begins_with_a_dash_is_no_option(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "-odd.py").write_text("")
    received: list[str] = []
    monkeypatch.setattr(
        "psdist.commands.run.run", lambda request: received.append(request.program.name) or 0
    )
    assert status_of("run", *run_arguments(RunRequest(program=Program(name="-odd.py")))) == 0
    assert received == ["-odd.py"]
    assert script


def raise_peer_lost(*_: object) -> int:
    raise WaitTimeoutError("rank 3 on h2 is dead")


def raise_end_of_file(*_: object) -> int:
    raise EOFError("of the script")


def test_an_error_of_psdist_is_one_line_and_its_exit_status(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("psdist.commands.run.run", raise_peer_lost)
    assert status_of("run", script) == 1
    assert capsys.readouterr().err == "psdist: error: rank 3 on h2 is dead\n"


def test_other_errors_keep_their_traceback(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psdist.commands.run.run", raise_end_of_file)
    with pytest.raises(EOFError):
        cli.main(["run", script])


@pytest.mark.mpi
def test_mpirun_is_really_started_and_its_status_passes_through(tmp_path: Path) -> None:
    def start(*words: str) -> Completed:
        program = (
            "import sys; from psdist.commands.run import RunConfig, start_mpirun; "
            f"sys.exit(start_mpirun(2, {list(words)}, script='x', config=RunConfig()))"
        )
        return run_program([sys.executable, "-c", program], timeout_s=120, cwd=tmp_path)

    if (why := why_missing("openmpi")) is not None:
        skip_or_fail(why, variable=REQUIRED_BY["openmpi"])
    # A file that psdist would import instead of the standard library's.
    (tmp_path / "queue.py").write_text("raise ImportError('a file of the user was imported')\n")
    done = start("--help")
    assert done.returncode == 0, done.text
    assert done.stdout.count("Usage: psdist run") == 2
    command = done.stderr.splitlines()[0]
    assert "mpirun -n 2 " in command
    assert command.endswith(f"{sys.executable} -P -m psdist run --help")


@pytest.mark.mpi
def test_a_script_started_by_psdist_finds_its_neighbours_and_pythonpath(tmp_path: Path) -> None:
    if (why := why_missing("openmpi")) is not None:
        skip_or_fail(why, variable=REQUIRED_BY["openmpi"])
    for folder, name in (("scripts", "beside"), ("library", "on_pythonpath")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(f"print('found {name}', flush=True)\n")
    train = tmp_path / "scripts" / "train.py"
    train.write_text("import beside, on_pythonpath, sys\nprint(sys.argv[1:], flush=True)\n")
    done = run_program(
        [sys.executable, "-m", "psdist", "run", "-n", "2", "scripts/train.py", "--epochs", "5"],
        timeout_s=120,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), str(REPOSITORY)])},
        cwd=tmp_path,
    )
    # One of the two ranks serves and never runs the script, which here never calls init().
    assert sorted(done.stdout.splitlines()[-3:]) == [
        "['--epochs', '5']",
        "found beside",
        "found on_pythonpath",
    ], done.text
    assert done.returncode != 0


@pytest.mark.parametrize("flags", [["-P"], []], ids=["safe path", "usual path"])
def test_a_script_finds_its_neighbours_whether_or_not_python_adds_a_place_of_its_own(
    tmp_path: Path, flags: list[str]
) -> None:
    for folder, name in (("scripts", "beside"), ("library", "on_pythonpath")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(f"print('found {name}', flush=True)\n")
    (tmp_path / "scripts" / "train.py").write_text("import beside, on_pythonpath\n")
    command = "from psdist.commands.cli import main; main(['run', 'scripts/train.py'])"
    done = subprocess.run(
        [sys.executable, *flags, "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'library'}{os.pathsep}{REPOSITORY}"},
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-2:] == ["found beside", "found on_pythonpath"], done.stderr
    assert "ended without calling psdist.init()" in done.stderr


def command_module(name: str, attribute: str, function: Callable[..., int]) -> types.ModuleType:
    module = types.ModuleType(name)
    setattr(module, attribute, function)
    return module


def test_check_and_bench_pass_on_their_options_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def record(*arguments: object, **options: object) -> int:
        calls.append((*arguments, *options.items()))
        return 1

    for name, attribute in (
        ("psdist.commands.check", "main"),
        ("psdist.commands.bench.pushpull", "pushpull"),
    ):
        monkeypatch.setitem(sys.modules, name, command_module(name, attribute, record))
    assert status_of("check", "runs/a") == 1
    assert status_of("check", "runs/a", "--json") == 1
    assert (
        status_of(
            *("bench", "pushpull", "--sizes", "4KiB, 1MiB", "--repeats", "3", "--servers", "2"),
            *("--json", "out.json", "--plot", "out.svg"),
        )
        == 1
    )
    assert calls == [
        (Path("runs/a"), ("as_json", False)),
        (Path("runs/a"), ("as_json", True)),
        ([4096, 1 << 20], 3, 2, Path("out.json"), Path("out.svg")),
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    words = {"bash": "source_bash", "zsh": "source_zsh", "fish": "source_fish"}
    program = "from psdist.commands.cli import main; main([])"
    environment = os.environ | {"_PSDIST_COMPLETE": words[shell]}
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )
    assert "_PSDIST_COMPLETE" in told.stdout, told.stderr
    asked = {
        "_PSDIST_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "psdist checkpoint ve",
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": "psdist checkpoint ve",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | asked,
    )
    assert "verify" in told.stdout, told.stderr
