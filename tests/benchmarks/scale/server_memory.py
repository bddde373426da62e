"""What a server holds in memory, by mode and number of groups (docs/guides/memory.md).

    python -m tests.benchmarks.scale.server_memory    # 4 and 16 groups, 8 MiB of parameters
    python -m tests.benchmarks.scale.server_memory --groups 64 --parameters-mib 4 --optimizer SGD

The real servers' and workers' code runs over the virtual network, so a machine of any size will
do. Bytes are those of the server's own statistics; no time is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from psdist.protocol.control import Setup
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.partition import Partition, Piece
from psdist.servers.parts import CoordinatorSeat, Reports, plain_loop
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.tensors import TensorShard
from psdist.transport.virtual import Actor
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.saving import PlainMemory, allocate_buffers
from psdist.workers.protocol import Seat
from tests.support.virtual.network import LinkModel, VirtualNetwork

STALENESS = 3
PIECE_ELEMENTS = 1 << 18


def measure(
    *,
    mode: str,
    num_groups: int,
    parameter_bytes: int,
    optimizer: str,
    receive_buffers: int,
    max_norm: float = 0.0,
) -> dict[str, Any]:
    """Statistics of one server that serves ``num_groups`` groups of one worker each, at the end;
    ``receive_bytes`` are those of its receive slots."""
    partition = _partition(parameter_bytes)
    network = VirtualNetwork(
        seed=1, link=LinkModel(latency_s=1e-5, jitter_s=1e-3), verify_open_sends=False
    )
    coordinator = assemble(num_workers=num_groups, num_servers=1)
    server = plain_loop(
        network.endpoint(server_id(0)),
        lambda _set_index, _resumed_up_to: assemble_core(
            server=0,
            make_rule=rule_for(mode, staleness=STALENESS),
            groups=[(worker,) for worker in range(num_groups)],
        ),
        ServerOptions(
            server=0, shard_weights=(1.0,), modes=(mode,), receive_buffers=receive_buffers
        ),
        ShardStore(TensorShard),
        seats=[CoordinatorSeat(coordinator, Reports())],
    )
    network.spawn(server_id(0), server.actor())
    gradients = allocate_buffers(partition)
    for worker in range(num_groups):
        script = _train(
            network, partition, worker, gradients, optimizer=optimizer, max_norm=max_norm
        )
        network.spawn(worker_id(worker), script)
    network.run()
    if network.unfinished:
        raise RuntimeError(f"still waiting: {network.unfinished}")
    slot_bytes = max(chunk.num_master_bytes for chunk in partition.chunks)
    return {
        **server.statistics()["sets"][0],
        "mode": mode,
        "groups": num_groups,
        "receive_bytes": receive_buffers * slot_bytes,
    }


def _partition(parameter_bytes: int) -> Partition:
    pieces = [
        Piece(
            name=f"p{index}",
            shape=(PIECE_ELEMENTS,),
            stride=(1,),
            dtype="float32",
            optimizer_group=0,
        )
        for index in range(parameter_bytes // (4 * PIECE_ELEMENTS))
    ]
    return Partition.cut(pieces, chunk_bytes=None)


def _train(
    network: VirtualNetwork,
    partition: Partition,
    worker: int,
    gradients: list[memoryview],
    *,
    optimizer: str,
    max_norm: float,
    iterations: int = 6,
) -> Actor:
    """A group of one worker; each iteration takes it another time, so that groups drift apart."""
    loop = make_loop(
        network.endpoint(worker_id(worker)),
        Seat(worker=worker, group=worker, members=(worker,), num_servers=1),
        waiting=Waiting(is_spinning=False),
    )
    memory = PlainMemory(partition, gradients=gradients)
    loop.take_slice(partition, owners=partition.shard([1.0]), credits=4, frames=memory)
    hyper = pack_hyperparameters([{"lr": 0.01}])
    if worker == 0:
        setup = Setup(
            partition=partition.encode(),
            optimizer=f"torch.optim.{optimizer}",
            hyper=hyper,
            max_norm=max_norm,
        )
        loop.begin_setup(setup)
    loop.begin_register()
    yield from _until(loop, lambda: not loop.core.membership.is_joining)
    loop.begin_pull(clock=0, chunks=loop.core.mine, is_fresh=True)
    yield from _until(loop, lambda: loop.core.is_idle)
    for clock in range(iterations):
        yield 1e-3 * (1 + (worker + clock) % 3)
        loop.begin_push(clock=clock, hyper=hyper, absent=(), weight=1.0, empty=())
        yield from _until(loop, lambda: loop.core.is_idle)
    loop.finish({})
    yield from _until(loop, lambda: loop.core.membership.is_stopped)


def _until(loop: WorkerLoop, is_over: Callable[[], bool]) -> Iterator[float | None]:
    loop.turn()
    while not is_over():
        yield None
        loop.turn()


COLUMNS = {
    "parameters": "parameter_bytes",
    "second buffers": "second_buffer_bytes",
    "optimizer state": "optimizer_state_bytes",
    "receive buffers": "receive_bytes",
    "held gradients": "held_bytes",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--modes", nargs="+", default=["sync", "ssp", "async"])
    parser.add_argument("--parameters-mib", type=int, default=8)
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--receive-buffers", type=int, default=8)
    parser.add_argument("--max-grad-norm", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{args.parameters_mib} MiB of float32 parameters, {args.optimizer}, one server; MiB")
    print(f"| mode | groups | {' | '.join(COLUMNS)} | most slots used | chunks copied |")
    print(f"|---|---|{'---|' * len(COLUMNS)}---|---|")
    for mode in args.modes:
        for num_groups in args.groups:
            seen = measure(
                mode=mode,
                num_groups=num_groups,
                parameter_bytes=args.parameters_mib << 20,
                optimizer=args.optimizer,
                receive_buffers=args.receive_buffers,
                max_norm=args.max_grad_norm,
            )
            cells = [f"{seen[key] / 2**20:.2f}" for key in COLUMNS.values()]
            print(
                f"| {mode} | {num_groups} | {' | '.join(cells)} "
                f"| {seen['most_slots_used']} of {args.receive_buffers} "
                f"| {seen['copies_on_write']} of {seen['steps']} steps |"
            )


if __name__ == "__main__":
    main()
