"""Rank-stamped logs: everything into RUN_DIR/logs/rank-N.log, warnings also to standard error.

    start_logs(run_dir, rank=3, who="worker 1 (rank 3 on n2)", setting="info+propagate")

Only the logger "psdist" is set up, and only by :func:`start_logs`. Before the first job a null
handler keeps Python from showing its records where the script has no handlers.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final, TextIO

from psdist.whole_writes import append_whole

_BEFORE_THE_START: Final = logging.NullHandler()
logging.getLogger("psdist").addHandler(_BEFORE_THE_START)


def start_logs(run_dir: Path, *, rank: int, who: str, setting: str = "info") -> None:
    """Write the log of a rank. ``setting`` is report.log: a level, and perhaps ``+propagate``."""
    level, _, more = setting.partition("+")
    logger = logging.getLogger("psdist")
    before = logger.level, logger.propagate
    logger.setLevel(level.upper())
    logger.propagate = bool(more)
    # Removed for good: between two jobs Python itself shows warnings.
    logger.removeHandler(_BEFORE_THE_START)
    to_people = _ToPeople()
    to_people.setLevel(logging.WARNING)
    to_people.setFormatter(
        logging.Formatter(f"psdist: %(levelname)s: {_escaped(who)}: %(message)s")
    )
    logger.addHandler(to_people)
    to_file = _LogFile(run_dir / "logs" / f"rank-{rank}.log", before)
    to_file.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {_escaped(who)}: %(message)s")
    )
    logger.addHandler(to_file)


def stop_logs() -> None:
    """Close the log of this rank. The logger is as it was before: the script's own handlers stay,
    and records reach them again."""
    logger = logging.getLogger("psdist")
    for handler in list(logger.handlers):
        if isinstance(handler, _LogFile | _ToPeople):
            logger.removeHandler(handler)
            handler.close()
            if isinstance(handler, _LogFile):
                level, logger.propagate = handler.before
                logger.setLevel(level)


class _ToPeople(logging.StreamHandler[TextIO]):
    """Warnings on standard error."""


class _LogFile(logging.Handler):
    """A file of log lines. The first line that cannot be written is a warning, and the job
    continues: Python's own handler would show a traceback for each line."""

    def __init__(self, path: Path, before: tuple[int, bool]) -> None:
        """``before``: level and propagation of the logger until the log began."""
        super().__init__()
        self.before = before
        self._path = path
        self._file: FileIO | None = None
        self._is_told = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - by close()
        except OSError as error:
            self._tell(error)

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is None:
            return
        try:
            text = f"{self.format(record)}\n"
            append_whole(self._file, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._tell(error)
        except Exception:  # a message that does not fit its arguments, as in Python's own
            self.handleError(record)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
        super().close()

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            logging.getLogger("psdist").warning(
                "the log %s cannot be written: %s; the job continues, and lines of it are lost",
                self._path,
                error.strerror or error,
            )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
