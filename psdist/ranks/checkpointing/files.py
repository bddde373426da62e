"""Checkpoints on the disk: what a server writes of its own, what the coordinator makes of it all.

    keeper = FileKeeper(context.folder, server=0, restored=None, is_behind=True)
    files = CheckpointFiles(context)
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
from psdist.checkpoint.reading import STATE, VALUE, Checkpoint
from psdist.checkpoint.states import State, StateEntry, Whole, to_json
from psdist.checkpoint.tensors import Entry, write_file
from psdist.config.modes import judging_mode
from psdist.controller.kept import Fidelity
from psdist.errors import CheckpointError, InvariantError
from psdist.protocol.checkpoints import MOST_PROBLEM_CHARACTERS, Misses
from psdist.protocol.control import Setup, WriteFailed, Written
from psdist.protocol.ids import describe_peer, is_worker, worker_id, worker_of
from psdist.protocol.memory import dtype_name
from psdist.protocol.optimizer_state import PerElement, PieceState, Uncut
from psdist.protocol.optimizers import unpack_hyperparameters
from psdist.protocol.partition import Partition
from psdist.ranks.context import RankContext
from psdist.ranks.failure import printable
from psdist.servers.protocol.checkpoints import (
    BeginCheckpoint,
    CompleteCheckpoint,
    DropCheckpoint,
    KeepFidelity,
)
from psdist.servers.shard.regions import Keeper, Region, starts_of
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.version import VERSION

logger = logging.getLogger("psdist")

CheckpointAction = BeginCheckpoint | KeepFidelity | CompleteCheckpoint | DropCheckpoint


def file_name(peer: int, joined: Mapping[int, int]) -> str:
    """Of the rank with this id; of a worker that has ``joined`` that of the place that it has."""
    if is_worker(peer):
        peer = worker_id(joined.get(worker_of(peer), worker_of(peer)))
    return f"{describe_peer(peer).replace(' ', '-')}.safetensors"


class Writing:
    """A file that is being written, beside what this rank does, or at once."""

    def __init__(
        self, checkpoint: str, write: Callable[[], FileRecord], *, is_behind: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._write = write
        self._told: Written | WriteFailed | None = None
        self._thread = threading.Thread(target=self._run, name="psdist checkpoint", daemon=True)
        if is_behind:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            record = self._write()
        except Exception as error:  # whatever it is: the job goes on without this checkpoint
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
        """None while it is not over; ``waits``: until it is."""
        if self._thread.is_alive():
            if not waits:
                return None
            self._thread.join()
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
        """``restored``: what the job goes on from; ``is_behind``: files are written beside what the
        server does; ``is_expecting``: there will be a checkpoint, so memory is made before it."""
        self._folder = folder
        self._server = server
        self._restored = restored
        self._is_behind = is_behind
        self._is_expecting = is_expecting
        self._memory = SnapshotMemory()
        self._entries: list[Entry] = []
        self._states: dict[tuple[int, int], State] = {}
        self._misses: dict[int, Misses] = {}
        self._awaiting_copies = ""
        """The checkpoint that is to be written when all of it is copied; "": none."""
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
            state: dict[str, StateEntry] = dict(each.state)
            for key, values in each.elements.items():
                if key in each.shapes:
                    values = values.view(each.shapes[key])
                    state[key] = Whole(dtype_name(values.dtype), each.shapes[key])
                start = 0 if key in each.shapes else each.start
                self._entries.append(Entry(set_index, each.piece, start, STATE + key, values))
            if state:
                self._states.setdefault((set_index, each.piece), state)

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


def _region(checkpoint: Checkpoint, set_index: int, piece: int, start: int, length: int) -> Region:
    state: PieceState = {}
    shapes, elements = {}, {}
    for key, entry in checkpoint.state_of(set_index, piece).items():
        if isinstance(entry, Whole):
            state[key], shapes[key] = Uncut("a tensor"), entry.shape
            elements[key] = checkpoint.read_whole(set_index, piece, STATE + key).flatten()
            continue
        state[key] = entry
        if isinstance(entry, PerElement):
            elements[key] = checkpoint.read_stretch(set_index, piece, start, length, STATE + key)
    values = checkpoint.read_stretch(set_index, piece, start, length)
    return Region(
        piece=piece, start=start, values=values, state=state, shapes=shapes, elements=elements
    )


_SHOWN_PROBLEMS: Final = 4
_FIDELITY: Final[TypeAdapter[Fidelity | None]] = TypeAdapter(Fidelity | None)


class CheckpointFiles:
    """On the coordinator: a checkpoint's folder is begun, made whole, or dropped."""

    def __init__(self, context: RankContext) -> None:
        self.num_complete = 0
        self.num_failed = 0
        self._context = context
        self._folder = context.folder
        self._sets: list[tuple[Partition, Setup]] = []
        self.good_rounds: Callable[[], int | None] = lambda: None
        """A checkpoint of so many is to stay; None: whichever are the newest."""
        self._problem = ""
        """Why the folder could not be begun."""
        self._fidelity: Fidelity | None = None
        """What belongs into the index of the checkpoint that is being written."""

    def add_set(self, partition: Partition, setup: Setup) -> None:
        """What a parameter set is of."""
        self._sets.append((partition, setup))

    def note(self, action: CheckpointAction) -> None:
        """The coordinator has done it, whose standby this is."""
        self.num_complete += isinstance(action, CompleteCheckpoint)
        self.num_failed += isinstance(action, DropCheckpoint)
        if isinstance(action, BeginCheckpoint):
            self._fidelity = None
        elif isinstance(action, KeepFidelity):
            self._fidelity = action.fidelity

    def standing(self) -> tuple[int, int, bytes]:
        """How many checkpoints are whole, how many were dropped, and what belongs into the index of
        the one that is being written, for a next standby."""
        return self.num_complete, self.num_failed, _FIDELITY.dump_json(self._fidelity)

    def go_on(self, standing: tuple[int, int, bytes]) -> None:
        """With what the coordinator knew (:meth:`standing`)."""
        self.num_complete, self.num_failed, fidelity = standing
        self._fidelity = _FIDELITY.validate_json(fidelity)

    def has_done(self, action: CheckpointAction) -> bool:
        """Whether the folder looks as if the coordinator, who has died, had done it."""
        has_begun = self._folder.partial(action.checkpoint).exists()
        if isinstance(action, CompleteCheckpoint):
            return not has_begun and action.checkpoint in self._folder.names()
        return has_begun == isinstance(action, BeginCheckpoint)

    def do(self, action: CheckpointAction) -> None:
        if isinstance(action, BeginCheckpoint):
            self._problem, self._fidelity = "", None
            try:
                self._folder.begin(action.checkpoint)
            except (OSError, CheckpointError) as error:
                self._problem = f"{self._folder.path}: {_words(error)}"
        elif isinstance(action, KeepFidelity):
            self._fidelity = action.fidelity
        elif isinstance(action, DropCheckpoint):
            told = [f"{describe_peer(peer)}: {why}" for peer, why in action.problems.items()]
            more = f" (and {len(told) - _SHOWN_PROBLEMS} more)" * (len(told) > _SHOWN_PROBLEMS)
            self._fail(action.checkpoint, self._problem or "; ".join(told[:_SHOWN_PROBLEMS]) + more)
        else:
            try:
                index = self._index(action)
                keep, good = self._context.config.checkpoint_keep, self.good_rounds()
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
            "checkpoint %s was not written: %s; %s, and training goes on",
            checkpoint,
            why,
            f"{newest} stays the newest" if newest else "there is none yet",
        )

    def _holder(self, place: int, files: Mapping[int, tuple[int, int]]) -> int:
        """Who had this worker's place when the checkpoint began, of which these are the files: who
        has died since may have been replaced already."""
        holders = [place, *(each for each, its in self._context.joined.items() if its == place)]
        return next((each for each in holders if worker_id(each) in files), holders[-1])

    def _index(self, action: CompleteCheckpoint) -> Index:
        context, config, roles = self._context, self._context.config, self._context.roles
        groups = roles.groups[: roles.num_groups_beginning]
        clocks = [action.clocks[self._holder(members[0], action.files)] for members in groups]
        return Index(
            psdist=VERSION,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            attempt=context.attempt,
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
                )
                for index, (partition, setup) in enumerate(self._sets)
            ),
            files=tuple(
                FileRecord(name=file_name(peer, context.joined), num_bytes=num_bytes, crc32=crc32)
                for peer, (num_bytes, crc32) in sorted(action.files.items())
            ),
            fidelity=self._fidelity,
        )


def _words(error: OSError | CheckpointError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return str(error)
