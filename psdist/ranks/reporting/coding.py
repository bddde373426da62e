"""The effect of codecs, for summary.json and the report; pure.

coding_of(workers)          # of one set, from its workers' statistics; None without codecs
coding_together(sets)
coding_line(summary)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

_PARTS = 4


def coding_of(workers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the bytes before coding, and ||p - C(p)|| / ||p|| of pushes: of the whole run and of
    each quarter. Squares are added over workers."""
    before = [each["bytes_before_coding"] for each in workers.values()]
    if not any(map(any, before)):
        return None
    missed = _by_bin(each["coding_missed"] for each in workers.values())
    wanted = _by_bin(each["coding_wanted"] for each in workers.values())
    return {
        "bytes_pushed_before": sum(pushed for pushed, _ in before),
        "bytes_pulled_before": sum(pulled for _, pulled in before),
        "pushes_skipped": sum(each["pushes_skipped"] for each in workers.values()),
        "encodes_on_device": sum(each["encodes_there"] for each in workers.values()),
        "bytes_to_host": sum(each["bytes_to_host"] for each in workers.values()),
        "missed": _quarters(missed),
        "wanted": _quarters(wanted),
        **_errors(_quarters(missed), _quarters(wanted)),
    }


def coding_together(sets: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the effect over all sets."""
    known = [each for each in sets if each is not None]
    if not known:
        return None
    missed, wanted = (_by_bin(each[key] for each in known) for key in ("missed", "wanted"))
    return {
        **{
            key: sum(each[key] for each in known)
            for key in ("bytes_pushed_before", "bytes_pulled_before", "pushes_skipped")
        },
        # A number of workers, and each worker has all sets.
        "encodes_on_device": max(each["encodes_on_device"] for each in known),
        "bytes_to_host": sum(each["bytes_to_host"] for each in known),
        "missed": missed,
        "wanted": wanted,
        **_errors(missed, wanted),
    }


def coding_line(summary: Mapping[str, Any]) -> list[str]:
    """Return the report's line: what codecs have saved and left out; empty without codecs."""
    coding = summary.get("coding")
    if not coding:
        return []
    parts = []
    for way in ("pushed", "pulled"):
        if before := coding[f"bytes_{way}_before"]:
            parts.append(f"{way} {before / max(1, summary[f'bytes_{way}']):.1f} x fewer bytes")
    if coding["error"] is not None:
        trend = ", ".join(f"{error:.2f}" for error in coding["errors"] if error is not None)
        parts.append(f"left out of a push {coding['error']:.2f} (by quarter {trend})")
    if skipped := coding["pushes_skipped"]:
        parts.append(f"{skipped} pushes of chunks left for later")
    if coding["encodes_on_device"]:
        times = coding["bytes_pushed_before"] / max(1, coding["bytes_to_host"])
        parts.append(f"encoded on the device, {times:.1f} x fewer bytes copied to the host")
    elif coding["bytes_to_host"]:
        parts.append("encoded on the host; every gradient was copied there whole")
    return [f"  codecs         {'; '.join(parts)}"]


def _by_bin(each: Iterable[Sequence[float]]) -> list[float]:
    return [sum(bins) for bins in zip_longest(*each, fillvalue=0.0)]


def _quarters(bins: Sequence[float]) -> list[float]:
    bounds = [len(bins) * part // _PARTS for part in range(_PARTS + 1)]
    return [sum(bins[start:stop]) for start, stop in pairwise(bounds)]


def _errors(missed: Sequence[float], wanted: Sequence[float]) -> dict[str, Any]:
    each = [
        (one / other) ** 0.5 if other else None for one, other in zip(missed, wanted, strict=True)
    ]
    total = sum(wanted)
    return {"error": (sum(missed) / total) ** 0.5 if total else None, "errors": each}
