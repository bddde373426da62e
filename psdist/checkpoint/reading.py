"""One checkpoint: what it holds, in parts, and the proof that it is whole.

    checkpoint = Checkpoint.open(Path("runs/a/checkpoints/step-00000100"))
    checkpoint.verify()                                         # CheckpointError
    checkpoint.read_stretch(0, 3, 0, 4096, "state.exp_avg")     # a tensor, whatever files hold it
    plain, tensors = checkpoint.worker(0)

Only what reads tensors imports torch. A file's header is read once, its values at each call.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from operator import gt
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from psdist.checkpoint import index as indexes
from psdist.checkpoint.container import ITEM_BYTES, Contents, Stored, read_header
from psdist.checkpoint.index import FileRecord, Index, PieceRecord
from psdist.checkpoint.states import from_json, misses_from_json
from psdist.checkpoint.strict import open_regular, parse_json, quoted, read_text
from psdist.errors import CheckpointError
from psdist.protocol.checkpoints import Misses
from psdist.protocol.optimizer_state import PerElement, PieceState, Whole
from psdist.protocol.partition import master_dtype

if TYPE_CHECKING:
    import torch

VALUE: Final = "value"
STATE: Final = "state."
_READ_BYTES: Final = 8 << 20
_MOST_THREADS: Final = 4
_CODES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
"""safetensors' names of what a server may hold."""


Elements: TypeAlias = tuple[int, int, int, int]
"""Set, piece, the first one in the order of its memory, and how many."""


class _Stretch(NamedTuple):
    start: int
    path: Path
    stored: Stored

    @property
    def stop(self) -> int:
        return self.start + self.stored.num_bytes // ITEM_BYTES[self.stored.dtype]


def read_values(path: Path) -> tuple[object, dict[str, torch.Tensor]]:
    """Read a file of psdist.checkpoint.tensors.write_tensors, for psdist.checkpoint.tree.unpack.
    Raises :class:`CheckpointError`."""
    return _values(path, _header_of(path))


def _header_of(path: Path) -> Contents:
    with open_regular(path) as opened:
        try:
            return read_header(opened, where=quoted(path))
        except OSError as error:
            raise CheckpointError(f"{quoted(path)}: {error.strerror}") from None


def _values(path: Path, contents: Contents) -> tuple[object, dict[str, torch.Tensor]]:
    from psdist.checkpoint.tensors import read_tensor

    plain = parse_json(contents.text or "null", where=quoted(path))
    return plain, {key: read_tensor(path, its) for key, its in contents.tensors.items()}


