"""A checkpoint of a module and its optimizers in this process, as a server and a worker write it.

checkpoint = write(Folder(run_dir), module, [torch.optim.Adam(module.parameters())])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psdist.checkpoint import states, tree
from psdist.checkpoint.folder import Folder, name_of
from psdist.checkpoint.index import Index, SetRecord
from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.tensors import Entry, write_file, write_tensors
from psdist.protocol.memory import torch_dtype
from psdist.protocol.optimizer_state import PerElement
from psdist.protocol.optimizers import hyperparameters
from psdist.protocol.partition import master_dtype
from psdist.workers.model.description import ModelDescription
from psdist.workers.model.optimizer_state import describe_state


def flat(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The elements in the order of memory of this stride."""
    found = torch.empty(value.numel(), dtype=value.dtype)
    torch.as_strided(found, value.shape, stride).copy_(value.detach())
    return found


def write(
    folder: Folder,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    step: int = 1,
) -> Checkpoint:
    entries: list[Entry] = []
    described: dict[tuple[int, int], Any] = {}
    names: dict[str, Any] = {}
    records = []
    for set_index, optimizer in enumerate(optimizers):
        model = ModelDescription.of(module, optimizer)
        partition = model.cut(chunk_bytes=None, mode="sync", extra_optimizers=())
        its = describe_state(optimizer, model)
        for piece, parameter in enumerate(model.parameters):
            stride = partition.pieces[piece].stride
            master = torch_dtype(master_dtype(partition.pieces[piece].dtype))
            values = flat(parameter, stride).to(master)
            entries.append(Entry(set_index, piece, 0, "value", values))
            if piece in its:
                described[set_index, piece] = its[piece]
            for key, entry in its.get(piece, {}).items():
                if isinstance(entry, PerElement):
                    elements = flat(optimizer.state[parameter][key], stride)
                    entries.append(Entry(set_index, piece, 0, f"state.{key}", elements))
        for name, value in model.saved_names(module).items():
            if isinstance(value, int):
                names[name] = (set_index, value)
            else:
                names.setdefault(name, value)
        hyper = hyperparameters(optimizer.param_groups, known=optimizer.defaults)
        records.append(
            SetRecord.of(partition, optimizer=model.optimizer, clocks=(step,), hyper=hyper)
        )
    path = folder.begin(name_of(step))
    plain, tensors = tree.pack({"models": [names]})
    files = (
        write_file(path / "server-0.safetensors", entries, states.to_json(described)),
        write_tensors(path / "worker-0.safetensors", tensors, plain),
    )
    index = Index(
        psdist="0.1.0",
        time="2026-01-31T12:00:00Z",
        attempt=1,
        mode="sync",
        seed=0,
        world=2,
        servers=1,
        groups=((0,),),
        sets=tuple(records),
        files=files,
    )
    folder.commit(name_of(step), index, 3)
    return folder.open(name_of(step))
