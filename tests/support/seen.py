"""Samples that each worker of tests/support/programs/deaths/writes_samples.py has used.

seen = Seen.read(folder)
seen.prove(samples=120, dead=[1])        # by epoch, the samples that no worker has used
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Seen:
    saw: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)
    """By worker, in order: epoch and samples of each batch that it has trained with."""
    in_flight: dict[int, list[int]] = field(default_factory=dict)
    """By worker, the samples of the last batch if it has made no step with them."""
    lengths: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By epoch, what loaders have told of their length."""

    @classmethod
    def read(cls, folder: Path) -> Seen:
        found = cls()
        for path in folder.iterdir():
            worker, mine = int(path.name), list[tuple[int, list[int]]]()
            for line in path.read_text().splitlines():
                what, *numbers = line.split()
                epoch, length, *samples = map(int, numbers)
                found.lengths[epoch].add(length)
                if what == "gets":
                    found.in_flight[worker] = samples
                else:
                    assert found.in_flight.pop(worker) == samples
                    mine.append((epoch, samples))
            found.saw[worker] = mine
        return found

    def prove(self, *, samples: int, dead: Collection[int]) -> dict[int, list[int]]:
        """Prove that no sample was used twice in an epoch. Return by epoch the unused samples."""
        assert set(self.in_flight) <= set(dead), self.in_flight
        missing = {}
        for epoch in self.lengths:
            counts = Counter(
                sample for mine in self.saw.values() for at, batch in mine if at == epoch
                for sample in batch
            )  # fmt: skip
            twice = sorted(sample for sample, count in counts.items() if count > 1)
            assert not twice, f"epoch {epoch}: {twice} twice"
            missing[epoch] = sorted(set(range(samples)) - counts.keys())
        return missing

    def batches(self, worker: int, epoch: int) -> int:
        return sum(at == epoch for at, _ in self.saw[worker])
