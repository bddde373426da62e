"""Gradient accumulation with automatic mixed precision and clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psdist

ACCUMULATED = 4
torch.manual_seed(0)
job = psdist.init()
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
x = torch.randn(1024, 10)
model, optimizer, loader = job.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05),
    DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True),
)
scaler = torch.amp.GradScaler("cpu")
for _ in range(2):
    for index, (inputs, targets) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets) / ACCUMULATED
        scaler.scale(loss).backward()
        if (index + 1) % ACCUMULATED == 0:
            scaler.unscale_(optimizer)
            job.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    job.log(loss=loss)
job.save("model.safetensors")
