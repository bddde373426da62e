"""``psdist probe --compare OLD NEW``: one table of what got slower and faster; measures nothing.

    status = compare(Path("monday.json"), Path("today.json"), threshold=None, json_path=None)

Exit status: 0 nothing is slower beyond the threshold, 1 something is, 2 the files cannot be read or
are not of one cluster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final, get_args

from rich.console import Console
from rich.table import Table

from psdist.commands import discard
from psdist.errors import PlacementError
from psdist.topology.network import catalogue
from psdist.topology.network.catalogue import Network
from psdist.topology.network.changes import Change, Comparison, Section
from psdist.topology.network.changes import compare as changes_of
from psdist.topology.text.hostlist import listed

SLOWER: Final = 1
"""The exit status where something got slower."""
_ROWS: Final = 20
"""Most rows of a section, each for slower and faster."""
_WIDTH: Final = 100


def compare(
    old_path: Path, new_path: Path, *, threshold: float | None, json_path: Path | None
) -> int:
    """Print the table, write ``json_path`` (``-``: standard output, and no table); the status.

    ``threshold`` is in per cent, for bandwidths and latencies alike; without it 10 and 25.
    """
    old, new = catalogue.read(old_path), catalogue.read(new_path)
    try:
        if threshold is None:
            found = changes_of(old, new)
        else:
            share = threshold / 100
            found = changes_of(old, new, threshold=share, latency_threshold=share)
    except PlacementError as error:
        raise PlacementError(f"{old_path} and {new_path}: {error}") from None
    if json_path is not None:
        _write(json_path, _as_json(old_path, new_path, old, new, found))
    if json_path is None or str(json_path) != "-":
        # A pipe has no width of its own: a table for people, whatever reads it.
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(table(old, new, found))
        for remark in remarks(old, new, found):
            console.print(remark, highlight=False, markup=False)
    return SLOWER if found.slower else 0


def table(old: Network, new: Network, found: Comparison) -> Table:
    """The typical pair of each kind, then what changed by more than its limit, worst first."""
    shown = Table(title=f"{old.date} -> {new.date}")
    for name in ("", "", "old", "new", ""):
        shown.add_column(name, justify="right" if name else "left", overflow="fold")
    for section in get_args(Section):
        here = [each for each in found.compared if each.section == section]
        if not here:
            continue
        shown.add_section()
        shown.add_row(section, style="bold")
        typical = [each for each in here if each.is_typical]
        for each in sorted(typical, key=lambda each: (each.group, each.quantity)):
            _add(shown, each)
        slower = [each for each in found.slower if each.section == section and not each.is_typical]
        faster = [each for each in found.faster if each.section == section and not each.is_typical]
        for these, word in ((slower, "slower"), (faster, "faster")):
            for each in these[:_ROWS]:
                _add(shown, each)
            if len(these) > _ROWS:
                shown.add_row(f"  and {len(these) - _ROWS} more that are {word}")
    return shown


def remarks(old: Network, new: Network, found: Comparison) -> list[str]:
    """Return the lines below the table: hosts of one file only, other software, the verdict."""
    lines = []
    for word, hosts in (("new", found.new_hosts), ("gone", found.gone_hosts)):
        if hosts:
            lines.append(f"{word}: {listed(hosts, 8)}")
    if (old.mpi, old.components) != (new.mpi, new.components):
        before, after = (", ".join((each.mpi, *each.components)) for each in (old, new))
        lines.append(f"not only the network may differ: {before} before, {after} now")
    lines.append(
        f"{len(found.compared)} figures compared: {len(found.slower)} slower, "
        f"{len(found.faster)} faster"
    )
    return lines


def _add(shown: Table, each: Change) -> None:
    style = "red" if each.is_slower else "green" if each.is_faster else ""
    old, new = (_figure(each, value) for value in (each.old, each.new))
    verdict = each.verdict
    if verdict == "the same":
        verdict = f"within {100 * (each.limit - 1):.0f} %"
    shown.add_row(f"  {each.name}", each.quantity, old, new, verdict, style=style)


def _figure(each: Change, value: float) -> str:
    if each.quantity == "latency":
        return f"{value * 1e6:.1f} us"
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"


def _as_json(old_path: Path, new_path: Path, old: Network, new: Network, found: Comparison) -> str:
    def of(path: Path, network: Network) -> dict[str, object]:
        return {
            "file": str(path),
            "date": network.date,
            "mpi": network.mpi,
            "components": network.components,
        }

    def figures(changes: tuple[Change, ...]) -> list[dict[str, object]]:
        return [
            {
                "name": each.name,
                "section": each.section,
                "kind": each.group,
                "quantity": each.quantity,
                "old": each.old,
                "new": each.new,
                "times_slower": each.times_slower,
                "limit": each.limit,
            }
            for each in changes
        ]

    content = {
        "format": "psdist network comparison",
        "version": 1,
        "old": of(old_path, old),
        "new": of(new_path, new),
        "new_hosts": found.new_hosts,
        "gone_hosts": found.gone_hosts,
        "num_compared": len(found.compared),
        "slower": figures(found.slower),
        "faster": figures(found.faster),
    }
    return json.dumps(content, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        if str(path) == "-":
            print(text, end="", flush=True)
        else:
            path.write_text(text, encoding="utf-8")
    except BrokenPipeError:
        discard()
    except OSError as error:
        if str(path) == "-":
            raise
        raise PlacementError(
            f"{path}: cannot be written ({error.strerror}): name another with --json"
        ) from None
