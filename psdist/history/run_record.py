"""``run.json``: the promises of a run, written once by server 0 when the model is known.

write_run(run_dir / "history", RunRecord(psdist=VERSION, mode="ssp", staleness=3, ...))
read_run(run_dir / "history" / "run.json")      # HistoryError in one line on damage
"""

from __future__ import annotations

import errno
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from psdist.errors import HistoryError
from psdist.features.backup import BackupPromise
from psdist.mode_names import Mode

FORMAT_VERSION = 4

_LIMIT_BYTES = 64 * 2**20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_M = TypeVar("_M", bound=BaseModel)

_RETIRED: dict[str, object] = {"round_weights": "equal", "usual_steps": 0}
"""Fields that earlier versions wrote, with the value that changes no rule."""

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_CodecText = Annotated[str, Field(max_length=200)]


class ModeSince(BaseModel):
    """A mode, and its first round."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    round: _Count
    mode: Mode
    staleness: _Count | None = None
    """The bound of ssp; null in other modes."""


class LevelCodecs(BaseModel):
    """Codecs that psdist may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    push: _CodecText
    pull: _CodecText
    push_code: Annotated[int, Field(ge=0, lt=2**8)]
    """Number of the push codec in messages."""

    @property
    def name(self) -> str:
        """Both codecs as a schedule writes them."""
        return self.push if self.pull == "none" else f"{self.push}/{self.pull}"


class CodecsSince(LevelCodecs):
    """Codecs of pushes and replies, and their first round."""

    round: _Count
    burst: _Count = 0
    """Rounds whose number, counted from 1, is a multiple of this have pushes in another codec; 0:
    no round has."""
    burst_code: Annotated[int, Field(ge=0, lt=2**8)] = 0
    """Number of that codec."""


