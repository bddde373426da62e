"""Averaged weights (torch.optim.swa_utils), with batch norm's statistics computed again at the end.

    psdist run -n 3 examples/ema.py                 # small: seconds
    psdist run --workers 4 examples/ema.py --full   # full size

The data are made up: ten numbers and their sum.
"""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import psdist


def main() -> None:
    parser = argparse.ArgumentParser(description="Averaged weights.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_samples, epochs = (2048, 1 << 17, 20) if args.full else (32, 960, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/ema.py --full")
    model = nn.Sequential(
        nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)
    ).to(job.device)
    x = torch.randn(num_samples, 10)
    y = x.sum(1, keepdim=True)
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True),
    )
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=False)

    for epoch in job.epochs(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(job.device)), targets.to(job.device))
            loss.backward()
            optimizer.step()
            ema_model.update_parameters(model)
        job.log(epoch=epoch, loss=loss)
    with torch.no_grad():
        update_bn(loader, ema_model, device=job.device)  # on this worker's part of the data
        ema_model.eval()
        averaged = nn.functional.mse_loss(ema_model(x[:960].to(job.device)).cpu(), y[:960])
    job.log(loss=loss, averaged=job.mean(averaged))
    job.save("ema.safetensors", model)


if __name__ == "__main__":
    main()
