"""Groups of real processes, without MPI, for tests.

results = run_in_group(3, script)     # script(channel), in three processes; by place
results = run_in_group(3, script, tier="shared_memory")
results = run_in_group(3, script, hosts=[0, 0, 1])      # as if on two hosts
results = run_in_group(3, script, device="cuda:0")      # all on one GPU, over NCCL
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from psdist.workers.group import tier as group_tier
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.group.meeting import Hosts
from psdist.workers.group.segments import Segment
from psdist.workers.group.shared_memory import Make
from psdist.workers.group.tier import Tier

Script = Callable[[GroupChannel], Any]

_GATHERINGS = 3
"""That a group over hosts begins with."""


def run_in_group(
    size: int,
    script: Script,
    *,
    timeout_s: float = 120.0,
    tier: Tier = "torch",
    make: Make = Segment,
    hosts: Sequence[int] = (),
    interface: str = "lo",
    device: str = "cpu",
    reforms: bool = False,
) -> list[Any]:
    """Run ``script``, a function of a module, in ``size`` processes; return its results (no
    tensors). ``"exit N"`` for a process that ended without a word. ``hosts``: the number of each
    one's host, which ``interface`` joins."""
    context = multiprocessing.get_context("forkserver")  # which imports torch once for all
    context.set_forkserver_preload(["psdist.workers.loop", "psdist.workers.group.tier"])
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=_main,
            args=(index, size, script, theirs, tier, make, hosts, interface, device, reforms),
        )
        for index, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        ours = [connection for connection, _ in pipes]
        for _ in range(_GATHERINGS if hosts else 0):
            table = [_answer(*each, timeout_s) for each in zip(ours, processes, strict=True)]
            for connection in ours:
                connection.send(table)
        port = _answer(ours[0], processes[0], timeout_s)
        for connection in ours[1:]:
            connection.send(port)
        return [
            _answer(connection, process, timeout_s)
            for connection, process in zip(ours, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def share_a_gpu(place: int) -> None:
    """NCCL refuses two processes on one GPU of one host. So each says that its host is another one,
    and they are joined as hosts are."""
    os.environ |= {"NCCL_HOSTID": f"place-{place}", "NCCL_SOCKET_IFNAME": "lo"}


def _answer(connection: Connection, process: Any, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise AssertionError(f"no answer from {process.name} within {timeout_s:g} s")
    try:
        answer = connection.recv()
    except EOFError:
        process.join(timeout=10)
        return f"exit {process.exitcode}"
    if isinstance(answer, Exception):
        raise answer
    return answer


def _main(
    index: int,
    size: int,
    script: Script,
    connection: Connection,
    tier: Tier,
    make: Make,
    hosts: Sequence[int],
    interface: str,
    device: str,
    reforms: bool,
) -> None:
    torch.set_num_threads(1)
    if device != "cpu":
        share_a_gpu(index)

    def gather(data: bytes) -> list[bytes]:
        connection.send(data)
        table: list[bytes] = connection.recv()
        return table

    def broadcast(data: bytes | None) -> bytes:
        if data is None:
            received: bytes = connection.recv()
            return received
        connection.send(data)
        return data

    channel: GroupChannel = AloneChannel()
    if hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        channel = group_tier.start(
            tier,
            index=index,
            size=size,
            device=torch.device(device),
            timeout_s=60.0,
            broadcast=broadcast,
            is_spinning=False,
            make=make,
            reforms=reforms,
            hosts=Hosts(numbers=hosts, names=[f"h{host}" for host in hosts], gather=gather)
            if hosts
            else None,
        )
        if size == 1:
            connection.send(b"")  # no process needs the port
        connection.send(script(channel))
    except Exception as error:
        connection.send(error)
    finally:
        connection.close()
    group_tier.stop(channel)
