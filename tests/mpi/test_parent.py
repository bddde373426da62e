"""`psdist run -n N` as its user meets it: at a terminal, with signals, with input and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mpirun import (
    REPOSITORY,
    Mpi,
    end_processes,
    environment_prefix,
    program_environment,
    require,
    wait_until_gone,
)
from tests.support.programs.output_of_parented import OUTPUT
from tests.support.terminal import Terminal, are_stopped, heed_signals

MPIS = ("openmpi", pytest.param("mpich", marks=pytest.mark.slow))
SCRIPT = REPOSITORY / "tests" / "support" / "programs" / "parented.py"
TIMEOUT_S = 120.0

pytestmark = pytest.mark.mpi


def command(mpi: Mpi, ranks: int, what: str, folder: Path) -> list[str]:
    require(mpi)
    (folder / "notes").mkdir()
    python = str(environment_prefix(mpi) / "bin" / "python")
    words = [python, "-m", "psdist", "run", "-n", str(ranks), "--group", "rank"]
    return [*words, "--run-dir", str(folder / "run"), str(SCRIPT), what, str(folder / "notes")]


def summary(folder: Path) -> dict[str, object]:
    written: dict[str, object] = json.loads((folder / "run" / "summary.json").read_text())
    return written


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("mpi", MPIS)
def test_at_a_terminal_a_job_asks_is_drawn_stops_goes_on_and_is_interrupted(
    mpi: Mpi, tmp_path: Path
) -> None:
    words = command(mpi, 2, "ask", tmp_path)
    with Terminal() as terminal:
        (shell,) = terminal.processes()
        terminal.type(f"{subprocess.list2cmdline(words)}\n")
        terminal.wait_for("importing torch", timeout_s=TIMEOUT_S)
        terminal.wait_for(r"name\? ", timeout_s=TIMEOUT_S)
        terminal.type("ada\n")
        terminal.wait_for("hello ada, on a terminal: True", timeout_s=TIMEOUT_S)
        before = terminal.wait_for(r"iteration (\d+) of 4000", timeout_s=TIMEOUT_S)[1]

        terminal.type("\x1a")  # Ctrl-Z
        terminal.wait_for("Stopped", timeout_s=TIMEOUT_S)
        table = json.loads((tmp_path / "run" / "ranks.json").read_text())
        assert are_stopped([each["pid"] for each in table], timeout_s=TIMEOUT_S)
        terminal.type("fg\n")
        after = before
        while int(after) <= int(before) + 5:
            after = terminal.wait_for(r"iteration (\d+) of 4000", timeout_s=TIMEOUT_S)[1]

        terminal.type("\x03")  # Ctrl-C
        terminal.wait_for("psdist: SIGINT: ending the job", timeout_s=TIMEOUT_S)
        terminal.wait_for(r"psdist: worker 0 \(rank 1 on \S+\): interrupted", timeout_s=TIMEOUT_S)
        terminal.wait_for(r"\$ ", timeout_s=TIMEOUT_S)
        terminal.type("echo status=$?\n")
        terminal.wait_for("status=130", timeout_s=TIMEOUT_S)
        # At the end Open MPI's mpirun sends SIGTERM to the ranks.
        assert (tmp_path / "notes" / "worker-0").read_text().count("SIGINT") == 1
        assert summary(tmp_path)["exit"] == "interrupted"
        wait_until(lambda: terminal.processes() == [shell], "processes are left")


class Started:
    """``psdist run -n`` that a test sends signals to."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.marker = uuid.uuid4().hex
        self._text = folder / "text"
        with self._text.open("wb") as text:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=text,
                cwd=REPOSITORY,
                env=program_environment(self.marker, {}),
                start_new_session=True,
                preexec_fn=heed_signals,
            )

    @property
    def text(self) -> str:
        return self._text.read_text(errors="replace")


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[Started]:
    job = Started(words, folder)
    try:
        yield job
    finally:
        end_processes(job.marker, dump_stacks=False)
        job.process.wait()


@pytest.mark.parametrize("mpi", MPIS)
def test_signals_reach_every_script_once_and_a_second_one_ends_the_job_at_once(
    mpi: Mpi, tmp_path: Path
) -> None:
    notes = [tmp_path / "notes" / f"worker-{worker}" for worker in range(2)]
    with started(command(mpi, 3, "note", tmp_path), tmp_path) as job:

        def noted(text: str) -> bool:
            assert job.process.poll() is None, job.text
            return all(note.exists() and note.read_text() == text for note in notes)

        wait_until(lambda: noted(""), "the scripts did not start")
        job.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: noted("SIGUSR1\n"), "USR1 did not come, or not once")
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: noted("SIGUSR1\nSIGTERM\n"), "TERM did not come, or not once")
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(TIMEOUT_S) == 143, job.text
        assert wait_until_gone(job.marker) == []
        assert summary(tmp_path)["exit"] == "interrupted"
        assert "psdist: server 0 (rank 0 on " in job.text
        assert job.text.count("interrupted by SIGTERM") == 1


@pytest.mark.parametrize("mpi", MPIS)
def test_input_goes_to_the_chief_output_stays_as_it_is_and_an_error_is_all_that_is_said(
    mpi: Mpi, tmp_path: Path
) -> None:
    words = command(mpi, 3, "write", tmp_path)
    done = subprocess.run(
        words,
        input=b"two\nlines",
        capture_output=True,
        cwd=REPOSITORY,
        env=program_environment(uuid.uuid4().hex, {"PSDIST_PROGRESS": "off"}),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1, done
    written = done.stdout.replace(b"nothing\n", b"", 1)
    assert written.endswith(b"read two\nlines" + OUTPUT)
    assert b"nothing\n" in done.stdout
    assert b"the chief's input" not in done.stdout
    error = done.stderr.replace(OUTPUT, b"", 1).decode().splitlines()[1:]
    assert error[0].endswith("psdist: worker 1 (rank 2 on " + os.uname().nodename + "):"), error
    assert error[1] == "Traceback (most recent call last):"
    assert error[-1] == "RuntimeError: as it was meant to"
    assert summary(tmp_path)["exit"] == "RuntimeError: as it was meant to"
