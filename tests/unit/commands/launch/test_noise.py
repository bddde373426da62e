"""What launchers print around the end of a job is taken out, and nothing else ever is.

The texts are what Open MPI 5.0.11's mpirun and MPICH 5.0.2's mpiexec printed in such runs.
"""

from __future__ import annotations

import random

import pytest

from psdist.commands.launch.noise import Death, LauncherNoise

LINE = "-" * 74 + "\n"
DOUBLE = "=" * 83 + "\n"

ABORTED = (
    LINE + "MPI_ABORT was invoked on rank 1 in communicator MPI COMM 3 DUP FROM 0\n"
    "  Proc: [[26012,1],1]\n"
    "  Errorcode: 1\n"
    "\n"
    "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n"
    "You may or may not see output from other processes, depending on\n"
    "exactly when Open MPI kills them.\n" + LINE
)
CALLED_ABORT = (
    LINE + "prterun has exited due to process rank 1 with PID 0 on node vm calling\n"
    '"abort". This may have caused other processes in the application to be\n'
    "terminated by signals sent by prterun (as reported here).\n" + LINE
)
LOST_DAEMON = (
    LINE + "PRTE has lost communication with a remote daemon.\n"
    "\n"
    "  HNP daemon   : [prterun-h1-16523@0,0] on node h1\n"
    "  Remote daemon: [prterun-h1-16523@0,2] on node h3\n"
    "\n"
    "This is usually due to either a failure of the TCP network\n"
    "connection to the node, or possibly an internal failure of\n"
    "the daemon itself. We cannot recover from this failure, and\n"
    "therefore will terminate the job.\n" + LINE
)
EXITED = (
    LINE + "prterun detected that one or more processes exited with non-zero status,\n"
    "thus causing the job to be terminated. The first process to do so was:\n"
    "\n"
    "   Process name: [prterun-vm-27638@1,0]\n"
    "   Exit code:    2\n" + LINE
)
EXITED_IMPROPERLY = (
    LINE + "prterun has exited due to process rank 2 with PID 18417 on node vm exiting\n"
    "improperly. There are three reasons this could occur:\n"
    "\n"
    '1. this process did not call "init" before exiting, but others in the\n'
    "job did. This can cause a job to hang indefinitely while it waits for\n"
    'all processes to call "init". By rule, if one process calls "init",\n'
    'then ALL processes must call "init" prior to termination.\n'
    "\n"
    '2. this process called "init", but exited without calling "finalize".\n'
    'By rule, all processes that call "init" MUST call "finalize" prior to\n'
    'exiting or it will be considered an "abnormal termination"\n'
    "\n"
    '3. this process called "MPI_Abort" or "prte_abort" and the mca\n'
    "parameter prte_create_session_dirs is set to false. In this case, the\n"
    "run-time cannot detect that the abort call was an abnormal\n"
    "termination. Hence, the only error message you will receive is this\n"
    "one.\n"
    "\n"
    "This may have caused other processes in the application to be\n"
    "terminated by signals sent by prterun (as reported here).\n"
    "\n"
    "You can avoid this message by specifying -quiet on the prterun command\n"
    "line.\n" + LINE
)
SEGMENTATION_FAULT = (
    LINE + "prterun noticed that process rank 1 with PID 27682 on node vm exited on\n"
    "signal 11 (Segmentation fault).\n" + LINE
)
UNREACHABLE = (
    "[vm:27638] PMIX ERROR: PMIX_ERR_UNREACH in file /openmpi-5.0.11/3rd-party/openpmix/src/server/"
    "pmix_server.c at line 3146\n"
)
EPOLL = (
    "[warn] Epoll MOD(1) on fd 20 failed. Old events were 6; read change was 0 (none); write "
    "change was 2 (del); close change was 0 (none): Bad file descriptor\n"
)
BAD_TERMINATION = (
    "\n" + DOUBLE + "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    "=   PID 26957 RUNNING AT vm\n"
    "=   EXIT CODE: 11\n"
    "=   CLEANING UP REMAINING PROCESSES\n"
    "=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n" + DOUBLE + "YOUR APPLICATION TERMINATED WITH "
    "THE EXIT STRING: Segmentation fault (signal 11)\n"
    "This typically refers to a problem with your application.\n"
    "Please see the FAQ page for debugging suggestions\n"
)
ABORT_LINES = (
    "Abort(3) on node 0 (rank 0 in comm 496): application called MPI_Abort(comm=0x84000002, 3) - "
    "process 0\n"
    "Abort(130) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 130) - "
    "process 0\n"
)
ALL = {
    "aborted": ABORTED,
    "called abort": CALLED_ABORT,
    "exited": EXITED,
    "exited improperly": EXITED_IMPROPERLY,
    "segmentation fault": SEGMENTATION_FAULT,
    "unreachable": UNREACHABLE,
    "epoll": EPOLL,
    "bad termination": BAD_TERMINATION,
    "abort lines": ABORT_LINES,
}

# What launchers say of mistakes is for people.
NO_SLOTS = (
    LINE + "There are not enough slots available in the system to satisfy the 3\n"
    "slots that were requested by the application:\n"
    "\n"
    "  python\n" + LINE
)
NO_PROGRAM = (
    "[proxy:0@vm] HYDU_create_process (/mpich-5.0.2/src/pm/hydra/lib/utils/launch.c:73): execvp "
    "error on file /nonexistent/python (No such file or directory)\n"
)