class RunRecord(BackupPromise):
    """The promises: the mode, the workers of each group, the server of each chunk."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[4] = 4
    psdist: Annotated[str, Field(max_length=100)]
    """The version that wrote the history."""
    mode: Mode
    staleness: _Count | None = None
    """The bound of ssp; null in other modes."""
    mode_by: Literal["run", "schedule", "script", "auto"] = "run"
    """The part of psdist that may change the mode during the run, which begins with ``mode``; run:
    no part may."""
    auto_staleness: _Count | None = None
    """The bound of ssp if psdist chooses between sync and ssp; the highest bound if it moves the
    bound, and then ``staleness`` is the lowest."""
    schedule: tuple[ModeSince, ...] = ()
    """The mode of every round; empty without a schedule."""
    local_steps_by_speed: _Count = 0
    """Mean local steps of the groups, if each has its own number by its speed; else 0."""
    local_steps_by_loss: _Count = 0
    """Local steps of all groups at first, if the loss decides later ones; else 0."""
    has_rounds_by_pass: bool = False
    """True if a round ends with a pass over a loader."""
    stale_lr: Literal["off", "inverse"] = "off"
    """Factor on the lr of an update, by its staleness."""
    delay_compensation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Strength of the delay compensation; no rule can check it."""
    codecs: tuple[CodecsSince, ...] = ()
    """The codecs of every round; empty if nothing is coded. If psdist chooses among ``ladder``, the
    first ones."""
    ladder: Annotated[tuple[LevelCodecs, ...], Field(max_length=100)] = ()
    """The codecs that psdist chooses among, the least lossy first."""
    error_budget: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Part of a push that a chosen codec may leave out."""
    loss_patience: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Windows for which the loss may stand still under a chosen codec."""
    freeze_step: _Count = 0
    """Steps after which the second moment of Adam is frozen; psdist chooses no codec before."""
    rollback: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Multiple of the least loss that ends the run; null: no loss does."""
    pipeline: _Count = 0
    """Replies that a worker may leave outstanding."""
    row_staleness: _Count | None = None
    """In a set of tables: iterations for which workers use a row that they have, after that which
    it was brought for; null: the set is of parameters."""
    groups: Annotated[tuple[tuple[_Count, ...], ...], Field(min_length=1)]
    """For each group the indexes of its workers."""
    num_substitutes: _Count = 0
    """Number of the last groups, of one worker each, that join only after failures."""
    slices: tuple[tuple[_Count, ...], ...]
    """For groups of 1, 2, 3 ... workers: by chunk, the place in the group of the worker that pushes
    it; empty if no group has that size."""
    num_servers: Annotated[int, Field(ge=1, lt=2**31)]
    set_index: _Count = 0
    """The parameter set whose history this is."""
    num_chunks: _Count
    owners: tuple[_Count, ...]
    """The server of each chunk."""
    checksum_every: _Count = 0
    """The reply of a chunk to clock c carries a checksum where (chunk + c) is a multiple of this;
    0: none does."""
    has_copies: bool = False
    """True if replies are relative to the copy of each reader, so that replies differ."""
    begins_with_state: bool = False
    """True if servers began with the chief's optimizer state, which no record has."""
    attempt: Annotated[int, Field(ge=1, lt=2**31)] = 1
    """Number of this start of the run, counted from 1."""
    restored: Annotated[str, Field(pattern=r"^(step-[0-9]{8,15})?$")] = ""
    """The checkpoint that it resumed from; "" if none."""
    restored_attempt: _Count = 0
    """The attempt that made the checkpoint."""
    cut: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """CRC-32 of the cut of parameters into chunks: chunks of the same cut can be compared."""
    first_clocks: tuple[_Count, ...] = ()
    """First clock of each group; empty if nothing was restored."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        workers = [worker for group in self.groups for worker in group]
        if sorted(workers) != list(range(len(workers))) or not all(self.groups):
            raise ValueError("groups must hold every worker 0, 1, 2 ... once, and none be empty")
        substitutes = self.groups[len(self.groups) - self.num_substitutes :]
        if self.num_substitutes >= len(self.groups) or any(len(each) > 1 for each in substitutes):
            raise ValueError(
                f"{self.num_substitutes} substitutes are groups of one worker behind others"
            )
        if len(self.owners) != self.num_chunks:
            raise ValueError(f"owners names {len(self.owners)} chunks of {self.num_chunks}")
        if max(self.owners, default=0) >= self.num_servers:
            raise ValueError(f"owners names server {max(self.owners)} of {self.num_servers}")
        sizes = {len(group) for group in self.groups}
        if len(self.slices) != max(sizes):
            raise ValueError(
                f"slices are of groups of up to {len(self.slices)} workers, groups have "
                f"{max(sizes)}"
            )
        for size, places in enumerate(self.slices, start=1):
            if len(places) != self.num_chunks * (size in sizes) or max(places, default=0) >= size:
                raise ValueError(
                    f"slices of groups of {size} must give each of {self.num_chunks} chunks a "
                    "place below that, and none where there is no such group"
                )
        if len(self.first_clocks) != len(self.groups) * bool(self.restored):
            raise ValueError(
                f"first_clocks are of {len(self.first_clocks)} groups of {len(self.groups)}, "
                f"restored is {self.restored!r}"
            )
        if fault := self.fault_of_missed(len(self.first_clocks)):
            raise ValueError(fault)
        if (self.mode == "ssp") != (self.staleness is not None):
            raise ValueError(
                f"mode ssp needs a staleness and no other mode has one, seen {self.staleness}"
            )
        if (self.mode_by == "auto") != (self.auto_staleness is not None):
            raise ValueError(
                f"mode_by auto needs auto_staleness and no other has one, seen {self.mode_by!r} "
                f"and {self.auto_staleness}"
            )
        if self.mode == "ssp" and (self.auto_staleness or 2**31) < (self.staleness or 0):
            raise ValueError(
                f"a bound that moves from {self.staleness} up to {self.auto_staleness}"
            )
        begins = ModeSince(round=0, mode=self.mode, staleness=self.staleness)
        if bool(self.schedule) != (self.mode_by == "schedule") or (
            self.schedule and self.schedule[0] != begins
        ):
            raise ValueError(
                f"mode_by is {self.mode_by!r} and mode {self.mode!r} with a schedule of "
                f"{len(self.schedule)} parts that begins otherwise"
            )
        starts = [each.round for each in self.codecs]
        if starts and (starts[0] or starts != sorted(set(starts))):
            raise ValueError(f"codecs that begin at the rounds {starts[:8]}")
        wrong = [
            (each.burst, each.burst_code)
            for each in self.codecs
            if each.burst == 1 or bool(each.burst) != bool(each.burst_code)
        ]
        if wrong or (self.ladder and any(each.burst for each in self.codecs)):
            raise ValueError(
                f"bursts every {wrong[0][0]} rounds by codec {wrong[0][1]}"
                if wrong
                else f"bursts with a ladder of {len(self.ladder)} codecs"
            )
        fields = set(LevelCodecs.model_fields)
        levels = [LevelCodecs(**each.model_dump(include=fields)) for each in self.codecs]
        is_first = levels == [*self.ladder[:1]]
        is_kept = bool(self.restored and levels) and all(each in self.ladder for each in levels)
        if self.ladder and (self.mode_by != "run" or not (is_first or is_kept)):
            raise ValueError(
                f"of a ladder of {len(self.ladder)} codecs the run begins with the first one, in "
                "one mode, or with those that a checkpoint has; it begins with "
                f"{[each.push for each in self.codecs[:8]]}"
            )
        if self.mode == "sync" and (self.pipeline or self.row_staleness):
            raise ValueError(
                f"mode sync allows no pipeline and no row_staleness, seen {self.pipeline} and "
                f"{self.row_staleness}"
            )
        if self.is_of_rows and self.checksum_every:
            raise ValueError(f"rows have no checksums, seen checksum_every {self.checksum_every}")
        return self

    @property
    def first(self) -> npt.NDArray[np.int64]:
        """[groups]: their first clocks; 0 for substitutes
        (:attr:`psdist.history.History.first`)."""
        return np.asarray(self.first_clocks or (0,) * len(self.groups), np.int64)

    @property
    def is_of_rows(self) -> bool:
        """True if the set is of tables."""
        return self.row_staleness is not None

    @property
    def most_behind(self) -> int:
        """Iterations after the next one in which a worker may still use a reply."""
        return self.pipeline + (self.row_staleness or 0)

    @property
    def pull_codec_rounds(self) -> list[int]:
        """Rounds with which the codec of replies changes."""
        pairs = pairwise(self.codecs)
        return [each.round for before, each in pairs if each.pull != before.pull]

    @property
    def first_substitute(self) -> int:
        """Number of the first substitute's group; all later groups are substitutes'."""
        return len(self.groups) - self.num_substitutes

    @property
    def num_workers(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def num_beginning(self) -> int:
        """Number of workers without substitutes, which are the last ones."""
        return self.num_workers - self.num_substitutes

    def group_of_worker(self) -> npt.NDArray[np.int64]:
        """[workers]"""
        groups = np.zeros(self.num_workers, np.int64)
        for group, workers in enumerate(self.groups):
            groups[list(workers)] = group
        return groups

    def slice_owner(
        self, groups: npt.NDArray[Any], chunks: npt.NDArray[Any]
    ) -> npt.NDArray[np.int64]:
        """Return, for each (group, chunk) [n], the worker of the group that pushes the chunk."""
        if not self.num_chunks:
            return np.zeros(len(chunks), np.int64)
        places = np.zeros((len(self.slices), self.num_chunks), np.int64)
        for size, its in enumerate(self.slices):
            places[size, : len(its)] = its
        sizes = np.array([len(group) for group in self.groups], np.int64)
        firsts = np.cumsum(sizes) - sizes
        workers = np.concatenate([np.asarray(group, np.int64) for group in self.groups])
        owners: npt.NDArray[np.int64] = workers[firsts[groups] + places[sizes[groups] - 1, chunks]]
        return owners


def write_run(path_dir: Path, run: RunRecord) -> None:
    """Write ``run.json``, complete or not at all. Call it when every rank's writer exists."""
    partial = path_dir / "run.json.partial"
    try:
        path_dir.mkdir(parents=True, exist_ok=True)
        partial.write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path_dir / "run.json")
    except OSError as error:
        raise cannot("write", partial, error) from error


