"""A group over torch.distributed, whose default process group *is* the group in a worker.

It is started over MPI: the leader opens a store on a port that the system chooses and sends its
address to the others; no port is fixed. NCCL carries tensors on GPUs (one GPU per worker), gloo
those on the CPU.

Their own reductions add in another order (see :mod:`~psdist.workers.group.reductions`). Here slices
are exchanged and their owner adds, in worker order. On the CPU this is also faster.

    channel = start(index=0, size=2, device=device, timeout_s=1800.0, broadcast=broadcast)
    ...
    stop()

Longer than other modules: making, abandoning and ending a process group, and the channel over it,
depend on the state that torch keeps for the whole process.
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
    joined_spans,
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
"""Time from the end of the worker's own wait, whose error is clearer, to torch's timeout."""

_ours: dict[str, str | None] = {}
"""Environment variables that a group sets -> their values before, restored at its end."""

_HEAD = 16
"""Numbers in the first exchange of an agreement: call, number of values, first values. If a worker
has more, a second exchange has all values."""

_SHORTEST_WAIT_S = 1e-3
"""torch counts timeouts in milliseconds, and 0 means no timeout."""

_NCCL_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NCCL_REPORTS_NOTHING: Final = "0"
"""By default torch's watchdog ends the process when another process of the group has failed. This
value prevents that, and then a wait raises no error: look up the error of each operation."""

_CPU: Final = torch.device("cpu")

_UNUSED_TAG: Final = 7
"""No message has this tag."""


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
    """Make the group torch.distributed's default process group; return this worker's end of it.

    ``index``: this worker's place in the group of ``size``; ``broadcast``: sends the leader's bytes
    to the whole group. A group on one host (without ``hosts``) uses loopback, other groups an
    interface that all its hosts reach (:mod:`psdist.workers.group.addresses`).
    ``reforms``: the group survives failed workers, so NCCL must not end the process.
    Raises :class:`UsageError` if the script has made a default process group.
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
    """The network of a group."""

    at: At
    """This worker's address."""
    hosts: Sequence[str]
    """Names of the hosts; empty for a group on one host."""


_LOOPBACK: Final = At("lo", "127.0.0.1")

_networks: list[Network] = []
"""The network of this process's group."""


def network() -> Network:
    """Return the network of the last group."""
    return _networks[-1]


@contextmanager
def joining(size: int, device: torch.device) -> Iterator[None]:
    """Raise torch's error about GPUs that cannot be joined with the hosts and a remedy."""
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
    """Raise torch's error about a group over several hosts with their names."""
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
    """Make torch.distributed's default process group of the ``size`` workers that use ``store``.
    Blocks until all have called it."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    is_chosen = INTERFACE in os.environ
    if not is_chosen:  # gloo would resolve the host's name, which need not lead to this host
        os.environ[INTERFACE] = network.at.interface
    try:
        dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
    finally:
        if not is_chosen and not network.hosts:
            del os.environ[INTERFACE]
        # Else it stays, because the script makes its own process groups on these hosts, too.
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
    """Return the store that belongs to this process group alone."""
    if group is None:
        raise InvariantError("there is no process group, or this worker is not in it")
    return dist.distributed_c10d._get_process_group_store(group)


def set_timeout(timeout: datetime.timedelta) -> None:
    """Set the timeout of later operations in all process groups of this process."""
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
    """End all process groups of this process with their operations, which no longer touch memory.
    The other members see closed connections.

    gloo has no abort. But after a timeout of a receive it closes all connections of the process
    group, and their operations end in an error.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0  # counted by a failed attempt
        return
    for group in list(dist.distributed_c10d._world.pg_names):
        if group.size() > 1:
            peer = (group.rank() + 1) % group.size()
            with suppress(RuntimeError):  # the expected timeout, or a process group without gloo
                nothing = torch.empty(1, dtype=torch.uint8)
                work = group.recv([nothing], peer, _UNUSED_TAG)
                work.wait(datetime.timedelta(seconds=_SHORTEST_WAIT_S))
    dist.distributed_c10d._abort_process_group()  # which ends NCCL's


