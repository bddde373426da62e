"""The relay between MPICH and Slurm during MPI_Init, with both of them played here."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from psdist.install.quirks import readable_lines, with_smaller_limit

MAXES = b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=%d\n"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """MPICH's end of the socket, and Slurm's."""
    mpich, slurm = socket.socketpair()
    with mpich, slurm:
        for end in (mpich, slurm):  # not settimeout: the relay has to meet blocking ends
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 30, 0))
        yield mpich, slurm


def step(descriptor: int) -> Mapping[str, str]:
    return {"PMI_FD": str(descriptor)}


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def passed_on(sender: socket.socket, data: bytes, receiver: socket.socket) -> bytes:
    sender.sendall(data)
    received = b""
    while len(received) < len(data) and not received.endswith(b"\n"):
        more = receiver.recv(65536)
        assert more, received
        received += more
    return received


@pytest.mark.parametrize(("said", "told"), [(1024, 908), (909, 908), (908, 908), (512, 512)])
def test_the_limit_is_one_whose_lines_can_be_read(said: int, told: int) -> None:
    assert with_smaller_limit(MAXES % said) == MAXES % told
    # MPICH writes (limit - 2) // 2 bytes of two digits each, and reads (limit - 1) // 2.
    assert (told - 2) // 2 == (told - 1) // 2
    key = "-allgather-shm-4294967295-4294967295-seg-9/9".ljust(64, "-")
    line = f"cmd=put kvsname={'9' * 10}.{'9' * 10} key={key} value={'A' * (told - 2)}\n"
    assert len(line) <= 1023


def test_nothing_else_is_changed() -> None:
    for answer in (
        b"cmd=get_result rc=0 value=vallen_max=1024\n",
        b"    37cmd=fullinit-response;vallen_max=1024;rc=0;",
        b"cmd=maxes rc=0\n",
        b"",
    ):
        assert with_smaller_limit(answer) == answer


def test_mpich_and_slurm_talk_through_the_relay(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mpich, slurm = ends
    before = children()
    with readable_lines(step(mpich.fileno())):
        assert len(children()) == len(before) + 1
        assert passed_on(mpich, b"cmd=get_maxes\n", slurm) == b"cmd=get_maxes\n"
        assert passed_on(slurm, MAXES % 1024, mpich) == MAXES % 908
        for cut in (4, 12, 55):  # in two pieces
            slurm.sendall((MAXES % 1024)[:cut])
            time.sleep(0.05)
            assert passed_on(slurm, (MAXES % 1024)[cut:], mpich).endswith(b"vallen_max=908\n")
        # PMI-2's messages have no newline and may be long; Slurm writes the length by itself.
        length, body = b" 80000", b"cmd=kvs-get-response;".ljust(80000, b"v")
        for part in (length, body):
            assert passed_on(slurm, part, mpich) == part
            assert passed_on(mpich, part, slurm) == part
    assert passed_on(slurm, MAXES % 1024, mpich) == MAXES % 1024, "the relay is still there"
    assert children() == before


def test_the_relay_ends_when_slurm_does(ends: tuple[socket.socket, socket.socket]) -> None:
    mpich, slurm = ends
    rank = os.fork()
    if rank == 0:
        slurm.close()
        with readable_lines(step(mpich.fileno())):
            os._exit(7 if mpich.recv(1) == b"" else 1)
    mpich.close()
    slurm.close()
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 7


def test_slurm_sees_a_rank_that_ends_in_mpi_init(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mpich, slurm = ends
    rank = os.fork()
    if rank == 0:
        slurm.close()
        with readable_lines(step(mpich.fileno())):
            os._exit(7)
    mpich.close()
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 7
    assert slurm.recv(1) == b""


def test_a_handler_runs_in_the_rank_only(ends: tuple[socket.socket, socket.socket]) -> None:
    mpich, slurm = ends
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(os.getpid()))
    others = set(children())
    try:
        with readable_lines(step(mpich.fileno())):
            (relay,) = set(children()) - others
            for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                os.kill(int(relay), each)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert passed_on(slurm, MAXES % 1024, mpich) == MAXES % 908
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [os.getpid()]
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_relay_ends_although_another_process_has_its_socket(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mpich, slurm = ends
    with readable_lines(step(mpich.fileno())):
        assert passed_on(slurm, MAXES % 1024, mpich) == MAXES % 908
        other = os.fork()
        if other == 0:
            signal.pause()
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)


def test_a_rank_that_cannot_have_a_relay_starts_without(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    mpich, slurm = ends
    before = sorted(os.listdir("/proc/self/fd"))
    with readable_lines(step(mpich.fileno())):
        assert passed_on(slurm, MAXES % 1024, mpich) == MAXES % 1024
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_without_a_socket_nothing_is_done(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        for environment in (
            {},
            step(-1),
            step(file.fileno()),
            step(999_999),
        ):
            before = sorted(os.listdir("/proc/self/fd"))
            with readable_lines(environment):
                assert sorted(os.listdir("/proc/self/fd")) == before
