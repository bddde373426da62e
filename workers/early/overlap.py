"""Gradients that leave during backward: the step strategy that decides if they may, and compares
what has left with what ``step()`` finds.

It watches the first iterations, in which everything leaves in ``step()``. If each gradient comes
once, and is in ``step()`` what it was when autograd had finished it, the strategy switches on.
From then on chunks leave early (psdist.workers.early.early_pushes), replies land in memory next to
the parameters, and every step compares what was sent with what is there. A gradient that changes
before it has left is sent as it is in ``step()``, and the strategy switches off. After it has left,
a server may have applied it, and no later push corrects that: :class:`UsageError`.

    strategy = EarlyPush(parts, driver=..., is_training=...)

Longer than other modules: what is watched, sent and compared is one judgement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from statistics import median
from typing import Any, Final

import torch

from psdist.errors import UsageError
from psdist.workers.blocking import Blocking, Parts
from psdist.workers.early.early_pushes import EarlyPushes
from psdist.workers.early.progress import Driver
from psdist.workers.loop import Wait
from psdist.workers.model.flat import Shadow
from psdist.workers.model.gradient_hooks import GradientHooks
from psdist.workers.model.samples import same_bits
from psdist.workers.reduction import Reduced, Row, Terms

logger = logging.getLogger("psdist")

WATCHED: Final = 3
"""Equal iterations that must be seen before gradients leave early."""
WATCHED_OF_SETS: Final = 16
"""The same, in a job of several parameter sets. Their loops repeat after more iterations: every
fifth backward pass of a critic may be a generator's."""
BACKWARD_S: Final = 5e-3
"""Least seconds of a backward pass for which gradients of a worker that is alone in its group leave
early. In a shorter pass hooks, copies and a second thread cost what it could hide."""
RETERMED: Final = (
    "hyperparameters or the weight of the batch changed after the first gradients had been sent"
)
UNFOLLOWED: Final = "backward was not followed by step(), and a part of its gradients was sent"
SKIPPED: Final = "a GradScaler left the step out, and a part of its gradients had been sent"
_REMEDY: Final = (
    'set transfer.overlap = off (job.prepare(..., overlap="off")) to send gradients in step()'
)


class Pace:
    """Decides if backward passes are long enough to send gradients during them; pure.

    The workers of a group exchange the lengths of their backward passes, so that all of them judge
    by the same figures. In larger groups, where cores are short, the time in which the pass itself
    uses a core does not count: nothing hides in it.
    """

    def __init__(self, least_s: float) -> None:
        """``least_s``: least seconds of a backward pass that pays."""
        self._least_s = least_s
        self._shortest_s: list[float] = []
        """By iteration, of the worker whose backward pass was shortest."""

    def watch(self, backward_s: Sequence[float]) -> None:
        """Seconds from each worker's first gradient to ``step()``; 0: it does not watch. The first
        :data:`WATCHED` iterations count that every worker has watched."""
        if all(backward_s) and len(self._shortest_s) < WATCHED:
            self._shortest_s.append(min(backward_s))

    def why_not(self) -> str:
        """Why gradients should wait for ``step()``, for people; "" where they need not."""
        if not self._shortest_s or (usual_s := median(self._shortest_s)) >= self._least_s:
            return ""
        return (
            f"backward passes leave {usual_s * 1e3:.1f} ms to send gradients in, and sending them "
            f"before step() pays from {self._least_s * 1e3:.0f} ms on"
        )


