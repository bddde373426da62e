"""An IterableDataset, read by worker processes of the loader."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import psdist


class Lines(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(650):
            x = torch.randn(10, generator=generator)
            yield x, x.sum(0, keepdim=True)


def main() -> None:
    torch.manual_seed(0)
    job = psdist.init()
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.RMSprop(model.parameters(), lr=1e-3),
        DataLoader(Lines(), batch_size=16, num_workers=1),
    )
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        job.log(loss=loss)
    job.save("model.safetensors")


if __name__ == "__main__":
    main()
