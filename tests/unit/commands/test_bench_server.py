"""`psdist bench server` in this process: what it measures, and how it counts groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist.commands.bench.server import Row, ServerOptions, server
from psdist.commands.cli import main


def options(path: Path | None = None, *, groups: int = 2) -> ServerOptions:
    return ServerOptions(
        num_bytes=1 << 18, groups=groups, every_s=1.0, repeats=2, codecs=["none", "int8/sign"],
        optimizers=["SGD", "Adam"], json_path=path,
    )  # fmt: skip


def test_each_codec_is_measured_with_each_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.json"
    assert server(options(path)) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["codec"], row["optimizer"]) for row in found["rows"]] == [
        ("none", "SGD"), ("none", "Adam"), ("int8/sign", "SGD"), ("int8/sign", "Adam"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert all(len(row[key]) == 2 for key in ("receive_s", "fold_s", "step_s", "reply_s"))
        assert row["pushed_per_s"] > 0
        assert list(row["groups_by_bytes"]) == [str(1 << bits) for bits in (26, 28, 30)]
    # The second of two raw pushes is read, and the sum read and written.
    assert [row["fold_bytes"] / (1 << 18) for row in found["rows"][:1]] == [3.0]
    assert "int8/sign" in capsys.readouterr().out


def test_groups_share_the_time_that_steps_leave() -> None:
    row = Row(
        codec="none", optimizer="SGD", fold_bytes=1, step_bytes=1,
        receive_s=[0.1], fold_s=[0.2], step_s=[0.5], reply_s=[0.1],
    )  # fmt: skip
    given = options()
    assert row.pushed_per_s(given) == pytest.approx(2 * given.num_bytes / 0.9)
    assert row.groups(given.num_bytes, given) == 2  # (1 - 0.5) / 0.2
    assert row.groups(2 * given.num_bytes, given) == 0


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [("--codec", "foo", "is no codec"), ("--optimizer", "LION", "none of SGD, momentum, Adam"),
     ("--size", "1MiB,2MiB", "not one size"), ("--size", "1KiB", "below 4 KiB"),
     ("--size", "0", "Invalid value for --size: 0 is no size")],
)  # fmt: skip
def test_wrong_options_are_usage_errors(
    option: str, value: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "server", option, value])
    assert text in " ".join(capsys.readouterr().err.split())


def test_the_size_is_that_of_the_whole_rows_that_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def record(given: ServerOptions) -> int:
        measured.append(given.num_bytes)
        return 0

    monkeypatch.setattr("psdist.commands.bench.server.server", record)
    for size in ("4KiB", "10000", "1MiB"):
        with pytest.raises(SystemExit, match="0"):
            main(["bench", "server", "--size", size])
    assert measured == [4096, 8192, 1 << 20]
