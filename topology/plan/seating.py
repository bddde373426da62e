"""Inside a host: which rank gets which cores, near which GPU and network card. Pure.

    seats = seat(machine, ["server", "worker", "worker"])
    seats[1].cpus, seats[1].gpu          # what rank 1 of this host binds itself to, its GPU

Workers come first: whole cores, equal shares up to one core, never across packages. A worker with a
GPU begins in the GPU's NUMA node; the others are spread. Servers get what they need where workers
lose least, near the network card if possible. Cores left over are idle. A worker that is alone on
its host gets all of it. Disjoint PUs from a launcher are kept, and a GPU is chosen for them. With
more ranks than cores no rank is bound.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from psdist.topology.machine import UNKNOWN, Core, Device, Machine
from psdist.topology.machine.cards import network_cards
from psdist.topology.plan.gpu_shares import Role, share_out

# Cores that are as near to each other as they get: (package, NUMA node, L3, kind).
_Cell: TypeAlias = tuple[int, int, int, int]

_Place: TypeAlias = tuple[int, int]
"""(package, NUMA node); UNKNOWN as a node: the package as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of one rank; fields as in :class:`psdist.topology.plan.PlannedRank`."""

    cores: tuple[int, ...]
    """Cores; on several NUMA nodes, the node of its GPU comes first."""
    cpus: tuple[int, ...]
    package: int
    numa: int
    gpu: str
    nic: str


def are_disjoint(masks: Sequence[frozenset[int]]) -> bool:
    """True if no PU is in two masks and no mask is empty: ranks are bound already."""
    return bool(masks) and all(masks) and sum(map(len, masks)) == len(frozenset().union(*masks))


def seat(
    machine: Machine,
    roles: Sequence[Role],
    *,
    masks: Sequence[frozenset[int]] | None = None,
    gpus: Sequence[Sequence[str]] | None = None,
    nics: Sequence[str] = (),
    may_bind: bool = True,
    server_cores: int = 1,
    are_one_group: bool = False,
) -> tuple[Seat, ...]:
    """A seat for each rank of a host, in the order of ``roles``.

    ``server_cores`` are what a server needs; it gets fewer where workers would have less than it.

    ``masks`` are the PUs (OS numbers) that each rank may use now; without, all of ``machine``.
    ``gpus`` are the PCI bus ids that each rank can see; without, workers share those of the machine
    (:mod:`psdist.topology.plan.gpu_shares`); ``are_one_group``: they reduce gradients together.
    ``nics`` are the cards that the ranks' MPI is confined to already, names with commas, "" for
    none: of equally near ones a rank has its own.
    """
    fixed = masks if masks is not None and are_disjoint(masks) else None
    own_gpus = share_out(machine, roles, gpus, fixed, are_one_group=are_one_group)
    if fixed is not None:
        chosen: list[tuple[Core, ...]] = [
            tuple(core for core in machine.cores if mask.intersection(core.cpus)) for mask in fixed
        ]
    elif may_bind and len(machine.cores) >= len(roles):
        known = {name: card for card in machine.nics for name in card.names}
        own_cards = [known.get(each.partition(",")[0]) for each in nics] or [None] * len(roles)
        chosen = _choose_cores(machine, roles, own_gpus, own_cards, server_cores)
    else:
        chosen = [()] * len(roles)
    cards = network_cards(machine)
    seats: list[Seat] = []
    used: Counter[str] = Counter()
    for index, cores in enumerate(chosen):
        reachable = masks[index] if masks is not None else machine.cpus
        near = cores or tuple(c for c in machine.cores if reachable.intersection(c.cpus))
        package, numa = _common(core.package for core in near), _common(core.numa for core in near)
        bound = fixed[index] if fixed is not None else {cpu for core in cores for cpu in core.cpus}
        gpu = own_gpus[index]
        begins = cores[0].numa if cores else numa  # a share on several nodes is near its first
        taken = nics[index].split(",") if nics else []
        nic = _nearest(cards, package, begins, used, taken).name if cards else ""
        used[nic] += 1
        seats.append(
            Seat(
                cores=tuple(core.logical for core in cores),
                cpus=tuple(sorted(bound)),
                package=package,
                numa=numa,
                gpu=gpu.pci if gpu is not None else "",
                nic=nic,
            )
        )
    return tuple(seats)


def nearest_to_network(machine: Machine, masks: Sequence[frozenset[int]]) -> list[int]:
    """Indices of ``masks``: those near a network card first, else in order."""
    near = {nic.package for nic in network_cards(machine) if nic.package != UNKNOWN}

    def distance(index: int) -> tuple[bool, int]:
        packages = {core.package for core in machine.cores if masks[index].intersection(core.cpus)}
        return (bool(near) and not packages <= near, index)

    return sorted(range(len(masks)), key=distance)


class _Room:
    """The free cores of a machine, and who is to sit in which package and NUMA node."""

    def __init__(self, machine: Machine) -> None:
        self.free: dict[_Cell, list[Core]] = defaultdict(list)
        self.cores: Counter[_Place] = Counter()
        """In each package, as (package, UNKNOWN), and in each NUMA node."""
        for core in machine.cores:
            self.free[core.package, core.numa, core.l3, core.kind].append(core)
            for place in {(core.package, UNKNOWN), (core.package, core.numa)}:
                self.cores[place] += 1
        self.packages = sorted({package for package, _ in self.cores})
        self.workers: Counter[_Place] = Counter()
        self.served: Counter[int] = Counter()
        """Cores of each package that servers are to get."""

    def seat_worker(self, beside: Device | None) -> _Place:
        """Beside the device where there is a core for one more; else where they are fewest."""
        wanted = (UNKNOWN, UNKNOWN) if beside is None else (beside.package, beside.numa)
        package = min(
            (each for each in self.packages if self._has_core(each)),
            key=lambda each: (wanted[0] not in (UNKNOWN, each), self._crowd((each, UNKNOWN)), each),
        )
        numa = min(
            (node for each, node in self.cores if each == package and self._is_node(each, node)),
            key=lambda each: (
                wanted != (package, each),
                self._crowd((package, each)),
                each,
            ),
        )
        for place in {(package, UNKNOWN), (package, numa)}:
            self.workers[place] += 1
        return package, numa

    def has_core_near(self, device: Device) -> bool:
        """In its NUMA node, or its package where that is not known; True where neither is."""
        place = (device.package, device.numa)
        return place not in self.cores or self.workers[place] < self.cores[place]

    def _has_core(self, package: int) -> bool:
        place = (package, UNKNOWN)
        return self.workers[place] + self.served[package] < self.cores[place]

    def _is_node(self, package: int, numa: int) -> bool:
        """True for a node of the package, and for the package itself if it has no known nodes."""
        return numa != UNKNOWN or all(
            node == UNKNOWN for each, node in self.cores if each == package
        )

    def _crowd(self, place: _Place) -> float:
        return (self.workers[place] + 1) / self.cores[place]

    def seat_server(self, card: Device | None, num_cores: int) -> tuple[int, int]:
        """Return (package, number of cores): where workers lose least, then near the network
        card."""
        near = UNKNOWN if card is None else card.package

        def loss(package: int) -> tuple[int, bool, float, int]:
            rest = Counter(self.served)
            rest[package] += num_cores
            is_far = near not in (UNKNOWN, package)
            return (-self.level(rest), is_far, self._crowd((package, UNKNOWN)), package)

        package = min((each for each in self.packages if self._has_core(each)), key=loss)
        place = (package, UNKNOWN)
        left = self.cores[place] - self.workers[place] - self.served[package]
        num_cores = min(num_cores, left)
        self.served[package] += num_cores
        return package, num_cores

    def level(self, served: Counter[int]) -> int:
        """Cores per worker within its package, if ``served`` cores of each package serve."""
        return min(
            (
                (self.cores[package, UNKNOWN] - served[package]) // workers
                for package in self.packages
                if (workers := self.workers[package, UNKNOWN])
            ),
            default=0,
        )

    def take(self, num_cores: int, home: _Place, *, only: _Place, is_light: bool) -> list[Core]:
        """Return free cores of the package or NUMA node ``only``, close to each other."""
        taken: list[Core] = []
        while len(taken) < num_cores:
            missing = num_cores - len(taken)
            costs = {
                cell: _cost(
                    cell,
                    len(cores),
                    missing=missing,
                    home=home,
                    in_home_l3={core.l3 for core in taken},
                    crowd=self.workers[cell[:2]],
                    is_light=is_light,
                )
                for cell, cores in self.free.items()
                if cores and only[0] in (UNKNOWN, cell[0]) and only[1] in (UNKNOWN, cell[1])
            }
            if not costs:
                break
            cell = min(costs, key=costs.__getitem__)
            taken += self.free[cell][:missing]
            self.free[cell] = self.free[cell][missing:]
        return taken


def _choose_cores(
    machine: Machine,
    roles: Sequence[Role],
    gpus: Sequence[Device | None],
    own_cards: Sequence[Device | None],
    server_cores: int,
) -> list[tuple[Core, ...]]:
    """Workers first: equal shares up to one core, each in one package, starting near its GPU.

    A rank without a GPU sits near the card that it is confined to, if any.
    """
    if list(roles) == ["worker"]:  # no other rank is here
        gpu = gpus[0]
        return [_from(UNKNOWN if gpu is None else gpu.numa, machine.cores)]
    room = _Room(machine)
    cards = network_cards(machine)
    workers = [index for index, role in enumerate(roles) if role == "worker"]
    servers = [index for index, role in enumerate(roles) if role == "server"]
    homes: dict[int, _Place] = {}
    late: list[int] = []  # where they would sit is full: others must not lose their place to them
    for index in sorted(workers, key=lambda index: _has_no_place(gpus[index])):
        beside_it = gpus[index] or own_cards[index]
        if beside_it is not None and not room.has_core_near(beside_it):
            late.append(index)
            continue
        homes[index] = room.seat_worker(beside_it)
    for index in late:
        homes[index] = room.seat_worker(gpus[index] or own_cards[index])
    # A server needs one core; beyond that, never more than half of an equal share.
    most = max(1, min(server_cores, len(machine.cores) // len(roles) // 2))
    beside = {
        index: own_cards[index] or (cards[turn % len(cards)] if cards else None)
        for turn, index in enumerate(servers)
    }
    at = {index: room.seat_server(beside[index], most) for index in servers}
    level = room.level(room.served)
    spare = Counter(
        {
            package: room.cores[package, UNKNOWN]
            - room.served[package]
            - level * room.workers[package, UNKNOWN]
            for package in room.packages
        }
    )
    shares: dict[int, int] = {}
    for index in workers:
        package = homes[index][0]
        shares[index] = level + (spare[package] > 0)
        spare[package] -= 1
    taken: dict[int, list[Core]] = {}
    for index in workers:
        home = homes[index]
        quota = min(shares[index], max(1, room.cores[home] // room.workers[home]))
        taken[index] = room.take(quota, home, only=home, is_light=False)
    for index in servers:
        package, count = at[index]
        card = beside[index]
        numa = card.numa if card is not None and card.package == package else UNKNOWN
        home = (package, numa)
        taken[index] = room.take(count, home, only=(package, UNKNOWN), is_light=True)
    for index in workers:
        home = homes[index]
        missing = shares[index] - len(taken[index])
        taken[index] += room.take(missing, home, only=(home[0], UNKNOWN), is_light=False)
    return [_from(taken[index][0].numa, taken[index]) for index in range(len(roles))]


def _from(numa: int, cores: Iterable[Core]) -> tuple[Core, ...]:
    """In the machine's order, but that NUMA node's first."""
    return tuple(sorted(cores, key=lambda core: (core.numa != numa, core.logical)))


def _has_no_place(gpu: Device | None) -> bool:
    return gpu is None or gpu.package == UNKNOWN


def _cost(
    cell: _Cell,
    room: int,
    *,
    missing: int,
    home: _Place,
    in_home_l3: set[int],
    crowd: int,
    is_light: bool,
) -> tuple[int, ...]:
    """Sort key for taking cores from a cell: kind, distance from home, fit, the machine's order.

    A light rank (a server) leaves the powerful cores of a hybrid processor to the others.
    """
    package, numa, l3, kind = cell
    is_far = home[0] not in (UNKNOWN, package)
    is_in_other_numa = home[1] not in (UNKNOWN, numa)
    fits = room >= missing
    return (
        kind if is_light else -kind,
        2 * is_far + is_in_other_numa,
        l3 not in in_home_l3,
        crowd if is_in_other_numa else 0,  # where few others will want to grow
        not fits,
        room if fits else -room,
        package,
        numa,
        l3,
    )


def _nearest(
    nics: Sequence[Device], package: int, numa: int, used: Counter[str], taken: Sequence[str]
) -> Device:
    """Return ``taken`` if it is among the nearest, else the one of them with the fewest ranks."""
    return min(
        nics,
        key=lambda nic: (
            nic.package not in (package, UNKNOWN),
            nic.numa not in (numa, UNKNOWN),
            not any(name in nic.names for name in taken),
            used[nic.name],
        ),
    )


def _common(values: Iterable[int]) -> int:
    different = set(values)
    return different.pop() if len(different) == 1 else UNKNOWN
