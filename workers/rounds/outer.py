"""The optimizer that servers run on rounds of local steps, as torch's: what a parameter set is then
described by.

outer = make_outer("nesterov:lr=0.7,momentum=0.9", inner)       # over the parameters of inner
"""

from __future__ import annotations

import torch

from psdist.config.outer import parse_outer
from psdist.errors import ConfigError


def make_outer(text: str, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One parameter group: what distinguishes those of ``inner`` stays on the workers. Raises
    :class:`ConfigError` for numbers that the optimizer does not take."""
    outer = parse_outer(text)
    parameters = [each for group in inner.param_groups for each in group["params"]]
    kind = getattr(torch.optim, outer.name)
    try:
        made = kind(parameters, **outer.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"outer = {text!r}: torch.optim.{outer.name} says: {error}") from None
    assert isinstance(made, torch.optim.Optimizer)
    return made
