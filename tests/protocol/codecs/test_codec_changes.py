"""Codecs that change within a run, over the virtual network: each message has its round's codec,
both ends agree, and servers store exactly what workers hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.codecs.wire import Wire, WireFrom
from psdist.config.modes import ModeFrom
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import CodecCode, Header, Kind
from tests.protocol.codecs.test_codecs import Thirds
from tests.protocol.codecs.test_reader_copies import SCHEDULE as SSP
from tests.protocol.codecs.test_reader_copies import copies_of, held
from tests.protocol.codecs.test_relative import SCHEDULE, held_by_servers, in_workers, parameters
from tests.support.rounding import Rounding
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.network import VirtualNetwork
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import with_modes

EXACT = Exact()
CASTS: Final = Wire(
    push=EXACT,
    reply=Rounding("float16"),
    seed=5,
    later=(
        WireFrom(round=1, push=TopK(0.2), reply=EXACT),
        WireFrom(round=3, push=Rounding("bfloat16"), reply=Rounding("bfloat16")),
        WireFrom(round=4, push=Sign(), reply=EXACT),
        WireFrom(round=6, push=EXACT, reply=Rounding("float16")),
    ),
)
RELATIVE: Final = Wire(
    push=Quantized("int4"),
    reply=Sign(),
    seed=5,
    is_relative=True,
    compare_every=1,
    later=(
        WireFrom(round=2, push=TopK(0.1), reply=Quantized("int8")),
        WireFrom(round=4, push=EXACT, reply=EXACT),
        WireFrom(round=6, push=Sign(), reply=Sign(), exact_in_replies=("*1",)),
    ),
)
COPIES: Final = replace(RELATIVE, has_copies=True)


@pytest.mark.parametrize("first", [0, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["one mode", "modes that change"])
def test_every_schedule_ends_and_keeps_its_rules_while_codecs_change(
    first: int, is_mixed: bool
) -> None:
    for seed in range(first, first + 10):
        schedule = (with_modes if is_mixed else Schedule.from_seed)(seed)
        try:
            prove(play(schedule, wire=CASTS, make_worker=Thirds))
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error


def test_all_workers_hold_what_their_servers_know_across_changes_in_sync() -> None:
    job, again = (play(replace(SCHEDULE, servers=servers), wire=RELATIVE) for servers in (2, 3))
    prove(job)
    for each in in_workers(job):
        assert torch.equal(each, held_by_servers(job))
    assert not torch.equal(held_by_servers(job), parameters(job)), "the last codec leaves nothing"
    assert torch.equal(parameters(job), parameters(again))
    assert all(worker.loop.replies.num_differing == 0 for worker in job.workers)


def test_without_a_codec_in_the_last_rounds_workers_hold_the_servers_own() -> None:
    job = play(SCHEDULE, wire=replace(RELATIVE, later=RELATIVE.later[:2]))
    prove(job)
    for each in in_workers(job):
        assert torch.equal(each, parameters(job))


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_every_reader_holds_what_its_servers_know_across_changes(mode: str) -> None:
    job = play(replace(SSP, mode=mode), wire=COPIES)
    prove(job)
    for worker in job.workers:
        assert worker.loop.replies.num_differing == 0
        mine, theirs = held(worker), copies_of(job, worker)
        assert mine.keys() == theirs.keys() == set(worker.mine)
        assert all(torch.equal(mine[chunk], theirs[chunk]) for chunk in mine)


def test_copies_end_exact_where_the_run_ends_in_sync_without_a_codec() -> None:
    schedule = replace(SSP, later=(ModeFrom(4, "sync"),))
    job = play(schedule, wire=replace(COPIES, later=COPIES.later[:2]))
    prove(job)
    for worker in job.workers:
        mine = held(worker)
        assert all(torch.equal(mine[chunk], job.parameters_of(chunk)) for chunk in mine)


class HeardNetwork(VirtualNetwork):
    """Which codecs messages of each kind and round have named."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.heard: set[tuple[int, int, int]] = set()

    def transmit(self, sender: int, peer: int, frame: Frame) -> None:
        header = Header.unpack(frame.header)
        if header.length and header.kind in (Kind.PUSH, Kind.REPLY):
            self.heard.add((int(header.kind), header.clock, header.codec))
        super().transmit(sender, peer, frame)


def test_every_message_names_the_codec_of_its_round() -> None:
    network = HeardNetwork()
    play(SCHEDULE, wire=RELATIVE, network=network)
    codes = [
        *((CodecCode.INT4, CodecCode.SIGN),) * 2,
        *((CodecCode.TOPK, CodecCode.INT8),) * 2,
        *((CodecCode.PLAIN, CodecCode.PLAIN),) * 2,
        *((CodecCode.SIGN, CodecCode.SIGN),) * 2,
    ]
    expected = {(int(Kind.PUSH), clock, int(push)) for clock, (push, _) in enumerate(codes)}
    expected |= {(int(Kind.REPLY), clock, int(reply)) for clock, (_, reply) in enumerate(codes)}
    assert network.heard == expected


@pytest.mark.parametrize("is_push", [True, False], ids=["pushes", "replies"])
def test_who_has_another_schedule_is_refused_in_one_line(is_push: bool) -> None:
    """Workers that change a round later than their servers."""
    raw = {"reply": RAW} if is_push else {"push": RAW}

    def changing(start: int) -> Wire:
        later = replace(RELATIVE.later[0], round=start, **raw)  # type: ignore[arg-type]
        return replace(RELATIVE, later=(later,), is_relative=not is_push, **raw)

    class Differing(VirtualJob):
        @property
        def wire(self) -> Wire:
            """Servers are created first; workers get their wire from the job."""
            return changing(3)

        @wire.setter
        def wire(self, _wire: Wire) -> None:
            pass

    job = Differing(SCHEDULE, wire=changing(2))
    with pytest.raises(ProtocolError, match=r"are expected in round 2; do all ranks run"):
        job.network.run()
