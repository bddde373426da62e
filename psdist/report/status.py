"""``status.json``: the state of a running job, for `psdist status` and other processes.

    write_status(run_directory, Status(...))
    read_status(Path("runs/a"))          # ConfigError where there is none, or it is damaged

The coordinator writes it about once a second while it is idle, and when the job ends
(psdist.ranks.reporting.status). Readers need no MPI.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from psdist.errors import ConfigError
from psdist.report.run_directory import RunDirectory

NAME: Final = "status.json"
_LIMIT_BYTES: Final = 64 << 20

_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
_Seconds: TypeAlias = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Phase: TypeAlias = Literal["starting", "training", "ending", "ended"]
MOST_CHARACTERS: Final = 1024
_Text: TypeAlias = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WorkerStatus(_Told):
    """The latest report of a worker."""

    worker: _Count
    group: _Count
    clock: _Count
    epoch: _Count
    batch: _Count
    waited_s: _Seconds
    """In steps, for servers, since the start."""
    same_s: _Seconds
    """For how long its clock has been this one."""


class WaitStatus(_Told):
    """A collective that some workers have entered, and others not yet."""

    what: _Text
    since_s: _Seconds
    present: tuple[_Count, ...]
    absent: tuple[_Count, ...]


class Status(_Told):
    at: _Seconds
    """Unix time."""
    phase: Phase
    mode: _Text
    num_workers: _Count
    waits: tuple[WaitStatus, ...]
    workers: tuple[WorkerStatus, ...]
    done: tuple[_Count, ...]
    """Workers whose script has finished."""
    dead: tuple[_Text, ...]
    """Failed ranks, in words."""
    joined: tuple[_Text, ...] = ()
    """Spares that have taken the places of failed workers, in words."""
    alone: tuple[_Count, ...] = ()
    """Servers whose shard has lost its replica."""
    registrar: _Text = ""
    """Place of the coordinator and its standby; "" while both are as at the start."""
    spares: _Count = 0
    """Ranks that wait to take the place of a failed one."""
    slowest: _Count | None
    """The group that others wait for, or that is far behind."""
    others_wait: Annotated[float, Field(ge=0, le=1)]
    """Part of their time that the other groups wait more than it."""
    outcome: _Text = ""
    """How the job has ended, as summary.json says it."""


def write_status(run_directory: RunDirectory, status: Status) -> None:
    run_directory.write_text(NAME, status.model_dump_json(indent=1) + "\n")


def read_status(run_dir: Path) -> Status:
    """Raises :class:`ConfigError`."""
    path = run_dir / NAME
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise ConfigError(f"{path} is damaged: {path.stat().st_size} bytes")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{run_dir} has no {NAME}: no job of several ranks writes there, or it has not come to "
            "placing its ranks"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        return Status.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its JSON"
        raise ConfigError(
            f"{path} is damaged or of another version of psdist: {where}: {first['msg']}"
        ) from None
