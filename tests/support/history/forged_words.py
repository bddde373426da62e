"""Output of `psdist check` for every forged history: tests/unit/history/forged.txt.

python -m tests.support.history.forged_words        # write it again; then read what has changed
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[2] / "unit" / "history" / "forged.txt"


def expected() -> dict[str, list[str]]:
    """By the fault's sentence the lines that the check prints."""
    sections = FILE.read_text(encoding="utf-8").strip().split("\n\n")
    lines = [section.splitlines() for section in sections]
    return {first: [line.removeprefix("    ") for line in rest] for first, *rest in lines}


def write() -> None:
    from tests.unit.history import test_forged, test_forged_loads, test_forged_replies

    sections = [
        "\n    ".join([fault.what, *fault.refused()])
        for module in (test_forged, test_forged_replies, test_forged_loads)
        for fault in module.FAULTS
    ]
    FILE.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
