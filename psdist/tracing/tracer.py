"""Writes the spans of one rank: packed at once, kept for a quarter of a second, then in its file.

    tracer = Tracer(run_dir, about)                         # about: psdist.tracing.files.About
    tracer.add(Span.APPLY, began_ns, tracer.now(), clock=7, chunk=3, lane=Lane.SERVER)
    tracer.begin(key, Span.PUSH, clock=7, chunk=3)          # several of these may be under way
    tracer.end(key)
    tracer.close()                                          # flush() where a run fails

The first ``MAX_SPANS`` of a rank are kept; later ones are counted. Any thread may add.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final, TypeAlias

from psdist.errors import TraceError
from psdist.tracing import NONE, RECORD, Lane, Span
from psdist.tracing.clocks import Offset
from psdist.tracing.files import MAX_SPANS, About, packed_header, path_of
from psdist.whole_writes import append_whole, write_whole

logger = logging.getLogger("psdist")

FLUSH_EVERY_NS: Final = 250_000_000
_MOST_NS: Final = 2**32 - 1
_Begun: TypeAlias = "tuple[int, tuple[Any, ...]]"
"""When, and the other fields in their order."""


class Tracer:
    now = staticmethod(monotonic_ns)

    def __init__(self, run_dir: Path, about: About, *, max_spans: int = MAX_SPANS) -> None:
        """The thread that makes it is the script's."""
        self._about = about
        self._path = path_of(run_dir, about.rank)
        self._owner = threading.get_ident()
        self._packed: deque[bytes] = deque()
        self._under_way: dict[Hashable, _Begun] = {}
        self._num_left = max_spans
        self._num_written = self._num_dropped = 0
        self._turn = threading.Lock()
        self._flush_at_ns = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # "x": a run never overwrites the spans of another one.
            self._file: Any = open(self._path, "xb", buffering=0)  # noqa: SIM115 - by close()
            write_whole(self._file, packed_header(about))
        except OSError as error:
            raise TraceError(f"cannot write {self._path}: {error.strerror}") from error

    # -- the hot path --------------------------------------------------------------------------

    def add(
        self,
        kind: Span,
        began_ns: int,
        ended_ns: int,
        *,
        clock: int = NONE,
        chunk: int = NONE,
        other: int = NONE,
        num_bytes: int = 0,
        sent_ns: int = 0,
        took_ns: int = 0,
        lane: int | None = None,
        set_index: int = 0,
    ) -> None:
        """Record a span that has ended; without ``lane`` it is in this thread's."""
        if self._num_left <= 0:
            self._drop()
            return
        self._num_left -= 1
        if lane is None:
            lane = self.lane
        self._packed.append(
            RECORD.pack(
                began_ns,
                ended_ns,
                clock,
                chunk,
                other,
                min(num_bytes, _MOST_NS),
                min(sent_ns, _MOST_NS),
                min(took_ns, _MOST_NS),
                kind,
                lane,
                set_index,
            )
        )
        if ended_ns >= self._flush_at_ns:
            self.flush()

    @property
    def lane(self) -> Lane:
        """This thread's."""
        return Lane.SCRIPT if threading.get_ident() == self._owner else Lane.LOOP

    def begin(
        self,
        key: Hashable,
        kind: Span,
        *,
        began_ns: int | None = None,
        clock: int = NONE,
        chunk: int = NONE,
        other: int = NONE,
        num_bytes: int = 0,
        lane: int | None = None,
        set_index: int = 0,
    ) -> None:
        """Begin a span that may overlap others; ``key`` names it until it ends. The time since
        ``began_ns`` was spent on beginning it."""
        now_ns = monotonic_ns()
        began_ns = now_ns if began_ns is None else began_ns
        lane = self.lane if lane is None else lane
        fields = (clock, chunk, other, num_bytes, now_ns - began_ns, kind, lane, set_index)
        self._under_way[key] = (began_ns, fields)

    def end(self, key: Hashable, *, took_ns: int = 0, **known: int) -> None:
        """End a span. ``known``: clock, chunk, other or num_bytes that are known only now. A key
        without a begun span is ignored."""
        found = self._under_way.pop(key, None)
        if found is not None:
            self._add_begun(found, monotonic_ns(), took_ns, known)

    def _add_begun(
        self,
        begun: _Begun,
        ended_ns: int,
        took_ns: int = 0,
        known: dict[str, int] | None = None,
    ) -> None:
        began_ns, (clock, chunk, other, num_bytes, sent_ns, kind, lane, set_index) = begun
        fields = {"clock": clock, "chunk": chunk, "other": other, "num_bytes": num_bytes}
        self.add(
            kind,
            began_ns,
            ended_ns,
            **fields | (known or {}),
            sent_ns=sent_ns,
            took_ns=took_ns,
            lane=lane,
            set_index=set_index,
        )

    def _drop(self) -> None:
        if not self._num_dropped:
            logger.warning(
                "trace: this rank has recorded its most, %d spans; later ones are left out",
                self._num_written + len(self._packed),
            )
        self._num_dropped += 1

    # -- files ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand what is kept to the operating system."""
        with self._turn:
            if self._file is None:
                return
            self._flush_at_ns = monotonic_ns() + FLUSH_EVERY_NS
            parts = []
            with suppress(IndexError):
                while True:
                    parts.append(self._packed.popleft())
            try:
                append_whole(self._file, b"".join(parts))
            except OSError as error:
                self._give_up(error)
            else:
                self._num_written += len(parts)

    def abandon(self) -> None:
        """The run fails: what is under way is written as it is, without an end."""
        for key in list(self._under_way):
            found = self._under_way.pop(key, None)
            if found is not None:
                self._add_begun(found, NONE)
        self.flush()

    def close(self, *, start: Offset | None = None, end: Offset | None = None) -> None:
        """Close the file; ``start`` and ``end``: this rank's clock against rank 0's then. May be
        repeated."""
        self.abandon()
        with self._turn:
            if self._file is None:
                return
            known = {"start": start or self._about.start, "end": end}
            counts = {"num_spans": self._num_written, "num_dropped": self._num_dropped}
            try:
                self._file.seek(0)
                write_whole(
                    self._file, packed_header(self._about.model_copy(update={**known, **counts}))
                )
            except OSError as error:
                self._give_up(error)
                return
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        """The file stays as it is, without an end: psdist trace says so."""
        file, self._file = self._file, None
        with suppress(OSError):
            file.close()
        self._num_left, self._num_dropped = 0, 1
        logger.warning(
            "trace: %s cannot be written: %s; the job continues, and later spans are lost",
            self._path,
            error.strerror,
        )
