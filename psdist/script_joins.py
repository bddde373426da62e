"""Spares that take failed workers' places: the chief writes its script's state, the spare reads it.

    joins = ScriptJoins(session, loop, collective=collective)
    joins.meet(clocks, state)          # on all running workers, at a boundary of iterations
    joins.come()                       # on the spare: the state of the chief's script, or None

The file stays in RUN_DIR/joins while a spare may read it. If it cannot be written, no spare joins,
and the chief logs why. The coordinator decides which spare joins (psdist.servers.protocol.joins).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from psdist.checkpoint import tree
from psdist.checkpoint.reading import read_values
from psdist.checkpoint.tensors import write_tensors
from psdist.config.compatibility import without_substitutes
from psdist.config.settings import RunConfig
from psdist.errors import CheckpointError, UsageError
from psdist.protocol.collected import JOIN, Brought, pack_join
from psdist.protocol.control import JoinAccepted
from psdist.ranks.session import JobSession
from psdist.workers.loop import WorkerLoop

logger = logging.getLogger("psdist")

_LOOK_S: Final = 0.02
_SHOWN_S: Final = 60.0
"""Maximum delay of a new file on a file system of several hosts; other workers wait meanwhile."""


class ScriptJoins:
    def __init__(
        self,
        session: JobSession,
        loop: WorkerLoop,
        *,
        collective: Callable[[str, bytes], Brought],
    ) -> None:
        self._session = session
        self._loop = loop
        self._collective = collective
        self._folder = session.run_directory.path / "joins"
        self._num_written = 0
        self._written: Path | None = None

    # -- on the running workers ----------------------------------------------------------------

    def meet(self, clocks: Sequence[int], state: Callable[[], Mapping[str, Any]]) -> None:
        """Let spares join; all running workers hold at a boundary of iterations. ``state()``: the
        state of this worker's script, called on the chief."""
        core = self._loop.core
        name = self._write(clocks, state) if core.chief == core.seat.worker else ""
        self._collective(JOIN, pack_join(clocks, name))

    def _write(self, clocks: Sequence[int], state: Callable[[], Mapping[str, Any]]) -> str:
        self._num_written += 1
        name = f"state-{clocks[0]}-{self._loop.core.seat.worker}-{self._num_written}"
        path = self._path(name)
        try:
            # Also the files of failed chiefs: the spares that read them are in this meeting.
            for before in self._folder.glob(f"*{path.suffix}"):
                before.unlink()
            self._written = path
            plain, tensors = tree.pack(state(), path="the script's state")
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, tensors, plain)
        except (OSError, UsageError) as error:
            logger.warning("spares cannot take a failed worker's place now: %s", error)
            self.forget()
            return ""
        return name

    def forget(self) -> None:
        """Remove this worker's file, which no spare reads any more."""
        if self._written is not None:
            with suppress(OSError):  # a disk that failed before
                self._written.unlink(missing_ok=True)
            self._written = None

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    # -- on the spare --------------------------------------------------------------------------

    def come(self) -> tuple[JoinAccepted, dict[str, Any]] | None:
        """Wait until all running workers hold. Return the place where this worker joins, and the
        state of the chief's script there; None if the job ends before. Raises
        :class:`CheckpointError` for a damaged file."""
        welcome = self._loop.join_running(self._session.rank.waiting(has_deadline=False))
        if welcome is None:
            return None
        assert self._session.replace is not None
        self._session.joined[welcome.worker] = self._session.replace.worker
        path = self._path(welcome.state)
        patience_s = min(_SHOWN_S, self._session.config.wait_timeout_s)
        deadline = time.monotonic() + patience_s
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        found = tree.unpack(*read_values(path))
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} is no state of a script")
        return welcome, found


def require_one_set(config: RunConfig, num_sets: int) -> None:
    """Raises :class:`UsageError` if a job with spares for workers' places prepares several sets."""
    if num_sets > 1:
        raise UsageError(
            "job.prepare of a second optimizer with spares for workers' places: a failed worker "
            "may have stepped one of them and not the other; prepare one optimizer, or "
            f"{without_substitutes(config)}"
        )
