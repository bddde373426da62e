"""The part of a ``step()`` that is left after it has returned: replies to await and put in place.

Parameters are guarded meanwhile (psdist.workers.late.guarded): a read of one waits for its chunks.
Any other use of the loop, the gradients or the versions finishes the whole tail first.

    tail = Tail(partition, chunks, loop, values, guard_of=..., move=..., driver=driver)
    tail.begin(clock)                          # everything of the iteration was handed over
    tail.resume()                              # the script computes again
    tail.use(clock + 1)                        # a forward pass begins: it reads what is to come
    yield from tail.finish()                   # the loop is the script's
    tail.finish_now()                          # in any thread

A use is recorded when the last chunk is in place: every read has waited for its own chunks, so
these are the values that were read.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final

from psdist.errors import UsageError
from psdist.protocol.partition import Partition
from psdist.workers.early.progress import Driver
from psdist.workers.late.guarded import Guard, plainly
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.values import Values

_REMEDY: Final = 'prepare the model with job.prepare(..., overlap="auto")'

_TAILS: Final[weakref.WeakSet[Tail]] = weakref.WeakSet()
"""The pending tails of all jobs of this process."""


def finish_all() -> None:
    """Finish the tails of this thread before an event that reads parameters undetected: a fork, or
    a compiler that inspects them."""
    me = threading.current_thread()
    for tail in [each for each in _TAILS if each.owner is me]:
        tail.finish_before()


os.register_at_fork(before=finish_all)


def _on_compile(_arguments: object) -> None:
    finish_all()


def _look_for_compilers() -> None:
    """Register with torch.compile, which reads parameters, too."""
    callbacks: Any = sys.modules.get("torch._dynamo.callback")
    if callbacks is not None and _on_compile not in callbacks.callback_handler.start_callbacks:
        callbacks.callback_handler.register_start_callback(_on_compile)


class Tail:
    def __init__(
        self,
        partition: Partition,
        chunks: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        values: Values,
        *,
        move: Callable[[Sequence[int]], None],
        driver: Driver,
    ) -> None:
        """``chunks``: all of the set, which this worker pushes; ``move(chunks)`` brings into place
        what has landed of them; ``driver``: of the loop while the script computes."""
        self.owner = threading.current_thread()
        """Not its number, which the next thread gets."""
        self.is_pending = False
        """True if values are still to come, or to be put in place."""
        self.waited_s = 0.0
        """Seconds of waits for replies."""
        self.guard = Guard(flat.parameters, on_read=self._read)
        self._process = os.getpid()
        self._partition = partition
        self._chunks = chunks
        self._flat = flat
        self._loop = loop
        self._values = values
        self._move_values = move
        self._driver = driver
        self._chunks_of: dict[int, list[int]] = {piece: [] for piece in range(len(flat.parameters))}
        for chunk in chunks:
            for segment in partition.chunks[chunk].segments:
                if chunk not in self._chunks_of[segment.piece]:
                    self._chunks_of[segment.piece].append(chunk)
        self._clock = 0
        """The iteration whose replies are awaited."""
        self._left: set[int] = set()
        """Chunks that are not in place."""
        self._guarded: set[int] = set()
        """Pieces with a part that is not in place."""
        self._problem: BaseException | None = None
        """An error in a call that may not raise; the next call raises it."""
        self._use_at: int | None = None
        """The iteration whose forward pass has begun."""

    @property
    def num_left(self) -> int:
        """Chunks that are not in place."""
        return len(self._left)

    def begin(self, clock: int) -> None:
        """Guard the parameters: iteration ``clock`` is pushed, and its replies may land."""
        self._clock = clock
        self._flat.values_changed()  # backward through the old ones raises, as after any step()
        self._left.update(self._chunks)
        self._guarded.update(self._chunks_of)
        self.is_pending = True
        _TAILS.add(self)
        _look_for_compilers()
        self.guard.close()

    def resume(self) -> None:
        """The script has used the loop and computes again."""
        if self.is_pending:
            self._driver.wake()

    def use(self, clock: int) -> None:
        """A forward pass of iteration ``clock`` begins while values are pending."""
        self._use_at = clock

    # -- one by one ----------------------------------------------------------------------------

    def _read(self, piece: int) -> None:
        """The script is about to read a parameter."""
        name = self._partition.pieces[piece].name
        if os.getpid() != self._process:
            raise UsageError(
                f"parameter {name} is read in a process that was forked before its values had come "
                f"(transfer.overlap = full); {_REMEDY}"
            )
        if threading.current_thread() is not self.owner:
            raise UsageError(
                f"parameter {name} is read in another thread than that of optimizer.step(), before "
                f"its values have come (transfer.overlap = full); {_REMEDY}, or read it once before"
            )
        self._raise_problem()
        self._driver.take_over()
        self._loop.begin_waiting(self._clock)
        began_s = self._loop.now_s()
        for chunk in self._chunks_of[piece]:
            if chunk in self._left:
                self._loop.carry_on(self._loop.wait_for_chunk(chunk))
        self.waited_s += self._loop.now_s() - began_s
        self._move([chunk for chunk in self._chunks if self._has_landed(chunk)])
        self.resume()

    def _has_landed(self, chunk: int) -> bool:
        return chunk in self._left and self._loop.core.transfers.is_done(chunk)

    def _move(self, chunks: Sequence[int]) -> None:
        """These have landed: into place, and free to be read where they complete a piece."""
        touched = {s.piece for chunk in chunks for s in self._partition.chunks[chunk].segments}
        with plainly():
            self._values.place(chunks, touched, self._move_values)
            self._left.difference_update(chunks)
            self._open(each for each in touched if self._left.isdisjoint(self._chunks_of[each]))
            if not self._left:
                self._complete()

    def _open(self, pieces: Iterable[int]) -> None:
        opened = self._guarded.intersection(pieces)
        self._guarded -= opened
        self.guard.open(opened)

    def _complete(self) -> None:
        self._open(self._chunks_of)
        self.is_pending = False
        _TAILS.discard(self)
        clock, self._use_at = self._use_at, None
        if clock is not None:
            self._values.record_use(clock)

    # -- all at once ---------------------------------------------------------------------------

    def finish(self) -> Generator[Wait, None, None]:
        """Until everything is in place. The loop is the script's."""
        if self.is_pending:
            self._raise_problem()
            self._loop.begin_waiting(self._clock)
            began_s = self._loop.now_s()
            yield self._loop.wait_for_replies()
            self.waited_s += self._loop.now_s() - began_s
            self._move([chunk for chunk in self._chunks if chunk in self._left])

    def finish_now(self) -> None:
        """As :meth:`finish`, also if a driver has the loop."""
        if self.is_pending:
            if threading.current_thread() is not self.owner:
                raise UsageError(
                    "the script continues in another thread than that of optimizer.step(), before "
                    f"new values have come (transfer.overlap = full); {_REMEDY}"
                )
            self._driver.take_over()
            for wait in self.finish():
                self._loop.carry_on(wait)

    def finish_before(self) -> None:
        """As :meth:`finish_now`, where no error may be raised: the next call raises it."""
        try:
            self.finish_now()
        except BaseException as error:
            self._problem = error

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem
