"""Hooks of the whole process: whose objects come and go while torch calls them."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from psdist.workers.model.other_optimizers import OtherOptimizers, ProcessHook


class Watch:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_call(self, value: int) -> None:
        self.seen.append(value)


def test_a_hook_is_registered_once_and_calls_those_who_live_and_were_not_left_out() -> None:
    registered = []
    hook = ProcessHook(registered.append)
    first, second, third = Watch(), Watch(), Watch()
    for each in (first, second, third):
        hook.call(each.on_call)
    hook.leave_out(first.on_call)
    hook.leave_out(first.on_call)
    del third
    assert len(registered) == 1
    registered[0](7)
    assert (first.seen, second.seen) == ([], [7])


def test_a_watch_that_dies_while_torch_calls_hooks_does_not_end_the_step() -> None:
    model = nn.Linear(2, 1)
    held: list[OtherOptimizers] = []
    handle = register_optimizer_step_pre_hook(lambda *_: held.clear())  # torch calls it first
    held.append(OtherOptimizers(*(torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))))
    try:
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert held == []
