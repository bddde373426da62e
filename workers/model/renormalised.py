"""Embeddings that write to their weight in forward (``max_norm``), which cannot be trained so.

    refuse_renormalised(module, parameters)

Each worker would renormalise the rows of its own batch, and the servers would not see it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from psdist.errors import ModelError


def refuse_renormalised(
    module: torch.nn.Module, parameters: Collection[torch.nn.Parameter]
) -> None:
    """Raise :class:`ModelError` if ``module`` has an embedding with ``max_norm`` whose weight is
    one of ``parameters``, those that the servers hold."""
    held = {id(each) for each in parameters}
    for name, each in module.named_modules():
        if not isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if each.max_norm is not None and id(each.weight) in held:
            weight = f"{name}.weight" if name else "weight"
            norms = f"{each.norm_type:g}, 0, {each.max_norm:g}"
            raise ModelError(
                f"module {name or '(the model)'} ({type(each).__name__}) has max_norm = "
                f"{each.max_norm:g}, which writes to {weight} in forward, where the servers do not "
                "see it; build it without max_norm and renormalise with `with torch.no_grad(): "
                f"weight.renorm_({norms})` before job.prepare() and, followed by job.push(), after "
                "each optimizer.step()"
            )
