"""``psdist export CKPT OUT``: a model out of a checkpoint, for use without psdist.

export(Path("runs/a"), Path("model.safetensors"))     # bit by bit what job.save wrote there
export_rows(Path("runs/a"), Path("rows.safetensors"), table="*")     # job.save(..., tables=...)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

import torch

from psdist.checkpoint import tree
from psdist.checkpoint.reading import STATE, Checkpoint, KeptSet
from psdist.checkpoint.strict import quoted
from psdist.commands.checkpoints import find
from psdist.errors import CheckpointError, OptimizerRefusedError, UsageError
from psdist.protocol.memory import state_dtype, torch_dtype
from psdist.protocol.optimizer_state import OneValue, PerElement, Plain, Whole
from psdist.servers.shard.optimizer_classes import construct, find_class, is_torch
from psdist.servers.shard.regions import HELD
from psdist.servers.tables.checkpoints import num_rows_in, rows_in, tables_in
from psdist.tables.row_files import row_file
from psdist.workers.model.saving import SUFFIX, write_tensors

CHIEF: Final = 0


def export(
    path: Path, out: Path, *, model: int | None = None, form: Literal["safetensors", "dcp"]
) -> int:
    """Writes model number ``model`` of the checkpoint at ``path``, or of the newest good one of a
    run; the exit status. Raises :class:`CheckpointError` and :class:`UsageError`."""
    if form == "safetensors" and out.suffix != SUFFIX:
        raise UsageError(f"psdist export: {quoted(out)}: the file's name must end in {SUFFIX}")
    checkpoint = find(path)
    names = _names_of(checkpoint, model)
    tensors = {
        name: each if isinstance(each, torch.Tensor) else value_of(checkpoint, *each)
        for name, each in names.items()
    }
    try:
        if form == "dcp":
            write_dcp(out, checkpoint, names, tensors)
        else:
            write_tensors(out, tensors)
    except OSError as error:
        raise UsageError(f"psdist export: {quoted(out)} cannot be written: {error}") from None
    print(f"{quoted(out)}: {len(tensors)} tensors of {quoted(checkpoint.path)}")
    return 0


def export_rows(path: Path, out: Path, *, table: str) -> int:
    """Write the rows of the tables whose names match ``table``, one block in memory at a time;
    return the exit status. Raises as :func:`export`. psdist.tables.row_files describes the file."""
    if out.suffix != SUFFIX:
        raise UsageError(f"psdist export: {quoted(out)}: the file's name must end in {SUFFIX}")
    checkpoint = find(path)
    set_index = next((at for at, each in enumerate(checkpoint.index.sets) if each.tables), None)
    if set_index is None:
        raise UsageError(f"psdist export --table: {quoted(checkpoint.path)} has no tables")
    kept = KeptSet(checkpoint, set_index)
    specs = replace(tables_in(kept), num_parts=1)
    chosen = {at: its for at, its in enumerate(specs.tables) if fnmatchcase(its.name, table)}
    if not chosen:
        raise UsageError(
            f"psdist export --table {table}: {quoted(checkpoint.path)} has the tables "
            + ", ".join(each.name for each in specs.tables)
        )
    num_rows = num_rows_in(kept)
    dims = {each.name: each.dim for each in chosen.values()}
    numbers = {each.name: num_rows[at] for at, each in chosen.items()}
    done = dict.fromkeys(dims, 0)
    try:
        with row_file(out, dims, numbers) as file:
            for at, _, rows in rows_in(kept, specs, part=0):
                if at in chosen:
                    name = chosen[at].name
                    file.write(name, done[name], rows.ids, rows.values)
                    done[name] += len(rows.ids)
    except OSError as error:
        raise UsageError(f"psdist export: {quoted(out)} cannot be written: {error}") from None
    told = ", ".join(f"{each} {done[each]:,}" for each in done)
    print(f"{quoted(out)}: rows of {quoted(checkpoint.path)}: {told}")
    return 0


Names = dict[str, "tuple[int, int] | torch.Tensor"]
"""Name in a model's state_dict -> (set, piece) if it is trained, else the tensor."""


