"""An optimizer of the user's own that works in the worker and breaks in the server."""

from __future__ import annotations

from typing import Any

import torch


class Exploding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        raise ZeroDivisionError("this optimizer divides by its number of steps")