def read_run(path: Path) -> RunRecord:
    """Return the promise. Raises :class:`HistoryError`."""
    text = read_limited(path, _LIMIT_BYTES)
    if any(key.encode() in text for key in _RETIRED):
        text = _without_retired(path, text)
    return parsed(RunRecord, path, text)


def _without_retired(path: Path, text: bytes) -> bytes:
    """Return the record without the fields of earlier versions. Raises :class:`HistoryError` where
    one of them changes what the run promised."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text  # RunRecord reports the error
    if not isinstance(fields, dict):
        return text
    for key, means_nothing in _RETIRED.items():
        if fields.pop(key, means_nothing) != means_nothing:
            raise HistoryError(
                f"{path} is of another version of psdist, {fields.get('psdist')}: this version has "
                f"no {key}; check the run with the version that wrote it"
            )
    return json.dumps(fields).encode()


def cannot(verb: str, path: Path | None, error: OSError) -> HistoryError:
    remedy = "; free some space, or leave report.record out" if error.errno in _NO_SPACE else ""
    return HistoryError(f"cannot {verb} {path}: {error.strerror or error}{remedy}")


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """Return the contents of a file of a run. Raises :class:`HistoryError` if it is larger."""
    try:
        if path.stat().st_size > limit_bytes:
            raise HistoryError(
                f"{path} is damaged: {path.stat().st_size} bytes, more than any run writes"
            )
        return path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from error


def parsed(kind: type[_M], path: Path, text: bytes) -> _M:
    """Return the JSON text of a file as an object. Raises :class:`HistoryError`."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = min(
            error.errors(include_url=False, include_context=False),
            key=lambda each: each["loc"] != ("format",),  # another format explains other errors
        )
        where = ".".join(str(part) for part in first["loc"])
        raise HistoryError(
            f"{path} is damaged or of another version of psdist: "
            f"{where + ': ' if where else ''}{first['msg']}"
        ) from error
