"""A terminal with a shell in it, as users have it: keys go in, text comes out, and it can close.

    with Terminal(env={...}) as terminal:
        terminal.type("psdist run -n 2 train.py\\n")
        terminal.wait_for(r"iteration \\d+", timeout_s=60)
        terminal.type("\\x1a")           # Ctrl-Z

The shell is a real bash with job control, the leader of a session whose terminal this is. Owns
both, and ends what was started in them (tests.support.mpirun finds it by its marker).
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.mpirun import (
    REPOSITORY,
    end_processes,
    processes_of,
    program_environment,
    wait_until_gone,
)


class Terminal:
    def __init__(
        self, *, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY, columns: int = 100
    ) -> None:
        self.marker = uuid.uuid4().hex
        self.text = ""
        """All that has been shown, with the terminal's codes."""
        self._seen = 0
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 30, columns, 0, 0))
        environment = program_environment(self.marker, {"TERM": "xterm-256color", **(env or {})})
        environment["PS1"] = "$ "
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            preexec_fn=self._become_a_login,
        )
        os.close(slave)
        self._shown = select.poll()
        self._shown.register(self._master, select.POLLIN)

    @staticmethod
    def _become_a_login() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        heed_signals()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        end_processes(self.marker, dump_stacks=False)
        self._shell.wait()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, pattern: str, *, timeout_s: float) -> re.Match[str]:
        """The next text that matches; AssertionError, with all that was shown, if none comes."""
        deadline = time.monotonic() + timeout_s
        while True:
            match = re.compile(pattern).search(self.text, self._seen)
            if match is not None:
                self._seen = match.end()
                return match
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {pattern!r} after {timeout_s:g} s in\n{self.text}"
            if self._shown.poll(min(left_s, 0.2) * 1e3):
                try:
                    self.text += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the shell has ended
                    left_s = deadline = 0.0

    def close(self) -> None:
        """Somebody closes the window."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def left(self) -> list[int]:
        """Processes of this terminal that are still there some seconds later."""
        return wait_until_gone(self.marker)

    def processes(self) -> list[int]:
        return list(processes_of(self.marker))


def heed_signals() -> None:
    """For a new process: what the tests' own starter has ignored (a shell in the background, nohup)
    is not ignored by what they start."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGTSTP,
        signal.SIGUSR1,
    ):
        signal.signal(number, signal.SIG_DFL)


def are_stopped(pids: Iterable[int], *, timeout_s: float) -> bool:
    """Whether all of these processes are stopped, or are so before ``timeout_s`` have passed: a
    signal takes hold when its process is next to run."""
    deadline = time.monotonic() + timeout_s
    while not all(_state_of(pid) == "T" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
