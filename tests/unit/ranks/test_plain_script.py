"""``python train.py`` without any launcher: an error is told, and a prompt outlives it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, Completed, run_program

TIMEOUT_S = 120
INIT = "import psdist\njob = psdist.init()\n"
FAILING = INIT + "raise RuntimeError('lost its data')\n"


def environment(run_dir: Path) -> dict[str, str]:
    return {
        "PSDIST_PROGRESS": "off",
        "PSDIST_RUN_DIR": str(run_dir),
        "PYTHONPATH": str(REPOSITORY),
        "TERM": "dumb",
    }


def run_python(text: str, tmp_path: Path) -> Completed:
    script = tmp_path / "train.py"
    script.write_text(text)
    env = environment(tmp_path / "run")
    return run_program([sys.executable, str(script)], timeout_s=TIMEOUT_S, env=env)


@pytest.mark.parametrize(
    ("last_line", "status", "told"),
    [
        (
            "raise RuntimeError('lost its data')",
            1,
            r"psdist: the only rank \(on .*\):\n"
            r"Traceback \(most recent call last\):\n"
            r'  File ".*/train.py", line 3, in <module>\n'
            r"(.*\n)+"
            r"RuntimeError: lost its data\n",
        ),
        (
            "job.save('model.safetensors')",
            2,
            r"psdist: the only rank \(on .*\): error at train.py line 3: job\.save\(\) was "
            r"called before job\.prepare\(\): call model, optimizer = "
            r"job\.prepare\(model, optimizer\) first\n",
        ),
    ],
    ids=["error of the script", "error of its use"],
)
def test_an_error_that_ends_a_script_is_printed_once(
    last_line: str, status: int, told: str, tmp_path: Path
) -> None:
    done = run_python(f"{INIT}{last_line}\n", tmp_path)
    assert done.returncode == status, done.text
    assert re.fullmatch(told, done.stderr), done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] in done.stderr


class Terminal:
    """A program at the other end of a pseudo-terminal, typed at by a test."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._seen = ""
        self._process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | env,
            start_new_session=True,
        )
        os.close(slave)

    def wait_for(self, text: str) -> str:
        """All that has come since the last call, up to and with ``text``."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self._seen:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._master], [], [], max(left, 0))
            data = b""
            if ready:
                try:
                    data = os.read(self._master, 65536)
                except OSError:  # its end of the terminal is closed
                    data = b""
            assert data, f"{text!r} never came; {self._seen!r}"
            self._seen += data.decode(errors="replace").replace("\r\n", "\n")
        before, found, self._seen = self._seen.partition(text)
        return before + found

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def wait(self) -> int:
        return self._process.wait(TIMEOUT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


def test_a_prompt_outlives_every_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    env = environment(tmp_path / "run")
    # The script fails, and python -i continues to a prompt, where the same job is still there.
    terminal = Terminal([sys.executable, "-i", str(script)], env)
    try:
        told = terminal.wait_for(">>> ")
        assert f'File "{script}", line 3, in <module>' in told
        assert told.count("RuntimeError: lost its data") == 1
        terminal.type("1/0")
        told = terminal.wait_for(">>> ")
        assert told.count("ZeroDivisionError: division by zero") == 1, told
        terminal.type("job.save('model.safetensors')")
        told = terminal.wait_for(">>> ")
        assert "psdist.errors.UsageError: job.save() was called before job.prepare()" in told, told
        terminal.type("print('mean', job.mean(3.0) + 1)")
        assert "\nmean 4.0\n" in terminal.wait_for(">>> ")
        terminal.type("exit(5)")
        assert terminal.wait() == 5
    finally:
        terminal.close()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "completed"


def test_a_prompt_outlives_a_setting_that_is_wrong(tmp_path: Path) -> None:
    env = environment(tmp_path / "run") | {"PSDIST_MODE": "bsp"}
    terminal = Terminal([sys.executable, "-q"], env)
    try:
        terminal.wait_for(">>> ")
        terminal.type("import psdist; psdist.init()")
        told = terminal.wait_for(">>> ")
        assert "ConfigError: mode = bsp (environment PSDIST_MODE): must be " in told, told
        terminal.type("print(6 * 7)")
        assert "\n42\n" in terminal.wait_for(">>> ")
    finally:
        terminal.close()


def test_a_process_that_imports_the_script_again_does_not_join_the_job(tmp_path: Path) -> None:
    """As a DataLoader's does, of a script without ``if __name__``: MPI would wait for it."""
    text = (
        "import multiprocessing, sys, psdist\n"
        "if __name__ == '__mp_main__':\n"
        "    psdist.init()\n"
        "process = multiprocessing.get_context('forkserver').Process(target=print)\n"
        "process.start()\n"
        "process.join()\n"
        "sys.exit(process.exitcode)\n"
    )
    done = run_python(text, tmp_path)
    assert done.returncode != 0, done.text
    assert 'call it under if __name__ == "__main__":' in done.text
    assert not (tmp_path / "run").exists()
