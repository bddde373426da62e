"""The wire format chosen by the settings: the codecs of a run that chooses them."""

from __future__ import annotations

import math

from psdist.codecs.schemes.plain import Exact
from psdist.config.codec_rounds import ladder_of
from psdist.config.codec_specs import text_of_both
from psdist.config.settings import RunConfig
from psdist.protocol.partition import Partition, Piece
from psdist.ranks.wire import codecs_of_ladder, codecs_of_rounds, link_of_chunks, wire_of
from psdist.topology.plan import LinkLoad, Plan

PIECE = Piece(name="p", shape=(100,), stride=(1,), dtype="float32", optimizer_group=0)
PARTITION = Partition.cut([PIECE], chunk_bytes=256)


def test_a_run_that_chooses_its_codecs_begins_with_the_first_and_may_have_them_all() -> None:
    config = RunConfig(codec="auto")
    wire = wire_of(config)
    assert wire.is_ladder
    assert wire.is_shared
    assert [each.push.name for each in wire.later] == ["fp16", "int8", "int4", "int4"]
    assert [each.exact_in_pushes for each in wire.later[:2]] == [(), config.codec_exact]
    assert [(each.round, each.push, each.push_code) for each in codecs_of_rounds(config)] == [
        (0, "none", wire.push.code),
    ]
    ladder = codecs_of_ladder(config)
    assert [each.name for each in ladder] == [text_of_both(each) for each in ladder_of(config)]
    assert [each.push_code for each in ladder[1:]] == [each.push.code for each in wire.later]
    assert codecs_of_ladder(RunConfig(codec="int8")) == ()


def test_bursts_are_told_by_round_and_have_the_replies_of_the_others() -> None:
    schedule = "0: sync sign+burst:3/int8; 7: sync int4/int8; 9: sync int8+burst:2"
    config = RunConfig(schedule=schedule)
    told = [(each.round, each.burst, each.burst_code) for each in codecs_of_rounds(config)]
    assert told == [(0, 3, Exact.code), (7, 0, 0), (9, 2, Exact.code)]
    wire = wire_of(config)
    pushes, replies = wire.pushes(PARTITION), wire.replies(PARTITION)
    assert pushes is not None
    assert replies is not None
    assert [pushes.at(clock).codec.name for clock in range(12)] == [
        *("sign", "sign", "none", "sign", "sign", "none", "sign", "int4", "int4"),
        *("none", "int8", "none"),
    ]
    assert len({id(replies.at(clock)) for clock in range(9)}) == 1
    assert [replies.at(clock).codec.name for clock in (8, 9, 10)] == ["int8", "none", "none"]


def test_chunks_follow_the_slowest_host_unless_results_depend_on_them() -> None:
    links = (
        LinkLoad(name="h1", kind="node", num_bytes=1.0, bytes_per_s=125e6),
        LinkLoad(name="h2", kind="node", num_bytes=1.0, bytes_per_s=32e6),
        LinkLoad(name="rack1", kind="switch", num_bytes=1.0, bytes_per_s=8e6),
    )
    plan = Plan(
        ranks=(),
        weights=(1.0,),
        links=links,
        model_bytes=1.0,
        placement="auto",
        cost_s=0.0,
        bound_s=0.0,
        compared={},
        source="",
    )
    assert link_of_chunks(RunConfig(), plan) == 32e6
    assert link_of_chunks(RunConfig(codec="int8"), plan) == math.inf
    assert link_of_chunks(RunConfig(), plan, max_norm=1.0) == math.inf
    assert link_of_chunks(RunConfig(), None) == math.inf
