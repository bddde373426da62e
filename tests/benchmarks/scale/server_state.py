"""What a message costs in the server's state machine, for 2 to 256 groups.

    python -m tests.benchmarks.scale.server_state
    python -m tests.benchmarks.scale.server_state --late      # replies stay open, 1,024 groups too

Time: medians over rounds of one push per group and chunk. Instructions: Python bytecodes
executed inside psdist, counted by the interpreter's own tracing, hence the same in every run.
Both are to be flat in the number of groups: that is what the clocks kept by counts are for.
``--late``: the replies about a chunk are sent after all groups have pushed it. Until then updates
wait for a parameter buffer, each in a receive slot of its own (async).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from types import FrameType
from typing import Any

from psdist.protocol.control import Register, Settings, Setup
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Dtype, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import Accept, Built, Reply, ReplySent
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.state import ServerCore

NUM_CHUNKS = 8
GROUPS = (2, 8, 32, 64, 256)
ROUNDS = 12
LATE_GROUPS = (2, 32, 256, 1024)
LATE_ROUNDS = 3


def make_server(mode: str, num_groups: int, num_chunks: int, *, slots: int = 8) -> ServerCore:
    """A server that holds the chunks; no group has registered."""
    core = assemble_core(
        server=0,
        make_rule=rule_for(mode, staleness=3),
        groups=[(worker,) for worker in range(num_groups)],
    )
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    sizes = (4,) * num_chunks
    rule = PayloadRule(
        codec=CodecCode.RAW,
        name="raw",
        dtypes=(Dtype.FLOAT32,) * num_chunks,
        smallest=sizes,
        largest=sizes,
    )
    core.handle(
        Built(
            range(num_chunks),
            [Frame(None, capacity=4) for _ in range(slots)],
            initials=rule,
            pushes=rule,
            num_pieces=1,
            num_optimizer_groups=1,
        )
    )
    return core


def make_core(mode: str, num_groups: int, *, slots: int = 8) -> ServerCore:
    core = make_server(mode, num_groups, NUM_CHUNKS, slots=slots)
    hyper = pack_hyperparameters([{"lr": 0.1}])
    for group in range(num_groups):
        peer = worker_id(group)
        core.handle(ControlArrived(peer, Register(group=group, workers=[group], clock=0)))
        core.handle(ControlArrived(peer, Settings(version=1, hyper=hyper, absent=[])))
    return core


def one_round(core: ServerCore, num_groups: int, clock: int, *, is_late: bool = False) -> int:
    """Every group pushes every chunk once; returns the number of messages handled. ``is_late``: the
    replies are sent after the last push of the chunk."""
    messages = 0
    pending: list[Any] = []
    late: deque[ReplySent] = deque()
    for chunk in range(NUM_CHUNKS):
        for group in range(num_groups):
            peer = worker_id(group)
            header = Header(
                kind=Kind.PUSH, sender=peer, group=group, chunk=chunk, clock=clock,
                length=4, settings=1, weight=1.0,
                dtype=Dtype.FLOAT32,
            )  # fmt: skip
            pending.append(Offered(peer, Kind.PUSH, chunk, 4, header, clock=clock))
            while pending or (late and group == num_groups - 1):
                if not pending:
                    pending.append(late.popleft())
                messages += isinstance(pending[0], Offered)
                for action in core.handle(pending.pop(0)):
                    if isinstance(action, Accept):
                        ticket = action.ticket
                        pending.append(Arrived(ticket.sender, ticket, action.slot))
                    elif isinstance(action, Reply):
                        (late if is_late else pending).append(ReplySent(action.token))
    return messages


def time_per_message_us(
    mode: str, num_groups: int, *, rounds: int = ROUNDS, slots: int = 8, is_late: bool = False
) -> float:
    core = make_core(mode, num_groups, slots=slots)
    times = []
    for clock in range(rounds):
        before_s = time.perf_counter()
        messages = one_round(core, num_groups, clock, is_late=is_late)
        times.append((time.perf_counter() - before_s) / messages)
    return statistics.median(times) * 1e6


def bytecodes_per_message(mode: str, num_groups: int) -> float:
    core = make_core(mode, num_groups)
    one_round(core, num_groups, 0)
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if event == "call":
            if "psdist" not in frame.f_globals.get("__name__", ""):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            count += 1
        return trace

    sys.settrace(trace)
    try:
        messages = one_round(core, num_groups, 1)
    finally:
        sys.settrace(None)
    return count / messages


def main() -> None:
    if "--late" in sys.argv[1:]:
        print(f"{'groups':>6}  {'async, replies late: us/message':>31}")
        for num_groups in LATE_GROUPS:
            micros = time_per_message_us(
                "async", num_groups, rounds=LATE_ROUNDS, slots=2 * num_groups, is_late=True
            )
            print(f"{num_groups:>6}  {micros:>31.1f}")
        return
    print(f"{'groups':>6}  {'mode':<5}  {'us/message':>10}  {'bytecodes/message':>17}")
    for mode in ("sync", "ssp"):
        for num_groups in GROUPS:
            micros = time_per_message_us(mode, num_groups)
            codes = bytecodes_per_message(mode, num_groups)
            print(f"{num_groups:>6}  {mode:<5}  {micros:>10.1f}  {codes:>17.0f}")


if __name__ == "__main__":
    main()
