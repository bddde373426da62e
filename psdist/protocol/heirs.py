"""Who pushes and pulls the chunks of a worker that has died, in a group that goes on without it.

Each chunk has an order of the other workers of its group, which follows from its rank among the
chunks of the worker that had it at first: the first of them that lives has it. So the rest is dealt
evenly whoever dies, and whatever order the deaths are heard in; and no chunk changes hands but from
somebody who has died.

    heir(3, rank=5, members=(2, 3, 4), living={2, 4})
    slices_of_the_living({2: [0, 3], 3: [1, 4], 4: [2, 5]}, living={2, 4})    # {2: [0, 1, 3], ...}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def heir(owner: int, *, rank: int, members: Sequence[int], living: Collection[int]) -> int:
    """Who has the chunk of this ``rank`` (0, 1, 2 ...) of those that ``owner`` had at first;
    ``members``: of the whole group; ``living``: one of them at least."""
    chosen, others = owner, [each for each in members if each != owner]
    while chosen not in living:
        rank, index = divmod(rank, len(others))
        chosen = others.pop(index)
    return chosen


def slices_of_the_living(
    slices: Mapping[int, Sequence[int]], living: Collection[int]
) -> dict[int, list[int]]:
    """By worker that lives, ascending: its chunks, ascending. ``slices``: those that every worker
    of the group had at first, ascending."""
    members = list(slices)
    found: dict[int, list[int]] = {each: [] for each in members if each in living}
    for owner, chunks in slices.items():
        for rank, chunk in enumerate(chunks):
            found[heir(owner, rank=rank, members=members, living=living)].append(chunk)
    return {worker: sorted(chunks) for worker, chunks in found.items()}
