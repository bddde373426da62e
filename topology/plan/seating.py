"""Inside a host: which rank gets which cores, near which GPU and network card. Pure.

    seats = seat(machine, ["server", "worker", "worker"])
    seats[1].cpus, seats[1].gpu          # what rank 1 of this host binds itself to, its GPU

Each rank gets the same number of whole cores, or a few less where they would not lie in one
package. Workers that have a GPU choose first and sit beside
it, then servers, beside the network card; a rank stays within one L3, NUMA node or package where
there is room. Where a launcher has already given the ranks disjoint PUs, those are kept, and a
GPU is chosen for the PUs instead. Where there are more ranks than cores nobody is bound.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from psdist.topology.machine.machine import UNKNOWN, Core, Device, Machine

Role: TypeAlias = Literal["server", "worker"]

# Cores that are as near to each other as they get: (package, NUMA node, L3, kind).
_Cell: TypeAlias = tuple[int, int, int, int]

# InfiniBand and RoCE, Omni-Path, Slingshot, EFA.
_FABRIC_NAMES = ("mlx", "ib", "hfi", "opa", "hsi", "cxi", "rdmap", "efa", "bnxt_re")
# Names that a compute runtime gives to its GPUs, and to no other.
_COMPUTE_NAMES = ("cuda", "nvml", "rsmi", "opencl", "ze")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of one rank; fields as in :class:`psdist.topology.plan.plan.PlannedRank`."""

    cores: tuple[int, ...]
    cpus: tuple[int, ...]
    package: int
    numa: int
    gpu: str
    nic: str


def compute_gpus(machine: Machine) -> tuple[Device, ...]:
    """The GPUs that a worker could use, in PCI order: those that a compute runtime has named.

    Where none is named (no runtime was asked), all of them.
    """
    named = [
        gpu for gpu in machine.gpus if any(name.startswith(_COMPUTE_NAMES) for name in gpu.names)
    ]
    return tuple(sorted(named or machine.gpus, key=lambda gpu: gpu.pci))


def network_cards(machine: Machine) -> tuple[Device, ...]:
    """The cards that MPI will use: of a fast fabric if there are any, fastest first."""
    fast = [
        card for card in machine.nics if any(name.startswith(_FABRIC_NAMES) for name in card.names)
    ]
    return tuple(sorted(fast or machine.nics, key=lambda card: -card.bytes_per_s))


def are_disjoint(masks: Sequence[frozenset[int]]) -> bool:
    """Whether no PU is in two masks, and none is empty: somebody has bound the ranks already."""
    return bool(masks) and all(masks) and sum(map(len, masks)) == len(frozenset().union(*masks))


def seat(
    machine: Machine,
    roles: Sequence[Role],
    *,
    masks: Sequence[frozenset[int]] | None = None,
    gpus: Sequence[Sequence[str]] | None = None,
    may_bind: bool = True,
) -> tuple[Seat, ...]:
    """A seat for each rank of a host, in the order of ``roles``.

    ``masks`` are the PUs (OS numbers) that each rank may use now; without, all of ``machine``.
    ``gpus`` are the PCI bus ids that each rank can see; without, workers share
    :func:`compute_gpus` evenly.
    """
    fixed = masks if masks is not None and are_disjoint(masks) else None
    own_gpus = _share_out_gpus(machine, roles, gpus, fixed)
    if fixed is not None:
        chosen: list[tuple[Core, ...]] = [
            tuple(core for core in machine.cores if mask.intersection(core.cpus)) for mask in fixed
        ]
    elif may_bind and len(machine.cores) >= len(roles):
        chosen = _choose_cores(machine, roles, own_gpus)
    else:
        chosen = [()] * len(roles)
    cards = network_cards(machine)
    seats: list[Seat] = []
    for index, cores in enumerate(chosen):
        reachable = masks[index] if masks is not None else machine.cpus
        near = cores or tuple(c for c in machine.cores if reachable.intersection(c.cpus))
        package, numa = _common(core.package for core in near), _common(core.numa for core in near)
        bound = fixed[index] if fixed is not None else {cpu for core in cores for cpu in core.cpus}
        gpu = own_gpus[index]
        seats.append(
            Seat(
                cores=tuple(core.logical for core in cores),
                cpus=tuple(sorted(bound)),
                package=package,
                numa=numa,
                gpu=gpu.pci if gpu is not None else "",
                nic=_nearest(cards, package, numa).name if cards else "",
            )
        )
    return tuple(seats)


def nearest_to_network(machine: Machine, masks: Sequence[frozenset[int]]) -> list[int]:
    """Indices of ``masks``, those beside a network card first; else in order."""
    near = {nic.package for nic in network_cards(machine) if nic.package != UNKNOWN}

    def distance(index: int) -> tuple[bool, int]:
        packages = {core.package for core in machine.cores if masks[index].intersection(core.cpus)}
        return (bool(near) and not packages <= near, index)

    return sorted(range(len(masks)), key=distance)


def package_of(machine: Machine, mask: Iterable[int]) -> int:
    """The package that holds most of ``mask`` (OS numbers), lowest on a tie; UNKNOWN if none."""
    wanted = frozenset(mask)
    return _most(core.package for core in machine.cores for cpu in core.cpus if cpu in wanted)