def _names_of(checkpoint: Checkpoint, number: int | None) -> Names:
    kept: Any = tree.unpack(*checkpoint.worker(CHIEF))
    models = kept.get("models") if isinstance(kept, dict) else None
    if not isinstance(models, list) or not all(map(_are_names, models)):
        raise CheckpointError(f"{quoted(checkpoint.path)}: worker 0 has not kept a model's names")
    if number is None and len(models) != 1:
        raise UsageError(
            f"psdist export: {quoted(checkpoint.path)} has {len(models)} models: say which, "
            f"--model 0 to {len(models) - 1}, in the order of job.prepare"
        )
    if not 0 <= (number or 0) < len(models):
        raise UsageError(
            f"psdist export: --model {number}: {quoted(checkpoint.path)} has {len(models)} models, "
            "counted from 0"
        )
    names: Names = models[number or 0]
    sets = checkpoint.index.sets
    for each in names.values():
        is_known = isinstance(each, torch.Tensor) or (
            each[0] < len(sets) and each[1] < len(sets[each[0]].pieces)
        )
        if not is_known:
            raise CheckpointError(
                f"{quoted(checkpoint.path)}: damaged: a name is of piece {each}, which it lacks"
            )
    return names


def _are_names(names: object) -> bool:
    return isinstance(names, dict) and all(
        isinstance(name, str)
        and (
            isinstance(each, torch.Tensor)
            or (
                isinstance(each, tuple)
                and len(each) == 2
                and all(type(number) is int and number >= 0 for number in each)
            )
        )
        for name, each in names.items()
    )


def value_of(checkpoint: Checkpoint, set_index: int, piece: int) -> torch.Tensor:
    """A parameter in its own dtype and shape."""
    record = checkpoint.index.sets[set_index].pieces[piece]
    flat = checkpoint.read_stretch(set_index, piece, 0, record.num_elements)
    return torch.as_strided(flat.to(torch_dtype(record.dtype)), record.shape, record.stride)


def state_of(checkpoint: Checkpoint, set_index: int, piece: int) -> dict[str, Any]:
    """A parameter's optimizer state, as torch has it."""
    record = checkpoint.index.sets[set_index].pieces[piece]
    state: dict[str, Any] = {}
    for key, entry in checkpoint.state_of(set_index, piece).items():
        if key == HELD:
            continue  # no part of the optimizer's
        if isinstance(entry, PerElement):
            count = record.num_elements
            flat = checkpoint.read_stretch(set_index, piece, 0, count, STATE + key)
            state[key] = torch.as_strided(flat, record.shape, record.stride).contiguous()
        elif isinstance(entry, Whole):
            state[key] = checkpoint.read_whole(set_index, piece, STATE + key)
        elif isinstance(entry, OneValue):
            dtype = state_dtype(entry.dtype)
            state[key] = torch.full((1,) * entry.dims, entry.value, dtype=dtype)
        elif isinstance(entry, Plain):
            state[key] = entry.value
    return state


def write_dcp(
    out: Path, checkpoint: Checkpoint, names: Names, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a folder that torch.distributed.checkpoint.load reads into get_state_dict's result.

    Only written, never read: torch unpickles such a folder. Raises OSError, and :class:`UsageError`
    for a folder that holds something.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"psdist export: {quoted(out)} is there: give a folder that is new")
    content = {"model": dict(tensors), "optim": _optimizers(checkpoint, names)}
    with warnings.catch_warnings():
        # That it assumes to be one process: it is.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(content, checkpoint_id=str(out))


def _optimizers(checkpoint: Checkpoint, names: Names) -> dict[str, Any]:
    """Return the state of the sets that train the model, as torch's get_optimizer_state_dict: by
    parameters' names, each under its first."""
    first_names: dict[tuple[int, int], str] = {}
    for name, each in names.items():
        if isinstance(each, tuple):
            first_names.setdefault(each, name)
    states, groups = {}, []
    for set_index in sorted({at[0] for at in first_names}):
        record = checkpoint.index.sets[set_index]
        its = {piece: name for (of, piece), name in first_names.items() if of == set_index}
        for piece, name in its.items():
            if state := state_of(checkpoint, set_index, piece):
                states[name] = state
        for number, hyper in enumerate(record.hyperparameters):
            members = [
                name
                for piece, name in its.items()
                if record.pieces[piece].optimizer_group == number
            ]
            groups.append({**_defaults(record.optimizer, hyper), **hyper, "params": members})
    return {"state": states, "param_groups": groups}


def _defaults(optimizer: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the class adds to a group and that choose how a step is computed."""
    if not is_torch(optimizer):
        return {}
    try:
        found = find_class(optimizer)
        made = construct(found, [torch.zeros(2, 2)], hyper, is_fused=False)
    except OptimizerRefusedError:
        return {}
    accepts = inspect.signature(found).parameters
    own = {
        key: accepts[key].default
        for key in made.defaults
        if key in accepts and accepts[key].default is not inspect.Parameter.empty
    }
    return {**made.defaults, **{key: own[key] for key in ("foreach", "fused") if key in own}}
