"""Overlap of one parameter set: whether its gradients may leave during backward, and whether what
has left is what ``step()`` finds.

It watches the first iterations, in which everything leaves in ``step()``. What they show decides:
where each gradient comes once, and is in ``step()`` what it was when autograd had finished it, it
switches on. From then on chunks leave early (psdist.workers.early.early_pushes), replies land
in memory aside, and every step compares what was sent with what is there. A gradient that
changes before it has left is sent as it is in ``step()``, and overlap goes off. If it has left, a
server may have applied it, and no later push makes that good: :class:`UsageError`.

    overlap = Overlap("auto", partition=..., flat=..., loop=..., early=..., terms=..., driver=...)
    overlap.compare()                                         # while chunks may still leave
    absent, terms = overlap.collect(terms, scale=1.0)         # the flat gradients are complete
    empty = overlap.settle(empty, absent=..., is_skipped=...) # before the rest is pushed
    overlap.end_iteration()                                   # the new values are in place

Longer than other modules: what is watched, sent and compared is one judgement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Final, Literal

import torch

from psdist.errors import UsageError
from psdist.protocol.partition import Partition
from psdist.workers.early.early_pushes import EarlyPushes, Terms
from psdist.workers.early.progress import Driver
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.model.gradient_hooks import GradientHooks
from psdist.workers.model.samples import same_bits
from psdist.workers.model.shadow import Shadow

logger = logging.getLogger("psdist")

WATCHED: Final = 3
"""Iterations that must look alike before gradients leave early."""
WATCHED_OF_SETS: Final = 16
"""The same, in a job of several parameter sets. Their loops repeat after more iterations: every
fifth backward pass of a critic may be a generator's."""
RETERMED: Final = (
    "hyperparameters or the weight of the batch changed after the first gradients had been sent"
)
UNFOLLOWED: Final = "backward was not followed by step(), and a part of its gradients was sent"
SKIPPED: Final = "a GradScaler left the step out, and a part of its gradients had been sent"
_REMEDY: Final = (
    'set transfer.overlap = off (job.prepare(..., overlap="off")) to send gradients in step()'
)


