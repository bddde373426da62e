"""The report at the end of a run, and warnings, as lines.

    for line in report_lines(summary, words, run_dir): print(line)

Pure: numbers and names in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psdist.config.settings import MIN_CHUNK_BYTES
from psdist.protocol.partition import Partition, chunk_bytes_for_all
from psdist.ranks.reporting.coding import coding_line
from psdist.ranks.reporting.summary import share_line


def different_clocks_line(clocks: Sequence[int]) -> str:
    """Return the warning that some groups made fewer iterations than others; "" if all made as
    many."""
    least, most = min(clocks, default=0), max(clocks, default=0)
    if least == most:
        return ""
    fewer = [group for group, clock in enumerate(clocks) if clock < most]
    shown = ", ".join(map(str, fewer[:8])) + (f" and {len(fewer) - 8} more" * (len(fewer) > 8))
    return (
        f"group{'s' * (len(fewer) > 1)} {shown} made fewer iterations (from {least}) than others "
        f"({most}): the last updates are of fewer samples"
    )


def empty_servers_line(partition: Partition, weights: Sequence[float], empty: Sequence[int]) -> str:
    """Return the warning on servers without a chunk: which, why, and what to set."""
    who = f"servers {', '.join(map(str, empty))} hold nothing and only wait"
    if len(empty) == 1:
        who = f"server {empty[0]} holds nothing and only waits"
    num_chunks = len(partition.chunks)
    chunks = f"{_count(num_chunks, 'chunk')} of at most {partition.max_chunk_bytes:,} bytes"
    if partition.whole_tensors:
        why = f"this optimizer needs whole tensors; small ones share a chunk: {chunks}"
    elif num_chunks < len(weights):
        why = f"the model of {partition.num_bytes:,} bytes is cut into {chunks}"
    else:
        why = f"the share that the plan gives them is smaller than a chunk, {chunks}"
    size = 0 if partition.whole_tensors else chunk_bytes_for_all(partition.num_bytes, weights)
    finer = (
        f", or transfer.chunk_bytes = {size} so that each holds some"
        if size >= MIN_CHUNK_BYTES
        else ""
    )
    return f"{who}: {why}; set servers = {len(weights) - len(empty)}{finer}"


def report_lines(summary: dict[str, Any], mode: str, run_dir: str) -> list[str]:
    """Return the report at the end of a run. ``mode``: modes, codecs and local steps in words."""
    seen = {int(key): count for key, count in summary["staleness_seen"].items()}
    total = sum(seen.values())
    shares = "  ".join(f"{name}: {100 * n / total:.1f}%" for name, n in _ranges(seen).items())
    is_one = len(summary["modes"]) == 1 and "tables" not in mode
    bound = f", bound {summary['staleness']}" if summary["mode"] == "ssp" and is_one else ""
    sets = [_clocks(each["clocks"]) for each in summary["sets"]]
    by_group = "by group" if len(sets) == 1 else "by parameter set, by group"
    return [
        f"psdist: completed in {summary['wall_s']:.1f} s: {mode}, "
        f"{_count(summary['servers'], 'server')}, {_count(summary['workers'], 'worker')} in "
        f"{_count(summary['groups'], 'group')}",
        f"  iterations     {'; '.join(sets)} ({by_group})",
        f"  staleness      {shares or 'no use'} (max {summary['max_staleness_seen']}{bound})",
        f"  throughput     {summary['samples_per_s']:.0f} samples/s; pushed "
        f"{summary['bytes_pushed'] / 2**20:.1f} MiB, pulled "
        f"{summary['bytes_pulled'] / 2**20:.1f} MiB",
        *coding_line(summary),
        *share_line(summary),
        *(
            f"  rolled back    attempt {each['attempt']}: {each['why']}"
            for each in summary["rollbacks"]
        ),
        f"  run directory  {run_dir}",
    ]


def lost_metrics(number: int, why: str) -> str:
    """Return how many lines of metrics.jsonl were not written, and why the first was not."""
    return f"{_count(number, 'line')} of metrics.jsonl: {why}"


def _clocks(clocks: Sequence[int]) -> str:
    return ", ".join(str(clock) for clock in clocks[:16]) + " ..." * (len(clocks) > 16)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranges(seen: dict[int, int]) -> dict[str, int]:
    """Return the counts by staleness; above 7 by ranges that double, so that async fits a line."""
    ranges: dict[str, int] = {}
    for value, count in sorted(seen.items()):
        low = value if value < 8 else 1 << (value.bit_length() - 1)
        name = str(value) if value < 8 else f"{low}-{2 * low - 1}"
        ranges[name] = ranges.get(name, 0) + count
    return ranges