def of_host(
    channel: ProcessGroupChannel, hosts: Sequence[int], *, timeout: datetime.timedelta | None = None
) -> GroupChannel:
    """Return this worker's end of its host's part of the group ``channel``. A collective over
    ``channel``."""
    here = [place for place, host in enumerate(hosts) if host == hosts[channel.place]]
    inner: GroupChannel = AloneChannel()
    if len(here) > 1:
        group = dist.new_group(here, timeout=timeout, use_local_synchronization=True)
        place, device = here.index(channel.place), channel.device
        inner = ProcessGroupChannel.joined(
            place=place, size=len(here), device=device, group=group, ranks=here
        )
    # All workers of all hosts, because the store may be in a process of another host.
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
        """``device``: of the reduced tensors; ``group``: another process group, of the same
        workers, or of those with ``ranks`` in the default one."""
        self.place = place
        self.size = size
        self.device = device
        self._group = group
        self._ranks = ranks
        self._received: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    @classmethod
    def joined(cls, **of: Any) -> Self:
        """Return an end after one operation of each kind on a GPU. A collective over the group.
        NCCL connects GPUs in the first operation of each kind and blocks until all workers begin
        it. Later, another worker might wait elsewhere for this one. Raises torch's RuntimeError if
        the GPUs cannot be connected.
        """
        made = cls(**of)
        if made.device.type == "cuda":
            made._operate_once()
        return made

    def _operate_once(self) -> None:
        """Run each kind of operation that NCCL carries."""
        mine = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(torch.empty_like(mine), mine, group=self._group)
        dist.broadcast(mine, src=self._rank_of(0), group=self._group)

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return Operation(_agree(CALLS.index(call), values, self.size, self._group))

    def duplicate(self) -> ProcessGroupChannel:
        """Return another end. Duplicate the end of a part of the group before that of the whole
        group, which may have the process of the store."""
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
        """Return an end of this class that replaces another end of the same process group."""
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
        for buffer, start, lengths in joined_spans(flats, slices):
            flat = flats[buffer][start : start + sum(lengths)]
            first = start + sum(lengths[: self.place])
            span = Span(buffer, first, first + lengths[self.place])
            own = flats[buffer][first : span.stop]
            rows = self._rows((buffer, start), own)
            # As bytes, because back ends do not move all dtypes.
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
            # torch sends and receives contiguous memory only.
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
        """Return memory for all workers' parts of a stretch, [size, len(mine)]. Kept, because new
        pages are as slow as the exchange."""
        key = *where, mine.dtype, mine.device
        rows = self._received.get(key)
        if rows is None or rows.shape[1] != len(mine):
            rows = torch.empty((self.size, len(mine)), dtype=mine.dtype, device=mine.device)
            self._received[key] = rows
        return rows


def _bounds(size: int, turn: int, num_turns: int) -> tuple[int, int]:
    return size * turn // num_turns, size * (turn + 1) // num_turns


def _sizes(sizes: Sequence[int], turn: int, num_turns: int) -> list[int]:
    """Return the bytes of each place in this turn."""
    return [stop - start for start, stop in (_bounds(each, turn, num_turns) for each in sizes)]


def _parts(
    memory: torch.Tensor, sizes: Sequence[int], turn: int, num_turns: int
) -> list[torch.Tensor]:
    """Return the stretches of this turn in ``memory``, which has the places in order."""
    found, end = [], 0
    for size in sizes:
        start, stop = _bounds(size, turn, num_turns)
        if stop > start:
            found.append(memory[end + start : end + stop])
        end += size
    return found


def begun(operation: Callable[..., dist.Work | None], *of: Any, **options: Any) -> list[dist.Work]:
    """Begin an operation of torch. NCCL raises here if a worker has failed; that error is kept for
    the end of the operation. Other errors (memory, an assertion of the script) are raised."""
    try:
        work = operation(*of, async_op=True, **options)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not str(error).startswith("NCCL Error"):
            raise
        return [_Failed(error)]
    return [] if work is None else [work]


class _Failed(dist.Work):
    """An operation that could not begin."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, *_timeout: datetime.timedelta) -> bool:
        raise self._error


class Works(Generic[T]):
    """Operations of torch on ``tensors``, and the function to call when all are complete."""

    def __init__(
        self,
        what: str,
        works: Sequence[dist.Work],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], T],
    ) -> None:
        self._what = what
        failed = [work for work in works if isinstance(work, _Failed)]
        self._works = failed or works  # the rest is not waited for
        self._can_block = not any(tensor.is_cuda for tensor in tensors)
        """False for NCCL, which would end the communicator after the timeout of a wait."""
        self._finish = finish

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, at_most_s: float) -> None:
        unfinished = next((work for work in self._works if not work.is_completed()), None)
        if self._can_block and unfinished is not None:
            timeout = datetime.timedelta(seconds=max(at_most_s, _SHORTEST_WAIT_S))
            with suppress(RuntimeError):  # a timeout, or a failure that result() raises
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
    """Raise torch's error in an operation as :class:`MemberLostError`."""
    try:
        yield
    except RuntimeError as error:
        raise MemberLostError(
            f"the {what} of this worker's group failed, perhaps because another "
            f"worker of it{host_named_in(str(error))} has ended: {error}"
        ) from error


def _raise_what_nccl_says(work: dist.Work) -> None:
    """Raise the error of a finished operation, which ``wait()`` of NCCL does not.

    torch 2.11 to 2.13 cannot hand the error to Python: ``exception()`` is None without one, and a
    TypeError otherwise."""
    try:
        error = work.exception()
    except TypeError as unreadable:
        raise RuntimeError("NCCL printed the error on stderr") from unreadable
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