def filtered(text: str, *, pieces: int = 1, seed: int = 0) -> str:
    data = text.encode()
    pick = random.Random(seed)
    cuts = sorted(pick.randrange(len(data) + 1) for _ in range(pieces - 1))
    noise = LauncherNoise()
    shown = bytearray()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        shown += noise.feed(data[start:end], now_s=0.0)
    return (bytes(shown) + noise.close()).decode()


@pytest.mark.parametrize("name", ALL)
def test_what_a_launcher_prints_at_an_end_is_taken_out(name: str) -> None:
    assert filtered(ALL[name]) == ""


@pytest.mark.parametrize("seed", range(20))
def test_it_is_taken_out_wherever_it_is_cut_in_pieces_and_lines_around_it_stay(seed: int) -> None:
    pick = random.Random(seed)
    blocks = list(ALL.values())
    pick.shuffle(blocks)
    text = "".join(f"line {number}\n{block}" for number, block in enumerate(blocks)) + "no newline"
    expected = "".join(f"line {number}\n" for number in range(len(blocks))) + "no newline"
    assert filtered(text, pieces=30, seed=seed) == expected


@pytest.mark.parametrize("text", [NO_SLOTS, NO_PROGRAM, LINE, LINE + LINE, "\n\n", DOUBLE, ""])
def test_everything_else_comes_out_unchanged(text: str) -> None:
    assert filtered(text) == text
    assert filtered(text, pieces=5) == text


@pytest.mark.parametrize("name", ALL)
def test_a_block_with_one_line_changed_comes_out_unchanged(name: str) -> None:
    lines = ALL[name].splitlines(keepends=True)
    for number in range(len(lines)):
        if len(lines) == 1 or name == "abort lines":
            changed = ["user: " + lines[number]]
        else:
            changed = [*lines[:number], "user: " + lines[number], *lines[number + 1 :]]
        assert filtered("".join(changed)) == "".join(changed)
        if len(lines) > 1 and name != "abort lines":
            missing = [*lines[:number], *lines[number + 1 :]]
            if missing[0] != DOUBLE:  # without its empty line it is
                assert filtered("".join(missing)) == "".join(missing)


def test_a_line_that_only_begins_a_block_does_not_hide_a_block_that_follows() -> None:
    assert filtered(LINE + ABORTED) == LINE
    assert filtered("\n" + BAD_TERMINATION) == "\n"
    assert filtered("".join(ABORTED.splitlines(keepends=True)[:4]) + EXITED + "end\n") == (
        "".join(ABORTED.splitlines(keepends=True)[:4]) + "end\n"
    )


def test_the_null_byte_after_a_block_goes_with_it() -> None:
    assert filtered(ABORTED + CALLED_ABORT + "\0") == ""
    assert filtered(ABORTED + "\0" + UNREACHABLE) == ""
    assert filtered(ABORTED + "\0text\n") == "text\n"
    assert filtered("a\0b\n\0c\n") == "a\0b\n\0c\n"
    # Advice that stays ends so, too.
    advice = "-" * 74 + "\nThere are not enough slots.\n" + "-" * 74 + "\n"
    assert filtered(advice + "\0" + advice) == advice * 2
    assert filtered(advice + "\0[n1:9] *** An error\n\0\0") == advice + "[n1:9] *** An error\n"


def test_deaths_are_noted_with_what_the_launcher_knows() -> None:
    noise = LauncherNoise()
    noise.feed((SEGMENTATION_FAULT + BAD_TERMINATION + EXITED).encode(), now_s=0.0)
    assert noise.deaths == [
        Death(signal=11, pid=27682, host="vm", rank=1),
        Death(signal=11, pid=26957, host="vm", rank=None),
    ]


def test_the_beginning_of_a_line_is_held_for_a_moment_only() -> None:
    noise = LauncherNoise()
    assert noise.feed(b"name? ", now_s=1.0) == b""
    assert noise.deadline_s is not None
    assert noise.overdue(now_s=1.01) == b""
    assert noise.overdue(now_s=noise.deadline_s) == b"name? "
    assert noise.deadline_s is None
    assert noise.feed(b"x" * (LauncherNoise.MAX_LINE_BYTES + 1), now_s=2.0).startswith(b"xxx")


def test_the_beginning_of_a_block_is_held_longer_and_then_comes_out() -> None:
    noise = LauncherNoise()
    lines = ABORTED.encode().splitlines(keepends=True)
    assert noise.feed(lines[0] + lines[1][:9], now_s=1.0) == b""
    assert noise.overdue(now_s=1.0 + LauncherNoise.PARTIAL_S) == b""
    shown = noise.feed(lines[1][9:], now_s=1.5) + b"".join(
        noise.feed(line, now_s=2.0) for line in lines[2:]
    )
    assert shown == b""
    assert noise.deadline_s is None
    assert noise.feed(lines[0], now_s=3.0) == b""
    assert noise.overdue(now_s=3.0 + LauncherNoise.BLOCK_S) == lines[0]
