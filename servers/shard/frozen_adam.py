"""Adam and AdamW with a preconditioner that is frozen: the second moment stays as it was after so
many steps (Tang et al., 1-bit Adam, arXiv 2102.02888).

    frozen = FrozenAdam(after=1000)
    frozen.rules(state)                                   # whether the next step is such a one
    frozen.step(values, grad, state, group, lr)

In step t > T = ``after``, with v^ = v / (1 - beta2^T) of step T, and b the mean of v^ over the 256
values of a block,

    m  = beta1 m + (1 - beta1) g
    x  = x - lr m / (1 - beta1^t) / (sqrt(max(v^, b)) + eps)
    v  = v^ (1 - beta2^t)

so that v^ follows from v and t as before: a run that resumes from this state, frozen or not, has
the right one. A step is linear in the gradients: what a codec leaves out of one push and adds to a
later one moves parameters later by what it would have moved them then. With v that moves, it does
not, and what comes at once is squared. In the paper workers send their momentum; here they send
gradients, and the server's momentum is the same linear sum of them.

b is there because codecs have one scale for 256 values (psdist.codecs.blocks): what a small one of
them is sent as is as wrong as what a large one is, and divided by its own small v^ it would move
the parameter as far as no gradient ever has. (Without b sign ended 54 % behind, with it 0.1 %:
docs/guides/communication.md.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from psdist.codecs.blocks import blocks_of, counts_of


class FrozenAdam:
    def __init__(self, *, after: int) -> None:
        """``after``: steps of a parameter, from 1 up."""
        self._after = after

    def rules(self, state: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
        """``state``: the optimizer's of one parameter; None before its first step."""
        return state is not None and "step" in state and int(state["step"]) >= self._after

    def step(
        self,
        values: Tensor,
        grad: Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        lr: float,
    ) -> None:
        """One step in place; ``grad`` may be overwritten."""
        beta1, beta2 = group["betas"]
        count = state["step"].add_(1).item()
        if group["maximize"]:
            grad = grad.neg_()
        if group.get("decoupled_weight_decay", False):
            values.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add_(values, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        before, now = (1 - beta2**number for number in (count - 1, count))
        second = state["exp_avg_sq"].mul_(now / before)
        scale = _floored(second.view(-1) / now).view(second.shape).sqrt_().add_(group["eps"])
        values.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - beta1**count))


def _floored(second: Tensor) -> Tensor:
    """1-D; nothing below the mean of its block."""
    blocks, counts = blocks_of(second), counts_of(second)
    means = blocks.sum(dim=1, keepdim=True) / counts
    return torch.maximum(blocks, means).view(-1)[: len(second)]
