"""Averaged weights (torch.optim.swa_utils), with batch norm's statistics computed anew."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import psdist

torch.manual_seed(0)
job = psdist.init()
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
x = torch.randn(960, 10)
model, optimizer, loader = job.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True),
)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        ema_model.update_parameters(model)
with torch.no_grad():
    update_bn(loader, ema_model)
    ema_model.eval()
    averaged = float(nn.functional.mse_loss(ema_model(x), x.sum(1, keepdim=True)))
job.log(loss=loss, averaged=job.mean(averaged))
job.save("model.safetensors")
