"""What describes optimizer state on the wire, and how its elements are cut into messages."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import ProtocolError
from psdist.protocol import optimizer_state
from psdist.protocol.control import CONTROL_LIMIT_BYTES
from psdist.protocol.memory import state_dtype
from psdist.protocol.optimizer_state import (
    MOST_KEYS,
    PART_ELEMENTS,
    STATE_ITEM_BYTES,
    Entry,
    OneValue,
    PerElement,
    PieceState,
    Plain,
    Uncut,
    Whole,
    fits_torch,
    pack_states,
    part_starts,
    parts_of,
    stretches,
    unpack_states,
)
from psdist.protocol.partition import Partition, Piece

ADAM: PieceState = {"step": OneValue("float32", 0, 3.0), "exp_avg": PerElement("float32")}
FLOATS = st.floats(allow_nan=False)
ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    st.builds(PerElement, st.sampled_from(sorted(STATE_ITEM_BYTES))),
    st.builds(OneValue, st.just("float64"), st.integers(0, 3), FLOATS),
    st.builds(OneValue, st.just("float32"), st.just(0), st.floats(allow_nan=False, width=32)),
    st.builds(OneValue, st.just("int64"), st.just(0), st.integers(-(2**63), 2**63 - 1)),
    st.builds(OneValue, st.just("bool"), st.just(1), st.booleans()),
    st.builds(Plain, st.none() | st.booleans() | FLOATS | st.integers(-(2**63), 2**63 - 1)),
)
KEYS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20)
STATES = st.dictionaries(
    st.integers(0, 9), st.dictionaries(KEYS, ENTRIES, min_size=1, max_size=5), max_size=4
)


@given(STATES)
def test_a_description_comes_back_as_it_was_packed(states: dict[int, PieceState]) -> None:
    again = unpack_states(pack_states(states), pieces=range(10))
    assert again == states
    assert [list(each) for each in again.values()] == [
        list(states[piece]) for piece in sorted(states)
    ], "keys stay in the optimizer's order"


def test_no_state_is_no_bytes_and_what_is_no_number_travels_too() -> None:
    assert pack_states({}) == b""
    state: PieceState = {"a": OneValue("float32", 0, math.inf), "b": Plain(math.nan)}
    again = unpack_states(pack_states({0: state}), pieces=[0])[0]
    assert again["a"] == state["a"]
    assert math.isnan(again["b"].value)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(("num_dims", "is_right"), [(0, True), (16, True), (17, False)])
def test_a_whole_tensor_has_few_dimensions(num_dims: int, *, is_right: bool) -> None:
    state: PieceState = {"a": Whole("float32", (1,) * num_dims)}
    packed = pack_states({0: state})
    if is_right:
        assert unpack_states(packed, pieces=[0], is_of_server=True) == {0: state}
        return
    with pytest.raises(ProtocolError, match="optimizer state that cannot be read"):
        unpack_states(packed, pieces=[0], is_of_server=True)


@given(st.binary(max_size=60))
def test_no_bytes_are_anything_but_a_description_or_a_protocol_error(data: bytes) -> None:
    try:
        states = unpack_states(data, pieces=range(4))
    except ProtocolError:
        return
    assert all(0 <= piece < 4 for piece in states)


@given(STATES, st.data())
def test_a_changed_byte_is_refused_or_well_formed(
    states: dict[int, PieceState], data: st.DataObject
) -> None:
    packed = bytearray(pack_states(states))
    if packed:
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = unpack_states(bytes(packed), pieces=range(10))
    except ProtocolError:
        return
    assert pack_states(again) is not None


@pytest.mark.parametrize(
    "body",
    [
        {"a": 1},
        [[0]],
        [[0, []]],
        [[0, [["a"]]]],
        [[0, [["a", "x", "float32"]]]],
        [[0, [["a", "e", "complex64"]]]],
        [[0, [["a", "e", "float32", 1]]]],
        [[0, [["a", "e", ["float32"]]]]],
        [[0, [["a", "e", "float32"], ["a", "e", "float32"]]]],
        [[0, [["", "e", "float32"]]]],
        [[0, [["a\n", "e", "float32"]]]],
        [[0, [["a" * 129, "e", "float32"]]]],
        [[0, [[1, "e", "float32"]]]],
        [[0, [["a", "o", "float32", 9, 1.0]]]],
        [[0, [["a", "o", "float32", True, 1.0]]]],
        [[0, [["a", "o", "float32", -1, 1.0]]]],
        [[0, [["a", "o", "float32", 0, 1e300]]]],
        [[0, [["a", "o", "float32", 0, -1e300]]]],
        [[0, [["a", "o", "float32", 0, "1"]]]],
        [[0, [["a", "o", "float32", 0, None]]]],
        [[0, [["a", "o", "uint8", 0, 256]]]],
        [[0, [["a", "o", "int8", 0, -129]]]],
        [[0, [["a", "o", "int32", 0, 0.5]]]],
        [[0, [["a", "o", "bool", 0, 1]]]],
        [[0, [["a", "p", "text"]]]],
        [[0, [["a", "p", [1]]]]],
        [[0, [["a", "u", "a list"]]]],
        [[0, [[f"a{n}", "p", 1] for n in range(MOST_KEYS + 1)]]],
        [[2, [["a", "p", 1]]]],
        [[0, [["a", "p", 1]]], [2, [["a", "p", 1]]]],
        [[-1, [["a", "p", 1]]]],
        [[True, [["a", "p", 1]]]],
        [["0", [["a", "p", 1]]]],
        [[[0], [["a", "p", 1]]]],
        [[1, [["a", "p", 1]]], [0, [["a", "p", 1]]]],
        [[0, [["a", "p", 1]]], [0, [["a", "p", 1]]]],
    ],
)
def test_what_is_no_description_is_refused(body: Any) -> None:
    with pytest.raises(ProtocolError, match="optimizer state that cannot be read"):
        unpack_states(msgpack.packb(body), pieces=range(2))


@pytest.mark.parametrize("what", ["a\nb", "a\x1b[2J", "x" * 129, 1, b"x"])
def test_a_server_says_in_one_short_line_what_cannot_be_cut(what: Any) -> None:
    body = [[0, [["a", "u", what]]]]
    with pytest.raises(ProtocolError, match="optimizer state that cannot be read"):
        unpack_states(msgpack.packb(body), pieces=[0], is_of_server=True)


def test_each_kind_of_entry_has_a_letter_on_the_wire() -> None:
    """Ranks of one job run the same psdist; records of a failure are read by people."""
    states: dict[int, PieceState] = {
        3: {
            "a": PerElement("int8"),
            "b": OneValue("float64", 0, 1.5),
            "c": Plain(2),
            "d": Uncut("x"),
        }
    }
    entries = [["a", "e", "int8"], ["b", "o", "float64", 0, 1.5], ["c", "p", 2], ["d", "u", "x"]]
    assert msgpack.unpackb(pack_states(states)) == [[3, entries]]


def test_the_longest_key_and_the_largest_and_smallest_numbers_pass() -> None:
    """128 characters, and whatever a tensor of the dtype may hold."""
    states: dict[int, PieceState] = {
        0: {
            "k" * 128: Plain(1),
            "least8": OneValue("int8", 0, -128),
            "most8": OneValue("int8", 0, 127),
            "least16": OneValue("int16", 0, -(2**15)),
            "least_of_none": OneValue("uint8", 0, 0),
            "most_of_bytes": OneValue("uint8", 8, 255),
            "least64": OneValue("int64", 0, -(2**63)),
        }
    }
    assert unpack_states(pack_states(states), pieces=[0]) == states


@pytest.mark.parametrize("value", [3.4028234663852886e38, math.inf, -math.inf, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_makes_a_tensor_of_every_number_that_passes(dtype: str, value: float) -> None:
    packed = pack_states({0: {"a": OneValue(dtype, 0, value)}})
    (entry,) = unpack_states(packed, pieces=[0])[0].values()
    assert isinstance(entry, OneValue)
    assert torch.full((), entry.value, dtype=state_dtype(dtype)) is not None


@pytest.mark.parametrize("length", [1, PART_ELEMENTS, PART_ELEMENTS + 1, 2 * PART_ELEMENTS + 1])
def test_the_last_element_of_a_chunk_is_in_a_part(length: int) -> None:
    starts = list(part_starts(length))
    assert starts == [n * PART_ELEMENTS for n in range(len(starts))]
    assert starts[-1] < length <= starts[-1] + PART_ELEMENTS


FITS: list[tuple[str, Entry, bool]] = [
    ("exp_avg", PerElement("float32"), True),
    ("exp_avg", PerElement("bfloat16"), True),
    ("exp_avg", PerElement("uint8"), False),
    ("exp_avg", OneValue("float32", 1, 0.0), False),
    ("exp_avg", Plain(None), True),
    ("step", OneValue("float32", 0, 1.0), True),
    ("step", PerElement("float32"), False),
    ("step", Plain(1), False),
    ("mu_product", PerElement("float32"), False),
    ("eta", PerElement("float32"), False),
    ("mu", PerElement("float32"), False),
]


@pytest.mark.parametrize(("key", "entry", "is_torchs"), FITS)
def test_torchs_own_optimizers_have_state_of_the_sizes_that_their_code_rests_on(
    key: str, entry: Entry, is_torchs: bool
) -> None:
    assert fits_torch("torch.optim.Adam", key, entry) == is_torchs
    assert fits_torch("their.module:Adam", key, entry)


def test_only_servers_may_say_that_something_cannot_be_cut() -> None:
    states: dict[int, PieceState] = {0: {"a": Uncut("a list")}}
    packed = pack_states(states)
    assert unpack_states(packed, pieces=[0], is_of_server=True) == states
    with pytest.raises(ProtocolError):
        unpack_states(packed, pieces=[0])
    long = pack_states({0: {"a": Uncut("a" * 129)}})
    with pytest.raises(ProtocolError):
        unpack_states(long, pieces=[0], is_of_server=True)


def test_every_dtype_is_as_large_as_torch_says() -> None:
    assert {name: state_dtype(name).itemsize for name in STATE_ITEM_BYTES} == STATE_ITEM_BYTES


def test_a_part_with_as_many_keys_as_there_may_be_fits_into_a_message() -> None:
    assert PART_ELEMENTS * max(STATE_ITEM_BYTES.values()) * MOST_KEYS < CONTROL_LIMIT_BYTES


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.sampled_from([64, 128, 4096]),
    st.sampled_from([64, 100, 10_000]),
    st.data(),
)
def test_every_element_of_the_state_is_in_one_part(
    lengths: list[int], chunk_elements: int, part_elements: int, data: st.DataObject
) -> None:
    pieces = [
        Piece(name=f"p{n}", shape=(length,), stride=(1,), dtype="float32", optimizer_group=0)
        for n, length in enumerate(lengths)
    ]
    partition = Partition.cut(pieces, chunk_bytes=4 * chunk_elements)
    with_state = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    states: dict[int, PieceState] = {
        piece: {"step": Plain(3), "a": PerElement("float32"), "b": PerElement("int8")}
        for piece in with_state
    }
    covered: dict[tuple[int, str], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_state, "PART_ELEMENTS", part_elements)
        for chunk in partition.chunks:
            sizes = {part.start: part.num_bytes for part in parts_of(chunk, states)}
            for start in part_starts(chunk.length):
                layout = stretches(chunk, states, start)
                assert sizes.get(start, 0) == sum(each.num_bytes for each in layout)
                for each in layout:
                    assert start <= each.start
                    assert each.start + each.length <= start + part_elements
                    at = each.piece, each.key
                    covered[at] = covered.get(at, 0) + each.length
    assert covered == {(piece, key): lengths[piece] for piece in with_state for key in "ab"}
