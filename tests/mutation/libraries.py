"""Imports what is slow to import, so that children need not: libraries only, nothing of psdist."""

from __future__ import annotations

import sys
from importlib import import_module

SLOW = (
    *("torch", "numpy", "pytest", "hypothesis", "hypothesis.stateful", "hypothesis.strategies"),
    *("msgpack", "pydantic", "pydantic.dataclasses", "rich.console", "rich.table"),
    *("typer", "safetensors.torch", "mpi4py", "_pytest.assertion.rewrite", "pytest_timeout"),
    *("torch.distributed", "torch.nn", "torch.optim", "hypothesis.extra.numpy"),
)


def load() -> None:
    for name in SLOW:
        import_module(name)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "psdist")
    if ours:
        raise RuntimeError(f"imported before any mutant: {ours}")
