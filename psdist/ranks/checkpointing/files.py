"""Checkpoints on disk: the files of a server, and the coordinator's folder of all files.

    keeper = FileKeeper(session.folder, server=0, restored=None, is_behind=True)
    files = CheckpointFiles(session)
    files.do(CompleteCheckpoint("step-00000100", clocks, records))

When a checkpoint begins and whether it is complete is psdist.servers.protocol.checkpoints's; what
files look like is psdist.checkpoint's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import TypeAdapter

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import FileRecord, Index, SetRecord
from psdist.checkpoint.reading import STATE, VALUE, Checkpoint, KeptSet
from psdist.checkpoint.states import to_json
from psdist.checkpoint.tensors import Entry, write_file
from psdist.config.modes import judging_mode
from psdist.controller.kept import TuningState
from psdist.errors import CheckpointError, InvariantError
from psdist.protocol.checkpoints import MOST_PROBLEM_CHARACTERS, Misses
from psdist.protocol.control import Setup, WriteFailed, Written
from psdist.protocol.ids import describe_peer, is_worker, worker_id, worker_of
from psdist.protocol.optimizer_state import PerElement, PieceState, Whole
from psdist.protocol.optimizers import unpack_hyperparameters
from psdist.protocol.partition import Partition
from psdist.ranks.failure import printable
from psdist.ranks.session import JobSession
from psdist.servers.protocol.checkpoints import (
    BeginCheckpoint,
    CompleteCheckpoint,
    DropCheckpoint,
    KeepTuningState,
)
from psdist.servers.shard.regions import Keeper, Region, starts_of
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.tables.specs import TableSpecs
from psdist.version import VERSION

logger = logging.getLogger("psdist")

CheckpointAction = BeginCheckpoint | KeepTuningState | CompleteCheckpoint | DropCheckpoint


def file_name(peer: int, joined: Mapping[int, int]) -> str:
    """Return the name of the rank's file. ``joined``: a substitute has the name of its place."""
    if is_worker(peer):
        peer = worker_id(joined.get(worker_of(peer), worker_of(peer)))
    return f"{describe_peer(peer).replace(' ', '-')}.safetensors"


