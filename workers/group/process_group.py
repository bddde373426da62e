"""A group over torch.distributed, whose default process group *is* the group in a worker.

It is started over MPI: the leader opens a store on a port that the system chooses and sends its
address round; no port is fixed. NCCL carries tensors on GPUs (each worker its own), gloo those on
the CPU.

Neither's own reductions are used here (:mod:`~psdist.workers.group.reductions` does): they add in
orders of their own. Slices are exchanged and their owner adds, in worker order, which is faster on
the CPU, too (docs/performance.md).

    channel = start(index=0, size=2, device=device, timeout_s=1800.0, broadcast=broadcast)
    ...
    stop()

Longer than other modules: how a process group is made, abandoned and ended, and the channel over
it, go by what torch keeps of them for the whole process.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, Self

import torch
import torch.distributed as dist

from psdist.errors import InvariantError, MemberLostError, TransportError, UsageError
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Span
from psdist.workers.group.addresses import REMEDY, At
from psdist.workers.group.channel import (
    CALLS,
    AloneChannel,
    GroupChannel,
    Pending,
    Slices,
    T,
    add_in_worker_order,
    check_calls,
    stretches_of,
)
from psdist.workers.group.meeting import (
    INTERFACE,
    Hosts,
    address_of,
    all_connected,
    forget,
    host_named_in,
    meet,
)
from psdist.workers.group.operations import Operation, Steps, until_done

GRACE_S = 10.0
"""How much later than the worker's own wait, which can say what for, torch gives up."""

_ours: dict[str, str | None] = {}
"""Variables that a group sets, with what they were before: so they are again when it ends."""

_HEAD = 16
"""Numbers that every worker sends to an agreement: call, how many values, and the first of them.
Only if some worker has more, all of them follow in a second exchange."""

_SHORTEST_WAIT_S = 1e-3
"""torch counts timeouts in milliseconds, and 0 means for ever."""

_NCCL_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NCCL_REPORTS_NOTHING: Final = "0"
"""As it is, torch's watchdog ends the process when another one of the group has died. With this it
does not, and a wait raises nothing either: what has become of an operation has to be looked up."""

_CPU: Final = torch.device("cpu")

_NOBODYS_TAG: Final = 7
"""Of a message that nobody sends."""


def start(
    *,
    index: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    broadcast: Callable[[bytes | None], bytes],
    hosts: Hosts | None = None,
    reforms: bool = False,
) -> GroupChannel:
    """Make the group torch.distributed's default process group; this worker's end of it.

    ``index``: this worker's place in the group of ``size``; ``broadcast`` hands the leader's bytes
    to all of the group. A group on one host (without ``hosts``) talks over loopback, another one
    over an interface that all its hosts reach (:mod:`psdist.workers.group.addresses`).
    ``reforms``: the group goes on without those of it that die, so NCCL is not to end the process.
    Raises :class:`UsageError` where the script has made a default process group.
    """
    if dist.is_initialized():
        raise UsageError(
            "dist.init_process_group() was called before psdist.init(), which creates the group; "
            "remove this call"
        )
    if reforms and device.type == "cuda":
        _ours.setdefault(_NCCL_HANDLING, os.environ.get(_NCCL_HANDLING))
        os.environ[_NCCL_HANDLING] = _NCCL_REPORTS_NOTHING
    at = _LOOPBACK if hosts is None else meet(hosts, index)
    network = Network(at, () if hosts is None else tuple(dict.fromkeys(hosts.names)))
    timeout = datetime.timedelta(seconds=timeout_s + GRACE_S)
    with _naming(network):
        store = _store(at, index, size, timeout, broadcast)
        join(network, store, index=index, size=size, device=device, timeout=timeout)
    _networks[:] = [network]
    if size == 1:
        return AloneChannel()
    all_connected(_store_of(dist.group.WORLD), index, size)
    return ProcessGroupChannel(place=index, size=size, device=device)


@dataclass(frozen=True)
class Network:
    """What joins a group's workers."""

    at: At
    """Where this worker is reached."""
    hosts: Sequence[str]
    """Those of the group, where there are several."""


_LOOPBACK: Final = At("lo", "127.0.0.1")

_networks: list[Network] = []
"""That of this process's group."""


def network() -> Network:
    """Of the group that was made last."""
    return _networks[-1]