class Checkpoint:
    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the index. Raises :class:`CheckpointError`."""
        where = path / indexes.NAME
        text = read_text(where, max_bytes=indexes.MAX_BYTES)
        return cls(path, indexes.decode(text, where=quoted(where)))

    @property
    def name(self) -> str:
        return self.path.name

    # -- what it holds -------------------------------------------------------------------------

    def read_stretch(
        self, set_index: int, piece: int, start: int, length: int, key: str = VALUE
    ) -> torch.Tensor:
        """1-D: elements of a piece, in the order of its memory, from element ``start`` on. ``key``:
        "value", or "state.KEY" for state that has elements. Raises :class:`CheckpointError`."""
        from psdist.checkpoint.tensors import allocate, read_into

        stretches = self._stretches.get((set_index, piece, key), [])
        at = max(bisect_right(stretches, start, key=lambda each: each.start) - 1, 0)
        code = stretches[0].stored.dtype if stretches else "F32"
        found = allocate(code, length)
        done = 0
        for each in stretches[at:]:
            here = start + done
            count = min(each.stop - here, length - done)
            if count <= 0 or each.start > here or each.stored.dtype != code:
                break
            read_into(found[done : done + count], each.path, each.stored, here - each.start)
            done += count
        if done != length:
            raise CheckpointError(
                f"{quoted(self.path)} has no {key} of element {start + done} of "
                f"{self._describe(set_index, piece)}"
            )
        return found

    def read_whole(self, set_index: int, piece: int, key: str) -> torch.Tensor:
        """State that belongs to the whole piece, in a shape of its own."""
        _, _, stored = self._whole(set_index, piece, key)
        num_elements = stored.num_bytes // ITEM_BYTES[stored.dtype]
        return self.read_part(set_index, piece, key, 0, num_elements).view(stored.shape)

    def read_part(
        self, set_index: int, piece: int, key: str, start: int, length: int
    ) -> torch.Tensor:
        """1-D: elements of such state, in the order of its memory, from element ``start`` on."""
        from psdist.checkpoint.tensors import allocate, read_into

        _, path, stored = self._whole(set_index, piece, key)
        found = allocate(stored.dtype, length)
        read_into(found, path, stored, start)
        return found

    def _whole(self, set_index: int, piece: int, key: str) -> _Stretch:
        stretches = self._stretches.get((set_index, piece, key), [])
        if len(stretches) != 1:
            raise CheckpointError(
                f"{quoted(self.path)} has no {key} of {self._describe(set_index, piece)}"
            )
        return stretches[0]

    def state_of(self, set_index: int, piece: int) -> PieceState:
        """Return the optimizer's state of a piece; {} if there is none."""
        return dict(self._states.get((set_index, piece), {}))

    def misses(self, set_index: int) -> Misses | None:
        """How many rounds of a set each group had missed; None where no group might miss any.
        Raises :class:`CheckpointError`."""
        return self._misses.get(set_index)

    def worker(self, worker: int) -> tuple[object, dict[str, torch.Tensor]]:
        """Return the state of worker ``worker``, for psdist.checkpoint.tree.unpack. Raises
        :class:`CheckpointError`, also if there is no such worker."""
        name = f"worker-{worker}.safetensors"
        contents = self._contents.get(name)
        if contents is None:
            raise CheckpointError(f"{quoted(self.path)} has nothing of worker {worker}")
        return _values(self.path / name, contents)

    @property
    def workers(self) -> list[int]:
        """Those that kept something."""
        names = (file.name for file in self.index.files if file.name.startswith("worker-"))
        return sorted(int(name.removeprefix("worker-").partition(".")[0]) for name in names)

    def _describe(self, set_index: int, piece: int) -> str:
        sets = self.index.sets
        if set_index < len(sets) and piece < len(sets[set_index].pieces):
            return f"parameter {sets[set_index].pieces[piece].name}"
        return f"piece {piece} of set {set_index}, which it does not have"

    # -- files ---------------------------------------------------------------------------------

    @cached_property
    def _contents(self) -> dict[str, Contents]:
        return {file.name: self._header(file) for file in self.index.files}

    def _header(self, file: FileRecord) -> Contents:
        return _header_of(self.path / file.name)

    @cached_property
    def _stretches(self) -> dict[tuple[int, int, str], list[_Stretch]]:
        found: dict[tuple[int, int, str], list[_Stretch]] = defaultdict(list)
        for name, contents in self._contents.items():
            if not name.startswith("server-"):
                continue
            path = self.path / name
            for tensor, stored in contents.tensors.items():
                numbers, key = tensor.split("/", 3)[:3], tensor.split("/", 3)[-1]
                if len(numbers) != 3 or not all(map(_is_number, numbers)):
                    raise CheckpointError(f"{quoted(path)}: damaged: a tensor {tensor!r:.80}")
                set_index, piece, start = map(int, numbers)
                found[set_index, piece, key].append(_Stretch(start, path, stored))
        for stretches in found.values():
            stretches.sort(key=lambda each: each.start)
        return dict(found)

    @cached_property
    def _states(self) -> dict[tuple[int, int], PieceState]:
        found: dict[tuple[int, int], PieceState] = {}
        for name, contents in self._contents.items():
            if not name.startswith("server-"):
                continue
            where = quoted(self.path / name)
            content = parse_json(contents.text, where=where)
            for at, state in from_json(content, where=where).items():
                if repr(found.setdefault(at, state)) != repr(state):
                    raise CheckpointError(
                        f"{where}: other optimizer state of {self._describe(*at)} than in another "
                        "server's file"
                    )
        return found

    @cached_property
    def _misses(self) -> dict[int, Misses]:
        found: dict[int, Misses] = {}
        for name, contents in self._contents.items():
            if not name.startswith("server-"):
                continue
            where = quoted(self.path / name)
            told = misses_from_json(parse_json(contents.text, where=where), where=where)
            for index, each in told.items():
                sets = self.index.sets
                clocks = sets[index].clocks if index < len(sets) else ()
                is_known = index in found or len(each.in_all) != len(clocks)
                if is_known or any(map(gt, each.in_all, clocks)):
                    raise CheckpointError(
                        f"{where}: damaged: missed rounds of set {index}, that are not of its "
                        "groups, or told twice"
                    )
            found |= told
        return found

    # -- the proof -----------------------------------------------------------------------------

    def verify(self, wanted: Iterable[Elements] | None = None) -> None:
        """Prove that every file exists with its length and checksum, and that together they hold
        every element of every parameter. ``wanted``: the elements needed; of other files only the
        headers are read. Raises :class:`CheckpointError`."""
        self.check_sizes()
        files = self.index.files
        if wanted is not None:
            names = self._files_of(wanted)
            files = tuple(file for file in files if file.name in names)
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            for problem in pool.map(self._checksum_problem, files):
                if problem:
                    raise CheckpointError(problem)
        self.check_contents()

    def _files_of(self, wanted: Iterable[Elements]) -> set[str]:
        """Names of their files: a file with a value has its optimizer state, too."""
        return {
            each.path.name
            for set_index, piece, start, length in wanted
            for each in self._stretches.get((set_index, piece, VALUE), [])
            if each.start < start + length and start < each.stop
        }

    def check_sizes(self) -> None:
        """A part of :meth:`verify` that takes no time."""
        for file in self.index.files:
            path = self.path / file.name
            with open_regular(path) as opened:
                num_bytes = opened.seek(0, 2)
            if num_bytes != file.num_bytes:
                raise CheckpointError(
                    f"{quoted(path)}: damaged: {num_bytes:,} bytes, {file.num_bytes:,} were written"
                )

    def _checksum_problem(self, file: FileRecord) -> str:
        path = self.path / file.name
        crc = 0
        try:
            with open_regular(path) as opened:
                while data := opened.read(_READ_BYTES):
                    crc = zlib.crc32(data, crc)
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{quoted(path)}: cannot be read: {error.strerror}"
        if crc != file.crc32:
            return f"{quoted(path)}: damaged: its checksum is {crc:08x}, not {file.crc32:08x}"
        return ""

    def check_contents(self) -> None:
        """The other part: what the headers say of the tensors."""
        self.misses(0)  # damage is told
        keys: dict[tuple[int, int], set[str]] = {at: set() for at in self._states}
        for set_index, piece, key in self._stretches:
            keys.setdefault((set_index, piece), set()).add(key)
        for set_index, each in enumerate(self.index.sets):
            for piece, record in enumerate(each.pieces):
                self._check_piece(set_index, piece, record, keys.pop((set_index, piece), set()))
        for set_index, piece in keys:
            raise CheckpointError(
                f"{quoted(self.path)}: damaged: {self._describe(set_index, piece)}"
            )

    def _check_piece(self, set_index: int, piece: int, record: PieceRecord, keys: set[str]) -> None:
        """``keys``: those that its tensors have."""
        wanted = {VALUE: _CODES[master_dtype(record.dtype)]}
        whole: dict[str, Whole] = {}
        for key, entry in self.state_of(set_index, piece).items():
            if isinstance(entry, PerElement):
                wanted[STATE + key] = _CODES[entry.dtype]
            elif isinstance(entry, Whole):
                whole[STATE + key] = entry
        for key, code in wanted.items():
            self._check_covered(set_index, piece, key, code, record.num_elements)
        for key, its in whole.items():
            self._check_whole(set_index, piece, key, its)
        for key in sorted(keys - wanted.keys() - whole.keys()):
            raise CheckpointError(
                f"{quoted(self.path)}: damaged: {key!r:.80} of "
                f"{self._describe(set_index, piece)} is not described"
            )

    def _check_covered(
        self, set_index: int, piece: int, key: str, code: str, num_elements: int
    ) -> None:
        reached = 0
        for each in self._stretches.get((set_index, piece, key), []):
            is_flat = len(each.stored.shape) == 1
            if each.start != reached or each.stored.dtype != code or not is_flat:
                break
            reached = each.stop
        if reached != num_elements:
            raise CheckpointError(
                f"{quoted(self.path)}: damaged: {key} of {self._describe(set_index, piece)} is not "
                f"there, in {code}, from element {reached} on"
            )

    def _check_whole(self, set_index: int, piece: int, key: str, wanted: Whole) -> None:
        found = [each.stored[:2] for each in self._stretches.get((set_index, piece, key), [])]
        if found != [(_CODES[wanted.dtype], wanted.shape)]:
            raise CheckpointError(
                f"{quoted(self.path)}: damaged: {key} of {self._describe(set_index, piece)} is not "
                "there"
            )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15


@dataclass(frozen=True)
class KeptSet:
    """A parameter set of a checkpoint."""

    checkpoint: Checkpoint
    set_index: int

    @property
    def num_pieces(self) -> int:
        return len(self.checkpoint.index.sets[self.set_index].pieces)

    def state(self, piece: int) -> PieceState:
        """Return the description of the piece's state."""
        return self.checkpoint.state_of(self.set_index, piece)

    def read(self, piece: int, key: str, start: int, length: int) -> torch.Tensor:
        """Return elements, in the order of memory, of state that is kept whole."""
        return self.checkpoint.read_part(self.set_index, piece, STATE + key, start, length)