class EarlyPush(Blocking):
    def __init__(
        self,
        parts: Parts,
        *,
        driver: Driver | None,
        is_training: Callable[[], bool],
        early: EarlyPushes | None = None,
    ) -> None:
        """``driver``: of the loop during backward, None if gradients of other groups may leave
        early, but not of this worker's; ``is_training()``: gradients of a model that is evaluated,
        as for a saliency map, usually lead to no step; ``early``: what pushes
        them, by default as of a worker that is alone in its group."""
        super().__init__(parts)
        self.early = early or EarlyPushes(parts, parts.group.order.sorted(parts.group.mine))
        self._driver = driver
        self._pace = Pace(BACKWARD_S)
        self.hooks = GradientHooks(
            self.flat,
            on_gradient=self._on_gradient,
            is_training=is_training,
            before_gradient=self.finish_reads,
        )
        self._is_expected = False
        """True if servers count this group in collectives: gradients of an iteration have come."""
        self._is_watching = driver is not None
        self._is_on = False
        self._reason = ""
        """Why the strategy switches off when this iteration ends."""
        self._num_watched = 0
        self._first_terms: Terms | None = None
        """The terms when the first gradient of a watched iteration came."""
        self._first_s = 0.0
        self._held: set[int] = set()
        """Pieces whose gradient did not come exactly once in each watched iteration."""
        self._unused: set[int] = set()
        """Pieces without a gradient in step(), in an iteration in which others had one."""
        self._absent: Collection[int] = ()
        """Pieces without a gradient in the group in the last iteration."""
        self._shadow: Shadow | None = None
        self._changed: set[int] = set()
        """Pieces whose gradient is not in step() what it was when it came, or came again."""
        self._moved: dict[int, int] = {}
        """Chunk -> number of the version in place."""
        self.hooks.copies = "all" if self._is_watching else "none"
        self.hooks.attach()

    @property
    def is_half_pushed(self) -> bool:  # type: ignore[override]
        return self.early.has_begun

    @property
    def is_under_way(self) -> bool:  # type: ignore[override]
        return self.early.is_under_way

    def push_ready(self) -> bool:
        return self.early.push_ready()

    def take_over(self) -> None:
        if self._driver is not None:
            self._driver.take_over()

    def counts(self) -> dict[str, Any]:
        return {**super().counts(), "early_pushes": self.early.num_pushed}

    # -- during backward -----------------------------------------------------------------------

    def _on_gradient(self, piece: int, count: int) -> None:
        if not self._is_expected and self.loop.core.clock >= WATCHED:
            # Other groups, which have watched as long, may have sent parts of this iteration.
            self._is_expected = True
            self.loop.core.expect_iteration()
        if not self._is_on:
            if self._is_watching and self._first_terms is None:
                self._first_terms, self._first_s = self.iteration.terms(), self._now_s()
            return
        early = self.early
        if piece not in early.pieces:
            return
        if count > 1:
            early.stop()
        if early.is_stopped:
            return
        if early.terms is None:
            frozen = frozenset(
                index
                for index, parameter in enumerate(self.flat.parameters)
                if not parameter.requires_grad and parameter.grad is None
            )
            # Pieces of the other chunks may be announced as absent: only an error costs a message.
            expected = frozenset(self._absent).difference(early.pieces)
            early.begin(self.iteration.terms(), frozen=frozen, expected=expected)
        early.add(piece)
        if self._driver is not None:
            self._driver.wake()

    # -- step() --------------------------------------------------------------------------------

    def before_step(self) -> Generator[Wait, None, None]:
        self._compare()
        self.take_over()
        yield from ()

    def _compare(self) -> None:
        """Look for gradients that have changed since they came, bit by bit: torch sees no write by
        ``.data`` or numpy. The loop need not be the script's yet, so this costs no time in which
        chunks leave."""
        if self.early.terms is None:
            return
        counts, as_noted, others = self.hooks.counts, list[int](), set[int]()
        for piece in self.early.pieces:
            if counts[piece] == 1 and self.hooks.is_as_noted(piece):
                as_noted.append(piece)
            elif counts[piece]:
                others.add(piece)
        self._changed = others | self.flat.unlike_flat(as_noted)

    def collect(
        self, now: Terms, *, scale: float, is_skipped: bool, has_scaler: bool, is_clipped: bool
    ) -> Collection[int]:
        self._look(now, has_scaler=has_scaler, is_clipped=is_clipped)
        is_other = is_skipped or is_clipped or scale != 1.0
        kept = self._kept(now, is_other=is_other) if self.is_half_pushed else ()
        return self.flat.collect_gradients(scale=scale, kept=kept)

    def _kept(self, now: Terms, *, is_other: bool) -> Collection[int]:
        """Return the pieces whose gradients have left and are not collected again. ``is_other``:
        the step uses other gradients than backward has made."""
        if self._is_retermed(now):
            raise self.sent_too_soon(RETERMED)
        if is_other or not self._is_as_sent():
            self.flat.divert_gradients()
            return ()
        return self._given_pieces()

    def _is_retermed(self, now: Terms) -> bool:
        """True if hyperparameters or weight have changed since the first gradient."""
        terms = self.early.terms
        return terms is not None and (terms.hyper, terms.weight) != (now.hyper, now.weight)

    def _look(self, now: Terms, *, has_scaler: bool, is_clipped: bool) -> None:
        """Decide from this step() about the next iterations."""
        self.flat.require_in_place()
        if has_scaler:
            self._reason = "a GradScaler decides in step() whether an iteration counts"
        elif is_clipped:
            self._reason = "job.clip_grad_norm_ changes gradients after backward"
        elif self._changed:
            self._reason = "gradients change between backward and step()"
        if self._is_watching and not self._reason:
            self._watch(now)

    def _given_pieces(self) -> set[int]:
        return {piece for chunk in self.early.given for piece in self.early.pieces_of[chunk]}

    def non_finite(self) -> Sequence[int]:
        if not self.is_half_pushed or self.flat.is_diverted or self.is_changed:
            return self.flat.non_finite()
        chunks, given = self._chunks, self.early.given
        left = [chunks[chunk] for chunk in self.early.order if chunk not in given]
        return self.flat.non_finite_in(left)

    def _is_as_sent(self) -> bool:
        """True if nothing speaks against what has left."""
        counts = self.hooks.counts
        for chunk, is_empty in self.early.given.items():
            for piece in self.early.pieces_of[chunk]:
                gradient = self.flat.parameters[piece].grad
                if counts[piece] == 0 and gradient is None:
                    continue  # frozen
                if is_empty or counts[piece] == 0 or piece in self._changed:
                    return False
        return not self.early.is_stopped

    def catch_up(self, table: Sequence[Row]) -> Generator[Wait, None, bool]:
        self._pace.watch([row.backward_s for row in table])
        return (yield from super().catch_up(table))

    def _push(self, reduced: Reduced) -> None:
        self._absent = reduced.absent
        if not self.loop.core.is_pushing:
            super()._push(reduced)
            return
        empty = self._settle(reduced)
        # All chunks of an iteration leave under the same terms.
        terms = self.early.terms or self._terms_of(reduced)
        self._to_host(terms, reduced, without=empty | self.early.sent.keys())
        self._record_push(reduced, empty)
        self.loop.finish_push(empty=empty, absent=sorted(reduced.absent))

    def _settle(self, reduced: Reduced) -> set[int]:
        """Keep what has left as it was sent, and make the rest what ``step()`` has found. Return
        the chunks of the iteration without a gradient. Raises :class:`UsageError` if what has left
        is not what ``step()`` has found."""
        sent = self.early.sent
        if reduced.is_skipped:
            raise self.sent_too_soon(SKIPPED)
        if self.flat.is_diverted:
            aside = self.flat.rejoin_gradients()
            changed: list[int] = []
            for index in self.early.order:
                chunk = self._chunks[index]
                wanted = aside[chunk.buffer][chunk.start : chunk.start + chunk.length]
                part = self.flat.gradient_part(chunk)
                if index not in sent:
                    part.copy_(wanted)
                else:
                    changed += self.pieces_unlike(index, wanted, part, reduced.absent)
            if changed:
                raise self.sent_too_soon(self.describe_changed(changed))
        still = {chunk for chunk in self._without_gradient(reduced) if chunk not in sent}
        return still | {chunk for chunk, is_empty in sent.items() if is_empty}

    def pieces_unlike(
        self, chunk: int, wanted: torch.Tensor, sent: torch.Tensor, absent: Collection[int]
    ) -> list[int]:
        """Return the pieces of a sent chunk whose gradient has other bits now, or is present now
        and was absent, or the reverse. A server steps with zeros, but not without a gradient."""
        return [
            segment.piece
            for segment in self._chunks[chunk].segments
            if (is_absent := segment.piece in absent) != (segment.piece in self.early.absent)
            or not (
                is_absent
                or same_bits(
                    wanted[segment.offset :][: segment.length],
                    sent[segment.offset :][: segment.length],
                )
            )
        ]

    def describe_changed(self, pieces: Iterable[int]) -> str:
        """Return the beginning of an error about the gradients of these pieces."""
        names = [self.group.partition.pieces[piece].name for piece in dict.fromkeys(pieces)]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return f"the gradient of {names[0]}{more} changed after it had been sent during backward"

    def sent_too_soon(self, problem: str) -> UsageError:
        """Return the error for sent gradients that servers may have applied and ``step()`` does not
        have."""
        again = any(count > 1 for count in self.hooks.counts)
        why = " (another backward pass came before step())" if again else ""
        return UsageError(f"iteration {self.iteration.clock}: {problem}{why}; {_REMEDY}")

    def meet_at_end(self) -> Generator[Wait, None, None]:
        yield from ()
        if self.is_half_pushed:
            raise self.sent_too_soon(UNFOLLOWED)

    @property
    def is_dropped(self) -> bool:
        """True if the script has dropped the gradients of this iteration: no step() follows."""
        parameters = self.flat.parameters
        return self._is_expected and all(parameter.grad is None for parameter in parameters)

    def expect_nothing(self) -> None:
        """Forget an iteration whose gradients are dropped; they have not left."""
        self._is_expected = False
        self.loop.core.expect_nothing()

    def meet_dropped(self, call: str) -> Generator[Wait, None, None]:  # noqa: ARG002
        yield from ()
        if self.is_dropped and self.group.channel.size == 1:
            if self.is_half_pushed:
                raise self.sent_too_soon(UNFOLLOWED)
            self.expect_nothing()

    # -- the end of an iteration ---------------------------------------------------------------

    def place(self, chunks: Sequence[int]) -> None:
        """Put what is new in place, and the servers' values back that the script has written."""
        if self._shadow is None:
            super().place(chunks)
            return
        pieces_of = self.early.pieces_of
        written = set(self.flat.written_by_others({p for c in chunks for p in pieces_of[c]}))
        numbers = {chunk: self.loop.core.versions[chunk].chunk_version for chunk in chunks}
        self._shadow.move(
            [
                chunk
                for chunk, number in numbers.items()
                if not number
                or self._moved.get(chunk) != number
                or not written.isdisjoint(pieces_of[chunk])
            ]
        )
        self._moved.update(numbers)

    @property
    def _lands_beside(self) -> bool:
        """True if replies land next to the parameters, in this iteration and in the next one."""
        return self._is_on and not self._reason

    def _move_written(self) -> None:
        """Let the next :meth:`place` put the servers' values back that the script has written."""
        written = set(self.flat.written_by_others())
        for chunk, pieces in self.early.pieces_of.items():
            if not written.isdisjoint(pieces):
                self._moved.pop(chunk, None)

    def _end(self) -> None:
        self.early.reset()
        self._changed.clear()
        self._is_expected = False
        self.is_changed = self.is_retermed = False
        self.backward_s = 0.0
        self.hooks.begin()
        self._first_terms = None
        if self._reason and (self._is_on or self._is_watching):
            self._switch_off()
        elif self._is_watching and self._num_watched >= self._num_to_watch:
            self._switch_on()
        self.hooks.attach()

    @property
    def _num_to_watch(self) -> int:
        return WATCHED if len(self.loop.core.sets) == 1 else WATCHED_OF_SETS

    def stop(self) -> None:
        self.hooks.remove()

    def _switch_off(self) -> None:
        was_on, self._is_on, self._is_watching = self._is_on, False, False
        self.hooks.copies = "none"
        self.early.allow(0)
        if self._shadow is not None:
            self.flat.values_to_host()  # replies without bytes mean what is in place
            self.loop.receive_into(self.flat.parameter_frame)
            self._shadow = None
        logger.info(
            "parameter set %d: overlap %s: %s",
            self.loop.core.set_index,
            "goes off" if was_on else "stays off",
            self._reason,
        )

    def _switch_on(self) -> None:
        if why := self._pace.why_not():
            self._reason = why
            self._switch_off()
            return
        order, pieces_of = self.early.order, self.early.pieces_of
        num_chunks = next(
            (n for n, chunk in enumerate(order) if not self._held.isdisjoint(pieces_of[chunk])),
            len(order),
        )
        num_chunks = self.early.whole(num_chunks)
        is_frozen = [not parameter.requires_grad for parameter in self.flat.parameters]
        if all(is_frozen[piece] for chunk in order[:num_chunks] for piece in pieces_of[chunk]):
            behind = [piece for chunk in order[num_chunks:] for piece in pieces_of[chunk]]
            held = next((piece for piece in behind if piece in self._held), None)
            name = self.group.partition.pieces[held].name if held is not None else "any parameter"
            self._reason = f"the gradient of {name}, which leaves first, does not come once a step"
            self._switch_off()
            if held in self._unused and self.loop.core.seat.is_chief:
                logger.warning(
                    "parameter %s has got no gradient in some of the first steps, and would leave "
                    "first: nothing of parameter set %d leaves during backward. Freeze it before "
                    'job.prepare (requires_grad_(False)) if it is not used; overlap="off" says '
                    "that nothing is to leave",
                    name,
                    self.loop.core.set_index,
                )
            return
        self.early.allow(num_chunks)
        mine = self.loop.core.mine
        self._shadow = Shadow(self.group.partition, self.flat, chunks=mine, newest=self.flat.values)
        self.loop.receive_into(self._shadow.parameter_frame)
        versions = self.loop.core.versions
        self._moved = {chunk: versions[chunk].chunk_version for chunk in mine}
        self.hooks.copies = "first"
        self._is_on, self._is_watching = True, False
        logger.info(
            "parameter set %d: overlap is on: %d of %d chunks may leave during backward",
            self.loop.core.set_index,
            num_chunks,
            len(order),
        )

    # -- watching ------------------------------------------------------------------------------

    def _now_s(self) -> float:
        """Return the time by which backward passes are judged."""
        return self.loop.now_s()

    def _watch(self, now: Terms) -> None:
        """Decide from the iteration that ends now about the next ones."""
        self._num_watched += 1
        first = self._first_terms
        self.backward_s = max(self._now_s() - self._first_s, 1e-9) if first is not None else 0.0
        if first is not None and (first.hyper, first.weight) != (now.hyper, now.weight):
            self._reason = "hyperparameters or the batch change between backward and step()"
            return
        parameters = self.flat.parameters
        if any(parameter.grad is not None for parameter in parameters):
            self._unused.update(
                piece
                for piece, parameter in enumerate(parameters)
                if parameter.requires_grad and parameter.grad is None
            )
        for piece, parameter in enumerate(parameters):
            if self.hooks.counts[piece] != 1:
                if parameter.requires_grad or parameter.grad is not None:
                    self._held.add(piece)
            elif not (self.hooks.is_as_noted(piece) and self.flat.holds_gradient(piece)):
                name = self.group.partition.pieces[piece].name
                self._reason = f"the gradient of {name} changes between backward and step()"
                return
