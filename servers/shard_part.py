"""One server's part of a parameter set: its executor, its codecs and its log.

A primary (psdist.servers.set_loop) and a replica (psdist.servers.replication.shard_replica) carry
out the changes of a shard with the methods of this class. Equal changes therefore give equal values
and equal logs on both.

    part = ShardPart(1, wire, history)
    part.execute(Step(chunk=0, ...))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from psdist.codecs.wire import Wire
from psdist.errors import ProtocolError
from psdist.history.writers import EventKind
from psdist.protocol.checkpoints import number_of
from psdist.servers.protocol.actions import (
    ChangeCodecs,
    ChangeMode,
    EmptyStep,
    Inherit,
    Load,
    LoadState,
    MembershipEvent,
    Missed,
    Step,
    TakeSnapshot,
)
from psdist.servers.set_store import BuiltSet, Log, ServerOptions, SetStore
from psdist.servers.shard.executor import Executor, ShardSpec


class ShardPart:
    def __init__(self, server: int, store: SetStore, log: Log) -> None:
        """``server``: the server whose part it is."""
        self._server = server
        self._store = store
        self.executor: Executor | None = None
        """None until the chief has described the set."""
        self._built: Executor
        """The same executor. Only actions after Build read it."""
        self._wire = store.wire
        self._has_workers_values = True
        """True if a parameter buffer is bit by bit what workers compute on."""
        self._log = log
        self._execute: dict[type, Callable[[Any], None]] = {
            Load: self._load,
            LoadState: self._load_state,
            Step: self._step,
            EmptyStep: self._empty_step,
            MembershipEvent: self._record_membership,
            ChangeMode: self._record_mode,
            ChangeCodecs: self._begin_level,
            Missed: self._missed,
            Inherit: self._inherit,
        }

    @property
    def wire(self) -> Wire:
        """The codecs of the set, at the level that its changes have reached."""
        return self._wire

    @property
    def log(self) -> Log:
        return self._log

    def execute(self, action: Any) -> None:
        self._execute[type(action)](action)

    def close_history(self) -> None:
        self._log.close()

    def _value_checksum(self, chunk: int) -> int | None:
        """Return the checksum of the chunk's values; None without a history or without bytes."""
        return self._log.checksum_of(partial(self._built.value_checksum, chunk))

    def _log_snapshot(self, action: TakeSnapshot) -> None:
        for chunk in action.chunks:
            crc = self._value_checksum(chunk)
            self._log.kept(EventKind.SNAPSHOT, chunk, action.number, crc)

    def _make_executor(self, options: ServerOptions, built: BuiltSet) -> ShardSpec:
        """The chief has described the set. Return the description of this server's chunks."""
        spec, replies = options.spec(self._wire, built), self._wire.replies(built.partition)
        self._has_workers_values = self._wire.is_shared or replies is None
        self.executor = self._built = self._store.make_executor(spec)
        return spec

    def _restore_all(self, built: BuiltSet) -> None:
        """Begin with the values and the optimizer state of a checkpoint."""
        number = number_of(built.setup.restore)
        assert number is not None
        for chunk in built.chunks_of(self._server):
            regions = self._store.keeper.regions(built.set_index, built.partition, chunk)
            self._built.restore(chunk, regions)
            self._log.kept(EventKind.RESTORE, chunk, number, self._value_checksum(chunk))

    def _load(self, action: Load) -> None:
        self._built.load(action)
        if action.clock >= 0:
            crc = self._log.checksum_of(partial(self._loaded_checksum, action))
            self._log.load(action.chunk, action.group, action.clock, crc)

    def _loaded_checksum(self, action: Load) -> int | None:
        """Return the checksum of what workers compute on; None if a codec changes it."""
        if not self._has_workers_values:
            return None
        return self._built.checksum(action.chunk, action.target, encoded=None)

    def _load_state(self, action: LoadState) -> None:
        self._built.load_state(action)

    def _step(self, action: Step) -> None:
        self._built.step(action)
        self._log.step(action.chunk, action.contributions, action.lr_scale)

    def _empty_step(self, action: EmptyStep) -> None:
        self._log.step(action.chunk, action.contributions)

    def _record_membership(self, action: MembershipEvent) -> None:
        kind = EventKind[action.kind.upper()]
        self._log.member(kind, action.group, action.clock, float(action.workers))

    def _record_mode(self, action: ChangeMode) -> None:
        self._log.mode(action.round, action.mode, action.staleness)

    def _begin_level(self, action: ChangeCodecs) -> None:
        turns, change = self._wire.turns, (action.number, action.round, action.level)
        is_known = 0 <= action.level <= len(self._wire.later)
        if turns is None or not is_known or not turns.begin(*change):
            raise ProtocolError(
                f"server {self._server}: a change to codec level {action.level} from round "
                f"{action.round} on: this run does not have the level, or the change before it is "
                "for a later round"
            )

    def _missed(self, action: Missed) -> None:
        self._log.missed(action.chunk, action.round, action.groups)

    def _inherit(self, action: Inherit) -> None:
        self._log.inherit(action.chunk, action.group, action.clock)