@contextmanager
def joining(size: int, device: torch.device) -> Iterator[None]:
    """What torch says of GPUs that cannot be joined as an error that says whose."""
    try:
        yield
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        at, hosts = network().at, network().hosts
        where = f" on {', '.join(hosts)} over {at.interface} ({at.ip})" if hosts else ""
        raise TransportError(
            f"the GPUs of the group's {size} workers{where} could not be joined by NCCL: {error}; "
            "NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME names the interface that it takes, and "
            "with hosts.group_tier = mpi NCCL is not needed"
        ) from error


@contextmanager
def _naming(network: Network) -> Iterator[None]:
    """What torch says of a group over several hosts as an error that names them."""
    try:
        yield
    except RuntimeError as error:
        if not network.hosts:
            raise
        at = network.at
        raise TransportError(
            f"the group's workers on {', '.join(network.hosts)} could not be joined "
            f"over {at.interface} ({at.ip}): {error}; {REMEDY}"
        ) from error


def join(
    network: Network,
    store: Any,
    *,
    index: int,
    size: int,
    device: torch.device,
    timeout: datetime.timedelta,
) -> None:
    """Make torch.distributed's default process group of the ``size`` workers that meet in
    ``store``; it blocks until all do."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    is_chosen = INTERFACE in os.environ
    if not is_chosen:  # gloo would resolve the host's name, which need not lead to this host
        os.environ[INTERFACE] = network.at.interface
    try:
        dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
    finally:
        if not is_chosen and not network.hosts:
            del os.environ[INTERFACE]
        # Else it stays: process groups of the script's own are made on these hosts, too.
    if network.hosts and not is_chosen:
        _ours[INTERFACE] = None


def _store(
    at: At,
    index: int,
    size: int,
    timeout: datetime.timedelta,
    broadcast: Callable[[bytes | None], bytes],
) -> Any:
    if size == 1:
        return dist.HashStore()  # type: ignore[attr-defined] # exported, but not in __all__
    is_leader = index == 0
    where = (at.ip, 0) if is_leader else address_of(broadcast(None))
    store = dist.TCPStore(  # type: ignore[attr-defined] # as HashStore
        *where,
        size,
        is_master=is_leader,
        wait_for_workers=False,
        timeout=timeout,
    )
    if is_leader:
        broadcast(f"{at.ip} {store.port}".encode("ascii"))
    return store


def _store_of(group: dist.ProcessGroup | None) -> Any:
    """In which the members of this process group alone met."""
    if group is None:
        raise InvariantError("there is no process group, or this worker is not in it")
    return dist.distributed_c10d._get_process_group_store(group)


def set_timeout(timeout: datetime.timedelta) -> None:
    """Of what is begun from now on in any process group of this process."""
    for group in dist.distributed_c10d._world.pg_names:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, before in _ours.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    _ours.clear()
    forget()


def abandon() -> None:
    """End what is under way in all process groups of this process, and these: nothing of it touches
    memory any more. The others of a group see its connections close.

    gloo has no abort. But it closes all connections of a process group in which a receive has
    timed out, and what was under way over them ends in an error.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0  # of one that could not be made
        return
    for group in list(dist.distributed_c10d._world.pg_names):
        if group.size() > 1:
            peer = (group.rank() + 1) % group.size()
            with suppress(RuntimeError):  # as it is to be, or there is no gloo in this one
                nothing = torch.empty(1, dtype=torch.uint8)
                work = group.recv([nothing], peer, _NOBODYS_TAG)
                work.wait(datetime.timedelta(seconds=_SHORTEST_WAIT_S))
    dist.distributed_c10d._abort_process_group()  # which ends NCCL's


def of_host(
    channel: ProcessGroupChannel, hosts: Sequence[int], *, timeout: datetime.timedelta | None = None
) -> GroupChannel:
    """This worker's end of its host's part of the whole group ``channel``; collective over that."""
    here = [place for place, host in enumerate(hosts) if host == hosts[channel.place]]
    inner: GroupChannel = AloneChannel()
    if len(here) > 1:
        group = dist.new_group(here, timeout=timeout, use_local_synchronization=True)
        place, device = here.index(channel.place), channel.device
        inner = ProcessGroupChannel.joined(
            place=place, size=len(here), device=device, group=group, ranks=here
        )
    # All of all hosts: who keeps the store may be at another one.
    store = dist.PrefixStore("hosts", _store_of(dist.group.WORLD))  # type: ignore[attr-defined] # as HashStore
    all_connected(store, channel.place, channel.size)
    return inner


