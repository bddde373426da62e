"""The script's part of a checkpoint as one tree: collected, and restored.

    script = ScriptState(device=device, loaders=..., epochs=..., tell=print)
    script.values["best"] = 0.9                       # job.state
    tree = script.collect(at=None)                    # plain values, tensors, arrays; live ones
    script.restore(tree, name="step-00000100")        # in another process, before anything else
    script.prepared(model, untrained, sets)           # job.prepare is done
    script.resume()                                   # training continues from the checkpoint

Everything is restored twice: as soon as the script has made the object, and again when training
continues. So the script cannot change the restored state on its way there.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from psdist.errors import CheckpointError
from psdist.workers.data.epochs import Epochs
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.seen import Pass, has_returned_samples
from psdist.workers.script.attached import Attached

FORMAT: Final = 1


class OwnOptimizer(Protocol):
    @property
    def name(self) -> str:
        """Name of its class."""
        ...

    def told(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (number, state) of each of its parameters."""
        ...

    def take(self, told: Sequence[Sequence[Any]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ScriptModel:
    """A prepared model as a checkpoint sees it."""

    module: torch.nn.Module
    names: Callable[[], Mapping[str, tuple[int, int] | torch.Tensor]]
    """Return its current ``state_dict()``, with (set, piece) for values that servers hold."""
    groups: Sequence[list[dict[str, Any]]]
    """The ``param_groups`` of each of its optimizers."""
    own: Sequence[OwnOptimizer | None] = ()
    """For each of its optimizers the one on this worker; None if servers hold the state."""


class ScriptState:
    def __init__(
        self,
        *,
        device: torch.device,
        loaders: Loaders,
        epochs: Epochs,
        is_chief: bool,
        tell: Callable[[str], None],
    ) -> None:
        """``tell(line)``: report a line to the user."""
        self.values: dict[str, Any] = {}
        """``job.state``."""
        self.attached = Attached(tell=tell)
        self._device = device
        self._loaders = loaders
        self._epochs = epochs
        self.is_chief = is_chief
        """True if this worker records the chief's values."""
        self._tell = tell
        self._models: list[ScriptModel] = []
        self._versions: dict[tuple[int, str], int] = {}
        """(id of the module, name of a frozen parameter) -> its version after ``prepare``, which
        has given it the chief's values."""
        self._restored: Mapping[str, Any] | None = None
        self._name = ""
        self._is_moved = False

    @property
    def is_resuming(self) -> bool:
        """True if training has not yet reached the place of the checkpoint."""
        return self._restored is not None

    # -- making a checkpoint ---------------------------------------------------------------------

    def collect(self, *, at: Pass | None) -> dict[str, Any]:
        """``at``: training continues with the next batch of this pass; None between epochs."""
        is_between = at is None
        return {
            "format": FORMAT,
            "models": [self._told_of(each) for each in self._models],
            "buffers": [_unsaved_buffers(each) for each in self._models],
            "extra": [_extra_states(each.module) for each in self._models],
            "groups": [[_plain(group) for group in each] for each in self._groups()],
            "own": [
                None if own is None else {"name": own.name, "state": own.told()}
                for own in self._own()
            ],
            "state": self.values,
            "attached": self.attached.collect(),
            "epochs": self._epochs.collect(is_between=is_between),
            "data": self._loaders.seen.collect(at=at),
            "random": _random_states(self._device),
        }

    def _groups(self) -> list[list[dict[str, Any]]]:
        return [groups for model in self._models for groups in model.groups]

    def _own(self) -> list[OwnOptimizer | None]:
        return [own for model in self._models for own in model.own]

    def _told_of(self, model: ScriptModel) -> dict[str, Any]:
        return {
            name: value
            for name, value in model.names().items()
            if self.is_chief
            or not isinstance(value, torch.Tensor)
            or self._is_own(model, name, value)
        }

    def _is_own(self, model: ScriptModel, name: str, tensor: torch.Tensor) -> bool:
        """True if it may differ from the chief's value. Frozen parameters are large and rarely
        do."""
        return self._versions.get((id(model.module), name)) != tensor._version

    # -- resuming --------------------------------------------------------------------------------

    def restore(self, tree: Mapping[str, Any], *, name: str, is_moved: bool = False) -> None:
        """``tree``: this worker's, or the chief's if the workers are others (``is_moved``).
        Raises :class:`CheckpointError` for a tree that :meth:`collect` has not made."""
        self._name, self._is_moved = name, is_moved
        try:
            if tree["format"] != FORMAT:
                raise CheckpointError(
                    f"checkpoint {name}: workers' files of format {tree['format']!r:.20}, this "
                    f"psdist reads {FORMAT}"
                )
            if has_returned_samples(tree["data"]):
                raise CheckpointError(
                    f"checkpoint {name}: its epoch has samples of a failed worker that were dealt "
                    "to other workers (samples_of_dead = return), which this psdist cannot "
                    "continue; delete this checkpoint to resume from an earlier one"
                )
            self._restored = tree
            _make_equal(self.values, tree["state"])
            self.attached.restore(tree["attached"])
            self._epochs.restore(tree["epochs"])
            lost = self._loaders.seen.restore(tree["data"], is_moved=is_moved)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {name}: a worker's file is damaged: {type(error).__name__}: {error}"
            ) from None
        for line in lost:
            self._tell(f"checkpoint {name}: {line}")

    def before_prepare(self, module: torch.nn.Module) -> None:
        """``module`` is prepared next. On the chief, whose values all workers get, restore it."""
        if self._restored is not None and self.is_chief:
            self._set_tensors(len(self._models), module)

    def prepared(self, model: ScriptModel) -> None:
        """``job.prepare`` has returned a model, or more optimizers of a known one."""
        known = [place for place, each in enumerate(self._models) if each.module is model.module]
        if known:
            self._models[known[0]] = model
        else:
            self._models.append(model)
        for name, parameter in model.module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                self._versions[id(model.module), name] = parameter._version
        if self._restored is not None:
            self._set_tensors(self._models.index(model), model.module)

    def resume(self) -> None:
        """Continue training here, with the whole state of the checkpoint."""
        tree = self._restored
        if tree is None:
            return
        for place, model in enumerate(self._models):
            self._set_tensors(place, model.module)
            self._set_extra_states(tree, place, model.module)
        self._set_groups(tree)
        self._set_own(tree)
        _make_equal(self.values, tree["state"])
        self.attached.resume()
        self._restored = None
        if self._is_moved:
            self._tell(
                f"checkpoint {self._name} is of other workers: buffers and what is attached are "
                "the chief's, the states of random numbers and the other workers' own are dropped"
            )
            return
        if "random" in tree:  # a substitute draws its own
            _restore_random(tree["random"], self._device)

    def _set_tensors(self, place: int, module: torch.nn.Module) -> None:
        assert self._restored is not None
        try:
            saved = {**self._restored["models"][place], **self._restored["buffers"][place]}
        except (IndexError, KeyError, TypeError):
            return  # more models than there were
        now = dict(module.state_dict(keep_vars=True))
        now.update(module.named_buffers())
        for name, value in saved.items():
            if not isinstance(value, torch.Tensor):
                continue
            tensor = now.get(name)
            if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
                has = "none" if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}"
                raise CheckpointError(
                    f"checkpoint {self._name} has {name}: {list(value.shape)}, {value.dtype}; the "
                    f"script's model has {has}"
                )
            if not torch.equal(tensor.detach().cpu(), value):
                with torch.no_grad():
                    tensor.copy_(value)

    def _set_extra_states(
        self, tree: Mapping[str, Any], place: int, module: torch.nn.Module
    ) -> None:
        saved = tree["extra"][place] if place < len(tree["extra"]) else {}
        within = dict(module.named_modules())
        for name, value in saved.items():
            if name not in within:
                raise CheckpointError(
                    f"checkpoint {self._name} has extra state of a module {name!r}, which the "
                    "script's model has not"
                )
            within[name].set_extra_state(copy.deepcopy(value))

    def _set_groups(self, tree: Mapping[str, Any]) -> None:
        now, saved = self._groups(), tree["groups"]
        if [len(each) for each in now] != [len(each) for each in saved]:
            raise CheckpointError(
                f"checkpoint {self._name} is of optimizers with {[len(each) for each in saved]} "
                f"parameter groups; the script's have {[len(each) for each in now]}"
            )
        for groups, told in zip(now, saved, strict=True):
            for group, values in zip(groups, told, strict=True):
                for key, value in values.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = copy.deepcopy(value)

    def _set_own(self, tree: Mapping[str, Any]) -> None:
        """Restore the state of optimizers that workers step themselves."""
        for own, saved in zip(self._own(), tree.get("own", ()), strict=False):
            if own is None or saved is None:
                continue
            if own.name != saved["name"]:
                raise CheckpointError(
                    f"checkpoint {self._name} has the state of {saved['name']} from its local "
                    f"steps; the script's optimizer is {own.name}"
                )
            own.take(saved["state"])


