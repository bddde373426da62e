"""A plan as JSON: back as it was, and from any other bytes nothing but one line of refusal.

Of codec, checks and the types in plan.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.network import one_rack
from psdist.topology.plan import MAX_BYTES, LinkLoad, Plan, PlannedRank, decode, encode
from tests.support.hand_made_plans import hyperthreaded, machine_of, planned

CLUSTER = one_rack(["n1.example.org", "n2"], machine_of(hyperthreaded(8)), bytes_per_s=12e9)
PLAN = planned(
    CLUSTER,
    [
        ("n1.example.org", "server", [0]),
        ("n1.example.org", "worker", range(1, 8)),
        ("n2", "worker", range(1, 8)),
        ("n2", "server", [0]),
    ],
)

amounts = st.floats(0, 1e18)
texts = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)
hosts = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True)
indices = st.integers(-1, 7)
cpu_lists = st.lists(st.integers(0, 65535), min_size=1, max_size=8, unique=True).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    servers, workers = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    roles = draw(st.permutations(["server"] * servers + ["worker"] * workers))
    counts = {"server": 0, "worker": 0}
    ranks = []
    for rank, role in enumerate(roles):
        is_bound = draw(st.booleans())
        ranks.append(
            PlannedRank(
                rank=rank,
                host=draw(hosts),
                role="server" if role == "server" else "worker",
                index=counts[role],
                group=-1 if role == "server" else counts[role] // 2,
                cores=draw(cpu_lists) if is_bound else (),
                cpus=draw(cpu_lists) if is_bound else (),
                package=draw(indices),
                numa=draw(indices),
                gpu=draw(texts),
                nic=draw(texts),
            )
        )
        counts[role] += 1
    shares = [draw(st.integers(0, 9)) for _ in range(servers - 1)] + [1]
    return Plan(
        ranks=tuple(ranks),
        weights=tuple(share / sum(shares) for share in shares),
        links=tuple(
            LinkLoad(
                name=draw(texts),
                kind=draw(st.sampled_from(["node", "switch"])),
                num_bytes=draw(amounts),
                bytes_per_s=draw(st.floats(1, 1e18)),
            )
            for _ in range(draw(st.integers(0, 3)))
        ),
        model_bytes=draw(amounts),
        placement=draw(texts),
        cost_s=draw(amounts),
        bound_s=draw(amounts),
        compared=draw(st.dictionaries(texts, amounts, max_size=3)),
        source=draw(texts),
        notes=tuple(draw(st.lists(texts, max_size=3))),
    )


@given(plan=plans())
def test_a_plan_comes_back_as_it_was(plan: Plan) -> None:
    assert decode(encode(plan), where="plan.json") == plan


def test_a_rank_is_a_line_and_every_field_is_there_in_the_order_of_its_type() -> None:
    text = encode(PLAN).decode("ascii")
    assert len([line for line in text.splitlines() if '"host"' in line]) == 4
    members = json.loads(text)
    assert list(members) == ["format", "version", *(field.name for field in fields(Plan))]
    assert list(members["ranks"][1]) == [field.name for field in fields(PlannedRank)]
    assert encode(decode(text.encode(), where="plan.json")) == text.encode()


def test_ranks_may_stand_in_any_order() -> None:
    members = json.loads(encode(PLAN))
    members["ranks"].reverse()
    assert decode(json.dumps(members).encode(), where="plan.json") == PLAN


def changed(change: Callable[[Any], object]) -> bytes:
    members = json.loads(encode(PLAN))
    change(members)
    return json.dumps(members).encode()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update(version=1), "version 1: this psdist reads 'psdist plan', version 2"),
        (lambda m: [m.pop(k) for k in list(m)], "format None, version None: this psdist reads"),
        (
            lambda m: [m.pop("ranks"), m.update(format="psdist network")],
            "format 'psdist network', version 2: this psdist reads 'psdist plan', version 2",
        ),
        (lambda m: m.pop("weights"), "the content has no key 'weights'"),
        (lambda m: m.update(extra=1), "the content has the unknown key 'extra'"),
        (lambda m: m["ranks"].pop(1), "the rank of ranks[1] is 2, not 1"),
        (lambda m: m["ranks"][3].update(rank=2), "the rank of ranks[3] is 2, not 3"),
        (lambda m: m["ranks"][3].update(rank=True), "ranks[3].rank is True, not a whole number"),
        (lambda m: m["ranks"][0].update(host="a b"), "ranks[0].host is 'a b', not letters"),
        (
            lambda m: m["ranks"][0].update(host="-oProxyCommand"),
            "ranks[0].host is '-oProxyCommand'",
        ),
        (lambda m: m["ranks"][0].update(host="$(reboot)"), "ranks[0].host is '$(reboot)'"),
        (lambda m: m["ranks"][0].update(host="n1\n"), r"ranks[0].host is 'n1\n'"),
        (
            lambda m: m["ranks"][0].update(role="chief"),
            "ranks[0].role is 'chief', not 'server', 'worker' or 'spare'",
        ),
        (lambda m: m["ranks"][3].update(index=0), "rank 3: index is 0, not 1"),
        (lambda m: m["ranks"][2].update(group=-1), "rank 2: group is -1"),
        (lambda m: m["ranks"][0].update(group=0), "rank 0: group is 0"),
        (lambda m: m["ranks"][2].update(group=5), "the number of workers in group 1 is 0"),
        (
            lambda m: m["ranks"][0].update(cpus=[0, 70000]),
            "ranks[0].cpus[1] is 70000, not less than 65536",
        ),
        (lambda m: m["ranks"][0].update(cpus=[3, 3]), "ranks[0].cpus has 3 twice"),
        (lambda m: m["ranks"][0].update(cpus=[]), "rank 0: number of cpus is 0"),
        (lambda m: m["ranks"][0].update(cpus={"0": 1}), "ranks[0].cpus is a dict, not a list"),
        (lambda m: m["ranks"][0].update(nic="\x1b[2J"), r"ranks[0].nic is '\x1b[2J'"),
        (lambda m: m.update(weights=[1.0]), "the number of weights is 1, not 2"),
        (lambda m: m.update(weights=[0.6, 0.6]), "the sum of the weights is 1.2, not 1"),
        (lambda m: m.update(weights=[1.5, -0.5]), "weights[1] is -0.5"),
        (
            lambda m: m.update(weights=[1.5, 10**400]),
            "1329 bits, not a number that a float holds",
        ),
        (
            lambda m: m["links"][0].update(bytes_per_s=0),
            "links[0].bytes_per_s is 0, not greater than 0",
        ),
        (lambda m: m["links"][0].update(kind="cable"), "links[0].kind is 'cable'"),
        (lambda m: m.update(cost_s=float("nan")), "NaN is no number here"),
        (lambda m: m.update(notes=["x" * 3000]), "notes[0] is 'xxx"),
        (lambda m: [r.update(role="worker", group=0) for r in m["ranks"]], "index is"),
        (lambda m: m["ranks"][0].update(core=1), "ranks[0] has the unknown key 'core'"),
        (lambda m: m["links"][0].pop("kind"), "links[0] has no key 'kind'"),
        (lambda m: m.update(ranks=m["ranks"] * 20_000), "ranks has more than 65,536 items"),
        (lambda m: m.update(links=[[]]), "links[0] is a list, not an object"),
        (lambda m: m.update(ranks=[]), "the number of servers is 0, not at least 1"),
    ],
)
def test_what_is_wrong_in_a_plan_is_said_in_one_line(
    change: Callable[[Any], object], expected: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        decode(changed(change), where="plan.json")
    message = str(caught.value)
    assert expected in message
    assert message.startswith("plan.json: ")
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "plan.json:1: no JSON"),
        (b"{\n\n!", "plan.json:3: no JSON"),
        (b"[]", "this is a list, not an object"),
        (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (b"\xff\xfe{}", "byte 0xff at offset 0 is no UTF-8"),
        (b"{}\0", "a NUL byte at offset 2"),
        (b"[" * 200_000, "more than 8 deep"),
        (b'{"a":' * 200_000, "more than 8 deep"),
        (b"[" + b"[]," * 1_000_000 + b"1]", "more than 655,360 brackets"),
        (b" " * (MAX_BYTES + 1), "more than 33,554,432 bytes"),
        (b'{"format": ' + b"9" * 5000 + b"}", "plan.json: "),
        (b'"' + b"[" * 100 + b'"', "this is '[[["),
        (b'"' + b"[" * 100, "plan.json:1: no JSON"),
        (b'["' + b'","' * 5_000_000 + b'"]', "this is a list"),
        (b'"\\' * 5_000_000, "plan.json:1: no JSON"),
    ],
)
def test_bytes_that_are_no_plan_are_refused_in_one_line(data: bytes, expected: str) -> None:
    with pytest.raises(PlacementError) as caught:
        decode(data, where="plan.json")
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_plan_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(PlacementError, match=r"^plan: notes\[0\] is 'a\\nb'"):
        encode(replace(PLAN, notes=("a\nb",)))


def test_ten_thousand_ranks_with_all_threads_of_large_nodes_are_one_plan() -> None:
    cores, cpus = tuple(range(192)), tuple(range(384))
    rank = replace(PLAN.ranks[0], cores=cores, cpus=cpus)
    worker = replace(rank, role="worker", group=0)
    workers = (replace(worker, rank=1 + number, index=number) for number in range(9_999))
    plan = replace(PLAN, ranks=(rank, *workers), weights=(1.0,))
    assert len(decode(encode(plan), where="plan.json").ranks) == 10_000
    wide = tuple(range(10_000, 11_000))
    too_large = tuple(replace(each, cpus=wide) for each in plan.ranks)
    with pytest.raises(PlacementError, match=r"^plan: 10,000 ranks .* start fewer ranks$"):
        encode(replace(plan, ranks=too_large))


def test_two_thousand_damaged_plans_are_read_or_refused_in_one_line() -> None:
    chosen = random.Random(3)
    num_read, refusals = 0, []
    for number in range(2000):
        data = damaged_bytes(chosen) if number % 2 else damaged_values(chosen)
        try:
            plan = decode(data, where="plan.json")
        except PlacementError as error:
            refusals.append(str(error))
        else:
            assert decode(encode(plan), where="again") == plan
            num_read += 1
    assert [each for each in refusals if not each.startswith("plan.json:")] == []
    assert [each for each in refusals if not each.isprintable() or len(each) > 300] == []
    # Both happen: a digit of a speed may change, a bracket may not.
    assert num_read > 50
    assert len(refusals) > 1000


def damaged_bytes(chosen: random.Random) -> bytes:
    data = bytearray(encode(PLAN))
    for _ in range(chosen.randint(1, 3)):
        start = chosen.randrange(len(data))
        end = min(len(data), start + chosen.choice([1, 2, 20, 200]))
        data[start:end] = chosen.choice(
            [
                b"",
                chosen.randbytes(end - start),
                bytes(data[start:end]) * 3,
                chosen.choice([b"1", b"-1", b"1e999", b"null", b'"', b"[", b"}", b"\0", b"\xc3"]),
            ]
        )
    return bytes(data)


def damaged_values(chosen: random.Random) -> bytes:
    """Still JSON: a value, wherever it lies, is another one."""
    members = json.loads(encode(PLAN))
    parent, key = members, chosen.choice(list(members))
    while isinstance(parent[key], dict | list) and parent[key] and chosen.random() < 0.8:
        parent = parent[key]
        key = chosen.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key] = chosen.choice(
        [None, True, -1, 0, 1, 1 << 70, 10**400, 1.5, 1e300, "", "n1", "\n", "\ud800", [], [[]], {}]
    )
    return json.dumps(members).encode()
