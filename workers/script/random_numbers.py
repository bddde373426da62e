"""The random number generators of a worker's process, as a tree of plain values and tensors.

before = random_numbers.collect(device)
random_numbers.restore(before, device)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from psdist.errors import CheckpointError


def collect(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's, torch's, and that of the worker's GPU."""
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


def restore(tree: Mapping[str, Any], device: torch.device) -> None:
    """Raises :class:`CheckpointError` for what :func:`collect` has not told."""
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
