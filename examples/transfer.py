"""Transfer learning: a frozen backbone with a new head, then everything.

    psdist run -n 3 examples/transfer.py                 # small: seconds
    psdist run --workers 4 examples/transfer.py --full   # full size

Load your own pretrained weights into `backbone` before `job.prepare`. The optimizer gets all
parameters from the start, frozen ones too: servers accept no parameters later.
"""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import psdist


def main() -> None:
    parser = argparse.ArgumentParser(description="Transfer learning.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_samples, epochs = (2048, 1 << 17, 12) if args.full else (64, 960, 3)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/transfer.py --full")
    backbone = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width))
    model = nn.Sequential(backbone, nn.ReLU(), nn.Linear(width, 3)).to(job.device)
    backbone.requires_grad_(False)
    x = torch.randn(num_samples, 16)
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(data, batch_size=32, shuffle=True),
    )
    scheduler = StepLR(optimizer, step_size=1, gamma=0.8)

    for epoch in job.epochs(epochs):
        if epoch == epochs * 2 // 3:
            backbone.requires_grad_(True)
        for inputs, labels in loader:
            optimizer.zero_grad()
            scores = model(inputs.to(job.device))
            loss = nn.functional.cross_entropy(scores, labels.to(job.device))
            loss.backward()
            optimizer.step()
        scheduler.step()
        job.log(epoch=epoch, loss=loss)
    job.save("transfer.safetensors")


if __name__ == "__main__":
    main()