class Overlap:
    def __init__(
        self,
        setting: Literal["auto", "strict", "off", "full"],
        *,
        partition: Partition,
        flat: FlatModel,
        loop: WorkerLoop,
        early: EarlyPushes,
        terms: Callable[[], Terms],
        driver: Driver | None,
        is_training: Callable[[], bool],
        before_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        """``terms()``: under which an iteration would be pushed now; ``driver``: None where
        gradients of other groups may leave early, but not of this worker's; ``is_training()``:
        gradients of a model that is evaluated, as for a saliency map, lead to no step as a rule;
        ``before_gradient()`` is called while the flat gradients may still be those of before."""
        self._partition = partition
        self._flat = flat
        self._loop = loop
        self._terms = terms
        self._driver = driver
        self.early = early
        self._hooks = GradientHooks(
            flat,
            on_gradient=self._on_gradient,
            is_training=is_training,
            before_gradient=before_gradient,
        )
        self._is_expected = False
        """Whether servers count this group in collectives: gradients of an iteration have come."""
        self._is_watching = setting != "off" and driver is not None
        self._is_on = False
        self._reason = ""
        """Why it goes off when this iteration ends."""
        self._num_watched = 0
        self._first_terms: Terms | None = None
        """When the first gradient of a watched iteration came."""
        self._first_s = 0.0
        self.backward_s = 0.0
        """Of the iteration that is watched: seconds from its first gradient to ``step()``."""
        self._held: set[int] = set()
        """Pieces whose gradient did not come exactly once in each watched iteration."""
        self._unused: set[int] = set()
        """Those of them that had none in step(), in an iteration in which others had."""
        self.absent: Collection[int] = ()
        """Pieces of which the group had no gradient in the last iteration."""
        self.is_changed = False
        """Whether gradients are others than those that have left to the group."""
        self.is_retermed = False
        """True if this worker's hyperparameters or weight differ from those of the group."""
        self._shadow: Shadow | None = None
        self._changed: set[int] = set()
        """Pieces whose gradient is not in step() what it was when it came, or came again."""
        self._moved: dict[int, int] = {}
        """Chunk -> number of the version that lies in place."""
        self._has_hooks = setting != "off"
        if self._has_hooks:
            self._hooks.copies = "all" if self._is_watching else "none"
            self._hooks.attach()

    @property
    def is_half_pushed(self) -> bool:
        """Whether parts of an iteration have left whose step() has not come."""
        return self.early.has_begun

    @property
    def num_begun(self) -> int:
        """Operations of the group that were begun during backward."""
        return 0

    # -- during backward -----------------------------------------------------------------------

    def _on_gradient(self, piece: int, count: int) -> None:
        if not self._is_expected and self._loop.core.clock >= WATCHED:
            # Other groups, which have watched as long, may have sent parts of this iteration.
            self._is_expected = True
            self._loop.core.expect_iteration()
        if not self._is_on:
            if self._is_watching and self._first_terms is None:
                self._first_terms, self._first_s = self._terms(), self._loop.now_s()
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
                for index, parameter in enumerate(self._flat.parameters)
                if not parameter.requires_grad and parameter.grad is None
            )
            # What stays may be said to be absent: servers are told anew only where that is wrong.
            expected = frozenset(self.absent).difference(early.pieces)
            early.begin(self._terms(), frozen=frozen, expected=expected)
        early.add(piece)
        if self._driver is not None:
            self._driver.wake()

    # -- step() --------------------------------------------------------------------------------

    def compare(self) -> None:
        """Look for gradients that have changed since they came, bit by bit: torch sees no write by
        ``.data`` or numpy. The loop need not be the script's yet, so this costs no time in which
        chunks leave."""
        if self.early.terms is None:
            return
        counts, as_noted, others = self._hooks.counts, list[int](), set[int]()
        for piece in self.early.pieces:
            if counts[piece] == 1 and self._hooks.is_as_noted(piece):
                as_noted.append(piece)
            elif counts[piece]:
                others.add(piece)
        self._changed = others | self._flat.unlike_flat(as_noted)

    def collect(
        self,
        now: Terms,
        *,
        scale: float,
        is_skipped: bool = False,
        has_scaler: bool = False,
        is_clipped: bool = False,
    ) -> tuple[list[int], Terms]:
        """The flat gradients become what is to be pushed; returns the pieces that have none, and
        the terms of the push: those of what has left already. The loop is the script's.

        ``has_scaler``: a GradScaler takes part, which may have this step left out
        (``is_skipped``); ``is_clipped``: by job.clip_grad_norm_. Raises :class:`UsageError` where
        hyperparameters or the weight of the batch are others than those under which a part has
        left.
        """
        self._look(now, has_scaler=has_scaler, is_clipped=is_clipped)
        kept: Collection[int] = ()
        if self.is_half_pushed:
            if self._is_retermed(now):
                raise self.sent_too_soon(RETERMED)
            if is_skipped or is_clipped or scale != 1.0 or not self._is_as_sent():
                self._flat.divert_gradients()
            else:
                kept = self._given_pieces()
        return self._flat.collect_gradients(scale=scale, kept=kept), now

    def _is_retermed(self, now: Terms) -> bool:
        """True if hyperparameters or weight have changed since the first gradient."""
        terms = self.early.terms
        return terms is not None and (terms.hyper, terms.weight) != (now.hyper, now.weight)

    def _look(self, now: Terms, *, has_scaler: bool, is_clipped: bool) -> None:
        """What this step() says about the next iterations."""
        self._flat.require_in_place()
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

    def non_finite(self) -> list[int]:
        """Pieces whose gradient holds NaN or infinity; what has left was looked at."""
        if not self.is_half_pushed or self._flat.is_diverted or self.is_changed:
            return self._flat.non_finite()
        chunks, given = self._partition.chunks, self.early.given
        left = [chunks[chunk] for chunk in self.early.order if chunk not in given]
        return self._flat.non_finite_in(left)

    def _is_as_sent(self) -> bool:
        """True if nothing speaks against what has left."""
        counts = self._hooks.counts
        for chunk, is_empty in self.early.given.items():
            for piece in self.early.pieces_of[chunk]:
                gradient = self._flat.parameters[piece].grad
                if counts[piece] == 0 and gradient is None:
                    continue  # frozen
                if is_empty or counts[piece] == 0 or piece in self._changed:
                    return False
        return not self.early.is_stopped

    def settle(
        self, empty: Iterable[int], *, absent: Collection[int], is_skipped: bool
    ) -> set[int]:
        """A part has left and stays as it is; the rest becomes what ``step()`` has found. Returns
        the chunks of the iteration without a gradient: of what has left as they were sent, else
        ``empty``. ``absent``: pieces without a gradient; ``is_skipped``: the step is left out.

        Raises :class:`UsageError` where what has left is not what ``step()`` has found.
        """
        early = self.early
        if is_skipped:
            raise self.sent_too_soon(SKIPPED)
        if self._flat.is_diverted:
            aside = self._flat.rejoin_gradients()
            changed: list[int] = []
            for index in early.order:
                chunk = self._partition.chunks[index]
                wanted = aside[chunk.buffer][chunk.start : chunk.start + chunk.length]
                part = self._flat.gradient_part(chunk)
                if index not in early.sent:
                    part.copy_(wanted)
                else:
                    changed += self.pieces_unlike(index, wanted, part, absent)
            if changed:
                raise self.sent_too_soon(self.describe_changed(changed))
        return self._without_gradient(empty)

    def pieces_unlike(
        self, chunk: int, wanted: torch.Tensor, sent: torch.Tensor, absent: Collection[int]
    ) -> list[int]:
        """Return the pieces of a sent chunk whose gradient has other bits now, or is present now
        and was absent, or the reverse. A server steps with zeros, but not without a gradient."""
        return [
            segment.piece
            for segment in self._partition.chunks[chunk].segments
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
        names = [self._partition.pieces[piece].name for piece in dict.fromkeys(pieces)]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return f"the gradient of {names[0]}{more} changed after it had been sent during backward"

    def sent_too_soon(self, problem: str) -> UsageError:
        """Return the error for sent gradients that servers may have applied and ``step()`` does not
        have."""
        again = any(count > 1 for count in self._hooks.counts)
        why = " (another backward pass came before step())" if again else ""
        return UsageError(f"iteration {self._terms().clock}: {problem}{why}; {_REMEDY}")

    def to_host(
        self,
        chunks: Collection[int],
        terms: Terms,
        *,
        empty: Collection[int],
        absent: Collection[int],
    ) -> None:
        """Of this worker's ``chunks``, what has not left and is not ``empty`` becomes what MPI
        reads. ``terms``: under which it leaves, without ``absent`` pieces."""
        left = self.early.sent
        leaving = [chunk for chunk in chunks if chunk not in empty and chunk not in left]
        pushes = self._loop.pushes.encoding.on_device
        if pushes is None:
            self._flat.gradients_to_host(self._partition.chunks[chunk] for chunk in leaving)
            return
        computed = [self._flat.mark()] if leaving else []
        for chunk in leaving:  # each is waited for when it leaves
            pushes.begin(
                chunk,
                clock=terms.clock,
                hyper=terms.hyper,
                weight=terms.weight,
                absent=absent,
                after=computed,
            )

    def _without_gradient(self, empty: Iterable[int]) -> set[int]:
        """``empty``, but of what has left as it was sent."""
        early = self.early
        still = {chunk for chunk in empty if chunk not in early.sent}
        return still | {chunk for chunk, is_empty in early.sent.items() if is_empty}

    def meet_at_end(self) -> Generator[Wait, None, None]:
        """The script ends. Raises :class:`UsageError` if a part has left of an iteration that sees
        no ``step()``."""
        yield from ()
        if self.is_half_pushed:
            raise self.sent_too_soon(UNFOLLOWED)

    @property
    def is_dropped(self) -> bool:
        """Whether the script has dropped the gradients of this iteration: no step() follows."""
        parameters = self._flat.parameters
        return self._is_expected and all(parameter.grad is None for parameter in parameters)

    def expect_nothing(self) -> None:
        """Nothing has left of an iteration whose gradients are dropped: it has not begun."""
        self._is_expected = False
        self._loop.core.expect_nothing()

    def meet_dropped(self, call: str) -> Generator[Wait, None, None]:  # noqa: ARG002
        """The script enters ``call``, and may have dropped the gradients of an iteration. Raises
        :class:`UsageError` if a part of them has left."""
        if self.is_dropped:
            yield from self.meet_at_end()
            self.expect_nothing()

    # -- the end of an iteration ---------------------------------------------------------------

    def move_values(self, chunks: Sequence[int]) -> None:
        """Replies about ``chunks`` have landed: bring what is new into place, and the servers'
        values back where the script has written."""
        if self._shadow is None:
            self._flat.host_to_device(self._partition.chunks[chunk] for chunk in chunks)
            return
        pieces_of = self.early.pieces_of
        written = set(self._flat.written_by_others({p for c in chunks for p in pieces_of[c]}))
        numbers = {chunk: self._loop.core.versions[chunk].chunk_version for chunk in chunks}
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
    def may_end_later(self) -> bool:
        """Whether replies land beside the parameters, of this iteration and of the next one."""
        return self._is_on and not self._reason

    def move_written(self) -> None:
        """The next :meth:`move_values` brings the servers' values back where the script has written
        until now."""
        written = set(self._flat.written_by_others())
        for chunk, pieces in self.early.pieces_of.items():
            if not written.isdisjoint(pieces):
                self._moved.pop(chunk, None)

    def end_iteration(self) -> None:
        """The new parameters are in place, and the loop is idle."""
        self.early.reset()
        self._changed.clear()
        self._is_expected = False
        self.is_changed = self.is_retermed = False
        self.backward_s = 0.0
        if not self._has_hooks:
            return
        self._hooks.begin()
        self._first_terms = None
        if self._reason and (self._is_on or self._is_watching):
            self._switch_off()
        elif self._is_watching and self._num_watched >= self._num_to_watch:
            self._switch_on()
        self._hooks.attach()

    @property
    def _num_to_watch(self) -> int:
        return WATCHED if len(self._loop.core.sets) == 1 else WATCHED_OF_SETS

    def stop(self) -> None:
        """The job is over; parameters are the script's own again."""
        self._hooks.remove()
        self._has_hooks = False

    def _switch_off(self) -> None:
        was_on, self._is_on, self._is_watching = self._is_on, False, False
        self._hooks.copies = "none"
        self.early.allow(0)
        if self._shadow is not None:
            self._flat.values_to_host()  # replies without bytes mean what is in place
            self._loop.receive_into(self._flat.parameter_frame)
            self._shadow = None
        logger.info(
            "parameter set %d: overlap %s: %s",
            self._loop.core.set_index,
            "goes off" if was_on else "stays off",
            self._reason,
        )

    def _switch_on(self) -> None:
        order, pieces_of = self.early.order, self.early.pieces_of
        num_chunks = next(
            (n for n, chunk in enumerate(order) if not self._held.isdisjoint(pieces_of[chunk])),
            len(order),
        )
        num_chunks = self.early.whole(num_chunks)
        is_frozen = [not parameter.requires_grad for parameter in self._flat.parameters]
        if all(is_frozen[piece] for chunk in order[:num_chunks] for piece in pieces_of[chunk]):
            behind = [piece for chunk in order[num_chunks:] for piece in pieces_of[chunk]]
            held = next((piece for piece in behind if piece in self._held), None)
            name = self._partition.pieces[held].name if held is not None else "any parameter"
            self._reason = f"the gradient of {name}, which leaves first, does not come once a step"
            self._switch_off()
            if held in self._unused and self._loop.core.seat.is_chief:
                logger.warning(
                    "parameter %s has got no gradient in some of the first steps, and would leave "
                    "first: nothing of parameter set %d leaves during backward. Freeze it before "
                    'job.prepare (requires_grad_(False)) if it is not used; overlap="off" says '
                    "that nothing is to leave",
                    name,
                    self._loop.core.set_index,
                )
            return
        self.early.allow(num_chunks)
        mine = self._loop.core.mine
        self._shadow = Shadow(self._partition, self._flat, chunks=mine, newest=self._flat.values)
        self._loop.receive_into(self._shadow.parameter_frame)
        versions = self._loop.core.versions
        self._moved = {chunk: versions[chunk].chunk_version for chunk in mine}
        self._hooks.copies = "first"
        self._is_on, self._is_watching = True, False
        logger.info(
            "parameter set %d: overlap is on: %d of %d chunks may leave during backward",
            self._loop.core.set_index,
            num_chunks,
            len(order),
        )

    # -- watching ------------------------------------------------------------------------------

    def _watch(self, now: Terms) -> None:
        """What the iteration that ends now says about the next ones."""
        self._num_watched += 1
        first = self._first_terms
        self.backward_s = self._loop.now_s() - self._first_s if first is not None else 0.0
        if first is not None and (first.hyper, first.weight) != (now.hyper, now.weight):
            self._reason = "hyperparameters or the batch change between backward and step()"
            return
        parameters = self._flat.parameters
        if any(parameter.grad is not None for parameter in parameters):
            self._unused.update(
                piece
                for piece, parameter in enumerate(parameters)
                if parameter.requires_grad and parameter.grad is None
            )
        for piece, parameter in enumerate(parameters):
            if self._hooks.counts[piece] != 1:
                if parameter.requires_grad or parameter.grad is not None:
                    self._held.add(piece)
            elif not (self._hooks.is_as_noted(piece) and self._flat.holds_gradient(piece)):
                name = self._partition.pieces[piece].name
                self._reason = f"the gradient of {name} changes between backward and step()"
                return
