"""A checkpoint in the format of torch.distributed.checkpoint, which reads it in any script:

    model_state, optimizer_state = get_state_dict(model, optimizer)      # torch's
    state = {"model": model_state, "optim": optimizer_state}
    torch.distributed.checkpoint.load(state, checkpoint_id="out")

Only written, and by one process: torch reads such a folder by unpickling, and psdist never does.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.strict import quoted
from psdist.commands.checkpoints.exporting import Names, state_of
from psdist.errors import OptimizerRefusedError, UsageError
from psdist.servers.shard.optimizer_classes import construct, find_class, is_torch


def write(
    out: Path, checkpoint: Checkpoint, names: Names, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises OSError, and :class:`UsageError` for a folder that holds something."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"psdist export: {quoted(out)} is there: give a folder that is new")
    content = {"model": dict(tensors), "optim": _optimizers(checkpoint, names)}
    with warnings.catch_warnings():
        # That it assumes to be one process: it is.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(content, checkpoint_id=str(out))


def _optimizers(checkpoint: Checkpoint, names: Names) -> dict[str, Any]:
    """Of the sets that train the model, as torch's get_optimizer_state_dict: by parameters' names,
    each under its first."""
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
    """What the class adds to a group: those keys that choose how a step is computed."""
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
