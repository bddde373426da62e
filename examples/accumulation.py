"""Gradient accumulation with automatic mixed precision and clipping.

    psdist run -n 3 examples/accumulation.py                 # small: seconds
    psdist run --workers 4 examples/accumulation.py --full   # full size

Each worker accumulates four batches in one step of the optimizer.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psdist

ACCUMULATED = 4
"""Batches of one optimizer step."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Accumulation with mixed precision.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    width, num_samples, epochs = (2048, 1 << 17, 10) if args.full else (64, 1024, 2)

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/accumulation.py --full")
    model = nn.Sequential(
        nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    ).to(job.device)
    x = torch.randn(num_samples, 10)
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True),
    )
    scaler = torch.amp.GradScaler(job.device.type)

    for epoch in job.epochs(epochs):
        for index, (inputs, targets) in enumerate(loader):
            with torch.autocast(job.device.type, dtype=torch.bfloat16):
                outputs = model(inputs.to(job.device)).float()
                loss = nn.functional.mse_loss(outputs, targets.to(job.device)) / ACCUMULATED
            scaler.scale(loss).backward()
            if (index + 1) % ACCUMULATED == 0:
                scaler.unscale_(optimizer)
                job.clip_grad_norm_(1.0)  # the norm of the group's gradient
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        job.log(epoch=epoch, loss=loss * ACCUMULATED)
    job.save("accumulation.safetensors")


if __name__ == "__main__":
    main()