def _make_equal(now: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Change ``now`` in place: the script may hold the dicts and lists within."""
    for key in [each for each in now if each not in saved]:
        del now[key]
    for key, value in saved.items():
        held = now.get(key)
        if type(held) is type(value) is dict:
            _make_equal(held, value)
        elif type(held) is type(value) is list:
            held[:] = copy.deepcopy(value)
        else:
            now[key] = copy.deepcopy(value)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _unsaved_buffers(model: ScriptModel) -> dict[str, torch.Tensor]:
    """Return the buffers that its ``state_dict()`` omits."""
    saved = model.names()
    return {name: each for name, each in model.module.named_buffers() if name not in saved}


def _extra_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return the extra state of each inner module that has one (``get_extra_state``), by name."""
    return {
        name: each.get_extra_state()
        for name, each in module.named_modules()
        if type(each).get_extra_state is not torch.nn.Module.get_extra_state
    }


def _random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and the worker's GPU."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, of_numpy = np.random.get_state(legacy=True)
    found = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [str(kind), np.array(keys), int(position), int(has_gauss), float(of_numpy)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def _restore_random(tree: Mapping[str, Any], device: torch.device) -> None:
    """Set what :func:`_random_states` returned; :class:`CheckpointError` for anything else."""
    try:
        version, words, gauss = tree["python"]
        python = (version, tuple(int(each) for each in words.tolist()), gauss)
        random.setstate(python)
        kind, keys, position, has_gauss, of_numpy = tree["numpy"]
        np.random.set_state((kind, keys, position, has_gauss, of_numpy))
        torch.set_rng_state(tree["torch"])
        if device.type == "cuda" and "cuda" in tree:
            torch.cuda.set_rng_state(tree["cuda"], device)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of random numbers cannot be set: {error}") from None
