"""How the job ended: the parent's exit status, and its one line where nobody else has said why.

    verdict = judge(returncode=137, deaths=noise.deaths, ...)
    verdict.status, verdict.line

Pure. A rank that fails says why and names the status (psdist.ranks.failure); launchers report the
signals by which they end the others, so what ranks have told counts before what launchers return.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psdist.commands.launch.noise import Death

_SIGNAL_STATUS = 128
_OUT_OF_MEMORY = "out of memory? (dmesg would say so)"
_NO_SPACE = (
    "no space left in /dev/shm or TMPDIR? (df; docker run --shm-size=1g gives a container more)"
)
_HINTS: Mapping[int, str] = {
    signal.SIGKILL: _OUT_OF_MEMORY,
    signal.SIGBUS: _NO_SPACE,
    signal.SIGXFSZ: "a file reached the size limit? (ulimit -f)",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    status: int
    line: str | None = None


def judge(
    returncode: int,
    *,
    told: Sequence[int],
    interrupted_by: int | None,
    deaths: Sequence[Death],
    vanished: Sequence[str],
    num_vanished_first: int,
    num_started: int,
    max_deaths: int = 0,
    lost_hosts: Sequence[str] = (),
) -> Verdict:
    """``returncode``: the launcher's, negative for a signal; ``told``: statuses that ranks have
    given; ``vanished``: names of ranks that ended without a word, the first one first;
    ``num_vanished_first``: how many of them before any rank told a failure; ``num_started``: ranks
    that have had a line; ``max_deaths``: of how many the job may go on without, and says so;
    ``lost_hosts``: those that the launcher says it does not reach any more."""
    failures = [status for status in told if status]
    if failures:
        if not num_vanished_first or interrupted_by is not None:
            return Verdict(failures[0])
        return Verdict(
            failures[0],
            f"psdist: error: before that {vanished[0]} ended and said nothing: killed, "
            f"{_OUT_OF_MEMORY}, or by os._exit",
        )
    if lost_hosts and interrupted_by is None:  # whatever it returns: Open MPI's returns 0
        return Verdict(
            returncode if returncode > 0 else 1,
            f"psdist: error: mpirun has lost {', '.join(lost_hosts)}, cut off or gone, and ends "
            "the job: start it again on hosts that reach each other (--resume goes on from the "
            "last checkpoint)",
        )
    if returncode == 0:
        # Of a rank that has left without a word nobody knows whether it has finished.
        is_survived = len(vanished) <= max_deaths
        return Verdict(0) if is_survived else _unexplained(vanished[0], 1, returncode)
    if interrupted_by is not None:
        return Verdict(_SIGNAL_STATUS + interrupted_by)
    if deaths:
        death = deaths[0]
        who = vanished[0] if vanished else f"the process {death.pid} on {death.host}"
        if death.rank is not None and not vanished:
            who = f"rank {death.rank} on {death.host}"
        return Verdict(
            _SIGNAL_STATUS + death.signal,
            f"psdist: error: {who} was ended by signal {_signal(death.signal)}"
            f"{_hint(death.signal)}",
        )
    if returncode < 0:
        return Verdict(
            _SIGNAL_STATUS - returncode,
            f"psdist: error: mpirun was ended by signal {_signal(-returncode)}; its ranks on this "
            f"host have been ended{'' if returncode == -signal.SIGKILL else _hint(-returncode)}",
        )
    if vanished:
        return _unexplained(vanished[0], returncode, returncode)
    if not num_started:
        return Verdict(
            returncode,
            f"psdist: error: mpirun ended with status {returncode} before any rank had started; "
            "what it said stands above",
        )
    return Verdict(returncode, f"psdist: error: mpirun ended with status {returncode}")


def _unexplained(who: str, status: int, returncode: int) -> Verdict:
    return Verdict(
        status,
        f"psdist: error: {who} ended before the job was complete and said nothing (mpirun's status "
        f"is {returncode}): did it call os._exit?",
    )


def _hint(number: int) -> str:
    return f"; {_HINTS[number]}" if number in _HINTS else ""


def _signal(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)
