"""Rows on a server: a round's sum, its step, the replies, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psdist.errors import ProtocolError, UserError
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.servers.protocol.actions import Fold, Reply, ReplyToken, StartSum
from psdist.servers.tables.checkpoints import region_of, rows_in
from psdist.servers.tables.shard import MOST_EARLY, TableShard
from psdist.tables.payloads import largest_push, largest_rows, read_push, read_rows
from psdist.tables.specs import Ids, Rows, TableSpecs
from psdist.tables.store import RowStore, first_rows
from tests.support.tables import (
    drawn_ids,
    drawn_rows,
    ids_of_part,
    no_ids,
    push_of,
    slot_of,
    specs_of,
    step_of,
)

HYPER = pack_hyperparameters([{"lr": 0.1}, {"lr": 0.05}])
Drawn = Sequence[tuple[Ids, Rows]]


def shard_of(specs: TableSpecs, *parts: int) -> TableShard:
    return TableShard(specs, chunks=parts, largest_push=largest_push(specs))


def sum_up(shard: TableShard, part: int, clock: int, pushes: Sequence[Drawn]) -> None:
    """A round of one push of each group, in sync."""
    slots = [push_of(shard.specs, rows, part) for rows in pushes]
    shard.start_sum(StartSum(part, slots[0], 1.0, clock))
    for slot in slots[1:]:
        shard.fold(Fold(part, slot, slots[0], 1.0, clock))
        assert slot.payload is not None
        slot.payload[:] = bytes(len(slot.payload))  # the slot is free: another message comes
    groups = range(len(pushes))
    shard.step(step_of(part, clock, groups, HYPER, scale=1 / len(pushes)))


def rows_of(shards: Sequence[TableShard], specs: TableSpecs, ids: Sequence[Ids]) -> list[Rows]:
    """The rows of ``ids``, by table, whichever shard has them."""
    found = [np.zeros((len(each), t.dim), np.float32) for each, t in zip(ids, specs.tables)]  # noqa: B905
    for shard in shards:
        for part in shard.parts:
            wanted = ids_of_part(specs, ids, part)
            payload = shard.rows_of(part, wanted)
            for table, rows in enumerate(read_rows(specs, payload, wanted, first_rows(specs))):
                found[table][np.isin(ids[table], wanted[table])] = rows
    return found


def test_all_numbers_of_servers_give_the_same_bits() -> None:
    random = np.random.default_rng(1)
    rounds = [[drawn_rows(specs_of(1), random) for _ in range(3)] for _ in range(5)]
    every = [np.arange(500), np.arange(500)]
    found = []
    for num_parts in (1, 2, 3, 8):
        specs = specs_of(num_parts)
        shards = [shard_of(specs, part) for part in range(num_parts)]
        for clock, pushes in enumerate(rounds):
            for part, shard in enumerate(shards):
                sum_up(shard, part, clock, pushes)
        found.append([each.tobytes() for each in rows_of(shards, specs, every)])
    assert found[1:] == found[:1] * 3


def test_a_round_is_the_weighted_mean_of_its_pushes() -> None:
    specs, random = specs_of(1, "RowSGD"), np.random.default_rng(2)
    shard, hyper = shard_of(specs, 0), pack_hyperparameters([{"lr": 0.1}])
    one, other = drawn_rows(specs, random), drawn_rows(specs, random)
    first = shard.parts[0].stores[0].gather(np.arange(500)).astype(np.float64)
    slot = push_of(specs, one, 0)
    shard.start_sum(StartSum(0, slot, 2.0, 0))
    shard.fold(Fold(0, push_of(specs, other, 0), slot, 0.5, 0))
    shard.step(step_of(0, 0, (0, 1), hyper, scale=1 / 2.5))
    total = np.zeros((500, 2))
    total[one[0][0]] += 2.0 * one[0][1]
    total[other[0][0]] += 0.5 * other[0][1]
    now = shard.parts[0].stores[0].gather(np.arange(500))
    assert np.abs(now - (first - 0.1 * total / 2.5)).max() < 1e-6
    assert shard.statistics().rows == len(np.union1d(one[0][0], other[0][0]))


def test_a_push_alone_is_a_step_with_a_scaled_learning_rate() -> None:
    specs = specs_of(1, "RowSGD")
    shard, hyper = shard_of(specs, 0), pack_hyperparameters([{"lr": 0.1}])
    rows = [(np.array([3, 7]), np.ones((2, 2), np.float32))]
    before = shard.parts[0].stores[0].gather(np.array([3, 7])).copy()
    step = step_of(0, 4, (1,), hyper, slot=push_of(specs, rows, 0))
    step.lr_scale = 0.5
    shard.step(step)
    assert np.allclose(shard.parts[0].stores[0].gather(np.array([3, 7])), before - 0.05)


def test_a_reply_brings_the_rows_that_its_push_wanted_and_no_other_does() -> None:
    specs, random = specs_of(2), np.random.default_rng(3)
    shard = shard_of(specs, 1)
    shard.group_of = {70: 0, 71: 1}.get
    wanted = ids_of_part(specs, [drawn_ids(each, random) for each in specs.tables], 1)
    slot = push_of(specs, drawn_rows(specs, random), 1, wanted=wanted)
    shard.start_sum(StartSum(1, slot, 1.0, 0))
    shard.step(step_of(1, 0, (0,), HYPER))
    assert slot.payload is not None
    slot.payload[:] = bytes(len(slot.payload))
    memory = shard.payload(1, 0)
    assert len(memory) == largest_rows(specs)

    def answer(peer: int, clock: int, pull_number: int = 0) -> list[Rows]:
        token = ReplyToken(peer, 1, 0, clock + 1)
        reply = Reply(token, clock, 1, 0, pull_number, 2)
        payload = memory[: shard.encode(reply, into=memory)]
        ids = wanted if (peer, clock, pull_number) == (70, 0, 0) else [each[:0] for each in wanted]
        return read_rows(specs, payload, ids, first_rows(specs))

    for other in (answer(71, 0), answer(70, 1), answer(70, 0, 5), answer(99, 0)):
        assert [len(each) for each in other] == [0, 0]
    brought = answer(70, 0)
    for store, ids, rows in zip(shard.parts[1].stores, wanted, brought, strict=True):
        assert rows.tobytes() == store.gather(ids).tobytes()


def test_a_group_never_has_many_wanted_rows_kept() -> None:
    specs = specs_of(1)
    shard = shard_of(specs, 0)
    wanted = [np.array([1]), np.array([2])]
    for clock in range(50):
        shard.start_sum(StartSum(0, push_of(specs, no_rows(specs), 0, wanted=wanted), 1.0, clock))
        shard.step(step_of(0, clock, (0,), HYPER))
    assert sorted(shard.parts[0].wanted[0]) == [46, 47, 48, 49]


def no_rows(specs: TableSpecs) -> Drawn:
    return [(np.empty(0, np.int64), np.empty((0, each.dim), np.float32)) for each in specs.tables]


def test_rows_of_a_push_in_several_messages_are_applied_when_the_last_is_here() -> None:
    specs, random = specs_of(1), np.random.default_rng(4)
    rows = drawn_rows(specs, random)
    whole, cut = shard_of(specs, 0), shard_of(specs, 0)
    sum_up(whole, 0, 0, [rows])
    halves = [[(ids[:5], its[:5]) for ids, its in rows], [(ids[5:], its[5:]) for ids, its in rows]]
    early = read_push(specs, push_of(specs, halves[0], 0).payload, part=0)  # type: ignore[arg-type]
    assert not cut.take_early(0, 0, 0, 1, early)
    assert cut.statistics().rows == 0
    cut.start_sum(StartSum(0, push_of(specs, halves[1], 0, num_before=1), 1.0, 0))
    assert cut.statistics().rows == 0
    cut.step(step_of(0, 0, (0,), HYPER))
    every = [np.arange(500), np.arange(500)]
    assert [each.tobytes() for each in rows_of([cut], specs, every)] == [
        each.tobytes() for each in rows_of([whole], specs, every)
    ]
    assert not cut.parts[0].early[0]


def test_early_messages_are_counted_and_dropped() -> None:
    specs = specs_of(1)
    shard = shard_of(specs, 0)
    push = read_push(specs, push_of(specs, no_rows(specs), 0).payload, part=0)  # type: ignore[arg-type]
    assert shard.take_early(0, 0, 3, 2, push) == "message 2 of iteration 3 after 0"
    for number in range(1, MOST_EARLY + 1):
        assert not shard.take_early(0, 0, 3, number, push)
    assert "raise tables.max_rows" in shard.take_early(0, 0, 3, MOST_EARLY + 1, push)
    assert not shard.take_early(0, 0, 3, 1, push)  # again
    assert not shard.take_early(0, 0, 4, 1, push)
    shard.forget(0, 0, newest=3)
    assert sorted(shard.parts[0].early[0]) == [3]
    shard.start_sum(StartSum(0, push_of(specs, no_rows(specs), 0), 1.0, 3))
    with pytest.raises(
        ProtocolError, match=r"group 0, iteration 3: .* after 0 other messages; 1 a"
    ):
        shard.step(step_of(0, 3, (0,), HYPER))


def refused(specs: TableSpecs, payload: bytes | memoryview, match: str) -> None:
    shard, honest = shard_of(specs, 0), push_of(specs, no_rows(specs), 0)
    shard.start_sum(StartSum(0, honest, 1.0, 5))
    shard.fold(Fold(0, slot_of(payload), honest, 1.0, 5))
    with pytest.raises(ProtocolError, match=match):
        shard.step(step_of(0, 5, (0, 3), HYPER))
    assert shard.statistics().rows == 0


def test_a_malformed_push_names_its_group() -> None:
    specs = specs_of(2)
    ids = ids_of_part(specs, [np.arange(500), np.arange(500)], 0)
    rows = [
        (each[:5], np.ones((5, t.dim), np.float32))
        for each, t in zip(ids, specs.tables, strict=True)
    ]
    good = push_of(specs, rows, 0).payload
    assert good is not None
    refused(specs, good[:-8], "^group 3, iteration 5: ")
    refused(specs, bytes(good) + bytes(64), "^group 3, iteration 5: ")
    refused(specs, b"x" * 64, "^group 3, iteration 5: .* begins with b'xxxx'")
    foreign = push_of(specs, [(each[::-1], its) for each, its in rows], 0).payload
    assert foreign is not None
    refused(specs, foreign, "group 3, iteration 5: ids of table table 0 that are not ascending")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(value: float) -> None:
    specs = specs_of(1)
    rows = [(np.array([1, 4]), np.ones((2, each.dim), np.float32)) for each in specs.tables]
    rows[1][1][1, 2] = value
    payload = push_of(specs, rows, 0).payload
    assert payload is not None
    shard, honest = shard_of(specs, 0), push_of(specs, no_rows(specs), 0)
    shard.start_sum(StartSum(0, honest, 1.0, 5))
    shard.fold(Fold(0, slot_of(payload), honest, 1.0, 5))
    with pytest.raises(ProtocolError, match=r"^table table 1: gradients .* infinity, of group 3; "):
        shard.step(step_of(0, 5, (0, 3), HYPER))


def test_a_server_without_memory_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, shard = specs_of(1), shard_of(specs_of(1), 0)
    rows = [(np.array([1, 4]), np.ones((2, each.dim), np.float32)) for each in specs.tables]
    sum_up(shard, 0, 0, [rows])

    def fails(*_: object, **_more: object) -> None:
        raise MemoryError("unable to allocate 3 GiB")

    expected = (
        r"^no memory for .* of tables on this server \(unable .* 3 GiB\); it stores 4 rows, 2"
    )
    monkeypatch.setattr(RowStore, "merge", fails)
    slot = push_of(specs, rows, 0)
    shard.start_sum(StartSum(0, slot, 1.0, 1))
    with pytest.raises(UserError, match=expected):
        shard.step(step_of(0, 1, (0,), HYPER))
    monkeypatch.setattr(RowStore, "gather_stored", fails)
    with pytest.raises(UserError, match=expected) as found:
        shard.rows_of(0, no_ids(specs))
    assert "\n" not in str(found.value)
    monkeypatch.setattr("psdist.servers.tables.shard.read_push", fails)
    with pytest.raises(UserError, match="no memory for a push of tables"):
        shard.fold(Fold(0, slot, slot, 1.0, 1))
    monkeypatch.setattr("psdist.servers.tables.shard.allocate", fails)
    with pytest.raises(UserError, match=r"no memory for 8 receive slots .* is 4096; lower"):
        shard.make_slots(8)


class Kept:
    """A checkpoint of parts in memory."""

    def __init__(self, shards: Sequence[TableShard]) -> None:
        found = [
            region_of(part, each.parts[part].stores, each.specs)
            for each in shards
            for part in each.parts
        ]
        self.regions = {each.piece: each for each in found}

    @property
    def num_pieces(self) -> int:
        return len(self.regions)

    def state(self, piece: int):  # type: ignore[no-untyped-def]
        return self.regions[piece].state

    def read(self, piece: int, key: str, start: int, length: int):  # type: ignore[no-untyped-def]
        return self.regions[piece].elements[key][start : start + length]


def restored(kept: Kept, specs: TableSpecs) -> list[TableShard]:
    shards = [shard_of(specs, part) for part in range(specs.num_parts)]
    for part, shard in enumerate(shards):
        for table, bucket, rows in rows_in(kept, specs, part):
            shard.parts[part].stores[table].restore(rows, first_bucket=bucket)
    return shards


@pytest.mark.parametrize("fields", [{}, {"admit": 2}, {"evict": "lru:300"}, {"num_rows": None}])
def test_rows_and_state_are_restored_with_any_number_of_parts(fields: dict[str, object]) -> None:
    """2 parts, then 3, then 1: bit by bit, and training continues with the same bits."""
    names = ("RowWiseAdagrad", "LazyAdam")
    random, specs = np.random.default_rng(5), specs_of(2, *names, **fields)
    table = specs.tables[0]
    pool = [np.sort(random.permutation(drawn_ids(table, random, most=400))) for _ in names]

    def draw() -> Drawn:
        chosen = [np.sort(random.choice(ids, len(ids) // 3, replace=False)) for ids in pool]
        return [
            (ids, random.standard_normal((len(ids), each.dim)).astype(np.float32))
            for ids, each in zip(chosen, specs.tables, strict=True)
        ]

    shards = [shard_of(specs, 0), shard_of(specs, 1)]
    for clock in range(6):
        rows = draw()
        for part, shard in enumerate(shards):
            sum_up(shard, part, clock, [rows])
    later, found = [draw() for _ in range(3)], []
    for num_parts in (3, 1, 2):
        specs = specs_of(num_parts, *names, **fields)
        again = restored(Kept(shards), specs)
        assert [each.tobytes() for each in rows_of(again, specs, pool)] == [
            each.tobytes() for each in rows_of(shards, shards[0].specs, pool)
        ]
        shards = again
        if not fields.get("evict"):
            trained = restored(Kept(shards), specs)
            for clock, rows in enumerate(later, start=6):
                for part, shard in enumerate(trained):
                    sum_up(shard, part, clock, [rows])
            found.append([each.tobytes() for each in rows_of(trained, specs, pool)])
    assert found[1:] == found[:1] * (len(found) - 1)
