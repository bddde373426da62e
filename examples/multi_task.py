"""Two tasks on one body: each head has no gradient in every other batch.

    psdist run -n 3 examples/multi_task.py                 # small: seconds
    psdist run --workers 4 examples/multi_task.py --full   # full size

The data are made up: ten numbers, a class and their sum.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import psdist


class TwoHeads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width))
        self.classify, self.regress = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, x: Tensor, task: str) -> Tensor:
        features = self.body(x)
        return self.classify(features) if task == "class" else self.regress(features)


def main() -> None:
    parser = argparse.ArgumentParser(description="Two tasks on one body.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_samples, epochs = (2048, 1 << 17, 10) if args.full else (32, 960, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/multi_task.py --full")
    model = TwoHeads(width).to(job.device)
    x = torch.randn(num_samples, 10)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    data = TensorDataset(x, labels, x.sum(1, keepdim=True))
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.NAdam(model.parameters(), lr=2e-3),
        DataLoader(data, batch_size=16, shuffle=True),
    )

    for epoch in job.epochs(epochs):
        for index, batch in enumerate(loader):
            inputs, label, value = (each.to(job.device) for each in batch)
            optimizer.zero_grad()
            if index % 2:
                loss = nn.functional.cross_entropy(model(inputs, "class"), label)
            else:
                loss = nn.functional.mse_loss(model(inputs, "value"), value)
            loss.backward()
            optimizer.step()
        job.log(epoch=epoch, loss=job.mean(loss))
    job.save("multi_task.safetensors")


if __name__ == "__main__":
    main()
