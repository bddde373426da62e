"""sync with clipping: chunks are held until the norm of the whole gradient is known; pure.

A chunk whose contributions are complete is not stepped. Its weighted mean moves out of the slot
into *held* memory, and the slot is free. When all chunks of this server are held, it sends the
other servers the sums of squares of its blocks. A server that has the sums of all servers adds them
in the order of chunks and blocks, so every server gets the same norm, bit by bit, for any number of
servers. Then the held chunks are stepped.

Servers meet in every round. A group that contributed to a round has pushed all of it, and has the
reply about a chunk before it pushes that chunk again. So no chunk of the next round is complete
anywhere before its server has the norm of this one; hence every server has sent its sums of this
round, and none sends sums two rounds ahead. The sums that arrive are of the round that this server
is in, or of the next one if their sender received all sums a little earlier; these wait.

    rule = Clipped(Sync(context), max_norm=1.0)
    rule.on_held(SumMoved(0, (4.0, 1.5)))                     # the executor has moved chunk 0
    rule.takes[SumsOfSquares](server_id(1), SumsOfSquares(round=0, values=b"..."))
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from psdist.errors import InvariantError, NonFiniteGradientError
from psdist.protocol.control import Setup, SumsOfSquares
from psdist.protocol.ids import server_id
from psdist.servers.protocol.actions import (
    Action,
    Built,
    EmptyStep,
    Hold,
    SendControl,
    SlotContent,
    Step,
    SumMoved,
)
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.chunks.frontier import PassingHeld
from psdist.servers.protocol.rules import RoundRule
from psdist.servers.protocol.rules.gathering import Gathered


def coefficient(squares: Iterable[float], max_norm: float) -> float:
    """Return the factor that clips a gradient whose blocks have these sums of squares, as torch's
    clip_grad_norm_ does. The sums are added one by one, in their order."""
    total = 0.0
    for each in squares:
        total += each
    return min(1.0, max_norm / (math.sqrt(total) + 1e-6))


class Sync(Gathered):
    """Each round is one step on the weighted mean of all groups."""

    def for_model(self, peer: int, setup: Setup) -> RoundRule:
        """Return :class:`Clipped` if the model that ``peer`` describes has a joint norm."""
        if not 0 <= setup.max_norm < math.inf:
            self._refuse(peer, f"sent Setup with the norm {setup.max_norm} to clip to")
        return Clipped(self, max_norm=setup.max_norm) if setup.max_norm else self


class Clipped(Gathered):
    TAKES = (SumsOfSquares,)

    def __init__(self, plain: Gathered, *, max_norm: float) -> None:
        """``plain``: the rule in place before the model was described, whose replies this rule
        takes; ``max_norm``: above 0."""
        super().__init__(plain.context)
        self.replies = plain.replies
        self.takes = {SumsOfSquares: self._on_squares}
        self._max_norm = max_norm
        self._round = 0
        """Rounds in which every chunk here was stepped."""
        self._owners: Sequence[int] = ()
        self._num_blocks: Sequence[int] = ()
        self._expected: Counter[int] = Counter()
        """Other server that holds chunks -> number of sums that it sends."""
        self._is_empty: dict[int, bool] = {}
        """Chunk that is held in this round -> True if no group sent a gradient."""
        self._squares: dict[int, Sequence[float]] = {}
        """By chunk of this server that lies in held memory: the sums of its blocks."""
        self._told: dict[int, Sequence[float]] = {}
        """By other server: its sums of this round, chunk after chunk."""
        self._told_early: dict[int, Sequence[float]] = {}
        """By other server: its sums of the next round, from servers that are in it already."""
        self._coefficient: float | None = None
        """The factor of this round, once it is known."""

    def build(
        self, chunks: Sequence[ChunkState], built: Built, *, send_order: Sequence[int]
    ) -> None:
        super().build(chunks, built, send_order=send_order)
        self._frontier = PassingHeld(chunks)
        self._owners, self._num_blocks = built.blocks
        for owner, number in zip(*built.blocks, strict=True):
            self._expected[owner] += number
        del self._expected[self._server]

    # -- until it is held ----------------------------------------------------------------------

    def _step(self, chunk: ChunkState) -> list[Action] | None:
        index = chunk.index
        if index not in self._is_empty:
            # This round is being stepped, and the chunk is complete for the next: see _end_round.
            return self._hold(chunk) if self._coefficient is None else None
        if self._coefficient is None:
            return None
        target = chunk.target_buffer()
        if target is None:
            return None  # on_free_buffer comes back
        actions = self._step_held(chunk, target, self._coefficient)
        return actions if self._is_empty else actions + self._end_round()

    def _step_held(self, chunk: ChunkState, target: int, gradient_scale: float) -> list[Action]:
        """Step as :class:`Gathered` does without a gradient in a slot; a step on held memory, if
        there is one, replaces the empty step."""
        has_gradient = not self._is_empty.pop(chunk.index)
        gathering = chunk.gathering
        step = Step(
            chunk=chunk.index,
            gradient=None,
            content=SlotContent.HELD,
            gradient_scale=gradient_scale,
            lr_scale=1.0,
            hyper=next(iter(gathering.pushes.values())).settings.hyper,
            absent=gathering.absent,
            source=chunk.current,
            target=target,
            contributions=(),
        )
        if has_gradient:  # replies that follow are of what it makes
            self.begin_step(step, chunk)
        actions = super()._step(chunk)
        assert actions is not None
        empty = actions[0]
        assert isinstance(empty, EmptyStep)
        if has_gradient:
            step.contributions = empty.contributions
            actions[0] = step
        return actions

    def _hold(self, chunk: ChunkState) -> list[Action]:
        """All groups have contributed: the mean waits for the norm, and its slot is free."""
        index, gathering = chunk.index, chunk.gathering
        slot, gathering.accumulator = gathering.accumulator, None
        chunk.is_held = True
        self._is_empty[index] = slot is None
        frontier = self._frontier.move()
        if slot is None:
            self._squares[index] = (0.0,) * self._num_blocks[index]
            return self._reconsider(frontier) + self._tell()
        hold = Hold(index, slot, 1.0 / gathering.weight)
        return [hold, *self.pool.release(slot), *self._reconsider(frontier)]

    def on_held(self, event: SumMoved) -> list[Action]:
        for each in event.squares:
            if not math.isfinite(each):
                round_ = self._round
                raise NonFiniteGradientError(
                    f"server {self._server}: in round {round_} the weighted mean of all groups' "
                    f"gradients of chunk {event.chunk} has no finite norm to clip; the gradients "
                    "were finite, but too large together: lower the learning rate"
                )
        self._squares[event.chunk] = event.squares
        return self._tell()

    # -- the norm ------------------------------------------------------------------------------

    def _tell(self) -> list[Action]:
        """Send this server's sums to the other servers if all chunks are held."""
        if len(self._squares) < len(self._chunks):
            return []
        values = [each for index in sorted(self._chunks) for each in self._squares[index]]
        packed = struct.pack(f"<{len(values)}d", *values)
        message = SumsOfSquares(round=self._round, values=packed)
        tells: list[Action] = [
            SendControl(server_id(other), message) for other in sorted(self._expected)
        ]
        return tells + self._step_if_known()

    def _on_squares(self, peer: int, message: SumsOfSquares) -> list[Action]:
        """Another server's chunks are held."""
        number = self._expected.get(peer)
        if number is None or not self._chunks:
            self._refuse_sums(peer, "which holds nothing that is clipped with this server's chunks")
        told = self._told
        if message.round == self._round + 1 and peer in told:
            told = self._told_early
        elif message.round != self._round:
            self._refuse_sums(peer, f"of round {message.round} in round {self._round}")
        if peer in told:
            self._refuse_sums(
                peer, f"of round {message.round} in round {self._round}, a second time"
            )
        if len(message.values) != 8 * number:
            self._refuse_sums(
                peer, f"of {len(message.values)} bytes; its {number} blocks need 8 each"
            )
        values = struct.unpack(f"<{number}d", message.values)
        if not all(0 <= each < math.inf for each in values):
            self._refuse_sums(peer, "that are not all finite and 0 or more")
        told[peer] = values
        return self._step_if_known()

    def _step_if_known(self) -> list[Action]:
        if len(self._squares) < len(self._chunks) or len(self._told) < len(self._expected):
            return []
        self._coefficient = coefficient(self._in_order(), self._max_norm)
        for chunk in self._chunks.values():
            chunk.is_held = False
        return self._proceed_with_all()

    def _proceed_with_all(self) -> list[Action]:
        actions: list[Action] = []
        for chunk in self._chunks.values():
            if chunk.gathering.pushes:
                chunk.clock.catch_up()
                actions += self.proceed(chunk)
        return actions

    def _in_order(self) -> Iterable[float]:
        """Yield the sums of all chunks of the model, chunk by chunk, block by block."""
        told = {server: iter(values) for server, values in self._told.items()}
        for index, (owner, number) in enumerate(zip(self._owners, self._num_blocks, strict=True)):
            if owner == self._server:
                yield from self._squares[index]
            else:
                for _ in range(number):
                    yield next(told[owner])

    def _end_round(self) -> list[Action]:
        self._round += 1
        self._coefficient = None
        self._squares.clear()
        self._told, self._told_early = self._told_early, {}
        return self._proceed_with_all()  # some may be complete again

    def _refuse_sums(self, peer: int, why: str) -> NoReturn:
        self._refuse(peer, f"sent sums of squares {why}")

    def _may_finish(self, chunk: ChunkState) -> bool:
        is_mine = chunk.index in self._is_empty
        if self._coefficient is None:
            return not is_mine
        return is_mine and super()._may_finish(chunk)

    def check_invariants(self, index: int | None = None) -> None:
        super().check_invariants(index)
        held = {index for index, chunk in self._chunks.items() if chunk.is_held}
        if held != (self._is_empty.keys() if self._coefficient is None else set()):
            raise InvariantError(f"chunks {sorted(held)} are held, not {sorted(self._is_empty)}")
        if any(not self._chunks[index].gathering.pushes for index in self._is_empty):
            raise InvariantError(f"a chunk of {sorted(held)} is held without a contribution")
        has_all = len(self._squares) == len(self._chunks) and len(self._told) == len(self._expected)
        if self._is_empty and has_all != (self._coefficient is not None):
            raise InvariantError(f"the coefficient {self._coefficient}, all told: {has_all}")
