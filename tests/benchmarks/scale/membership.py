"""What groups that come and go cost a server's state machine, to 10,000 groups.

    python -m tests.benchmarks.scale.membership

*register*: every group registers; *collective*: every group is suspended and all are resumed;
*touch*: then each chunk is looked at once, and catches up; *one late*: a collective that a group
enters last, after it has pushed every chunk once more while all others were suspended, without the
push's own cost. Medians of ``REPEATS``, milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from psdist.protocol.control import Control, Register, Resume, Suspend
from psdist.protocol.events import ControlArrived
from psdist.protocol.header import NEVER
from psdist.protocol.ids import COORDINATOR, worker_id
from psdist.servers.protocol.actions import Fail
from psdist.servers.protocol.state import ServerCore
from tests.benchmarks.scale.server_state import make_server

SIZES = ((100, 100), (1_000, 1_000), (10_000, 256))
REPEATS = 10


def measure(mode: str, num_groups: int, num_chunks: int) -> dict[str, float]:
    """Milliseconds of each part, once."""
    core = make_server(mode, num_groups, num_chunks)
    groups = range(num_groups)
    times: dict[str, float] = {}

    def part(name: str, do: Callable[[], None]) -> None:
        before_s = time.perf_counter()
        do()
        times[name] = (time.perf_counter() - before_s) * 1e3

    registers = [Register(group=group, workers=[group], clock=0) for group in groups]
    suspends = [Suspend(group=group, clock=0, seq=1) for group in groups]
    part("register", lambda: _tell(core, registers))
    part("collective", lambda: _tell(core, [*suspends, Resume(seq=1)]))
    part("touch", lambda: _look_at_all(core))

    late = [Suspend(group=group, clock=0, seq=2) for group in groups]

    def one_late() -> None:
        _tell(core, late[:-1])
        _look_at_all(core)
        _tell(core, [late[-1], Resume(seq=2)])
        _look_at_all(core)

    part("one late", one_late)
    return times


def _tell(core: ServerCore, messages: Iterable[Control]) -> None:
    for message in messages:
        group = getattr(message, "group", None)
        peer = COORDINATOR if group is None else worker_id(group)
        actions = core.handle(ControlArrived(peer, message))
        assert not any(isinstance(action, Fail) for action in actions)


def _look_at_all(core: ServerCore) -> None:
    for index, chunk in core.chunk_states.items():
        assert core._chunk_of(COORDINATOR, index) is chunk
        assert chunk.clock.min_done != NEVER


def main() -> None:
    parts = ("register", "collective", "touch", "one late")
    print(f"{'groups':>6}  {'chunks':>6}  {'mode':<5}" + "".join(f"{each:>12}" for each in parts))
    for num_groups, num_chunks in SIZES:
        for mode in ("sync", "ssp"):
            runs = [measure(mode, num_groups, num_chunks) for _ in range(REPEATS)]
            medians = [statistics.median(run[part] for run in runs) for part in parts]
            print(
                f"{num_groups:>6}  {num_chunks:>6}  {mode:<5}"
                + "".join(f"{each:>12.1f}" for each in medians)
            )


if __name__ == "__main__":
    main()
