"""Files of spans: what a tracer writes is read back, and what is forged is refused in one line."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import pytest

from psdist.errors import TraceError
from psdist.tracing import COLLECTIVES, DTYPE, NONE, RECORD, Lane, Span, name_of
from psdist.tracing.clocks import Offset
from psdist.tracing.files import HEADER_BYTES, Trace, path_of, read_traces
from psdist.tracing.tracer import Tracer
from psdist.workers.group.channel import CALLS
from tests.support.traces import about


def read(folder: Path) -> tuple[list[Trace], list[str]]:
    notes: list[str] = []
    return read_traces(folder, notes), notes


def write(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> Path:
    tracer = Tracer(folder, about(rank, num_ranks=num_ranks))
    tracer.add(Span.STEP, 10, 30, clock=4)
    tracer.add(Span.APPLY, 12, 15, clock=4, chunk=2, other=1, lane=Lane.SERVER, set_index=3)
    tracer.close()
    return path_of(folder, rank)


def refusal(folder: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_span_is_what_it_was_when_it_is_read_back(tmp_path: Path) -> None:
    write(tmp_path)
    (trace,), notes = read(tmp_path)
    assert trace.spans.tolist() == [
        (10, 30, 4, NONE, NONE, 0, 0, 0, Span.STEP, Lane.SCRIPT, 0),
        (12, 15, 4, 2, 1, 0, 0, 0, Span.APPLY, Lane.SERVER, 3),
    ]
    assert (trace.is_closed, notes) == (True, [])


def test_the_record_of_python_is_that_of_numpy() -> None:
    assert RECORD.size == DTYPE.itemsize
    packed = RECORD.pack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert struct.unpack("<qqqiiIIIBBH", packed) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def test_every_call_in_which_a_group_meets_has_a_name() -> None:
    assert set(COLLECTIVES) >= set(CALLS) - {"optimizer.step"}
    assert name_of(Span.COLLECTIVE, COLLECTIVES.index("save")) == "collective: save"
    assert name_of(Span.COLLECTIVE, 99) == "collective"


def test_several_spans_are_under_way_at_once_and_end_by_their_key(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, about(num_ranks=1))
    tracer.begin("a", Span.PUSH, chunk=1)
    tracer.begin("b", Span.PUSH, chunk=2, lane=Lane.LOOP)
    tracer.end("b", took_ns=5)
    tracer.end("a", num_bytes=9)
    tracer.end("a")
    tracer.close()
    (trace,), _ = read(tmp_path)
    second, first = trace.spans
    assert (first["chunk"], first["num_bytes"], first["lane"]) == (1, 9, Lane.SCRIPT)
    assert (second["chunk"], second["took_ns"], second["lane"]) == (2, 5, Lane.LOOP)
    assert first["begin_ns"] <= second["begin_ns"] <= second["end_ns"] <= first["end_ns"]


def test_of_a_run_that_fails_there_is_what_was_flushed_and_what_was_under_way(
    tmp_path: Path,
) -> None:
    tracer = Tracer(tmp_path, about(num_ranks=1))
    tracer.begin("a", Span.WAIT_REPLIES)
    tracer.add(Span.FORWARD, 5, 8)
    tracer.abandon()
    (trace,), notes = read(tmp_path)
    assert sorted(trace.spans["kind"].tolist()) == [Span.FORWARD, Span.WAIT_REPLIES]
    assert (trace.spans["end_ns"] >= trace.spans["begin_ns"]).all()
    assert not trace.is_closed
    assert notes == ["worker 0 (rank 0 on n1) did not end in order: its spans are those until then"]
    tracer.close()


def test_half_a_record_at_the_end_of_a_file_that_was_not_closed_is_left_out(
    tmp_path: Path,
) -> None:
    tracer = Tracer(tmp_path, about(num_ranks=1))
    tracer.add(Span.FORWARD, 5, 8)
    tracer.flush()
    path = path_of(tmp_path, 0)
    path.write_bytes(path.read_bytes() + b"\1" * 20)
    (trace,), _ = read(tmp_path)
    assert len(trace.spans) == 1
    tracer.close()


def test_spans_beyond_the_most_are_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = Tracer(tmp_path, about(num_ranks=1), max_spans=2)
    for at in range(5):
        tracer.add(Span.FORWARD, at, at + 1)
    tracer.close()
    (trace,), notes = read(tmp_path)
    assert trace.spans["begin_ns"].tolist() == [0, 1]
    assert trace.about.num_dropped == 3
    assert notes == ["worker 0 (rank 0 on n1) left out 3 spans beyond 2"]
    assert [record.message for record in caplog.records] == [
        "trace: this rank has recorded its most, 2 spans; later ones are left out"
    ]


def test_times_are_those_of_rank_0s_clock(tmp_path: Path) -> None:
    start = Offset(at_ns=0, offset_ns=1000, bound_ns=7)
    tracer = Tracer(tmp_path, about(num_ranks=1, start=start))
    tracer.add(Span.FORWARD, 100, 200)
    tracer.close(end=Offset(at_ns=200, offset_ns=1020, bound_ns=9))
    (trace,), _ = read(tmp_path)
    assert trace.spans[["begin_ns", "end_ns"]].tolist() == [(1110, 1220)]
    assert (trace.bound_ns, trace.is_drift_known) == (9, True)


def test_a_run_directory_without_spans_says_what_to_do(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"{tmp_path / 'trace'} does not exist: {tmp_path} is not a run directory, or the run was "
        "made without --trace"
    )
    (tmp_path / "trace").mkdir()
    assert "holds no spans" in refusal(tmp_path)


def test_ranks_that_are_missing_are_noted(tmp_path: Path) -> None:
    write(tmp_path, rank=1, num_ranks=3)
    assert read(tmp_path)[1] == ["spans of 1 of 3 ranks are here"]


def test_files_of_two_runs_are_not_put_together(tmp_path: Path) -> None:
    write(tmp_path, rank=0, num_ranks=2)
    write(tmp_path, rank=1, num_ranks=3)
    assert "others are of a job of 2" in refusal(tmp_path)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(TraceError, match="File exists"):
        write(tmp_path)


def test_spans_that_find_no_space_are_a_warning_and_those_before_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = Tracer(tmp_path, about(0, num_ranks=1))
    tracer.add(Span.STEP, 10, 30, clock=4)
    tracer.flush()
    tracer.add(Span.STEP, 30, 50, clock=5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = path_of(tmp_path, 0)
    with caplog.at_level("WARNING", logger="psdist"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        try:
            tracer.flush()
            tracer.add(Span.STEP, 50, 70, clock=6)
            tracer.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.getMessage() for record in caplog.records] == [
        f"trace: {path} cannot be written: File too large; the job continues, and later spans are "
        "lost"
    ]
    (trace,), notes = read(tmp_path)
    assert trace.spans["clock"].tolist() == [4]
    assert not trace.is_closed
    assert len(notes) == 1
    assert notes[0].endswith("did not end in order: its spans are those until then")


def with_header(data: bytes, **changed: object) -> bytes:
    length = int.from_bytes(data[6:8], "little")
    body = json.dumps({**json.loads(data[8 : 8 + length]), **changed}).encode()
    return (data[:6] + struct.pack("<H", len(body)) + body).ljust(HEADER_BYTES, b"\0") + data[
        HEADER_BYTES:
    ]


def with_span(data: bytes, at: int, form: str, value: int) -> bytes:
    packed = struct.pack(form, value)
    start = HEADER_BYTES + RECORD.size + at
    return data[:start] + packed + data[start + len(packed) :]


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda data: data[:500], "500 bytes, shorter than its header"),
        (lambda data: b"PK" + data[2:], "its header is not that of such a file"),
        (lambda data: data[:4] + b"\7" + data[5:], "format version 7, this psdist reads 1"),
        (lambda data: data[:8] + b"x" + data[9:], "its header, its JSON"),
        (lambda data: data[:6] + b"\xff\xff" + data[8:], "its header, its JSON"),
        (lambda data: data[:1020] + b"x" + data[1021:], "bytes other than zero after its end"),
        (lambda data: with_header(data, rank=1), "it was written by rank 1"),
        (lambda data: with_header(data, pid="1"), "its header, pid: "),
        (lambda data: with_header(data, role="spy"), "its header, role: "),
        (lambda data: with_header(data, more=1), "its header, more: "),
        (lambda data: with_header(data, num_spans=3), "closed with 3 spans and now holds 2"),
        (lambda data: with_header(data, num_spans=10**7), "its header, num_spans: "),
        (
            lambda data: with_header(data, start={"at_ns": 2**63, "offset_ns": 0, "bound_ns": 0}),
            "its header, start.at_ns: ",
        ),
        (lambda data: data + b"\0", "now holds 2 and a part of one"),
        (lambda data: with_span(data, 44, "B", 99), "span 1 has an unknown kind"),
        (lambda data: with_span(data, 45, "B", 0), "span 1 has an unknown lane"),
        (lambda data: with_span(data, 0, "<q", 2**62), "span 1 has a time that no clock shows"),
        (lambda data: with_span(data, 0, "<q", -5), "span 1 has a time that no clock shows"),
        (lambda data: with_span(data, 8, "<q", 3), "span 1 has an end before its begin"),
        (lambda data: with_span(data, 24, "<i", -7), "span 1 has a negative chunk or clock"),
    ],
)  # fmt: skip
def test_a_forged_file_is_refused_in_one_line(forge: object, words: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert callable(forge)
    path.write_bytes(forge(path.read_bytes()))
    text = refusal(tmp_path)
    assert words in text
    assert str(path) in text
