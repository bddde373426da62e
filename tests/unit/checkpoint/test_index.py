"""index.json: it says the same after it was written, and a change of it is noticed."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest

from psdist.checkpoint import index as indexes
from psdist.checkpoint.index import FileRecord, Index, SetRecord, TableRecord, decode, encode
from psdist.errors import CheckpointError
from psdist.protocol.partition import Partition, Piece
from tests.support.checkpoints import ADAM, HYPER, PIECES, Made
from tests.support.tables import specs_of

FILES = [FileRecord(name="server-0.safetensors", num_bytes=10, crc32=5)]


def an_index(**changes: Any) -> Index:
    return dataclasses.replace(Made().index(FILES, servers=1), **changes)


def forged(*place: str | int, value: object) -> str:
    """An index of which one member is another, with a checksum that fits."""
    content = json.loads(encode(an_index()))
    del content["crc32"]
    *way, last = place
    inner: Any = content
    for part in way:
        inner = inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    content["crc32"] = indexes._checksum(content)
    return json.dumps(content)


def test_an_index_says_the_same_after_it_was_written() -> None:
    index = an_index()
    assert decode(encode(index), where="index.json") == index
    assert index.sets[0].hyperparameters == HYPER[ADAM]
    assert (index.step, index.num_workers, index.num_bytes) == (100, 2, 10)


def test_an_index_says_the_same_of_tables_and_without_them_has_no_word_of_tables() -> None:
    assert '"tables"' not in encode(an_index())
    tables = tuple(map(TableRecord.of, specs_of(1, num_rows=None).tables))
    record = dataclasses.replace(an_index().sets[0], tables=tables)
    index = an_index(sets=(record, *an_index().sets[1:]))
    assert decode(encode(index), where="index.json") == index
    for forgery in ({"name": "a"}, [{"name": "a"}], [dataclasses.asdict(tables[0]) | {"dim": -1}]):
        with pytest.raises(CheckpointError, match="use another checkpoint"):
            decode(forged("sets", 0, "tables", value=forgery), where="index.json")


def test_an_index_of_many_parameters_is_read_back() -> None:
    records = an_index().sets[0]
    many = dataclasses.replace(records, pieces=records.pieces * 3000)
    text = encode(an_index(sets=(many,)))
    assert text.count("\n") == 1  # a text from outside has a limit of lines
    assert len(decode(text, where="index.json").sets[0].pieces) == 6000


def test_any_flipped_bit_is_noticed_or_changes_nothing() -> None:
    index = an_index(sets=an_index().sets[1:])
    data = encode(index).encode()
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        with suppress(UnicodeDecodeError):  # strict.decode refuses it before
            assert refusal(changed.decode(), of=index) in ("", "index.json")


def refusal(text: str, *, of: Index) -> str:
    """How the refusal's line begins; "" where the text is read as that index."""
    try:
        assert decode(text, where="index.json") == of
    except CheckpointError as error:
        return str(error).partition(":")[0] if "\n" not in str(error) else "two lines"
    return ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("[]", "not an object"),
        ("{}", "format None, version None: this psdist reads 'psdist checkpoint', version 1"),
        (forged("version", value=2), "version 2: this psdist reads"),
        (forged("mode", value="asink"), "mode is 'asink', not"),
        (forged("mode", value=None), "has no key 'mode'"),
        (forged("more", value=1), "unknown key 'more'"),
        (forged("servers", value="1"), "servers is '1', not a whole number"),
        (forged("servers", value=-1), "servers is -1, not"),
        (forged("groups", value=[]), "damaged: groups that are not of workers 0, 1, 2"),
        (forged("groups", value=[[0], [0]]), "damaged: groups that are not of workers 0, 1, 2"),
        (forged("sets", value=[]), "sets"),
        (forged("sets", 0, "clocks", value=[1]), "damaged: clocks that are not of its groups"),
        (forged("sets", 0, "hyper", value=3), "damaged: hyperparameters that are none"),
        (forged("sets", 0, "hyper", value=[{"pickle": 3}]), "damaged: hyperparameters: 'pickle'"),
        (forged("sets", 0, "pieces", 0, "dtype", value="int8"), r"dtype is 'int8', not of float32"),
        (forged("sets", 0, "pieces", 0, "stride", value=[1]), "shape and stride do not fit"),
        (forged("sets", 0, "pieces", 0, "shape", value=[2**59] * 2), "shape and stride do not fit"),
        (forged("files", value=[vars(FILES[0])] * 2), "damaged: a file twice"),
        (forged("files", 0, "name", value="../server-0.safetensors"), r"files\[0\].name is"),
        (forged("files", 0, "name", value="server-00.safetensors"), r"files\[0\].name is"),
        (forged("files", 0, "name", value="server-0.safetensors\n"), r"files\[0\].name is"),
        (forged("files", 0, "num_bytes", value=1.5), "not a whole number"),
        (forged("files", 0, "crc32", value=2**32), r"files\[0\].crc32 is"),
        ('{"format": 1e999}', "format inf"),
        (encode(an_index()).replace('"seed": 7', '"seed": 8'), "its checksum is of other contents"),
    ],
)
def test_what_no_run_writes_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        decode(text, where="index.json")
    assert str(caught.value).startswith("index.json:")
    assert "\n" not in str(caught.value)


def test_an_index_that_could_not_be_read_back_is_not_written() -> None:
    with pytest.raises(CheckpointError, match=r"^this run cannot have checkpoints: index.json: "):
        encode(an_index(mode="asink"))


def changed(at: int, **changes: Any) -> Partition:
    pieces = list(PIECES[ADAM])
    pieces[at] = dataclasses.replace(pieces[at], **changes)
    return Partition.cut(pieces, chunk_bytes=None)


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (changed(0), ""),
        (changed(1, stride=(7, 1), optimizer_group=1, is_frozen=True), ""),
        (changed(1, name="b"), "parameter first.weight there, b here"),
        (
            changed(1, shape=(7, 30), stride=(1, 7)),
            "parameter first.weight: shape (30, 7) there, (7, 30) here",
        ),
        (
            changed(0, dtype="float64"),
            "parameter embedding: dtype float32 there, float64 here",
        ),
        (Partition.cut(PIECES[ADAM][:1], chunk_bytes=None), "2 parameters there, 1 here"),
    ],
)
def test_a_difference_to_what_was_trained_is_said(partition: Partition, words: str) -> None:
    found = an_index().sets[0].difference(partition.pieces, optimizer=ADAM)
    assert found == words


def test_another_optimizer_is_a_difference() -> None:
    record = SetRecord.of(changed(0), optimizer=ADAM, clocks=(1,), hyper=[])
    assert record.difference(changed(0).pieces, optimizer="torch.optim.SGD") == (
        "optimizer torch.optim.Adam there, torch.optim.SGD here"
    )


def test_a_piece_is_recorded_with_how_it_lies_in_memory() -> None:
    piece = Piece(name="a", shape=(2, 3), stride=(1, 2), dtype="float32", optimizer_group=4)
    record = indexes.PieceRecord.of(piece)
    assert (record.shape, record.stride, record.optimizer_group) == ((2, 3), (1, 2), 4)
    assert record.num_elements == 6
