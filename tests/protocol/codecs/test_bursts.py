"""Every N-th push has no codec, over the virtual network: each message has its round's
codec, both ends agree, and replies continue as without bursts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.codecs.wire import Wire, WireFrom
from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode, Kind
from tests.protocol.codecs.test_codec_changes import HeardNetwork
from tests.protocol.codecs.test_codecs import Thirds
from tests.protocol.codecs.test_relative import SCHEDULE, held_by_servers, in_workers, parameters
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import with_modes

PUSHES: Final = Wire(
    push=TopK(0.2),
    reply=RAW,
    seed=5,
    burst=2,
    later=(
        WireFrom(round=3, push=Sign(), reply=RAW),
        WireFrom(round=5, push=Sign(), reply=RAW, burst=3),
    ),
)
BOTH: Final = Wire(
    push=TopK(0.1),
    reply=Quantized("int8"),
    seed=5,
    is_relative=True,
    compare_every=1,
    burst=3,
)


@pytest.mark.parametrize("first", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["one mode", "modes that change"])
def test_every_schedule_ends_and_keeps_its_rules(first: int, is_mixed: bool) -> None:
    for seed in range(first, 4 * first + 3):
        schedule = (with_modes if is_mixed else Schedule.from_seed)(seed)
        try:
            prove(play(schedule, wire=PUSHES, make_worker=Thirds))
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error


def test_every_message_names_the_codec_of_its_round_and_all_workers_hold_the_same() -> None:
    network = HeardNetwork()
    job = play(SCHEDULE, wire=BOTH, network=network)
    prove(job)
    expected = {
        (int(Kind.PUSH), clock, int(CodecCode.PLAIN if clock in (2, 5) else CodecCode.TOPK))
        for clock in range(8)
    }
    expected |= {(int(Kind.REPLY), clock, int(CodecCode.INT8)) for clock in range(8)}
    assert network.heard == expected
    for each in in_workers(job):
        assert torch.equal(each, held_by_servers(job))
    assert not torch.equal(held_by_servers(job), parameters(job))
    assert all(worker.loop.replies.num_differing == 0 for worker in job.workers)


def test_results_are_the_same_bit_by_bit_whatever_the_network_and_the_servers() -> None:
    first, again = (
        play(each, wire=BOTH)
        for each in (SCHEDULE, replace(SCHEDULE, jitter_s=1e-3, seed=11, servers=3))
    )
    assert torch.equal(parameters(again), parameters(first))
    # No reply comes in full because of a burst.
    without = play(SCHEDULE, wire=replace(BOTH, burst=0))
    assert not torch.equal(parameters(without), parameters(first))
    pulled = [
        sum(worker.loop.core.counts().bytes_pulled for worker in job.workers)
        for job in (first, without)
    ]
    assert pulled[0] == pulled[1]


def test_who_has_other_bursts_is_refused_in_one_line() -> None:
    class Differing(VirtualJob):
        @property
        def wire(self) -> Wire:
            """Servers are created first; workers get their wire from the job."""
            return replace(BOTH, burst=4)

        @wire.setter
        def wire(self, _wire: Wire) -> None:
            pass

    job = Differing(SCHEDULE, wire=BOTH)
    with pytest.raises(ProtocolError, match=r"are expected in round 2; do all ranks run"):
        job.network.run()
