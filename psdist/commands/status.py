"""`psdist status RUN_DIR`: who waits for whom, since when, and who is slow. Without MPI.

    main(Path("runs/a"))        # 0, or a ConfigError where there is nothing to read

Reads status.json, which the coordinator writes about once a second and when the job ends; one that
is old, of a job that has not ended, says that the coordinator is busy, stuck or gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psdist.commands import print_json
from psdist.protocol.ids import describe_workers
from psdist.report.status import Status, WorkerStatus, read_status

_OLD_S: Final = 10.0
_MOST_WORKERS: Final = 64


def main(run_dir: Path, *, as_json: bool = False) -> int:
    """Print how the job stands; 0."""
    status = read_status(run_dir)
    age_s = max(0.0, time.time() - status.at)
    has_summary = (run_dir / "summary.json").exists()
    if as_json:
        facts = {"age_s": age_s, "has_summary": has_summary}
        print_json("status", facts | status.model_dump())
        return 0
    for line in lines_of(status, age_s=age_s):
        print(line)
    if status.phase != "ended" and has_summary:
        print("  ended      summary.json exists: the job has ended")
    return 0


def lines_of(status: Status, *, age_s: float) -> list[str]:
    """``age_s``: how long ago it was written."""
    has_ended = status.phase == "ended"
    lines = [f"{status.phase}, {status.mode}, {status.num_workers} workers; told {age_s:.0f} s ago"]
    if has_ended:
        lines.append(f"  outcome    {status.outcome}")
    elif age_s > _OLD_S:
        lines.append(
            f"  old        server 0 has told nothing for {age_s:.0f} s: it is busy or stuck, or "
            "the job has ended"
        )
    for wait in status.waits:
        lines.append(
            f"  waiting    {wait.what}, for {wait.since_s:.0f} s: "
            f"{describe_workers(wait.absent) if wait.absent else 'nobody'} missing; "
            f"{describe_workers(wait.present) if wait.present else 'nobody'} there"
        )
    if status.slowest is not None:
        share = f", the others wait {status.others_wait:.0%} of their time more"
        lines.append(f"  slowest    group {status.slowest}{share * bool(status.others_wait)}")
    lines += [f"  failed     {who}" for who in status.dead]
    lines += [f"  joined     {what}" for what in status.joined]
    if status.alone:
        which = ", ".join(map(str, status.alone))
        lines.append(f"  one copy   of the shard of server {which}: another one is not whole")
    if status.registrar:
        lines.append(f"  coordinator  {status.registrar}")
    if status.spares and not has_ended:
        waits = "waits" if status.spares == 1 else "wait"
        lines.append(f"  spares     {status.spares}, which {waits} to take a failed rank's place")
    if status.done:
        lines.append(f"  finished   {describe_workers(status.done)}")
    shown = _furthest_behind_first(status.workers)[:_MOST_WORKERS]
    lines += [
        f"  worker {each.worker:<4} group {each.group}, iteration {each.clock}"
        + (f", epoch {each.epoch} batch {each.batch}" if each.epoch else "")
        + f"; the same for {each.same_s:.0f} s" * (not has_ended)
        + f"; waited {each.waited_s:.1f} s in steps"
        for each in shown
    ]
    if len(status.workers) > len(shown):
        lines.append(f"  ...        {len(status.workers) - len(shown)} workers further ahead")
    return lines


def _furthest_behind_first(workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    return sorted(workers, key=lambda each: (each.clock, each.worker))