class ProcessGroupChannel:
    """A worker's end of the default process group, of two workers or more."""

    def __init__(
        self,
        *,
        place: int,
        size: int,
        device: torch.device = _CPU,
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """``device``: where what is reduced lies; ``group``: another process group, of the same
        workers, or of those with ``ranks`` in the default one."""
        self.place = place
        self.size = size
        self.device = device
        self._group = group
        self._ranks = ranks
        self._received: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    @classmethod
    def joined(cls, **of: Any) -> Self:
        """An end as it is made with these, when the workers can reach each other's GPUs; collective
        over the group. NCCL joins them in the first operation of each kind: whoever begins it waits
        there for all others, who may wait for this worker elsewhere. So one of each is made now.
        Raises torch's RuntimeError where they cannot be joined.
        """
        made = cls(**of)
        if made.device.type == "cuda":
            made._operate_once()
        return made

    def _operate_once(self) -> None:
        """Each kind of operation that is NCCL's."""
        mine = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(torch.empty_like(mine), mine, group=self._group)
        dist.broadcast(mine, src=self._rank_of(0), group=self._group)

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return Operation(_agree(CALLS.index(call), values, self.size, self._group))

    def duplicate(self) -> ProcessGroupChannel:
        """Another end; behind that of a part of the group comes that of the whole group, in which
        may be who keeps the store."""
        group = (
            dist.new_group()
            if self._ranks is None
            else dist.new_group(list(self._ranks), use_local_synchronization=True)
        )
        all_connected(_store_of(group), self.place, self.size)
        return type(self).joined(
            place=self.place, size=self.size, device=self.device, group=group, ranks=self._ranks
        )

    @classmethod
    def like(cls, other: ProcessGroupChannel) -> Self:
        """An end of this kind over the process group of another end, in place of it."""
        return cls.joined(
            place=other.place,
            size=other.size,
            device=other.device,
            group=other._group,
            ranks=other._ranks,
        )

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        works: list[dist.Work] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        mine = [flats[span.buffer][span.start : span.stop] for span in slices[self.place]]
        totals = dict(zip(slices[self.place], mine if sums is None else sums, strict=True))
        for buffer, start, lengths in stretches_of(flats, slices):
            flat = flats[buffer][start : start + sum(lengths)]
            first = start + sum(lengths[: self.place])
            span = Span(buffer, first, first + lengths[self.place])
            own = flats[buffer][first : span.stop]
            rows = self._rows((buffer, start), own)
            # As bytes: which dtypes a back end can move is no question then.
            works += begun(
                dist.all_to_all_single,
                rows.view(torch.uint8).view(-1),
                flat.view(torch.uint8),
                [own.nbytes] * self.size,
                [length * flat.itemsize for length in lengths],
                group=self._group,
            )
            if len(own):
                added.append((rows, totals[span]))

        def add() -> None:
            for rows, total in added:
                add_in_worker_order(rows, total)

        return Works("reduce-scatter", works, flats, add)

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        works: list[dist.Work] = []
        for place, spans in enumerate(slices):
            for span in spans:
                part = flats[span.buffer][span.start : span.stop]
                source = self._rank_of(place)
                works += begun(dist.broadcast, part, src=source, group=self._group)
        return Works("all-gather", works, flats, lambda: None)

    def exchange(
        self,
        given: torch.Tensor,
        to: Sequence[int],
        taken: torch.Tensor,
        of: Sequence[int],
        *,
        in_turns: int = 1,
    ) -> Pending[None]:
        works: list[dist.Work] = []
        copies: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        num_turns = 1 if given.is_cuda else in_turns
        for turn in range(num_turns):
            out, sizes = _parts(given, to, turn, num_turns), _sizes(to, turn, num_turns)
            into, taken_sizes = _parts(taken, of, turn, num_turns), _sizes(of, turn, num_turns)
            # Parts of several places lie apart, and have to lie together.
            brought = into[0] if len(into) == 1 else taken.new_empty(sum(taken_sizes))
            sent = out[0] if len(out) == 1 else torch.cat([given[:0], *out])
            works += begun(
                dist.all_to_all_single, brought, sent, taken_sizes, sizes, group=self._group
            )
            if len(into) > 1:
                copies.append((into, brought))

        def finish() -> None:
            for parts, brought in copies:
                pieces = torch.split(brought, [len(part) for part in parts])
                for part, piece in zip(parts, pieces, strict=True):
                    part.copy_(piece)

        return Works("exchange between the hosts", works, [given, taken], finish)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        source = self._rank_of(place)
        works = begun(dist.broadcast, tensor, src=source, group=self._group)
        return Works("broadcast", works, [tensor], lambda: None)

    def _rank_of(self, place: int) -> int:
        return place if self._ranks is None else self._ranks[place]

    def _rows(self, where: tuple[int, int], mine: torch.Tensor) -> torch.Tensor:
        """[size, len(mine)]: where everybody's part of the stretch that begins there lands. Kept,
        because fresh pages cost as much as the exchange."""
        key = *where, mine.dtype, mine.device
        rows = self._received.get(key)
        if rows is None or rows.shape[1] != len(mine):
            rows = torch.empty((self.size, len(mine)), dtype=mine.dtype, device=mine.device)
            self._received[key] = rows
        return rows


def _bounds(size: int, turn: int, num_turns: int) -> tuple[int, int]:
    return size * turn // num_turns, size * (turn + 1) // num_turns


def _sizes(sizes: Sequence[int], turn: int, num_turns: int) -> list[int]:
    """Bytes of each place in this turn."""
    return [stop - start for start, stop in (_bounds(each, turn, num_turns) for each in sizes)]


def _parts(
    memory: torch.Tensor, sizes: Sequence[int], turn: int, num_turns: int
) -> list[torch.Tensor]:
    """Those stretches of ``memory``, where places lie one behind the other, of this turn."""
    found, end = [], 0
    for size in sizes:
        start, stop = _bounds(size, turn, num_turns)
        if stop > start:
            found.append(memory[end + start : end + stop])
        end += size
    return found


def begun(operation: Callable[..., dist.Work | None], *of: Any, **options: Any) -> list[dist.Work]:
    """What torch has begun. NCCL says already here that a worker is gone; it counts at the end. Any
    other error, such as no memory or an assertion of the script's, is raised."""
    try:
        work = operation(*of, async_op=True, **options)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not str(error).startswith("NCCL Error"):
            raise
        return [_Failed(error)]
    return [] if work is None else [work]


class _Failed(dist.Work):
    """What could not be begun."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, *_timeout: datetime.timedelta) -> bool:
        raise self._error


class Works(Generic[T]):
    """What torch has begun on ``tensors``, and what is to be done when all of it is over."""

    def __init__(
        self,
        what: str,
        works: Sequence[dist.Work],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], T],
    ) -> None:
        self._what = what
        failed = [work for work in works if isinstance(work, _Failed)]
        self._works = failed or works  # nobody waits for the rest then
        self._can_block = not any(tensor.is_cuda for tensor in tensors)
        """NCCL would take a wait's timeout for its own and end the communicator."""
        self._finish = finish

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, at_most_s: float) -> None:
        unfinished = next((work for work in self._works if not work.is_completed()), None)
        if self._can_block and unfinished is not None:
            timeout = datetime.timedelta(seconds=max(at_most_s, _SHORTEST_WAIT_S))
            with suppress(RuntimeError):  # not yet; or it has failed, as result() will say
                unfinished.wait(timeout)

    def result(self) -> T:
        with _lost(self._what):
            for work in self._works:
                work.wait()
                if not self._can_block and os.environ.get(_NCCL_HANDLING) == _NCCL_REPORTS_NOTHING:
                    _raise_what_nccl_says(work)
        return self._finish()


