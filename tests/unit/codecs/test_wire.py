"""The codec of each direction, what a receiver takes, and seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.codecs import RAW, seed_of
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.wire import RAW_WIRE, Wire, WireFrom, payload_rule
from psdist.config.codec_specs import Skip
from psdist.protocol.header import Dtype, Header, Kind
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.rounds import at_round
from tests.support.rounding import Rounding

PIECE = Piece(name="p", shape=(100,), stride=(1,), dtype="float32", optimizer_group=0)
PARTITION = Partition.cut([PIECE], chunk_bytes=256)


def test_runs_are_raw_both_ways() -> None:
    assert RAW_WIRE.push is RAW_WIRE.reply is RAW
    assert RAW.code == Header(kind=Kind.PUSH, sender=0).codec
    assert RAW_WIRE.pushes(PARTITION) is RAW_WIRE.replies(PARTITION) is None


def test_a_rule_takes_a_codecs_own_sizes_and_says_what_is_expected() -> None:
    assert [chunk.length for chunk in PARTITION.chunks] == [64, 64]
    header = Header(kind=Kind.PUSH, sender=0, chunk=1, length=80, codec=200, dtype=Dtype.FLOAT32)
    wire = Wire(push=Rounding("float16"), reply=RAW, seed=0)
    rule = payload_rule(wire.pushes(PARTITION), PARTITION)
    assert rule.takes(header)  # 36 values of the second chunk, and the head
    assert rule.takes(header._replace(length=8 + 256)), "all values as they are"
    assert not rule.takes(header._replace(length=7))
    assert not rule.takes(header._replace(length=265))
    assert not rule.takes(header._replace(length=256, codec=0))
    assert not rule.takes(header._replace(dtype=Dtype.FLOAT64))
    assert payload_rule(None, PARTITION).takes(header._replace(length=256, codec=0))
    assert rule.refusal(header._replace(codec=0)) == (
        "sent 80 bytes of chunk 1 by codec 0, dtype 1; 8 to 264 bytes by codec 200 (float16), "
        "dtype 1 are expected; do all ranks run the same version of psdist with the same settings?"
    )


def test_a_rule_takes_the_codec_of_the_messages_round() -> None:
    wire = Wire(
        push=Rounding("float16"),
        reply=RAW,
        seed=0,
        later=(
            WireFrom(round=3, push=Exact(), reply=RAW),
            WireFrom(round=5, push=Rounding("bfloat16"), reply=RAW),
        ),
    )
    rule = payload_rule(wire.pushes(PARTITION), PARTITION)
    header = Header(kind=Kind.PUSH, sender=0, chunk=0, length=136, dtype=Dtype.FLOAT32)
    codes = {200: (0, 2), 11: (3, 4), 201: (5, 1000)}
    for code, rounds in codes.items():
        for clock in (0, 2, 3, 4, 5, 1000):
            is_taken = rounds[0] <= clock <= rounds[1]
            assert rule.takes(header._replace(codec=code, clock=clock)) is is_taken, (code, clock)
    assert "272 bytes by codec 11 (none), dtype 1 are expected in round 4; do" in rule.refusal(
        header._replace(codec=200, clock=4)
    )
    assert payload_rule(wire.replies(PARTITION), PARTITION).is_raw
    assert wire.skips == ()
    assert replace(wire, skip=Skip(0.1)).skips == ((0, Skip(0.1)), (3, None), (5, None))


@pytest.mark.parametrize(
    ("later", "expected"), [([], "aaaa"), ([(1, "b")], "abbb"), ([(1, "b"), (3, "c")], "abbc")]
)
def test_each_round_has_the_newest_that_has_begun(
    later: list[tuple[int, str]], expected: str
) -> None:
    assert "".join(at_round("a", later, clock) for clock in range(4)) == expected


def test_who_has_the_senders_values_bit_by_bit_keeps_versions() -> None:
    codings = Wire(push=RAW, reply=Rounding("float16"), seed=0).replies(PARTITION)
    assert payload_rule(None, PARTITION).keeps_versions
    assert payload_rule(codings, PARTITION, is_relative=True).keeps_versions
    assert not payload_rule(codings, PARTITION).keeps_versions


def test_a_seed_is_another_for_every_run_sender_chunk_and_clock_and_else_the_same() -> None:
    seeds = {seed_of(*place) for place in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)]}
    assert len(seeds | {seed_of(0, 0, 0, 1), seed_of(0, 0, 0, 0)}) == 5
    assert seed_of(7, 2, 3, 4) == 2**63 - 1 & seed_of(7, 2, 3, 4)


def test_one_relative_reply_in_so_many_is_compared_and_chunks_take_turns() -> None:
    wire = Wire(push=RAW, reply=Rounding("float16"), seed=0, is_relative=True, compare_every=4)
    assert [wire.is_compared(1, clock) for clock in range(5)] == [False] * 3 + [True, False]
    assert wire.is_compared(0, 0)


def test_of_a_ladder_each_set_has_rounds_of_its_own_and_a_level_rules_when_it_is_said() -> None:
    wire = Wire(
        push=Exact(),
        reply=RAW,
        seed=0,
        is_ladder=True,
        later=(
            WireFrom(round=0, push=Rounding("float16"), reply=RAW),
            WireFrom(round=0, push=Rounding("bfloat16"), reply=RAW),
        ),
    )
    assert wire.turns is None
    one, other = wire.of_set(), wire.of_set()
    assert one.turns is not None
    rule, codings = payload_rule(one.pushes(PARTITION), PARTITION), one.pushes(PARTITION)
    assert codings is not None
    assert one.turns.begin(1, 4, 2)
    assert [rule.at(clock).name for clock in (0, 3, 4)] == ["none", "none", "bfloat16"]
    assert [codings.at(clock).codec.name for clock in (3, 4)] == ["none", "bfloat16"]
    untouched = other.pushes(PARTITION)
    assert untouched is not None
    assert untouched.at(900).codec.name == "none"
    raw = sum(chunk.num_bytes for chunk in PARTITION.chunks)
    sizes = [sum(each.usual_bytes for each in level) for level in codings.levels]
    assert one.sizes(PARTITION) == wire.sizes(PARTITION) == [raw + size for size in sizes]
    assert sizes[0] > sizes[1]
    assert replace(wire, is_ladder=False).of_set().turns is None
