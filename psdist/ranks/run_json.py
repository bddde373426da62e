"""``run.json``: what the coordinator promises of a parameter set, for `psdist check`.

promise(context, status, 0, partition, owners, setup)        # psdist.history.run_record.RunRecord
"""

from __future__ import annotations

import zlib
from typing import Literal

from psdist.config.compatibility import recorded_settings, uncounted
from psdist.config.modes import mode_by
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.history.writers import RunRecord, slice_places
from psdist.protocol.control import Setup
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.ruling import highest_bound
from psdist.ranks.reporting.run_status import RunStatus
from psdist.ranks.session import JobSession
from psdist.ranks.wire import wire_of
from psdist.version import VERSION


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
    begins = status.first_mode
    return RunRecord(
        psdist=VERSION,
        mode=begins.mode,
        staleness=begins.staleness,
        mode_by=mode_by(config),
        auto_staleness=highest_bound(config),
        schedule=status.schedule,
        codecs=status.first_codecs,
        ladder=status.ladder,
        groups=roles.groups,
        num_substitutes=roles.num_substitutes,
        slices=slice_places(lambda size: partition.slices(size, order), roles.groups),
        num_servers=roles.num_servers,
        set_index=set_index,
        num_chunks=len(partition.chunks),
        owners=owners,
        checksum_every=config.checksum_every,
        local_steps_by_speed=_local_steps_by(config, "speed"),
        local_steps_by_loss=_local_steps_by(config, "loss"),
        has_rounds_by_pass=config.local_steps == "epoch",
        has_copies=wire_of(config).has_copies,
        begins_with_state=bool(setup.state),
        restored=first.checkpoint if first is not None else "",
        first_clocks=first.clocks if first is not None else (),
        missed_running=missed_running,
        attempt=context.attempt,
        restored_attempt=(
            context.restored.checkpoint.index.attempt if context.restored is not None else 0
        ),
        cut=zlib.crc32(partition.encode()),
        **recorded_settings(config),
    )


def _local_steps_by(config: RunConfig, rule: Literal["speed", "loss"]) -> int:
    """Return the local steps; 0 if another rule decides them."""
    return counted_steps(config) if config.steps_by == rule else 0