@contextmanager
def _lost(what: str) -> Iterator[None]:
    """What torch says of an operation as an error that says what may have happened."""
    try:
        yield
    except RuntimeError as error:
        raise MemberLostError(
            f"the {what} of this worker's group failed, perhaps because another "
            f"worker of it{host_named_in(str(error))} has ended: {error}"
        ) from error


def _raise_what_nccl_says(work: dist.Work) -> None:
    error = work.exception()
    if error is not None:
        raise RuntimeError(str(error))


def _agree(
    code: int, values: Sequence[float], size: int, group: dist.ProcessGroup | None
) -> Steps[list[list[float]]]:
    def exchange(mine: Sequence[float], length: int) -> Works[list[list[float]]]:
        row = torch.zeros(length, dtype=torch.float64)
        row[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        table = [torch.empty_like(row) for _ in range(size)]
        works = begun(dist.all_gather, table, row, group=group)
        return Works("agreement", works, table, lambda: [each.tolist() for each in table])

    head = [float(code), float(len(values)), *values[: _HEAD - 2]]
    heads = yield from until_done(exchange(head, _HEAD))
    check_calls([int(head[0]) for head in heads])
    counts = [int(head[1]) for head in heads]
    rows = [head[2:] for head in heads]
    if max(counts) > _HEAD - 2:
        rows = yield from until_done(exchange(values, max(counts)))
    return [row[:count] for row, count in zip(rows, counts, strict=True)]
