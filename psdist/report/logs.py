"""Rank-stamped logs: everything into RUN_DIR/logs/rank-N.log, warnings also to standard error.

    start_logs(run_dir, rank=3, who="worker 1 (rank 3 on n2)")

Only the logger "psdist" is set up, and only by :func:`start_logs`; nothing happens at import.
"""

from __future__ import annotations

import logging
from pathlib import Path


def start_logs(run_dir: Path, *, rank: int, who: str) -> None:
    logger = logging.getLogger("psdist")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8")
    to_file.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {_escaped(who)}: %(message)s")
    )
    logger.addHandler(to_file)
    to_people = logging.StreamHandler()
    to_people.setLevel(logging.WARNING)
    to_people.setFormatter(
        logging.Formatter(f"psdist: %(levelname)s: {_escaped(who)}: %(message)s")
    )
    logger.addHandler(to_people)


def stop_logs() -> None:
    logger = logging.getLogger("psdist")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