class Writing:
    """A file that is being written: in a thread (``is_behind``), or at once."""

    def __init__(
        self, checkpoint: str, write: Callable[[], FileRecord], *, is_behind: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._write = write
        self._told: Written | WriteFailed | None = None
        self._broken: InvariantError | None = None
        self._thread = threading.Thread(target=self._run, name="psdist checkpoint", daemon=True)
        if is_behind:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            record = self._write()
        except InvariantError as error:
            self._broken = error
        except Exception as error:  # any error: the job continues without this checkpoint
            why = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.strerror:
                why = f"{error.filename or 'its file'}: {error.strerror}"
            self._told = WriteFailed(
                checkpoint=self._checkpoint, problem=printable(why)[:MOST_PROBLEM_CHARACTERS]
            )
        else:
            self._told = Written(
                checkpoint=self._checkpoint, num_bytes=record.num_bytes, crc32=record.crc32
            )

    def outcome(self, *, waits: bool = False) -> Written | WriteFailed | None:
        """Return the result; None while the file is being written. ``waits``: wait for it.

        Raises:
            InvariantError: the thread found psdist's own state broken; the job must end.
        """
        if self._thread.is_alive():
            if not waits:
                return None
            self._thread.join()
        if self._broken is not None:
            raise self._broken
        return self._told


class FileKeeper(Keeper):
    """A server's part of checkpoints on the disk."""

    def __init__(
        self,
        folder: Folder,
        server: int,
        *,
        restored: Checkpoint | None,
        is_behind: bool,
        is_expecting: bool = False,
    ) -> None:
        """``restored``: the job's first checkpoint; ``is_behind``: a thread writes the files;
        ``is_expecting``: a checkpoint will be made, so memory is allocated before."""
        self._folder = folder
        self._server = server
        self._restored = restored
        self._is_behind = is_behind
        self._is_expecting = is_expecting
        self._memory = SnapshotMemory()
        self._entries: list[Entry] = []
        self._states: dict[tuple[int, int], PieceState] = {}
        self._misses: dict[int, Misses] = {}
        self._awaiting_copies = ""
        """Checkpoint to write when all of it is copied; "": none."""
        self._writing: Writing | None = None

    @property
    def is_busy(self) -> bool:
        return self._writing is not None or bool(self._awaiting_copies)

    @property
    def is_reserving(self) -> bool:
        return self._is_expecting and not self.is_busy

    @property
    def memory(self) -> SnapshotMemory:
        self._require_idle()
        return self._memory

    def statistics(self, set_index: int) -> dict[str, int]:
        return {"snapshot_bytes": self._memory.num_bytes(set_index)}

    def keep(self, set_index: int, regions: list[Region], *, misses: Misses | None = None) -> None:
        if misses is not None:
            self._misses[set_index] = misses
        for each in regions:
            self._entries.append(Entry(set_index, each.piece, each.start, VALUE, each.values))
            for key, values in each.elements.items():
                start, entry = each.start, each.state[key]
                if isinstance(entry, Whole):
                    start, values = 0, values.view(entry.shape)
                self._entries.append(Entry(set_index, each.piece, start, STATE + key, values))
            if each.state:
                self._states.setdefault((set_index, each.piece), each.state)

    def write(self, checkpoint: str) -> None:
        self._require_idle()
        self._awaiting_copies = checkpoint

    def go_on(self) -> bool:
        if not self._awaiting_copies:
            return False
        if not self._memory.make_next():
            checkpoint, self._awaiting_copies = self._awaiting_copies, ""
            self._begin(checkpoint)
        return True

    def _begin(self, checkpoint: str) -> None:
        entries, states, misses = self._entries, self._states, self._misses
        self._entries, self._states, self._misses = [], {}, {}
        path = self._folder.partial(checkpoint) / file_name(self._server, {})
        self._writing = Writing(
            checkpoint,
            lambda: write_file(path, entries, to_json(states, misses)),
            is_behind=self._is_behind,
        )

    def outcome(self) -> Written | WriteFailed | None:
        told = self._writing.outcome() if self._writing is not None else None
        if told is not None:
            self._writing = None
        return told

    def _require_idle(self) -> None:
        if self.is_busy:
            raise InvariantError("a checkpoint began before the last one was written")

    def regions(self, set_index: int, partition: Partition, chunk: int) -> list[Region]:
        assert self._restored is not None
        each = partition.chunks[chunk]
        return [
            _region(self._restored, set_index, segment.piece, start, segment.length)
            for segment, start in zip(each.segments, starts_of(partition, each), strict=True)
        ]

    def kept(self, set_index: int) -> KeptSet:
        assert self._restored is not None
        return KeptSet(self._restored, set_index)


def _region(checkpoint: Checkpoint, set_index: int, piece: int, start: int, length: int) -> Region:
    state, elements = checkpoint.state_of(set_index, piece), {}
    for key, entry in state.items():
        if isinstance(entry, Whole):
            elements[key] = checkpoint.read_whole(set_index, piece, STATE + key).flatten()
        elif isinstance(entry, PerElement):
            elements[key] = checkpoint.read_stretch(set_index, piece, start, length, STATE + key)
    values = checkpoint.read_stretch(set_index, piece, start, length)
    return Region(piece=piece, start=start, values=values, state=state, elements=elements)


_SHOWN_PROBLEMS: Final = 4
_TUNING_STATE: Final[TypeAdapter[TuningState | None]] = TypeAdapter(TuningState | None)


class CheckpointFiles:
    """On the coordinator: begin, complete or drop a checkpoint's folder."""

    def __init__(self, session: JobSession) -> None:
        self.num_complete = 0
        self.num_failed = 0
        self._session = session
        self._folder = session.folder
        self._sets: list[tuple[Partition, Setup]] = []
        self.good_rounds: Callable[[], int | None] = lambda: None
        """Return the rounds of a checkpoint that must stay; None: the newest ones stay."""
        self._problem = ""
        """Error of the beginning of the folder."""
        self._tuning_state: TuningState | None = None
        """Tuning state for the index of the checkpoint that is being written."""

    def add_set(self, partition: Partition, setup: Setup) -> None:
        """Add the description of the next parameter set."""
        self._sets.append((partition, setup))

    def note(self, action: CheckpointAction) -> None:
        """On the standby: the coordinator has done this action."""
        self.num_complete += isinstance(action, CompleteCheckpoint)
        self.num_failed += isinstance(action, DropCheckpoint)
        if isinstance(action, BeginCheckpoint):
            self._tuning_state = None
        elif isinstance(action, KeepTuningState):
            self._tuning_state = action.fidelity

    def standing(self) -> tuple[int, int, bytes]:
        """Return, for a new standby: the numbers of complete and of dropped checkpoints, and the
        tuning state for the index of the checkpoint that is being written."""
        return self.num_complete, self.num_failed, _TUNING_STATE.dump_json(self._tuning_state)

    def go_on(self, standing: tuple[int, int, bytes]) -> None:
        """Continue from the coordinator's :meth:`standing`."""
        self.num_complete, self.num_failed, tuning_state = standing
        self._tuning_state = _TUNING_STATE.validate_json(tuning_state)

    def has_done(self, action: CheckpointAction) -> bool:
        """True if the folder looks as if the failed coordinator had done the action."""
        has_begun = self._folder.partial(action.checkpoint).exists()
        if isinstance(action, CompleteCheckpoint):
            return not has_begun and action.checkpoint in self._folder.names()
        return has_begun == isinstance(action, BeginCheckpoint)

    def do(self, action: CheckpointAction) -> None:
        if isinstance(action, BeginCheckpoint):
            self._problem, self._tuning_state = "", None
            try:
                self._folder.begin(action.checkpoint)
            except (OSError, CheckpointError) as error:
                self._problem = f"{self._folder.path}: {_words(error)}"
        elif isinstance(action, KeepTuningState):
            self._tuning_state = action.fidelity
        elif isinstance(action, DropCheckpoint):
            told = [f"{describe_peer(peer)}: {why}" for peer, why in action.problems.items()]
            more = f" (and {len(told) - _SHOWN_PROBLEMS} more)" * (len(told) > _SHOWN_PROBLEMS)
            self._fail(action.checkpoint, self._problem or "; ".join(told[:_SHOWN_PROBLEMS]) + more)
        else:
            try:
                index = self._index(action)
                keep, good = self._session.config.checkpoint_keep, self.good_rounds()
                self._folder.commit(action.checkpoint, index, keep, good=good)
            except (OSError, CheckpointError) as error:
                self._fail(action.checkpoint, _words(error))
            else:
                self.num_complete += 1
                logger.info("checkpoint %s is complete", action.checkpoint)

    def _fail(self, checkpoint: str, why: str) -> None:
        self.num_failed += 1
        self._folder.abandon(checkpoint)
        newest = self._folder.latest()
        logger.warning(
            "checkpoint %s was not written: %s; %s, and training continues",
            checkpoint,
            why,
            f"{newest} stays the newest" if newest else "there is none yet",
        )

    def _holder(self, place: int, files: Mapping[int, tuple[int, int]]) -> int:
        """Return the worker that had this place when the checkpoint with these files began. It may
        have failed since, and a substitute may have joined already."""
        holders = [place, *(each for each, its in self._session.joined.items() if its == place)]
        return next((each for each in holders if worker_id(each) in files), holders[-1])

    def _index(self, action: CompleteCheckpoint) -> Index:
        session, config, roles = self._session, self._session.config, self._session.roles
        groups = roles.groups[: roles.num_groups_beginning]
        clocks = [action.clocks[self._holder(members[0], action.files)] for members in groups]
        return Index(
            psdist=VERSION,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            attempt=session.attempt,
            mode=judging_mode(config),
            seed=config.seed,
            world=len(roles.places),
            servers=roles.num_servers,
            groups=groups,
            sets=tuple(
                SetRecord.of(
                    partition,
                    optimizer=setup.optimizer,
                    clocks=tuple(each[index] for each in clocks),
                    hyper=unpack_hyperparameters(setup.hyper),
                    tables=TableSpecs.decode(setup.tables).tables if setup.tables else (),
                )
                for index, (partition, setup) in enumerate(self._sets)
            ),
            files=tuple(
                FileRecord(name=file_name(peer, session.joined), num_bytes=num_bytes, crc32=crc32)
                for peer, (num_bytes, crc32) in sorted(action.files.items())
            ),
            fidelity=self._tuning_state,
        )


def _words(error: OSError | CheckpointError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return str(error)
