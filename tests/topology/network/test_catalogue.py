"""network.json: written, read back, refused where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.network.catalogue import (
    MAX_BYTES,
    Kind,
    Network,
    Pair,
    Speed,
    decode,
    encode,
    read,
)

KINDS: tuple[Kind, ...] = ("node", "rack", "socket", "core", "gpu")
GB = 1e9
NUMBERS = st.floats(min_value=0, max_value=1e15, allow_nan=False)
HOSTS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)
PLACES = st.from_regex(r"[A-Za-z0-9_.:/@+,\[\]-]{1,12}", fullmatch=True)
LABELS = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
SPEEDS = st.builds(Speed, latency_s=NUMBERS, bytes_per_s=NUMBERS, is_lower_bound=st.booleans())
PAIRS = st.builds(
    Pair,
    first=PLACES,
    second=PLACES,
    kind=st.sampled_from(KINDS),
    latency_s=NUMBERS,
    bytes_per_s=NUMBERS,
)
NETWORKS = st.builds(
    Network,
    date=st.datetimes().map(lambda date: date.isoformat()),
    hosts=st.lists(HOSTS, unique=True, max_size=4).map(tuple),
    mpi=LABELS,
    components=st.lists(LABELS, unique=True, max_size=3).map(tuple),
    versions=st.dictionaries(LABELS, LABELS, max_size=3),
    classes=st.dictionaries(st.sampled_from(KINDS), SPEEDS),
    node_links=st.dictionaries(HOSTS, SPEEDS, max_size=3),
    switch_uplinks=st.dictionaries(PLACES, SPEEDS, max_size=3),
    pairs=st.lists(
        PAIRS, max_size=4, unique_by=lambda pair: (pair.first, pair.second, pair.kind)
    ).map(tuple),
)


def pair(first: str, second: str, gb_per_s: float, us: float, kind: Kind = "node") -> Pair:
    return Pair(
        first=first, second=second, kind=kind, latency_s=us / 1e6, bytes_per_s=gb_per_s * 1e9
    )


def speed(
    *, latency_s: float = 0.0, bytes_per_s: float = 0.0, is_lower_bound: bool = False
) -> Speed:
    return Speed(latency_s=latency_s, bytes_per_s=bytes_per_s, is_lower_bound=is_lower_bound)


NETWORK = Network(
    date="2025-03-01T12:00:00+01:00",
    hosts=("n3", "n4"),
    mpi="Open MPI v5.0.11",
    components=("ucx",),
    versions={"psdist": "1.0"},
    classes={"node": speed(latency_s=2e-6, bytes_per_s=11e9)},
    node_links={"n3": speed(bytes_per_s=12e9)},
    switch_uplinks={"rack1": speed(bytes_per_s=100e9)},
    pairs=(pair("n3", "n4", 11.2, 2), pair("n3/package0", "n3/package1", 20, 0.5, "socket")),
)


@given(NETWORKS)
def test_what_was_written_is_read_back_the_same(network: Network) -> None:
    assert decode(encode(network), where="network.json") == network


def test_a_catalogue_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_bytes(encode(NETWORK))
    assert read(path) == NETWORK


def test_a_catalogue_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="cannot be read \\(No such file or directory\\)"):
        read(tmp_path / "network.json")


def changed(key: str, value: object) -> bytes:
    return json.dumps({**json.loads(encode(NETWORK)), key: value}).encode()


def without(key: str) -> bytes:
    content = json.loads(encode(NETWORK))
    del content[key]
    return json.dumps(content).encode()


LINK = {"latency_s": 0, "bytes_per_s": 1, "is_lower_bound": False}


def linked(bytes_per_s: object) -> bytes:
    return changed("node_links", {"n1": {**LINK, "bytes_per_s": bytes_per_s}})


RAW = {"first": "a", "second": "b", "kind": "node", "latency_s": 1, "bytes_per_s": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no JSON"),
        (b"[]", "this is a list, not an object"),
        (b"\xff\xfe{}", "no UTF-8"),
        (b"{}\0", "a NUL byte at offset 2"),
        (b"[" * 100_000, "more than 8 deep"),
        (b"[" * 200_000, "more than 8 deep"),
        (b"[" + b"1," * 2_000_000 + b"1]", "more than 1,000,000 values"),
        (b" " * (MAX_BYTES + 1), "more than 10,000,000 bytes"),
        (encode(NETWORK)[:-20], "no JSON"),
        (b'{"date": "2025-01-01", "date": "2025-01-02"}', "the key 'date' is there twice"),
        (b"{}", "format None, version None: this psdist reads 'psdist network'"),
        (b'{"format": "psdist plan", "version": 1, "ranks": 1}', "format 'psdist plan', version 1"),
        (changed("version", 2), "version 2: this psdist reads 'psdist network', version 1"),
        (changed("more", 1), "the content has the unknown key 'more'"),
        (without("pairs"), "the content has no key 'pairs'"),
        (changed("date", "yesterday"), "date is 'yesterday', not a date of ISO 8601"),
        (changed("hosts", ["n1", "n 2"]), "hosts[1] is 'n 2', not letters"),
        (changed("hosts", ["n1", "n1"]), "hosts has 'n1' twice"),
        (changed("hosts", "n1"), "hosts is 'n1', not a list"),
        (changed("mpi", "a\nb"), "mpi is 'a\\nb', not at most 255"),
        (changed("classes", {"galaxy": LINK}), "a key of classes is 'galaxy', not 'node', 'rack'"),
        (changed("node_links", {"n1": {"bytes_per_s": 1}}), "node_links.n1 has no key 'latency_s'"),
        (linked(-1), "node_links.n1.bytes_per_s is -1, not greater than or equal to 0"),
        (linked(True), "is True, not a number"),
        (linked("1"), "is '1', not a number"),
        (linked(10**400), "is a number of 1329 bits, not a number that a float holds"),
        (linked(float("nan")), "NaN is no number here"),
        (
            changed("node_links", {"n1": {**LINK, "is_lower_bound": 1}}),
            "is_lower_bound is 1, not true or false",
        ),
        (
            encode(NETWORK).replace(b"12000000000.0", b"1e999"),
            "is inf, not less than or equal to 10000",
        ),
        (encode(NETWORK).replace(b"12000000000.0", b"9" * 5000), "a number of thousands of digits"),
        (changed("pairs", [RAW, RAW]), "pairs has 'a -> b (node)' twice"),
        (changed("pairs", [{**RAW, "kind": "moon"}]), "pairs[0].kind is 'moon', not 'node'"),
        (
            changed("pairs", [{**RAW, "first": "a; b"}]),
            "pairs[0].first is 'a; b', not the name of a host",
        ),
        (changed("pairs", [RAW["first"]]), "pairs[0] is 'a', not an object"),
    ],
)
def test_anything_but_a_catalogue_is_refused_in_one_line(data: bytes, said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        decode(data, where="network.json")
    assert str(caught.value).startswith("network.json:")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_table_of_a_million_keys_is_one_fault_and_not_a_million() -> None:
    entries = ",".join(f'"m{number}":0' for number in range(800_000))
    data = encode(NETWORK).replace(b'"node_links": {', b'"node_links": {' + entries.encode() + b",")
    with pytest.raises(PlacementError, match="node_links has 800,001 keys, more than 65,536:"):
        decode(data, where="network.json")
