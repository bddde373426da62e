"""Runs of one process without MPI, at a tenth of a second each.

with ForkedRuns() as runs:
    done = runs.play("run", "--run-dir", str(tmp_path), "train.py")
    assert done.returncode == 0, done.text
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from tests.support.mpirun import REPOSITORY, STARTUP, Completed


class ForkedRuns:
    def __enter__(self) -> Self:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PSDIST_")
        }
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={
                **environment,
                "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{STARTUP}",
                "OMP_NUM_THREADS": "1",
            },
        )
        return self

    def play(self, *words: str) -> Completed:
        """``psdist WORDS``, to its end."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(words) + "\n")
        self._driver.stdin.flush()
        status, text = json.loads(self._driver.stdout.readline())
        return Completed(returncode=status, stdout=text, stderr="")

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._driver.communicate(timeout=60)
