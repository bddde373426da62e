"""``job.attach(name=obj)``: the script's own objects, whose state is in every checkpoint.

attached = Attached(tell=print)
attached.add({"scheduler": scheduler}, clock=0)
tree = attached.collect()                 # and in another process, before objects are attached:
attached.restore(tree)
attached.resume()                         # training continues from here
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from psdist.errors import CheckpointError, UsageError


class Attached:
    def __init__(self, *, tell: Callable[[str], None]) -> None:
        """``tell(line)``: report a line to the user."""
        self._tell = tell
        self._objects: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    def add(self, objects: Mapping[str, Any], *, has_begun: bool) -> None:
        """Raises :class:`UsageError`. ``has_begun``: training has begun, so nothing can be
        restored."""
        for name, each in objects.items():
            self._require_attachable(name, each)
            if has_begun:
                raise UsageError(
                    f"job.attach({name}=...) was called after training had begun, when a resumed "
                    "run could not give it its state back; attach after job.prepare, before the "
                    "loop"
                )
            self._objects[name] = each
            if self._restored is None:
                continue
            if name in self._restored:
                self._load(name)
            else:
                self._tell(
                    f"job.attach: {name} is not in the checkpoint that the run resumes; it keeps "
                    "the state that the script has given it"
                )

    def _require_attachable(self, name: str, each: Any) -> None:
        if name in self._objects:
            raise UsageError(f"job.attach: {name} is attached already; every name is of one object")
        if isinstance(each, torch.optim.Optimizer):
            raise UsageError(
                f"job.attach({name}=...): servers hold the state of a prepared optimizer, and "
                "every checkpoint has it; leave it out"
            )
        missing = [
            method
            for method in ("state_dict", "load_state_dict")
            if not callable(getattr(each, method, None))
        ]
        if missing:
            raise UsageError(
                f"job.attach({name}=...): a {type(each).__name__} has no {missing[0]}(); plain "
                "values belong into job.state"
            )

    def collect(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._objects.items()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Keep the state for the objects that the script will attach."""
        self._restored = dict(tree)

    def resume(self) -> None:
        """Restore the state of the checkpoint, replacing later changes of the script."""
        for name in self._objects:
            if self._restored is not None and name in self._restored:
                self._load(name)
        if left := sorted(set(self._restored or ()) - set(self._objects)):
            self._tell(
                f"the checkpoint has state of {', '.join(left)}, which this script has not "
                "attached; it is dropped"
            )
        self._restored = None

    def _load(self, name: str) -> None:
        assert self._restored is not None
        try:
            self._objects[name].load_state_dict(copy.deepcopy(self._restored[name]))
        except Exception as error:
            raise CheckpointError(
                f"job.attach: {name}, a {type(self._objects[name]).__name__}, does not take the "
                f"state that the checkpoint has of it: {type(error).__name__}: {error}"
            ) from error
