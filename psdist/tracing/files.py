"""The files of spans in a run directory: ``trace/rank-N.bin``, one for each rank.

1,024 bytes of header, which name the rank, and records of 48 bytes (``spans``). The header is
``PSDT``, the version of the format, the length of the JSON that follows, the JSON, and zeros. Any
other file is refused in one line: such a file is not trusted.

    traces = read_traces(run_dir)              # by rank; TraceError in one line on damage
    traces[0].about, traces[0].spans           # their rank; an array of spans.DTYPE
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from psdist.errors import TraceError
from psdist.tracing import DTYPE, NONE, RECORD, Lane, Span
from psdist.tracing.clocks import Line, Offset

MAX_SPANS: Final = 1_000_000
"""Maximum spans of a rank: 48 MB."""
HEADER_BYTES: Final = 1024
FORMAT_VERSION: Final = 1
_MAGIC: Final = b"PSDT"
_PREFIX: Final = struct.Struct("<4sHH")
_MAX_RANKS: Final = 1 << 20
_FAR_NS: Final = 2**61

_Count = Annotated[int, Field(ge=0, lt=2**31)]


class About(BaseModel):
    """The rank that recorded the spans."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    psdist: Annotated[str, Field(max_length=100)]
    """The version that wrote them."""
    rank: _Count
    num_ranks: Annotated[int, Field(ge=1, le=_MAX_RANKS)]
    role: Literal["server", "worker", "both"]
    """``both``: one process without a launcher."""
    index: _Count
    """Number of the server or the worker."""
    group: _Count | None
    """Group of a worker."""
    host: Annotated[str, Field(max_length=255)]
    pid: _Count
    num_spans: Annotated[int, Field(ge=NONE, le=MAX_SPANS)] = NONE
    """NONE: the file was not closed; the run has failed or is running."""
    num_dropped: Annotated[int, Field(ge=0, lt=2**61)] = 0
    """Spans beyond the most that a rank keeps."""
    start: Offset | None = None
    end: Offset | None = None

    @property
    def who(self) -> str:
        name = "server 0 and worker 0" if self.role == "both" else f"{self.role} {self.index}"
        return f"{name} (rank {self.rank} on {self.host})"

    @property
    def is_worker(self) -> bool:
        return self.role != "server"

    @property
    def is_server(self) -> bool:
        return self.role != "worker"


Spans = npt.NDArray[Any]
"""Array of spans.DTYPE."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The spans of one rank."""

    about: About
    spans: Spans
    """Times are rank 0's clock's."""
    bound_ns: int
    """Maximum error between this clock and rank 0's."""
    is_drift_known: bool

    @property
    def is_closed(self) -> bool:
        return self.about.num_spans != NONE

    def of(self, *kinds: Span) -> Spans:
        return self.spans[np.isin(self.spans["kind"], kinds)]


def path_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "trace" / f"rank-{rank}.bin"


def packed_header(about: About) -> bytes:
    body = about.model_dump_json().encode()
    header = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(body)) + body
    if len(header) > HEADER_BYTES:
        raise TraceError(f"the header of a trace would be {len(header)} bytes: {about.host!r}")
    return header.ljust(HEADER_BYTES, b"\0")


def read_traces(run_dir: Path, notes: list[str]) -> list[Trace]:
    """Read the traces of all ranks, in order. ``notes`` gets what is missing, for people."""
    folder = run_dir / "trace"
    if not folder.is_dir():
        raise TraceError(
            f"{folder} does not exist: {run_dir} is not a run directory, or the run was made "
            "without --trace"
        )
    found = {}
    for path in folder.iterdir():
        if name := re.fullmatch(r"rank-(0|[1-9][0-9]{0,6})\.bin", path.name):
            found[int(name[1])] = path
    if not found:
        raise TraceError(f"{folder} holds no spans: there is no rank-N.bin in it")
    traces = [_read(found[rank], rank, notes) for rank in sorted(found)]
    num_ranks = traces[0].about.num_ranks
    for each in traces:
        if each.about.num_ranks != num_ranks or each.about.rank >= num_ranks:
            raise TraceError(
                f"{path_of(run_dir, each.about.rank)} is of rank {each.about.rank} of a job of "
                f"{each.about.num_ranks}, others are of a job of {num_ranks}"
            )
    if len(traces) < num_ranks:
        notes.append(f"spans of {len(traces)} of {num_ranks} ranks are here")
    return traces


