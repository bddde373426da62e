"""Files of a checkpoint: what the safetensors library makes of ours, and we of what is damaged."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from psdist.checkpoint import container
from psdist.checkpoint.container import Shaped, header, read_header
from psdist.checkpoint.strict import open_regular
from psdist.checkpoint.tensors import CODES, Entry, read_tensor, write_file, write_tensors
from psdist.errors import CheckpointError


def tensors_of_every_dtype() -> dict[str, torch.Tensor]:
    found = {}
    for dtype in CODES:
        found[str(dtype)] = torch.arange(6).view(2, 3).to(dtype)
    return {**found, "one": torch.tensor(2.5), "none": torch.empty(0, 4)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        each.dtype is second[name].dtype
        and each.shape == second[name].shape
        and bytes(each.contiguous().view(-1).view(torch.uint8).tolist())
        == bytes(second[name].contiguous().view(-1).view(torch.uint8).tolist())
        for name, each in first.items()
    )


def read(path: Path) -> dict[str, torch.Tensor]:
    with open_regular(path) as file:
        contents = read_header(file, where=path.name)
    return {name: read_tensor(path, each) for name, each in contents.tensors.items()}


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    path, tensors = tmp_path / "worker-0.safetensors", tensors_of_every_dtype()
    record = write_tensors(path, tensors, ["plain"])
    assert same(load_file(path), tensors)
    with safe_open(path, "pt") as opened:
        assert json.loads(opened.metadata()["psdist"]) == ["plain"]
    data = path.read_bytes()
    assert (record.name, record.num_bytes) == ("worker-0.safetensors", len(data))
    assert record.crc32 == zlib.crc32(data)


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", tensors_of_every_dtype()
    save_file(tensors, path, metadata={"who": "others"})
    assert same(read(path), tensors)


def test_every_tensor_begins_at_a_multiple_of_its_items(tmp_path: Path) -> None:
    path = tmp_path / "server-0.safetensors"
    lengths = {torch.uint8: 3, torch.float64: 1, torch.bfloat16: 5, torch.float32: 3}
    entries = [
        Entry(0, at, 0, "value", torch.ones(length).to(dtype))
        for at, (dtype, length) in enumerate(lengths.items())
    ]
    write_file(path, entries, {})
    with open_regular(path) as file:
        contents = read_header(file, where="it")
    assert all(
        each.begin % container.ITEM_BYTES[each.dtype] == 0 for each in contents.tensors.values()
    )


def test_a_tensor_without_elements_and_strides_is_written(tmp_path: Path) -> None:
    flat = torch.empty(0, dtype=torch.int64).as_strided((0,), (0,))  # as numpy makes some
    write_tensors(tmp_path / "a.safetensors", {"flat": flat, "one": torch.ones(1)}, None)
    assert load_file(tmp_path / "a.safetensors")["flat"].shape == (0,)


def test_a_tensor_is_not_written_twice(tmp_path: Path) -> None:
    entry = Entry(0, 0, 0, "value", torch.ones(1))
    with pytest.raises(CheckpointError, match=r"tensor '0/0/0/value' is there twice"):
        write_file(tmp_path / "server-0.safetensors", [entry, entry], {})


def test_more_plain_values_than_a_header_takes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"keep large data as tensors$"):
        write_tensors(tmp_path / "worker-0.safetensors", {}, ["x" * 1000])


def test_a_disk_that_is_full_is_said_with_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full, whose writes fail as on a full disk")
    path = tmp_path / "worker-0.safetensors"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_tensors(path, {}, [])
    assert caught.value.filename == str(path)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(content: object, data: bytes = b"\0" * 8) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_changed(**changes: Any) -> bytes:
    return file_of({"a": {**GOOD, **changes}})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "damaged: a header of 0 bytes|no JSON"),
        (b"\1\0\0", "damaged: a header of 1 bytes in a file of 3"),
        (b"\xff" * 16, "damaged: a header of 18,446,744,073,709,551,615 bytes in a file of 16"),
        ((10**8 + 8).to_bytes(8, "little") + b"{}", "a header of 100,000,008 bytes"),
        (file_of(b"{"), "no JSON"),
        (file_of(b"\xff"), "no UTF-8"),
        (file_of(b"[" * 1000), "more than 200 deep"),
        (file_of(b'{"a":1,"a":1}'), "the key 'a' is there twice"),
        (file_of([]), "the header is no object"),
        (file_of({"a": 3}), "tensor 'a' is not described"),
        (file_of({"a": {**GOOD, "more": 1}}), "tensor 'a' is not described"),
        (file_of({"__metadata__": 3}, b""), "metadata is no text"),
        (file_of({"__metadata__": {"psdist": 3}}, b""), "metadata is no text"),
        (with_changed(dtype="F31"), "tensor 'a' has dtype 'F31'"),
        (with_changed(dtype=[]), "tensor 'a' has dtype"),
        (with_changed(shape=[-2]), "tensor 'a' has no shape"),
        (with_changed(shape=[True, 2]), "tensor 'a' has no shape"),
        (with_changed(shape="2"), "tensor 'a' has no shape"),
        (with_changed(shape=[2**62]), "tensor 'a' has no shape"),
        (with_changed(shape=[2**40] * 64), "bytes for shape"),
        (with_changed(shape=[3]), "tensor 'a' has 8 bytes for shape"),
        (with_changed(data_offsets=[8, 0]), "tensor 'a' has -8 bytes"),
        (with_changed(data_offsets=[0]), "tensor 'a' has no place"),
        (with_changed(data_offsets=[0.0, 8]), "tensor 'a' has no place"),
        (with_changed(data_offsets=[8, 16]), "overlap, or leave a hole"),
        (file_of({"a": GOOD, "b": GOOD}), "overlap, or leave a hole"),
        (file_of({"a": GOOD}, b"\0" * 9), "78 bytes, its header describes 77"),
        (file_of({"a": GOOD}, b"\0" * 7), "bytes, its header describes"),
        (file_of({"x" * 501: GOOD}), "tensor 'xxx"),
    ],
)
def test_a_damaged_header_is_one_clear_line(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "server-0.safetensors"
    path.write_bytes(data)
    with open_regular(path) as file, pytest.raises(CheckpointError, match=words) as caught:
        read_header(file, where="server-0.safetensors")
    assert str(caught.value).startswith("server-0.safetensors:")
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "is no file"), ("none", "No such file"), ("", "is no file")):
        with pytest.raises(CheckpointError, match=words):
            open_regular(tmp_path / name)


def test_a_header_is_read_by_its_own_words() -> None:
    data = header([Shaped("a", "F32", (2,))], text="é")
    assert len(data) % 8 == 0
    content = json.loads(data[8:])
    assert content["a"] == GOOD
    assert content["__metadata__"] == {"psdist": "é"}
