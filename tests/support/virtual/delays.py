"""How long things take in a schedule: messages between a pair, a server's work, its naps."""

from __future__ import annotations

import random
from collections.abc import Callable

from psdist.servers.protocol.actions import Fold, Load, Step
from psdist.servers.shard.executor import Executor, MakeExecutor, ShardSpec
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import ChunkCopy, SnapshotMemory
from psdist.transport.virtual import Actor
from tests.support.virtual.network import LinkModel
from tests.support.virtual.schedule import Schedule


def link_of(schedule: Schedule) -> Callable[[int, int], LinkModel] | LinkModel:
    """Some pairs are slow."""
    usual, slow = (
        LinkModel(
            latency_s=schedule.latency_s * factor,
            jitter_s=schedule.jitter_s * factor,
            payload_s=schedule.payload_s,
            duplicate_rate=schedule.duplicate_rate,
            repeat_rate=schedule.repeat_rate,
            sent_s=schedule.sent_s,
        )
        for factor in (1, 100)
    )
    if not schedule.slow_pairs:
        return usual
    links: dict[tuple[int, int], LinkModel] = {}

    def link(sender: int, peer: int) -> LinkModel:
        pair = sender, peer
        if pair not in links:
            pick = random.Random(f"{schedule.seed} {sender} {peer}")
            links[pair] = slow if pick.random() < schedule.slow_pairs else usual
        return links[pair]

    return link


def slowed(schedule: Schedule, server: int, make: MakeExecutor) -> MakeExecutor:
    """A server's memory on which every gradient costs a time of its own, and every copy for a
    checkpoint that may be made later."""
    if not schedule.work_s:
        return make
    pick = random.Random(f"{schedule.seed} {server} work")
    pick_of_copies = random.Random(f"{schedule.seed} {server} copies")

    def make_slow(spec: ShardSpec) -> Executor:
        executor = make(spec)
        take_snapshot = executor.snapshot
        execute = {name: getattr(executor, name) for name in ("load", "fold", "step")}
        cost_s = 0.0

        def slow(action: Load | Fold | Step) -> None:
            nonlocal cost_s
            cost_s += pick.random() * schedule.work_s
            execute[type(action).__name__.lower()](action)

        def snapshot(
            chunk: int, into: SnapshotMemory, *, set_index: int, is_later: bool = False
        ) -> list[Region]:
            regions = take_snapshot(chunk, into, set_index=set_index, is_later=is_later)
            if is_later:
                into.owe(ChunkCopy(spend))
            return regions

        def spend() -> None:
            nonlocal cost_s
            cost_s += pick_of_copies.random() * schedule.work_s

        def take_cost_s() -> float:
            nonlocal cost_s
            taken_s, cost_s = cost_s, 0.0
            return taken_s

        for name in execute:
            setattr(executor, name, slow)
        executor.snapshot = snapshot  # type: ignore[method-assign]
        executor.take_cost_s = take_cost_s  # type: ignore[method-assign]
        return executor

    return make_slow


def napping(schedule: Schedule, server: int, actor: Actor) -> Actor:
    """A server that is woken and looks only a while later."""
    pick = random.Random(f"{schedule.seed} {server} naps")
    for sleep_s in actor:
        yield sleep_s
        if schedule.nap_s and sleep_s is None and pick.random() < 0.5:
            yield pick.random() * schedule.nap_s