def _read(path: Path, rank: int, notes: list[str]) -> Trace:
    try:
        with path.open("rb") as file:
            about = _about(path, file.read(HEADER_BYTES), rank)
            data = file.read(MAX_SPANS * RECORD.size + 1)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_SPANS * RECORD.size:
        raise TraceError(f"{path} is damaged: it holds more than {MAX_SPANS} spans")
    num_spans, rest = divmod(len(data), RECORD.size)
    if about.num_spans == NONE:
        notes.append(f"{about.who} did not end in order: its spans are those until then")
    elif rest or num_spans != about.num_spans:
        raise TraceError(
            f"{path} is damaged: it was closed with {about.num_spans} spans and now holds "
            f"{num_spans}{' and a part of one' if rest else ''}"
        )
    if about.num_dropped:
        notes.append(f"{about.who} left out {about.num_dropped:,} spans beyond {num_spans:,}")
    spans = np.frombuffer(data, DTYPE, count=num_spans).copy()
    _check(path, spans)
    line = Line.through(about.start, about.end)
    is_over = spans["end_ns"] != NONE
    latest = max(spans["begin_ns"].max(initial=0), spans["end_ns"].max(initial=0))
    ends = np.where(is_over, spans["end_ns"], latest)
    spans["begin_ns"] = line.aligned(spans["begin_ns"])
    spans["end_ns"] = line.aligned(ends)
    return Trace(
        about=about, spans=spans, bound_ns=line.bound_ns, is_drift_known=line.is_drift_known
    )


def _about(path: Path, header: bytes, rank: int) -> About:
    if len(header) < HEADER_BYTES:
        raise TraceError(f"{path} is damaged: {len(header)} bytes, shorter than its header")
    magic, version, length = _PREFIX.unpack_from(header)
    if magic != _MAGIC:
        raise TraceError(f"{path} is damaged: its header is not that of such a file")
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{path} is of format version {version}, this psdist reads {FORMAT_VERSION}"
        )
    body, rest = header[_PREFIX.size :][:length], header[_PREFIX.size + length :]
    try:
        about = About.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "its JSON"
        raise TraceError(f"{path} is damaged: its header, {where}: {wrong['msg']}") from error
    if rest.strip(b"\0"):
        raise TraceError(f"{path} is damaged: its header has bytes other than zero after its end")
    if about.rank != rank:
        raise TraceError(
            f"{path} is damaged: its header says that it was written by rank {about.rank}"
        )
    return about


def _check(path: Path, spans: Spans) -> None:
    """Refuse spans that would overflow arithmetic, or with unknown names."""
    begin, end = spans["begin_ns"], spans["end_ns"]
    wrong: dict[str, Callable[[], npt.NDArray[np.bool_]]] = {
        "an unknown kind": lambda: ~np.isin(spans["kind"], list(Span)),
        "an unknown lane": lambda: ~np.isin(spans["lane"], list(Lane)),
        "a time that no clock shows": lambda: (
            (begin < 0) | (begin >= _FAR_NS) | (end < NONE) | (end >= _FAR_NS)
        ),
        "an end before its begin": lambda: (end != NONE) & (end < begin),
        "a negative chunk or clock": lambda: (
            (spans["chunk"] < NONE) | (spans["clock"] < NONE) | (spans["other"] < NONE)
        ),
    }
    for what, find in wrong.items():
        is_wrong = find()
        if is_wrong.any():
            raise TraceError(f"{path} is damaged: span {int(np.argmax(is_wrong))} has {what}")
