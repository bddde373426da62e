"""Runs commands of psdist one after the other, each in a process that is forked from this one,
which has imported torch: a run of one process takes a tenth of a second.

    python -m tests.support.programs.forked

A line of standard input is a JSON list of words; the answer is a line, [status, what it printed].
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile

import torch  # noqa: F401 - so that nobody behind the fork has to

import psdist.commands.run_rank
import psdist.job
import psdist.ranks.server  # noqa: F401
from psdist.commands.cli import main

MOST_BYTES = "--most-bytes-of-a-file="
"""A word of the driver's own: what is written beyond that fails, as on a full disk."""


def play(words: list[str]) -> None:
    for word in [each for each in words if each.startswith(MOST_BYTES)]:
        words.remove(word)
        limit = int(word.removeprefix(MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    status = 1
    try:
        main(words)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def answer(words: list[str]) -> list[object]:
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            play(words)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return [os.waitstatus_to_exitcode(status), file.read().decode("utf-8", "replace")]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
