"""The random choices of a run, written out: a schedule of a whole job on the virtual network.

A :class:`Schedule` says who computes how long, where collectives stand, what is absent, how long
messages take, who fails. One seed makes all of it, in one of two sizes: ``small`` ones are played
by the thousand, ``large`` ones look for what only many groups, servers and chunks bring about.

    Schedule.from_seed(7)
    Schedule.from_seed(7, size="large")
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from psdist.config.modes import ModeFrom
from psdist.mode_names import MODES, Mode
from psdist.protocol.partition import Partition, Piece
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.assembly import rule_for
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.rules.arrivals import BY_WEIGHT, StaleLr
from psdist.servers.protocol.rules.backup import Backup
from psdist.servers.protocol.rules.switching import Switching

Size = Literal["small", "large"]
Mistake = Literal["", "absent", "other name", "other lr"]


class Death(NamedTuple):
    """A rank of this kind fails when the network has delivered so many events."""

    victim: Literal["worker", "server", "registrar"]
    after_events: int
    notice_s: float
    """How much later than a message others notice it, at most."""


class AnotherSet(NamedTuple):
    """A parameter set after the first: after every ``every``-th iteration of that it makes
    ``steps`` of its own."""

    num_chunks: int
    steps: int
    every: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    mode: Mode = "sync"
    staleness: int = 0
    later: tuple[ModeFrom, ...] = ()
    """Other modes, each from its round on, known to all from the start."""
    mode_rate: float = 0.0
    """How often the script sets another mode after a collective."""
    is_auto: bool = False
    """True if psdist chooses between sync and ssp."""
    highest: int = 0
    """Above 0: psdist chooses the bound of ssp instead, from ``staleness`` up to this."""
    stale_lr: Literal["off", "inverse"] = "off"
    """Factor of an update's lr, by its staleness (ssp, async)."""
    compensation: float = 0.0
    """lambda of delay compensation (ssp, async)."""
    backup: int = 0
    """So many groups may miss a round (sync),"""
    backup_every: int = 2
    """A group misses fewer than this number of rounds in a row."""
    leaves_out_batches: bool = True
    """Whether scripts leave out the batches of rounds that they have missed, as job.loader does."""
    proposals: tuple[int, ...] = ()
    """When the network has delivered so many events, the coordinator changes the mode if it can."""
    servers: int = 1
    group_sizes: tuple[int, ...] = (1, 1)
    num_chunks: int = 3
    chunk_elements: int = 64
    optimizer_groups: int = 1
    more_sets: tuple[AnotherSet, ...] = ()
    """Each has its own lr; chunks belong to one."""
    iterations: tuple[int, ...] = (4, 4)
    """Iterations of each group: they may leave at different times."""
    collectives: tuple[tuple[int, ...], ...] = ((), ())
    """For each group the clocks before which it enters a collective; as many in every group."""
    compute_s: tuple[float, ...] = (1e-3, 1e-3)
    credits: int = 2
    receive_buffers: int = 3
    is_shuffled: bool = False
    """Whether the chunks of each set are sent in an order of its own, not the ascending one."""
    single_rate: float = 0.0
    """How often the chunks of an iteration leave one by one, and are waited for one by one."""
    middle_rate: float = 0.0
    """How often a collective that all groups enter after the same iteration comes in the middle of
    the next one instead, when some chunks have left."""

    # Contributions of workers.
    has_model: bool = True
    """Without one they meet in collectives only."""
    empty_rate: float = 0.0
    """How often an iteration of a group is skipped, because one of its workers has nothing."""
    absent_rate: float = 0.0
    """Share of gradients that a worker lacks; half of them all of its group."""
    frozen_rate: float = 0.0
    """How often a piece is frozen for some iterations: of all workers none has its gradient."""
    short_rate: float = 0.0
    """Share of batches that are short, so that workers of a group weigh differently."""
    nan_rate: float = 0.0
    """Share of a worker's gradients that are not finite; their iterations are skipped."""
    settings_rate: float = 0.0
    """How often a group's hyperparameters are not those that the run began with."""
    lr: float = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.0
    clipping: float = 0.0
    """In sync servers clip the joint gradient to this times the root of the number of elements, as
    if every element were to be as large; 0: they do not. Elements are about 1 in a gradient of one
    worker and smaller in a mean, so 0.1 clips every step, 0.6 some and 10 none."""

    # Other calls of workers.
    pull_rate: float = 0.0
    """How often a group pulls between two iterations."""
    push_rate: float = 0.0
    """How often the chief sets values after a collective."""
    ask_rate: float = 0.0
    """How often a worker that waits asks who is missing."""
    report_rate: float = 0.0
    """How often a worker reports its progress after an iteration, and logs a line; if ever, then
    also before every collective and at its end."""
    checkpoint_rate: float = 0.0
    """Share of collectives that make a checkpoint, two of three of them."""
    mistake: Mistake = ""
    """Mistake of the last group: it does not come to its last collective, or calls that by
    another name, or (sync) has an lr of its own in its last iteration."""

    # The network and the machines.
    latency_s: float = 1e-5
    jitter_s: float = 1e-4
    payload_s: float = 0.0
    sent_s: float = 0.0
    duplicate_rate: float = 0.0
    repeat_rate: float = 0.0
    slow_pairs: float = 0.0
    """Share of pairs (from, to) whose messages take a hundred times as long."""
    nap_s: float = 0.0
    """A server that something has arrived for sleeps so long, at most, before it looks."""
    work_s: float = 0.0
    """Maximum time of a server's work on one gradient."""
    death: Death | None = None
    has_buddies: bool = False
    """Whether every server has a buddy, the next one, which keeps a second copy of its shard."""
    spares: int = 0
    """Processes that wait to continue in a dead server's place."""

    @property
    def buddies(self) -> list[int]:
        return [(server + 1) % self.servers for server in range(self.servers)]

    @property
    def is_stale_aware(self) -> bool:
        """Whether what an update was computed on says something of its step."""
        return self.stale_lr != "off" or self.compensation > 0

    @property
    def is_large(self) -> bool:
        """Too large to look at everything after every event."""
        return len(self.group_sizes) * self.num_chunks > 100

    @property
    def has_every_worker_in_step(self) -> bool:
        """Whether all groups enter every collective after the same iteration."""
        return len(set(self.collectives)) == 1

    @property
    def mode_by(self) -> Literal["run", "schedule", "script", "auto"]:
        """The source of changes of the mode."""
        if self.proposals or self.is_auto:
            return "auto"
        return "schedule" if self.later else "script" if self.mode_rate else "run"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All that may come."""
        if self.mode_by in ("script", "auto"):
            return ("sync", "ssp", "async")
        coming = {self.mode, *(each.mode for each in self.later)}
        return tuple(mode for mode in MODES if mode in coming)

    def another_mode(self, number: int) -> ModeFrom:
        """Return the mode to which the ``number``-th change of a run leads."""
        pick = random.Random(f"{self.seed} mode {number}")
        modes: list[Mode] = ["sync", "sync", "ssp", "ssp", "async"]
        mode = pick.choice(modes)
        return ModeFrom(0, mode, pick.randint(0, 3) if mode == "ssp" else 0)

    def rule(self) -> MakeRule:
        """Return the round rule of each server."""
        scale = BY_WEIGHT if self.stale_lr == "off" else StaleLr()
        if self.backup:
            return partial(Backup, backup=self.backup, wait_every=self.backup_every)
        if self.later or self.mode_by in ("script", "auto"):
            first = ChangeMode(0, self.mode, self.staleness if self.mode == "ssp" else 0)
            modes = [first, *(ChangeMode(*each) for each in self.later)]
            return partial(Switching, modes=modes, scale=scale)
        return rule_for(self.mode, staleness=self.staleness, scale=scale)

    def partition(self, set_index: int = 0) -> Partition:
        num_chunks = self.more_sets[set_index - 1].num_chunks if set_index else self.num_chunks
        return small_partition(
            num_chunks, elements=self.chunk_elements, optimizer_groups=self.optimizer_groups
        )

    def max_norm(self, set_index: int = 0) -> float:
        """To which servers clip; 0 for none."""
        if self.modes != ("sync",):
            return 0.0
        buffers = self.partition(set_index).buffers
        return self.clipping * math.sqrt(sum(each.num_elements for each in buffers))

    @property
    def reply_window(self) -> int:
        """Bytes of replies under way to a worker: one at a time, two or so, or all."""
        return (1, 2 * 4 * self.chunk_elements, 1 << 30)[self.seed % 3]

    @property
    def num_sets(self) -> int:
        return 1 + len(self.more_sets)

    def steps_of(self, set_index: int, clock: int) -> int:
        """Steps of a set after the first, following iteration ``clock`` of the first."""
        another = self.more_sets[set_index - 1]
        return 0 if (clock + 1) % another.every else another.steps

    def order(self, set_index: int = 0) -> list[int]:
        """In which all groups send the chunks of a set."""
        order = [*range(len(self.partition(set_index).chunks))]
        if self.is_shuffled:
            random.Random(f"{self.seed} order {set_index}").shuffle(order)
        return order

    @classmethod
    def from_seed(cls, seed: int, *, size: Size = "small") -> Schedule:
        is_large = size == "large"
        pick = random.Random(f"{size} {seed}")
        num_groups = pick.choice([6, 9, 12, 16]) if is_large else pick.randint(1, 4)
        most = 3 if is_large else 6
        iterations = [pick.randint(1, most - 1)] * num_groups
        if pick.random() < 0.4:
            iterations = [pick.randint(0, most) for _ in range(num_groups)]
        num_collectives = pick.choice([0, 0, 1, 2])
        collectives = tuple(
            tuple(sorted(pick.randint(0, count) for _ in range(num_collectives)))
            for count in iterations
        )
        if pick.random() < 0.3:  # as scripts usually do: all after the same iteration
            clocks = [pick.randint(0, min(iterations)) for _ in range(num_collectives)]
            collectives = (tuple(sorted(clocks)),) * num_groups
        death = None
        if pick.random() < 0.06:
            death = Death(
                pick.choice(["worker", "worker", "server", "registrar"]),
                int(10 ** pick.uniform(0.0, 5.0 if is_large else 3.5)),
                pick.choice([0.0, 1e-4, 1e-2]),
            )
        mode = pick.choice(["sync", "ssp", "ssp", "async"])
        mistake: Mistake = ""
        if num_groups > 1 and not death and pick.random() < 0.08:
            if num_collectives:
                mistake = pick.choice(["absent", "other name"])
            elif mode == "sync" and 0 < iterations[-1] <= max(iterations[:-1]):
                mistake = "other lr"
        later: tuple[ModeFrom, ...] = ()
        if mode == "ssp" and pick.random() < 0.2:
            later = (ModeFrom(pick.randint(1, most), "ssp", pick.randint(0, 3)),)
        apart = random.Random(f"{size} {seed} sets")
        more_sets = tuple(
            AnotherSet(
                apart.choice([1, 2, 4]),
                *apart.choice([(1, 1), (1, 2), (1, 5), (2, 1), (1 if is_large else 5, 1)]),
            )
            for _ in range(apart.choice([0, 0, 0, 1, 1, 2]))
        )
        return cls(
            seed=seed,
            more_sets=more_sets,
            mode=mode,
            staleness=pick.randint(0, 3),
            later=later,
            servers=pick.randint(2, 8) if is_large else pick.randint(1, 3),
            group_sizes=tuple(pick.choice([1, 1, 2, 3, 4]) for _ in range(num_groups)),
            num_chunks=pick.choice([16, 32, 48, 64]) if is_large else pick.randint(1, 6),
            chunk_elements=pick.choice([64, 128]),
            optimizer_groups=pick.choice([1, 1, 2]),
            iterations=tuple(iterations),
            collectives=collectives,
            compute_s=tuple(10 ** pick.uniform(-6, -3) for _ in range(num_groups)),
            has_model=bool(mistake or death) or pick.random() > 0.01,
            credits=pick.randint(1, 4),
            receive_buffers=pick.choice([2, 2, 3, 4, 6]),
            is_shuffled=random.Random(f"{size} {seed} order").random() < 0.5,
            single_rate=random.Random(f"{size} {seed} single").choice([0.0, 0.5, 1.0]),
            middle_rate=random.Random(f"{size} {seed} middle").choice([0.0, 0.5, 1.0]),
            empty_rate=pick.choice([0.0, 0.0, 0.3]),
            absent_rate=pick.choice([0.0, 0.0, 0.3, 0.8]),
            frozen_rate=pick.choice([0.0, 0.0, 0.6, 0.95]),
            short_rate=pick.choice([0.0, 0.3]),
            nan_rate=pick.choice([0.0, 0.0, 0.05]),
            settings_rate=pick.choice([0.0, 0.5]),
            momentum=pick.choice([0.0, 0.0, 0.5]),
            weight_decay=pick.choice([0.0, 0.0, 0.125]),
            clipping=random.Random(f"{size} {seed} clipping").choice([0.0, 0.0, 0.1, 0.6, 10.0]),
            push_rate=random.Random(f"{size} {seed} push").choice([0.0, 0.5, 1.0]),
            checkpoint_rate=random.Random(f"{size} {seed} kept").choice([0.0, 0.5, 1.0]),
            pull_rate=pick.choice([0.0, 0.0, 0.3]),
            ask_rate=pick.choice([0.0, 0.0, 0.3]),
            report_rate=pick.choice([0.0, 0.0, 0.5]),
            mistake=mistake,
            latency_s=10 ** pick.uniform(-7, -4),
            jitter_s=10 ** pick.uniform(-7, -3),
            payload_s=pick.choice([0.0, 0.0, 1e-4, 1e-2]),
            sent_s=pick.choice([0.0, 0.0, 1e-4, 1e-2]),
            duplicate_rate=pick.choice([0.0, 0.0, 0.3]),
            repeat_rate=pick.choice([0.0, 0.0, 0.3]),
            slow_pairs=pick.choice([0.0, 0.0, 0.2]),
            nap_s=pick.choice([0.0, 0.0, 1e-4, 1e-2]),
            work_s=pick.choice([0.0, 0.0, 1e-5, 1e-3]),
            death=death,
        )


def with_modes(seed: int, *, size: Size = "small") -> Schedule:
    """A schedule in which the mode changes: at known rounds, by the script, or by the coordinator
    at any time; no rank fails or makes a mistake."""
    base = Schedule.from_seed(seed, size=size)
    pick = random.Random(f"{size} {seed} modes")
    by = pick.choice(["schedule", "script", "registrar"])
    later: list[ModeFrom] = []
    if by == "schedule":
        starts = sorted(pick.sample(range(1, 8), pick.randint(1, 3)))
        later = [base.another_mode(start)._replace(round=start) for start in starts]
    proposals: list[int] = []
    if by == "registrar":
        most = 5.0 if size == "large" else 3.5
        proposals = sorted(int(10 ** pick.uniform(1.5, most)) for _ in range(pick.randint(1, 6)))
    collectives = base.collectives
    if by == "script" and not collectives[0]:
        collectives = tuple((pick.randint(0, count),) for count in base.iterations)
    return replace(
        base,
        mode=pick.choice(["sync", "ssp", "async"]),
        later=tuple(later),
        mode_rate=1.0 if by == "script" else 0.0,
        proposals=tuple(proposals),
        collectives=collectives,
        has_model=True,
        mistake="",
        death=None,
        clipping=0.0,
    )


def small_partition(num_chunks: int, *, elements: int = 64, optimizer_groups: int = 1) -> Partition:
    """``num_chunks`` chunks of ``elements`` elements, at least one for each optimizer group, with
    pieces that share a chunk (where it has more than 64), fill one, and span several."""
    pieces: list[Piece] = []
    for group in range(optimizer_groups):
        share = len(range(group, num_chunks, optimizer_groups))
        left = max(share, 1) * elements // 64
        while left:
            span = min(left, (1, 2, 1, 3)[len(pieces) % 4])
            length = 64 * span - (0, 28, 24)[len(pieces) % 3]
            pieces.append(
                Piece(
                    name=f"p{len(pieces)}",
                    shape=(length,),
                    stride=(1,),
                    dtype="float32",
                    optimizer_group=group,
                )
            )
            left -= span
    return Partition.cut(pieces, chunk_bytes=4 * elements)


def with_backup(seed: int, *, size: Size = "small") -> Schedule:
    """A schedule in sync in which groups may miss rounds; no rank fails or makes a mistake."""
    base = Schedule.from_seed(seed, size=size)
    pick = random.Random(f"{size} {seed} backup")
    sizes = base.group_sizes if len(base.group_sizes) > 1 else (*base.group_sizes, 1, 1)
    num_groups, num_more = len(sizes), len(sizes) - len(base.group_sizes)
    iterations = (*base.iterations, *[base.iterations[0]] * num_more)
    collectives = (*base.collectives, *[base.collectives[0]] * num_more)
    if pick.random() < 0.5:
        most = 6 if size == "large" else 12
        iterations = (pick.randint(2, most),) * num_groups
    return replace(
        base,
        mode="sync",
        later=(),
        more_sets=(),
        group_sizes=sizes,
        iterations=iterations,
        collectives=collectives,
        compute_s=tuple(10 ** pick.uniform(-5, -2) for _ in sizes),
        backup=pick.randint(1, max(1, num_groups - 1)),
        backup_every=pick.choice([2, 2, 3, 5, 100]),
        leaves_out_batches=pick.random() < 0.7,
        has_model=True,
        single_rate=0.0,
        middle_rate=0.0,
        clipping=0.0,
        death=None,
        mistake="",
    )


def with_stale(seed: int, *, size: Size = "small") -> Schedule:
    """A schedule in ssp or async, of groups that differ in speed, in which the lr of an update
    falls with its staleness, or its delay is compensated, or both; no rank fails or makes a
    mistake."""
    base = Schedule.from_seed(seed, size=size)
    pick = random.Random(f"{size} {seed} stale")
    later: tuple[ModeFrom, ...] = ()
    if pick.random() < 0.2:
        later = (ModeFrom(pick.randint(1, 4), *pick.choice([("ssp", 1), ("async", 0)])),)
    return replace(
        base,
        stale_lr=pick.choice(["inverse", "inverse", "off"]),
        compensation=pick.choice([0.0, 0.05, 0.25]),
        mode=pick.choice(["ssp", "async"]),
        later=later,
        staleness=pick.choice([0, 1, 3, 6]),
        iterations=tuple(pick.randint(2, 10) + each for each in base.iterations),
        compute_s=tuple(10 ** pick.uniform(-5, -2) for _ in base.group_sizes),
        has_model=True,
        clipping=0.0,
        death=None,
        mistake="",
    )


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler schedules to try when one fails: for shrinking by hand."""
    yield replace(schedule, duplicate_rate=0.0, repeat_rate=0.0)
    yield replace(schedule, collectives=tuple(() for _ in schedule.group_sizes), mistake="")
    yield replace(schedule, more_sets=())
    yield replace(schedule, proposals=schedule.proposals[:-1])
    yield replace(schedule, clipping=0.0)
    yield replace(schedule, push_rate=0.0)
    yield replace(schedule, checkpoint_rate=0.0)
    yield replace(schedule, is_shuffled=False)
    yield replace(schedule, single_rate=0.0)
    yield replace(schedule, middle_rate=0.0)
    yield replace(schedule, servers=1)
    yield replace(schedule, num_chunks=1, optimizer_groups=1)
    yield replace(schedule, empty_rate=0.0, absent_rate=0.0, frozen_rate=0.0, settings_rate=0.0)
    yield replace(schedule, momentum=0.0, weight_decay=0.0, short_rate=0.0, nan_rate=0.0)
    yield replace(schedule, pull_rate=0.0, ask_rate=0.0, report_rate=0.0)
    yield replace(schedule, payload_s=0.0, sent_s=0.0, slow_pairs=0.0, nap_s=0.0, work_s=0.0)
