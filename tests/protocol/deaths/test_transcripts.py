"""Failure scenarios as text (tests/support/virtual/transcript.py), and errors in such a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.virtual.transcript import TranscriptError, play

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_transcript_holds(path: Path) -> None:
    play(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run", r"made\.txt:1: run: the first command must be start"),
        ("start chunks=3", r"made\.txt:1: start chunks=3: Schedule has no field chunks"),
        ("start servers=two", r"made\.txt:1: start servers=two: invalid literal for int"),
        ("# nothing\n\nstart\nkil server 0", r"made\.txt:4: kil server 0: unknown command"),
        ("start\nkill rank 0", r"made\.txt:2: kill rank 0: 'rank 0': expected server N or worker"),
        ("start\nrun until noon", r"made\.txt:2: run until noon: unknown condition"),
        ("start\nrun\nkill worker 0", r"made\.txt:3: kill worker 0: worker 0 has ended"),
        (
            "start iterations=2,2\nrun until every worker has passed iteration 5",
            r"made\.txt:2: .*: the job has stopped before",
        ),
        (
            "start servers=2\nrun\nexpect taken over: server 1",
            r"made\.txt:3: expect taken over: server 1: taken over: none",
        ),
        ("start servers=2\nrun\nexpect waiting: worker 0", r"made\.txt:3: .*: only none wait"),
    ],
)
def test_a_wrong_transcript_is_an_error_with_line_and_reason(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "made.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TranscriptError, match=reason):
        play(path)