def _choose_cores(
    machine: Machine, roles: Sequence[Role], gpus: Sequence[Device | None]
) -> list[tuple[Core, ...]]:
    share = len(machine.cores) // len(roles)
    free: dict[_Cell, list[Core]] = defaultdict(list)
    for core in machine.cores:
        free[core.package, core.numa, core.l3, core.kind].append(core)
    cards = network_cards(machine)
    card = cards[0] if cards else None

    def comes_first(index: int) -> tuple[int, int]:
        has_gpu = gpus[index] is not None
        return (0 if has_gpu else 1 if roles[index] == "server" else 2, index)

    chosen: list[tuple[Core, ...]] = [()] * len(roles)
    for index in sorted(range(len(roles)), key=comes_first):
        is_server = roles[index] == "server"
        beside = card if is_server else gpus[index]
        chosen[index] = _take(free, share, beside=beside, is_light=is_server)
    return chosen


def _take(
    free: dict[_Cell, list[Core]],
    share: int,
    *,
    beside: Device | None,
    is_light: bool,
) -> tuple[Core, ...]:
    """``share`` cores out of ``free``: near ``beside``, close together, of the right kind.

    A light rank (a server) leaves the powerful cores of a hybrid processor to the others.
    """
    share, home = _home(free, share, beside)
    taken: list[Core] = []
    while len(taken) < share:
        missing = share - len(taken)
        costs = {
            cell: _cost(cell, len(cores), missing=missing, home=home, is_light=is_light)
            for cell, cores in free.items()
            if cores
        }
        cell = min(costs, key=costs.__getitem__)
        taken += free[cell][:missing]
        free[cell] = free[cell][missing:]
        home = cell[:2]  # what is missing yet comes from the neighbours of what there is
    return tuple(sorted(taken, key=lambda core: core.logical))


def _home(
    free: dict[_Cell, list[Core]], share: int, beside: Device | None
) -> tuple[int, tuple[int, int]]:
    """(how many cores, (package, NUMA node) to take them from): all in one place if possible.

    The NUMA node beside the device, another one of that package, the package as a whole, then the
    same elsewhere. Where nothing has room for all of them, up to half of the cores less: they are
    worth less than memory that all of them have near.
    """
    room: Counter[tuple[int, int]] = Counter()
    for (package, numa, *_), cores in free.items():
        room[package, numa] += len(cores)
        room[package, UNKNOWN] += len(cores) if numa != UNKNOWN else 0
    wanted = (UNKNOWN, UNKNOWN) if beside is None else (beside.package, beside.numa)

    def distance(place: tuple[int, int]) -> tuple[bool, bool, bool]:
        is_far = wanted[0] not in (UNKNOWN, place[0])
        is_other_node = wanted[1] not in (UNKNOWN, place[1])
        return is_far, place[1] == UNKNOWN, is_other_node

    for least in (share, (share + 1) // 2):
        fitting = [place for place in room if room[place] >= least]
        if fitting:
            # The emptiest package, there the emptiest node: all memories and caches are used, and
            # as shares are equal, as many fit as in any other order.
            place = min(
                fitting, key=lambda at: (*distance(at), -room[at[0], UNKNOWN], -room[at], at)
            )
            return min(share, room[place]), place
    return share, wanted


def _cost(
    cell: _Cell, room: int, *, missing: int, home: tuple[int, int], is_light: bool
) -> tuple[int, ...]:
    """Of taking cores from a cell: kind, distance from home, fit, then the machine's own order."""
    package, numa, l3, kind = cell
    is_far = home[0] not in (UNKNOWN, package)
    is_in_other_numa = home[1] not in (UNKNOWN, numa)
    fits = room >= missing
    return (
        kind if is_light else -kind,
        2 * is_far + is_in_other_numa,
        not fits,
        room if fits else -room,
        package,
        numa,
        l3,
    )


def _share_out_gpus(
    machine: Machine,
    roles: Sequence[Role],
    visible: Sequence[Sequence[str]] | None,
    masks: Sequence[frozenset[int]] | None,
) -> list[Device | None]:
    """A GPU for each worker: its own where there are enough, else shared evenly."""
    known = {gpu.pci: gpu for gpu in machine.gpus if gpu.pci}
    everybodys = [gpu.pci for gpu in compute_gpus(machine) if gpu.pci]
    workers = [index for index, role in enumerate(roles) if role == "worker"]
    owners: Counter[str] = Counter()
    found: list[Device | None] = [None] * len(roles)
    for turn, index in enumerate(workers):
        seen = everybodys if visible is None else [pci for pci in visible[index] if pci in known]
        if not seen:
            continue
        # Evenly over the list, so that two workers of a host with eight GPUs sit on two sockets.
        wanted = seen[turn * len(seen) // len(workers)]
        home = package_of(machine, masks[index]) if masks is not None else UNKNOWN

        def cost(pci: str, home: int = home, wanted: str = wanted) -> tuple[bool, int, bool, str]:
            is_far = home != UNKNOWN and known[pci].package not in (UNKNOWN, home)
            return (is_far, owners[pci], pci != wanted, pci)

        best = min(seen, key=cost)
        owners[best] += 1
        found[index] = known[best]
    return found


def _nearest(nics: Sequence[Device], package: int, numa: int) -> Device:
    return min(nics, key=lambda nic: (nic.package not in (package, UNKNOWN),
                                      nic.numa not in (numa, UNKNOWN)))  # fmt: skip


def _common(values: Iterable[int]) -> int:
    different = set(values)
    return different.pop() if len(different) == 1 else UNKNOWN


def _most(values: Iterable[int]) -> int:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value), default=UNKNOWN)
