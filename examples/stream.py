"""An IterableDataset, read by worker processes of the loader.

    psdist run -n 3 examples/stream.py                 # small: seconds
    psdist run --workers 4 examples/stream.py --full   # full size

psdist shares the stream out among workers and their loader processes. These processes import this
file again, so its entry point is guarded.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import psdist


class Lines(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            x = torch.randn(10, generator=generator)
            yield x, x.sum(0, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A stream of samples.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_lines, epochs = (1024, 200_000, 5) if args.full else (32, 650, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/stream.py --full")
    model = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1)).to(job.device)
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.RMSprop(model.parameters(), lr=1e-3),
        DataLoader(Lines(num_lines), batch_size=16, num_workers=1),
    )

    for epoch in job.epochs(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(job.device)), targets.to(job.device))
            loss.backward()
            optimizer.step()
        job.log(epoch=epoch, loss=loss)
    job.save("stream.safetensors")


if __name__ == "__main__":
    main()
