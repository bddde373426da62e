"""The parent's exit status and its one line, from what ranks and the launcher have said."""

from __future__ import annotations

import signal

import pytest

from psdist.commands.launch.ending import Verdict, judge
from psdist.commands.launch.noise import Death

SEGFAULT = Death(signal=11, pid=123, host="n1", rank=2)
KILLED = Death(signal=9, pid=123, host="n1", rank=None)


def verdict(returncode: int, **known: object) -> Verdict:
    nothing: dict[str, object] = {"told": [], "interrupted_by": None, "deaths": [], "vanished": []}
    nothing |= {"num_vanished_first": 0, "num_started": 2}
    return judge(returncode, **{**nothing, **known})  # type: ignore[arg-type]


def test_a_job_that_went_well_needs_no_words() -> None:
    assert verdict(0) == Verdict(0)
    # A script that has saved its work after Ctrl-C and ended well has ended well.
    assert verdict(0, interrupted_by=2) == Verdict(0)


def test_what_a_rank_has_told_counts_before_what_the_launcher_returns() -> None:
    # MPICH's mpiexec returned 9, for the ranks that it had ended itself.
    assert verdict(9, told=[3, 1], deaths=[KILLED], vanished=["a rank"]) == Verdict(3)
    assert verdict(1, told=[130], interrupted_by=2) == Verdict(130)
    assert verdict(0, told=[2]) == Verdict(2)


def test_a_host_that_mpirun_has_lost_is_a_failure_whatever_that_returns() -> None:
    for returncode, status in ((0, 1), (-9, 1), (213, 213)):
        found = verdict(returncode, lost_hosts=["n3"], vanished=["a rank"], max_deaths=4)
        assert found.status == status
        assert found.line is not None
        assert found.line.startswith("psdist: error: mpirun has lost n3, cut off or gone, and ends")
    # The coordinator may have said so before.
    assert verdict(0, told=[1], lost_hosts=["n3"]) == Verdict(1)
    assert verdict(0, interrupted_by=15, lost_hosts=["n3"]) == Verdict(0)


def test_a_rank_that_vanished_before_another_failed_is_named_as_well() -> None:
    gone = ["worker 1 (rank 2 on n1)", "server 0 (rank 0 on n1)"]
    assert verdict(1, told=[1], vanished=gone, num_vanished_first=1) == Verdict(
        1,
        "psdist: error: before that worker 1 (rank 2 on n1) ended and said nothing: killed, out of "
        "memory? (dmesg would say so), or by os._exit",
    )
    assert verdict(1, told=[1], vanished=gone) == Verdict(1)
    interrupted = verdict(1, told=[130], vanished=gone, num_vanished_first=1, interrupted_by=2)
    assert interrupted == Verdict(130)


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143), (1, 129)])
def test_an_interrupted_job_has_the_signals_status(number: int, status: int) -> None:
    assert verdict(1, interrupted_by=number, deaths=[KILLED]) == Verdict(status)
    assert verdict(-9, interrupted_by=number) == Verdict(status)


def test_a_rank_that_a_signal_has_ended_is_named_with_the_signal() -> None:
    assert verdict(139, deaths=[SEGFAULT]) == Verdict(
        139, "psdist: error: rank 2 on n1 was ended by signal 11 (SIGSEGV)"
    )
    assert verdict(11, deaths=[SEGFAULT], vanished=["worker 1 (rank 2 on n1)", "b"]) == Verdict(
        139, "psdist: error: worker 1 (rank 2 on n1) was ended by signal 11 (SIGSEGV)"
    )
    assert verdict(9, deaths=[KILLED]) == Verdict(
        137,
        "psdist: error: the process 123 on n1 was ended by signal 9 (SIGKILL); out of memory? "
        "(dmesg would say so)",
    )


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGBUS, "7 (SIGBUS); no space left in /dev/shm or TMPDIR? (df; docker run "
                        "--shm-size=1g gives a container more)"),
        (signal.SIGXFSZ, "25 (SIGXFSZ); a file reached the size limit? (ulimit -f)"),
    ],
)  # fmt: skip
def test_a_signal_for_want_of_space_names_where_to_look(number: int, told: str) -> None:
    death = Death(signal=number, pid=123, host="n1", rank=2)
    assert verdict(128 + number, deaths=[death]) == Verdict(
        128 + number, f"psdist: error: rank 2 on n1 was ended by signal {told}"
    )
    words, _, hint = told.partition(";")
    assert verdict(-number).line == (
        f"psdist: error: mpirun was ended by signal {words}; its ranks on this host have been "
        f"ended;{hint}"
    )


def test_a_launcher_that_was_killed_is_named() -> None:
    assert verdict(-9, vanished=["a"]) == Verdict(
        137,
        "psdist: error: mpirun was ended by signal 9 (SIGKILL); its ranks on this host have been "
        "ended",
    )


def test_an_end_that_nobody_explains_is_explained_as_far_as_it_is_known() -> None:
    assert verdict(5, vanished=["worker 0 (rank 1 on n1)"]) == Verdict(
        5,
        "psdist: error: worker 0 (rank 1 on n1) ended before the job was complete and said nothing "
        "(mpirun's status is 5): did it call os._exit?",
    )
    assert verdict(0, vanished=["a rank"]).status == 1
    assert verdict(183, num_started=0) == Verdict(
        183,
        "psdist: error: mpirun ended with status 183 before any rank had started; its output is "
        "above",
    )
    assert verdict(1) == Verdict(1, "psdist: error: mpirun ended with status 1")


def test_a_job_that_went_on_without_some_ended_well_and_with_more_it_did_not() -> None:
    assert verdict(0, vanished=["worker 1", "worker 2"], max_deaths=2) == Verdict(0)
    assert verdict(0, vanished=["worker 1", "worker 2"], max_deaths=1).status == 1
    assert verdict(0, vanished=["worker 1"], told=[1], max_deaths=2).status == 1
