"""`psdist probe --compare`: one table, JSON, exit statuses; a mistake is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from psdist.commands.probe import _said_changes
from psdist.commands.probe.comparison import compare
from psdist.errors import PlacementError
from psdist.topology.network.catalogue import Network, encode
from tests.topology.network.test_catalogue import NETWORK, pair, speed

OLD = replace(
    NETWORK,
    date="2026-11-01T10:00:00+00:00",
    pairs=(
        pair("n3", "n4", 11.2, 2),
        pair("n3/package0", "n3/package1", 20, 0.5, "socket"),
        pair("n3", "n3/0000:17:00.0", 24, 9, "gpu"),
    ),
)
NEW = replace(
    OLD,
    date="2026-11-22T10:00:00+00:00",
    hosts=("n3", "n4", "n5"),
    mpi="MPICH 5.0.2",
    node_links={"n3": speed(bytes_per_s=15e9)},
    pairs=(
        pair("n3", "n4", 4.1, 2),
        pair("n3/package0", "n3/package1", 20, 0.5, "socket"),
        pair("n3", "n3/0000:17:00.0", 12, 9, "gpu"),
    ),
)


def written(folder: Path, name: str, network: Network) -> Path:
    path = folder / name
    path.write_bytes(encode(network))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path, "old.json", OLD), written(tmp_path, "new.json", NEW)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "psdist", "probe", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_table_has_sections_with_what_changed(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*files, threshold=None, json_path=None) == 1
    out = capsys.readouterr().out
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert [row for row in rows if row in ("between hosts", "same host", "host and GPU")] == [
        "between hosts",
        "same host",
        "host and GPU",
    ]
    for row in (
        "typical node pair bandwidth 11.00 GB/s 11.00 GB/s within 10 %",
        "typical node pair latency 2.0 us 2.0 us within 25 %",
        "n3 -> n4 bandwidth 11.20 GB/s 4.10 GB/s 2.7x slower",
        "link of n3 bandwidth 12.00 GB/s 15.00 GB/s 1.2x faster",
        "n3 -> n3/0000:17:00.0 (gpu) bandwidth 24.00 GB/s 12.00 GB/s 2x slower",
        "new: n5",
        "not only the network may differ: Open MPI v5.0.11, ucx before, MPICH 5.0.2, ucx now",
        "10 figures compared: 2 slower, 1 faster",
    ):
        assert row in rows, out
    assert "package0" not in out  # nothing changed there
    assert max(map(len, out.splitlines())) <= 100


def test_nothing_slower_is_status_0_whatever_got_faster(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = files
    assert compare(old, old, threshold=None, json_path=None) == 0
    assert "10 figures compared: 0 slower, 0 faster" in capsys.readouterr().out
    faster = written(old.parent, "faster.json", replace(OLD, pairs=(pair("n3", "n4", 20, 2),)))
    assert compare(old, faster, threshold=None, json_path=None) == 0
    assert compare(old, new, threshold=200, json_path=None) == 0
    assert compare(old, new, threshold=150, json_path=None) == 1


def test_a_threshold_is_in_per_cent_and_for_latencies_as_well(files: tuple[Path, Path]) -> None:
    old, _ = files
    later = written(old.parent, "later.json", replace(OLD, pairs=(pair("n3", "n4", 11.2, 2.3),)))
    assert compare(old, later, threshold=None, json_path=None) == 0
    assert compare(old, later, threshold=10, json_path=None) == 1
    assert compare(old, later, threshold=20, json_path=None) == 0


def test_json_says_the_same_for_programs(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*files, threshold=None, json_path=Path("-")) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["version"]) == ("psdist network comparison", 1)
    assert (found["new_hosts"], found["gone_hosts"]) == (["n5"], [])
    assert found["num_compared"] == 10
    assert found["slower"][0] == {
        "name": "n3 -> n4",
        "section": "between hosts",
        "kind": "node",
        "quantity": "bandwidth",
        "old": 11.2e9,
        "new": pytest.approx(4.1e9),
        "times_slower": pytest.approx(11.2 / 4.1),
        "limit": 1.1,
    }
    assert [each["name"] for each in found["slower"]] == ["n3 -> n4", "n3 -> n3/0000:17:00.0 (gpu)"]
    assert [each["name"] for each in found["faster"]] == ["link of n3"]
    assert found["old"] == {
        "file": str(files[0]),
        "date": OLD.date,
        "mpi": OLD.mpi,
        "components": ["ucx"],
    }
    there = files[0].with_name("changes.json")
    assert compare(*files, threshold=None, json_path=there) == 1
    assert json.loads(there.read_text()) == found
    assert "figures compared" in capsys.readouterr().out


def test_of_many_changes_the_worst_are_told_and_the_others_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tuple(f"n{number}" for number in range(30))
    bare = replace(OLD, hosts=hosts, classes={}, switch_uplinks={}, pairs=())
    old = replace(bare, node_links={host: speed(bytes_per_s=100e9) for host in hosts})
    new = replace(
        bare,
        node_links={
            host: speed(bytes_per_s=100e9 / (2 + number / 1000) if number < 25 else 200e9)
            for number, host in enumerate(hosts)
        },
    )
    paths = written(tmp_path, "old", old), written(tmp_path, "new", new)
    assert compare(*paths, threshold=None, json_path=None) == 1
    out = capsys.readouterr().out
    assert "and 5 more that are slower" in out
    assert "link of n24 " in out
    assert "link of n4 " not in out
    assert "30 figures compared: 25 slower, 5 faster" in out
    assert "more that are faster" not in out


def test_files_of_different_clusters_are_one_line(files: tuple[Path, Path]) -> None:
    old, _ = files
    other = written(old.parent, "other.json", replace(OLD, hosts=("a", "b")))
    with pytest.raises(PlacementError) as caught:
        compare(old, other, threshold=None, json_path=None)
    assert str(caught.value) == (
        f"{old} and {other}: no host is in both measurements (n3, n4; a, b): give two of one "
        "cluster"
    )


def test_a_json_that_cannot_be_written_is_one_line(files: tuple[Path, Path]) -> None:
    with pytest.raises(PlacementError, match=r"cannot be written .* name another with --json"):
        compare(*files, threshold=None, json_path=files[0].parent / "none" / "x.json")


def test_the_command_has_three_statuses(files: tuple[Path, Path]) -> None:
    old, new = map(str, files)
    done = command("--compare", old, new)
    assert done.returncode == 1
    assert "2.7x slower" in done.stdout
    assert done.stderr == ""
    done = command("--compare", old, f"{new}.gone")
    assert done.returncode == 2
    assert done.stderr.startswith("psdist: error: ")
    assert done.stderr.count("\n") == 1


def test_a_probe_says_what_changed_since_the_file_that_it_replaces() -> None:
    path = Path("network.json")
    assert _said_changes(path, OLD, NEW) == [
        f"compared with network.json of {OLD.date}:",
        "  n5: new",
        "  n3 -> n4: 11.2 -> 4.1 GB/s (2.7x slower)",
        "  n3 -> n3/0000:17:00.0 (gpu): 24 -> 12 GB/s (2x slower)",
        "  link of n3: 12 -> 15 GB/s (1.2x faster)",
    ]
    assert _said_changes(path, OLD, OLD)[1:] == [
        "  nothing has changed beyond 10 % (latency: 25 %)"
    ]
    other = replace(OLD, hosts=("a",))
    assert _said_changes(path, OLD, other) == [
        f"not compared with network.json of {OLD.date}: no host is in both measurements (n3, n4; "
        "a): give two of one cluster"
    ]
    more = replace(OLD, hosts=tuple(f"n{number}" for number in range(30)))
    assert len(_said_changes(path, OLD, more)) == 22
    assert _said_changes(path, OLD, more)[-1] == "  and 8 more"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compare", "a", "b", "--quick"), "nothing is measured: leave --racks and --quick out"),
        (("--compare", "a", "b", "--racks", "x"), "nothing is measured"),
        (("--threshold", "5"), "only --compare has one"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(words: tuple[str, ...], said: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
