"""Filter that removes a launcher's messages around the end of a job from its output. Pure.

    noise = LauncherNoise()
    shown = noise.feed(data, now_s=1.0) + noise.close()
    noise.deaths                     # what the launcher says of ranks that a signal has ended
    noise.lost_hosts                 # and of hosts

A block is taken out only when every line of it is one that Open MPI 5 or MPICH prints there; other
advice of launchers is about mistakes, and stays. Only the launcher's own output goes through here,
with that of ranks without a line to the parent, which are on other hosts or have just started.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_MESSAGES: Final = r"""
# Open MPI 5.0: share/openmpi/help-mpi-api.txt and share/prte/help-prun.txt.
-{74}
MPI_ABORT was invoked on rank \d+ in communicator .+
  Proc: \[\[\d+,\d+\],\d+\]
  Errorcode: -?\d+

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them\.
-{74}
# Called abort.
-{74}
\w+ has exited due to process rank \d+ with PID \d+ on node \S+ calling
"abort"\. This may have caused other processes in the application to be
terminated by signals sent by \w+ \(as reported here\)\.
-{74}
# Improper exit.
-{74}
\w+ has exited due to process rank \d+ with PID \d+ on node \S+ exiting
improperly\. There are three reasons this could occur:

1\. this process did not call "init" before exiting, but others in the
job did\. This can cause a job to hang indefinitely while it waits for
all processes to call "init"\. By rule, if one process calls "init",
then ALL processes must call "init" prior to termination\.

2\. this process called "init", but exited without calling "finalize"\.
By rule, all processes that call "init" MUST call "finalize" prior to
exiting or it will be considered an "abnormal termination"

3\. this process called "MPI_Abort" or "prte_abort" and the mca
parameter prte_create_session_dirs is set to false\. In this case, the
run-time cannot detect that the abort call was an abnormal
termination\. Hence, the only error message you will receive is this
one\.

This may have caused other processes in the application to be
terminated by signals sent by \w+ \(as reported here\)\.

You can avoid this message by specifying -quiet on the \w+ command
line\.
-{74}
# Non zero exit.
-{74}
\w+ detected that one or more processes exited with non-zero status,
thus causing the job to be terminated\. The first process to do so was:

   Process name: \[\S+,\d+\]
   Exit code:    -?\d+
-{74}
# Signalled.
-{74}
\w+ noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) exited on
signal (?P<signal>\d+)(?: \(.+\))?\.
-{74}
# It ends the job, and in Open MPI 5.0.11 itself with status 0.
-{74}
PRTE has lost communication with a remote daemon\.

  HNP daemon   : \[\S+\] on node \S+
  Remote daemon: \[\S+\] on node (?P<lost_host>\S+)

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself\. We cannot recover from this failure, and
therefore will terminate the job\.
-{74}
# Pmix error.
\[[^\]\s]+:\d+\] PMIX ERROR: PMIX_ERR_(?:UNREACH|NOT_FOUND) in file \S+ at line \d+
# Epoll.
\[warn\] Epoll (?:ADD|MOD|DEL)\(\d+\) on fd \d+ failed\. Old events were \d+; read change was \
\d+ \(\w+\); write change was \d+ \(\w+\); close change was \d+ \(\w+\): Bad file descriptor
# MPICH's hydra, on standard output.

={83}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)
=   EXIT CODE: -?\d+
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
={83}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .* \(signal (?P<signal>\d+)\)
This typically refers to a problem with your application\.
Please see the FAQ page for debugging suggestions
# MPICH, as written by the rank itself.
Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): application called \
MPI_Abort\((?:MPI_COMM_WORLD|comm=0x[0-9A-Fa-f]+), -?\d+\) - process \d+"""
"""Regular expressions of lines; a comment is above each block, and a backslash joins lines."""

_BLOCKS: Final = tuple(
    tuple(re.compile(line) for line in block.split("\n")[1:])
    for block in _MESSAGES.replace("\\\n", "").split("\n# ")[1:]
)

# With one of these every block begins: most lines need not be looked at any closer.
_FIRST_BYTES: Final = frozenset({b"-", b"\n", b"[", b"A"})


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that a signal has ended, as the launcher says; MPICH's does not know its rank."""

    signal: int
    pid: int
    host: str
    rank: int | None


class LauncherNoise:
    PARTIAL_S = 0.1
    """Time that the beginning of a line waits for its end: a launcher forwards what ranks wrote."""
    BLOCK_S = 2.0
    """Time that the beginning of a block waits: a launcher may print it line by line."""
    MAX_LINE_BYTES = 4096
    """Longer lines are no noise."""

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self.lost_hosts: list[str] = []
        """Those that the launcher does not reach any more."""
        self._held: list[bytes] = []
        """Whole lines that are the beginning of a block."""
        self._rest = b""
        """The beginning of a line."""
        self._deadline_s: float | None = None
        self._is_after_block = False

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`overdue` has something to say; None while nothing is held."""
        return self._deadline_s

    def feed(self, data: bytes, *, now_s: float) -> bytes:
        """Return the part to show now."""
        shown = bytearray()
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest
        for line in lines:
            shown += self._take(line + b"\n")
        if len(self._rest) > self.MAX_LINE_BYTES:
            shown += self._release()
        if not self._held and not self._rest:
            self._deadline_s = None
        else:
            may_be_block = self._held or set(self._rest) in ({ord("-")}, {ord("=")})
            self._deadline_s = now_s + (self.BLOCK_S if may_be_block else self.PARTIAL_S)
        return bytes(shown)

    def overdue(self, *, now_s: float) -> bytes:
        """Return what has waited too long for the rest of its block or line."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return b""
        return self._release()

    def close(self) -> bytes:
        """Nothing more will come."""
        return self._release()

    def _release(self) -> bytes:
        rest = self._rest if self._rest.strip(b"\0") else b""
        shown = b"".join((*self._held, rest))
        self._held, self._rest, self._deadline_s = [], b"", None
        return shown

    def _take(self, line: bytes) -> bytes:
        text = line.lstrip(b"\0")
        if self._is_after_block or text[:1] in (b"-", b"["):
            line = text  # with a null byte Open MPI ends its blocks
        self._is_after_block = False
        if not self._held and line[:1] not in _FIRST_BYTES:
            return line
        self._held.append(line)
        shown = bytearray()
        # A block may begin at the second line.
        while self._held:
            fitting = [block for block in _BLOCKS if _begins(block, self._held)]
            if not fitting:
                shown += self._held.pop(0)
                continue
            done = next((block for block in fitting if len(block) == len(self._held)), None)
            if done is not None:
                self._note_facts(done)
                self._held = []
                self._is_after_block = True
            break
        return bytes(shown)

    def _note_facts(self, block: tuple[re.Pattern[str], ...]) -> None:
        facts: dict[str, str] = {}
        for pattern, line in zip(block, self._held, strict=True):
            match = pattern.fullmatch(_text(line))
            facts |= match.groupdict() if match else {}
        if "lost_host" in facts:
            self.lost_hosts.append(facts["lost_host"])
        if "signal" in facts:
            rank = facts.get("rank")
            self.deaths.append(
                Death(
                    signal=int(facts["signal"]),
                    pid=int(facts["pid"]),
                    host=facts["host"],
                    rank=None if rank is None else int(rank),
                )
            )


def _begins(block: tuple[re.Pattern[str], ...], lines: list[bytes]) -> bool:
    return len(lines) <= len(block) and all(
        pattern.fullmatch(_text(line)) for pattern, line in zip(block, lines, strict=False)
    )


def _text(line: bytes) -> str:
    return line.rstrip(b"\n").decode("utf-8", "replace")
