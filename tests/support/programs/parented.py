"""A script that shows what its parent does for it: input, output, signals.

    psdist run -n 2 tests/support/programs/parented.py ask NOTES       # asks, then trains for long
    psdist run -n 3 tests/support/programs/parented.py note NOTES      # notes signals, and
    continues psdist run -n 3 tests/support/programs/parented.py write NOTES     # reads, writes and
    fails

NOTES is a folder: each worker appends the names of the signals that it gets to a file in it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
from output_of_parented import OUTPUT  # its neighbour

import psdist

EPOCHS = 1000


def main(what: str, notes: Path) -> None:
    job = psdist.init()

    def note(number: int, _frame: FrameType | None) -> None:
        with (notes / f"worker-{job.worker}").open("a") as file:
            file.write(f"{signal.Signals(number).name}\n")
        if what == "ask":
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    if what == "ask" and job.is_chief:
        name = input("name? ")
        print(f"hello {name}, on a terminal: {sys.stdin.isatty()}")
    if what == "write":
        read = sys.stdin.buffer.read()
        if job.is_chief:
            os.write(1, b"read " + read)
            for stream in (1, 2):
                left = OUTPUT
                while left:
                    left = left[os.write(stream, left) :]
        else:
            os.write(1, b"nothing\n" if read == b"" else b"the chief's input\n")
    model = torch.nn.Linear(4, 3)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if what == "write" and not job.is_chief:
        raise RuntimeError("as it was meant to")
    loader = job.loader([torch.ones(4)] * 8, batch_size=2, epochs=EPOCHS)
    (notes / f"worker-{job.worker}").touch()
    for _ in range(EPOCHS):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            time.sleep(0.02)


main(sys.argv[1], Path(sys.argv[2]))
