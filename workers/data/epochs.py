"""``for epoch in job.epochs(n)``: the script's loops over epochs. A resumed run continues them.

epochs = Epochs(on_boundary=..., on_start=..., on_resume=...)
for epoch in epochs.loop(5): ...
epochs.current                          # 5: epochs of the loop; None outside
tree = epochs.collect(is_between=True)  # and in another process, before the loop:
epochs.restore(tree)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from psdist.errors import UsageError


class _Loop:
    def __init__(self, epoch: int, num_epochs: int) -> None:
        self.epoch = epoch
        """The current epoch, or the next one."""
        self.num_epochs = num_epochs
        self.is_begun = False
        self.is_over = False

    @property
    def has_more(self) -> bool:
        return self.epoch < self.num_epochs


class Epochs:
    def __init__(
        self,
        *,
        on_boundary: Callable[[], None],
        on_start: Callable[[bool], None],
        on_resume: Callable[[], None],
    ) -> None:
        """``on_boundary()``: called between two epochs and after the last one;
        ``on_start(is_again)``: called at the start of an epoch. ``is_again``: the checkpoint was
        made in it; ``on_resume()``: called where the checkpoint was made between epochs."""
        self._on_boundary = on_boundary
        self._on_start = on_start
        self._on_resume = on_resume
        self._loops: list[_Loop] = []
        self._restored: list[dict[str, Any]] = []

    @property
    def num_loops(self) -> int:
        """Loops that the script has begun."""
        return len(self._loops)

    @property
    def current(self) -> int | None:
        """Epochs of the current loop; None outside."""
        loop = self._loops[-1] if self._loops else None
        return loop.num_epochs if loop is not None and not loop.is_over else None

    @property
    def within(self) -> tuple[int, int] | None:
        """(Number of the loop in the script, epoch); None outside."""
        loop = self._loops[-1] if self._loops else None
        return (self.num_loops - 1, loop.epoch) if loop is not None and loop.is_begun else None

    def loop(self, num_epochs: int) -> Iterator[int]:
        if type(num_epochs) is not int or num_epochs < 0:
            raise UsageError(f"job.epochs: a whole number >= 0, got {num_epochs!r}")
        if self.current is not None:
            raise UsageError("job.epochs was called in a loop over job.epochs; one counts both")
        return self._run(num_epochs)

    def _run(self, num_epochs: int) -> Iterator[int]:
        told = self._restored.pop(0) if self._restored else None
        is_resumed = told is not None and not self._restored  # else there was a later loop
        loop = _Loop(0 if told is None else told["epoch"], num_epochs)
        self._loops.append(loop)
        is_again = is_resumed and told is not None and told["is_inside"] and loop.has_more
        try:
            if is_resumed and not is_again:
                self._on_resume()
            elif told is None:
                self._on_boundary()
            while loop.has_more and not (told is not None and told["is_over"]):
                loop.is_begun = True
                self._on_start(is_again)
                is_again = False
                yield loop.epoch
                loop.is_begun = False
                loop.epoch += 1
                self._on_boundary()
        finally:
            loop.is_over = True

    def collect(self, *, is_between: bool) -> list[dict[str, Any]]:
        """Return a tree of plain values. ``is_between``: the current epoch is complete."""
        return [
            {
                "epoch": each.epoch + (each.is_begun and is_between),
                "is_inside": each.is_begun and not is_between,
                "is_over": each.is_over,
            }
            for each in self._loops
        ]

    def restore(self, tree: list[dict[str, Any]]) -> None:
        self._restored = [
            {
                "epoch": int(each["epoch"]),
                "is_inside": bool(each["is_inside"]),
                "is_over": bool(each["is_over"]),
            }
            for each in tree
        ]
