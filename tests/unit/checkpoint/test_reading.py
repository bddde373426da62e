"""A checkpoint is read by pieces and stretches, however servers were cut, and proves itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psdist.checkpoint import states, tree
from psdist.checkpoint.folder import Folder
from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.tensors import Entry, write_file
from psdist.errors import CheckpointError
from psdist.protocol.checkpoints import Misses
from psdist.protocol.optimizer_state import OneValue, PerElement, PieceState, Uncut, Whole
from tests.support.checkpoints import Made


@pytest.mark.parametrize("servers", [1, 2, 3, 6])
def test_what_was_written_is_read_whatever_number_of_servers_wrote_it(
    tmp_path: Path, servers: int
) -> None:
    made = Made()
    checkpoint = made.write(Folder(tmp_path), servers=servers)
    checkpoint.verify()
    assert made.differences(checkpoint) == []
    assert made.differences(Checkpoint.open(checkpoint.path)) == []


def test_a_stretch_may_begin_and_end_anywhere(tmp_path: Path) -> None:
    made = Made()
    checkpoint = made.write(Folder(tmp_path), servers=3)
    values = made.elements[0, 0, "state.exp_avg"]
    for start in range(0, 400, 37):
        for length in (0, 1, 100, 400 - start):
            stop = min(start + length, 400)
            read = checkpoint.read_stretch(0, 0, start, stop - start, "state.exp_avg")
            assert torch.equal(read, values[start:stop])
    assert checkpoint.read_stretch(1, 0, 3, 5).dtype is torch.float32  # of float16 the master


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ((0, 0, 399, 2, "value"), "has no value of element 400 of parameter embedding"),
        ((0, 0, 400, 1, "value"), "has no value of element 400 of parameter embedding"),
        ((0, 0, 0, 1, "state.sum"), "has no state.sum of element 0 of parameter embedding"),
        ((0, 2, 0, 1, "value"), "of piece 2 of set 0, which it does not have"),
        ((5, 0, 0, 1, "value"), "of piece 0 of set 5, which it does not have"),
    ],
)
def test_what_is_not_there_is_an_error(
    tmp_path: Path, at: tuple[int, int, int, int, str], words: str
) -> None:
    checkpoint = Made().write(Folder(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.read_stretch(*at)


def test_a_worker_that_kept_nothing_is_an_error(tmp_path: Path) -> None:
    checkpoint = Made(workers=2).write(Folder(tmp_path))
    assert checkpoint.workers == [0, 1]
    with pytest.raises(CheckpointError, match="has nothing of worker 2"):
        checkpoint.worker(2)


def test_trees_of_workers_come_back(tmp_path: Path) -> None:
    made = Made()
    checkpoint = made.write(Folder(tmp_path))
    found = tree.unpack(*checkpoint.worker(1))
    assert found["state"] == made.trees[1]["state"]
    assert torch.equal(found["rng"]["torch"], made.trees[1]["rng"]["torch"])


def rewritten(tmp_path: Path, entries: list[Entry], described: PieceState) -> Checkpoint:
    """A checkpoint of one server, whose file holds these entries, under honest checksums."""
    made, folder = Made(workers=1), Folder(tmp_path)
    path = folder.begin("step-00000100")
    every = [each for each in made.entries(0, 1) if (each.set_index, each.piece) != (0, 0)]
    held = {at: its for at, its in made.states.items() if at != (0, 0)}
    if described:
        held[0, 0] = described
    record = write_file(path / "server-0.safetensors", every + entries, states.to_json(held))
    folder.commit("step-00000100", made.index([record], servers=1), keep=1)
    return folder.open("step-00000100")


def part(start: int, length: int, key: str = "value") -> Entry:
    return Entry(0, 0, start, key, torch.ones(length))


SUM: PieceState = {"sum": PerElement("float32")}


@pytest.mark.parametrize(
    ("entries", "described", "words"),
    [
        ([], {}, "value of parameter embedding is not there, in F32, from element 0 on"),
        ([part(0, 399)], {}, "from element 399 on"),
        ([part(0, 401)], {}, "from element 401 on"),
        ([part(0, 100), part(101, 299)], {}, "from element 100 on"),
        ([part(0, 100), part(99, 301)], {}, "from element 100 on"),
        ([Entry(0, 0, 0, "value", torch.ones(400).double())], {}, "in F32, from element 0"),
        ([Entry(0, 0, 0, "value", torch.ones(20, 20))], {}, "in F32, from element 0"),
        ([part(0, 400)], SUM, "state.sum of parameter embedding is not there"),
        (
            [part(0, 400), part(0, 400, "state.sum")],
            {},
            "'state.sum' of parameter embedding",
        ),
        ([part(0, 400), Entry(0, 7, 0, "value", torch.ones(1))], {}, "piece 7 of set 0, which it"),
        ([part(0, 400), Entry(9, 0, 0, "value", torch.ones(1))], {}, "piece 0 of set 9, which it"),
        ([part(0, 400), Entry(0, -1, 0, "value", torch.ones(1))], {}, "a tensor '0/-1/0/value'"),
    ],
)
def test_a_proof_finds_what_is_missing_or_too_much(
    tmp_path: Path, entries: list[Entry], described: PieceState, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        rewritten(tmp_path, entries, described).verify()


def test_state_of_a_whole_piece_keeps_its_shape(tmp_path: Path) -> None:
    rows = torch.arange(40.0).view(40, 1)
    described = {"row_var": Whole("float32", (40, 1)), "step": OneValue("float32", 0, 3.0)}
    entries = [part(0, 400), Entry(0, 0, 0, "state.row_var", rows)]
    checkpoint = rewritten(tmp_path, entries, described)  # type: ignore[arg-type]
    checkpoint.verify()
    assert checkpoint.state_of(0, 0) == described
    assert torch.equal(checkpoint.read_whole(0, 0, "state.row_var"), rows)
    described["row_var"] = Whole("float32", (1, 40))
    with pytest.raises(CheckpointError, match=r"state.row_var of parameter embedding is not there"):
        rewritten(tmp_path, entries, described).verify()  # type: ignore[arg-type]


def test_servers_that_say_different_things_of_a_piece_are_noticed(tmp_path: Path) -> None:
    made, folder = Made(workers=1), Folder(tmp_path)
    path = folder.begin("step-00000100")
    records = []
    for server in range(2):
        held = {
            at: {**its, "step": OneValue("float32", 0, server)} for at, its in made.states.items()
        }
        plain = states.to_json(held)
        target = path / f"server-{server}.safetensors"
        records.append(write_file(target, made.entries(server, 2), plain))
    folder.commit("step-00000100", made.index(records, servers=2), keep=1)
    with pytest.raises(CheckpointError, match=r"server-1.safetensors: other optimizer state of"):
        folder.open("step-00000100").verify()


def test_state_that_cannot_be_cut_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="optimizer state 'q' cannot be kept"):
        states.to_json({(0, 0): {"q": Uncut("a deque")}})


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"states": 3},
        {"states": [], "more": 1},
        {"states": [[0, 0]]},
        {"states": [[0, 0, []]]},
        {"states": [[0, True, [["a", "plain", 1]]]]},
        {"states": [[0, -1, [["a", "plain", 1]]]]},
        {"states": [[0, 0, [["a", "plain", 1]]], [0, 0, [["a", "plain", 1]]]]},
        {"states": [[0, 0, [["a", "plain", 1], ["a", "plain", 1]]]]},
        {"states": [[0, 0, [["a\n", "plain", 1]]]]},
        {"states": [[0, 0, [["a", "uncut", "x"]]]]},
        {"states": [[0, 0, [["a", "plain", "x"]]]]},
        {"states": [[0, 0, [["a", "plain"]]]]},
        {"states": [[0, 0, [["a", "elements", "complex64"]]]]},
        {"states": [[0, 0, [["a", "elements", []]]]]},
        {"states": [[0, 0, [["a", "one", "float32", -1, 0.0]]]]},
        {"states": [[0, 0, [["a", "one", "float32", 0, None]]]]},
        {"states": [[0, 0, [["a", "whole", "float32", [3]]]]]},
        {"states": [[0, 0, [["a", {}, 1]]]]},
        {"states": [[0, 0, [[f"key{n}", "plain", 1] for n in range(17)]]]},
        {"misses": [[0, [1], [1]]]},
    ],
)
def test_descriptions_of_state_that_no_server_writes_are_refused(content: object) -> None:
    with pytest.raises(CheckpointError, match=r"^it: damaged: optimizer state that cannot be read"):
        states.from_json(content, where="it")


def with_misses(folder: Folder, *told: Mapping[int, Misses]) -> Checkpoint:
    """A checkpoint of as many servers, whose files say this of missed rounds."""
    made = Made(workers=2)
    path = folder.begin("step-00000100")
    records = [
        write_file(
            path / f"server-{server}.safetensors",
            made.entries(server, len(told)),
            states.to_json(made.states, each),
        )
        for server, each in enumerate(told)
    ]
    folder.commit("step-00000100", made.index(records, servers=len(told)), keep=1)
    return folder.open("step-00000100")


def test_what_groups_have_missed_comes_back(tmp_path: Path) -> None:
    misses = Misses(running=(3, 0), in_all=(100, 0))
    checkpoint = with_misses(Folder(tmp_path), {}, {0: misses})
    checkpoint.verify()
    assert checkpoint.misses(0) == misses
    assert checkpoint.misses(1) is None
    for wrong in (
        ({0: misses}, {0: misses}),
        ({0: Misses(running=(0, 0, 0), in_all=(0, 0, 0))},),
        ({0: replace(misses, in_all=(101, 0))},),
        ({9: misses},),
    ):
        with pytest.raises(CheckpointError, match="damaged: missed rounds of set"):
            with_misses(Folder(tmp_path), *wrong).verify()


@pytest.mark.parametrize(
    "told",
    [
        3,
        [[0, [0]]],
        [[0, [0], [0, 0]]],
        [[0, [-1], [0]]],
        [[0, [1], [0]]],
        [[0, [0.5], [1]]],
        [[0, [0], [0]], [0, [0], [0]]],
        [[-1, [0], [0]]],
        [[0, ["0"], [0]]],
        [[0, 0, 0]],
    ],
)
def test_missed_rounds_that_no_server_writes_are_refused(told: object) -> None:
    with pytest.raises(CheckpointError, match=r"^it: damaged: missed rounds that cannot be read"):
        states.misses_from_json({"states": [], "misses": told}, where="it")


def test_what_a_list_and_a_proof_need_imports_no_torch(tmp_path: Path) -> None:
    checkpoint = Made().write(Folder(tmp_path))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from psdist.checkpoint.folder import Folder\n"
        f"found = Folder(Path({str(tmp_path)!r})).newest_good(print)\n"
        "sys.exit(repr([found.name, {'torch', 'mpi4py'} & set(sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == f"[{checkpoint.name!r}, set()]\n"
    assert done.stdout == ""
