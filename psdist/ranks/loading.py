"""Importing what is large, quickly.

    with uncollected():
        import torch

Owns no choice of what is imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector lies still, and never looks at what is there by the end: modules and
    what they define, which stay. That is a fifth of the time torch takes to be imported, a third
    with what it takes to go away, and shortens every collection while the script trains."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
