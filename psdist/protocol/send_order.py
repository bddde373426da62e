"""In which order all groups send the chunks of a parameter set; pure.

Servers rely on it (psdist.servers.protocol.chunks.receive_pool): any order will do if all groups
share it. The chief sends it in Setup, empty if it is the ascending one.

    order = SendOrder([2, 0, 1], num_chunks=3)
    order.rank[2]                               # 0: chunk 2 leaves first
    order.sorted([0, 1, 2])                     # [2, 0, 1]
    SendOrder([], num_chunks=3).chunks          # (0, 1, 2)
    backward_order(partition)                   # in which backward passes complete them
    round_order(partition)                      # where the next forward pass waits for them
    forward_ranks(partition)                    # place of each chunk where forward passes read them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psdist.protocol.partition import Chunk, Partition


def backward_order(partition: Partition) -> list[int]:
    """The chunks as a backward pass completes them, if pieces are used in the model's order.

    It makes gradients from the last piece to the first, so a chunk is complete with its first
    piece. Chunks of one piece are complete together; the last one goes first, as ever.
    """

    def place(chunk: Chunk) -> tuple[int, int]:
        first = min((segment.piece for segment in chunk.segments), default=0)
        return -first, -chunk.index

    return [chunk.index for chunk in sorted(partition.chunks, key=place)]


def forward_ranks(partition: Partition) -> list[int]:
    """For each chunk, its place in the order in which a forward pass reads them, if pieces are used
    in the model's order: a chunk is read with its first piece."""
    ranks = {chunk: rank for rank, chunk in enumerate(reversed(backward_order(partition)))}
    return [ranks[chunk.index] for chunk in partition.chunks]


def round_order(partition: Partition) -> list[int]:
    """The chunks in the order in which the next forward pass awaits replies: three quarters of the
    bytes from the back, while backward runs; then from the front, since the next forward begins
    there."""
    order = backward_order(partition)
    sizes = [partition.chunks[chunk].num_bytes for chunk in order]
    wanted, num_back, so_far = sum(sizes) * 3 / 4, 0, 0
    while so_far < wanted:
        so_far += sizes[num_back]
        num_back += 1
    return order[:num_back] + order[num_back:][::-1]


class SendOrder:
    def __init__(self, chunks: Sequence[int], *, num_chunks: int) -> None:
        """``chunks``: each of the set once, or empty for ascending. ValueError describes the fault,
        in words that follow "an order that"."""
        self.chunks = tuple(chunks or range(num_chunks))
        rank: list[int] = [-1] * num_chunks
        for place, chunk in enumerate(self.chunks):
            if not 0 <= chunk < num_chunks:
                raise ValueError(f"names chunk {chunk}; the set has {num_chunks} chunks")
            if rank[chunk] >= 0:
                raise ValueError(f"names chunk {chunk} twice")
            rank[chunk] = place
        if -1 in rank:
            raise ValueError(f"leaves chunk {rank.index(-1)} out")
        self.rank: Sequence[int] = rank
        """Chunk -> its place in the order."""

    def sorted(self, chunks: Iterable[int]) -> list[int]:
        """In the order in which they are sent."""
        return sorted(chunks, key=self.rank.__getitem__)

    def told(self) -> list[int]:
        """As Setup carries it."""
        is_ascending = self.chunks == tuple(range(len(self.chunks)))
        return [] if is_ascending else list(self.chunks)
