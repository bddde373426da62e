"""``run.json``: what the coordinator promises of a parameter set, for `psdist check`.

promise(context, status, 0, partition, owners, setup)        # psdist.history.run_record.RunRecord
"""

from __future__ import annotations

import zlib
from typing import Any, Final, Literal

from psdist.config.compatibility import recorded_settings, uncounted
from psdist.config.modes import lag_of_tables, mode_by, mode_of_tables, row_staleness
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.history.run_record import CodecsSince
from psdist.history.writers import RunRecord, slice_places
from psdist.protocol.control import Setup
from psdist.protocol.header import CodecCode
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.ruling import highest_bound
from psdist.ranks.reporting.run_status import RunStatus
from psdist.ranks.session import JobSession
from psdist.ranks.wire import wire_of
from psdist.version import VERSION

_OF_MODE: Final = ("mode", "staleness", "mode_by", "auto_staleness", "schedule")


def promise(
    context: JobSession,
    status: RunStatus,
    set_index: int,
    partition: Partition,
    owners: tuple[int, ...],
    setup: Setup,
) -> RunRecord:
    """Return the promise for a set that the chief has described; ``owners``: a server per chunk."""
    config, roles = context.config, context.roles
    order = setup.order
    first = context.first_clocks(set_index)
    missed_running: tuple[int, ...] = ()
    if first is not None and "rounds_missed" not in uncounted(config):
        none_missed = (0,) * len(roles.groups)
        missed_running = none_missed if first.misses is None else first.misses.running
    of_set = _of_tables(config, status) if setup.tables else _of_parameters(config, status)
    return RunRecord(
        psdist=VERSION,
        groups=roles.groups,
        num_substitutes=roles.num_substitutes,
        slices=slice_places(lambda size: partition.slices(size, order), roles.groups),
        num_servers=roles.num_servers,
        set_index=set_index,
        num_chunks=len(partition.chunks),
        owners=owners,
        local_steps_by_speed=_local_steps_by(config, "speed"),
        local_steps_by_loss=_local_steps_by(config, "loss"),
        has_rounds_by_pass=config.local_steps == "epoch",
        begins_with_state=bool(setup.state),
        restored=first.checkpoint if first is not None else "",
        first_clocks=first.clocks if first is not None else (),
        missed_running=missed_running,
        attempt=context.attempt,
        restored_attempt=(
            context.restored.checkpoint.index.attempt if context.restored is not None else 0
        ),
        cut=zlib.crc32(partition.encode()),
        **recorded_settings(config) | of_set,
    )


def _of_parameters(config: RunConfig, status: RunStatus) -> dict[str, Any]:
    """Return the promises that a set of tables does not share."""
    return {
        "mode": status.first_mode.mode,
        "staleness": status.first_mode.staleness,
        "mode_by": mode_by(config),
        "auto_staleness": highest_bound(config),
        "schedule": status.schedule,
        "codecs": status.first_codecs,
        "ladder": status.ladder,
        "checksum_every": config.checksum_every,
        "has_copies": wire_of(config).has_copies,
    }


def _of_tables(config: RunConfig, status: RunStatus) -> dict[str, Any]:
    own = mode_of_tables(config)
    mode = {key: _of_parameters(config, status)[key] for key in _OF_MODE}
    if own is not None:
        bound = own.staleness if own.mode == "ssp" else None
        mode = {"mode": own.mode, "staleness": bound}
    rows = CodecsSince(round=0, push="rows", pull="rows", push_code=CodecCode.ROWS)
    return {
        **mode,
        "codecs": (rows,),
        "pipeline": lag_of_tables(config),
        "row_staleness": row_staleness(config),
    }


def _local_steps_by(config: RunConfig, rule: Literal["speed", "loss"]) -> int:
    """Return the local steps; 0 if another rule decides them."""
    return counted_steps(config) if config.steps_by == rule else 0
