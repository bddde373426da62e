"""Spares that take dead workers' places, as scripts meet them: the chief writes what a spare's
script goes on with, and the spare reads it.

    joins = ScriptJoins(context, loop, collective=collective)
    joins.meet(clocks, state)          # on all who live, at a boundary of iterations
    joins.come()                       # on the spare: what the chief's script had there, or None

The file lies in RUN_DIR/joins as long as it may be read. Where nothing can be written nobody joins,
and the chief says why. Who joins is decided by psdist.servers.protocol.joins, on the registrar.
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
from psdist.config.derived import without_substitutes
from psdist.config.settings import RunConfig
from psdist.errors import CheckpointError, UsageError
from psdist.protocol.collected import Brought
from psdist.protocol.control import Welcome
from psdist.protocol.substitutes import JOIN, pack_join
from psdist.ranks.context import RankContext
from psdist.workers.loop import WorkerLoop

logger = logging.getLogger("psdist")

_LOOK_S: Final = 0.02
_SHOWN_S: Final = 60.0
"""A file system of several hosts shows a file after so long at most; others wait meanwhile."""


class ScriptJoins:
    def __init__(
        self,
        context: RankContext,
        loop: WorkerLoop,
        *,
        collective: Callable[[str, bytes], Brought],
    ) -> None:
        self._context = context
        self._loop = loop
        self._collective = collective
        self._folder = context.run_directory.path / "joins"
        self._num_written = 0
        self._written: Path | None = None

    # -- those who live ------------------------------------------------------------------------

    def meet(self, clocks: Sequence[int], state: Callable[[], Mapping[str, Any]]) -> None:
        """All hold at a boundary of iterations, so that whoever waits for it may join. ``state()``:
        of this worker's script, which is asked for on the chief."""
        core = self._loop.core
        name = self._write(clocks, state) if core.chief == core.seat.worker else ""
        self._collective(JOIN, pack_join(clocks, name))

    def _write(self, clocks: Sequence[int], state: Callable[[], Mapping[str, Any]]) -> str:
        self._num_written += 1
        name = f"state-{clocks[0]}-{self._loop.core.seat.worker}-{self._num_written}"
        path = self._path(name)
        try:
            # Also those of chiefs that have died: whoever was to read them is waited for here.
            for before in self._folder.glob(f"*{path.suffix}"):
                before.unlink()
            self._written = path
            plain, tensors = tree.pack(state(), path="the script's state")
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, tensors, plain)
        except (OSError, UsageError) as error:
            logger.warning("no spare can take a dead worker's place now: %s", error)
            self.forget()
            return ""
        return name

    def forget(self) -> None:
        """What this worker has written is read by nobody any more."""
        if self._written is not None:
            with suppress(OSError):  # a disk that failed before
                self._written.unlink(missing_ok=True)
            self._written = None

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    # -- who joins -----------------------------------------------------------------------------

    def come(self) -> tuple[Welcome, dict[str, Any]] | None:
        """Wait until all who live hold; where this worker joins, and the state of the chief's
        script there. None where the job is over before. Raises :class:`CheckpointError` for what no
        chief has written."""
        welcome = self._loop.join_running(self._context.waiting(has_deadline=False))
        if welcome is None:
            return None
        assert self._context.replace is not None
        self._context.joined[welcome.worker] = self._context.replace.worker
        path = self._path(welcome.state)
        patience_s = min(_SHOWN_S, self._context.config.wait_timeout_s)
        deadline = time.monotonic() + patience_s
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        found = tree.unpack(*read_values(path))
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} is no state of a script")
        return welcome, found


def require_followable(config: RunConfig, num_sets: int, max_norm: float) -> None:
    """Of the sets that are prepared with spares for workers' places. Raises
    :class:`UsageError`."""
    if num_sets > 1:
        raise UsageError(
            "job.prepare of a second optimizer with spares for workers' places: a dead worker may "
            "have stepped one of them and not the other; prepare one optimizer, or "
            f"{without_substitutes(config)}"
        )
    if max_norm:
        raise UsageError(
            "job.prepare(max_grad_norm=...) with spares for workers' places was not tried yet: "
            f"call job.clip_grad_norm_ before each step, or {without_substitutes(config)}"
        )
